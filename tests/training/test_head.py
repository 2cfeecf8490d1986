"""The chunked loss of the target tokens, tested against the loss from unchunked logits."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

import expertmesh.training.loss.head as head
from expertmesh.moe.experts.forward import Forward, Targets
from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.hf_model.build import build_model
from expertmesh.sharding.state import state_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import IGNORED, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.loss.head import (
    LOSS_SUMS,
    LossHead,
    attach_loss_head,
    full_logprobs,
    loss_head,
    token_logprobs,
)
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours, reference
from tests.interpreter import interpreted
from tests.parity.case import SAMPLES, Case, Figures, random_samples
from tests.parity.compare import assert_same
from tests.parity.rows import EXACT
from tests.rounding import OTHER_ORDER, assert_near, gradient_errors
from tests.tiny import loaded, relative_error, save_model, tiny_mixtral

WIDTH, VOCABULARY = 24, 200
ROW_BYTES = 4 * VOCABULARY
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
TIED: dict[str, Any] = {"tie_word_embeddings": True}


Inputs = tuple[Tensor, Tensor, Tensor | None, Targets]


def inputs(
    share: float,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    has_bias: bool = False,
    is_weighted: bool = False,
) -> Inputs:
    """x_BSD, weight_VD and bias_V, which need gradients, and targets at that share of 3 x 17 positions."""
    generator = torch.Generator().manual_seed(5)
    x_BSD = torch.randn(3, 17, WIDTH, generator=generator)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets_BS = torch.randint(0, VOCABULARY, (3, 17), generator=generator)
    targets_BS[torch.rand(3, 17, generator=generator) >= share] = IGNORED
    index_N = (targets_BS != IGNORED).flatten().nonzero().squeeze(1)
    bias_V = torch.randn(VOCABULARY, generator=generator)
    x_BSD, weight_VD, bias_V = (t.to(device, dtype).requires_grad_() for t in (x_BSD, weight_VD, bias_V))
    weights_N = weights_of(len(index_N)).to(device) if is_weighted else None
    targets = Targets(targets_BS.to(device), index_N.to(device), weights_N=weights_N)
    return x_BSD, weight_VD, bias_V if has_bias else None, targets


def weights_of(number: int) -> Tensor:
    """From 0 to 3; some are 0."""
    weights_N = torch.rand(number, generator=torch.Generator().manual_seed(7)) * 3
    return weights_N.where(weights_N > 0.3, 0.0)


def loss_and_gradients(kind: str, given: Inputs) -> list[Tensor]:
    x_BSD, weight_VD, bias_V, targets = given
    loss = LOSS_SUMS[kind](x_BSD, weight_VD, bias_V, targets)
    assert loss.dtype == torch.float32
    learnt = [tensor for tensor in (x_BSD, weight_VD, bias_V) if tensor is not None]
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, learnt)]


@pytest.mark.parametrize("rows_in_chunk", [1, 7, 1000])
def test_chunked_equals_full(monkeypatch: pytest.MonkeyPatch, rows_in_chunk: int) -> None:
    """Whatever the share of targets, with a bias and without, with weights and without, and where logits are large."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", rows_in_chunk * ROW_BYTES)
    of_each = [1.0, 0.4, 0.0], [False, True], [False, True], [1.0, 1e4]
    for share, has_bias, is_weighted, scale in itertools.product(*of_each):
        x_BSD, *others = inputs(share, has_bias=has_bias, is_weighted=is_weighted)
        given: Any = ((x_BSD.detach() * scale).requires_grad_(), *others)
        found, expected = (loss_and_gradients(kind, given) for kind in ("chunked", "full"))
        assert len(found) == (4 if has_bias else 3)
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < OTHER_ORDER


