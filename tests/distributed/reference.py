"""The reference implementation: a family's own class in one process on the full batch, and the same figures from our
ranks."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.kernels.expert_kernels import FP8, KernelChoice
from expertmesh.moe.kernels.kernel_registry import KERNELS
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.state import local_tensor, parameters_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.engine import assemble, place
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.step import compute_gradients, train_step
from tests.distributed.shampoo import PlainShampoo
from tests.families.configs import tiny_model
from tests.tiny import our_rows, tiny_mixtral

STEPS = 3
MAX_GRAD_NORM = 0.5


@dataclass(frozen=True)
class Case:
    """One comparison. `samples` are spread over ranks as the data order does, in one global batch each step.

    `changes` are to the model's config, `settings` to the run's. `family`: of the model, as transformers names it.
    `frozen`: a pattern of the names that what --freeze names has in transformers' model. `attention`: ours, where it is
    not auto (Mixtral's) or eager (other families').
    """

    samples: list[Sample]
    balance: float = 0.0
    z: float = 0.0
    accumulation: int = 1
    kernel: str = "loop"
    cross_entropy: str = "chunked"
    gradient_checkpointing: Checkpointing = "none"
    compute_dtype: torch.dtype = torch.float32
    steps: int = STEPS  # at least one
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "mixtral"
    frozen: str = ""
    attention: str = ""


@dataclass(frozen=True)
class Figures:
    """losses: cross-entropy a step. grads: of the first step, by name, full, where there is one. weights: after
    the last step, full."""

    losses: list[float]
    balance_loss: float
    z_loss: float
    grad_norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def random_samples(lengths: Sequence[int], vocabulary: int = 320, seed: int = 3) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample.of_prompt(torch.randint(0, vocabulary, (length,), generator=generator).tolist(), length // 3)
        for length in lengths
    ]


def train_config(**settings: Any) -> TrainConfig:
    return TrainConfig(
        **{"model": "unused", "dataset": ["unused"], "learning_rate": 1e-3, "weight_decay": 0.1, **settings}
    )


def hf_model(case: Case, **changes: Any) -> Any:
    """The family's own model, small and random."""
    if case.family == "mixtral":
        return tiny_mixtral(**case.changes, **changes)
    return tiny_model(case.family, **case.changes, **changes)


def reference(case: Case, **changes: Any) -> Figures:
    """HF's model, HF's loss, HF's balancing loss, torch's clipping and AdamW, one process, one batch."""
    model = hf_model(case, **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (case.frozen and re.search(case.frozen, name)))
    model.train()
    config = train_config(**case.settings)
    is_of_matrices = config.optim in ("muon", "shampoo")
    optimizer: Any = HFMatrices(model, config) if is_of_matrices else hf_adamw(model, config)
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    losses, grad_norms, grads, balances, zs = [], [], {}, [], []
    has_auxiliary = case.balance > 0 or case.z > 0
    for step in range(case.steps):
        optimizer.zero_grad()
        out = model(
            input_ids=batch.tokens_BS,
            attention_mask=attention_mask(batch),
            use_cache=False,
            **({"output_router_logits": True} if has_auxiliary else {}),
        )
        cross_entropy = loss_of(model, out.logits, labels)
        balance = z = torch.zeros(())
        if has_auxiliary:
            balance = _balance_by_layer(model, out, batch) if config.router_aux_loss_per_layer else out.aux_loss
            logits = torch.stack([layer.float()[attention_mask(batch).bool().flatten()] for layer in out.router_logits])
            z = logits.logsumexp(dim=-1).square().mean()
        (cross_entropy + case.balance * balance + case.z * z).backward()
        if step == 0:
            grads = {n: g.clone() for n, g in in_our_layout(model, "grad").items()}
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        # the mean over no target, which has the gradient of a sum over none
        has_targets = bool((labels[:, 1:] != -100).any())
        losses.append(float(cross_entropy.detach()) if has_targets else math.nan)
        balances.append(float(balance.detach()))
        zs.append(float(z.detach()))
    return Figures(losses, balances[0], zs[0], grad_norms, grads, in_our_layout(model, "data"))


