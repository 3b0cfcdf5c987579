"""All seeded bugs."""

from __future__ import annotations

from typing import Final

from bugs import seeded_fleet, seeded_request

BUGS: Final = (*seeded_request.BUGS, *seeded_fleet.BUGS)
