"""Embedding, head and loss with the vocabulary divided over ranks, against one process that has all of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import expertmesh.training.loss.head as loss_of_head
from expertmesh.moe.experts.forward import Forward, Targets
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import IGNORED, SplitSequences
from expertmesh.training.loss.head import chunked_loss_sum, complete_logits, full_loss_sum
from expertmesh.training.tensor_parallel.divide import DividedEmbedding, undivided_vocabulary
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.interpreter import interpreted
from tests.parity.case import Case
from tests.rounding import OF_ADDED, OTHER_ORDER, error_beyond
from tests.tiny import relative_error, tiny_mixtral
from tests.training.test_head import capped_logits, scaled_logits, weights_of

WIDTH, VOCABULARY, SEQUENCES, LENGTH = 24, 200, 3, 5
ALL_ROWS = 1000
"""In a chunk: more than there are."""


@dataclass(frozen=True)
class Problem:
    """shares: of each rank's positions, how many have a target. rows: in a chunk. is_weighted: whether losses are."""

    shares: tuple[float, ...]
    rows: int = ALL_ROWS
    has_bias: bool = False
    is_weighted: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    @property
    def size(self) -> int:
        return len(self.shares)


PROBLEMS = [
    Problem((1.0, 0.4), has_bias=True),
    Problem((0.0, 0.7), rows=3),
    Problem((0.0, 0.0)),
    Problem((1.0, 0.4), rows=4, has_bias=True, is_weighted=True),
    Problem((0.0, 0.0), is_weighted=True),
    Problem((0.0, 0.3, 1.0, 0.6), rows=4, has_bias=True),
    Problem((0.5, 1.0, 0.0, 0.2), scale=1e4),
    Problem((0.3, 0.7, 0.1, 0.9), rows=1),
    Problem((0.3, 0.0, 0.1, 0.9), is_weighted=True),
    Problem((0.0, 0.0, 0.0, 0.5), rows=7, has_bias=True),
]


@dataclass
class Tensors:
    """Of all ranks; x, weight and bias need gradients."""

    x_BSD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    targets_BS: Tensor
    weights_BS: Tensor | None

    def gradients_of(self, loss: Tensor) -> list[Tensor]:
        assert loss.dtype == torch.float32
        needed = [tensor for tensor in (self.x_BSD, self.weight_VD, self.bias_V) if tensor is not None]
        # as the loss of a step, divided by the number of targets
        return list(torch.autograd.grad(loss * 0.3, needed))


def tensors_of(problem: Problem) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    length = LENGTH * problem.size
    x_BSD = torch.randn(SEQUENCES, length, WIDTH, generator=generator) * problem.scale
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator)
    bias_V = torch.randn(VOCABULARY, generator=generator)
    targets_BS = torch.randint(0, VOCABULARY, (SEQUENCES, length), generator=generator)
    shares_S = torch.tensor(problem.shares).repeat_interleave(LENGTH)
    targets_BS[torch.rand(SEQUENCES, length, generator=generator) >= shares_S] = IGNORED
    x_BSD, weight_VD, bias_V = (t.to(problem.dtype).requires_grad_() for t in (x_BSD, weight_VD, bias_V))
    weights_BS = weights_of(targets_BS.numel()).view_as(targets_BS) if problem.is_weighted else None
    return Tensors(x_BSD, weight_VD, bias_V if problem.has_bias else None, targets_BS, weights_BS)


def targets_from(targets_BS: Tensor, weights_BS: Tensor | None) -> Targets:
    index_N = (targets_BS != IGNORED).flatten().nonzero().flatten()
    return Targets(targets_BS, index_N, weights_N=None if weights_BS is None else weights_BS.flatten()[index_N])


def tp_group() -> TPGroup:
    return TPGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def own(whole: Tensor, dim: int, group: TPGroup) -> Tensor:
    """This rank's part, as a tensor of its own."""
    return whole.detach().chunk(group.size, dim)[group.index].clone()


def part_of(tensors: Tensors, group: TPGroup) -> Tensors:
    """What a rank has."""
    x_BLD, weight_vD = own(tensors.x_BSD, 1, group).requires_grad_(), own(tensors.weight_VD, 0, group).requires_grad_()
    bias_v = None if tensors.bias_V is None else own(tensors.bias_V, 0, group).requires_grad_()
    weights_BL = None if tensors.weights_BS is None else own(tensors.weights_BS, 1, group)
    return Tensors(x_BLD, weight_vD, bias_v, own(tensors.targets_BS, 1, group), weights_BL)


