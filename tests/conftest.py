"""What holds for all tests: a machine that is busy, or stands still for a while, fails none."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# By default an example that takes more than 0.2 s fails, and so do ten that take a second to make.
# CI draws the same examples each time, so that it fails for what a change did; others draw anew.
settings.register_profile(
    "any-machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("any-machine")
