"""Memory and time of the loss from chunked logits against unchunked ones: `python -m benchmarks.cross_entropy`.

Computes loss, gradient of the last hidden states and gradient of the head's weight, as one training step does, with
each kind of `--cross-entropy`. Peak: what the process holds at most above its inputs, by the kernel's high-water mark
of resident memory on a CPU (VmHWM) and by torch's allocator on a GPU. Seconds: the fastest of the repetitions in a
process.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import arms
from benchmarks.arms import MB, Arm, Benchmark, Figures, Rounds, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line
from expertmesh.training.data.batch import IGNORED
from expertmesh.training.loss.head import LOSS_SUMS, Targets


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, hidden_size=512, vocabulary=32000, repetitions=3, rounds=3, json=None)
    parser.add_argument("--tokens", type=int, default=4096, help="positions in the batch of one rank")
    parser.add_argument("--share", type=float, default=1.0, help="of the positions, those with a target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    start = partial(arms.on_ranks, OMP_NUM_THREADS=str(torch.get_num_threads()))
    benchmark = Benchmark("benchmarks.cross_entropy", kinds, no_model, measure, report, arms.agree_to(1e-4), start)
    return benchmark.main(parser.parse_args(argv), argv)


def kinds(arguments: argparse.Namespace) -> list[Arm]:
    return [Arm(kind) for kind in LOSS_SUMS]


def no_model(arguments: argparse.Namespace, path: Path) -> None:
    """There is a loss alone."""


def measure(arguments: argparse.Namespace, arm: Arm, path: Path) -> Figures:
    """Peak above the inputs in bytes, and seconds of the fastest repetition."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    # the first matmul takes memory for threads and kernels, which is none of the loss's
    warm = torch.ones(64, 64, device=device, dtype=dtype)
    (warm @ warm).sum().item()
    torch.manual_seed(0)
    x_BSD = torch.randn(1, arguments.tokens, arguments.hidden_size, device=device, dtype=dtype).requires_grad_()
    weight_VD = torch.randn(arguments.vocabulary, arguments.hidden_size, device=device, dtype=dtype) * 0.02
    weight_VD.requires_grad_()
    targets_BS = torch.randint(0, arguments.vocabulary, (1, arguments.tokens))
    num_targets = round(arguments.tokens * arguments.share)
    targets_BS[:, torch.randperm(arguments.tokens)[num_targets:]] = IGNORED
    index_N = (targets_BS != IGNORED).flatten().nonzero().squeeze(1)
    targets = Targets(targets_BS.to(device), index_N.to(device))

    def run() -> float:
        x_BSD.grad = weight_VD.grad = None
        loss = LOSS_SUMS[arm.name](x_BSD, weight_VD, None, targets) / max(num_targets, 1)
        loss.backward()
        return float(loss)

    start = arms.held_now(device)
    took = arms.timed(run, device, arguments.repetitions)
    fastest = min(one.seconds for one in took)
    return Figures([took[0].gave], [fastest], more={"peak": arms.most_held(device) - start})


def report(arguments: argparse.Namespace, rounds: Rounds) -> None:
    print(settings_line(arguments, "fresh processes, medians", device=arguments.device))
    seconds = {kind: [one.seconds[0] for one in figures] for kind, figures in rounds.items()}
    peaks = {kind: [one.more["peak"] / MB for one in figures] for kind, figures in rounds.items()}
    print_rows(
        [
            {
                "": kind,
                "peak MB": f"{statistics.median(peaks[kind]):.0f}",
                "x full": f"{ratio(peaks[kind], peaks['full']):.2f}",
                "seconds": f"{statistics.median(seconds[kind]):.3f}",
                "x  full": f"{ratio(seconds[kind], seconds['full']):.2f}",
                "loss": f"{figures[0].losses[0]:.5f}",
                "seconds by round": ", ".join(f"{one:.3f}" for one in seconds[kind]),
            }
            for kind, figures in rounds.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
