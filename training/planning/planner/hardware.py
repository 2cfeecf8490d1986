"""What machines can do: presets from vendors' data sheets, with the shares that others attained, and a machine that was
measured; and the flags of `plan` and `rehearse` that choose one."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ....moe.util.atomic_write import whole
from ....moe.util.errors import ExpertMeshError
from ....moe.util.parser import flag_of
from ....moe.util.sizes import parse_size
from ....sharding.topology import divisors, either, ranks_per_equal_node
from ...model_setup.rates import AT_BEST, NEWER_FLASH, Exchange, Rates, published, rates_from

_GPU, _NETWORK, _GPUS_PER_NODE = "H100", "infiniband-ndr", 8
"""What a run is planned for where no flag says it."""
MOST = 2**20
"""More GPUs, layers or experts are refused: of so many nothing comes back in time."""


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes a second that one rank can send. latency: seconds that a message takes at least."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """matrix: dense bf16 operations a second. fp32: the same in fp32, without TF32. memory_bandwidth: bytes a second.
    memory: bytes. fp8: dense fp8 operations a second; 0 where there are none, or nobody has said. host_bandwidth: bytes
    a second from pinned host memory, by default those of PCI Express 5.0 x16."""

    matrix: float
    fp32: float
    memory_bandwidth: float
    memory: float
    fp8: float = 0.0
    host_bandwidth: float = 64e9


GB, GIB, TERA = 1e9, 2**30, 1e12

# Memory is what drivers report, the least of each card's that was found: torch names it in public reports of being out
# of memory, as in "GPU 0 has a total capacity of 79.15 GiB". Found were 79.14 to 79.33 for 80 GB, 81,082 to 81,090 MiB
# for H100, 139.72 to 139.81 GiB for H200, 178.35 and 178.36 for B200: less than is printed on the cards.
DEVICES = {
    # NVIDIA A100 Tensor Core GPU datasheet (nvidia-us-2188504, 2022), SXM: 312 TFLOP/s dense bf16, 19.5 fp32,
    # 2,039 GB/s, PCI Express 4.0 x16; the others have 5.0
    "A100": Device(312 * TERA, 19.5 * TERA, 2039 * GB, 79.1 * GIB, host_bandwidth=32 * GB),
    # NVIDIA H100 Tensor Core GPU datasheet (2023), SXM: 1,979 TFLOP/s of bf16 with sparsity, 3,958 of fp8, half of
    # both dense, 67 fp32, 3.35 TB/s
    "H100": Device(989 * TERA, 67 * TERA, 3350 * GB, 79.1 * GIB, 1979 * TERA),
    # NVIDIA H200 Tensor Core GPU datasheet (2024), SXM: as H100, 4.8 TB/s
    "H200": Device(989 * TERA, 67 * TERA, 4800 * GB, 139.7 * GIB, 1979 * TERA),
    # NVIDIA DGX B200 datasheet (2024): 72 PFLOP/s of fp8 with sparsity for 8 GPUs, so 4.5 PFLOP/s dense each, and half
    # of that in bf16; 64 TB/s for 8. NVIDIA Blackwell datasheet (2024), HGX B200: 75 TFLOP/s fp32
    "B200": Device(2250 * TERA, 75 * TERA, 8000 * GB, 178.3 * GIB, 4500 * TERA),
}

LINKS = {
    # All latencies are assumed: none was found of a message between two ranks.
    # the data sheets above count both directions: NVLink 3 600, NVLink 4 900, NVLink 5 1,800 GB/s
    "nvlink3": Link(300 * GB, 3e-6),
    "nvlink4": Link(450 * GB, 3e-6),
    "nvlink5": Link(900 * GB, 3e-6),
    # PCI Express 4.0 x16: 32 GB/s each way
    "pcie4": Link(32 * GB, 5e-6),
    # one network card a GPU: HDR 200, NDR 400 Gbit/s (NVIDIA ConnectX-6 and ConnectX-7 data sheets)
    "infiniband-hdr": Link(25 * GB, 5e-6),
    "infiniband-ndr": Link(50 * GB, 5e-6),
    # assumed: 100 Gbit/s of Ethernet for a node of 8 GPUs, over TCP
    "ethernet-100": Link(12.5 / 8 * GB, 30e-6),
}

NODE_LINK = {"A100": "nvlink3", "H100": "nvlink4", "H200": "nvlink4", "B200": "nvlink5"}
"""What joins the GPUs of one node (HGX and DGX boards)."""
HOPPER = ("H100", "H200")
"""For which flash attention 3 is."""


@dataclass(frozen=True)
class Hardware:
    """A cluster.

    Attributes:
        name: for the table.
        device, inside, between: what a GPU can do, and the links inside a node and between nodes, at best.
        rates: which share of that each class of operators and collectives attains, and what else was measured.
    """

    name: str
    device: Device
    inside: Link
    between: Link
    rates: Rates = AT_BEST


def known_name(flag: str, name: str, presets: Iterable[str], instead: str = "") -> str:
    """The name of a preset as it is written here; its case does not matter.

    Raises:
        ExpertMeshError: there is none.
    """
    written = {preset.lower(): preset for preset in presets}
    if name.lower() not in written:
        raise ExpertMeshError(f"{flag} {name} is unknown; use {', '.join(written.values())}{instead}")
    return written[name.lower()]


def preset(gpu: str, network: str) -> Hardware:
    """
    Raises:
        ExpertMeshError: there is no preset of that name.
    """
    gpu = known_name("--gpu", gpu, DEVICES, ", or --calibrate with a measured machine")
    network = known_name("--network", network, LINKS)
    links = LINKS[NODE_LINK[gpu]], LINKS[network]
    return Hardware(f"{gpu}, {NODE_LINK[gpu]}, {network}", DEVICES[gpu], *links, published(gpu))


SHOWN = ("matmul", "grouped matmul", "memory", *get_args(Exchange))
"""Classes whose shares forecasts name."""


def attained(hardware: Hardware) -> str:
    """What a machine can do, and the shares of it that are attained; in words."""
    device = hardware.device
    best = (
        f"{device.matrix / 1e12:,.4g} TFLOP/s, {device.memory_bandwidth / 1e9:,.4g} GB/s memory, "
        f"{hardware.inside.bandwidth / 1e9:,.3g} GB/s inside and {hardware.between.bandwidth / 1e9:,.3g} between nodes"
    )
    rates = hardware.rates
    shares = rates.told(SHOWN)
    beside = f"; beside a collective kernels run at {rates.compute_beside:g} of that" if shares else ""
    return f"{best}" + (f", attained of it: {shares}{beside}" if shares else ", as measured")


TF32_SLOWDOWN = 2.0
"""TF32 products run at half the bf16 rate (the data sheets above)."""


def products_in(hardware: Hardware, bf16: bool, tf32: bool, fp8: bool) -> Hardware:
    """The same, with `matrix` the rate of matmuls in the compute dtype: bf16, TF32 or fp32; and `fp32` that of TF32
    where fp32 matmuls run so.

    Args:
        fp8: whether some of them, the experts' or the dense ones, run in fp8.

    Raises:
        ExpertMeshError: it has none in fp8.
    """
    device = hardware.device
    if fp8 and not device.fp8:
        raise ExpertMeshError(
            f"--expert-precision and --dense-precision fp8: the fp8 matmul rate of {hardware.name} is unknown"
        )
    matrix = device.matrix if bf16 else device.matrix / TF32_SLOWDOWN if tf32 else device.fp32
    return replace(hardware, device=replace(device, matrix=matrix, fp32=matrix if tf32 else device.fp32))


def save_measured(hardware: Hardware, file: Path) -> None:
    """Write what `load_measured` reads, atomically.

    Raises:
        OSError: it cannot be written.
    """
    with whole(file) as partial:
        partial.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")


def load_measured(file: Path) -> Hardware:
    """The machine that `python -m expertmesh.sharding mesh --check --json FILE` or `python -m benchmarks.rates --write
    FILE` measured.

    Raises:
        ExpertMeshError: the file cannot be read or was not written by these commands.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        device, rates = Device(**content.pop("device")), rates_from(content.pop("rates"))
        inside, between = (Link(**content.pop(name)) for name in ("inside", "between"))
        hardware = Hardware(device=device, inside=inside, between=between, rates=rates, **content)
        for name, value in (item for part in (device, inside, between) for item in vars(part).items()):
            # a device that is no GPU has no memory in the table
            least = 0 if name in ("latency", "memory", "fp8") else 1e-30
            if not isinstance(value, int | float) or not least <= value < 1e30:
                raise ValueError(f"{name} is not a positive number")
        return hardware
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ExpertMeshError(
            f"--calibrate {file}: is not what `python -m expertmesh.sharding mesh --check --json` or `python -m "
            f"benchmarks.rates --write` writes: {error}"
        ) from error


