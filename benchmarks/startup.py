"""How long commands take to say what needs no tensors: `python -m benchmarks.startup`.

Help, mistakes in flags, paths that are not there, the mesh's picture, a checkpoint's heads; each against
`python -c "import torch"` of the same round. Prints the median of the ratios, and of the seconds. Files are read once
before, so that they are in the page cache.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from expertmesh.moe.util.terminal import ends_with_reader

ROOT = Path(__file__).resolve().parents[1]
TORCH = ["-c", "import torch"]

COMMANDS: dict[str, list[str]] = {
    "train_ep.py --help": ["train_ep.py", "--help"],
    "train_ep.py, an unknown flag": ["train_ep.py", "--model", "m", "--dataset", "d", "--learning-rat", "1"],
    "train_ep.py, no such model": ["train_ep.py", "--model", "/nonexistent", "--dataset", "d"],
    "checkpoints --help": ["-m", "checkpoints", "--help"],
    "checkpoints inspect": ["-m", "checkpoints", "inspect", "MODEL"],
    "checkpoints inspect, no such path": ["-m", "checkpoints", "inspect", "/nonexistent"],
    "sharding plan --help": ["-m", "sharding", "plan", "--help"],
    "sharding plan, no such model": ["-m", "sharding", "plan", "--model", "/nonexistent"],
    "sharding mesh": ["-m", "sharding", "mesh", "--world-size", "16", "--ep-size", "8"],
    "training.report --help": ["-m", "training.report", "--help"],
}


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=None, help="to inspect; default: a small one, made here")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another version, to be measured instead")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or make_model(Path(directory) / "model")
        commands = {name: [str(model) if word == "MODEL" else word for word in c] for name, c in COMMANDS.items()}
        for command in (TORCH, *commands.values()):
            seconds(command, arguments.root)
        rounds = []
        for _ in range(arguments.rounds):
            torch_seconds = seconds(TORCH, arguments.root)
            rounds.append((torch_seconds, {name: seconds(c, arguments.root) for name, c in commands.items()}))
    figures = summarize(rounds)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {arguments.rounds} rounds, commands "
        f"interleaved, medians; import torch: {figures['import torch']:.2f} s"
    )
    for name, (taken, ratio) in figures["commands"].items():
        print(f"{name:36}{taken:8.2f} s{ratio:8.2f} x import torch")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


def make_model(path: Path) -> Path:
    """A random Mixtral of a few megabytes; in a process of its own, as this one stays without torch."""
    code = (
        "import sys; from transformers import MixtralConfig, MixtralForCausalLM; "
        "sizes = dict(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, "
        "num_attention_heads=4, num_key_value_heads=2); "
        "MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    return path


def seconds(command: list[str], root: Path) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=root, capture_output=True)
    return time.perf_counter() - begin


def summarize(rounds: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    """By command (seconds, ratio to importing torch)."""
    return {
        "import torch": statistics.median(torch_seconds for torch_seconds, _ in rounds),
        "commands": {
            name: (
                statistics.median(taken[name] for _, taken in rounds),
                statistics.median(taken[name] / torch_seconds for torch_seconds, taken in rounds),
            )
            for name in COMMANDS
        },
    }


if __name__ == "__main__":
    sys.exit(main())
