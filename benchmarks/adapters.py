"""Cost of training adapters, against full fine-tuning and PEFT: `python -m benchmarks.adapters`.

    full          the whole model, our experts
    lora          LoRA on attention and every expert; the base as it is
    lora-fp8      the base's matrices in fp8, one scale per row
    lora-nf4      the same in nf4
    peft          PEFT's LoraConfig(target_modules=..., target_parameters=...) on transformers' own model; on several
                  ranks on its expert parallelism, DistributedConfig(ep_size=...)

Steps of the same random Mixtral and batch, each variant in fresh processes, in turn, round after round; a variant's
error is shown if it fails. Tokens a CPU-second are summed over ranks; resident is the peak of a rank's memory above
what it held before its model was made; sent is what a rank sends in its first step. Tensors is the peak of what
storages held at once, counted in a step after those that are timed. Of it, weights are those that are not trained;
trained is what is, with gradients and optimizer state; activations are what autograd keeps for backward, with fp32
logits. over: tensors beyond the weights, over trained and activations together.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.load_memory import MB, resident, restart_peak
from benchmarks.traffic import CountTraffic
from benchmarks.workers import random_mixtral
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import end_process_group, settle_malloc, start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors
from expertmesh.training.steps.step import train_step

VARIANTS = ("full", "lora", "lora-fp8", "lora-nf4", "peft")
LEARNING_RATE = 1e-4


class VariantFailed(Exception):
    """A variant's processes ended with an error, the last line of which this is."""


@ends_with_reader
def main() -> int:
    arguments = parse_arguments()
    if arguments.worker is not None:
        return measure(arguments)
    with tempfile.TemporaryDirectory() as directory:
        numbers = make_model(Path(directory) / "model", arguments)
        print(
            f"{arguments.ranks} ranks, ep {arguments.ep_size}; fp32; {numbers / 1e6:.1f} M parameters: "
            f"{arguments.layers} layers, hidden {arguments.hidden_size}, expert width {arguments.intermediate_size}, "
            f"{arguments.experts} experts, top-2; rank {arguments.rank}; {arguments.seq_length} tokens per rank; "
            f"{arguments.rounds} rounds of {arguments.steps} steps, median"
        )
        figures: dict[str, list[dict[str, float]]] = {variant: [] for variant in arguments.variants}
        errors: dict[str, str] = {}
        for _ in range(arguments.rounds):
            for variant in [variant for variant in arguments.variants if variant not in errors]:
                try:
                    figures[variant].append(start_variant(variant, Path(directory), arguments))
                except VariantFailed as error:
                    errors[variant] = str(error)
    print_table({variant: rounds for variant, rounds in figures.items() if rounds})
    for variant, why in errors.items():
        print(f"{variant} failed: {why}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=1792)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--timeout", type=int, default=300, help="time limit per variant, in seconds")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(path: Path, arguments: argparse.Namespace) -> int:
    """Save a random Mixtral in fp32; its parameters."""
    experts = arguments.experts
    model = random_mixtral(arguments, num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2)
    model.save_pretrained(path)
    return int(model.num_parameters())


