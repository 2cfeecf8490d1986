"""The planner's forecasts beside figures that others published of their runs. Nothing is fitted to them.

What a publication does not say is assumed, and said; where that decides, several assumptions are forecast, of which the
first one counts. Our step stands for theirs, also where they have what ours has not.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import exp, inf, log
from typing import Any, Literal

from benchmarks.commands import print_rows
from benchmarks.rehearsed import model_config
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.imbalance import EVEN, GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import LINKS, Hardware, preset
from expertmesh.training.planning.planner.pipelines import dry_run_pipeline
from expertmesh.training.planning.planner.search import Plan
from expertmesh.training.planning.planner.search import forecast as planned

Unit = Literal["GiB", "tok/s", "TFLOP/s", "steps/s"]
H100, A100, B200 = preset("H100", "infiniband-ndr"), preset("A100", "infiniband-hdr"), preset("B200", "infiniband-ndr")
NEAR = {"GiB": 0.10, "tok/s": 0.25, "TFLOP/s": 0.25}
"""How near a forecast is to be, by unit; TFLOP/s count where tokens are not told."""


FULL = dict(gradient_checkpointing="full")
BF16_STATE, FP32_STATE = dict(optim="adamw_bf16"), dict(optim="adamw_torch_fused")
WHOLE_LOGITS, LOOP = dict(cross_entropy="full"), dict(expert_kernel="loop")
AUTOMODEL = BF16_STATE | dict(reshard_after_forward=False)
EACH: dict[str, Any] = dict(dispatch="plain")
IN_TURN: dict[str, Any] = EACH | dict(in_turn=True)
"""Not of train_ep.py: Automodel's balanced gate (`FakeBalancedGate` of its `components/moe/layers.py`) gives token t
the experts t·K, t·K + 1, ..., which lie on one rank or two, and DeepEP sends a token once to a rank, or to a node."""
ONCE = "a token goes to each rank or node once (DeepEP); Transformer Engine's kernels; no clipping"
GB = 1e9 / 2**30
SENT: Sequence[tuple[str, dict[str, Any]]] = (("sent as theirs", IN_TURN), ("to each expert", EACH))


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        who: published it, and of what.
        model: a directory of `benchmarks.rehearsed.PUBLISHED`.
        figures: what they published, by unit.
        flags: of train_ep.py, that come nearest to their run. assumed: each of several sets of further flags, with what
            it assumes.
        unknown: what of the setting is not known that decides its speed; theirs: what they have and we have not.
        is_balanced: whether they forced equal loads; else routing is taken to be natural.
    """

    who: str
    model: str
    gpus: int
    hardware: Hardware
    figures: dict[Unit, float]
    flags: dict[str, Any]
    assumed: Sequence[tuple[str, dict[str, Any]]] = SENT
    unknown: str = ""
    theirs: str = ""
    is_balanced: bool = False


NOT_FLAGS = ("in_turn", "turns")


def pipeline(pp_size: int, chunks: int, micro_batches: int, turns: int = 1) -> dict[str, Any]:
    """turns: not of train_ep.py: so many pipelines of these micro-batches, one after the other, are a step."""
    schedule = dict(pipeline_schedule="interleaved", pipeline_chunks=chunks) if chunks > 1 else {}
    return dict(pp_size=pp_size, gradient_accumulation_steps=micro_batches, turns=turns, **schedule)


