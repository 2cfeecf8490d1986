"""Convert, export, merge, verify and inspect checkpoints: `python -m expertmesh.checkpoints ...`."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from expertmesh.checkpoints.convert import HowToWrite, convert, export_offline
from expertmesh.checkpoints.ep_shards.manifest import MANIFEST, check_all_bytes
from expertmesh.checkpoints.files.directories import finish_replacement_of_missing, write_errors
from expertmesh.checkpoints.files.dtypes import FLOATS
from expertmesh.checkpoints.files.paths import read_ahead
from expertmesh.checkpoints.hf.source import resolve_model
from expertmesh.checkpoints.inspection import describe, describe_model, read_heads, with_claims_checked
from expertmesh.checkpoints.opening import is_training, open_readable
from expertmesh.checkpoints.training_state.marker import MARKER, check_file, read_marker
from expertmesh.checkpoints.verify import compare
from expertmesh.moe.util.command import run_command
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import Parser, refuse_gone
from expertmesh.moe.util.sizes import parse_size
from expertmesh.moe.util.terminal import ends_with_reader, folded

READ_AHEAD = 4 * 10**9
"""Bytes of weights that are read ahead, while the command's work is being prepared."""

ADAPTER_CONFIG = "adapter_config.json"
"""What tells the directory of an adapter."""

_EXAMPLE = """\
example:
  python -m expertmesh.checkpoints convert MODEL SHARDS --ep-size 8"""

GONE = {"--trust-checkpoint-owner": "leave it out; anybody's checkpoint is read, and can run no code"}
EXPORT_ENCODINGS = ("plain", "source")
DTYPES = {name: code for code, name in FLOATS.items()}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m expertmesh.checkpoints",
        description="Convert, export, merge, verify and inspect checkpoints.",
        epilog=_EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    how = Parser(add_help=False)
    how.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="size of a file, where the form allows")
    how.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="files written in parallel")
    how.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    how.add_argument(
        "--drop-untrained",
        action="store_true",
        help="leave out tensors that are not trained (vision tower, multi-token prediction), here and in config.json, "
        "instead of copying them unchanged",
    )

    encoding = Parser(add_help=False)
    encoding.add_argument(
        "--export-encoding",
        choices=EXPORT_ENCODINGS,
        default="plain",
        help="of tensors that the source has quantized: plain: in bfloat16; source: quantized as the source has them, "
        "unchanged blocks bit for bit",
    )

    to_shards = _add(commands, "convert", "SOURCE OUT --ep-size N", "Hugging Face directory to EP shards", how)
    to_shards.add_argument("source", metavar="SOURCE", help="directory, or hub id")
    to_shards.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    to_shards.add_argument("--ep-size", type=int, required=True, help="ranks that experts are sharded over")
    to_shards.add_argument(
        "--dtype", choices=list(DTYPES), help="dtype of all parameters (default: unchanged, quantized ones too)"
    )

    to_hf = _add(
        commands, "export", "SOURCE OUT", "EP shards or training checkpoint to Hugging Face form", how, encoding
    )
    to_hf.add_argument("source", metavar="SOURCE", help="directory, or hub id")
    to_hf.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    to_hf.add_argument(
        "--base",
        metavar="DIR",
        help="for a training checkpoint whose run's model has moved: directory or hub id of that model, which has the "
        "tensors that are not trained, and their encoding",
    )

    merged = _add(
        commands, "merge", "BASE ADAPTER OUT", "merge an adapter into a model, in Hugging Face form", how, encoding
    )
    merged.add_argument("base", metavar="BASE", help="model: directory of any form, or hub id")
    merged.add_argument("adapter", metavar="ADAPTER", type=Path, help="PEFT's directory")
    merged.add_argument("out", metavar="OUT", type=Path, help="directory to write")

    verify = _add(commands, "verify", "A B", "compare two checkpoints of any form")
    verify.add_argument("a", metavar="A", help="directory, or hub id")
    verify.add_argument("b", metavar="B", help="directory, or hub id")
    verify.add_argument(
        "--rtol",
        type=float,
        help="allow this relative difference per value; of quantized tensors, relative to the largest of its dim-0 "
        "slice (default: bitwise equal)",
    )
    verify.add_argument("--ignore-config", action="store_true", help="compare tensors alone, not what the configs say")

    inspect = _add(commands, "inspect", "PATH", "what a checkpoint contains; with --check, whether it is complete")
    inspect.add_argument("path", metavar="PATH", help="directory, or hub id")
    inspect.add_argument("--tensors", action="store_true", help="list all tensors")
    inspect.add_argument(
        "--check", action="store_true", help="verify its tensors against its model, and all bytes against the checksums"
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
    # torch warns thus wherever a training checkpoint is read outside a process group, as here is meant
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        words = sys.argv[1:] if argv is None else argv
        refuse_gone(words, GONE)
        arguments = build_parser().parse_args(words)
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
        tell=_tell,
        tell_errors=_tell,
        as_source=getattr(arguments, "export_encoding", "plain") == "source",
    )


