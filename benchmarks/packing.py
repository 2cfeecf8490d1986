"""What packing gains over padding: `python -m benchmarks.packing --ranks 4 --ep-size 4`.

Whole training steps (forward, backward, clipping, AdamW) of one sharded model, each variant in turn in every round:

    padded to max         each sequence one sample, padded to --max-seq-length, as a fixed shape needs it
    padded                each sequence one sample, padded to the longest of the micro-batch: train_ep.py without flags
    grouped               the same with --group-by-length
    padded, larger batch  as `padded`, with as many sequences per micro-batch as make up the tokens of a packed step
    packed                --packing

All but `padded, larger batch` have the same flags: as many sequences per micro-batch, of at most --max-seq-length
tokens. Padding is not counted. Lengths are those of --dataset, tokenised with --model's tokenizer, or else drawn from a
log-normal distribution with the mean and spread of GSM8K's questions and answers; the model is a random Mixtral.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.workers import measured_by_workers, random_mixtral
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import IGNORED, Batch, collate
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.sequences import DataOrder, Rows, make_rows
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import train_step

VARIANTS = ("padded to max", "padded", "grouped", "padded, larger batch", "packed")
# tokens of GSM8K's training set with a 4,096-token vocabulary: the logarithm's mean and spread
LOG_MEAN, LOG_SPREAD = 5.2, 0.38


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--model", default="", help="directory with a config.json and a tokenizer, instead of sizes")
    parser.add_argument("--dataset", default="", help="instead of drawn lengths; needs --model")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=896)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--max-seq-length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return measure(arguments.worker, arguments)
    print_table(measured_by_workers("benchmarks.packing", arguments, save_model))
    return 0


def save_model(path: Path, arguments: argparse.Namespace) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    if arguments.model:
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig.from_pretrained(arguments.model))
    else:
        longest = arguments.max_seq_length
        model = random_mixtral(arguments, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=longest)
    model.save_pretrained(path)


def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """On each rank: the variants in turn, round after round."""
    ranks = start_process_group(use_cpu=not torch.cuda.is_available(), timeout_seconds=600)
    device = ranks.device.type
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = open_source(directory / "model")
    config = TrainConfig(
        model="-",
        dataset=["-"],
        ep_size=arguments.ep_size,
        packing=True,
        cross_entropy="chunked",
        bf16=device == "cuda",
        learning_rate=1e-5,
    )
    model = assemble(config, source, device).model
    mesh = build_mesh(device, Topology(ranks.world_size, arguments.ep_size))
    place(config, model, source, mesh, ranks.device)
    optimizer = build_optimizer(model.train(), config, mesh)
    samples = read_samples(arguments) if arguments.dataset else draw_samples(arguments)
    variants = {variant: prepare(variant, samples, arguments, ranks.world_size) for variant in VARIANTS}

    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpu_seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    tokens: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
    positions: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
    for step in range(-1, arguments.rounds):  # the first round only warms up
        for variant, (rows, order) in variants.items():
            (forward,) = order.micro_batches(step + 1, ranks.rank)
            batch = collate([rows[row] for row in forward])
            if variant == "padded to max":
                batch = pad_to(batch, arguments.max_seq_length)
            batch = batch.to(ranks.device)
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            result = train_step(model, optimizer, [batch], mesh, LossWeights(0.0, 0.0), 1.0)
            dist.barrier()
            spent = torch.tensor([time.process_time() - cpu_begin, float(batch.tokens_BS.numel())], dtype=torch.float64)
            elapsed = time.perf_counter() - begin
            dist.all_reduce(spent)
            if step >= 0:
                seconds[variant].append(elapsed)
                cpu_seconds[variant].append(float(spent[0]))
                positions[variant].append(int(spent[1]))
                tokens[variant].append(result.tokens)
    if ranks.rank == 0:
        figures = {
            "setting": f"{ranks.world_size} ranks, ep {arguments.ep_size}, {device}, {dtype}, "
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {arguments.rows} sequences of "
            f"{arguments.max_seq_length} tokens at most, samples of {samples.lengths.float().mean():.0f} tokens on "
            f"average, torch {torch.__version__}, {os.cpu_count()} cores",
            "rounds": arguments.rounds,
            "variants": {
                variant: {
                    "seconds": seconds[variant],
                    "cpu": cpu_seconds[variant],
                    "tokens": tokens[variant],
                    "at": positions[variant],
                }
                for variant in VARIANTS
            },
        }
        (directory / "figures.json").write_text(json.dumps(figures))
    end_process_group()
    return 0


def read_samples(arguments: argparse.Namespace) -> Samples:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    set_chat_template(tokenizer, "")
    return load_samples("--dataset", [arguments.dataset], tokenizer, DataOptions(arguments.max_seq_length), 0)


def draw_samples(arguments: argparse.Namespace, number: int = 4000) -> Samples:
    """Random tokens, two thirds of each sample trained on."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(number, generator=generator) * LOG_SPREAD + LOG_MEAN).exp().long()
    lengths = drawn.clamp(3, arguments.max_seq_length).tolist()
    content = [torch.randint(0, arguments.vocabulary, (n,), generator=generator).tolist() for n in lengths]
    table = {
        "tokens": content,
        "is_trained": [[place >= n // 3 for place in range(n)] for n in lengths],
        "length": lengths,
        "is_cut": [False] * number,
        "num_targets": [n - max(n // 3, 1) for n in lengths],
    }
    return Samples(Dataset.from_dict(table), [])


def prepare(variant: str, samples: Samples, arguments: argparse.Namespace, world_size: int) -> tuple[Rows, DataOrder]:
    rows = make_rows(samples, variant == "packed", arguments.max_seq_length, seed=0)
    a_forward = arguments.rows
    if variant == "padded, larger batch":
        a_forward = round(a_forward * arguments.max_seq_length / float(samples.lengths.float().mean()))
    order = DataOrder(len(rows), world_size, a_forward, 1, 0, rows.lengths if variant == "grouped" else None)
    # a data set smaller than a batch would leave ranks without sequences
    assert order.steps_per_epoch > arguments.rounds, "fewer sequences than the rounds take"
    return rows, order


def pad_to(batch: Batch, length: int) -> Batch:
    """Padded on the right to `length` positions."""
    rows, old = batch.tokens_BS.shape
    more = (0, length - old)
    is_token_BS = torch.ones(rows, old, dtype=torch.bool) if batch.is_token_BS is None else batch.is_token_BS
    row, position = batch.target_index_N // old, batch.target_index_N % old
    return replace(
        batch,
        tokens_BS=F.pad(batch.tokens_BS, more),
        is_token_BS=F.pad(is_token_BS, more),
        targets_BS=F.pad(batch.targets_BS, more, value=IGNORED),
        target_index_N=row * length + position,
    )


def print_table(figures: dict[str, Any]) -> None:
    print(f"{figures['setting']}; median of {figures['rounds']} rounds, variants interleaved")
    print(
        f"{'variant':<20}{'tokens/step':>14}{'padding':>9}{'tokens/s':>10}{'range':>16}{'x padded':>10}"
        f"{'tokens/CPU-s':>14}"
    )
    baseline = rates(figures["variants"]["padded"], "seconds")
    for variant, f in figures["variants"].items():
        speed = rates(f, "seconds")
        gain = statistics.median(a / b for a, b in zip(speed, baseline, strict=True))
        print(
            f"{variant:<20}{statistics.median(f['tokens']):>14,.0f}{1 - sum(f['tokens']) / sum(f['at']):>9.0%}"
            f"{statistics.median(speed):>10,.0f}{f'{min(speed):,.0f}-{max(speed):,.0f}':>16}{gain:>10.2f}"
            f"{statistics.median(rates(f, 'cpu')):>14,.0f}"
        )


def rates(variant: dict[str, list[float]], per: str) -> list[float]:
    """Tokens per second, or per CPU-second of all ranks together, in each round."""
    return [tokens / seconds for tokens, seconds in zip(variant["tokens"], variant[per], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
