"""What the commands do, once their flags are read (`__main__.py`)."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ..moe.util.errors import ExpertMeshError
from ..moe.util.sizes import parse_size
from ..moe.util.terminal import folded
from .convert import HowToWrite, convert, export_offline
from .ep_shards.manifest import MANIFEST, check_all_bytes
from .files.directories import finish_replacement_of_missing, write_errors
from .files.dtype_names import FLOATS
from .files.paths import read_ahead
from .hf.hub import resolve_model
from .inspection import describe, describe_model, read_heads, with_claims_checked
from .opening import is_training, open_any, with_parts_of
from .training_state.marker import MARKER, check_files, read_marker
from .verify import compare

READ_AHEAD = 4 * 10**9
"""Bytes of weights that are read ahead, while the command's work is being prepared."""

ADAPTER_CONFIG = "adapter_config.json"
"""What tells the directory of an adapter."""

_CODES = {name: code for code, name in FLOATS.items()}


def _how(arguments: argparse.Namespace) -> HowToWrite:
    if arguments.workers < 1:
        raise ExpertMeshError(f"--workers {arguments.workers}: must be 1 or more")
    size = parse_size("--max-shard-size", arguments.max_shard_size)
    return HowToWrite(
        *(size, arguments.workers, arguments.overwrite),
        show_progress=True,
        drop_untrained=getattr(arguments, "drop_untrained", False),
        tell=_tell,
        tell_errors=_tell,
        as_source=getattr(arguments, "export_encoding", "plain") == "source",
    )


def _dtype(arguments: argparse.Namespace) -> str | None:
    return None if arguments.dtype is None else _CODES[arguments.dtype]


def _tell(line: str) -> None:
    print(folded(line), flush=True)


def convert_command(arguments: argparse.Namespace) -> int:
    dtype = _dtype(arguments)
    source, how = _resolve(arguments.source, "convert"), _how(arguments)
    read_ahead(source, READ_AHEAD)
    dequantized = convert(source, arguments.out, arguments.ep_size, dtype, how)
    if dequantized:
        print(folded(f"dequantized to bfloat16, because a block of scales spans two experts: {', '.join(dequantized)}"))
    _tell(f"wrote EP shards, ep {arguments.ep_size}: {_written(arguments.out)}")
    return 0


def export_command(arguments: argparse.Namespace) -> int:
    source, how = _resolve(arguments.source, "export"), _how(arguments)
    base = None if arguments.base is None else _resolve(arguments.base, "--base")
    if base is not None and not is_training(source):
        raise ExpertMeshError(f"--base {arguments.base}: {source} is not a training checkpoint; leave it out")
    read_ahead(source, READ_AHEAD)
    export_offline(source, arguments.out, how, base)
    _tell(f"wrote a Hugging Face directory: {_written(arguments.out)}")
    return 0


def _written(out: Path) -> str:
    """A directory and how much it holds, in a few words."""
    heads = read_heads(out)
    size = sum(file.stat().st_size for file in heads.files) / 1e9
    return f"{out} ({len(heads.stored):,} tensors in {len(heads.files):,} files, {size:,.2f} GB)"


def merge_command(arguments: argparse.Namespace) -> int:
    from .adapters.merge import merge_adapter  # needs torch, which mistakes do without

    base, adapter, how = _resolve(arguments.base, "merge"), _directory(arguments.adapter), _how(arguments)
    if arguments.dtype is not None and how.as_source:
        raise ExpertMeshError(
            "--dtype: --export-encoding source quantizes as the source does; leave out one of the two"
        )
    read_ahead(base, READ_AHEAD)
    changed = merge_adapter(base, adapter, arguments.out, how, _dtype(arguments))
    _tell(f"wrote a Hugging Face directory, {changed} parameters changed: {_written(arguments.out)}")
    return 0


def upcycle_command(arguments: argparse.Namespace) -> int:
    from .upcycle import Recipe, upcycle  # needs torch, which mistakes do without

    given = {name: getattr(arguments, name) for name in Recipe.__dataclass_fields__}
    recipe, how = Recipe(**given), _how(arguments)
    dense = _resolve(arguments.dense, "upcycle")
    experts = [_resolve(path, "--expert") for path in arguments.expert]
    read_ahead(dense, READ_AHEAD)
    upcycle(dense, arguments.out, recipe, how, arguments.like, experts, arguments.router_prompts)
    _tell(f"wrote a Hugging Face directory: {_written(arguments.out)}")
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    if arguments.rtol is not None and not 0 <= arguments.rtol < float("inf"):  # not true of NaN
        raise ExpertMeshError(f"--rtol {arguments.rtol}: must be 0 or more")
    paths = [_resolve(path, "verify") for path in (arguments.a, arguments.b)]
    if all(map(_is_adapter, paths)):
        from .adapters.inspection import compare_adapters

        comparison = compare_adapters(paths[0], paths[1], arguments.rtol, arguments.ignore_config)
    elif any(map(_is_adapter, paths)):
        adapter, model = sorted(paths, key=_is_adapter, reverse=True)
        raise ExpertMeshError(
            f"verify: {adapter} is an adapter, and {model} is a model; compare two of one kind: `merge` makes a "
            "model of an adapter and its base"
        )
    else:
        a, b = (open_any(path, strict=False) for path in paths)
        # a run may have trained what the other one's files hold beside the language model
        a, b = with_parts_of(a, b), with_parts_of(b, a)
        comparison = compare(a, b, arguments.rtol, arguments.ignore_config)
    for line in comparison.differences:
        print(folded(line))
    same = "bitwise equal" if arguments.rtol is None else f"equal within a relative {arguments.rtol}"
    if comparison.differences:
        print(f"{len(comparison.differences)} differences in {comparison.num_tensors} tensors")
        return 1
    print(f"{comparison.num_tensors} tensors, {same}")
    return 0


def inspect_command(arguments: argparse.Namespace) -> int:
    path = _resolve(arguments.path, "inspect")
    if _is_adapter(path):
        if arguments.check:
            raise ExpertMeshError(
                f"--check: {path} is an adapter, which has no checksums; `merge` checks it against its model"
            )
        from .adapters.inspection import describe_adapter

        for line in describe_adapter(path, arguments.tensors):
            print(folded(line))
        return 0
    for line in describe(path, read_heads(path), arguments.tensors):
        print(folded(line))
    if not arguments.check:
        return 0
    if is_training(path) and (marker := read_marker(path)).get("base") is not None:
        check_files(path, marker["files"])
        print("checksums   match; no model to compare the adapters with")
        return 0
    checkpoint, without_tensors = with_claims_checked(open_any(path, strict=False))
    for line in describe_model(checkpoint, without_tensors):
        print(folded(line))
    check_all_bytes(path)
    in_this_form = (path / MANIFEST).exists() or (path / MARKER).exists()
    print("checksums   match" if in_this_form else "checksums   none in this form")
    return 1 if checkpoint.problems else 0


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


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": convert_command,
    "export": export_command,
    "merge": merge_command,
    "upcycle": upcycle_command,
    "verify": verify_command,
    "inspect": inspect_command,
}
"""By what the command line calls them; each returns the exit code."""
