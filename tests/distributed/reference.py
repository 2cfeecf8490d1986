"""The figures of a case from our ranks; tests/parity has those of one process, by transformers' own class."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.router_stats import over_ranks
from expertmesh.moe.kernels.expert_kernels import KernelChoice
from expertmesh.moe.kernels.fp8 import FP8
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.replicas import check_replicas
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder, pack
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.loss.balance import BiasUpdate, LossWeights
from expertmesh.training.metrics import METRICS
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.start.inputs import with_token_rows
from expertmesh.training.steps.step import StepResult, train_step
from tests.parity.case import MAX_GRAD_NORM, Case, Figures, hf_model
from tests.parity.kept import expected
from tests.parity.kept import in_our_layout as renamed
from tests.parity.reference import labels_of

OF_ROUTING = ("expert_load_max_over_mean", "dead_experts", "router_entropy", "dropped_tokens", "expert_tokens")
CAPACITY = 48
"""Of a row of packed samples."""


def train_config(**settings: Any) -> TrainConfig:
    return TrainConfig(
        **{"model": "unused", "dataset": ["unused"], "learning_rate": 1e-3, "weight_decay": 0.1, **settings}
    )


def reference(case: Case, **changes: Any) -> Figures:
    """By transformers in one process."""
    return expected(case, hf_model(case, **changes))


def attention_mask(batch: Batch) -> Tensor:
    """As transformers wants it: 1 for a token, 0 for padding."""
    return torch.ones_like(batch.tokens_BS) if batch.is_token_BS is None else batch.is_token_BS.long()


def unshifted_labels(samples: Sequence[Sample], batch: Batch) -> Tensor:
    """HF's unshifted labels, written from the samples and not from the batch's targets."""
    labels = torch.full_like(batch.tokens_BS, -100)
    for row, sample in enumerate(samples):
        labels[row, : len(sample.tokens)] = torch.tensor(labels_of(sample.tokens, sample.is_trained))
    return labels


def in_our_layout(model: Any, what: str) -> dict[str, Tensor]:
    """A HF model's gradients ("grad") or weights ("data") under our names and in our layout."""
    theirs = {name: p.grad if what == "grad" else p.detach() for name, p in model.named_parameters()}
    return renamed(model.config, {name: tensor for name, tensor in theirs.items() if tensor is not None})


def sharded_model(path: Path, topology: Topology, case: Case) -> tuple[Any, Any, Any]:
    """(model, mesh, checkpoint): `path` loaded onto the ranks of the current process group, as a run assembles it."""
    config = config_of(case, topology)
    source, model = assembled(path, config, case.kernel)
    mesh = build_mesh("cpu", topology)
    return model, mesh, place(config, model, source, mesh, torch.device("cpu"))


def assembled(path: Path, config: TrainConfig, kernel: str) -> tuple[Any, Any]:
    """(what it is built of, a model on the meta device). What is found out about the model is kept for all processes:
    before there are ranks, each of which would find it out at the same time."""
    source = with_token_rows(replace(config, model=str(path)), open_source(path))
    choice = KernelChoice(FP8 if kernel == FP8.name else KERNELS.get(kernel), "the case's")
    return source, assemble(config, source, "cpu", lambda *_: choice).model


def config_of(case: Case, topology: Topology) -> TrainConfig:
    """The flags of a run that does what a case says."""
    settings: dict[str, Any] = {
        "ep_size": topology.ep_size,
        "cp_size": topology.cp_size,
        "pp_size": topology.pp_size,
        "tp_size": topology.tp_size,
        "dense_shard": topology.dense_shard,
        "attn_implementation": case.attention or ("auto" if case.family == "mixtral" else "eager"),
        "cross_entropy": case.cross_entropy,
        "gradient_checkpointing": case.gradient_checkpointing,
        "bf16": case.compute_dtype == torch.bfloat16,
    }
    return train_config(**settings | case.settings)


def ours(
    path: Path,
    topology: Topology,
    case: Case,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    checks_replicas: bool = False,
) -> Figures | None:
    """The same figures from this process group; rank 0 returns them.

    Args:
        within: makes what the model is built and trained in.
        checks_replicas: whether what ranks hold alike, tied parameters among it, is compared after each step.
    """
    with within():
        return _trained(path, topology, case, checks_replicas)


