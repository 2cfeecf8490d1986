"""How right the planner is: `python -m benchmarks.plan_accuracy [measured] [rehearsed] [published]`.

measured: settings of small random models on this machine's CPU, each on ranks that are started afresh. The peak is
VmHWM, the most that a rank's process ever held, less what it held before its model was built and after a step of the
same model with fewer layers, in which libraries compile code and make buffers for these shapes. What is freed goes back
to the system at once (benchmarks.variants.GIVEN_BACK); with --default-malloc it does not, and the difference is
malloc's slack. Bytes are counted at the collectives of one step. Every expert gets equally many tokens, as the forecast
assumes. Seconds are the median of 3 steps; the forecast goes by rates that the same ranks measure.

rehearsed: models at full size on 8 to 1,024 GPUs: what dry runs of short models tell of all layers, beside a dry run of
these (`benchmarks.rehearsed`).

published: figures of others' runs, with every assumption said; none is fitted to them (`benchmarks.published`).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING

from benchmarks.load_memory import resident
from benchmarks.published import published
from benchmarks.rehearsed import print_rehearsed
from benchmarks.traffic import CountTraffic
from benchmarks.variants import GIVEN_BACK, forced_experts
from expertmesh.moe.experts.lora import store_frozen
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.mesh import Mesh, build_mesh
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.parallelize.parallelize import materialize, parallelize
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.training.cluster.check import check_groups, measured_hardware
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.engine.assembly import compute_dtype
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.model_setup.rates import rates_from
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import Device, Hardware, Link
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.this_machine import CPU
from expertmesh.training.steps.step import train_step

NO_LOSSES = LossWeights(0.0, 0.0)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
PARTS = ("measured", "rehearsed", "published")
WORLD_SIZE = 4
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


def balance_routing(model: Any) -> None:
    """Have token t choose experts t·K, t·K + 1, ... in place of the router's, all of which then get equally many."""

    def chosen_in_turn(router: Any, inputs: Any, routing: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits_TE, weights_TK, _ = routing
        (num_tokens, num_experts), top_k = logits_TE.shape, weights_TK.shape[1]
        return logits_TE, weights_TK, forced_experts(num_tokens, num_experts, top_k, logits_TE.device)

    for layer in moe_layers(model):
        model.get_submodule(layer.router).register_forward_hook(chosen_in_turn)


def full_batch(config: TrainConfig, vocabulary: int, seed: int, cp_group: CPGroup | None = None) -> Batch:
    """Random tokens that fill every sequence; all but the first of a sequence are learned. cp_group: whose ranks share
    them, each with its part."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.per_device_train_batch_size, config.max_seq_length)
    rows = torch.randint(0, vocabulary, shape, generator=generator)
    return collate([[Sample.of_prompt(row.tolist(), 0)] for row in rows], cp_group)


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


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"what to compare with: {', '.join(PARTS)}")
    parser.add_argument("--default-malloc", action="store_true", help="leave malloc's thresholds as they are")
    parser.add_argument("--only", default="", help="measured settings whose description contains this")
    parser.add_argument("--json", type=Path, default=None, help="also write what was measured here")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--untimed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return measure(cases()[int(arguments.worker[0])], Path(arguments.worker[1]), not arguments.untimed)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "measured" in arguments.parts:
        print_measured(arguments)
    if "rehearsed" in arguments.parts:
        print_rehearsed()
    if "published" in arguments.parts:
        for told in published():
            print(told, flush=True)
    return 0


def print_measured(arguments: argparse.Namespace) -> None:
    print(f"{WORLD_SIZE} ranks, fp32, CPU, torch {torch.__version__}, {os.cpu_count()} cores; MB are 10^6 bytes")
    print(HEADING)
    figures = []
    for number, case in enumerate(cases()):
        if arguments.only in str(case):
            figures.append(run(number, case, arguments.default_malloc))
            print(line(figures[-1]), flush=True)
    within = sum(abs(error(f)) <= MOST_ERROR for f in figures)
    exact = sum(f["bytes_forecast"] == f["bytes_measured"] for f in figures)
    print(f"memory within {MOST_ERROR:.0%}: {within} of {len(figures)}; bytes exact: {exact} of {len(figures)}\n")
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(figures, indent=1))


HEADING = (
    f"{'setting':<38}{'before MB':>10}{'forecast':>9}{'measured':>9}{'off':>7}   {'peak at':<48}"
    f"{'sent MB':>9}{'counted':>9}{'s':>7}{'forecast':>9}"
)


def line(f: dict[str, Any]) -> str:
    sent, counted = (sum(f[name].values()) / 1e6 for name in ("bytes_forecast", "bytes_measured"))
    seconds = f"{f['seconds']:>7.2f}{f['seconds_forecast']:>9.2f}"
    return (
        f"{f['case']:<38}{f['before'] / 1e6:>10.0f}{f['memory_forecast'] / 1e6:>9.1f}{f['memory_measured'] / 1e6:>9.1f}"
        f"{error(f):>+7.1%}   {f['when']:<48}{sent:>9.2f}{counted:>9.2f}{seconds}"
    )


def error(f: dict[str, Any]) -> float:
    """Error of the memory forecast, relative to what was measured."""
    return float(f["memory_forecast"] / f["memory_measured"] - 1)


def run(number: int, case: Case, default_malloc: bool = False, is_timed: bool = True) -> dict[str, Any]:
    """The forecast of one case, and what fresh ranks took; of these, the one with the highest peak.

    Args:
        number: of the case, in `cases()`.
        is_timed: whether steps are timed and forecast too.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if not default_malloc:
        environment |= GIVEN_BACK
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
        command += ["-m", "benchmarks.plan_accuracy", "--worker", str(number), directory]
        command += [] if is_timed else ["--untimed"]
        done = subprocess.run(command, timeout=600, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the ranks of {case} failed:\n{done.stderr[-4000:]}")
        figures = [json.loads(file.read_text()) for file in sorted(Path(directory).glob("*.json"))]
    worst: dict[str, Any] = max(figures, key=lambda f: f["memory_measured"])
    hardware = _hardware(worst["hardware"]) if is_timed else CPU
    account = forecast(case, hardware)
    if is_timed:
        worst["seconds_forecast"] = account.time.total
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


def _hardware(told: dict[str, Any]) -> Hardware:
    links = dict(inside=Link(**told["inside"]), between=Link(**told["between"]))
    return Hardware(**{**told, **links, "device": Device(**told["device"]), "rates": rates_from(told["rates"])})


def measure(case: Case, directory: Path, is_timed: bool) -> int:
    """On each rank: figures of one case."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    warm_up(case, ranks.device)
    gc.collect()
    before = resident("VmRSS")
    config, model_config = case.config, case.model_config
    model, optimizer, mesh = build_run(config, model_config, WORLD_SIZE, ranks.device)
    batch = full_batch(config, model_config.vocab_size, ranks.rank // config.ranks_per_sequence, mesh.cp_group)
    train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0)
    with CountTraffic() as counted:
        train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0)
    seconds = []
    for _ in range(3 if is_timed else 0):
        dist.barrier()
        begun = time.perf_counter()
        train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0)
        seconds.append(time.perf_counter() - begun)
    figures: dict[str, Any] = {
        "before": before,
        "memory_measured": resident("VmHWM") - before,
        "bytes_measured": {kind: round(counted.sent[kind]) for kind in KINDS if counted.sent[kind]},
    }
    if is_timed:
        speeds = check_groups(mesh, 4 * model_config.hidden_size, ranks.device, WORLD_SIZE)
        figures["seconds"] = statistics.median(seconds)
        figures["hardware"] = asdict(measured_hardware(speeds, WORLD_SIZE, ranks.device))
    (directory / f"{ranks.rank}.json").write_text(json.dumps(figures))
    end_process_group()
    return 0


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
