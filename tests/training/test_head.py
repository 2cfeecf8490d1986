"""The loss of the target tokens without whole logits, held against the loss from whole logits."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import training.head as head
from moe import ExpertMeshError
from sharding import Checkpointing, Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.distributed.test_parity import SAMPLES, assert_same
from tests.tiny import relative_error, save_model, tiny_mixtral
from training import attach_loss_head, choose_cross_entropy
from training.data import IGNORED, Sample, collate
from training.head import LOSS_SUMS, LossHead, Targets

WIDTH, VOCABULARY = 24, 200
ROW_BYTES = 4 * VOCABULARY
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def inputs(share: float, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Targets]:
    """x_BSD and weight_VD, which need gradients, and targets at that share of 3 x 17 positions."""
    generator = torch.Generator().manual_seed(5)
    x_BSD = torch.randn(3, 17, WIDTH, generator=generator)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets_BS = torch.randint(0, VOCABULARY, (3, 17), generator=generator)
    targets_BS[torch.rand(3, 17, generator=generator) >= share] = IGNORED
    index_N = (targets_BS != IGNORED).flatten().nonzero().squeeze(1)
    x_BSD, weight_VD = (t.to(device, dtype).requires_grad_() for t in (x_BSD, weight_VD))
    return x_BSD, weight_VD, Targets(targets_BS.to(device), index_N.to(device))


def loss_and_gradients(kind: str, x_BSD: Tensor, weight_VD: Tensor, targets: Targets) -> list[Tensor]:
    loss = LOSS_SUMS[kind](x_BSD, weight_VD, targets)
    assert loss.dtype == torch.float32
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, (x_BSD, weight_VD))]


@pytest.mark.parametrize("rows_in_chunk", [1, 7, 1000])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_chunked_equals_full(monkeypatch: pytest.MonkeyPatch, share: float, rows_in_chunk: int) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", rows_in_chunk * ROW_BYTES)
    found, expected = (loss_and_gradients(kind, *inputs(share)) for kind in ("chunked", "full"))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-6


def test_bf16_is_as_near_to_fp32_as_full_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 7 * ROW_BYTES)
    x_BSD, weight_VD, targets = inputs(0.4, torch.bfloat16)
    x_fp32_BSD, weight_fp32_VD = (t.detach().float().requires_grad_() for t in (x_BSD, weight_VD))
    exact = loss_and_gradients("full", x_fp32_BSD, weight_fp32_VD, targets)
    chunked, full = (loss_and_gradients(kind, x_BSD, weight_VD, targets) for kind in ("chunked", "full"))
    for one, other, true in zip(chunked, full, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, true) < max(1.5 * relative_error(other, true), 1e-3)


def test_large_logits_do_not_overflow() -> None:
    x_BSD, weight_VD, targets = inputs(1.0)
    scaled = (x_BSD.detach() * 1e4).requires_grad_()
    found, expected = (loss_and_gradients(kind, scaled, weight_VD, targets) for kind in ("chunked", "full"))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-6


class _LargestTensor(TorchDispatchMode):
    """The most elements that any tensor had which an operator returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(("kind", "within"), [("chunked", True), ("full", False)])
def test_logits_of_one_chunk_are_the_largest_tensor(monkeypatch: pytest.MonkeyPatch, kind: str, within: bool) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", WIDTH * ROW_BYTES)
    with _LargestTensor() as largest:
        loss_and_gradients(kind, *inputs(1.0))
    assert (largest.numel <= WIDTH * VOCABULARY) == within


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x_BSD, weight_VD, targets = inputs(0.4)
    monkeypatch.setattr(head, "_add_product", mock.Mock(side_effect=AssertionError("gradient work")))
    with torch.no_grad():
        loss = LOSS_SUMS["chunked"](x_BSD, weight_VD, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, LOSS_SUMS["full"](x_BSD, weight_VD, targets).detach())
    # a frozen head: the gradient of the rows alone
    loss = LOSS_SUMS["chunked"](x_BSD, weight_VD.detach(), targets)
    (grad,) = torch.autograd.grad(loss, x_BSD)
    (expected,) = torch.autograd.grad(LOSS_SUMS["full"](x_BSD, weight_VD, targets), x_BSD)
    assert relative_error(grad, expected) < 1e-6


