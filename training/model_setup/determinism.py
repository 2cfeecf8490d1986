"""The same bits on every run with the same parallel layout (--deterministic)."""

import os

import torch


def compute_deterministically() -> None:
    """Have torch take algorithms that give the same bits each time, and refuse where it has none.

    To be called before CUDA starts: cuBLAS reads its variable when its first handle is made. What torch does not know
    of gives the same bits as it is: our permutations have no scatter-add, and the Triton kernels no atomics.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # for --attn-implementation flash_attention_2, read by transformers
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    # torch would also write into all memory that it allocates, gathered parameters and received rows among it; nothing
    # here reads what was not written before
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