@pytest.mark.parametrize("kind", LOSS_SUMS)
def test_weights_are_those_of_torchs_losses(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Summed up in fp64."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 7 * ROW_BYTES)
    given = inputs(0.6, has_bias=True, is_weighted=True)
    x_BSD, weight_VD, bias_V = (t.detach().double().requires_grad_() for t in given[:3] if t is not None)
    logits_NV = (x_BSD @ weight_VD.t() + bias_V).flatten(0, 1)[given[3].index_N]
    tokens_N = given[3].targets_BS.flatten()[given[3].index_N]
    losses_N = torch.nn.functional.cross_entropy(logits_NV, tokens_N, reduction="none")
    assert given[3].weights_N is not None
    loss = (given[3].weights_N.double() * losses_N).sum()
    expected = [loss.detach(), *torch.autograd.grad(loss * 0.3, (x_BSD, weight_VD, bias_V))]
    for found, exact in zip(loss_and_gradients(kind, given), expected, strict=True):
        assert relative_error(found.double(), exact) < OTHER_ORDER


@pytest.mark.parametrize("is_weighted", [False, True])
def test_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch, is_weighted: bool) -> None:
    """Of each chunk, forward and backward together; with weights too."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 17 * ROW_BYTES)
    counted = mock.Mock(side_effect=head._logits)
    monkeypatch.setattr(head, "_logits", counted)
    loss_and_gradients("chunked", inputs(1.0, is_weighted=is_weighted))
    assert counted.call_count == 3


def weighted_gradient(logits_CV: Tensor, tokens_CK: Tensor, weights_CK: Tensor) -> Tensor:
    """By the logits, in fp64: the sum over tokens of weight times softmax, less the weight at the token."""
    gradient_CV = logits_CV.double().softmax(dim=1) * weights_CK.double().sum(dim=1, keepdim=True)
    return gradient_CV.scatter_add(1, tokens_CK, -weights_CK.double())


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_weighted_gradients_in_bf16_are_rounded_once(num_tokens: int) -> None:
    """Of one token at each position, and of several, two of them the same."""
    torch.manual_seed(0)
    logits_CV = (torch.randn(20, VOCABULARY) * 3).bfloat16()
    tokens_CK = torch.randint(0, VOCABULARY, (20, num_tokens))
    tokens_CK[:, -1] = tokens_CK[:, 0]
    weights_CK = weights_of(20 * num_tokens).view(20, num_tokens)
    exact_CV = weighted_gradient(logits_CV, tokens_CK, weights_CK)
    _, found_CV = head._losses_and_gradient(logits_CV, tokens_CK, weights_CK, None, True)
    assert found_CV is not None
    assert found_CV.dtype == torch.bfloat16
    # a rounding to bf16 changes a number by 2^-8 of it at the most
    torch.testing.assert_close(found_CV.double(), exact_CV, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("has_bias", "times"), [(False, 1.5), (True, 2.0)])
def test_bf16_is_as_near_to_fp32_as_full_is(monkeypatch: pytest.MonkeyPatch, has_bias: bool, times: float) -> None:
    """With a bias, logits are rounded once more than a fused product's."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 7 * ROW_BYTES)
    for is_weighted in (False, True):
        check_bf16(inputs(0.4, torch.bfloat16, has_bias=has_bias, is_weighted=is_weighted), times)


def check_bf16(given: Inputs, times: float) -> None:
    x_BSD, weight_VD, bias_V = (None if t is None else t.detach().float().requires_grad_() for t in given[:3])
    assert x_BSD is not None
    assert weight_VD is not None
    exact = loss_and_gradients("full", (x_BSD, weight_VD, bias_V, given[3]))
    chunked, full = (loss_and_gradients(kind, given) for kind in ("chunked", "full"))
    for one, other, true in zip(chunked, full, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, true) < max(times * relative_error(other, true), 1e-3)


