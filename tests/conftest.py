"""What holds for all tests: a machine that is busy, or stands still for a while, fails none."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# By default an example that takes more than 0.2 s fails, and so do ten that take a second to make.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")