def loss_of(part: Tensors, targets_BS: Tensor, group: TPGroup) -> Tensor:
    """
    Args:
        targets_BS: of all ranks.
    """
    num_targets = [int((some != IGNORED).sum()) for some in targets_BS.chunk(group.size, dim=1)]
    given = (part.x_BSD, part.weight_VD, part.bias_V, targets_from(part.targets_BS, part.weights_BS))
    return chunked_loss_sum(*given, group, num_targets)


def divided(problem: Problem, group: TPGroup) -> list[Tensor]:
    """The loss of this rank's positions, and its gradients."""
    tensors = tensors_of(problem)
    part = part_of(tensors, group)
    with mock.patch.dict(loss_of_head.CHUNK_BYTES, cpu=problem.rows * 4 * VOCABULARY // problem.size):
        loss = loss_of(part, tensors.targets_BS, group)
    return [loss.detach(), *part.gradients_of(loss)]


def complete(problem: Problem, group: TPGroup, kind: Any = full_loss_sum) -> list[Tensor]:
    """The same from one process that has everything."""
    tensors = tensors_of(problem)
    given = (tensors.x_BSD, tensors.weight_VD, tensors.bias_V)
    loss = kind(*given, targets_from(tensors.targets_BS, tensors.weights_BS))
    grad_x, *others = tensors.gradients_of(loss)
    alone = torch.full_like(tensors.targets_BS, IGNORED)
    run = slice(LENGTH * group.index, LENGTH * (group.index + 1))
    alone[:, run] = tensors.targets_BS[:, run]
    with torch.no_grad():
        own_loss = kind(*given, targets_from(alone, tensors.weights_BS))
    return [own_loss, own(grad_x, 1, group), *(own(grad, 0, group) for grad in others)]


@pytest.mark.parametrize("size", [2, 4])
def test_as_in_one_process(ranks: RankPool, size: int) -> None:
    ranks.run(_compare, size, [problem for problem in PROBLEMS if problem.size == size])


@interpreted
def test_in_kernels(ranks: RankPool) -> None:
    """As on a GPU."""
    ranks.run(_compare, 2, [PROBLEMS[0], PROBLEMS[1], PROBLEMS[3]], in_kernels=True)


def _compare(problems: Sequence[Problem], in_kernels: bool = False) -> None:
    group = tp_group()
    for problem in problems:
        with mock.patch.object(loss_of_head, "takes_triton", return_value=in_kernels):
            found = divided(problem, group)
        expected = complete(problem, group)
        assert len(found) == (4 if problem.has_bias else 3)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert relative_error(one, other) < OTHER_ORDER, (problem, number)
        if not any(problem.shares):
            assert not any(tensor.any() for tensor in found)


def test_bf16_is_as_near_to_fp32_as_one_process_is(ranks: RankPool) -> None:
    ranks.run(_compare_bf16, 2)


def _compare_bf16() -> None:
    """Within a factor: gradients of positions are sums of one rounded summand per rank."""
    group = tp_group()
    for rows, has_bias, is_weighted in ((ALL_ROWS, False, False), (7, True, False), (7, False, True)):
        problem = Problem((0.4, 0.9), rows, has_bias, is_weighted, torch.bfloat16)
        found, alone = divided(problem, group), complete(problem, group, chunked_loss_sum)
        tensors = tensors_of(problem)
        x_BSD, weight_VD, bias_V = (
            None if tensor is None else tensor.detach().float().requires_grad_()
            for tensor in (tensors.x_BSD, tensors.weight_VD, tensors.bias_V)
        )
        assert x_BSD is not None
        assert weight_VD is not None
        rounded = replace(tensors, x_BSD=x_BSD, weight_VD=weight_VD, bias_V=bias_V)
        with mock.patch(f"{__name__}.tensors_of", return_value=rounded):
            exact = complete(problem, group)
        for number, (one, other, true) in enumerate(zip(found, alone, exact, strict=True)):
            assert one.dtype == other.dtype
            assert relative_error(one, true) < max(2 * relative_error(other, true), 2e-3), (problem, number)


class _Widths(TorchDispatchMode):
    """Of the tensors that operators returned, seen: their sizes. numel: the most elements of one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.numel = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.seen |= set(tensor.shape)
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_rank_has_complete_logits(ranks: RankPool) -> None:
    """Nor more of its own columns than a chunk of them."""
    ranks.run(_no_complete_logits, 2)


def _no_complete_logits() -> None:
    group, problem = tp_group(), Problem((1.0, 1.0))
    tensors = tensors_of(problem)
    part, number = part_of(tensors, group), VOCABULARY // group.size
    with mock.patch.dict(loss_of_head.CHUNK_BYTES, cpu=WIDTH * 4 * number), _Widths() as seen:
        part.gradients_of(loss_of(part, tensors.targets_BS, group))
    assert number in seen.seen
    assert VOCABULARY not in seen.seen
    assert seen.numel <= WIDTH * number
    with _Widths() as alone:
        complete(problem, group, chunked_loss_sum)
    assert VOCABULARY in alone.seen


def test_without_gradients_none_are_computed(ranks: RankPool) -> None:
    ranks.run(_without_gradients, 2)


def _without_gradients() -> None:
    group, problem = tp_group(), Problem((0.6, 0.2), has_bias=True)
    tensors = tensors_of(problem)
    part, (expected, grad_x, *_) = part_of(tensors, group), complete(problem, group)
    with torch.no_grad(), mock.patch.object(loss_of_head, "_add_product", side_effect=AssertionError):
        loss = loss_of(part, tensors.targets_BS, group)
    assert not loss.requires_grad
    assert relative_error(loss, expected) < OTHER_ORDER
    # a frozen head
    part.weight_VD, part.bias_V = part.weight_VD.detach(), None if part.bias_V is None else part.bias_V.detach()
    (found,) = torch.autograd.grad(loss_of(part, tensors.targets_BS, group) * 0.3, part.x_BSD)
    assert relative_error(found, grad_x) < OTHER_ORDER


def test_logits_that_are_ruled_out_or_no_number(ranks: RankPool) -> None:
    ranks.run(_ruled_out, 2)


def _ruled_out() -> None:
    group, problem = tp_group(), Problem((1.0, 1.0), has_bias=True)
    for value, columns in ((float("-inf"), slice(0, VOCABULARY // 2)), (float("nan"), slice(3, 4))):
        tensors = tensors_of(problem)
        assert tensors.bias_V is not None
        tensors.bias_V.data[columns] = value
        # of tokens that can be
        tensors.targets_BS.clamp_(min=VOCABULARY // 2)
        with mock.patch(f"{__name__}.tensors_of", return_value=tensors):
            found, expected = divided(problem, group), complete(problem, group)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert relative_error(one.nan_to_num(), other.nan_to_num()) < OTHER_ORDER


def test_shapes_without_ranks() -> None:
    """In a dry run nothing is sent."""
    with FakeTensorMode():
        group = TPGroup(4, 1, None)
        x_BLD = torch.randn(2, 6, WIDTH, requires_grad=True)
        weight_vD = torch.randn(VOCABULARY // 4, WIDTH, requires_grad=True)
        targets = Targets(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
        targets = replace(targets, weights_N=torch.ones(5))
        loss = chunked_loss_sum(x_BLD, weight_vD, None, targets, group, (3, 5, 0, 1))
        gradients = torch.autograd.grad(loss, (x_BLD, weight_vD))
    assert loss.shape == ()
    assert [gradient.shape for gradient in gradients] == [(2, 6, WIDTH), (VOCABULARY // 4, WIDTH)]


class _Scaled(nn.Embedding):
    """As some families', with a norm as others'."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.norm = nn.RMSNorm(self.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(super().forward(tokens)) * torch.tensor(5.5).to(self.weight.dtype)


def test_embedding(ranks: RankPool) -> None:
    """To the last bit."""
    ranks.run(_embed, 4)


def _embed() -> None:
    group = tp_group()
    mesh = init_device_mesh("cpu", (group.size,))
    positions_BS = torch.arange(LENGTH * group.size).expand(SEQUENCES, -1)
    split = SplitSequences(CPGroup(group.size, group.index, group.ranks), positions_BS, False, (0,) * group.size)
    for kind, dtype in ((nn.Embedding, torch.float32), (nn.Embedding, torch.bfloat16), (_Scaled, torch.float32)):
        torch.manual_seed(0)
        whole = kind(VOCABULARY, WIDTH, padding_idx=130).to(dtype)
        tokens_BS = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH * group.size))
        tokens_BS[0, 3:9] = 130
        grad_BSD = torch.randn(SEQUENCES, LENGTH * group.size, WIDTH).to(dtype)
        expected_BSD = whole(tokens_BS)
        expected_BSD.backward(grad_BSD)
        torch.manual_seed(0)
        embedding = kind(VOCABULARY, WIDTH, padding_idx=130).to(dtype)
        DividedEmbedding(embedding, group)
        # as sharding leaves it for a forward
        placed = DTensor.from_local(own(embedding.weight, 0, group), mesh, [Shard(0)], run_check=False)
        embedding.register_parameter("weight", nn.Parameter(placed))
        with Forward(split=split):
            x_BLD = embedding(own(tokens_BS, 1, group))
        assert torch.equal(x_BLD, own(expected_BSD, 1, group))
        x_BLD.backward(own(grad_BSD, 1, group))
        assert_parts(embedding, whole, group)
        with torch.no_grad():
            assert torch.equal(embedding(tokens_BS), expected_BSD)
        with pytest.raises(ExpertMeshError, match=r"--tp-size.*gives no gradients"):
            embedding(tokens_BS)