class _LargestTensor(TorchDispatchMode):
    """The most elements that any tensor had which an operator returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_of_one_chunk_are_the_largest_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", WIDTH * ROW_BYTES)
    for kind, within in (("chunked", True), ("full", False)):
        for is_weighted in (False, True):
            with _LargestTensor() as largest:
                loss_and_gradients(kind, inputs(1.0, is_weighted=is_weighted))
            assert (largest.numel <= WIDTH * VOCABULARY) == within


@pytest.mark.parametrize("has_bias", [False, True])
def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    x_BSD, weight_VD, bias_V, targets = inputs(0.4, has_bias=has_bias)
    monkeypatch.setattr(head, "_add_product", mock.Mock(side_effect=AssertionError("gradient work")))
    with torch.no_grad():
        loss = LOSS_SUMS["chunked"](x_BSD, weight_VD, bias_V, targets)
    assert not loss.requires_grad
    assert_near(loss, LOSS_SUMS["full"](x_BSD, weight_VD, bias_V, targets).detach())
    # a frozen head: the gradient of the rows alone
    frozen_V = None if bias_V is None else bias_V.detach()
    loss = LOSS_SUMS["chunked"](x_BSD, weight_VD.detach(), frozen_V, targets)
    (grad,) = torch.autograd.grad(loss, x_BSD)
    (expected,) = torch.autograd.grad(LOSS_SUMS["full"](x_BSD, weight_VD, bias_V, targets), x_BSD)
    assert relative_error(grad, expected) < OTHER_ORDER


@pytest.mark.parametrize("compute", [*LOSS_SUMS.values(), full_logprobs, token_logprobs])
def test_what_the_head_gives_is_no_view(compute: Callable[..., Tensor]) -> None:
    """Operations in place on one would drop FSDP's hook on what the model gives, as torch warns."""
    *given, targets = inputs(0.4)
    for several in (targets, replace(targets, candidates_NK=targets.index_N.unsqueeze(1))):
        assert not compute(*given, several)._is_view()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_second_backward_is_refused(is_weighted: bool) -> None:
    loss = LOSS_SUMS["chunked"](*inputs(0.4, is_weighted=is_weighted))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only once"):
        loss.backward()


def scaled_logits() -> Any:
    """Divides its logits after the head."""
    return GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, logits_scaling=3.0, tie_word_embeddings=True))


def capped_logits() -> Any:
    """Does more with them: scale · tanh(logits / scale)."""
    sizes: dict[str, Any] = dict(moe_intermediate_size=16, num_experts=4, top_k_experts=2, enable_moe_block=True)
    sizes |= dict(head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=SIZES["vocab_size"])
    return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **sizes, final_logit_softcapping=2.0))


def head_with_bias() -> Any:
    return PhimoeForCausalLM(PhimoeConfig(**SIZES, lm_head_bias=True, tie_word_embeddings=False))


MODELS: dict[str, Callable[[], Any]] = {
    "untied": tiny_mixtral,
    "tied": lambda: tiny_mixtral(tie_word_embeddings=True),
    "bias": head_with_bias,
    "scaled logits": scaled_logits,
    "capped logits": capped_logits,
}


