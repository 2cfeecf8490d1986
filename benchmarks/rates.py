"""Measure which rates this device attains, by class of operator: `python -m benchmarks.rates [--write FILE]`.

    python -m benchmarks.rates --write card.json
    python -m expertmesh.sharding plan --calibrate card.json --model DIR ...   # and `rehearse`

Matmuls and grouped matmuls by size, attention by length, eigendecompositions, copies, a fused AdamW step, launches, the
host's calls and its waits for the device: medians of nine rounds. Links are those of `--links FILE`, which `sharding
mesh --check --json` writes, else the presets of --gpu and --network. On a GPU, what one cannot measure alone (the
slowing of kernels beside NCCL) or has no kernel for is taken from what was published of --gpu, and said to be; on a CPU
it is left out. Its path for GPUs has not run on one yet.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.commands import command, parser_of, print_rows
from expertmesh.training.attention.flash import flash_attention
from expertmesh.training.attention.flash_kernels import FLASH_KERNELS, computing_by, obstacle
from expertmesh.training.cluster.check import measure_device, median_seconds
from expertmesh.training.model_setup.rates import EIGEN_FLOPS, NEWER_FLASH, Attained, RateConstant, Rates, published
from expertmesh.training.planning.planner.costs import best_rate
from expertmesh.training.planning.planner.hardware import (
    DEVICES,
    LINKS,
    Device,
    Hardware,
    load_measured,
    preset,
    save_measured,
)

SQUARES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}
GROUPS = {
    # experts, rows of each, columns in and out: as Qwen3's on 8 ranks and on one, as Mixtral's
    "cuda": ((128, 512, 2048, 768), (16, 8192, 2048, 768), (16, 2048, 4096, 1536), (1, 16384, 4096, 14336)),
    "cpu": ((16, 32, 256, 128), (8, 128, 256, 512), (1, 512, 512, 1792)),
}
LENGTHS = {"cuda": (512, 1024, 2048, 4096, 16384), "cpu": (128, 512)}
FACTORS = {"cuda": (128, 512, 1024, 2048), "cpu": (32, 128)}
HEADS, WIDTH = 16, 128
PARAMETERS = {"cuda": 2**28, "cpu": 2**22}
CALLS = 200
"""Operators whose calls are timed together."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the rates to FILE, for --calibrate")
    parser.add_argument("--links", type=Path, metavar="FILE", help="take the links that `mesh --check --json` measured")
    parser.add_argument("--gpu", choices=DEVICES, default="H100", help="preset for what one GPU cannot measure")
    parser.add_argument("--network", choices=LINKS, default="infiniband-ndr", help="preset between nodes")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what to measure (default: a GPU where there is one)")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    links = load_measured(arguments.links) if arguments.links else preset(arguments.gpu, arguments.network)
    best, rates = measured_rates(device)
    if device.type == "cuda":
        rates = rates.with_classes_of(published(arguments.gpu))
    hardware = replace(links, name=name_of(device), device=best, rates=rates)
    print_rates(hardware)
    if arguments.write is not None:
        save_measured(hardware, arguments.write)
    return 0


def measured_rates(device: torch.device) -> tuple[Device, Rates]:
    """What a device does at best, and the shares of that by class and size."""
    best, dtype = measure_device(device), torch.bfloat16 if device.type == "cuda" else torch.float32
    source = f"measured: {name_of(device)}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}"
    timed = (*_matmuls(device, dtype), *_attentions(device, dtype))
    updates = tuple(_updates(device))
    # a larger or smaller matmul may be faster than the one by which the device was measured
    best = replace(best, matrix=_fastest(best.matrix, timed), fp32=_fastest(best.fp32, updates))
    attained = [
        (operator, size, flops / seconds / best_rate(operator, best))
        for operator, size, flops, seconds in timed + updates
    ]
    attained.append(("memory", 1.0, 1.0))
    attained.append(("update", 1.0, _update_bytes(device) / best.memory_bandwidth))
    shares = tuple(Attained(operator, float(size), share, source) for operator, size, share in attained)
    return best, Rates(shares, tuple(RateConstant(*each, source) for each in _constants(device)))


Timed = tuple[str, float, float, float]
"""Class, size, FLOPs and seconds."""


def _matmuls(device: torch.device, dtype: torch.dtype) -> Iterator[Timed]:
    for side in SQUARES[device.type]:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        yield "matmul", 2.0 * side**3, 2.0 * side**3, _time(torch.mm, device, a, b)
    for experts, rows, columns, width in GROUPS[device.type]:
        rows_RD = torch.randn(experts * rows, columns, device=device, dtype=dtype)
        weight_eDF = torch.randn(experts, width, columns, device=device, dtype=dtype).transpose(1, 2)
        ends_e = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
        each = 2.0 * rows * columns * width
        seconds = _time(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), device, rows_RD, weight_eDF, ends_e)
        yield "grouped matmul", each, experts * each, seconds


