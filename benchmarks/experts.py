"""Which expert kernel is best, measured: `python -m benchmarks.experts`.

One MoE layer of a model's sizes, on one device. Variants: every kernel of `--expert-kernel`, as the complete layer
(router to combine) and as the experts alone; the layer of transformers with `grouped_mm` and with `eager` experts; the
original layer of MegaBlocks; and as the ceiling one dense chain of matmuls with the experts' FLOPs, in the same
dtype. A variant that cannot run here, or fails on the way, is listed with its reason, and the others go on. Before
anything is timed, every variant's output and gradients are compared with `loop`; one that differs is not timed, and the
exit code is 1.

Routing, the same in every variant: `balanced`, every expert has the same number of tokens; `natural`, the top K of
logits drawn from N(0, 1) for each token and expert plus N(0, 0.5^2) for each expert; `skewed`, all tokens choose the
first K experts. The tokens carry these choices in their first E coordinates, where the router's weights look.

Forward is without gradients; forward + backward gives the gradients of the input and of every weight. Milliseconds are
by CUDA events on a GPU and of wall time on a CPU, with the process's CPU time beside them. TFLOP/s counts the experts'
matrix products alone (2 · 3 · R · D · F forward, three times that with backward). Peak: memory above weights and
inputs, of torch's allocator on a GPU, of the process on a CPU (VmHWM).

What no variant is charged for: routing is drawn once per setting, so code that is compiled for a number of rows (of
oneDNN's bf16 products on a CPU, some 0.5 ms for each new number) is compiled in the warm-up; in training the
numbers change.

Shape suffixes: T tokens, D model width, F expert width, G = 2·F, E experts, K experts per token, R = T·K routed rows.
"""

import argparse
import importlib
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import arms
from benchmarks.arms import MB, Took, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_json
from benchmarks.original_megablocks import original_dmoe
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.layer import DMoE
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.moe.hf_model.build import dmoe_from, take_logits
from expertmesh.moe.kernels.expert_kernels import choose_kernel
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.kernel_entries import KERNELS, KernelEntry
from expertmesh.moe.kernels.kernel_registry import KernelNeeds
from expertmesh.moe.util.errors import ExpertMeshError

REFERENCE = "loop"
KERNEL_VARIANTS = KERNELS.names()
HF_VARIANTS = {"HF grouped_mm": "grouped_mm", "HF eager": "eager"}
ORIGINAL_VARIANT = "original dMoE"
CEILING = "ceiling"
VARIANTS = (*KERNEL_VARIANTS, *HF_VARIANTS, ORIGINAL_VARIANT)
LAYER, EXPERTS = "layer", "experts"
FORWARD, BOTH = "forward", "forward + backward"
ROUTINGS = ("balanced", "natural", "skewed")

# of the norm of what the reference gives, for right answers that differ by roundings; stk multiplies fp32 in TF32
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Model:
    """Sizes of a model's MoE layer, whether the weights of a token's experts are made to add up to 1, and what
    transformers calls the model: its module, and its classes' prefix."""

    shape: MoEShape
    normalize: bool = True
    hf_module: str = "mixtral"
    hf_prefix: str = "Mixtral"


MODELS = {
    "mixtral-8x7b": Model(MoEShape(4096, 14336, 8, 2)),
    # a rank's at ep 8
    "mixtral-8x7b-one-expert": Model(MoEShape(4096, 14336, 1, 1)),
    "qwen3-30b-a3b": Model(MoEShape(2048, 768, 128, 8), True, "qwen3_moe", "Qwen3Moe"),
    "olmoe": Model(MoEShape(2048, 1024, 64, 8), False, "olmoe", "Olmoe"),
    "mixtral-quarter": Model(MoEShape(1024, 3584, 8, 2)),
    "small": Model(MoEShape(512, 1792, 8, 2)),
}


@dataclass(frozen=True)
class Setting:
    """What one table is about."""

    model: str
    tokens: int
    routing: str

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.routing}"