def _trained(path: Path, topology: Topology, case: Case, checks_replicas: bool) -> Figures | None:
    model, mesh, _ = sharded_model(path, topology, case)
    config, rank = config_of(case, topology), dist.get_rank()
    optimizer = build_optimizer(model.train(), config, mesh)
    rate = config.router_bias_update_rate
    bias_update = BiasUpdate(model, rate) if rate else None
    batches = (packed_batches if config.packing else my_batches)(case, topology, rank, mesh.cp_group)
    weights = LossWeights(case.balance, case.z, config.router_aux_loss_per_layer)
    results: list[StepResult] = []
    grads: dict[str, Tensor] = {}

    def take_grads(doing: str) -> None:
        # the first step's, before it clips them
        if doing == "the gradient norm" and not results:
            grads.update(in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))

    for step in range(case.steps):
        results.append(train_step(model, optimizer, batches, mesh, weights, MAX_GRAD_NORM, bias_update, at=take_grads))
        if checks_replicas:
            check_replicas(model, topology, torch.device("cpu"), step, {"steps": step})
    final = in_full({n: p for n, p in model.named_parameters() if p.requires_grad or not case.mxfp4})
    buffers = dict(model.named_buffers())
    known = SimpleNamespace(routing=over_ranks(results[-1].routing), top_k=2)
    routing = {metric.name: metric.value(known) for metric in METRICS if metric.name in OF_ROUTING}
    # a forward that outlived its backward would keep alive what was computed in it
    assert not [each for each in gc.get_objects() if type(each) is Forward]
    if rank > 0:
        return None
    assert all(optimizer.state[p] == {} for p in model.parameters() if not p.requires_grad)
    figures = [(result.loss, result.grad_norm, result.balance_loss, result.z_loss) for result in results]
    losses, grad_norms, balances, zs = map(list, zip(*figures, strict=True))
    return Figures(
        losses,
        grad_norms,
        balances if case.balance else None,
        zs if case.z else None,
        grads,
        final,
        buffers,
        routing=routing,
    )


def my_batches(case: Case, topology: Topology, rank: int, cp_group: CPGroup | None = None) -> list[Batch]:
    assert (cp_group is not None) == (topology.ranks_per_sequence > 1), "whose run of the rows?"
    per_device = -(-len(case.samples) // (topology.data_size * case.accumulation))
    order = DataOrder(len(case.samples), topology.data_size, per_device, case.accumulation, seed=0)
    forwards = order.micro_batches(0, topology.data_index(rank))
    return [collate([[case.samples[row]] for row in rows], cp_group) for rows in forwards]


def packed_batches(case: Case, topology: Topology, rank: int, cp_group: CPGroup | None = None) -> list[Batch]:
    rows = packed_rows(case.samples)
    mine = rows[topology.data_index(rank) :: topology.data_size]
    return [collate(mine[number :: case.accumulation], cp_group) for number in range(case.accumulation)]


def packed_rows(samples: Sequence[Sample]) -> list[list[Sample]]:
    lengths = torch.tensor([sample.length for sample in samples])
    return [[samples[i] for i in row] for row in pack(lengths, CAPACITY, seed=0)]


def local_grads(model: Any) -> dict[str, Tensor]:
    """This rank's parts of gradients, by name, as they are now."""
    return {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def in_full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors put together from their parts on all ranks, on rank 0; the others get none.

    All at once: a `full_tensor` of each is one collective a tensor and mesh dimension, which costs more than a step.
    """
    here = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    sent = {name: _sent(tensor) for name, tensor in here.items()}
    received: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(sent, received if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return {}
    # the ranks of a pipeline's other stages have other tensors
    first = {name: sent_by[name] for sent_by in reversed(received) for name in sent_by}
    whole = {}
    for name, (_, _, dtype, where) in first.items():
        parts = [_of_bytes(sent_by[name]) if name in sent_by else torch.empty(0, dtype=dtype) for sent_by in received]
        whole[name] = _of_bytes(first[name]) if where is None else _joined(parts, *where)
    return whole


def _sent(tensor: Tensor) -> tuple[Any, ...]:
    """A rank's part of a tensor, as bytes, which are pickled ten times as fast as a tensor; and where the parts lie."""
    part = local_tensor(tensor).contiguous()
    where = (tensor.device_mesh.mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return part.shape, part.flatten().view(torch.uint8).numpy(), tensor.dtype, where


def _of_bytes(sent: tuple[Any, ...]) -> Tensor:
    shape, content, dtype, _ = sent
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(content))
    return tensor


def _joined(parts: Sequence[Tensor], mesh: Tensor, placements: Sequence[Any]) -> Tensor:
    """`parts`: of all ranks of the process group, in order."""
    # FSDP cuts what a mesh dimension after its own has cut already: a strided shard is a part of a part
    dims = sorted(range(mesh.dim()), key=lambda dim: type(placements[dim]) not in (Shard, Replicate))
    return _join(parts, mesh.permute(dims), [placements[dim] for dim in dims])


def _join(parts: Sequence[Tensor], ranks: Tensor, placements: Sequence[Any]) -> Tensor:
    if not placements:
        return parts[int(ranks)]
    if placements[0].is_replicate():
        return _join(parts, ranks[0], placements[1:])
    assert not placements[0].is_partial()
    return torch.cat([_join(parts, some, placements[1:]) for some in ranks], dim=placements[0].dim)
