"""Attention in CUDA's kernels: packed samples, windows and sinks, and selective checkpointing that keeps its output."""

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.experts.forward import Forward
from expertmesh.sharding.parallelize.recompute import _ATTENTION, _ROUTING, _selective_contexts
from expertmesh.training.attention.flash import flash_attention
from expertmesh.training.attention.flash_kernels import FLASH_KERNELS, FlashKernels, computing_by, obstacle
from tests.moe.kernel_contract import Calls
from tests.rounding import OTHER_ORDER
from tests.sharding.test_kept_attention import _layer
from tests.training.test_attention import UNEQUAL, assert_same_as_under_a_mask
from tests.training.test_flash import WIDTHS, WINDOWS, assert_same_as_by_all_scores

WIDEST_ERROR = {torch.float32: OTHER_ORDER, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", WIDEST_ERROR, ids=str)
@pytest.mark.parametrize("widths", [(32, 32), *UNEQUAL])
def test_packed_samples(device: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    assert_same_as_under_a_mask(device, dtype, widths, WIDEST_ERROR[dtype])


@pytest.mark.parametrize("dtype", WIDEST_ERROR, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_windows_and_sinks(
    device: str, widths: tuple[int, int], window: int, has_sinks: bool, dtype: torch.dtype
) -> None:
    assert_same_as_by_all_scores(widths, window, has_sinks, device, dtype, WIDEST_ERROR[dtype])


@pytest.mark.parametrize("kernels", FLASH_KERNELS, ids=lambda kernels: kernels.package)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)])
def test_newer_flash_attention(kernels: FlashKernels, widths: tuple[int, int]) -> None:
    """On a card that it is for, with its package: samples of several lengths, windows, sinks, heads that share keys."""
    if reason := obstacle(kernels):
        pytest.skip(reason)

    def run(window: int, has_sinks: bool) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = ((300, 8, widths[0]), (300, 2, widths[0]), (300, 2, widths[1]))
        tensors = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
        query, key, value = (tensor.requires_grad_() for tensor in tensors)
        sinks = torch.randn(8, generator=generator, device="cuda").requires_grad_() if has_sinks else None
        out = flash_attention(query, key, value, (100, 7, 193), window=window, sinks_H=sinks)
        wanted = [query, key, value, *([] if sinks is None else [sinks])]
        return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]

    takes_windows = max(widths) <= 128 or torch.cuda.get_device_capability()[0] == 9
    cases = [(0, False), (0, True), *([(64, False), (64, True)] if takes_windows else [])]
    expected = [run(*case) for case in cases]
    with computing_by(kernels):
        found = [run(*case) for case in cases]
    for ours, theirs in zip(found, expected, strict=True):
        for tensor, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(tensor.float(), other.float(), rtol=2e-2, atol=2e-2)


KERNELS = {
    SDPBackend.FLASH_ATTENTION: "aten::_scaled_dot_product_flash_attention",
    SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention",
    SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention",
}


@pytest.mark.parametrize("backend", KERNELS)
def test_selective_checkpointing_does_not_attend_again(device: str, backend: SDPBackend) -> None:
    """Whichever kernel torch takes; and gradients keep every bit."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    operator = KERNELS[backend] if device == "cuda" else "aten::_scaled_dot_product_flash_attention_for_cpu"
    generator = torch.Generator().manual_seed(0)
    x_BSD, weight = torch.randn(2, 64, 128, generator=generator), torch.randn(128, 128, generator=generator)
    found = []
    for kept, calls in ((frozenset(), 1), (_ROUTING | _ATTENTION, 1), (_ROUTING, 2)):
        contexts = partial(_selective_contexts, kept)
        layer = partial(checkpoint, _layer, use_reentrant=False, context_fn=contexts) if kept else _layer
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x_BSD, weight)]
        with sdpa_kernel(backend), Forward(), Calls() as counted:
            grads = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
        assert counted.count[operator] == calls, counted.count
        found.append(grads)
    for plain, *others in zip(*found, strict=True):
        assert all(torch.equal(plain, other) for other in others)
