"""What is known about the fleet: prefix chains, residency, replicas, load, leases."""
