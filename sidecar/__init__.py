"""Beside each engine: the event adapter; and the bundled paged-KV worker."""