def start_variant(variant: str, directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Run a variant in processes of its own; its figures.

    Raises:
        VariantFailed: it ended with an error.
    """
    flags = []
    for name in ("ranks", "ep_size", "vocabulary", "seq_length", "rank", "steps"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    command += ["-m", "benchmarks.adapters", "--worker", str(directory), "--variant", variant, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, timeout=arguments.timeout, env=environment, stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        raised = re.findall(r"^(?:\[rank\d+\]: ?)?(\w+(?:Error|Exception): .*)$", ended.stderr, re.MULTILINE)
        raise VariantFailed(raised[0] if raised else f"exit code {ended.returncode}")
    figures: dict[str, float] = json.loads((directory / f"{variant}.json").read_text())
    return figures


def measure(arguments: argparse.Namespace) -> int:
    """On each rank of a variant."""
    if arguments.variant != "peft":
        settle_malloc()  # as train_ep.py does
    ranks = start_process_group(use_cpu=True, timeout_seconds=arguments.timeout)
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(0, arguments.vocabulary, (arguments.seq_length,), generator=generator).tolist()
    batch = collate([[Sample(tokens, [True] * len(tokens))]])
    build = build_peft if arguments.variant == "peft" else build_ours
    # what is imported for a model is no part of it
    build(arguments, ranks, batch, only_import=True)
    restart_peak()
    start = resident("VmRSS")
    step, model, optimizer = build(arguments, ranks, batch)
    kept = _Kept(model)
    with CountTraffic() as traffic, kept:
        loss = step()
    begin = _cpu_seconds()
    for _ in range(arguments.steps):
        step()
    seconds, peak = _cpu_seconds() - begin, resident("VmHWM") - start
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    with LiveTensors([*model.parameters(), *model.buffers(), *moments]) as live:
        step()
    totals = torch.tensor([seconds, peak, live.peak], dtype=torch.float64)
    dist.all_reduce(totals[:1])
    dist.all_reduce(totals[1:], op=dist.ReduceOp.MAX)
    seconds, peak, tensors = totals.tolist()
    logits = 4 * arguments.seq_length * arguments.vocabulary
    if ranks.rank == 0:
        figures = {
            "tokens_per_cpu_second": arguments.steps * arguments.seq_length * ranks.world_size / seconds,
            "resident_mb": peak / MB,
            "tensors_mb": tensors / MB,
            "sent_mb": sum(traffic.sent.values()) / MB,
            "reduced_mb": (traffic.sent["reduce-scatter"] + traffic.sent["all-reduce"]) / MB,
            "loss": loss,
            "weights_mb": _bytes(model, trained=False) / MB,
            "trained_mb": 4 * _bytes(model, trained=True) / MB,
            # our head keeps no logits, which are there all the same for a moment, unless another keeps them
            "activations_mb": (sum(kept.storages.values()) + (0 if logits in kept.storages.values() else logits)) / MB,
        }
        (arguments.worker / f"{arguments.variant}.json").write_text(json.dumps(figures))
    end_process_group()
    return 0


class _Kept(saved_tensors_hooks):
    """Within it, `storages` has the bytes of all that autograd keeps for backward, but for the model's own weights."""

    def __init__(self, model: Any):
        own = {_local(p).untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in own:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach())


def _bytes(model: Any, trained: bool) -> int:
    """Bytes of this rank's parameters that are trained, or of those that are not."""
    return sum(_local(p).numel() * p.element_size() for p in model.parameters() if p.requires_grad == trained)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def build_ours(arguments: argparse.Namespace, ranks: Any, batch: Batch, only_import: bool = False) -> Any:
    source = open_source(arguments.worker / "model")
    if only_import:
        source.build()
        return None
    kind: Any = arguments.variant.partition("-")[2]
    adapter: Any = "none" if arguments.variant == "full" else "lora"
    config = TrainConfig(
        model="-",
        dataset=["-"],
        learning_rate=LEARNING_RATE,
        ep_size=arguments.ep_size,
        cross_entropy="chunked",
        adapter=adapter,
        lora_rank=arguments.rank,
        lora_alpha=32.0,
        base_dtype=kind or "auto",
    )
    model = assemble(config, source, "cpu").model
    mesh = build_mesh("cpu", Topology(ranks.world_size, arguments.ep_size))
    place(config, model, source, mesh, ranks.device)
    optimizer = build_optimizer(model.train(), config, mesh)

    def step() -> float:
        return train_step(model, optimizer, [batch], mesh, LossWeights(0.0, 0.0), 1.0).loss

    return step, model, optimizer


def build_peft(arguments: argparse.Namespace, ranks: Any, batch: Batch, only_import: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if only_import:
        open_source(arguments.worker / "model").build()
        return None
    spread = {}
    if ranks.world_size > 1:
        spread["distributed_config"] = DistributedConfig(fsdp_size=ranks.world_size, ep_size=arguments.ep_size)
    base = AutoModelForCausalLM.from_pretrained(arguments.worker / "model", dtype=torch.float32, **spread)
    config = LoraConfig(
        r=arguments.rank,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    model: Any = get_peft_model(base, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=batch.tokens_BS, labels=batch.tokens_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step, model, optimizer


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    """Medians over rounds; ratios are medians of the ratio within a round."""
    print(
        "variant    tokens/CPU-s           range   resident   tensors   weights   trained   activ.   over   sent MB"
        "   reduced MB     loss   times full   times peft"
    )
    for variant, rounds in figures.items():
        middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        rates = [r["tokens_per_cpu_second"] for r in rounds]
        ratios = []
        for other in ("full", "peft"):
            pairs = zip(rounds, figures.get(other, []), strict=False)
            among = [a["tokens_per_cpu_second"] / b["tokens_per_cpu_second"] for a, b in pairs]
            ratios.append(f"{statistics.median(among):10.2f} x" if among else " " * 12)
        print(
            f"{variant:10s} {middle['tokens_per_cpu_second']:12.1f} {min(rates):8.1f}-{max(rates):<6.1f} "
            f"{middle['resident_mb']:10,.0f} {middle['tensors_mb']:9,.0f} {middle['weights_mb']:9,.0f} "
            f"{middle['trained_mb']:9,.0f} {middle['activations_mb']:8,.0f} {_over(middle):6.2f} "
            f"{middle['sent_mb']:9.1f} {middle['reduced_mb']:12.2f} "
            f"{middle['loss']:8.4f} " + " ".join(ratios)
        )


def _over(figures: dict[str, float]) -> float:
    beyond = figures["tensors_mb"] - figures["weights_mb"]
    return beyond / (figures["trained_mb"] + figures["activations_mb"])


if __name__ == "__main__":
    sys.exit(main())
