"""Plan a run and check a cluster: `python -m expertmesh.sharding ...`.

plan --model DIR --gpus 16 --seq-length 4096       what fits, what it costs, how to start it
rehearse --model DIR --gpus 16 --ep-size 8 ...     the real step of one rank, without a GPU
mesh --world-size 16 --ep-size 8                   which ranks form which group
mesh --ep-size 8 --check                           under torchrun: whether the groups work, and how fast
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...moe.util.child import hide_gpus
from ...moe.util.command import run_command
from ...moe.util.errors import ExpertMeshError, as_printed
from ...moe.util.parser import Parser
from ...moe.util.terminal import ends_with_reader
from ...sharding.torchrun import tell_mistake
from ..config.train_config import make_parser

_EXAMPLES = """\
examples:
  python -m expertmesh.sharding plan --model DIR --gpus 16 --seq-length 4096
  python -m expertmesh.sharding rehearse --model DIR --gpus 16 --ep-size 8
  python -m expertmesh.sharding mesh --world-size 16 --ep-size 8
  torchrun --nproc-per-node 8 -m expertmesh.sharding mesh --ep-size 8 --check"""


class _ClusterParser(Parser):
    """Knows other tools' names for its flags."""

    def instead_of(self, name: str, values: Sequence[str]) -> str | None:
        instead = make_parser().others.answer(name.replace("-", "_"), values, exactly=False) or ""
        named = re.findall(r"--[\w-]+", instead)
        return instead if named and set(named) <= self._option_string_actions.keys() else None


def build_parser() -> Parser:
    parser = _ClusterParser(
        prog="python -m expertmesh.sharding", description="Plan a run and check a cluster.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    # their flags are their own and train_ep.py's, and are read where those are
    commands.add_parser("plan", help="memory, traffic and speed of every parallel layout; needs no weights")
    commands.add_parser("rehearse", help="dry-run one rank on fake tensors, without GPUs")

    mesh: Parser = commands.add_parser(
        "mesh",
        usage="%(prog)s --ep-size N [options]",
        help="which ranks form which group; with --check, whether they work",
        description="Which ranks form which process group; with --check, whether they work.",
    )
    mesh.add_argument("--world-size", "--gpus", type=int, help="number of ranks (default: torchrun's)")
    mesh.add_argument("--ep-size", type=int, required=True, help="ranks that experts are sharded over")
    mesh.add_argument("--cp-size", type=int, default=1, help="ranks that each sequence is split over")
    mesh.add_argument("--tp-size", type=int, default=1, help="ranks that heads and the vocabulary are sharded over")
    mesh.add_argument("--pp-size", type=int, default=1, help="ranks that the decoder layers are divided over")
    mesh.add_argument("--pipeline-chunks", type=int, default=1, help="stages per pipeline rank")
    mesh.add_argument("--num-layers", type=int, default=32, help="number of decoder layers")
    mesh.add_argument(
        "--dense-shard",
        choices=["full", "hybrid"],
        default="full",
        help="non-expert parameters: full FSDP, or sharded within EP and replicated over DP (hybrid)",
    )
    mesh.add_argument("--gpus-per-node", type=int, help="GPUs per node (default: torchrun's, else 8 or fewer)")
    mesh.add_argument("--num-experts", type=int, default=8, help="experts per layer")
    mesh.add_argument("--check", action="store_true", help="under torchrun: exchange tokens in every group")
    mesh.add_argument("--hidden-size", type=int, default=4096, help="with --check: elements per token")
    mesh.add_argument("--timeout", type=int, default=60, help="with --check: seconds after which a group has failed")
    mesh.add_argument("--use-cpu", action="store_true", help="with --check: stay on the CPU, with gloo")
    mesh.add_argument(
        "--json", type=Path, metavar="FILE", help="with --check: write rates for `plan --calibrate` to FILE"
    )
    mesh.add_argument("--picture", type=Path, metavar="FILE", help="draw what each rank holds, as SVG, to FILE")
    mesh.set_defaults(parser=mesh)
    return parser


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where nothing fits; 2 after a mistake in the input, or where a group does not answer."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None and given[:1] in (["plan"], ["rehearse"]):
            hide_gpus()
        # what a command does is imported once its flags are read: `--help` does without
        if given[:1] == ["plan"]:
            from ..planning.plan_flags import read_flags as read_plan

            asked = read_plan(given[1:])
            from ..planning.plan_command import plan

            return plan(asked)
        if given[:1] == ["rehearse"]:
            from ..planning.rehearsal.rehearse_flags import read_flags as read_rehearsal

            arguments, config = read_rehearsal(given[1:])
            from ..planning.rehearsal.rehearse_command import dry_run

            return dry_run(arguments, config)
        arguments = build_parser().parse_args(given)
        from .mesh_command import mesh

        return mesh(arguments)
    except ExpertMeshError as error:
        return tell_mistake(f"sharding: error: {as_printed(error)}")


def plan_script() -> NoReturn:
    """`python -m expertmesh.sharding plan` as a process of its own."""
    hide_gpus()
    run_command(lambda: main(["plan", *sys.argv[1:]]))
