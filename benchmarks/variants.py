"""The variants that `benchmarks.throughput` compares: ways to make the same training steps of the same model.

    hf-fsdp      transformers' Mixtral under its own FSDP2: what a user has without expert parallelism
    hf-ep=N      transformers' own expert parallelism, DistributedConfig(fsdp_size=ranks, ep_size=N)
    hf-ours=N    the same with our dispatch and expert GEMMs in it, ep_implementation="expertmesh"
    ours-ep=N    this project's layer; with ep=1 its gain over hf-fsdp is the layer's own, with N more, the traffic's

Shape suffixes: B sequences, S positions, T = B·S tokens on this rank, D model width, E experts, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.registration import NAME, register_ep_implementation
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.runtime.process import Ranks, settle_malloc
from expertmesh.sharding.state import set_parameter_dtype
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import train_step

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables by which glibc gives back to the system at once what is freed, so that a peak is that of tensors."""


@dataclass(frozen=True)
class Work:
    """What every variant is asked to do. Where transformers cannot, its variants do the nearest: full checkpointing for
    selective, the full model compiled and not regions, parameters resharded after forward in any case; and its
    balancing loss is over a rank's own batch, ours over the global one.

    rows, seq_length: B and S of a rank's batch. bf16: compute in bf16 over fp32 parameters; pure_bf16: everything in
    bf16, the optimizer's state too. balanced: routing forced to give each expert as many tokens, instead of natural.
    malloc: which variants on a CPU have `settle_malloc`: "as-is" ours, as in train_ep.py; "plain" none; "settled" all.
    cpu: even where there is a GPU.
    """

    model: Path
    rows: int
    seq_length: int
    bf16: bool
    pure_bf16: bool
    balanced: bool
    aux_loss: float
    learning_rate: float
    max_grad_norm: float
    gradient_checkpointing: Checkpointing
    reshard_after_forward: bool
    compile: bool
    malloc: str
    cpu: bool


@dataclass(frozen=True)
class Variant:
    """make_step: one full step on this rank's batch; what it returns is the global mean loss before the update."""

    name: str
    model: Any
    make_step: Callable[[Batch], float]


def build_variant(name: str, work: Work, ranks: Ranks) -> Variant:
    """The variant called `name`, loaded and sharded. All ranks call it together."""
    kind, ep_size = parse_variant(name)
    if ranks.device.type == "cpu" and (work.malloc == "settled" or (work.malloc == "as-is" and kind == "ours-ep")):
        settle_malloc()
    return build_ours(name, ep_size, work, ranks) if kind == "ours-ep" else build_hf(name, ep_size, work, ranks)


def parse_variant(name: str) -> tuple[str, int]:
    """(kind, ranks over which experts are sharded) of a variant.

    Raises:
        ExpertMeshError: there is no variant of that name.
    """
    kind, _, size = name.partition("=")
    if name == "hf-fsdp":
        return name, 1
    if kind not in ("hf-ep", "hf-ours", "ours-ep") or not size.isdecimal() or int(size) < 1:
        raise ExpertMeshError(f"--variants {name} is unknown; use hf-fsdp, hf-ep=N, hf-ours=N or ours-ep=N")
    return kind, int(size)


def build_ours(name: str, ep_size: int, work: Work, ranks: Ranks) -> Variant:
    source = open_source(work.model)
    device = ranks.device.type
    config = TrainConfig(
        model="-",
        dataset=["-"],
        ep_size=ep_size,
        bf16=work.bf16 or work.pure_bf16,
        compile=work.compile,
        gradient_checkpointing=work.gradient_checkpointing,
        reshard_after_forward=work.reshard_after_forward,
        learning_rate=work.learning_rate,
    )
    model = assemble(config, source, device).model
    if work.pure_bf16:
        set_parameter_dtype(model, torch.bfloat16)
    mesh = build_mesh(device, Topology(ranks.world_size, ep_size))
    place(config, model, source, mesh, ranks.device)
    optimizer = build_optimizer(model.train(), config, mesh)
    if work.balanced:
        balance(model)

    def make_step(batch: Batch) -> float:
        return train_step(model, optimizer, [batch], mesh, LossWeights(work.aux_loss, 0.0), work.max_grad_norm).loss

    return Variant(name, model, make_step)


def build_hf(name: str, ep_size: int, work: Work, ranks: Ranks) -> Variant:
    """As its documentation has it: `from_pretrained` with a DistributedConfig, then a plain loop.

    Raises:
        ExpertMeshError: bf16 over fp32 parameters on one rank: there is no FSDP to cast, and under autocast the experts
            stay in fp32; or transformers is too old.
    """
    if work.bf16 and ranks.world_size == 1:
        raise ExpertMeshError(f"{name}: --dtype bf16 needs two ranks or more in transformers; use pure-bf16")
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    how: dict[str, Any] = {"ep_size": ep_size} if ep_size > 1 else {}
    if parse_variant(name)[0] == "hf-ours":
        register_ep_implementation()
        how["ep_implementation"] = NAME
    try:
        distributed = DistributedConfig(
            fsdp_size=ranks.world_size, fsdp_mixed_precision=work.bf16 and not work.pure_bf16, **how
        )
    except TypeError as error:
        raise ExpertMeshError(f"{name}: transformers {transformers.__version__} has no ep_size: {error}") from error
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.model,
        dtype=torch.bfloat16 if work.pure_bf16 else torch.float32,
        distributed_config=distributed,
    )
    model.to(ranks.device)
    model.train()
    model.config.output_router_logits = work.aux_loss > 0
    model.router_aux_loss_coef = work.aux_loss
    if work.gradient_checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if work.compile:
        model.compile()
    if work.balanced:
        balance(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest}], lr=work.learning_rate, weight_decay=0.0, fused=True
    )

    def make_step(batch: Batch) -> float:
        optimizer.zero_grad()
        output = model(input_ids=batch.tokens_BS, labels=batch.tokens_BS, use_cache=False)
        output.loss.backward()
        if work.max_grad_norm > 0:
            clip_as_trainer(model, work.max_grad_norm)
        optimizer.step()
        # the loss that is optimised holds the balancing loss; what is compared is the cross-entropy
        aux = work.aux_loss * output.aux_loss.detach() if work.aux_loss > 0 else 0.0
        loss = (output.loss.detach() - aux).float() / ranks.world_size
        dist.all_reduce(loss)
        return float(loss)

    return Variant(name, model, make_step)


def clip_as_trainer(model: nn.Module, max_norm: float) -> None:
    """`Trainer._mixed_mesh_grad_norm` of transformers: `clip_grad_norm_` refuses parameters of two meshes."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
    norms = []
    for parameters in by_mesh.values():
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)


def forced_experts(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """experts_TK that give each expert equally many tokens, or one more or less."""
    return (torch.arange(num_tokens * top_k, device=device) % num_experts).view(num_tokens, top_k)


def balance(model: nn.Module) -> None:
    """Have the routers send every K-th token on, whatever they think of it; weights are still theirs."""

    def force(router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits_TE, weights_TK, _ = output
        top_k = weights_TK.shape[-1]
        experts_TK = forced_experts(len(logits_TE), logits_TE.shape[-1], top_k, logits_TE.device)
        forced_TK = logits_TE.float().softmax(dim=-1).gather(1, experts_TK)
        return logits_TE, (forced_TK / forced_TK.sum(dim=-1, keepdim=True)).to(weights_TK.dtype), experts_TK

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(force)
