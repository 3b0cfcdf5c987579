"""The Python that torch is in, for tests: setting up never installs it.

``WARMROUTE_ENGINE`` names it, or its environment; without it ``WARMROUTE_VLLM`` does, which has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

VARIABLES: Final = ("WARMROUTE_ENGINE", "WARMROUTE_VLLM")
ROOT: Final = Path(__file__).parents[2]
SCRIPT_S: Final = 600.0


class NoTorchError(Exception):
    """There is no Python with torch to test with; the text says what to do."""


def engine_python() -> Path:
    """Return the Python that the environment names; raises NoTorchError."""
    named = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    if named is None:
        message = f"{VARIABLES[0]} is not set: name an environment with torch, or its Python"
        raise NoTorchError(message)
    path = Path(named).absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    elif path.name == "vllm":
        path = path.with_name("python")
    if not os.access(path, os.X_OK):
        message = f"{VARIABLES[0]}={named}: {path} is no executable"
        raise NoTorchError(message)
    return path


def facts(script: str, *words: str) -> dict[str, Any]:
    """Return the JSON that a script of ``tests/support`` prints last, run by that Python.

    Raises NoTorchError with the end of what it said when it fails.
    """
    ran = subprocess.run(
        [engine_python(), "-P", ROOT / "tests" / "support" / script, *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "bench", ROOT / "tests"))),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",  # spinning threads starve each other on a busy machine
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=SCRIPT_S,
    )
    if ran.returncode:
        message = f"{script} failed:\n{ran.stderr[-3000:]}"
        raise NoTorchError(message)
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
