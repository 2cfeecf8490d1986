"""The planner's forecasts beside figures that others published of their runs. Nothing is fitted to them.

What a publication does not say is assumed, and said; where that decides, several assumptions are forecast. Our step
stands for theirs: with our kernels and FSDP2 in place of pipeline stages, unless a row says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.rehearsed import model_config
from expertmesh.training import TrainConfig
from expertmesh.training.foresight.planner.cost import model_flops, step_time, tokens_per_second
from expertmesh.training.foresight.planner.hardware import LINKS, Hardware, preset
from expertmesh.training.foresight.planner.peak_memory import peak
from expertmesh.training.foresight.rehearsal.planning import planned

Unit = Literal["GiB", "tok/s", "TFLOP/s", "steps/s"]
H100, A100 = preset("H100", "infiniband-ndr"), preset("A100", "infiniband-hdr")


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        who: published it, and of what.
        model: a key of MODELS.
        figures: what they published, by unit.
        flags: of train_ep.py, that come nearest to their run. assumed: each of several sets of further flags, with what
            it assumes; gaps: what is not known, or not alike.
    """

    who: str
    model: str
    gpus: int
    hardware: Hardware
    figures: dict[Unit, float]
    flags: dict[str, Any]
    assumed: Sequence[tuple[str, dict[str, Any]]]
    gaps: str


FULL = dict(gradient_checkpointing="full")
BF16_STATE, FP32_STATE = dict(optim="adamw_bf16"), dict(optim="adamw_torch_fused")
WHOLE_LOGITS, LOOP = dict(cross_entropy="full"), dict(expert_kernel="loop")
AUTOMODEL = BF16_STATE | dict(reshard_after_forward=False)
GB = 1e9 / 2**30

