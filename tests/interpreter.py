"""Runs Triton kernels, MegaBlocks' and stk's too, on a CPU, by Triton's interpreter, which conftest.py switches on."""

import os
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from expertmesh.moe.kernels.megablocks import load_megablocks

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux", reason="Triton's interpreter is for machines without a GPU"
)
"""Marks tests that call `prepare_megablocks`. Triton comes for Linux alone; there, to lack it is no reason to skip."""

with_liger = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("liger_kernel") is None, reason="needs liger-kernel, and no GPU"
)
"""Marks tests that run liger-kernel's kernels by the interpreter (see `interpret_liger`)."""


def prepare_megablocks() -> None:
    """Import MegaBlocks in this process, such that its kernels run on CPU tensors, in fp32 (the interpreter has no
    bf16)."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    load_megablocks()
    from megablocks.backend import kernels
    from stk.backend import triton_kernels
    from triton.runtime import Autotuner

    for module in (kernels, triton_kernels):
        for kernel in vars(module).values():
            if isinstance(kernel, Autotuner):
                # with one configuration nothing is timed, for which Triton would look for a GPU
                kernel.configs = kernel.configs[:1]


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter round fp32 to bf16 and e4m3 as GPUs and torch do. By itself it cuts the last bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    as_it_was = InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar != tl.bfloat16:
            return as_it_was(self, source, dtype)
        rounded = torch.from_numpy(source.data.astype("float32")).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
    to_fp8 = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.float8e4nv):
            return to_fp8(self, source, dtype, rounding)
        rounded = torch.from_numpy(source.data).to(torch.float8_e4m3fn)
        return TensorHandle(rounded.view(torch.uint8).numpy(), dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)


def interpret_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have liger-kernel's norms run by the interpreter, which gives kernels numbers as Python's own, and knows nothing
    of libdevice."""
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    as_it_was = interpreter._implicit_cvt

    def implicit_cvt(argument: Any) -> Any:
        if not isinstance(argument, float):
            return as_it_was(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", implicit_cvt)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
