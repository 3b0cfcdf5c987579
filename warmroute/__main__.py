"""``python -m warmroute``: the same as the console script."""

from __future__ import annotations

import sys

from warmroute.cli import main

if __name__ == "__main__":
    sys.exit(main())
