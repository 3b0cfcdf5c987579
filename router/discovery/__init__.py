"""Replicas that nobody registered and the configuration does not name: files, DNS, Kubernetes."""
