"""torch, where it is installed; whoever computes with it takes it from here."""

from __future__ import annotations

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    message = "compute: torch is not installed; install warmroute[engine]"
    raise ImportError(message) from error

__all__ = ["torch"]