ROWS = (
    Row(
        "FSDP2 alone", "Mixtral 8x7B", 8, A100, {"GiB": 54_163 / 1024},
        dict(ep_size=1, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (256, 1024, 4096)],
        "all state in bf16 (16 bytes a parameter would be 87 GiB), full checkpointing; tokens a forward unknown",
    ),
    Row(
        "EP8, MegaBlocks", "Mixtral 8x7B", 8, A100, {"GiB": 46_692 / 1024},
        dict(ep_size=8, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (256, 1024, 4096)],
        "as above",
    ),
    Row(
        "EP8, ScatterMoE", "Mixtral 8x7B", 8, A100, {"tok/s": 414.0},
        dict(ep_size=8, **FULL, **BF16_STATE),
        [(f"{n:,} tokens", dict(max_seq_length=n)) for n in (256, 512, 1024)],
        "tokens a forward unknown; their update, data and logging are in the figure",
    ),
    Row(
        "Megatron-Core 0.9", "Mixtral 8x7B", 64, H100, {"TFLOP/s": 468.0},
        dict(ep_size=8),
        [(f"{n} x 4,096", dict(per_device_train_batch_size=n)) for n in (1, 2)],
        "balanced; 64 GPUs and no recomputation assumed; their layers are in pipeline stages",
    ),
    Row(
        "trl, FSDP2 alone, sdpa", "Qwen3 30B-A3B", 16, H100, {"tok/s": 3_888.0, "GiB": 68 * GB},
        dict(ep_size=1, max_seq_length=16384, **FULL),
        [("chunked logits", {}), ("whole", WHOLE_LOGITS), ("and a loop over experts", WHOLE_LOGITS | LOOP)],
        "fp32 state; natural routing; whether logits are whole, and experts looped over, is not known",
    ),
    Row(
        "trl, EP8, SonicMoE, FA3", "Qwen3 30B-A3B", 16, H100, {"tok/s": 6_808.0, "GiB": 57.8 * GB},
        dict(ep_size=8, max_seq_length=16384, **FULL),
        [("fp32 state", FP32_STATE), ("bf16 state", BF16_STATE), ("fp32, whole logits", FP32_STATE | WHOLE_LOGITS)],
        "kernels of others; state, and whether logits are whole, are not known",
    ),
    Row(
        "Automodel", "Qwen3 30B-A3B", 8, H100, {"tok/s": 12_040.0, "TFLOP/s": 277.0},
        dict(ep_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=16, **FULL, **AUTOMODEL),
        [("as its recipe", {})],
        "balanced; batch and checkpointing as in the recipe of October 2025 that they name; other kernels",
    ),
    Row(
        "ms-swift", "Qwen3 30B-A3B", 16, replace(A100, name="A800"), {"GiB": 60.0, "tok/s": 8192 / 9.6},
        dict(ep_size=8, max_seq_length=8192, **FULL),
        [("fp32 state", FP32_STATE)],
        "their layers are in two pipeline stages, for two forwards a step; what is no expert is whole on every rank",
    ),
    Row(
        "trl#6869", "Qwen3 30B-A3B", 8, H100, {"GiB": 34 * GB},
        dict(ep_size=8, max_seq_length=2048, **BF16_STATE),
        [("full", FULL)],
        "state in bf16 (fp32 would be 57 GiB); what is no expert is whole on every rank",
    ),
    Row(
        "Automodel", "GPT-OSS 20B", 8, H100, {"tok/s": 13_058.0, "TFLOP/s": 279.0},
        dict(ep_size=8, per_device_train_batch_size=2, gradient_accumulation_steps=16, **AUTOMODEL),
        [("full, as its recipe", FULL), ("none, as its recipe of 2026", {})],
        "as above",
    ),
    Row(
        "Automodel", "GPT-OSS 120B", 64, H100, {"tok/s": 7_626.0, "TFLOP/s": 231.0},
        dict(ep_size=64, per_device_train_batch_size=2, gradient_accumulation_steps=4, **BF16_STATE),
        [("as its recipe", {})],
        "as above; a token goes to each node once there, where ours goes to each of its experts",
    ),
    Row(
        "axolotl, 8 x 48 GB", "GPT-OSS 20B", 8, H100, {"GiB": 36.0},
        dict(ep_size=1, gradient_accumulation_steps=2, offload_activations=True, **FULL),
        [("8-bit state", dict(optim="adamw_torch_8bit")), ("bf16 state", BF16_STATE)],
        "published: what is reserved; theirs: 8-bit state beside weights in bf16, where ours are fp32",
    ),
    Row(
        "axolotl, 4 x 80 GB", "GPT-OSS 20B", 4, H100, {"GiB": 46.0},
        dict(ep_size=1, gradient_accumulation_steps=2, offload_activations=True, **FULL),
        [("8-bit state", dict(optim="adamw_torch_8bit")), ("bf16 state", BF16_STATE)],
        "as above",
    ),
    Row(
        "trl#6869", "GLM-4.5-Air", 64, H100, {"GiB": 41 * GB},
        dict(ep_size=32, max_seq_length=2048, **FULL),
        [("fp32 state", FP32_STATE), ("bf16 state", BF16_STATE)],
        "optimizer unknown; theirs shares out what is no expert between 2 ranks",
    ),
    Row(
        "Automodel, pp 4", "DeepSeek-V3", 256, H100, {"tok/s": 1_002.0, "TFLOP/s": 250.0},
        dict(ep_size=64, gradient_accumulation_steps=2, **FULL, **AUTOMODEL),
        [("as its recipe", {})],
        "as above; in four pipeline stages of eight forwards, which are two of the whole model",
    ),
    Row(
        "ms-swift, LoRA", "Qwen3 30B-A3B", 2, H100, {"GiB": 62.0},
        dict(ep_size=2, max_seq_length=2048, per_device_train_batch_size=8, **FULL, adapter="lora", lora_rank=8),
        [("chunked logits", {}), ("whole logits", WHOLE_LOGITS)],
        "whole logits, of rows as long as the longest, are assumed; what was counted is not known",
    ),
)  # fmt: skip


