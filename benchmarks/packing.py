"""What packing gains over padding: `python -m benchmarks.packing --ranks 4 --ep-size 4`.

Whole training steps of one random Mixtral:

    padded to max         each sequence one sample, padded to --max-seq-length, as a fixed shape needs it
    padded                each sequence one sample, padded to the longest of the micro-batch: train_ep.py without flags
    grouped               the same with --group-by-length
    padded, larger batch  as `padded`, with as many sequences per micro-batch as make up the tokens of a packed step
    packed                --packing

All but `padded, larger batch` have the same flags: as many sequences per micro-batch, of at most --max-seq-length
tokens. Padding is not counted. Lengths are drawn from a log-normal distribution with the mean and spread of GSM8K's
questions and answers.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import arms
from benchmarks.arms import Arm, Benchmark, Figures, Rounds, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line
from benchmarks.small_models import random_mixtral
from expertmesh.training.data.batch import IGNORED, Batch, collate
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.engine.engine import Engine

VARIANTS = ("padded to max", "padded", "grouped", "padded, larger batch", "packed")
# tokens of GSM8K's training set with a 4,096-token vocabulary: the logarithm's mean and spread
LOG_MEAN, LOG_SPREAD = 5.2, 0.38


@command
def main(argv: Sequence[str] | None = None) -> int:
    sizes = dict(hidden_size=256, intermediate_size=896, layers=6, vocabulary=4096)
    parser = parser_of(__doc__, ranks=4, ep_size=4, max_seq_length=1024, rows=4, steps=3, rounds=3, json=None, **sizes)
    return Benchmark("benchmarks.packing", arms_of, save_model, measure, report).main(parser.parse_args(argv), argv)


def arms_of(arguments: argparse.Namespace) -> list[Arm]:
    on_gpu = torch.cuda.is_available()
    settings = dict(ep_size=arguments.ep_size, packing=True, bf16=on_gpu, use_cpu=not on_gpu)
    return [Arm(name, arguments.ranks, settings) for name in VARIANTS]


def save_model(arguments: argparse.Namespace, path: Path) -> None:
    random_mixtral(arguments, max_position_embeddings=arguments.max_seq_length).save_pretrained(path)


def measure(arguments: argparse.Namespace, arm: Arm, model: Path) -> Figures:
    """On each rank: a step of each of several global batches."""
    made = arm.made(model)
    samples = draw_samples(arguments)
    batches = [batch.to(made.engine.ranks.device) for batch in batches_of(arm.name, samples, arguments, made.engine)]
    in_turn = iter(batches)
    figures = arms.steps_of(lambda: made.step([next(in_turn)]), arguments.steps, made.engine.ranks.device)
    counts = [(batch.num_tokens, batch.tokens_BS.numel()) for batch in batches[1:]]
    tokens, positions = (sum(sum(of[which] for of in rank) for rank in arms.gathered(counts)) for which in (0, 1))
    length = float(samples.lengths.float().mean())
    figures.more = {"tokens": tokens, "positions": positions, "parameters": made.engine.counts.total, "length": length}
    return figures


def batches_of(variant: str, samples: Samples, arguments: argparse.Namespace, engine: Engine) -> Iterator[Batch]:
    """This rank's micro-batch of each step, the one of the warm-up too."""
    rows = make_rows(samples, variant == "packed", arguments.max_seq_length, seed=0)
    a_forward = arguments.rows
    if variant == "padded, larger batch":
        a_forward = round(a_forward * arguments.max_seq_length / float(samples.lengths.float().mean()))
    order = DataOrder(len(rows), arguments.ranks, a_forward, 1, 0, rows.lengths if variant == "grouped" else None)
    # a data set smaller than a batch would leave ranks without sequences
    assert order.steps_per_epoch > arguments.steps, "fewer sequences than the steps take"
    for step in range(arguments.steps + 1):
        (forward,) = order.micro_batches(step, engine.data_rank)
        batch = collate([rows[row] for row in forward])
        yield pad_to(batch, arguments.max_seq_length) if variant == "padded to max" else batch


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
        "weights": [[]] * number,
        "is_cut": [False] * number,
        "num_targets": [n - max(n // 3, 1) for n in lengths],
    }
    return Samples(Dataset.from_dict(table), [])


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


def report(arguments: argparse.Namespace, rounds: Rounds) -> None:
    of_all = next(iter(rounds.values()))[0].more
    size, length = (
        f"{of_all['parameters'] / 1e6:.1f} M parameters",
        f"samples of {of_all['length']:.0f} tokens on average",
    )
    print(settings_line(arguments, size, length, "medians"))
    speeds = {name: [one.more["tokens"] / sum(one.seconds) for one in of] for name, of in rounds.items()}
    rows = []
    for name, figures in rounds.items():
        speed, counted = speeds[name], figures[0].more
        rows.append(
            {
                "variant": name,
                "tokens/step": f"{counted['tokens'] / arguments.steps:,.0f}",
                "padding": f"{1 - counted['tokens'] / counted['positions']:.0%}",
                "tokens/s": f"{statistics.median(speed):,.0f}",
                "range": f"{min(speed):,.0f}-{max(speed):,.0f}",
                "x padded": f"{ratio(speed, speeds['padded']):.2f}",
                "tokens/CPU-s": f"{statistics.median(counted['tokens'] / sum(f.cpu_seconds) for f in figures):,.0f}",
            }
        )
    print_rows(rows)


if __name__ == "__main__":
    sys.exit(main())
