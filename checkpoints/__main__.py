"""Convert, export, verify and inspect checkpoints: `python -m checkpoints ...`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from checkpoints.convert import HowToWrite, convert, export_offline
from checkpoints.dtypes import FLOATS
from checkpoints.inspection import describe, describe_model, read_heads, with_claims_checked
from checkpoints.manifest import MANIFEST, check_all_bytes
from checkpoints.opening import open_readable
from checkpoints.paths import read_ahead
from checkpoints.source import resolve_model
from checkpoints.state.marker import MARKER, check_owner
from checkpoints.verify import compare
from moe import ExpertMeshError
from moe.command import run_command
from moe.sizes import parse_size
from moe.terminal import ends_with_reader, folded

READ_AHEAD = 4 * 10**9
"""Bytes that are read before they are asked for, while what is to become of them is found out."""

ADAPTER_CONFIG = "adapter_config.json"
"""What tells the directory of an adapter."""

DTYPES = {name: code for code, name in FLOATS.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ExpertMeshError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m checkpoints", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    how = _Parser(add_help=False)
    how.add_argument("--max-shard-size", default="5GB", help="size of a file, where it is free to choose")
    how.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="files written at once")
    how.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    how.add_argument(
        "--drop-untrained",
        action="store_true",
        help="leave out tensors that are not trained (vision tower, multi-token prediction), and what config.json says "
        "of them; default: carry them over as they are",
    )

    trust = _Parser(add_help=False)
    trust.add_argument(
        "--trust-checkpoint-owner", action="store_true", help="read another user's training checkpoint: it can run code"
    )

    to_shards = commands.add_parser("convert", parents=[how], help="Hugging Face directory to EP shards")
    to_shards.add_argument("source", help="directory, or hub id")
    to_shards.add_argument("out", type=Path)
    to_shards.add_argument("--ep-size", type=int, required=True, help="ranks that share out the experts")
    to_shards.add_argument(
        "--dtype", choices=list(DTYPES), help="of every parameter; default: as they are, encoded ones too"
    )

    to_hf = commands.add_parser(
        "export", parents=[how, trust], help="EP shards or training checkpoint to Hugging Face form"
    )
    to_hf.add_argument("source", help="directory, or hub id")
    to_hf.add_argument("out", type=Path)
    to_hf.add_argument(
        "--base",
        help="directory or hub id of the model that a training checkpoint's run began with, where it has moved: it has "
        "the tensors that are not trained",
    )

    merged = commands.add_parser("merge", parents=[how], help="a model with an adapter's updates, in Hugging Face form")
    merged.add_argument("base", help="directory of any form, or hub id")
    merged.add_argument("adapter", type=Path, help="PEFT's directory")
    merged.add_argument("out", type=Path)

    verify = commands.add_parser(
        "verify", parents=[trust], help="whether two checkpoints of any form hold the same model"
    )
    verify.add_argument("a", help="directory, or hub id")
    verify.add_argument("b", help="directory, or hub id")
    verify.add_argument(
        "--rtol",
        type=float,
        help="allow values this far apart, relatively, in encoded tensors to the row's largest; default: same bits",
    )

    inspect = commands.add_parser(
        "inspect", parents=[trust], help="what a checkpoint is; with --check, whether it is whole"
    )
    inspect.add_argument("path", help="directory, or hub id")
    inspect.add_argument("--tensors", action="store_true", help="list them")
    inspect.add_argument(
        "--check", action="store_true", help="hold it against its model, and every byte against the checksums"
    )
    return parser


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where `verify` finds a difference or `inspect` a fault; 2 after a mistake in the input."""
    try:
        arguments = build_parser().parse_args(argv)
        commands = {"convert": _convert, "export": _export, "merge": _merge, "verify": _verify, "inspect": _inspect}
        return commands[arguments.command](arguments)
    except ExpertMeshError as error:
        print(f"checkpoints: error: {error}", file=sys.stderr)
        return 2


def _how(arguments: argparse.Namespace) -> HowToWrite:
    if arguments.workers < 1:
        raise ExpertMeshError(f"--workers {arguments.workers}: must be 1 or more")
    size = parse_size("--max-shard-size", arguments.max_shard_size)
    return HowToWrite(
        *(size, arguments.workers, arguments.overwrite),
        show_progress=True,
        drop_untrained=arguments.drop_untrained,
        tell=lambda line: print(folded(line), flush=True),
    )


def _convert(arguments: argparse.Namespace) -> int:
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    source, how = resolve_model(arguments.source, "convert"), _how(arguments)
    read_ahead(source, READ_AHEAD)
    widened = convert(source, arguments.out, arguments.ep_size, dtype, how)
    if widened:
        print(
            folded(
                f"widened to bfloat16, as a block of scales of theirs reaches into two experts: {', '.join(widened)}"
            )
        )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    trusted = arguments.trust_checkpoint_owner
    source, how = resolve_model(arguments.source, "export"), _how(arguments)
    base = None if arguments.base is None else resolve_model(arguments.base, "--base")
    read_ahead(source, READ_AHEAD)
    export_offline(source, arguments.out, how, trusted, base)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from checkpoints.merge import merge_adapter  # needs torch, which flags do without

    base, adapter, how = resolve_model(arguments.base, "merge"), _directory(arguments.adapter), _how(arguments)
    read_ahead(base, READ_AHEAD)
    changed = merge_adapter(base, adapter, arguments.out, how)
    print(f"{changed} parameters changed")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    paths = [resolve_model(path, "verify") for path in (arguments.a, arguments.b)]
    if all(map(_is_adapter, paths)):
        from checkpoints.adapter import compare_adapters

        comparison = compare_adapters(paths[0], paths[1], arguments.rtol)
    else:
        a, b = (open_readable(path, strict=False, any_owner=arguments.trust_checkpoint_owner) for path in paths)
        comparison = compare(a, b, arguments.rtol)
    for line in comparison.differences:
        print(folded(line))
    same = "the same bits" if arguments.rtol is None else f"the same to a relative {arguments.rtol}"
    if comparison.differences:
        print(f"{len(comparison.differences)} differences in {comparison.num_tensors} tensors")
        return 1
    print(f"{comparison.num_tensors} tensors, {same}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    path = resolve_model(arguments.path, "inspect")
    if _is_adapter(path):
        from checkpoints.adapter import describe_adapter

        for line in describe_adapter(path, arguments.tensors):
            print(folded(line))
        return 0
    if (path / MARKER).exists():
        check_owner(path, arguments.trust_checkpoint_owner)
    for line in describe(path, read_heads(path), arguments.tensors):
        print(folded(line))
    if not arguments.check:
        return 0
    readable = open_readable(path, strict=False, any_owner=arguments.trust_checkpoint_owner)
    readable, without_tensors = with_claims_checked(readable)
    for line in describe_model(readable, without_tensors):
        print(folded(line))
    check_all_bytes(path)
    in_this_form = (path / MANIFEST).exists() or (path / MARKER).exists()
    print("checksums   match" if in_this_form else "checksums   none in this form")
    return 1 if readable.checkpoint.problems else 0


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists()


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ExpertMeshError(f"{path}: no such directory")
    return path


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