def forecast(row: Row, further: dict[str, Any]) -> dict[Unit, float]:
    """The forecast under one assumption."""
    settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=4096)
    config = TrainConfig(model=row.model, dataset=["-"], **(settings | row.flags | further))
    run = planned(config, model_config(row.model), row.gpus, trained=1 - 1 / config.max_seq_length)
    seconds = step_time(run, row.hardware, 8).total
    return {
        "GiB": peak(run).tensors / 2**30,
        "tok/s": tokens_per_second(run.setting, seconds),
        "TFLOP/s": run.setting.accumulation * model_flops(run) / seconds / 1e12,
        "steps/s": 1 / seconds,
    }


def published() -> list[str]:
    """Lines: the table, and the speed-up of EP."""
    lines = [
        "Published, and forecast with nothing fitted. GiB are of tensors: what torch allocates. Off: of the nearest.",
        f"{'who':<25}{'model':<15}{'GPUs':>5}{'published':>16}  {'forecast, by what is assumed':<76}{'off':>6}",
    ]
    near: dict[Unit, list[float]] = {"GiB": [], "tok/s": []}
    for row in ROWS:
        found = [(said, forecast(row, further)) for said, further in row.assumed]
        for unit, value in row.figures.items():
            told = "; ".join(f"{said} {figures[unit]:,.{_digits(unit)}f}" for said, figures in found)
            off = min((figures[unit] / value - 1 for _, figures in found), key=abs)
            if unit in near:
                near[unit].append(abs(off))
            shown = f"{value:,.{_digits(unit)}f} {unit}"
            lines.append(f"{row.who:<25}{row.model:<15}{row.gpus:>5}{shown:>16}  {told:<76}{off:>+6.0%}")
        lines.append(f"{'':<25}{row.gaps}")
    lines.append(
        f"memory within 10 %: {sum(off <= 0.1 for off in near['GiB'])} of {len(near['GiB'])}; tokens/s within 25 %: "
        f"{sum(off <= 0.25 for off in near['tok/s'])} of {len(near['tok/s'])}, each by the nearest assumption"
    )
    return [*lines, "", *speed_up()]


def _digits(unit: Unit) -> int:
    return 1 if unit == "GiB" else 0


FSDP_SPEED, EP_SPEED = 0.033, 0.117
"""Steps a second of Mixtral 8x7B on 8 x A100-80G, FSDP2 alone, and with EP8 by MegaBlocks."""


def speed_up() -> list[str]:
    """The speed-up of EP over FSDP2 alone: which assumptions give what was published."""
    tokens = 811 * 414 / 871 / EP_SPEED
    lines = [
        f"Published: EP8 {EP_SPEED / FSDP_SPEED:.2f} x as fast as FSDP2 alone ({EP_SPEED} and {FSDP_SPEED} steps/s; of "
        "another run 3.49 x), Mixtral 8x7B on 8 A100. Assumed:",
        f"{tokens:,.0f} tokens a GPU and step (a sibling run of the same length: 811 s at 414 tokens/s a GPU). Not",
        "published: forwards a step, the link between GPUs, and whether FSDP2 alone loops over the experts.",
        f"{'forwards':<10}{'link':<10}{'experts of FSDP2 alone':<24}{'its steps/s':>12}{'EP8 steps/s':>13}"
        f"{'speed-up':>10}{'off':>7}",
    ]
    for accumulation in (1, 2, 4, 5, 8, 16):
        for link in ("nvlink3", "pcie4"):
            machine = replace(A100, inside=LINKS[link])
            for kernel in ("torch-grouped", "loop"):
                common: dict[str, Any] = dict(
                    max_seq_length=round(tokens / accumulation), gradient_accumulation_steps=accumulation
                )
                row = Row("", "Mixtral 8x7B", 8, machine, {}, {**FULL, **BF16_STATE, **common}, [], "")
                alone = forecast(row, dict(ep_size=1, expert_kernel=kernel))["steps/s"]
                ep = forecast(row, dict(ep_size=8))["steps/s"]
                off = ep / alone / (EP_SPEED / FSDP_SPEED) - 1
                lines.append(
                    f"{accumulation:<10}{link:<10}{kernel:<24}{alone:>12.3f}{ep:>13.3f}{ep / alone:>10.2f}{off:>+7.0%}"
                )
    return lines