PER_NODE_HELP = f"GPUs per node (default: {_GPUS_PER_NODE}, or as many as all nodes can have)"


def gpus_per_node(gpus: int, given: int | None, flag: str = "--gpus") -> int:
    """GPUs of each node, of which all have equally many.

    Args:
        given: by --gpus-per-node.
        flag: that has given the number of GPUs.

    Raises:
        ExpertMeshError: as many GPUs do not fill nodes of the size that was given, or of any but one GPU.
    """
    most = _GPUS_PER_NODE if given is None else given
    if gpus <= most or gpus % most == 0:
        return most
    fits = ranks_per_equal_node(gpus, most)
    if given is None and fits > 1:
        return fits
    fewer = gpus - gpus % most
    raise ExpertMeshError(
        f"{flag} {gpus}: do not fill nodes of {most} GPUs; give {flag} {fewer} or {fewer + most}, or --gpus-per-node "
        f"{either(divisors(gpus))}"
    )


def tell_nodes(gpus: int, given: int | None, flag: str = "--gpus") -> None:
    """Say on stderr where nodes have other than the usual number of GPUs, and no flag says so."""
    here = gpus_per_node(gpus, given, flag)
    if given is None and here != _GPUS_PER_NODE:
        print(
            f"note: {flag} {gpus} do not fill nodes of {_GPUS_PER_NODE} GPUs: taken as {gpus // here} nodes of {here}; "
            "--gpus-per-node sets another number",
            file=sys.stderr,
        )


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs")
    parser.add_argument("--gpus-per-node", type=int, help=PER_NODE_HELP)
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(DEVICES)} (default: {_GPU})")
    parser.add_argument(
        "--gpu-memory", default="", metavar="SIZE", help="memory per GPU, as 80GiB (default: the GPU's own)"
    )
    parser.add_argument("--network", metavar="NAME", help=f"between nodes: {', '.join(LINKS)} (default: {_NETWORK})")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="rates that `mesh --check --json FILE` or `benchmarks.rates --write FILE` measured, for --gpu and "
        "--network",
    )
    parser.add_argument(
        "--flash-attention",
        type=int,
        choices=(2, *NEWER_FLASH),
        default=2,
        help="flash attention of packed sequences: 3 with flash_attn_3, 4 with flash-attn-4 (default: 2)",
    )