@dataclass(frozen=True)
class Inputs:
    """x_TD for layers, and for experts alone the routed rows with E counts; a gradient for the output of each."""

    x_TD: Tensor
    grad_TD: Tensor
    rows_RD: Tensor
    grad_RD: Tensor
    counts_E: Tensor


@dataclass(frozen=True)
class Variant:
    """One way to compute a layer, or the experts alone.

    Attributes:
        name: one of VARIANTS.
        part: LAYER or EXPERTS.
        forward: gives the output, with gradients where they are enabled.
        weights: those that get a gradient.
        as_ours: brings the gradients of `weights` into the form and order of our own layer's.
    """

    name: str
    part: str
    forward: Callable[[Inputs], Tensor]
    weights: tuple[Tensor, ...]
    as_ours: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple

    def backward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Forward and backward: the output, the gradient of the input, and those of `weights`."""
        start, grad = (inputs.x_TD, inputs.grad_TD) if self.part == LAYER else (inputs.rows_RD, inputs.grad_RD)
        out = self.forward(inputs)
        return out.detach(), *torch.autograd.grad(out, (start, *self.weights), grad)


@dataclass
class Result:
    """One pass of one variant in one setting: milliseconds of every repetition, round by round, those of this process's
    CPU time, and its peak.

    error: the largest relative difference from the reference, among output and gradients.
    """

    setting: Setting
    part: str
    variant: str
    passes: str
    flops: float
    error: float | None = None
    peak_mb: float = 0.0
    ms: list[list[float]] = field(default_factory=list)
    cpu_ms: list[list[float]] = field(default_factory=list)

    @property
    def tflops(self) -> float:
        return self.flops / median_of(self.ms) / 1e9


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    print(settings_line(arguments, "medians, after a round of warm-up", load, device=arguments.device))
    results: list[Result] = []
    missing: list[str] = []
    differing: list[str] = []
    auto: dict[str, str] = {}
    for name in arguments.model:
        shape = MODELS[name].shape
        choice = choose_kernel("auto", needs(shape, device, dtype))
        auto[name] = choice.name
        print(
            f"\n{name}: D {shape.model_width}, F {shape.expert_width}, E {shape.num_experts}, K {shape.top_k}; "
            f"--expert-kernel auto picks {choice.name} ({choice.why})"
        )
        variants, reasons = build_variants(MODELS[name], [choice.name, *arguments.variants], device, dtype)
        missing += [f"{name}, {reason}" for reason in reasons]
        for setting in [Setting(name, t, r) for t in arguments.tokens for r in arguments.routing]:
            inputs = make_inputs(setting, device, dtype)
            checked = check(variants, inputs)
            measured, reasons = measure(setting, inputs, variants, checked, arguments.rounds, arguments.repetitions)
            missing += [f"{setting}, {reason}" for reason in reasons]
            differing += [f"{setting}, {variant}" for variant in checked.differing]
            results += measured
            print_table(setting, inputs.counts_E, measured)
            print_auto(measured, choice.name)
    print()
    for line in missing:
        print(f"not measured: {line}")
    for line in differing:
        print(f"wrong, and not measured: {line}", file=sys.stderr)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")
    figures = {
        "setting": vars(arguments),
        "auto": auto,
        "not_measured": missing,
        "wrong": differing,
        "results": [{**asdict(r), "median_ms": median_of(r.ms), "tflops": r.tflops} for r in results],
    }
    write_json(arguments.json, figures)
    return int(bool(differing))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = parser_of(__doc__, rounds=7, repetitions=3, json=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if has_gpu else "float32")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["mixtral-8x7b"] if has_gpu else ["small"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768] if has_gpu else [1024])
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=VARIANTS,
        help="and always loop, the ceiling, and what auto picks",
    )
    return parser.parse_args(argv)


def routed_experts(routing: str, tokens: int, shape: MoEShape, generator: torch.Generator) -> Tensor:
    """experts_TK, int64, no expert twice in a row."""
    if routing == "balanced":
        in_turn_TK = (torch.arange(tokens * shape.top_k) % shape.num_experts).view(tokens, shape.top_k)
        return in_turn_TK[torch.randperm(tokens, generator=generator)]
    if routing == "natural":
        skew_E = 0.5 * torch.randn(shape.num_experts, generator=generator)
        logits_TE = torch.randn(tokens, shape.num_experts, generator=generator) + skew_E
        return logits_TE.topk(shape.top_k, dim=-1).indices
    assert routing == "skewed", routing
    return torch.arange(shape.top_k).expand(tokens, -1)


def routed_tokens(experts_TK: Tensor, shape: MoEShape, generator: torch.Generator) -> Tensor:
    """x_TD, fp32, random but for the first E coordinates, which are the router's logits: -1, and from 1 up for the
    chosen experts. The steps between them are exact in bf16, so no variant's arithmetic can choose otherwise."""
    tokens = experts_TK.shape[0]
    x_TD = torch.randn(tokens, shape.model_width, generator=generator)
    logits_TE = torch.full((tokens, shape.num_experts), -1.0)
    logits_TE.scatter_(1, experts_TK, (1.0 + torch.arange(shape.top_k) / 8).expand(tokens, -1))
    x_TD[:, : shape.num_experts] = logits_TE
    return x_TD


