"""The proxy process: HTTP, leases, relay, health, admin, metrics."""