def _tell(line: str) -> None:
    print(folded(line), flush=True)


def _convert(arguments: argparse.Namespace) -> int:
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    source, how = _resolve(arguments.source, "convert"), _how(arguments)
    read_ahead(source, READ_AHEAD)
    dequantized = convert(source, arguments.out, arguments.ep_size, dtype, how)
    if dequantized:
        print(folded(f"dequantized to bfloat16, as a block of scales spans two experts: {', '.join(dequantized)}"))
    _tell(f"wrote EP shards, ep {arguments.ep_size}: {_written(arguments.out)}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    source, how = _resolve(arguments.source, "export"), _how(arguments)
    base = None if arguments.base is None else _resolve(arguments.base, "--base")
    if base is not None and not is_training(source):
        raise ExpertMeshError(f"--base {arguments.base}: {source} is no training checkpoint; leave it out")
    read_ahead(source, READ_AHEAD)
    export_offline(source, arguments.out, how, base)
    _tell(f"wrote a Hugging Face directory: {_written(arguments.out)}")
    return 0


def _written(out: Path) -> str:
    """A directory and how much it holds, in a few words."""
    heads = read_heads(out)
    size = sum(file.stat().st_size for file in heads.files) / 1e9
    return f"{out} ({len(heads.stored):,} tensors in {len(heads.files):,} files, {size:,.2f} GB)"


def _merge(arguments: argparse.Namespace) -> int:
    from expertmesh.checkpoints.adapters.merge import merge_adapter  # needs torch, which flags do without

    base, adapter, how = _resolve(arguments.base, "merge"), _directory(arguments.adapter), _how(arguments)
    read_ahead(base, READ_AHEAD)
    changed = merge_adapter(base, adapter, arguments.out, how)
    _tell(f"wrote a Hugging Face directory, {changed} parameters changed: {_written(arguments.out)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.rtol is not None and not 0 <= arguments.rtol < float("inf"):  # not true of NaN
        raise ExpertMeshError(f"--rtol {arguments.rtol}: must be 0 or more")
    paths = [_resolve(path, "verify") for path in (arguments.a, arguments.b)]
    if all(map(_is_adapter, paths)):
        from expertmesh.checkpoints.adapters.adapter_files import compare_adapters

        comparison = compare_adapters(paths[0], paths[1], arguments.rtol, arguments.ignore_config)
    elif any(map(_is_adapter, paths)):
        adapter, model = sorted(paths, key=_is_adapter, reverse=True)
        raise ExpertMeshError(
            f"verify: {adapter} is an adapter, and {model} is a model; compare two of one kind: `merge` makes a "
            "model of an adapter and its base"
        )
    else:
        a, b = (open_readable(path, strict=False) for path in paths)
        comparison = compare(a, b, arguments.rtol, arguments.ignore_config)
    for line in comparison.differences:
        print(folded(line))
    same = "bitwise equal" if arguments.rtol is None else f"equal within a relative {arguments.rtol}"
    if comparison.differences:
        print(f"{len(comparison.differences)} differences in {comparison.num_tensors} tensors")
        return 1
    print(f"{comparison.num_tensors} tensors, {same}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    path = _resolve(arguments.path, "inspect")
    if _is_adapter(path):
        if arguments.check:
            raise ExpertMeshError(
                f"--check: {path} is an adapter, which has no checksums and says nothing of its model's tensors; "
                "`merge` checks every A and B against that model"
            )
        from expertmesh.checkpoints.adapters.adapter_files import describe_adapter

        for line in describe_adapter(path, arguments.tensors):
            print(folded(line))
        return 0
    for line in describe(path, read_heads(path), arguments.tensors):
        print(folded(line))
    if not arguments.check:
        return 0
    if is_training(path) and (marker := read_marker(path)).get("base") is not None:
        for file, described in marker["files"].items():
            check_file(path, file, described)
        print("checksums   match; there is no model to compare adapters with")
        return 0
    readable = open_readable(path, strict=False)
    readable, without_tensors = with_claims_checked(readable)
    for line in describe_model(readable, without_tensors):
        print(folded(line))
    check_all_bytes(path)
    in_this_form = (path / MANIFEST).exists() or (path / MARKER).exists()
    print("checksums   match" if in_this_form else "checksums   none in this form")
    return 1 if readable.checkpoint.problems else 0


def _resolve(name: str, command: str) -> Path:
    """As `resolve_model`, once what a killed process had begun to replace there has its name."""
    with write_errors(Path(name)):
        finish_replacement_of_missing(Path(name))
    return resolve_model(name, command)


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