def needs(shape: MoEShape, device: torch.device, dtype: torch.dtype) -> KernelNeeds:
    return KernelNeeds(device.type, dtype, ((shape.model_width, shape.expert_width),))


def build_layer(model: Model, device: torch.device, dtype: torch.dtype) -> Any:
    """The MoE block of transformers with our experts in it: random ones, of a scale that keeps the rows', and a router
    that reads the first E coordinates."""
    shape = model.shape
    block = build_hf_block(model, device, dtype)
    with torch.device(device):
        block.experts = dmoe_from(block.experts, shape.top_k, model.hf_prefix).to(dtype)
    take_logits(block.gate, block.experts)
    mlp = block.experts.mlp
    torch.manual_seed(0)
    with torch.no_grad():
        block.gate.weight.copy_(torch.eye(shape.num_experts, shape.model_width))
        mlp.w1.normal_(std=shape.model_width**-0.5)
        mlp.v1.normal_(std=shape.model_width**-0.5)
        mlp.w2.normal_(std=shape.expert_width**-0.5)
    return block


def build_hf_block(model: Model, device: torch.device, dtype: torch.dtype) -> Any:
    """The MoE block of transformers, uninitialised."""
    import transformers

    shape = model.shape
    config = getattr(transformers, f"{model.hf_prefix}Config")(
        hidden_size=shape.model_width,
        intermediate_size=shape.expert_width,
        moe_intermediate_size=shape.expert_width,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=model.normalize,
    )
    modeling = importlib.import_module(f"transformers.models.{model.hf_module}.modeling_{model.hf_module}")
    with torch.device(device):
        return getattr(modeling, f"{model.hf_prefix}SparseMoeBlock")(config).to(dtype)


def copy_weights(ours: Any, block: Any) -> None:
    """From a block with our experts to transformers' own."""
    shape, mlp = ours.experts.shape, ours.experts.mlp
    num_experts, width = shape.num_experts, shape.expert_width
    with torch.no_grad():
        block.gate.weight.copy_(ours.gate.weight)
        block.experts.gate_up_proj[:, :width].copy_(mlp.w1.view(num_experts, width, -1))
        block.experts.gate_up_proj[:, width:].copy_(mlp.v1.view(num_experts, width, -1))
        block.experts.down_proj.copy_(mlp.w2.view(num_experts, width, -1).transpose(1, 2))


