"""Norms and rotary positions in kernels of our own."""
