"""The flags of `plan` and `rehearse` that say which GPUs a run is for."""

import argparse
from dataclasses import replace
from pathlib import Path

from ....moe.util.errors import ExpertMeshError
from ....moe.util.parser import flag_of
from ....moe.util.sizes import parse_size
from .hardware import DEVICES, HOPPER, LINKS, Hardware, load_measured, preset

_GPU, _NETWORK = "H100", "infiniband-ndr"


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs per node")
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(DEVICES)} (default: {_GPU})")
    parser.add_argument(
        "--gpu-memory", default="", metavar="SIZE", help="memory per GPU, as 80GiB (default: the GPU's own)"
    )
    parser.add_argument("--network", metavar="NAME", help=f"between nodes: {', '.join(LINKS)} (default: {_NETWORK})")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="use the rates that `mesh --check --json FILE` or `benchmarks.rates --write FILE` measured, in place of "
        "--gpu and --network",
    )
    parser.add_argument(
        "--flash-attention",
        type=int,
        choices=(2, 3),
        default=2,
        help="version whose rates packed attention has: 3 where flash_attn_interface is installed (default: 2)",
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
                f"--gpu {arguments.gpu}: beside --calibrate {file} it says the memory alone, as --gpu-memory "
                f"{arguments.gpu_memory} does; leave out one of them"
            )
        name = f"rates of {file}"
        if not measured.device.memory and not arguments.gpu_memory:
            # a CPU's file has no memory of its own
            measured = replace(measured, device=replace(measured.device, memory=hardware.device.memory))
            name += f", memory of {hardware.name.partition(',')[0]}"
        hardware = replace(measured, name=name)
    if arguments.flash_attention == 3:
        rates = hardware.rates.with_flash_attention_3()
        if rates == hardware.rates:
            raise ExpertMeshError(f"--flash-attention 3: --calibrate {file} has no rates of it; leave it out")
        hardware = replace(hardware, rates=rates)
    if arguments.gpu_memory:
        memory = parse_size("--gpu-memory", arguments.gpu_memory)
        hardware = replace(hardware, device=replace(hardware.device, memory=memory))
    return hardware


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """
    Raises:
        ExpertMeshError: one of these flags is below 1.
    """
    for name in names:
        if getattr(arguments, name) < 1:
            raise ExpertMeshError(f"{flag_of(name)} {getattr(arguments, name)}: must be 1 or more")
