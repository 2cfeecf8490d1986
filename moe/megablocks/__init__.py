"""MegaBlocks' kernels, operators and layer."""
