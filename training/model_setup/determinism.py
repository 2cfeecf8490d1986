"""The same bits on every run with the same parallel layout (--deterministic)."""

import os

import torch

_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # for --attn-implementation flash_attention_2, read by transformers
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def set_determinism(is_on: bool) -> None:
    """Have torch take algorithms that give the same bits each time, and refuse where it has none; or, as it does by
    itself, the fastest, whatever it was set to before in this process.

    To be called before CUDA starts: cuBLAS reads its variable when its first handle is made. What torch does not know
    of gives the same bits as it is: our permutations have no scatter-add, and the Triton kernels no atomics.
    """
    for name, value in _VARIABLES.items():
        if is_on:
            os.environ.setdefault(name, value)
        elif os.environ.get(name) == value:
            del os.environ[name]
    torch.use_deterministic_algorithms(is_on)
    # torch would also write into all memory that it allocates, gathered parameters and received rows among it; nothing
    # here reads what was not written before
    torch.utils.deterministic.fill_uninitialized_memory = not is_on  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
