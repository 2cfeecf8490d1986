"""Norms and rotary positions by liger-kernel's Triton kernels on a GPU, in place of transformers' code, which reads and
writes full tensors for each of its operators."""

from collections.abc import Hashable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ...moe.util.change_order import begin_change
from .liger_norm import Norm, may_be_norm, use_liger_norm
from .liger_rotary import use_liger_rotary


def is_installed() -> bool:
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def use_liger(model: Any, dtype: torch.dtype) -> str:
    """Have the model's RMS norms and rotary positions computed by liger's kernels, in place, where a trial on this
    process's GPU shows that they compute what the family's own code does (`training.fused.trial`). Names of parameters
    and classes of modules stay. For models on a GPU: elsewhere all is computed as before, to the bit.

    What is compiled (`compile_layers`) stays as it is.

    Returns:
        A line for a run's first ones: what is taken, and what is not.
    """
    begin_change(model, "liger")
    if not is_installed():
        return "norms and rotary positions: transformers' own; faster ones: pip install 'expertmesh[gpu]'"
    # a dry run has no GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    modules: dict[str, nn.Module] = dict(model.named_modules())
    compiled = {p for module in modules.values() if module._compiled_call_impl is not None for p in module.modules()}
    known: dict[Hashable, Norm | None] = {}
    verdicts: dict[str, bool] = {}
    for module in modules.values():
        if module not in compiled and may_be_norm(module):
            kind = type(module).__name__
            verdicts[kind] = use_liger_norm(module, dtype, device, known) and verdicts.get(kind, True)
    for name in sorted({type(module).__module__ for module in modules.values()}):
        verdicts |= use_liger_rotary(name, dtype, device)
    taken, left = ([name for name, is_taken in verdicts.items() if is_taken is each] for each in (True, False))
    line = f"norms and rotary positions by liger-kernel: {', '.join(taken) or 'none'}"
    return f"{line}; by transformers, because liger's differ or do not run: {', '.join(left)}" if left else line
