"""Install the peers, each in a virtual environment of its own, from PyPI.

    python bench/peers/install.py

They go below ``WARMROUTE_PEERS`` (default: ``build/peers``). What is there in the wanted version
stays. Nothing else of the project needs them; nginx is used when the machine has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("vllm-router", "sglang-router")


def peers_directory() -> Path:
    """Return where the environments of the peers are."""
    told = os.environ.get("WARMROUTE_PEERS")
    return Path(told) if told else HERE.parents[1] / "build" / "peers"


def wanted(name: str) -> str:
    """Return the requirement of a peer: ``name==version``."""
    return (HERE / f"{name}.txt").read_text(encoding="utf-8").strip()


def peer_python(name: str) -> Path | None:
    """Return the interpreter that has the peer in the wanted version, None when there is none."""
    environment = peers_directory() / name
    stamp = environment / "installed.txt"
    is_there = stamp.exists() and stamp.read_text(encoding="utf-8").strip() == wanted(name)
    return environment / "bin" / "python" if is_there else None


def install(name: str) -> None:
    """Make the peer's environment new."""
    environment = peers_directory() / name
    print(f"installing {wanted(name)} into {environment}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    requirement = str(HERE / f"{name}.txt")
    subprocess.run([*pip, "install", "-qq", "--requirement", requirement], check=True)
    (environment / "installed.txt").write_text(wanted(name), encoding="utf-8")


if __name__ == "__main__":
    for peer in PEERS:
        if peer_python(peer) is None:
            install(peer)
