"""Make an environment with a real SGLang that computes on the CPU: ``install.py FOLDER``.

Python 3.11, from PyPI. SGLang asks for CUDA packages that nothing on this path calls: what is left
of its requirements is ``requirements.txt`` here, without theirs. Two packages are stood in for by
empty modules: ``sgl_kernel`` has no wheel for CPUs, and ``torchvision`` none for this torch. torch
is the CPU build where pip is told where to find it; the CUDA build works as well, and is large.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
STAND_INS: Final = "sglang_stand_ins"
VISION: Final = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"


def install(folder: Path) -> None:
    """Make ``folder`` a new environment."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    packages = ("--no-deps", "--requirement", str(HERE / "requirements.txt"))
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / f"{STAND_INS}.py").write_text((HERE / "stand_ins.py").read_text())
    (site / f"{STAND_INS}.pth").write_text(f"import {STAND_INS}\n")
    told = site / "torchvision-0.28.0.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text(VISION)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
