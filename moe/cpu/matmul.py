"""Matmuls on a CPU, by oneDNN or by torch's BLAS, usually MKL: whichever is faster on this machine.

On AMD's processors oneDNN may be twice as fast as MKL, on Intel's it is up to a fifth slower. The results differ only
in rounding.

Shape suffixes: M, K, N of a product a_MK · b_KN.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..util.gpu import computes_on_cpu
from .padding import padded_rows

Library = Literal["blas", "onednn"]
Product = Literal["forward", "input-gradient", "weight-gradient"]
"""Kinds of matmul, by which operand is transposed: x · Wᵀ, grad · W, gradᵀ · x."""

SMALL = 2**21
"""Below this number of multiplications a call of oneDNN costs more than it gains."""

MARGIN = 1.1
"""How many times as fast oneDNN must be in a probe to be used: it needs batches copied and padded."""

PROBED_MKN = (256, 512, 512)
PROBES = 5

_libraries: dict[Product, Library] = {"forward": "onednn", "input-gradient": "onednn", "weight-gradient": "onednn"}


def use_libraries(libraries: Mapping[Product, Library]) -> None:
    """From now on, in this process, compute these kinds of matmuls with these libraries. The default is oneDNN for
    all."""
    _libraries.update(libraries)


def libraries_in_use() -> dict[Product, Library]:
    return dict(_libraries)


def probe_libraries() -> dict[Product, float]:
    """How many times as fast oneDNN is as the BLAS, by this thread's own CPU time, on which other work of the machine
    has little influence. Takes some 50 ms. Weights' gradients are written to a given place, as they are in a step."""
    m, k, n = PROBED_MKN
    x_MK, weight_NK, grad_MN = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    place_NK = torch.empty(n, k)
    blas: dict[Product, Callable[[], Tensor]] = {
        "forward": lambda: x_MK @ weight_NK.t(),
        "input-gradient": lambda: grad_MN @ weight_NK,
        "weight-gradient": lambda: torch.mm(grad_MN.t(), x_MK, out=place_NK),
    }
    onednn: dict[Product, Callable[[], Tensor]] = {
        "forward": lambda: _onednn(x_MK, weight_NK.t()),
        "input-gradient": lambda: _onednn(grad_MN, weight_NK),
        "weight-gradient": lambda: place_NK.copy_(_onednn(grad_MN.t(), x_MK)),
    }
    return {product: _seconds(blas[product]) / _seconds(onednn[product]) for product in blas}


def faster_libraries(ratios: Mapping[Product, float]) -> dict[Product, Library]:
    """The faster library for each kind of matmul, by the ratios of `probe_libraries`."""
    return {product: "onednn" if ratio >= MARGIN else "blas" for product, ratio in ratios.items()}


def peak_of_products() -> float:
    """Floating point operations per second of CPU time of the faster library on one thread, for large matmuls."""
    n, threads = 1024, torch.get_num_threads()
    a_MK, b_KN = torch.randn(n, n), torch.randn(n, n)
    torch.set_num_threads(1)
    try:
        libraries = (torch.mm, _onednn) if has_onednn() else (torch.mm,)
        seconds = [_seconds(partial(multiply, a_MK, b_KN)) for multiply in libraries]
    finally:
        torch.set_num_threads(threads)
    return 2 * n**3 / min(seconds)


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def matmul(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """a_MK @ b_KN, written into `out_MN` (of any dtype) where that is given; without a gradient. Transposed views cost
    no copy."""
    if suits_onednn(a_MK, b_KN):
        product = _onednn(a_MK, b_KN) if out_MN is None else _onednn_in_any_layout(a_MK, b_KN)
    elif out_MN is not None and out_MN.dtype == a_MK.dtype:
        return torch.mm(a_MK, b_KN, out=out_MN)
    else:
        product = a_MK @ b_KN
    return product if out_MN is None else out_MN.copy_(product)


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum_MN += a_MK @ b_KN; a product in another dtype than the sum's is first rounded once to its own dtype."""
    if suits_onednn(a_MK, b_KN):
        sum_MN += _onednn_in_any_layout(a_MK, b_KN)
    elif a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        sum_MN += a_MK @ b_KN


def pad_rows(x_MK: Tensor) -> Tensor:
    """Pad with a few rows of zeros (from 512 rows on, less than a sixteenth), so that few different lengths occur:
    oneDNN compiles code for each length it meets, which takes longer than a small matmul. No padding where oneDNN is
    not used."""
    num_rows = len(x_MK)
    if not computes_on_cpu(x_MK) or padded_rows(num_rows) == num_rows or "onednn" not in _libraries.values():
        return x_MK
    return F.pad(x_MK, (0, 0, 0, padded_rows(num_rows) - num_rows))


def padded_matmul(x_MK: Tensor, b_KN: Tensor) -> Tensor:
    """x_MK @ b_KN, with `pad_rows` within, for the forward of an autograd function: no view of what has the padding's
    rows too. Autograd lets nobody change in place a view that a function returns, and models clamp projections so."""
    product = matmul(pad_rows(x_MK), b_KN)
    return product if len(product) == len(x_MK) else product[: len(x_MK)].data


def suits_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    is_fp32_on_cpu = computes_on_cpu(a_MK) and a_MK.dtype == torch.float32
    is_large = a_MK.numel() * b_KN.shape[1] >= SMALL
    return is_fp32_on_cpu and is_large and _libraries[_product(a_MK, b_KN)] == "onednn" and has_onednn()


def _product(a_MK: Tensor, b_KN: Tensor) -> Product:
    if a_MK.stride(0) == 1:
        return "weight-gradient"
    return "forward" if b_KN.stride(0) == 1 else "input-gradient"


def _onednn(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    return product


def _onednn_in_any_layout(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The product, maybe as a transposed view, so that only the smaller operand is copied: oneDNN copies a transposed
    left operand, such as all logits' gradients for the head's weight."""
    is_turned = _product(a_MK, b_KN) == "weight-gradient" and a_MK.numel() > b_KN.numel()
    return _onednn(b_KN.t(), a_MK.t()).t() if is_turned else _onednn(a_MK, b_KN)


def _seconds(multiply: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of a few calls, without the first, in which oneDNN compiles."""
    multiply()
    best = math.inf
    for _ in range(PROBES):
        begin = time.thread_time()
        multiply()
        best = min(best, time.thread_time() - begin)
    return best
