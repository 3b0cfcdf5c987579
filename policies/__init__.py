"""Pure routing decisions on a frozen snapshot; one file a policy."""
