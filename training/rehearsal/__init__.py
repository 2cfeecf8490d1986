"""The real code of one rank of any world, run with tensors that hold no memory, and an account of all that it does."""