def build_variants(
    model: Model, names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> tuple[list[Variant], list[str]]:
    """The variants that can run, the reference first, all with the same weights; and why each other one cannot."""
    shape, ours = model.shape, build_layer(model, device, dtype)
    variants, reasons = [], []
    for name in [name for name in KERNEL_VARIANTS if name == REFERENCE or name in names]:
        try:
            choice = choose_kernel(name, needs(shape, device, dtype))
        except ExpertMeshError as error:
            reasons.append(f"{name}: {error}")
            continue
        variants += kernel_variants(name, choice.kernel, ours)
    if any(name in HF_VARIANTS for name in names):
        try:
            block = build_hf_block(model, device, dtype)
            copy_weights(ours, block)
            variants += [hf_variant(name, block) for name in HF_VARIANTS if name in names]
        except Exception as error:  # the others can still be measured
            reasons += [f"{name}: {arms.in_a_line(error)}" for name in HF_VARIANTS if name in names]
    if ORIGINAL_VARIANT in names:
        try:
            variants.append(original_variant(model, ours))
        except ExpertMeshError as error:
            reasons.append(f"{ORIGINAL_VARIANT}: {error}")
    return variants, reasons


def kernel_variants(name: str, kernel: KernelEntry, ours: Any) -> list[Variant]:
    """The full layer with one of our kernels, and that kernel alone."""
    experts: DMoE = ours.experts
    mlp: Any = experts.mlp
    weights = (mlp.w1, mlp.v1, mlp.w2)
    compute = kernel.code.fused
    assert compute is not None

    def run_layer(inputs: Inputs) -> Tensor:
        experts.mlp.kernel = kernel
        with Forward():
            return ours(inputs.x_TD.unsqueeze(0)).squeeze(0)

    def run_experts(inputs: Inputs) -> Tensor:
        rows = ExpertRows(inputs.counts_E, len(inputs.rows_RD))
        return compute(inputs.rows_RD, rows, *weights)

    return [Variant(name, LAYER, run_layer, (ours.gate.weight, *weights)), Variant(name, EXPERTS, run_experts, weights)]


def hf_variant(name: str, block: Any) -> Variant:
    experts = block.experts

    def run(inputs: Inputs) -> Tensor:
        experts.config._experts_implementation = HF_VARIANTS[name]
        return block(inputs.x_TD.unsqueeze(0)).squeeze(0)

    return Variant(name, LAYER, run, (block.gate.weight, experts.gate_up_proj, experts.down_proj), hf_as_ours)


def hf_as_ours(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Convert (router, gate_up_proj (E, 2F, D), down_proj (E, D, F)) to (router, w1, v1, w2)."""
    router, gate_up, down = gradients
    w1, v1 = gate_up.chunk(2, dim=1)
    return router, w1.flatten(0, 1), v1.flatten(0, 1), down.transpose(1, 2).flatten(0, 1)


def original_variant(model: Model, ours: Any) -> Variant:
    """`megablocks.layers.dmoe.dMoE` with our weights.

    Raises:
        ExpertMeshError: it cannot run here.
    """
    weight = ours.gate.weight
    if weight.device.type != "cuda":
        raise ExpertMeshError("its kernels need a GPU")
    mlp = ours.experts.mlp
    layer: Any = original_dmoe(model.shape, weight, mlp.w1, mlp.v1, mlp.w2, normalize_top_k=model.normalize)
    mlp = layer.experts.mlp

    def run(inputs: Inputs) -> Tensor:
        return layer(inputs.x_TD.unsqueeze(0)).squeeze(0)

    return Variant(ORIGINAL_VARIANT, LAYER, run, (layer.router.layer.weight, mlp.w1, mlp.v1, mlp.w2))


def make_inputs(setting: Setting, device: torch.device, dtype: torch.dtype) -> Inputs:
    shape, generator = MODELS[setting.model].shape, torch.Generator().manual_seed(0)
    experts_TK = routed_experts(setting.routing, setting.tokens, shape, generator)
    x_TD = routed_tokens(experts_TK, shape, generator).to(device, dtype)
    order_R = experts_TK.flatten().argsort(stable=True)
    rows_RD = x_TD[(order_R // shape.top_k).to(device)]
    counts_E = experts_TK.flatten().bincount(minlength=shape.num_experts).to(device)
    grad_TD, grad_RD = torch.randn_like(x_TD), torch.randn_like(rows_RD)
    return Inputs(x_TD.requires_grad_(), grad_TD, rows_RD.requires_grad_(), grad_RD, counts_E)


def measure(
    setting: Setting, inputs: Inputs, variants: Sequence[Variant], checked: "Checked", rounds: int, repetitions: int
) -> tuple[list[Result], list[str]]:
    """Results of every pass of every variant, and the reasons why a variant could not run in this setting."""
    device = inputs.x_TD.device
    shape = MODELS[setting.model].shape
    flops = expert_flops(inputs.rows_RD.shape[0], shape)
    runs: dict[str, tuple[Result, Callable[[], object]]] = {}

    def add(part: str, name: str, error: float | None, *passes: Callable[[], object]) -> None:
        for what, times, run in zip((FORWARD, BOTH), (1, 3), passes, strict=True):
            runs[f"{name}, {part}, {what}"] = Result(setting, part, name, what, times * flops, error), run

    add(EXPERTS, CEILING, None, *dense_chain(inputs.rows_RD, shape.expert_width))
    for variant in variants:
        if (key := (variant.part, variant.name)) in checked.errors:
            forward = torch.no_grad()(partial(variant.forward, inputs))
            add(*key, checked.errors[key], forward, partial(variant.backward, inputs))

    def turn(result: Result, run: Callable[[], object]) -> Callable[[int], list[Took[object]]]:
        def take(number: int) -> list[Took[object]]:
            if number == -2:  # the first round takes the peak
                start = arms.begin_peak(device)
                run()
                result.peak_mb = (arms.most_held(device) - start) / MB
                return []
            return arms.timed(run, device, repetitions)

        return take

    turns = {name: turn(*each) for name, each in runs.items()}
    taken = arms.take_turns(turns, rounds, warm_up=2, may_fail=Exception)
    for name, took in taken.found.items():
        runs[name][0].ms = [[1e3 * one.seconds for one in of_round] for of_round in took]
        runs[name][0].cpu_ms = [[1e3 * one.cpu for one in of_round] for of_round in took]
    reasons = [*checked.failed, *(f"{name}: {why}" for name, why in taken.failed.items())]
    return [runs[name][0] for name in taken.found], reasons


@dataclass(frozen=True)
class Checked:
    """errors: the largest relative error of each (part, variant) that is right, against the reference. failed: why
    others could not run. differing: what is wrong with the rest."""

    errors: dict[tuple[str, str], float]
    failed: list[str]
    differing: list[str]


def check(variants: Sequence[Variant], inputs: Inputs) -> Checked:
    """Compare outputs and gradients with the reference's, to TOLERANCE."""
    errors: dict[tuple[str, str], float] = {}
    reasons, differing = [], []
    for part in (LAYER, EXPERTS):
        names = ("output", "gradient of the input", *(("router",) if part == LAYER else ()), "w1", "v1", "w2")
        reference: tuple[Tensor, ...] = ()
        for variant in [variant for variant in variants if variant.part == part]:
            try:
                out, grad, *gradients = variant.backward(inputs)
            except Exception as error:
                if variant.name == REFERENCE:
                    raise
                # memory that does not suffice, a kernel that does not compile: the other variants can still be measured
                reasons.append(f"{variant.name}, {part}: {arms.in_a_line(error)}")
                continue
            found = (out, grad, *variant.as_ours(gradients))
            reference = reference or found
            error_of = {n: relative_error(f, r) for n, f, r in zip(names, found, reference, strict=True)}
            worst = max(error_of, key=lambda name: error_of[name])
            # written so that a NaN fails
            if not all(e <= TOLERANCE[inputs.x_TD.dtype] for e in error_of.values()):
                differing.append(f"{variant.name}, {part}: {worst} differs from {REFERENCE} by {error_of[worst]:.1e}")
                continue
            errors[part, variant.name] = error_of[worst]
    return Checked(errors, reasons, differing)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where the shapes differ."""
    if found.shape != expected.shape:  # else one might be broadcast
        return math.inf
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp(min=torch.finfo(torch.float32).tiny))


def expert_flops(rows: int, shape: MoEShape) -> float:
    """Floating point operations of the experts' matmuls in one forward: gate, up and down for each row."""
    return 2.0 * 3 * rows * shape.model_width * shape.expert_width


def dense_chain(rows_RD: Tensor, width: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The matmuls alone of one expert that takes all rows, forward, and forward + backward: nothing between them, no
    result written anywhere in particular. No MoE layer is faster."""
    x_RD = rows_RD.detach()
    rows, model_width = x_RD.shape
    sizes = ((2 * width, model_width), (width, model_width), (rows, width), (rows, 2 * width))
    w13_GD, w2_FD, act_RF, hidden_RG = (torch.randn(n, m, device=x_RD.device, dtype=x_RD.dtype) for n, m in sizes)

    def forward() -> None:
        torch.mm(x_RD, w13_GD.t())
        torch.mm(act_RF, w2_FD)

    def both() -> None:
        forward()
        torch.mm(act_RF.t(), x_RD)
        torch.mm(x_RD, w2_FD.t())
        torch.mm(hidden_RG.t(), x_RD)
        torch.mm(hidden_RG, w13_GD)

    return forward, both


def median_of(ms: Sequence[Sequence[float]]) -> float:
    """Over all repetitions of all rounds."""
    return statistics.median(one for one_round in ms for one in one_round)


def speed_ratio(fast: Result, slow: Result) -> float:
    """How many times as fast the first is as the second: the median over the rounds, in which the two ran close by."""
    return ratio([*map(sum, slow.ms)], [*map(sum, fast.ms)])


def pick(results: Sequence[Result], **fields: Any) -> list[Result]:
    """Those with these values, in order."""
    return [r for r in results if all(getattr(r, name) == value for name, value in fields.items())]


def print_table(setting: Setting, counts_E: Tensor, results: Sequence[Result]) -> None:
    errors = [r.error for r in results if r.error is not None]
    print(
        f"\n{setting}: the busiest expert has {counts_E.max() / counts_E.float().mean():.2f} x the mean; "
        f"all variants agree with {REFERENCE}, the largest relative error is {max(errors):.0e}"
    )
    rows = []
    for part, name in dict.fromkeys((r.part, r.variant) for r in results):
        row = {"part": part, "variant": name}
        for passes in (FORWARD, BOTH):
            for result in pick(results, part=part, variant=name, passes=passes):
                (ceiling,) = pick(results, variant=CEILING, passes=passes)
                figures = {
                    "ms": f"{median_of(result.ms):.2f}",
                    "CPU ms": f"{median_of(result.cpu_ms):.2f}",
                    "TFLOP/s": f"{result.tflops:.3f}",
                    "share": f"{speed_ratio(result, ceiling):.0%}",
                    "peak MB": f"{result.peak_mb:.0f}",
                }
                row |= {f"{passes}\n{title}": figure for title, figure in figures.items()}
        rows.append(row)
    print_rows(rows, text=["variant"])


def print_auto(results: Sequence[Result], auto: str) -> None:
    """How the kernel that `auto` picks compares with the best other variant, and with the best of transformers."""
    for part in (EXPERTS, LAYER):
        said = []
        for mine in pick(results, part=part, variant=auto):
            same = pick(results, setting=mine.setting, part=part, passes=mine.passes)
            rivals = [r for r in same if r.variant not in (auto, CEILING)]
            for what, among in (
                ("best other", rivals),
                ("best of HF", [r for r in rivals if r.variant in HF_VARIANTS]),
            ):
                if among:
                    best = min(among, key=lambda rival: speed_ratio(mine, rival))
                    said.append(f"{mine.passes} {speed_ratio(mine, best):.2f} x {what} ({best.variant})")
        print(f"auto ({auto}), {part}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