@pytest.mark.parametrize(("which", "kind"), [*((which, "chunked") for which in MODELS), ("bias", "full")])
def test_head_in_a_model(which: str, kind: str) -> None:
    """Logits without targets as ever; with them the loss of HF's own class, and its gradients; nothing is left by a
    forward that failed."""
    torch.manual_seed(0)
    theirs = MODELS[which]().eval()  # Phimoe's router draws random numbers in training
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model: Any = loaded(build_model(theirs.config), theirs).eval()
    assert facts_of(model).head_is_last == (not which.endswith("logits"))
    batch = collate([[sample] for sample in random_samples([9, 5, 12])])
    targets = Targets(batch.targets_BS, batch.target_index_N)
    names = [name for name, _ in model.named_parameters()]
    logits_BSV = model(input_ids=batch.tokens_BS).logits.detach()
    attach_loss_head(model, kind)
    assert isinstance(loss_head(model), LossHead)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(input_ids=batch.tokens_BS).logits, logits_BSV)

    with Forward(targets=targets):
        loss = loss_head(model).loss_of(model(input_ids=batch.tokens_BS).logits, targets)
    labels_BS = torch.nn.functional.pad(batch.targets_BS, (1, 0), value=IGNORED)[:, :-1]
    assert (batch.targets_BS[:, -1] == IGNORED).all()
    expected = theirs(input_ids=batch.tokens_BS, labels=labels_BS, num_items_in_batch=1).loss
    assert relative_error(loss.detach(), expected.detach()) < OTHER_ORDER
    loss.backward()
    expected.backward()
    trained = dict(theirs.named_parameters())
    transposed = {name for name, part in state_of(model).items() if part.transposed}
    compared = [name for name, _ in model.named_parameters() if name in trained and trained[name].grad is not None]
    assert {"lm_head.weight", "model.embed_tokens.weight"} & set(compared)
    assert ("lm_head.bias" in compared) == (which == "bias")
    grads = {name: model.get_parameter(name).grad for name in compared}
    errors = gradient_errors(
        {name: grad.t() if name in transposed else grad for name, grad in grads.items()},
        {name: trained[name].grad for name in compared},
    )
    assert max(errors.values()) <= OTHER_ORDER, errors

    failing = mock.patch.object(type(model.get_decoder()), "forward", side_effect=RuntimeError)
    with failing, pytest.raises(RuntimeError), Forward(targets=targets):
        model(input_ids=batch.tokens_BS)
    assert torch.equal(model(input_ids=batch.tokens_BS).logits, logits_BSV)


def test_only_positions_with_a_target_have_logits() -> None:
    """Also where the logits are worked on after the head."""
    theirs = scaled_logits()
    model: Any = loaded(build_model(theirs.config), theirs)
    attach_loss_head(model, "chunked")
    batch = collate([[sample] for sample in random_samples([9, 5, 12])])
    with Forward(targets=Targets(batch.targets_BS, batch.target_index_N)):
        out = model(input_ids=batch.tokens_BS)
    assert out.logits.shape == (1, len(batch.target_index_N), SIZES["vocab_size"])


@pytest.mark.slow
def test_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """In chunks of two rows; also where some ranks have tokens and no target."""
    save_model(tmp_path, **TIED)
    nothing_to_learn = [Sample.of_prompt(sample.tokens, len(sample.tokens)) for sample in SAMPLES[1:4]]
    for case, within in (
        (Case(SAMPLES[:16], cross_entropy="chunked", gradient_checkpointing="full", changes=TIED), EXACT),
        (
            Case([SAMPLES[5], *nothing_to_learn], cross_entropy="chunked", steps=1, changes=TIED),
            replace(EXACT, weights=torch.inf),
        ),
    ):
        found = ranks.run(_two_rows_in_a_chunk, 4, tmp_path, Topology(4, 2), case)[0]
        assert_same(found, reference(case), within)


def _two_rows_in_a_chunk(path: Path, topology: Topology, case: Case) -> Figures | None:
    with mock.patch.dict(head.CHUNK_BYTES, cpu=2 * 4 * 320):
        return ours(path, topology, case)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(3, 1), (5, 320), (2, 4096), (7, 9001)])
def test_fused_cross_entropy(dtype: torch.dtype, num_rows: int, vocabulary: int) -> None:
    """Against torch's own, also of logits that are far apart, of tokens that are ruled out, and with weights."""
    torch.manual_seed(0)
    logits_CV = (torch.randn(num_rows, vocabulary) * 20).to(dtype)
    targets_C = torch.randint(0, vocabulary, (num_rows,))
    logits_CV[0] = float("-inf")
    logits_CV[0, targets_C[0]] = -3.0
    logits_CV[1, targets_C[1]] = 1e4
    # the interpreter cuts off what bf16 has no room for
    check_fused(logits_CV, targets_C, 2**-7 if dtype == torch.bfloat16 else OTHER_ORDER)


