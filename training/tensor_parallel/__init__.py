"""Tensor parallelism, applied to a finished model: what the ranks of a group divide, and how it runs."""
