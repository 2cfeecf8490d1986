"""Memory and time of the loss from chunked logits against unchunked ones: `python -m benchmarks.cross_entropy`.

Computes loss, gradient of the last hidden states and gradient of the head's weight, as one training step does, with
each kind of `--cross-entropy`. Every run is a process of its own, the kinds interleaved in rounds. Peak: what the
process holds at most above its inputs, by the kernel's high-water mark of resident memory on a CPU (VmHWM) and by
torch's allocator on a GPU. Seconds: the fastest of the repetitions in a process. Prints the medians over the rounds,
and the ratios to `full` in the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.load_memory import MB, resident
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.training.data.batch import IGNORED
from expertmesh.training.loss.head import CHUNK_BYTES, LOSS_SUMS, Targets, chunks_of


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="positions in the batch of one rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--share", type=float, default=1.0, help="of the positions, those with a target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print(json.dumps(measure(arguments.worker, arguments)))
        return 0
    kinds = list(LOSS_SUMS)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"{arguments.tokens} tokens, {arguments.share:.0%} of them trained, width {arguments.width}, vocabulary "
        f"{arguments.vocabulary}, {arguments.dtype}, {arguments.device} ({device}); {arguments.rounds} rounds of fresh "
        f"processes with {arguments.repetitions} repetitions each, medians"
    )
    print_chunks(arguments)
    rounds = [{kind: start_worker(kind) for kind in kinds} for _ in range(arguments.rounds)]
    figures = {kind: summarize(kind, rounds) for kind in kinds}
    print_table(figures)
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(figures, indent=2))
    return 0


def print_chunks(arguments: argparse.Namespace) -> None:
    """Chunks, and the bytes of the weight and its gradient that they read and write, by formula: each reads the weight
    for the logits and for the rows' gradient, and adds to the weight's in fp32 (a single one, or the first, is
    written at once)."""
    rows, vocabulary, width = round(arguments.tokens * arguments.share), arguments.vocabulary, arguments.width
    size, elements = getattr(torch, arguments.dtype).itemsize, vocabulary * width
    ours = chunks_of(rows, vocabulary, CHUNK_BYTES[arguments.device])
    # a product in half precision is written, read again and added
    adding = 2 * 4 + (2 * size if size < 4 else 0)
    own = elements * (ours * 2 * size + (ours * adding if ours > 1 or size == 4 else size))
    print(f"by formula: chunked {ours} chunks, {own / 1e9:.1f} GB of weight and gradient")


def start_worker(kind: str) -> dict[str, float]:
    """Measure one kind in a fresh process with the flags of this one."""
    command = [sys.executable, "-m", "benchmarks.cross_entropy", *sys.argv[1:], "--worker", kind]
    done = subprocess.run(command, check=True, timeout=540, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Peak above the inputs in 10^6 bytes, and seconds of the fastest repetition."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    # the first matmul takes memory for threads and kernels, which is none of the loss's
    warm = torch.ones(64, 64, device=device, dtype=dtype)
    (warm @ warm).sum().item()
    torch.manual_seed(0)
    x_BSD = torch.randn(1, arguments.tokens, arguments.width, device=device, dtype=dtype).requires_grad_()
    weight_VD = torch.randn(arguments.vocabulary, arguments.width, device=device, dtype=dtype) * 0.02
    weight_VD.requires_grad_()
    targets_BS = torch.randint(0, arguments.vocabulary, (1, arguments.tokens))
    num_targets = round(arguments.tokens * arguments.share)
    targets_BS[:, torch.randperm(arguments.tokens)[num_targets:]] = IGNORED
    index_N = (targets_BS != IGNORED).flatten().nonzero().squeeze(1)
    targets = Targets(targets_BS.to(device), index_N.to(device))

    start, seconds, loss = memory(device), [], torch.zeros(())
    for _ in range(arguments.repetitions):
        x_BSD.grad = weight_VD.grad = None
        begin = time.perf_counter()
        loss = LOSS_SUMS[kind](x_BSD, weight_VD, None, targets) / max(num_targets, 1)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"peak_mb": (peak(device) - start) / MB, "seconds": min(seconds), "loss": float(loss)}


def memory(device: torch.device) -> int:
    """Bytes held now."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else resident("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes held since the process began."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def summarize(kind: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: statistics.median(r[kind][name] for r in rounds) for name in ("peak_mb", "seconds", "loss")
    }
    for name in ("peak_mb", "seconds"):
        figures[f"{name}_ratio_to_full"] = statistics.median(r[kind][name] / r["full"][name] for r in rounds)
        figures[f"{name}_by_round"] = [round(r[kind][name], 3) for r in rounds]
    return figures


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(f"{'':8}{'peak MB':>9}{'x full':>8}{'seconds':>9}{'x full':>8}{'loss':>10}   seconds by round")
    for kind, f in figures.items():
        print(
            f"{kind:8}{f['peak_mb']:9.0f}{f['peak_mb_ratio_to_full']:8.2f}{f['seconds']:9.3f}"
            f"{f['seconds_ratio_to_full']:8.2f}{f['loss']:10.5f}   {f['seconds_by_round']}"
        )


if __name__ == "__main__":
    sys.exit(main())
