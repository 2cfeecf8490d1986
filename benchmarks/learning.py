"""How well training learns with some flags and with others: `python -m benchmarks.learning`.

    --arm="--optim adamw_torch_fused" --arm="--optim shampoo" --learning-rates 3e-3 6e-3 --seeds 3
    --dataset gsm8k.jsonl --columns question answer --arm="--bf16" --arm="--bf16 --dense-precision fp8"

Trains by `train_ep.py` on one rank, once for each arm (flags of it), learning rate and seed: the demo's model on its
task with `configs/tiny.yaml`, or with --dataset a random Mixtral of the sizes below on that, with a tokenizer made for
it. Arms take turns, seed after seed. A seed is of the data, the model and the order of training, alike in all arms.

    held-out loss   after the last step, of each seed
    worst, mean     of the training loss, averaged over every --window steps, relative to the first arm's with the same
                    learning rate and seed: the largest difference, and the average one
"""

import argparse
import itertools
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands import command, parser_of, print_rows, read_lines, settings_line, write_json, write_lines
from benchmarks.demo import make_inputs
from benchmarks.runs import lines_of, trained
from benchmarks.small_models import random_mixtral, save_byte_pairs
from expertmesh.moe.util.errors import ExpertMeshError

HELD_OUT = 200
"""Rows at the end of --dataset that are not trained on."""


@dataclass(frozen=True)
class Inputs:
    """model: a directory. flags: of data and sizes, the same in every arm."""

    model: Path
    flags: list[str]


@dataclass(frozen=True)
class Learned:
    """losses: of every step. held_out: the loss on held-out rows at the end."""

    losses: list[float]
    held_out: float


Turns = dict[tuple[str, str], list[Learned]]
"""By arm and learning rate, of each seed."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    sizes = dict(hidden_size=256, intermediate_size=512, layers=4, vocabulary=2048, max_seq_length=512)
    parser = parser_of(__doc__, json=None, **sizes)
    parser.add_argument(
        "--arm", action="append", required=True, metavar="FLAGS", help="in one word, after =; repeatable"
    )
    parser.add_argument("--learning-rates", nargs="+", default=["3e-3"], metavar="X")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--window", type=int, default=20, help="steps over which training losses are averaged")
    parser.add_argument("--dataset", type=Path, default=None, metavar="FILE", help="JSON lines, two fields of each")
    parser.add_argument(
        "--columns", nargs=2, default=["prompt", "response"], help="those fields: the text before, and the one to learn"
    )
    arguments = parser.parse_args(argv)
    if min(arguments.seeds, arguments.steps, arguments.window) < 1 or arguments.steps < arguments.window:
        parser.error("--seeds, --steps and --window are 1 or more, and --steps no less than --window")
    turns: Turns = {key: [] for key in itertools.product(arguments.arm, arguments.learning_rates)}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.seeds):
            directory = Path(name) / str(seed)
            is_demo = arguments.dataset is None
            inputs = of_the_demo(directory, seed) if is_demo else of_dataset(directory, seed, arguments)
            for (flags, rate), learned in turns.items():
                arm = [*shlex.split(flags), "--learning-rate", rate]
                print(f"seed {seed}: {shlex.join(arm)}", file=sys.stderr, flush=True)
                learned.append(train(inputs, directory / "run", seed, arm, arguments))
    print_figures(turns, arguments)
    write_json(arguments.json, {" ".join(key): [vars(one) for one in of] for key, of in turns.items()})
    return 0


def of_the_demo(directory: Path, seed: int) -> Inputs:
    model, data, held_out = directory / "model", directory / "train.jsonl", directory / "held-out.jsonl"
    directory.mkdir(parents=True)
    rows = itertools.chain.from_iterable(make_inputs(model, data, seed).values())
    write_lines([{"prompt": prompt, "response": answer} for prompt, answer in rows], held_out)
    flags = ["--config", "configs/tiny.yaml", "--ep-size", "1", "--per-device-train-batch-size", "256"]
    return Inputs(model, [*flags, "--dataset", str(data), "--eval-dataset", str(held_out)])


def of_dataset(directory: Path, seed: int, arguments: argparse.Namespace) -> Inputs:
    """Another seed is another model and another order; the rows are the same, the last ones held out."""
    model, data, held_out = directory / "model", directory / "train.jsonl", directory / "held-out.jsonl"
    directory.mkdir(parents=True)
    before, trained = arguments.columns
    rows = read_lines(arguments.dataset)
    if len(rows) <= HELD_OUT or any(column not in row for row in rows for column in arguments.columns):
        raise ExpertMeshError(
            f"--dataset {arguments.dataset}: needs more than {HELD_OUT} rows, with {before} and {trained}"
        )
    texts = [{"prompt": row[before], "response": row[trained]} for row in rows]
    for file, some in ((data, texts[:-HELD_OUT]), (held_out, texts[-HELD_OUT:])):
        write_lines(some, file)
    pairs = [f"{row['prompt']}\n{row['response']}" for row in texts]
    save_byte_pairs(model, pairs, arguments.vocabulary, ("<s>", "</s>"), bos_token="<s>", eos_token="</s>")
    random_mixtral(arguments, seed=seed, num_key_value_heads=4, num_local_experts=8).save_pretrained(model)
    flags = ["--prompt-template", "{prompt}\n", "--max-seq-length", str(arguments.max_seq_length)]
    flags += ["--per-device-train-batch-size", "8", "--router-aux-loss-coef", "0.02"]
    return Inputs(model, [*flags, "--dataset", str(data), "--eval-dataset", str(held_out)])


def train(inputs: Inputs, run: Path, seed: int, flags: list[str], arguments: argparse.Namespace) -> Learned:
    command = [*inputs.flags, "--model", str(inputs.model), "--seed", str(seed), "--output-dir", str(run)]
    command += ["--overwrite-output-dir", "--no-export", "--logging-steps", "1", "--report-to", "none"]
    command += ["--max-steps", str(arguments.steps), "--eval-steps", str(arguments.steps)]
    trained(1, [*command, *flags], OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"))
    losses = [line["loss"] for line in lines_of(run, "loss")]
    assert len(losses) == arguments.steps
    return Learned(losses, lines_of(run, "eval_loss")[-1]["eval_loss"])


def differences(ours: list[float], first: list[float], window: int) -> list[float]:
    """Of the means of every so many steps, relative to the first's."""
    means = [
        [statistics.mean(losses[at : at + window]) for at in range(0, len(losses) - window + 1, window)]
        for losses in (ours, first)
    ]
    return [(mean - of_first) / of_first for mean, of_first in zip(*means, strict=True)]


def print_figures(turns: Turns, arguments: argparse.Namespace) -> None:
    print(settings_line(arguments, *["the demo's task and model"] * (arguments.dataset is None)))
    found = {
        (flags, rate): [
            difference
            for ours, first in zip(learned, turns[arguments.arm[0], rate], strict=True)
            for difference in differences(ours.losses, first.losses, arguments.window)
        ]
        for (flags, rate), learned in turns.items()
    }
    print_rows(
        [
            {
                "flags": flags,
                "learning rate": rate,
                "held-out loss": " ".join(f"{one.held_out:.4f}" for one in learned),
                "worst": f"{max(found[flags, rate], key=abs):+.2%}",
                "mean": f"{statistics.mean(found[flags, rate]):+.2%}",
            }
            for (flags, rate), learned in turns.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
