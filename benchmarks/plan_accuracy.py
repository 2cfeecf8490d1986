"""How right the planner is: `python -m benchmarks.plan_accuracy [measured] [rehearsed] [published]`.

measured: settings of small random models on this machine's CPU, each on ranks that are started afresh. The peak is
VmHWM, the most that a rank's process ever held, less what it held before its model was built and after a step of the
same model with fewer layers, in which libraries compile code and make buffers for these shapes. What is freed goes back
to the system at once (benchmarks.arms.GIVEN_BACK). Bytes are counted at the collectives of one step. Every expert gets
equally many tokens, as the forecast assumes. Seconds are the median of 3 steps; the forecast goes by rates that the
same ranks measure.

rehearsed: models at full size on 8 to 1,024 GPUs: what dry runs of short models tell of all layers, beside a dry run of
these (`benchmarks.rehearsed`).

published: figures of others' runs, with every assumption said; none is fitted to them (`benchmarks.published`).
"""

import argparse
import gc
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import CONFIG_MAPPING

from benchmarks import arms
from benchmarks.arms import GIVEN_BACK, MB
from benchmarks.commands import command, machine, parser_of, print_rows, write_json
from benchmarks.published import print_published
from benchmarks.rehearsed import print_rehearsed
from benchmarks.traffic import CountTraffic
from benchmarks.variants import balance_routing
from expertmesh.moe.experts.lora import store_frozen
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.mesh import Mesh, build_mesh
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.parallelize.parallelize import materialize, parallelize
from expertmesh.sharding.runtime.process import start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.training.cluster.check import check_groups, measured_hardware
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.engine.assembly import compute_dtype
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import Hardware, load_measured, save_measured
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.this_machine import CPU
from expertmesh.training.steps.step import train_step

NO_LOSSES = LossWeights(0.0, 0.0)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
PARTS = ("measured", "rehearsed", "published")
WORLD_SIZE = 4
HARDWARE = "hardware.json"
MOST_ERROR = 0.05
"""What the memory forecast is held to, of the measured peak."""