def loss_of(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """By the model's own loss function, as `forward(labels=...)` does."""
    num_items = max(int((labels[:, 1:] != -100).sum()), 1)
    loss: Tensor = model.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=num_items)
    return loss


def _balance_by_layer(model: Any, out: Any, batch: Batch) -> Tensor:
    """HF's balancing loss of each layer alone, averaged."""
    losses = [
        load_balancing_loss_func((layer,), layer.shape[-1], model.num_experts_per_tok, attention_mask(batch))
        for layer in out.router_logits
    ]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean()


def hf_adamw(model: Any, config: TrainConfig, but: Collection[Tensor] = ()) -> torch.optim.AdamW:
    """torch's AdamW for all parameters, `but` some; no weight decay for norms and biases."""
    named = [(n, p) for n, p in model.named_parameters() if not any(p is other for other in but)]
    is_exempt = {n: p.dim() <= 1 or (".experts." in n and n.endswith("_bias")) for n, p in named}
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not is_exempt[n]], "weight_decay": config.weight_decay},
            {"params": [p for n, p in named if is_exempt[n]], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        eps=config.adam_epsilon,
    )


class HFMatrices:
    """Muon or Shampoo for every projection and for every expert's gate, up and down; torch's AdamW for the rest."""

    def __init__(self, model: Any, config: TrainConfig):
        # (a matrix, sharing memory with the parameter that holds it; that parameter; where in it)
        self.matrices: list[tuple[nn.Parameter, nn.Parameter, Any]] = []
        for module in model.modules():
            if hasattr(module, "is_concatenated"):
                self._add_experts(module)
        for name, p in model.named_parameters():
            if re.search(r"\.layers\..*_proj\w*\.weight$", name):
                self._add(p, ...)
        self.owners = {owner for _, owner, _ in self.matrices}
        self.adamw = hf_adamw(model, config, but=self.owners)
        matrices = [matrix for matrix, _, _ in self.matrices]
        settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        self.optimizer: Any
        if config.optim == "muon":
            self.optimizer = torch.optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw")
        else:
            first = config.shampoo_frequency if config.shampoo_start is None else config.shampoo_start
            every, size = config.shampoo_frequency, config.shampoo_block_size
            self.optimizer = PlainShampoo(matrices, **settings, every=every, first=first, size=size)

    def _add_experts(self, experts: Any) -> None:
        fused, down = experts.gate_up_proj, experts.down_proj
        # which dim of an expert's part has gate and up: of transposed ones, the last
        dim, width = (1 if experts.is_transposed else 0), fused.shape[2 if experts.is_transposed else 1]
        halves = (slice(0, width // 2), slice(width // 2, None))
        for half in halves if experts.is_concatenated else (slice(0, None, 2), slice(1, None, 2)):
            for expert in range(len(fused)):
                self._add(fused, (expert, half) if dim == 0 else (expert, slice(None), half))
        for expert in range(len(down)):
            self._add(down, expert)

    def _add(self, parameter: nn.Parameter, index: Any) -> None:
        self.matrices.append((nn.Parameter(parameter.detach()[index]), parameter, index))

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for owner in self.owners:
            owner.grad = None

    def step(self) -> None:
        for matrix, owner, index in self.matrices:
            assert owner.grad is not None
            matrix.grad = owner.grad[index]
        self.optimizer.step()
        self.adamw.step()


def attention_mask(batch: Batch) -> Tensor:
    """As transformers wants it: 1 for a token, 0 for padding."""
    return torch.ones_like(batch.tokens_BS) if batch.is_token_BS is None else batch.is_token_BS.long()


def unshifted_labels(samples: Sequence[Sample], batch: Batch) -> Tensor:
    """HF's unshifted labels, written from the samples and not from the batch's targets."""
    labels = torch.full_like(batch.tokens_BS, -100)
    for row, sample in enumerate(samples):
        for position in range(1, len(sample.tokens)):
            if sample.is_trained[position]:
                labels[row, position] = sample.tokens[position]
    return labels


def in_our_layout(model: Any, what: str) -> dict[str, Tensor]:
    """A HF model's gradients ("grad") or weights ("data") under our names and in our layout."""
    theirs = dict(model.named_parameters())
    figures = {}
    for name, part in parameters_of(build_model(model.config, "eager")).items():
        if part.expert is None:
            tensor = _of(theirs[name], what)
            if tensor is not None:
                figures[name] = tensor.t() if part.transposed else tensor
            continue
        tensor = _of(theirs[f"{name.rpartition('.mlp.')[0]}.{part.expert.place.tensor}"], what)
        if tensor is not None:
            figures[name] = our_rows(part.expert, tensor)
    return figures


def _of(parameter: Tensor, what: str) -> Tensor | None:
    return parameter.grad if what == "grad" else parameter.detach()


def sharded_model(path: Path, topology: Topology, case: Case) -> tuple[Any, Any, Any]:
    """(model, mesh, checkpoint): `path` loaded onto the ranks of the current process group, as a run assembles it."""
    source, config = open_source(path), config_of(case, topology)
    kernel = FP8 if case.kernel == FP8.name else KERNELS.get(case.kernel)
    model = assemble(config, source, "cpu", lambda *_: KernelChoice(kernel, "the case's")).model
    mesh = build_mesh("cpu", topology)
    return model, mesh, place(config, model, source, mesh, torch.device("cpu"))


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


def ours(path: Path, topology: Topology, case: Case) -> Figures | None:
    """The same figures from this process group; rank 0 returns them."""
    model, mesh, _ = sharded_model(path, topology, case)
    model.train()
    config = config_of(case, topology)
    optimizer = build_optimizer(model, config, mesh)
    rank = dist.get_rank()
    batches = my_batches(case, topology, rank, mesh.cp_group)
    weights = LossWeights(case.balance, case.z, config.router_aux_loss_per_layer)
    grads: dict[str, Tensor] = {}

    def take_grads(doing: str) -> None:
        if doing == "the gradient norm":
            grads.update(in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))

    # the first step's gradients are taken before it clips them
    results = [train_step(model, optimizer, batches, mesh, weights, MAX_GRAD_NORM, at=take_grads)]
    for _ in range(1, case.steps):
        results.append(train_step(model, optimizer, batches, mesh, weights, MAX_GRAD_NORM))
    final = in_full(dict(model.named_parameters()))
    if rank > 0:
        return None
    assert all(optimizer.state[p] == {} for p in model.parameters() if not p.requires_grad)
    losses, grad_norms = [result.loss for result in results], [result.grad_norm for result in results]
    return Figures(losses, results[0].balance_loss, results[0].z_loss, grad_norms, grads, final)


def my_batches(case: Case, topology: Topology, rank: int, cp_group: CPGroup | None = None) -> list[Batch]:
    assert (cp_group is not None) == (topology.ranks_per_sequence > 1), "whose run of the rows?"
    per_device = -(-len(case.samples) // (topology.data_size * case.accumulation))
    order = DataOrder(len(case.samples), topology.data_size, per_device, case.accumulation, seed=0)
    forwards = order.micro_batches(0, topology.data_index(rank))
    return [collate([[case.samples[row]] for row in rows], cp_group) for rows in forwards]


def of_packed(path: Path, topology: Topology, case: Case) -> tuple[float, dict[str, Tensor]]:
    """The loss of five samples in two packed rows, and on rank 0 the gradients, full."""
    model, mesh, _ = sharded_model(path, topology, case)
    A, B, C, D, E = case.samples
    batch = collate([[A, B, C], [D, E]], mesh.cp_group)
    result = compute_gradients(model.train(), [batch], LossWeights(0.0, 0.0))
    return result.loss, in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


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
