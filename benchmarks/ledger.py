"""Cost breakdown of one rank's training step on a GPU by part, estimated without one: `python -m benchmarks.ledger`.

    python -m benchmarks.ledger --config configs/mixtral_8x7b.yaml --model tests/published/configs/mixtral-8x7b
    python -m benchmarks.ledger --gpus 16 --gpu B200 --model DIR --ep-size 8 --bf16 ...     # any flag of train_ep.py

The real step (forward, backward, clipping, update) runs on fake tensors, and every operator, Triton
kernel and collective is recorded: FLOPs, bytes read and written, and what part of the step asked for it. Rows are
single samples of --max-seq-length. Time is at the rates that others attained (training/planning/rates.json), or those
of --calibrate: a kernel takes as long as its products or its memory, whichever is longer, and its launch; the host
takes its time for each operator, views included.

moved: bytes read and written. MFU is of the card's rate in bf16,
also where --expert-precision fp8 multiplies at its rate in fp8. Nothing here was measured on a GPU.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from expertmesh.moe.hf_model.counts import seen_pairs, training_flops
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.planning.imbalance import GivenRouting, add_imbalance_flags, read_imbalance
from expertmesh.training.planning.planner.hardware import Hardware, add_hardware_flags, chosen_hardware, products_in
from expertmesh.training.planning.planner.model_config import read_config
from expertmesh.training.planning.rehearsal.peaks import PeakMemory
from expertmesh.training.planning.rehearsal.rank_summary import Ledger, ledger
from expertmesh.training.planning.rehearsal.world import rehearse


@ends_with_reader
def main() -> int:
    arguments, rest = parse_arguments()
    try:
        config = parse_config([*rest, "--dataset", "none"]).settled()
        model_config, _ = read_config(config.model)
        if arguments.layers:
            model_config.num_hidden_layers = arguments.layers
        if config.router_aux_loss_coef is None:
            config = replace(config, router_aux_loss_coef=0.0)
        config = replace(config, packing=False)
        hardware = products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)
        started = time.time()
        routing = GivenRouting(busiest=read_imbalance(arguments.imbalance), loaded=arguments.rank % config.ep_size)
        rehearsed = rehearse(config, model_config, arguments.gpus, arguments.rank, routing=routing)
    except ExpertMeshError as error:
        print(f"benchmarks.ledger: error: {error}", file=sys.stderr)
        return 2
    micro = config.gradient_accumulation_steps
    account = ledger(rehearsed, micro, hardware, arguments.gpus_per_node)
    print(setting(config, model_config, arguments, hardware))
    print_table(account)
    tokens = micro * config.per_device_train_batch_size * config.max_seq_length
    print_forecast(account, hardware, tokens)
    memory = rehearsed.memory
    print(
        f"memory: {memory.peak / 2**30:,.1f} GiB of tensors at the most ({memory.when}), of which {parts_of(memory)}; "
        f"the card has {hardware.device.memory / 2**30:,.0f} GiB"
    )
    targets = micro * config.per_device_train_batch_size * (config.max_seq_length - 1)
    samples = [range(config.max_seq_length)] * (micro * config.per_device_train_batch_size)
    pairs = seen_pairs(rehearsed.counts.attention, samples)
    formula = training_flops(rehearsed.counts, model_config, tokens, targets, pairs)
    print(
        f"FLOPs without recomputation: {account.needed / 1e12:,.2f} T recorded, {formula / 1e12:,.2f} T by the closed "
        f"formula ({account.needed / formula - 1:+.2%}). Traced in {time.time() - started:.0f} s."
    )
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(asdict(account), indent=2) + "\n")
    return 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of train_ep.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_hardware_flags(parser)
    add_imbalance_flags(parser)
    parser.add_argument("--rank", type=int, default=0, help="whose step")
    parser.add_argument("--layers", type=int, default=0, help="decoder layers (default: the model's own)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file, as JSON")
    return parser.parse_known_args()


def setting(config: TrainConfig, model_config: object, arguments: argparse.Namespace, hardware: Hardware) -> str:
    dtype = "bf16" if config.bf16 else "fp32"
    if config.expert_precision == "fp8":
        dtype += ", expert GEMMs in fp8"
    if config.dense_precision == "fp8":
        dtype += ", dense GEMMs in fp8"
    return (
        f"{config.model}, {getattr(model_config, 'num_hidden_layers', '?')} layers; rank {arguments.rank} of "
        f"{arguments.gpus} on {hardware.name}; ep {config.ep_size}, {dtype}, checkpointing "
        f"{config.gradient_checkpointing}, {config.optim}; {config.gradient_accumulation_steps} x "
        f"{config.per_device_train_batch_size} x {config.max_seq_length} tokens per step and rank"
    )


def parts_of(memory: PeakMemory) -> str:
    parts = {
        "parameters that are trained": memory.trained,
        "parameters that are not": memory.parameters - memory.trained,
        "optimizer state": memory.state,
    }
    return ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in parts.items())


def print_table(account: Ledger) -> None:
    print(f"{'part':24s}  TFLOP recomp  moved GB  kernels   sent GB        ms  share")
    for part in (*account.parts, account.total):
        print(
            f"{part.name:24s} {part.flops / 1e12:6.1f} {part.recomputed / 1e12:6.1f} {part.moved / 1e9:9.1f} "
            f"{part.kernels:8,.0f} {part.sent / 1e9:9.2f} {part.seconds * 1e3:9.1f} "
            f"{part.seconds / account.seconds:6.1%}"
        )


def print_forecast(account: Ledger, hardware: Hardware, tokens: int) -> None:
    step = account.time
    waits = {
        "kernels": step.kernels,
        "all-to-alls and sums": step.all_to_alls,
        "gathers of activations": step.gathers,
        "added by FSDP": step.exposed,
        "waited for the host": step.launching,
    }
    made_of = ", ".join(f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in waits.items())
    print(
        f"forecast: {account.seconds * 1e3:,.0f} ms per step, {tokens / account.seconds:,.0f} tokens/s per GPU, "
        f"{account.share_of_peak(hardware):.1%} MFU ({made_of}; FSDP's collectives alone "
        f"{step.sharding * 1e3:,.0f}, the host's calls {step.host * 1e3:,.0f})"
    )


if __name__ == "__main__":
    sys.exit(main())