ROWS = (
    Row(
        "FSDP2 alone", "mixtral-8x7b", 8, A100, {"GiB": 54_163 / 1024},
        dict(ep_size=1, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (1024, 256, 4096)],
        "tokens per micro-batch; all state in bf16 (16 bytes per parameter would be 87 GiB), full checkpointing",
    ),
    Row(
        "EP8, MegaBlocks", "mixtral-8x7b", 8, A100, {"GiB": 46_692 / 1024},
        dict(ep_size=8, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (1024, 256, 4096)],
        "as above",
    ),
    Row(
        "EP8, ScatterMoE", "mixtral-8x7b", 8, A100, {"tok/s": 414.0},
        dict(ep_size=8, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (512, 256, 1024)],
        "tokens per micro-batch, the link between GPUs, what of data and logging is in the figure",
    ),
    Row(
        "Megatron-Core 0.9", "mixtral-8x7b", 64, H100, {"TFLOP/s": 468.0},
        dict(ep_size=8),
        [(f"{n} x 4,096", dict(per_device_train_batch_size=n)) for n in (2, 1)],
        "sequences per micro-batch, GPUs, recomputation (none assumed)",
        "pipeline of 4 (tensor-parallel for attention), fused kernels",
        is_balanced=True,
    ),
    Row(
        "trl, FSDP2 alone, sdpa", "qwen3-30b-a3b", 16, H100, {"tok/s": 3_888.0, "GiB": 68 * GB},
        dict(ep_size=1, max_seq_length=16384, **FULL),
        [("a loop over experts, whole logits", WHOLE_LOGITS | LOOP), ("grouped, whole", WHOLE_LOGITS), ("chunked", {})],
        "whether experts are looped over; fp32 state assumed",
    ),
    Row(
        "trl, EP8, SonicMoE, FA3", "qwen3-30b-a3b", 16, H100, {"tok/s": 6_808.0, "GiB": 57.8 * GB},
        dict(ep_size=8, max_seq_length=16384, **FULL),
        [("whole logits", WHOLE_LOGITS), ("chunked", {}), ("chunked, bf16 state", BF16_STATE)],
        theirs="SonicMoE's kernels, flash attention 3; state assumed fp32",
    ),
    Row(
        "Automodel", "qwen3-30b-a3b", 8, H100, {"tok/s": 12_040.0, "TFLOP/s": 277.0},
        dict(ep_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=16, **FULL, **AUTOMODEL),
        theirs=ONCE, is_balanced=True,
    ),
    Row(
        "ms-swift, pp 2", "qwen3-30b-a3b", 16, replace(A100, name="A800"), {"GiB": 60.0, "tok/s": 8192 / 9.6},
        dict(ep_size=8, max_seq_length=8192, **FULL),
        [("2 micro-batches", pipeline(2, 1, 2)), ("no pipeline", {})],
        "sequences per step (one per GPU assumed)",
        "non-expert parameters are replicated",
    ),
    Row(
        "trl#6869", "qwen3-30b-a3b", 8, H100, {"GiB": 34 * GB},
        dict(ep_size=8, max_seq_length=2048, **BF16_STATE),
        [("full", FULL)],
        "state in bf16 (fp32 would be 57 GiB)",
        "non-expert parameters are replicated",
    ),
    Row(
        "Bridge, FP8", "qwen3-30b-a3b", 16, H100, {"tok/s": 8_901.0, "TFLOP/s": 205.0},
        dict(ep_size=16, per_device_train_batch_size=2, gradient_accumulation_steps=16, **BF16_STATE),
        [("experts in fp8", dict(expert_precision="fp8")), ("bf16", {})],
        "sequences per micro-batch, recomputation",
        "all matmuls in FP8", is_balanced=True,
    ),
    Row(
        "Automodel", "gpt-oss-20b", 8, H100, {"tok/s": 13_058.0, "TFLOP/s": 279.0},
        dict(ep_size=8, per_device_train_batch_size=2, gradient_accumulation_steps=16, **AUTOMODEL),
        [("full, sent as theirs", FULL | IN_TURN), ("full, to each expert", FULL | EACH), ("none, as theirs", IN_TURN)],
        theirs=ONCE + "; FlexAttention", is_balanced=True,
    ),
    Row(
        "Automodel", "gpt-oss-120b", 64, H100, {"tok/s": 7_626.0, "TFLOP/s": 231.0},
        dict(ep_size=64, per_device_train_batch_size=2, gradient_accumulation_steps=4, **BF16_STATE),
        theirs=ONCE + "; FlexAttention", is_balanced=True,
    ),
    Row(
        "Bridge, pp 4 ep 8", "gpt-oss-120b", 64, H100, {"tok/s": 5_810.0},
        dict(ep_size=8, per_device_train_batch_size=4, **BF16_STATE, **pipeline(4, 1, 8)),
        [("no recomputation", {}), ("full", FULL)],
        "recomputation",
        "Megatron's kernels", is_balanced=True,
    ),
    Row(
        "axolotl, 8 x 48 GB", "gpt-oss-20b", 8, H100, {"GiB": 36.0},
        dict(ep_size=1, gradient_accumulation_steps=2, offload_activations=True, **FULL),
        [("8-bit state", dict(optim="adamw_torch_8bit")), ("bf16 state", BF16_STATE)],
        "published: what is reserved; theirs: 8-bit state beside weights in bf16, where ours are fp32",
    ),
    Row(
        "axolotl, 4 x 80 GB", "gpt-oss-20b", 4, H100, {"GiB": 46.0},
        dict(ep_size=1, gradient_accumulation_steps=2, offload_activations=True, **FULL),
        [("8-bit state", dict(optim="adamw_torch_8bit")), ("bf16 state", BF16_STATE)],
        "as above",
    ),
    Row(
        "trl#6869", "glm-4.5-air", 64, H100, {"GiB": 41 * GB},
        dict(ep_size=32, max_seq_length=2048, **FULL),
        [("fp32 state", FP32_STATE), ("bf16 state", BF16_STATE)],
        "optimizer",
        "non-expert parameters are sharded over 2 ranks",
    ),
    Row(
        "trl#6869, LoRA", "glm-4.6", 16, H100, {"GiB": 73 * GB, "tok/s": 2048 / 4.4},
        dict(ep_size=16, max_seq_length=2048, **FULL, adapter="lora"),
        [("ep 16", {}), ("ep 8", dict(ep_size=8))],
        "EP size, LoRA's targets, sequences per step (one per GPU assumed)",
    ),
    Row(
        "Automodel, pp 4 vp 8", "deepseek-v3", 256, H100, {"tok/s": 1_002.0, "TFLOP/s": 250.0},
        dict(ep_size=64, **FULL, **AUTOMODEL, **pipeline(4, 8, 8)),
        theirs=ONCE, is_balanced=True,
    ),
    Row(
        "Automodel, pp 4 vp 8", "deepseek-v3", 1024, H100, {"tok/s": 865.0, "TFLOP/s": 216.0},
        dict(ep_size=64, **FULL, **AUTOMODEL, **pipeline(4, 8, 8, turns=4)),
        theirs=ONCE, is_balanced=True,
    ),
    Row(
        "PyTorch, NCCL", "deepseek-v3", 256, B200, {"tok/s": 651.0},
        dict(ep_size=64, **FULL, **BF16_STATE, **EACH),
        [("ep 64, full", {}), ("ep 8", dict(ep_size=8)), ("pp 4 vp 4, 16", pipeline(4, 4, 16))],
        "parallel layout, batch; with DeepEP they have 859",
    ),
    Row(
        "Automodel, pp 8 vp 4", "kimi-k2", 256, H100, {"tok/s": 924.0, "TFLOP/s": 189.0},
        dict(ep_size=32, **FULL, **AUTOMODEL, **pipeline(8, 4, 8, turns=2)),
        theirs=ONCE, is_balanced=True,
    ),
    Row(
        "Bridge, FP8, tp 2 pp 8 vp 4", "qwen3-235b-a22b", 256, H100, {"tok/s": 1_686.0, "TFLOP/s": 250.0},
        dict(ep_size=32, **BF16_STATE, expert_precision="fp8"),
        [
            ("pp 8 vp 4, full", FULL | pipeline(8, 4, 32)),
            ("FSDP alone, ep 1, bf16", dict(ep_size=1, expert_precision="bf16", **FULL)),
        ],
        "recomputation, micro-batches",
        "all matmuls in FP8, tensor parallelism", is_balanced=True,
    ),
    Row(
        "ms-swift, LoRA", "qwen3-30b-a3b", 2, H100, {"GiB": 62.0},
        dict(ep_size=2, max_seq_length=2048, per_device_train_batch_size=8, **FULL, adapter="lora", lora_rank=8),
        [("whole logits", WHOLE_LOGITS), ("chunked", {})],
        "whole logits, of sequences as long as the longest, are assumed; what was counted",
    ),
)  # fmt: skip
NOT_FORECAST = (
    "Not forecast: DeepSeek-V3, 256 GB200, MXFP8, 4,912 tokens/s (72 GPUs share NVLink, all matmuls in MXFP8); GLM-5.2,"
    " LoRA, 64 H100, 3.1 s, 56 GB, and Hy3, 64 H100, pp 8 ep 8, 40 to 42 GiB (no config.json of them is here)."
)


