"""The variants that `benchmarks.throughput` compares: ways to make the same training steps of the same model.

    hf-fsdp      transformers' Mixtral under its own FSDP2: what a user has without expert parallelism
    hf-ep=N      transformers' own expert parallelism, DistributedConfig(fsdp_size=ranks, ep_size=N)
    hf-ours=N    the same with our dispatch and expert GEMMs in it, ep_implementation="expertmesh"
    ours-ep=N    this project's layer; with ep=1 its gain over hf-fsdp is the layer's own, with N more, the traffic's

Where transformers cannot, its variants do the nearest: full checkpointing for selective, the full model compiled and
not regions, parameters resharded after forward in any case; and its balancing loss is over a rank's own batch, ours
over the global one.

Shape suffixes: B sequences, S positions, T = B·S tokens on this rank, D model width, E experts, K experts per token.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.arms import TIMEOUT, Arm, Made
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.registration import NAME, register_ep_implementation
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import join_process_group, settle_malloc
from expertmesh.sharding.state import set_parameter_dtype
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch
from expertmesh.training.engine.engine import Engine

MAX_GRAD_NORM = 1.0
"""Of train_ep.py, by default."""


def arm_of(name: str, work: argparse.Namespace) -> Arm:
    """The variant called `name`, whose model all ranks of a process group make together.

    Args:
        work: the flags of `benchmarks.throughput`.
    """
    kind, ep_size = parse_variant(name)
    make = make_ours if kind == "ours-ep" else make_hf
    return Arm(name, work.ranks, {"kind": kind, "ep_size": ep_size}, partial(make, work))


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


def make_ours(work: argparse.Namespace, model: Path, kind: str, ep_size: int) -> Made:
    ranks = join_process_group(work.use_cpu, TIMEOUT)
    if ranks.device.type == "cpu" and work.malloc != "plain":
        settle_malloc()
    config = TrainConfig(
        model=str(model),
        dataset=["-"],
        ep_size=ep_size,
        bf16=work.dtype != "fp32",
        compile=work.compile,
        gradient_checkpointing=work.gradient_checkpointing,
        learning_rate=work.learning_rate,
        router_aux_loss_coef=work.router_aux_loss_coef,
    )
    # as `expertmesh.load` does, but for parameters in bf16, which no setting has
    engine = Engine(config, open_source(model), ranks)
    if work.dtype == "pure-bf16":
        set_parameter_dtype(engine.model, torch.bfloat16)
    engine.place()
    engine.model.train()
    if work.routing == "balanced":
        balance_routing(engine.model)
    return Made(engine.model, engine.optimizer, lambda batches: engine.train_step(batches).loss, engine)


def make_hf(work: argparse.Namespace, path: Path, kind: str, ep_size: int) -> Made:
    """As its documentation has it: `from_pretrained` with a DistributedConfig, then a plain loop.

    Raises:
        ExpertMeshError: bf16 over fp32 parameters on one rank: there is no FSDP to cast, and under autocast the experts
            stay in fp32; or transformers is too old.
    """
    ranks = join_process_group(work.use_cpu, TIMEOUT)
    if work.dtype == "bf16" and ranks.world_size == 1:
        raise ExpertMeshError(f"{kind}: --dtype bf16 needs two ranks or more in transformers; use pure-bf16")
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    if ranks.device.type == "cpu" and work.malloc == "settled":
        settle_malloc()
    how: dict[str, Any] = {"ep_size": ep_size} if ep_size > 1 else {}
    if kind == "hf-ours":
        register_ep_implementation()
        how["ep_implementation"] = NAME
    try:
        distributed = DistributedConfig(fsdp_size=ranks.world_size, fsdp_mixed_precision=work.dtype == "bf16", **how)
    except TypeError as error:
        raise ExpertMeshError(f"{kind}: transformers {transformers.__version__} has no ep_size: {error}") from error
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16 if work.dtype == "pure-bf16" else torch.float32,
        distributed_config=distributed,
    )
    model.to(ranks.device)
    model.train()
    aux_loss = work.router_aux_loss_coef
    model.config.output_router_logits = aux_loss > 0
    model.router_aux_loss_coef = aux_loss
    if work.gradient_checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if work.compile:
        model.compile()
    if work.routing == "balanced":
        balance_routing(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest}], lr=work.learning_rate, weight_decay=0.0, fused=True
    )

    def step(batches: Sequence[Batch]) -> float:
        (batch,) = batches
        optimizer.zero_grad()
        output = model(input_ids=batch.tokens_BS, labels=batch.tokens_BS, use_cache=False)
        output.loss.backward()
        clip_as_trainer(model, MAX_GRAD_NORM)
        optimizer.step()
        # the loss that is optimised holds the balancing loss; what is compared is the cross-entropy
        aux = aux_loss * output.aux_loss.detach() if aux_loss > 0 else 0.0
        loss = (output.loss.detach() - aux).float() / ranks.world_size
        dist.all_reduce(loss)
        return float(loss)

    return Made(model, optimizer, step)


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


def balance_routing(model: Any) -> None:
    """Have token t choose experts t·K, t·K + 1, ... in place of the router's, all of which then get equally many, or
    one more or less; weights are still the router's. Of a model of ours or of transformers'."""

    def chosen_in_turn(router: Any, inputs: Any, routing: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits_TE, weights_TK, _ = routing
        in_turn = torch.arange(weights_TK.numel(), device=logits_TE.device) % logits_TE.shape[1]
        return logits_TE, weights_TK, in_turn.view(weights_TK.shape)

    ours = [model.get_submodule(layer.router) for layer in moe_layers(model)]
    for router in ours or [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]:
        router.register_forward_hook(chosen_in_turn)
