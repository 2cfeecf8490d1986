"""Dry run: the real code of one rank of any world, run on fake tensors, and a cost breakdown of all that it does."""
