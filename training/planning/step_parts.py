"""What the modules whose code runs in a step are, for dry runs, cost breakdowns and profiles: which part of a step
their operators are, which of their functions make what outlives a step, and what their Triton kernels write.

All of it is this one table. A test runs steps and fails, by name, on a module of ours that is not in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...moe.util.errors import ExpertMeshError

StepPart = Literal[
    "router",
    "dispatch",
    "permute, combine",
    "expert GEMMs",
    "experts' activation",
    "dequantization",
    "adapters",
    "norms",
    "rotary",
    "LM head, loss",
    "pipeline",
    "clipping",
    "optimizer step",
    "the step",
]
"""The parts of a step that code is. "the step" is everything else: the code that calls all parts, and `backward`, so
that in a backward it says nothing."""


@dataclass(frozen=True)
class Writes:
    """written: names of a kernel's parameters that it writes without reading them. updated: that it reads and writes.
    Its other tensors are read."""

    written: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()


def writes(*written: str, updates: tuple[str, ...] = ()) -> Writes:
    """To which tensors a Triton kernel writes.

    Args:
        written: names of parameters that it writes without reading them.
        updates: names of those that it reads and writes.
    """
    return Writes(frozenset(written), frozenset(updates))


@dataclass(frozen=True)
class StepModule:
    """What a module is to a step.

    part: that its operators belong to; None, as for helpers: that of the module's caller. lasting: qualified names of
    its functions that make what outlives a step, such as optimizer state, or compute nothing: what they and their
    callees do is part of no step. kernels: what its kernels write, Triton's and each `Compiled`, by the names of their
    functions.
    """

    part: StepPart | None
    lasting: tuple[str, ...] = ()
    kernels: Mapping[str, Writes] = field(default_factory=dict)


STEP_PARTS: dict[str, StepModule] = {
    "expertmesh.moe.cpu.matmul": StepModule(None),
    "expertmesh.moe.dispatch.alltoall": StepModule("dispatch"),
    "expertmesh.moe.dispatch.dedup": StepModule("dispatch"),
    "expertmesh.moe.dispatch.dedup_relay": StepModule("permute, combine"),
    "expertmesh.moe.dispatch.dedup_routes": StepModule("dispatch"),
    "expertmesh.moe.dispatch.exchange": StepModule(None),
    "expertmesh.moe.dispatch.permute": StepModule("permute, combine"),
    "expertmesh.moe.dispatch.permute_triton": StepModule(
        "permute, combine",
        kernels={
            "_spread_kernel": writes("rows_ptr"),
            "_gather_sum_kernel": writes("out_ptr"),
            "_combine_backward_kernel": writes("grad_rows_ptr", "grad_weights_ptr"),
        },
    ),
    "expertmesh.moe.experts.activation": StepModule("experts' activation"),
    "expertmesh.moe.experts.bf16_copies": StepModule(None),
    "expertmesh.moe.experts.expert_mlp": StepModule("expert GEMMs"),
    "expertmesh.moe.experts.forward": StepModule(None),
    "expertmesh.moe.experts.layer": StepModule("router"),
    "expertmesh.moe.experts.lora": StepModule("adapters"),
    "expertmesh.moe.experts.model_layers": StepModule(None),
    "expertmesh.moe.experts.router_stats": StepModule("router"),
    "expertmesh.moe.hf_model.build": StepModule(None),
    "expertmesh.moe.hf_model.tensor_plan": StepModule(None),
    "expertmesh.moe.hf_model.trial": StepModule(None),
    "expertmesh.moe.kernels.carve_out": StepModule(None),
    "expertmesh.moe.kernels.expert_products": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.fp8": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.fp8_casts": StepModule(None),
    "expertmesh.moe.kernels.fp8_triton": StepModule(
        None,
        kernels={
            "_rows_kernel": writes("codes_ptr", "scales_ptr"),
            "_largest_kernel": writes("largest_ptr"),
            "_columns_kernel": writes("codes_ptr", "scales_ptr"),
        },
    ),
    "expertmesh.moe.kernels.grouped": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.loop": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.megablocks": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.swiglu": StepModule("experts' activation"),
    "expertmesh.moe.kernels.swiglu_triton": StepModule(
        "experts' activation",
        kernels={
            "_forward_kernel": writes("hidden_ptr"),
            "_backward_kernel": writes("d_gate_ptr", "d_up_ptr", "hidden_ptr"),
        },
    ),
    "expertmesh.moe.kernels.torch_grouped": StepModule("expert GEMMs"),
    "expertmesh.moe.kernels.weight_gradients": StepModule(None),
    "expertmesh.moe.linear.dequantize_triton": StepModule(
        "dequantization",
        kernels=dict.fromkeys(("_fp8_kernel", "_nf4_kernel", "_mxfp4_kernel"), writes("wide_ptr")),
    ),
    "expertmesh.moe.linear.division": StepModule(None),
    "expertmesh.moe.linear.fp8": StepModule(None),
    "expertmesh.moe.linear.linear": StepModule(None),
    "expertmesh.moe.linear.low_rank": StepModule("adapters"),
    "expertmesh.moe.linear.quantized": StepModule("dequantization"),
    "expertmesh.moe.util.recompute_cache": StepModule(None),
    "expertmesh.sharding.clipping": StepModule("clipping"),
    "expertmesh.sharding.collectives.context_parallel": StepModule(None),
    "expertmesh.sharding.collectives.differentiable": StepModule(None),
    "expertmesh.sharding.collectives.gloo": StepModule(None),
    "expertmesh.sharding.collectives.groups": StepModule(None),
    "expertmesh.sharding.collectives.tensor_parallel": StepModule(None),
    "expertmesh.sharding.parallelize.offload": StepModule(None),
    "expertmesh.sharding.parallelize.parallelize": StepModule(None, lasting=("zeros_by_rows",)),
    "expertmesh.sharding.parallelize.recompute": StepModule(None),
    "expertmesh.sharding.parallelize.unreached": StepModule(None),
    "expertmesh.sharding.parallelize.weight_gradients": StepModule(None),
    "expertmesh.sharding.pipeline.cut": StepModule(None),
    "expertmesh.sharding.pipeline.pipeline": StepModule("pipeline"),
    "expertmesh.sharding.pipeline.survey": StepModule("pipeline"),
    "expertmesh.sharding.state": StepModule(None),
    "expertmesh.training.attention.by_sample": StepModule(None),
    "expertmesh.training.attention.complete_sequences": StepModule(None),
    "expertmesh.training.attention.context_parallel_attention": StepModule(None),
    "expertmesh.training.attention.flash": StepModule(None),
    "expertmesh.training.attention.packed_attention": StepModule(None),
    "expertmesh.training.fused.liger_norm": StepModule("norms"),
    "expertmesh.training.fused.liger_rotary": StepModule("rotary"),
    "expertmesh.training.data.batch": StepModule("LM head, loss"),
    "expertmesh.training.loss.balance": StepModule("optimizer step"),
    "expertmesh.training.loss.head": StepModule("LM head, loss"),
    "expertmesh.training.loss.mtp": StepModule("LM head, loss"),
    "expertmesh.training.loss.head_triton": StepModule(
        "LM head, loss",
        kernels={
            "_cross_entropy_kernel": writes("losses_ptr", updates=("logits_ptr",)),
            "_row_figures_kernel": writes("highest_ptr", "exp_sums_ptr", "at_target_ptr"),
            "_gradient_kernel": writes(updates=("logits_ptr",)),
        },
    ),
    "expertmesh.training.micro_batch": StepModule("the step"),
    "expertmesh.training.model_setup.dense_precision": StepModule(None),
    "expertmesh.training.optim.low_bit": StepModule(
        "optimizer step",
        lasting=("_AdamW._first_state",),
        kernels={
            "update_fp32": writes(updates=("weight_PN", "mean_PN", "square_PN")),
            "update_8bit": writes(
                updates=("weight_PBn", "mean_codes_PBn", "mean_scales_PB", "square_codes_PBn", "square_scales_PB")
            ),
            "update_bf16": writes(updates=("weight", "mean", "square")),
        },
    ),
    "expertmesh.training.optim.matrices": StepModule("optimizer step"),
    "expertmesh.training.optim.muon": StepModule("optimizer step", lasting=("Muon._begin",)),
    "expertmesh.training.optim.shampoo": StepModule("optimizer step", lasting=("Shampoo._begin", "Shampoo._new_stack")),
    "expertmesh.training.pipelined": StepModule("pipeline"),
    "expertmesh.training.step": StepModule("the step"),
    "expertmesh.training.tensor_parallel.divide": StepModule(None),
    "expertmesh.training.tensor_parallel.kept_positions": StepModule(None),
    "expertmesh.training.tensor_parallel.overlap": StepModule(None),
    "expertmesh.training.tensor_parallel.regions": StepModule(None),
    "torch.distributed.tensor._sharding_prop": StepModule(
        None, lasting=("ShardingPropagator._propagate_tensor_meta_non_cached",)
    ),
    "torch.optim.adam": StepModule("optimizer step", lasting=("Adam._init_group",)),
}
"""By module. What is not in it is not ours: attribution then goes by the package or by the module of the model."""

_OURS = frozenset(STEP_PARTS)


def register_step_part(
    module: str, part: StepPart | None, *, lasting: tuple[str, ...] = (), kernels: Mapping[str, Writes] | None = None
) -> None:
    """Say what a module of your own is to a step, so that dry runs, cost breakdowns and `--profile` count its operators
    as that. To be called before the run or the dry run begins, best by the module itself.

    Args:
        module: its `__name__`, also where that is "__main__".
        part, lasting, kernels: see `StepModule`.

    Raises:
        ExpertMeshError: there is no such part, or something else is known of a module with this name.
    """
    if part is not None and part not in get_args(StepPart):
        raise ExpertMeshError(
            f"{module} cannot be registered as part {part!r} of a step: the parts are "
            f"{', '.join(get_args(StepPart))}; None is that of the caller"
        )
    code = StepModule(part, tuple(lasting), dict(kernels or {}))
    known = STEP_PARTS.setdefault(module, code)
    if known != code:
        raise ExpertMeshError(f"{module} is registered already, as part {known.part!r} of a step")


def has_modules_from_outside() -> bool:
    """Whether a module that is not of this project is registered, whose text no digest of our sources includes."""
    return not _OURS.issuperset(STEP_PARTS)


def is_lasting(function: Callable[..., Any]) -> bool:
    """Whether a function makes what outlives a step."""
    code = STEP_PARTS.get(function.__globals__["__name__"])
    return code is not None and function.__code__.co_qualname in code.lasting


def written_by(kernel: Any) -> Writes:
    """What a kernel writes; nothing for one that is not in the table, whose tensors then all count as read."""
    code = STEP_PARTS.get(kernel.fn.__module__)
    return Writes() if code is None else code.kernels.get(kernel.fn.__qualname__, Writes())
