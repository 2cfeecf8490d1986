"""Matmuls on a CPU."""