def chosen_hardware(arguments: argparse.Namespace) -> Hardware:
    """The preset, or the rates that were measured, with the memory that was asked for.

    Raises:
        ExpertMeshError: no such preset, or the file of rates will not do, or has what a flag says too.
    """
    file = arguments.calibrate
    if file is not None and arguments.network is not None:
        raise ExpertMeshError(
            f"--network {arguments.network}: --calibrate {file} has the rates of the links; leave out one of them"
        )
    gpu = _GPU if arguments.gpu is None else arguments.gpu
    hardware = preset(gpu, _NETWORK if arguments.network is None else arguments.network)
    if arguments.flash_attention == 3 and file is None and not hardware.name.startswith(HOPPER):
        raise ExpertMeshError(f"--flash-attention 3: is for {' and '.join(HOPPER)}, not for --gpu {gpu}; leave it out")
    if file is not None:
        measured = load_measured(file)
        if measured.device.memory and arguments.gpu is not None:
            raise ExpertMeshError(
                f"--gpu {arguments.gpu}: --calibrate {file} has a GPU's rates and memory; leave out one of them"
            )
        if arguments.gpu is not None and arguments.gpu_memory:
            raise ExpertMeshError(
                f"--gpu {arguments.gpu}: with --calibrate {file} it only sets the memory, as --gpu-memory "
                f"{arguments.gpu_memory} does; leave out one of them"
            )
        name = f"rates of {file}"
        if not measured.device.memory and not arguments.gpu_memory:
            # a CPU's file has no memory of its own
            measured = replace(measured, device=replace(measured.device, memory=hardware.device.memory))
            name += f", memory of {hardware.name.partition(',')[0]}"
        hardware = replace(measured, name=name)
    if (version := arguments.flash_attention) in NEWER_FLASH:
        rates = hardware.rates.with_flash_attention(version)
        if rates == hardware.rates:
            which = f"--gpu {gpu}" if file is None else f"--calibrate {file}"
            raise ExpertMeshError(f"--flash-attention {version}: {which} has no rates of it; leave it out")
        hardware = replace(hardware, rates=rates)
    if arguments.gpu_memory:
        memory = parse_size("--gpu-memory", arguments.gpu_memory)
        if memory < 2**20:
            raise ExpertMeshError(f"--gpu-memory {arguments.gpu_memory}: are {memory} bytes; write it like 80GiB")
        hardware = replace(hardware, device=replace(hardware.device, memory=memory))
    return hardware


def check_positive(arguments: argparse.Namespace, *names: str, most: int | None = None) -> None:
    """
    Raises:
        ExpertMeshError: one of these flags, if it was given, is below 1, or above `most`.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ExpertMeshError(f"{flag_of(name)} {value}: must be 1 or more")
        if value is not None and most is not None and value > most:
            raise ExpertMeshError(f"{flag_of(name)} {value}: must be {most:,} or less")