def forecast(row: Row, further: dict[str, Any]) -> dict[Unit, float]:
    """The forecast under one assumption."""
    settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=4096)
    flags = settings | row.flags | further
    sends_in_turn, turns = flags.pop("in_turn", False), flags.pop("turns", 1)
    config, of_model = TrainConfig(model=row.model, dataset=["-"], **flags), model_config(row.model)
    forecasts = Forecasts(of_model.to_dict(), partial(model_config, row.model))
    facts = forecasts.facts(config)
    share = sent_in_turn(facts.num_experts, facts.top_k, config.ep_size) if sends_in_turn else 1.0
    # stages are cut by time alone: what a run of ours could hold decided nothing in theirs
    cluster = Cluster(sending(row.hardware, share), 8, inf)
    routing = EVEN if row.is_balanced else GivenRouting(busiest=None)
    timed = _planned(forecasts, Asked(config, row.gpus, cluster, routing=routing))
    update = timed.account.time.update
    seconds = turns * (timed.seconds - update) + update
    found: dict[Unit, float] = {
        "tok/s": timed.tokens_per_second * turns * timed.seconds / seconds,
        "TFLOP/s": turns * timed.account.needed / seconds / 1e12,
        "steps/s": 1 / seconds,
    }
    if "GiB" in row.figures:
        # memory is told of even loads: what a rank holds is of all layers, in each of which another one is the busiest
        asked = Asked(timed.config, row.gpus, cluster)
        found["GiB"] = _planned(forecasts, asked).account.memory.peak / 2**30
    return found