def check_fused(logits_CV: Tensor, targets_C: Tensor, rtol: float) -> None:
    """One kernel's losses and gradient, with weights and without, against torch."""
    expected_C = torch.nn.functional.cross_entropy(logits_CV.float(), targets_C, reduction="none")
    for weights_C in (None, weights_of(len(targets_C)).to(logits_CV.device)):
        place_CV, weights_C1 = logits_CV.clone(), torch.ones(len(targets_C), 1, device=logits_CV.device)
        weights_C1 = weights_C1 if weights_C is None else weights_C.unsqueeze(1)
        exact_CV = weighted_gradient(logits_CV, targets_C.unsqueeze(1), weights_C1)
        losses_C, found_CV = head_triton().fused_losses_and_gradient(place_CV, targets_C, weights_C)
        assert found_CV is place_CV
        assert_near(losses_C, expected_C)
        torch.testing.assert_close(found_CV.double(), exact_CV, rtol=rtol, atol=1e-6)


def head_triton() -> Any:
    """Which needs triton."""
    from expertmesh.training.loss import head_triton

    return head_triton


@interpreted
def test_fused_cross_entropy_shows_what_is_no_number() -> None:
    logits_CV = torch.zeros(2, 100)
    logits_CV[1, 7] = float("nan")
    losses_C, gradient_CV = head_triton().fused_losses_and_gradient(logits_CV, torch.tensor([1, 1]))
    assert losses_C.isnan().tolist() == [False, True]
    assert gradient_CV[0].isfinite().all()
    assert gradient_CV[1].isnan().all()
    none, _ = head_triton().fused_losses_and_gradient(torch.zeros(0, 100), torch.zeros(0, dtype=torch.int64))
    assert none.shape == (0,)


def check_halves(logits_CV: Tensor, targets_C: Tensor, rtol: float) -> None:
    """The kernels for a divided vocabulary, on each half of it, against torch."""
    whole_CV, half = logits_CV.float(), logits_CV.shape[1] // 2
    highest_C = whole_CV.amax(dim=1)
    exp_sum_C = (whole_CV - highest_C.unsqueeze(1)).exp().sum(dim=1)
    gradient_CV = whole_CV.softmax(dim=1)
    gradient_CV[torch.arange(len(targets_C)), targets_C] -= 1
    for first in (0, half):
        part_Cv, targets_from_first_C = whole_CV[:, first : first + half], targets_C - first
        figures = head_triton().fused_row_figures(logits_CV[:, first : first + half].contiguous(), targets_from_first_C)
        is_here_C = (targets_from_first_C >= 0) & (targets_from_first_C < half)
        at_target_C = whole_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1).where(is_here_C, 0.0)
        own_C = part_Cv.amax(dim=1)
        own_sum_C = (part_Cv - own_C.clamp(min=-1e38).unsqueeze(1)).exp().sum(dim=1)
        expected = torch.stack([own_C, own_sum_C, at_target_C])
        torch.testing.assert_close(torch.stack(figures), expected, rtol=OTHER_ORDER, atol=0)
        for weights_C in (None, weights_of(len(targets_C)).to(logits_CV.device)):
            place_Cv = logits_CV[:, first : first + half].contiguous()
            given = targets_from_first_C, highest_C, exp_sum_C, weights_C
            found_Cv = head_triton().fused_gradient(place_Cv, *given)
            assert found_Cv is place_Cv
            exact_Cv = gradient_CV[:, first : first + half]
            exact_Cv = exact_Cv if weights_C is None else exact_Cv * weights_C.unsqueeze(1)
            torch.testing.assert_close(found_Cv.float(), exact_Cv, rtol=rtol, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(4, 320), (3, 9002)])
def test_fused_cross_entropy_of_a_divided_vocabulary(dtype: torch.dtype, num_rows: int, vocabulary: int) -> None:
    """Also where all tokens of a half are ruled out."""
    torch.manual_seed(0)
    logits_CV = (torch.randn(num_rows, vocabulary) * 20).to(dtype)
    targets_C = torch.randint(0, vocabulary, (num_rows,))
    logits_CV[0, : vocabulary // 2] = float("-inf")
    targets_C[0] = vocabulary - 1
    check_halves(logits_CV, targets_C, 2**-7 if dtype == torch.bfloat16 else OTHER_ORDER)
