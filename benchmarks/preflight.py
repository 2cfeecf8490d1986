"""What a machine lacks for a run on its GPU, in a minute: `python -m benchmarks.preflight`.

Checks, all at once, each in a process of its own, so that a crash or a hang is told as one and stops no other: packages
and compiler; `grouped_mm`, forward and backward; a Triton kernel; flash attention; two ranks over NCCL, on one card if
there is but one; and expandable segments of the allocator. Exit code 0: nothing is missing. With --use-cpu: what of
this a CPU has.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.ended import MARK, kill_all
from benchmarks.needed import EXTRAS, asked, fault_of
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader


class Missing(Exception):
    """What a check did not find, in words."""


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use-cpu", action="store_true", help="what of this a CPU has")
    # on a machine that has just begun, torch is read from the disk
    parser.add_argument("--seconds", type=float, default=85, help="that a check may take (default: 85)")
    parser.add_argument("--json", type=Path, help="also write what was found here")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    device = "cpu" if arguments.use_cpu else "cuda"
    if arguments.check is not None:
        return check(arguments.check, device)
    begun, found = time.monotonic(), {}
    mark = uuid.uuid4().hex
    processes = {name: start(name, arguments.use_cpu, f"{mark} {name}") for name in CHECKS}
    for name, process in processes.items():
        try:
            said, _ = process.communicate(timeout=max(0.1, begun + arguments.seconds - time.monotonic()))
            last = (said.strip().splitlines() or [""])[-1]
            found[name] = "" if process.returncode == 0 else last or f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            kill_all(f"{mark} {name}")
            said, _ = process.communicate()
            found[name] = f"nothing after {arguments.seconds:g} s; it said: {end_of(said)}"
        print(f"{name}: {found[name] or 'works'}", flush=True)
    if arguments.json:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(found, indent=1))
    return int(any(found.values()))


def end_of(said: str) -> str:
    """The last lines of what a process has printed, in one: errors of NCCL have several."""
    return " / ".join(line.strip() for line in said.splitlines()[-4:] if line.strip())[-300:] or "nothing"


def start(name: str, use_cpu: bool, mark: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.preflight", "--check", name, *["--use-cpu"] * use_cpu]
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def check(name: str, device: str) -> int:
    try:
        CHECKS[name](device)
    except Exception as error:
        words = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
        print(" ".join(words.split())[:300])
        return 1
    return 0


def _packages(device: str) -> None:
    extras = EXTRAS if device == "cuda" else [extra for extra in EXTRAS if extra != "gpu"]
    missing = [said for requirement in asked(extras) if (said := fault_of(requirement))]
    compilers = () if device == "cpu" else ("gcc", "cc", "clang")
    if compilers and not any(map(shutil.which, compilers)):
        missing.append("a C compiler (Triton needs one)")
    if missing:
        raise Missing(f"missing: {', '.join(missing)}")
    import torch

    import expertmesh.training.engine.engine  # noqa: F401, all that a run imports

    if device == "cuda" and not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU")


def _grouped_mm(device: str) -> None:
    """Against a matmul for each group."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(96, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2, 64, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([32, 96], device=device, dtype=torch.int32)
    found = F.grouped_mm(x, weight, offs=ends)
    expected = torch.cat([x[:32].float() @ weight[0].float(), x[32:].float() @ weight[1].float()])
    _near("forward", found, expected)
    grad = torch.randn_like(expected)
    mine = torch.autograd.grad(found, (x, weight), grad.bfloat16())
    for name, one, other in zip("xw", mine, torch.autograd.grad(expected, (x, weight), grad), strict=True):
        _near(f"gradient of {name}", one, other)


def _triton(device: str) -> None:
    """Our kernel of SwiGLU against torch's operators."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch

    from expertmesh.moe.kernels.swiglu_triton import fused_forward

    gate, up = (torch.randn(16, 64, device=device) for _ in range(2))
    _near("swiglu", fused_forward(gate, up), torch.nn.functional.silu(gate) * up)


def _flash(device: str) -> None:
    """Packed samples by flash attention against torch's attention of each."""
    import torch
    import torch.nn.functional as F

    from expertmesh.training.attention.flash import flash_attention

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = (torch.randn(48, 2, 64, device=device, dtype=dtype) for _ in range(3))
    found = flash_attention(query, key, value, (16, 32))
    for part in (slice(0, 16), slice(16, 48)):
        q, k, v = (x[part].transpose(0, 1).unsqueeze(0).float() for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        _near("attention", found[part], expected)


def _two_ranks(device: str) -> None:
    """An all-to-all; on one card each rank seems to have a host of its own, else NCCL refuses."""
    with tempfile.TemporaryDirectory() as directory:
        code = f"from benchmarks.preflight import rank; import sys; rank(int(sys.argv[1]), {device!r}, {directory!r})"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for number in range(2)
        ]
        # of one that has failed the other may wait forever
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.1)
        failed = next((number for number, process in enumerate(ranks) if process.poll()), None)
        for process in ranks:
            process.kill()
        said = [process.communicate()[0] for process in ranks]
        if failed is not None:
            backend = "NCCL" if device == "cuda" else "gloo"
            raise Missing(f"two ranks do not exchange over {backend}: {end_of(said[failed])}")


def rank(number: int, device: str, directory: str) -> None:
    """One of the two."""
    os.environ.update(NCCL_HOSTID=str(number), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=number, world_size=2)
    sent = torch.tensor([10.0 * number, 10.0 * number + 1], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [number, 10.0 + number], received
    dist.destroy_process_group()


def _segments(device: str) -> None:
    """Whether memory that grows stays one segment."""
    if device == "cpu":
        return
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read when torch is imported
    import torch

    kept = [torch.empty(n << 20, device=device) for n in (8, 16, 32)]
    if not any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        raise Missing("PYTORCH_ALLOC_CONF=expandable_segments:True has no effect")
    del kept


def _near(what: str, found: object, expected: object) -> None:
    import torch

    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    found, expected = found.detach(), expected.detach()
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < 0.02:
        raise Missing(f"{what} is {error:.2g} off")


CHECKS: dict[str, Callable[[str], None]] = {
    "packages": _packages,
    "grouped_mm": _grouped_mm,
    "Triton": _triton,
    "flash attention": _flash,
    "two ranks": _two_ranks,
    "expandable segments": _segments,
}


if __name__ == "__main__":
    sys.exit(main())