def _fastest(rate: float, timed: Sequence[Timed]) -> float:
    return max(rate, *(flops / seconds for _, _, flops, seconds in timed))


def _updates(device: torch.device) -> Iterator[Timed]:
    """What Shampoo computes: matmuls in fp32, and eigendecompositions in double."""
    for side in SQUARES[device.type]:
        a, b = (torch.randn(side, side, device=device) for _ in range(2))
        yield "matmul fp32", 2.0 * side**3, 2.0 * side**3, _time(torch.mm, device, a, b)
    for side in FACTORS[device.type]:
        a = torch.randn(side, side, device=device, dtype=torch.float64)
        flops = EIGEN_FLOPS * float(side) ** 3
        yield "eigendecomposition", flops, flops, _time(torch.linalg.eigh, device, a @ a.T)


def _attentions(device: torch.device, dtype: torch.dtype) -> Iterator[Timed]:
    """Causal: half of all pairs, two matmuls forward and five backward."""
    is_gpu = device.type == "cuda"
    for length in LENGTHS[device.type]:
        pairs = HEADS * length * (length + 1) / 2
        shape = (1, HEADS, length, WIDTH)
        for name, attend in _kernels_of_attention(is_gpu, length):
            inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
            out = attend(*inputs)
            grad = torch.randn_like(out)
            forward = _time(attend, device, *inputs)
            backward = _time(_gradients, device, out, grad, *inputs)
            yield name, length, 2 * 2 * pairs * WIDTH, forward
            yield _backward_of(name), length, 2 * 5 * pairs * WIDTH, backward


def _gradients(out: Tensor, grad: Tensor, *inputs: Tensor) -> Any:
    return torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _kernels_of_attention(is_gpu: bool, length: int) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def packed(*inputs: Tensor) -> Tensor:
        query_NHA, key_NHA, value_NHA = (x[0].transpose(0, 1) for x in inputs)
        return flash_attention(query_NHA, key_NHA, value_NHA, (length,))

    yield "attention", causal
    yield "packed attention", packed
    if is_gpu:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def efficient(*inputs: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return causal(*inputs)

        yield "efficient attention", efficient
        for kernels in FLASH_KERNELS:
            if not obstacle(kernels):
                with computing_by(kernels):
                    yield f"packed attention{NEWER_FLASH[kernels.version]}", packed


def _backward_of(name: str) -> str:
    of_class, *newer = name.split(", ")
    return ", ".join((f"{of_class} backward", *newer))


def _update_bytes(device: torch.device) -> float:
    """Bytes per second of a fused AdamW step, which moves 28 for each parameter in fp32."""
    weight = torch.zeros(PARAMETERS[device.type], device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 28 * weight.numel() / median_seconds(optimizer.step, device)


def _constants(device: torch.device) -> Iterator[tuple[str, float]]:
    """Seconds of the host for an operator; on a GPU also from one kernel to the next, and for a wait."""
    x = torch.zeros(1, device=device)

    def add() -> None:
        for _ in range(CALLS):
            x.add_(1)

    if device.type == "cpu":
        # what an operator takes is all of it the host's, and nothing is launched
        yield from (("call", median_seconds(add, device) / CALLS), ("launch", 0.0), ("wait", 0.0))
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add()
    launch = median_seconds(graph.replay, device) / CALLS
    call = max(median_seconds(add, device) / CALLS, launch)
    yield from (("call", call), ("launch", launch), ("wait", median_seconds(lambda: x.add_(1), device)))


def _time(work: Callable[..., Any], device: torch.device, *inputs: Any) -> float:
    return median_seconds(lambda: work(*inputs), device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def print_rates(hardware: Hardware) -> None:
    device = hardware.device
    print(
        f"{hardware.name}: {device.matrix / 1e12:,.3f} TFLOP/s by dtype, {device.fp32 / 1e12:,.3f} in fp32, "
        f"{device.memory_bandwidth / 1e9:,.1f} GB/s"
    )
    rows = [(e.operator, f"{e.size:.2g}", f"{e.share:.3f}", e.source) for e in hardware.rates.attained]
    rows += [(c.name, "", f"{c.value:.3g}", c.source) for c in hardware.rates.constants]
    print_rows([dict(zip(("class", "size", "of that", "source"), row, strict=True)) for row in rows], text=["source"])


if __name__ == "__main__":
    sys.exit(main())
