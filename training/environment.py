"""What a run was made with: versions, devices, processor. No names of hosts or users, no environment variables."""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoints.files.directories import write_errors
from ..moe.util.atomic_write import whole
from ..moe.util.telling import telling
from ..moe.util.versions import installed_version
from ..sharding.runtime.process import Ranks

FILE = "environment.json"
PACKAGES = (
    *("expertmesh", "torch", "transformers", "accelerate", "datasets", "safetensors"),
    *("megablocks", "quack-kernels"),
)
CHECKOUT = Path(__file__).resolve().parents[1]


def environment(ranks: Ranks, global_batch_size: int, flash_attention: str | None) -> dict[str, str | int]:
    """The facts by name, for environment.json and the report. What cannot be found out is left out.

    All ranks call it together and get the same devices; the rest is of the rank's own machine.
    """
    devices = _devices(ranks)
    asked: dict[str, Callable[[], str | int | None]] = {
        **{name: partial(installed_version, name) for name in PACKAGES},
        "torch": lambda: torch.__version__,  # also says which CUDA it is for
        "commit": lambda: commit_of(CHECKOUT),
        "python": platform.python_version,
        "cuda": lambda: torch.version.cuda,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())) if ranks.device.type == "cuda" else None,
        "ranks": lambda: ranks.world_size,
        "global_batch_size": lambda: global_batch_size,
        "devices": lambda: devices,
        "cpu": cpu_model,
        "flash_attention": lambda: flash_attention,
        "cpu_cores": os.cpu_count,
        "os": _operating_system,
    }
    facts: dict[str, str | int] = {}
    for name, ask in asked.items():
        with telling():
            if (found := ask()) not in (None, ""):
                facts[name] = found
    return facts


def write_environment(output_dir: Path, facts: dict[str, str | int]) -> None:
    """Write OUTPUT_DIR/environment.json.

    Raises:
        ExpertMeshError: it cannot be written.
    """
    with write_errors(output_dir), whole(output_dir / FILE) as partial:
        partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out, with -dirty after it where files differ from it; None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _devices(ranks: Ranks) -> str:
    """Such as "8 x NVIDIA H100 80GB HBM3", over all ranks."""
    names: list[str] = [""] * ranks.world_size
    dist.all_gather_object(names, device_name(ranks.device))
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H100 80GB HBM3", or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def unseen_gpus(directory: Path = Path("/dev")) -> str:
    """Why torch sees no GPU where there are signs of one, in words; empty where there are none, or torch sees it."""
    if torch.cuda.is_available():
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    signs = [f"CUDA_VISIBLE_DEVICES is {visible}"] if visible not in ("", "-1") else []
    signs += [f"there is {file}" for file in sorted(directory.glob("nvidia[0-9]*"))[:1]]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{' and '.join(signs)}, but torch {torch.__version__}, {built}, sees no GPU" if signs else ""


def cpu_model() -> str | None:
    """From Linux's /proc/cpuinfo; elsewhere what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _operating_system() -> str:
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel
