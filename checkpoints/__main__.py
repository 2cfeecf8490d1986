"""Convert, export, merge, upcycle, verify and inspect checkpoints: `python -m expertmesh.checkpoints ...`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from expertmesh.checkpoints.files.dtype_names import FLOATS
from expertmesh.moe.util.command import run_command
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import Parser, refuse_gone
from expertmesh.moe.util.terminal import ends_with_reader

_EXAMPLE = """\
example:
  python -m expertmesh.checkpoints convert MODEL SHARDS --ep-size 8"""

GONE = {"--trust-checkpoint-owner": "leave it out; any checkpoint can be read, and none can run code"}
EXPORT_ENCODINGS = ("plain", "source")


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m expertmesh.checkpoints",
        description="Convert, export, merge, upcycle, verify and inspect checkpoints.",
        epilog=_EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    how = Parser(add_help=False)
    how.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="size of a file, for forms that allow it")
    how.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="files written in parallel (default: one per CPU core)",
    )
    how.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    untrained = Parser(add_help=False)
    untrained.add_argument(
        "--drop-untrained",
        action="store_true",
        help="leave out untrained tensors (vision tower, multi-token prediction), instead of copying them",
    )

    encoding = Parser(add_help=False)
    encoding.add_argument(
        "--export-encoding",
        choices=EXPORT_ENCODINGS,
        default="plain",
        help="tensors that are quantized in the source: write bfloat16 (plain), or quantize them again the same way",
    )

    to_shards = _add(
        commands, "convert", "SOURCE OUT --ep-size N", "Hugging Face directory to EP shards", how, untrained
    )
    to_shards.add_argument("source", metavar="SOURCE", help="directory, or hub id")
    to_shards.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    to_shards.add_argument("--ep-size", type=int, required=True, help="ranks that experts are sharded over")
    to_shards.add_argument(
        "--dtype",
        choices=list(FLOATS.values()),
        help="dtype of all parameters (default: unchanged, quantized ones too)",
    )

    to_hf = _add(
        commands,
        "export",
        "SOURCE OUT",
        "EP shards or training checkpoint to Hugging Face form",
        how,
        untrained,
        encoding,
    )
    to_hf.add_argument("source", metavar="SOURCE", help="directory, or hub id")
    to_hf.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    to_hf.add_argument(
        "--base",
        metavar="DIR",
        help="base model of a training checkpoint, if it has moved: its directory or hub id",
    )

    merged = _add(
        commands,
        "merge",
        "BASE ADAPTER OUT",
        "merge an adapter into a model, in Hugging Face form",
        how,
        untrained,
        encoding,
    )
    merged.add_argument("base", metavar="BASE", help="model: directory in any form, or hub id")
    merged.add_argument("adapter", metavar="ADAPTER", type=Path, help="PEFT's directory")
    merged.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    merged.add_argument(
        "--dtype",
        choices=list(FLOATS.values()),
        help="dtype of all parameters (default: as in the base); float32 keeps small LoRA deltas, which bfloat16 "
        "rounds away",
    )

    upcycled = _add(
        commands,
        "upcycle",
        "DENSE OUT\n       --experts N --top-k K",
        "make an MoE model of a dense one, whose MLPs become its experts",
        how,
    )
    upcycled.add_argument("dense", metavar="DENSE", help="dense model: directory, or hub id")
    upcycled.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    upcycled.add_argument("--experts", type=int, required=True, help="experts per layer")
    upcycled.add_argument("--top-k", type=int, required=True, help="experts per token")
    upcycled.add_argument("--like", metavar="TYPE", help="model type to make (default: the one of the dense family)")
    upcycled.add_argument(
        "--granularity",
        type=int,
        default=1,
        metavar="G",
        help="cut each copy of the MLP into G narrower experts (default: 1)",
    )
    upcycled.add_argument(
        "--drop",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of each expert's neurons to draw anew (default: 0)",
    )
    upcycled.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="noise on the experts' weights, relative to each (default: 0)",
    )
    upcycled.add_argument(
        "--expert",
        nargs="+",
        default=[],
        metavar="DIR",
        help="dense models whose MLPs become the experts, in turn (default: DENSE)",
    )
    upcycled.add_argument(
        "--average", action="store_true", help="of all other weights, take the mean of the --expert models"
    )
    upcycled.add_argument(
        "--router-prompts",
        type=Path,
        metavar="FILE",
        help="draw no router, but make it of prompts: a line of JSON per expert, "
        '{"prompts": [...], "negative_prompts": [...]}',
    )
    upcycled.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")

    verify = _add(commands, "verify", "A B", "compare two checkpoints of any form")
    verify.add_argument("a", metavar="A", help="directory, or hub id")
    verify.add_argument("b", metavar="B", help="directory, or hub id")
    verify.add_argument(
        "--rtol",
        type=float,
        help="allow this relative difference per value; of quantized tensors and adapters, relative to the largest "
        "of a dim-0 slice (default: bitwise equal)",
    )
    verify.add_argument("--ignore-config", action="store_true", help="compare only tensors, not configs")

    inspect = _add(commands, "inspect", "PATH", "show what a checkpoint contains; with --check, whether it is complete")
    inspect.add_argument("path", metavar="PATH", help="directory, or hub id")
    inspect.add_argument("--tensors", action="store_true", help="list all tensors")
    inspect.add_argument(
        "--check", action="store_true", help="verify tensors against the model, and bytes against checksums"
    )
    return parser


def _add(commands: Any, name: str, usage: str, help: str, *parents: Parser) -> Parser:
    """A command that says the same of itself in the list of commands and in its own help."""
    description = help[0].upper() + help[1:]
    parser: Parser = commands.add_parser(
        name, usage=f"%(prog)s {usage} [options]", description=description, help=help, parents=parents
    )
    return parser


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where `verify` finds a difference or `inspect` a fault; 2 after a mistake in the input."""
    try:
        words = sys.argv[1:] if argv is None else argv
        refuse_gone(words, GONE)
        arguments = build_parser().parse_args(words)
        from expertmesh.checkpoints.commands import COMMANDS  # imports numpy, which --help does without

        return COMMANDS[arguments.command](arguments)
    except ExpertMeshError as error:
        print(f"checkpoints: error: {error}", file=sys.stderr)
        return 2


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