def assert_parts(module: nn.Module, whole: nn.Module, group: TPGroup) -> None:
    """The gradients of a module whose weight is divided over ranks."""
    expected = dict(whole.named_parameters())
    for name, parameter in module.named_parameters():
        grad, reference = parameter.grad, expected[name].grad
        assert grad is not None
        assert reference is not None
        rounding = OF_ADDED * float(reference.norm())
        if name == "weight":
            assert isinstance(grad, DTensor)
            grad, reference = grad.to_local(), own(reference, 0, group)
        else:
            dist.all_reduce(grad)
        tolerance = 1e-2 if grad.dtype == torch.bfloat16 else OTHER_ORDER
        assert error_beyond(rounding, grad, reference) < tolerance, name


def test_logits_are_of_evaluation_alone(ranks: RankPool, tiny_model: Path) -> None:
    ranks.run(_logits, 2, tiny_model)


def _logits(path: Path) -> None:
    """Of a model whose vocabulary is divided: as in one process, but where gradients would be of a part."""
    model, *_ = sharded_model(path, Topology(2, 1, tp_size=2), Case([]))
    tokens_BS = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens_BS).logits
        assert relative_error(model.eval()(input_ids=tokens_BS).logits, expected) < OTHER_ORDER
    with pytest.raises(ExpertMeshError, match="--tp-size"):
        model(input_ids=tokens_BS)
    # where nothing before it says so
    with pytest.raises(ExpertMeshError, match=r"--tp-size.* logits have no gradient"):
        complete_logits(torch.ones(1, 2, WIDTH, requires_grad=True), torch.ones(5, WIDTH), None, tp_group())


INDIVISIBLE = "its 320 tokens are not a multiple of --tp-size 3"
WHOLE = "--cross-entropy full computes with all of it; chunked computes with parts"


@pytest.mark.parametrize(
    ("make", "tp_size", "cross_entropy", "embedding", "head"),
    [
        (tiny_mixtral, 3, "auto", INDIVISIBLE, INDIVISIBLE),
        (
            *(lambda: tiny_mixtral(tie_word_embeddings=True), 2, "auto"),
            *("tied to the head", "tied to the embedding"),
        ),
        (tiny_mixtral, 2, "full", None, WHOLE),
        (tiny_mixtral, 2, "chunked", None, None),
        *(
            (make, 2, "auto", None, "its logits are scaled or capped afterwards")
            for make in (scaled_logits, capped_logits)
        ),
    ],
    ids=["indivisible", "tied", "full", "chunked", "scaled", "capped"],
)
def test_what_is_divided(make: Any, tp_size: int, cross_entropy: str, embedding: str | None, head: str | None) -> None:
    config = make().config
    if make in (scaled_logits, capped_logits):
        config.tie_word_embeddings = False
    found = undivided_vocabulary(build_model(config), tp_size, cross_entropy)
    assert found == {"embedding": embedding, "head": head}
