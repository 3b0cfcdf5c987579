"""A language model's arithmetic over a paged KV cache: NumPy, and torch where it is installed."""
