"""The environment variables that commands read: what must not stand in a list of processes."""

from __future__ import annotations

REDIS_VARIABLE = "WARMROUTE_REDIS"
"""A Redis URL, which may hold a password."""
ENGINE_KEY_VARIABLE = "WARMROUTE_ENGINE_API_KEY"
"""The key that engines want to see."""