def test_a_second_backward_is_refused() -> None:
    loss = LOSS_SUMS["chunked"](*inputs(0.4))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only once"):
        loss.backward()


@pytest.mark.parametrize("kind", ["chunked", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_head_in_a_model(kind: str, tied: bool) -> None:
    """In HF's own model: its logits without targets, its loss with them, and nothing left by a forward that failed."""
    model: Any = tiny_mixtral(tie_word_embeddings=tied)
    batch = collate([[sample] for sample in random_samples([9, 5, 12])])
    targets = {"targets_BS": batch.targets_BS, "target_index_N": batch.target_index_N}
    names = [name for name, _ in model.named_parameters()]
    logits_BSV = model(batch.tokens_BS).logits.detach()
    attach_loss_head(model, kind)
    assert isinstance(model.lm_head, LossHead)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(batch.tokens_BS).logits, logits_BSV)

    loss = model(batch.tokens_BS, **targets).logits
    expected = torch.nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(loss.detach(), expected)

    with mock.patch.object(type(model.model), "forward", side_effect=RuntimeError), pytest.raises(RuntimeError):
        model(batch.tokens_BS, **targets)
    assert torch.equal(model(batch.tokens_BS).logits, logits_BSV)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    save_model(path, **TIED)
    return path


@pytest.mark.parametrize("kind", ["chunked", "full"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_on_ranks(ranks: RankPool, model: Path, kind: str, checkpointing: Checkpointing) -> None:
    case = Case(SAMPLES[:16], cross_entropy=kind, gradient_checkpointing=checkpointing, changes=TIED)
    found = ranks.run(_two_rows_in_a_chunk, 4, model, Topology(4, 2), case)[0]
    assert_same(found, reference(case), case)


@pytest.mark.parametrize("kind", ["chunked", "full"])
def test_ranks_with_tokens_and_no_target(ranks: RankPool, model: Path, kind: str) -> None:
    nothing_to_learn = [Sample.of_prompt(sample.tokens, len(sample.tokens)) for sample in SAMPLES[1:4]]
    case = Case([SAMPLES[5], *nothing_to_learn], cross_entropy=kind, steps=1, changes=TIED)
    found = ranks.run(_two_rows_in_a_chunk, 4, model, Topology(4, 2), case)[0]
    assert_same(found, reference(case), case, cancelled=1e-3)


def _two_rows_in_a_chunk(path: Path, topology: Topology, case: Case) -> Figures | None:
    with mock.patch.object(head, "CHUNK_BYTES", 2 * 4 * 320):
        return ours(path, topology, case)


def test_choice() -> None:
    assert choose_cross_entropy("auto", "cpu") == "chunked"
    assert choose_cross_entropy("full", "cuda") == "full"
    with pytest.raises(ExpertMeshError, match="--cross-entropy liger needs a GPU"):
        choose_cross_entropy("liger", "cpu")
    with mock.patch.object(head, "find_spec", return_value=None):
        assert choose_cross_entropy("auto", "cuda") == "chunked"
        with pytest.raises(ExpertMeshError, match="pip install 'liger-kernel"):
            choose_cross_entropy("liger", "cuda")
    with mock.patch.object(head, "find_spec", return_value=mock.sentinel.found):
        assert choose_cross_entropy("auto", "cuda") == "liger"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_liger_equals_full(share: float, dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    x_BSD, weight_VD, targets = inputs(share, dtype, "cuda")
    found, expected = (loss_and_gradients(kind, x_BSD, weight_VD, targets) for kind in ("liger", "full"))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < (1e-5 if dtype == torch.float32 else 2e-2)