def _planned(forecasts: Forecasts, asked: Asked) -> Plan:
    (found,) = planned(forecasts, [asked])
    if not isinstance(found, Plan):
        raise found
    return found if found.pipeline is None else replace(found, account=dry_run_pipeline(forecasts, found.pipeline)[0])


def sent_in_turn(experts: int, top_k: int, ep_size: int) -> float:
    """The share of rows that is sent, of one for each expert of a token, where it is sent as `IN_TURN` says."""
    # across nodes DeepEP sends to one rank of a node, which passes rows on
    together = experts // ep_size * (8 if ep_size > 8 else 1)
    places = [
        {expert % experts // together for expert in range(t, t + top_k)} for t in range(0, experts * top_k, top_k)
    ]
    return sum(map(len, places)) / len(places) / top_k


def sending(hardware: Hardware, share: float) -> Hardware:
    """Hardware on which all-to-alls take as long as if each rank sent that share."""
    rates = hardware.rates
    assert {"all-to-all inside", "all-to-all between"} <= {each.operator for each in rates.attained}
    attained = (
        replace(each, share=each.share / share) if each.operator.startswith("all-to-all") else each
        for each in rates.attained
    )
    return replace(hardware, rates=replace(rates, attained=tuple(attained)))


def print_published() -> None:
    """The table, its summary, and the speed-up of EP."""
    known: dict[Unit, list[float]] = {"GiB": [], "tok/s": []}
    nearest: list[float] = []
    unknown: list[float] = []
    rows = []
    for row in ROWS:
        print(f"{row.who}, {row.model}", file=sys.stderr, flush=True)
        found = [(said, forecast(row, further)) for said, further in row.assumed]
        for unit, value in row.figures.items():
            ratios = [figures[unit] / value for _, figures in found]
            digits = 1 if unit == "GiB" else 0
            rows.append(
                {
                    "who": row.who,
                    "model": row.model,
                    "GPUs": row.gpus,
                    "published": f"{value:,.{digits}f} {unit}",
                    "forecast": f"{found[0][1][unit]:,.{digits}f}",
                    "ratio": f"{ratios[0]:.2f}",
                    "assumed": found[0][0],
                    "by other assumptions": "; ".join(f"{said} {each[unit]:,.{digits}f}" for said, each in found[1:]),
                    "routing": "balanced" if row.is_balanced else "natural",
                    "not known": row.unknown,
                    "theirs": row.theirs,
                }
            )
            if unit == "GiB":
                known["GiB"].append(ratios[0])
                nearest.append(min(ratios, key=lambda ratio: abs(ratio - 1)))
            elif unit == "tok/s" or "tok/s" not in row.figures:
                (unknown if row.unknown else known["tok/s"]).append(ratios[0])
    print("Published, and forecast with nothing fitted. GiB are of tensors. The first assumption counts.")
    print_rows(rows, text=["model", "assumed", "by other assumptions", "routing", "not known", "theirs"])
    print(NOT_FORECAST)
    print(f"tokens/s, setting known: {_within(known['tok/s'], 'tok/s')}")
    print(f"tokens/s, setting not known: {_within(unknown, 'tok/s')}")
    print(f"memory: {_within(known['GiB'], 'GiB')}; by the nearest assumption {_within(nearest, 'GiB')}\n")
    print_speed_up()


def _within(ratios: Sequence[float], unit: Unit) -> str:
    near = sum(abs(ratio - 1) <= NEAR[unit] for ratio in ratios)
    above = sum(ratio > 1 for ratio in ratios)
    mean = exp(sum(map(log, ratios)) / len(ratios))
    share = f"within {NEAR[unit]:.0%} {near} of {len(ratios)}"
    return f"{share}, {above} above and {len(ratios) - above} below, geometric mean {mean:.2f}"


FSDP_SPEED, EP_SPEED = 0.033, 0.117
"""Steps a second of Mixtral 8x7B on 8 x A100-80G, FSDP2 alone, and with EP8 by MegaBlocks."""


def print_speed_up() -> None:
    """The speed-up of EP over FSDP2 alone: which assumptions give what was published."""
    tokens = 811 * 414 / 871 / EP_SPEED
    print(
        f"Published: EP8 {EP_SPEED / FSDP_SPEED:.2f} x as fast as FSDP2 alone ({EP_SPEED} and {FSDP_SPEED} steps/s; of "
        f"another run 3.49 x), Mixtral 8x7B on 8 A100. Assumed:\n{tokens:,.0f} tokens a GPU and step (a sibling run of "
        "the same length: 811 s at 414 tokens/s a GPU). Not\npublished: forwards a step, the link between GPUs, and "
        "whether FSDP2 alone loops over the experts."
    )
    rows = []
    for accumulation, link, kernel in product((1, 4, 16), ("nvlink3", "pcie4"), ("torch-grouped", "loop")):
        batch = dict(max_seq_length=round(tokens / accumulation), gradient_accumulation_steps=accumulation)
        flags: dict[str, Any] = {**FULL, **BF16_STATE, **batch}
        row = Row("", "mixtral-8x7b", 8, replace(A100, inside=LINKS[link]), {}, flags, [])
        alone = forecast(row, dict(ep_size=1, expert_kernel=kernel))["steps/s"]
        ep = forecast(row, dict(ep_size=8))["steps/s"]
        rows.append(
            {
                "forwards": accumulation,
                "link": link,
                "experts of FSDP2 alone": kernel,
                "its steps/s": f"{alone:.3f}",
                "EP8 steps/s": f"{ep:.3f}",
                "speed-up": f"{ep / alone:.2f}",
                "off": f"{ep / alone / (EP_SPEED / FSDP_SPEED) - 1:+.0%}",
            }
        )
    print_rows(rows, text=["link", "experts of FSDP2 alone"])
