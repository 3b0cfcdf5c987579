"""Build the compiled helpers: of the index, and of the words of vocabularies.

    python -m warmroute.native

Compiles each beside its source with ``$CC`` or ``cc``. Routers take what is there and go on without
the rest: an index then takes three times the memory, and new text more CPU.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Final

from prompt import native_word
from state import native
from state.compiled import build, opened

_ENVIRONMENT_COMPILER: Final = "CC"
_SOURCES: Final = (native.SOURCE, native_word.SOURCE)


def main() -> int:
    """Build all and try each; say where they are."""
    compiler = shlex.split(os.environ.get(_ENVIRONMENT_COMPILER) or "cc")
    for source in _SOURCES:
        try:
            built = build(source, compiler=compiler)
            opened(built)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{source.stem}: not built, routers go on without it: {error}", file=sys.stderr)
            return 1
        print(built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
