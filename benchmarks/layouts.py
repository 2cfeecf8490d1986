"""What it costs to lay one model out in one way and in another: `python -m benchmarks.layouts three-d`.

Whole training steps of a random model in fp32 on one global batch, whose losses must agree at every step.

    three-d    data, tensor and pipeline parallelism on 1 to 8 ranks
    pipeline   one rank, and the same model cut into --pp-size stages: what a pipeline's bubble costs. Without any other
               cost it takes the one rank's time divided by the stages, times 1 + (stages - 1) / micro-batches
    long       context parallelism at several --seq-length, one sequence per rank, every expert with as many tokens as
               any other. transformers' own, by accelerate, are torch's context_parallel, which knows the attention
               kernels of GPUs alone, and DeepSpeed's: none is compared here
    dispatch   each --dispatch, of a model with many small experts: two nodes of this machine whose link is slowed, two
               ranks on each (as root, on Linux; with --megabits 0 all ranks are on one node, by loopback)

    parameters   bytes as they are held between steps, of the rank with most
    peak         most bytes of tensors at once in a step, with parameters and optimizer state; of the rank with most
    activations  the same of forward and backward, less the peak with few tokens per sequence: gathered parameters and
                 gradients do not depend on the length
    evenness     CPU time of the rank with least over that of the rank with most, in one step
    x            of the first layout. CPU-seconds are of all ranks together
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import MB, Arm, ArmFailed, Benchmark, Figures, Rounds, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line
from benchmarks.network import Network, can_make_networks
from benchmarks.small_models import random_mixtral
from benchmarks.variants import balance_routing
from expertmesh.moe.dispatch.dispatcher_entries import DISPATCHERS
from expertmesh.sharding.pipeline.timeline import bubble
from expertmesh.sharding.state import local_tensor

RANKS_PER_NODE = 2


@dataclass(frozen=True)
class Comparison:
    """Layouts of one model.

    Attributes:
        arms: the layouts, of the flags.
        defaults: of flags.
        tolerance: to which losses must agree.
        holds: whether it is told what ranks hold.
    """

    arms: Callable[[argparse.Namespace], list[Arm]]
    defaults: dict[str, Any]
    tolerance: float = 1e-5
    holds: bool = True
    more: Callable[[argparse.Namespace, Rounds], str] = field(default=lambda arguments, rounds: "")


def three_d(arguments: argparse.Namespace) -> list[Arm]:
    """DP: each has all but the experts, which are always sharded. FSDP: everything sharded. 2 x 2 x 2: of two groups
    that read sequences of their own."""
    rate = {"learning_rate": 1e-3}
    return [
        Arm("one rank", 1, rate),
        Arm("DP", 2, rate | {"dense_shard": "hybrid"}),
        Arm("FSDP", 2, rate),
        Arm("TP", 2, rate | {"tp_size": 2}),
        Arm("TP, complete logits", 2, rate | {"tp_size": 2, "loss_parallel": False}),
        Arm("TP 4", 4, rate | {"tp_size": 4}),
        Arm("2 x 2 x 2", 8, rate | {"pp_size": 2, "tp_size": 2}),
    ]


def pipeline(arguments: argparse.Namespace) -> list[Arm]:
    names = ("pp_size", "pipeline_schedule", "pipeline_chunks")
    stages = {name: getattr(arguments, name) for name in names}
    return [Arm("one rank"), Arm(f"pp {arguments.pp_size}", arguments.pp_size, stages)]


def long(arguments: argparse.Namespace) -> list[Arm]:
    settings = dict(ep_size=arguments.sequences, attn_implementation="sdpa")
    settings |= dict(gradient_checkpointing=arguments.gradient_checkpointing)
    return [Arm(f"cp {size}", arguments.sequences, settings | {"cp_size": size}) for size in arguments.cp_sizes]


def dispatch(arguments: argparse.Namespace) -> list[Arm]:
    settings = dict(ep_size=arguments.sequences, ranks_per_node=RANKS_PER_NODE)
    return [Arm(name, arguments.sequences, settings | {"dispatch": name}) for name in DISPATCHERS.names()]


def of_bubble(arguments: argparse.Namespace, rounds: Rounds) -> str:
    """The time of a pipeline beside that of the ideal one."""
    pp_size, schedule, chunks = arguments.pp_size, arguments.pipeline_schedule, arguments.pipeline_chunks
    expected = 1 / (1 - bubble(schedule, pp_size, chunks, arguments.sequences // arguments.micro_batch))
    alone, cut = ([statistics.median(one.seconds) for one in figures] for figures in rounds.values())
    ratios = [b / (a / pp_size * expected) for a, b in zip(alone, cut, strict=True)]
    return (
        f"pp {pp_size} over one rank's time / {pp_size} x {expected:.4f} (the bubble of {schedule} with equal stages): "
        f"{statistics.median(ratios):.3f} (rounds: {', '.join(f'{one:.3f}' for one in ratios)})"
    )


SIZES = ("hidden_size", "intermediate_size", "layers", "vocabulary", "sequences", "steps")
DEFAULTS = dict.fromkeys(SIZES) | dict(experts=8, top_k=2, micro_batch=1, seq_length=[256], rounds=3, pp_size=2)
DEFAULTS |= dict(gradient_checkpointing="none", json=None)
"""Of flags, where a comparison has no other."""
COMPARISONS = {
    "three-d": Comparison(
        three_d,
        dict(hidden_size=128, intermediate_size=256, layers=4, vocabulary=4096, sequences=8, micro_batch=2, steps=4),
    ),
    "pipeline": Comparison(
        pipeline,
        dict(hidden_size=256, intermediate_size=896, layers=8, vocabulary=512, sequences=8, steps=3, rounds=5),
        holds=False,
        more=of_bubble,
    ),
    "long": Comparison(
        long,
        dict(hidden_size=256, intermediate_size=448, layers=2, vocabulary=2048, sequences=4, steps=1)
        | dict(seq_length=[2048, 4096, 8192, 16384]),
        tolerance=1e-4,
    ),
    "dispatch": Comparison(
        dispatch,
        dict(hidden_size=512, intermediate_size=96, layers=4, vocabulary=512, sequences=2 * RANKS_PER_NODE, steps=1)
        | dict(experts=64, top_k=8, seq_length=[512], rounds=9),
        tolerance=1e-4,
        holds=False,
    ),
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    comparison = COMPARISONS.get(given[0]) if given else None
    parser = parser_of(__doc__, **(DEFAULTS | (comparison.defaults if comparison else {})))
    parser.add_argument("what", choices=COMPARISONS)
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="some of the layouts")
    parser.add_argument("--pipeline-schedule", default="1f1b")
    parser.add_argument("--pipeline-chunks", type=int, default=1)
    parser.add_argument("--cp-sizes", type=int, nargs="+", default=[1, 2, 4], help="long: ranks per sequence")
    parser.add_argument("--megabits", type=float, default=200, help="dispatch: of the link per second; 0: one node")
    arguments = parser.parse_args(given)
    there = [arm.name for arm in COMPARISONS[arguments.what].arms(arguments)]
    if unknown := {*(arguments.variants or [])} - {*there}:
        parser.error(f"--variants {', '.join(unknown)}: there are {', '.join(there)}")
    is_slow = arguments.what == "dispatch" and arguments.megabits > 0
    if is_slow and arms.worker() is None and not can_make_networks():
        parser.error("--megabits: two nodes need root and network namespaces; --megabits 0 needs neither")
    start = partial(on_two_nodes, arguments.megabits) if is_slow else arms.on_ranks
    fault = arms.agree_to(COMPARISONS[arguments.what].tolerance)
    return Benchmark("benchmarks.layouts", chosen, save_model, measure, report, fault, start).main(arguments, given)


def chosen(arguments: argparse.Namespace) -> list[Arm]:
    layouts = COMPARISONS[arguments.what].arms(arguments)
    return [arm for arm in layouts if arguments.variants is None or arm.name in arguments.variants]


def save_model(arguments: argparse.Namespace, path: Path) -> None:
    more = dict(num_local_experts=arguments.experts, num_experts_per_tok=arguments.top_k)
    longest = max(arguments.seq_length)
    random_mixtral(arguments, max_position_embeddings=longest, **more).save_pretrained(path)


def on_two_nodes(megabits: float, module: str, argv: Sequence[str], ranks: int, directory: Path, arm: str) -> Any:
    """As `on_ranks`, half of them on each of two nodes."""
    with Network() as network:
        network.slow(megabits)
        nodes = network.start(ranks, argv, "-m", module, **arms.as_worker(directory, arm))
        said = [node.communicate(timeout=1800)[0] for node in nodes]
    if any(node.returncode for node in nodes):
        raise ArmFailed("\n".join(said)[-4000:])
    return arms.left_in(directory)


def measure(arguments: argparse.Namespace, arm: Arm, model: Path) -> Figures:
    """On each rank: the steps at each length, and what ranks hold in one. `more` has the figures of each length."""
    made = arm.made(model)
    if arguments.what == "long":
        # natural routing of one sequence would give another load in every layout
        balance_routing(made.model)
    found = Figures()
    for length in arguments.seq_length:
        sequences = arms.random_sequences(arguments.sequences, length, arguments.vocabulary)
        batches = arms.batches_of(made.engine, sequences, arguments.micro_batch)
        figures = arms.steps_of(lambda: made.step(batches), arguments.steps, made.engine.ranks.device)  # noqa: B023
        if COMPARISONS[arguments.what].holds:
            held = sum(local_tensor(each.detach()).nbytes for each in made.model.parameters() if not each.is_meta)
            figures.more = {
                "parameters": max(arms.gathered(held)),
                "peak": max(arms.gathered(arms.peak_of(made, lambda: made.step(batches)))),  # noqa: B023
                "activations": arms.activations_of(made, sequences, arguments.micro_batch),
            }
        found.losses += figures.losses
        found.more[str(length)] = asdict(figures)
    return found


def report(arguments: argparse.Namespace, rounds: Rounds) -> None:
    print(settings_line(arguments, "fp32"))
    ranks = {arm.name: arm.ranks for arm in COMPARISONS[arguments.what].arms(arguments)}
    rows, of_length = [], rounds
    for length in arguments.seq_length:
        of_length = {name: [Figures(**one.more[str(length)]) for one in figures] for name, figures in rounds.items()}
        first, *_ = of_length.values()
        for name, figures in of_length.items():
            rows.append(row(name, ranks[name], length, arguments.sequences * length, figures, first))
    print_rows(rows)
    if said := COMPARISONS[arguments.what].more(arguments, of_length):
        print(said)


def row(
    name: str, ranks: int, length: int, tokens: int, figures: Sequence[Figures], first: Sequence[Figures]
) -> dict[str, object]:
    """Of a layout at one length.

    Args:
        first: figures of the first layout.
    """
    found: dict[str, object] = {"": name, "ranks": ranks, "tokens per\nsequence": f"{length:,}"}
    found["loss at\nthe end"] = f"{figures[0].losses[-1]:.6f}"
    for what, of in figures[0].more.items():
        found[f"{what}\nper rank, MB"] = f"{of / MB:,.1f}"
        if what == "activations":
            found["x"] = f"{of / first[0].more[what]:.2f}"
    for title, clock in (("", "seconds"), ("CPU-", "cpu_seconds")):
        own, of_first = ([statistics.median(getattr(one, clock)) for one in each] for each in (figures, first))
        middle, ratios = statistics.median(own), [a / b for a, b in zip(of_first, own, strict=True)]
        found[f"{title}seconds\nper step"] = f"{middle:.3f}"
        found[f"tokens per\n{title}second"] = f"{tokens / middle:,.0f}"
        found[f"x\n{title}"] = f"{ratio(of_first, own):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    found["evenness"] = f"{statistics.median(min(step) / max(step) for one in figures for step in one.cpu):.2f}"
    return found


if __name__ == "__main__":
    sys.exit(main())
