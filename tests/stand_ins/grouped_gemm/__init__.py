"""What MegaBlocks and `moe.megablocks.megablocks_kernels` use of the `grouped_gemm` package, which computes on GPUs
only."""

from grouped_gemm import backend, ops

__all__ = ["backend", "ops"]