MIXTRAL = dict(num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=1024)
NARROW = MIXTRAL | dict(hidden_size=256, intermediate_size=896, num_hidden_layers=4, vocab_size=4096)
WIDE = MIXTRAL | dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=3, vocab_size=8192)
QWEN3_MOE = dict(
    hidden_size=512, moe_intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, num_experts=16, num_experts_per_tok=4, vocab_size=8192, max_position_embeddings=1024,
)  # fmt: skip
DEEPSEEK_V3 = dict(
    hidden_size=512, intermediate_size=1536, moe_intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1,
    vocab_size=8192, max_position_embeddings=1024,
)  # fmt: skip
GPT_OSS = dict(
    hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, num_local_experts=16, num_experts_per_tok=4, vocab_size=8192, max_position_embeddings=1024,
    sliding_window=64,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run on WORLD_SIZE ranks. sizes: of a model of this family. flags: of train_ep.py."""

    name: str
    family: str
    sizes: dict[str, Any]
    flags: dict[str, Any]

    def __str__(self) -> str:
        c = self.config
        rows = f"{c.per_device_train_batch_size} x {c.max_seq_length}"
        return f"{self.name}, ep {c.ep_size}, {c.gradient_checkpointing}, {rows}"

    @property
    def config(self) -> TrainConfig:
        settings: dict[str, Any] = dict(per_device_train_batch_size=2, max_seq_length=256, learning_rate=1e-5)
        # on how many ranks a token's experts are depends on which they are
        settings |= dict(dispatch="plain")
        return TrainConfig(model="-", dataset=["-"], **(settings | self.flags))

    @property
    def model_config(self) -> Any:
        return CONFIG_MAPPING[self.family](**self.sizes)

    @property
    def trained(self) -> float:
        """Fraction of the tokens with a loss: all but each sequence's first. Where ranks divide the vocabulary, what
        has none is sent as padding."""
        return 1.0 if self.config.tp_size > 1 else 1 - 1 / self.config.max_seq_length

    @property
    def not_gathered(self) -> int:
        """Bytes of that padding that are not sent: of the last position of a sequence the 12 bytes of what each other
        rank has found of its logits."""
        return 12 * self.config.per_device_train_batch_size * (self.config.tp_size - 1)


def cases() -> list[Case]:
    """Mixtral at ep 1, 2 and 4, with and without checkpointing, where activations and where parameters weigh more; and
    other families and ways to train."""
    found = []
    for ep_size in (1, 2, 4):
        for name, sizes, length in (("narrow", NARROW, 512), ("wide", WIDE, 128)):
            for mode in get_args(Checkpointing):
                flags = dict(ep_size=ep_size, gradient_checkpointing=mode, max_seq_length=length)
                found.append(Case(name, "mixtral", sizes, flags))
    lora: dict[str, Any] = dict(adapter="lora")
    nf4: dict[str, Any] = dict(adapter="lora", base_dtype="nf4")
    for name, family, sizes, flags in (
        ("qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=1)),
        ("qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=4, gradient_checkpointing="selective")),
        ("deepseek", "deepseek_v3", DEEPSEEK_V3, dict(ep_size=2)),
        ("deepseek", "deepseek_v3", DEEPSEEK_V3, dict(ep_size=4, gradient_checkpointing="full")),
        ("gpt-oss", "gpt_oss", GPT_OSS, dict(ep_size=2)),
        ("gpt-oss", "gpt_oss", GPT_OSS, dict(ep_size=4, gradient_checkpointing="selective")),
        ("lora", "mixtral", WIDE, dict(ep_size=2, **lora)),
        ("lora qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=4, gradient_checkpointing="selective", **lora)),
        ("nf4", "mixtral", WIDE, dict(ep_size=4, **nf4)),
        ("nf4 qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=2, gradient_checkpointing="full", **nf4)),
        ("packed", "mixtral", NARROW, dict(ep_size=4, packing=True)),
        ("packed qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=2, gradient_checkpointing="selective", packing=True)),
        ("tp 2", "mixtral", NARROW, dict(ep_size=4, tp_size=2)),
        ("tp 2, qwen3", "qwen3_moe", QWEN3_MOE, dict(ep_size=2, tp_size=2, gradient_checkpointing="selective")),
    ):
        found.append(Case(name, family, sizes, flags))
    return found


def full_batch(config: TrainConfig, vocabulary: int, seed: int, cp_group: CPGroup | None = None) -> Batch:
    """Random tokens that fill every sequence; all but the first of a sequence are learned. cp_group: whose ranks share
    them, each with its part."""
    rows = arms.random_sequences(config.per_device_train_batch_size, config.max_seq_length, vocabulary, seed)
    return collate([[Sample.of_prompt(row, 0)] for row in rows], cp_group)


def build_run(
    config: TrainConfig, model_config: Any, world_size: int, device: torch.device
) -> tuple[Any, torch.optim.Optimizer, Mesh]:
    """A random model with balanced routing on the ranks of the process group, its optimizer, and the mesh."""
    kind: Any = device.type
    model = build_rehearsed(config, model_config, kind)
    optimizer, mesh = shard_run(config, model, world_size, device)
    balance_routing(model)
    return model, optimizer, mesh


def shard_run(
    config: TrainConfig, model: Any, world_size: int, device: torch.device
) -> tuple[torch.optim.Optimizer, Mesh]:
    """Shard an assembled model over the ranks of the process group, with random weights; its optimizer, and the
    mesh."""
    if (kind := config.quantized_base) is not None:
        store_frozen(model, kind)
    mesh = build_mesh(device.type, config.topology(world_size))
    parallelize(model, mesh, compute_dtype(config), config.strategy)
    materialize(model, device)
    for parameter in model.parameters():
        local = local_tensor(parameter.detach())
        torch.nn.init.normal_(local, std=0.02) if local.is_floating_point() else local.zero_()
    return build_optimizer(model.train(), config, mesh), mesh


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, json=None)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"what to compare with: {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="measured settings whose description contains this")
    parser.add_argument("--untimed", action="store_true", help="measure memory and bytes alone")
    arguments = parser.parse_args(argv)
    if (rank := arms.worker()) is not None:
        directory, number = rank
        return arms.as_rank(directory, measure(cases()[int(number)], directory, not arguments.untimed))
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "measured" in arguments.parts:
        print_measured(arguments)
    if "rehearsed" in arguments.parts:
        print_rehearsed()
    if "published" in arguments.parts:
        print_published()
    return 0


def print_measured(arguments: argparse.Namespace) -> None:
    print(f"{machine()}; {WORLD_SIZE} ranks, fp32; MB are 10^6 bytes")
    figures = []
    for number, case in enumerate(cases()):
        if arguments.only in str(case):
            figures.append(run(number, case, not arguments.untimed))
            # minutes in all: what is known is told at once
            print(f"{case}: {error(figures[-1]):+.1%}", file=sys.stderr, flush=True)
    print_rows([row(f) for f in figures], text=["peak at"])
    within = sum(abs(error(f)) <= MOST_ERROR for f in figures)
    exact = sum(f["bytes_forecast"] == f["bytes_measured"] for f in figures)
    print(f"memory within {MOST_ERROR:.0%}: {within} of {len(figures)}; bytes exact: {exact} of {len(figures)}\n")
    write_json(arguments.json, figures)


def row(f: dict[str, Any]) -> dict[str, str]:
    sent, counted = (sum(f[name].values()) / MB for name in ("bytes_forecast", "bytes_measured"))
    found = {
        "setting": f["case"],
        "before MB": f"{f['before'] / MB:.0f}",
        "forecast": f"{f['memory_forecast'] / MB:.1f}",
        "measured": f"{f['memory_measured'] / MB:.1f}",
        "off": f"{error(f):+.1%}",
        "peak at": f["when"],
        "sent MB": f"{sent:.2f}",
        "counted": f"{counted:.2f}",
    }
    return found | {of: f"{f[of]:.2f}" for of in ("seconds", "seconds forecast") if of in f}


def error(f: dict[str, Any]) -> float:
    """Error of the memory forecast, relative to what was measured."""
    return float(f["memory_forecast"] / f["memory_measured"] - 1)


def run(number: int, case: Case, is_timed: bool = True) -> dict[str, Any]:
    """The forecast of one case, and what fresh ranks took; of these, the one with the highest peak.

    Args:
        number: of the case, in `cases()`.
        is_timed: whether steps are timed and forecast too.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags = ["--untimed"] * (not is_timed)
        figures = arms.on_ranks("benchmarks.plan_accuracy", flags, WORLD_SIZE, directory, str(number), **GIVEN_BACK)
        hardware = load_measured(directory / HARDWARE) if is_timed else CPU
    worst: dict[str, Any] = max(figures, key=lambda f: f["memory_measured"])
    account = forecast(case, hardware)
    if is_timed:
        worst["seconds forecast"] = account.time.total
    return worst | {
        "case": str(case),
        "when": account.memory.when,
        "memory_forecast": account.memory.peak,
        "terms": account.memory.kinds.terms(),
        "bytes_forecast": forecast_bytes(account, case.not_gathered),
    }


def forecast(case: Case, hardware: Hardware = CPU) -> Account:
    """What a rank takes by forecast."""
    of_model = case.model_config
    forecasts = Forecasts(of_model.to_dict(), lambda: of_model, "cpu", is_kept=False)
    cluster, routing = Cluster(hardware, WORLD_SIZE, 0.0), GivenRouting(samples=1, trained=case.trained)
    return forecasts.account(Asked(case.config, WORLD_SIZE, cluster, routing=routing, device="cpu"))


def measure(case: Case, directory: Path, is_timed: bool) -> list[dict[str, Any]]:
    """On each rank: figures of one case, of each rank; in the directory what they run on."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    warm_up(case, ranks.device)
    gc.collect()
    before = arms.resident("VmRSS")
    config, model_config = case.config, case.model_config
    model, optimizer, mesh = build_run(config, model_config, WORLD_SIZE, ranks.device)
    batch = full_batch(config, model_config.vocab_size, ranks.rank // config.ranks_per_sequence, mesh.cp_group)

    def step() -> float:
        return train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0).loss

    step()
    with CountTraffic() as counted:
        step()
    timed = arms.steps_of(step, 3 if is_timed else 0, ranks.device, warm_up=0)
    figures: dict[str, Any] = {
        "before": before,
        "memory_measured": arms.resident("VmHWM") - before,
        "bytes_measured": {kind: round(counted.sent[kind]) for kind in KINDS if counted.sent[kind]},
    }
    if is_timed:
        speeds = check_groups(mesh, 4 * model_config.hidden_size, ranks.device, WORLD_SIZE)
        figures["seconds"] = statistics.median(timed.seconds)
        hardware = measured_hardware(speeds, WORLD_SIZE, ranks.device)
        if ranks.rank == 0:
            save_measured(hardware, directory / HARDWARE)
    return arms.gathered(figures)


def warm_up(case: Case, device: torch.device) -> None:
    """A step of the same model with two layers, all of whose tensors are given back."""
    config, model_config = case.config, CONFIG_MAPPING[case.family](**{**case.sizes, "num_hidden_layers": 2})
    model, optimizer, mesh = build_run(config, model_config, WORLD_SIZE, device)
    batch = full_batch(config, model_config.vocab_size, 0, mesh.cp_group)
    train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0)


def forecast_bytes(account: Account, not_gathered: int) -> dict[str, int]:
    """What a rank sends in a step, by kind."""
    sent: dict[str, float] = defaultdict(float, {"all-gather": -not_gathered})
    for each in account.sent:
        sent[each.kind] += each.total
    return {kind: round(sent[kind]) for kind in KINDS if sent[kind]}


if __name__ == "__main__":
    sys.exit(main())
