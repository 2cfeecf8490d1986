"""EP shards: a checkpoint in the layer's own layout, so that a rank reads its own files only.

    ep-00000-of-00008.safetensors   every layer's w1, v1, w2 of the experts of one ep rank; of encoded ones, the codes,
                                    and their scales as NAME.scales
    dense-00001-of-0000N.safetensors   everything else that the model has
    carried-00001-of-0000N.safetensors   tensors that it does not have, under their own names; encoded ones as they were
    manifest.json   what stands where, checksums, and how the tensors are called in Hugging Face form
    config.json, tokenizer files, ...   as the source had them

The manifest is written last: a directory without one is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ...moe.util.errors import ExpertMeshError
from ...moe.util.progress import CountedProgress
from ...sharding.topology import rows_of
from ..files.checksums import check_seal, file_checksum, seal
from ..files.codes import CODES, SCALE_DTYPES
from ..files.dtype_names import DTYPE_NAMES
from ..files.encodings import WIDE, decoded
from ..files.file_layout import FileRecord, OutputFile, OutputTensor, plain_output, plan_files
from ..files.paths import named_file
from ..files.tensors import DiskTensor, Encoding, Region, StoredTensor, uncovered
from ..hf.checkpoint import Checkpoint, open_hf
from ..hf.headers import read_header
from ..hf.json_files import check_table, read_json, well_formed
from ..hf.requantized import Originals, kept_outputs
from ..hf.source import ModelSource
from ..hf.untrained_tensors import carried_as_stored, carried_outputs

if TYPE_CHECKING:
    from ..hf.names import Names

MANIFEST = "manifest.json"
FORMAT = "expertmesh-ep-shards"
VERSION = 4

SCALES = ".scales"
"""What the name of an encoded tensor's scales ends with."""


def shard_files(
    checkpoint: Checkpoint,
    dtypes: dict[str, str],
    encodings: dict[str, Encoding],
    ep_size: int,
    max_shard_size: int,
) -> list[OutputFile]:
    """The files of a model's EP shards: one per ep rank, and as many dense ones as the size asks for. `encodings` are
    of the parameters that stay encoded, as `checkpoint` has them."""
    originals, names = Originals(checkpoint), checkpoint.names

    def outputs(name: str, parameter: str, rows: range) -> Iterator[OutputTensor]:
        whole, encoding = names.parameters[parameter], encodings.get(parameter)
        shape = (len(rows), *whole[1:]) if whole else ()
        tensor = DiskTensor(name, shape, dtypes[parameter], (Region(parameter, rows),))
        if encoding is None:
            yield plain_output(tensor, summed=True)
        else:
            yield from kept_outputs(replace(tensor, parts=_parts(name, shape, encoding), encoding=encoding), originals)

    files = []
    for rank in range(ep_size):
        own: list[OutputTensor] = []
        for name, width in names.experts.items():
            block = rows_of(names.parameters[name]) // ep_size
            rows = range(rank * block, (rank + 1) * block)
            own += outputs(f"{name}.{rows.start // width}-{(rows.stop - 1) // width}", name, rows)
        files.append(OutputFile(f"ep-{rank:05d}-of-{ep_size:05d}.safetensors", own))
    others = {name: shape for name, shape in names.parameters.items() if name not in names.experts}
    dense = [output for name, shape in others.items() for output in outputs(name, name, range(rows_of(shape)))]
    return files + plan_files(dense, max_shard_size, "dense")


def carried_files(carried: Sequence[DiskTensor], as_stored: bool, max_shard_size: int) -> list[OutputFile]:
    """The files of what is carried over; encoded tensors `as_stored`, or dequantized."""
    outputs = list((carried_as_stored if as_stored else carried_outputs)(carried, summed=True))
    return plan_files(outputs, max_shard_size, "carried") if outputs else []


def _parts(name: str, shape: tuple[int, ...], encoding: Encoding) -> tuple[StoredTensor, StoredTensor]:
    """Codes and scales of an encoded tensor, as the layer's own layout has them."""
    rows, columns = shape
    return (
        StoredTensor(name, (rows, columns // encoding.kind.codes_a_byte), encoding.kind.stored_dtype),
        StoredTensor(name + SCALES, encoding.num_scales(shape), encoding.scale_dtype),
    )


def make_manifest(
    checkpoint: Checkpoint, ep_size: int, files: Sequence[OutputFile], records: Sequence[FileRecord]
) -> dict[str, Any]:
    """The content of manifest.json.

    Args:
        checkpoint: of which the shards were made; its exports are to be those of the shards.
    """
    names = checkpoint.names
    tensors, sums = [], {name: value for record in records for name, value in record.sums.items()}
    written = [(file.name, o.tensor) for file in files for o in file.tensors if o.summed == "rows"]
    for file_name, tensor in written:
        (region,), encoding = tensor.regions, tensor.encoding
        width = names.experts.get(region.parameter)
        tensors.append(
            {
                "name": tensor.name,
                "parameter": region.parameter,
                "rows": [region.rows.start, region.rows.stop],
                "experts": [region.rows.start // width, region.rows.stop // width] if width else None,
                "transposed": region.parameter in names.transposed,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "encoding": None
                if encoding is None
                else {"codes": encoding.codes, "block": list(encoding.block), "scale_dtype": encoding.scale_dtype},
                "file": file_name,
                "row_sum": f"{sums[tensor.name]:016x}",
            }
        )
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "family": checkpoint.source.model_type,
            "source": checkpoint.path.name,
            "ep_size": ep_size,
            "tensors": tensors,
            "files": {
                r.name: {"bytes": r.num_bytes, "xxh3_128": r.checksum, "header_xxh3_128": r.header_checksum}
                for r in sorted(records, key=lambda record: record.name)
            },
            "exported": export_table(checkpoint.exported),
            "carried": list(_carried_entries(checkpoint.carried, files, sums)),
            "stored": {
                tensor.name: [{"name": p.name, "dtype": p.dtype, "shape": list(p.shape)} for p in tensor.parts]
                for tensor in checkpoint.exported
                if tensor.encoding is not None
            },
        }
    )


def _carried_entries(
    carried: Sequence[DiskTensor], files: Sequence[OutputFile], sums: dict[str, int]
) -> Iterator[dict[str, Any]]:
    file_of = {o.part.name: file.name for file in files for o in file.tensors if o.summed == "bytes"}
    for tensor in carried:
        as_stored = all(part.name in file_of for part in tensor.parts)  # else dequantized
        names = [part.name for part in tensor.parts] if as_stored else [tensor.name]
        stored = [{"name": name, "file": file_of[name], "sum": f"{sums[name]:016x}"} for name in names]
        block = list(tensor.encoding.block) if as_stored and tensor.encoding is not None else None
        yield {"name": tensor.name, "block": block, "stored": stored}


def _open_carried(
    path: Path, entries: list[Any], headers: dict[str, dict[str, StoredTensor]], quantization: Any, transposed: bool
) -> Iterator[DiskTensor]:
    """
    Raises:
        ExpertMeshError: a tensor is not as the manifest has it.
        ValueError, LookupError, TypeError: the manifest is not as this version writes it.
    """
    for entry in entries:
        stored = {}
        for part in entry["stored"]:
            name, file = str(part["name"]), str(part["file"])
            if name not in headers[file]:
                raise ExpertMeshError(f"{path / file}: tensor {name} does not match {MANIFEST}")
            stored[name] = replace(headers[file][name], checksum=int(part["sum"], 16))
        named = quantization if isinstance(quantization, dict) else {}
        yield _made_of(str(entry["name"]), stored, {**named, "weight_block_size": entry["block"]}, transposed)


def _made_of(name: str, stored: dict[str, StoredTensor], quantization: Any, transposed: bool) -> DiskTensor:
    """The one tensor that others stand for.

    Raises:
        ValueError: they stand for another, or for none.
    """
    read = decoded(stored, quantization, transposed)
    if read.problems or read.tensors.keys() != {name}:
        raise ValueError(next(iter(read.problems.values()), f"{name} is not made of {', '.join(stored)}"))
    return read.tensors[name]


def listed_tensors(manifest: dict[str, Any], path: Path) -> dict[str, DiskTensor]:
    """The tensors that a directory's manifest lists, by name.

    Raises:
        ExpertMeshError: it is not built as this version builds it.
    """
    listed = {}
    with well_formed(path / MANIFEST):
        for entry in manifest["tensors"]:
            name, shape, encoding = str(entry["name"]), tuple(entry["shape"]), None
            if not all(type(size) is int and size >= 0 for size in shape) or entry["dtype"] not in DTYPE_NAMES:
                raise ValueError(f"{name} has shape {shape} and dtype {entry['dtype']}")
            if (said := entry.get("encoding")) is not None:
                rows, columns = said["block"]
                if said["codes"] not in CODES or said["scale_dtype"] not in SCALE_DTYPES or min(rows, columns) < 1:
                    raise ValueError(f"{name}: {said} is no encoding")
                encoding = Encoding(said["codes"], (int(rows), int(columns)), said["scale_dtype"])
                if len(shape) != 2 or entry["dtype"] != WIDE or shape[1] % encoding.kind.codes_a_byte:
                    raise ValueError(f"{name} cannot be encoded")
            plain = (StoredTensor(name, shape, entry["dtype"]),)
            file, own = path / str(entry["file"]), plain if encoding is None else _parts(name, shape, encoding)
            parts = tuple(replace(part, file=file) for part in own)
            listed[name] = DiskTensor(name, shape, entry["dtype"], parts=parts, encoding=encoding)
    return listed


_FIELDS = {
    "family": str,
    "source": str,
    "ep_size": int,
    "tensors": list,
    "files": dict,
    "exported": list,
    "carried": list,
    "stored": dict,
}


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of a directory, its own checksum checked.

    Raises:
        ExpertMeshError: it is damaged, or of another format or version.
    """
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ExpertMeshError(
            f"{file}: format {manifest.get('format')!r:.80} version {manifest.get('version')!r:.80} "
            f"is unknown; this release reads {FORMAT!r} version {VERSION}: convert the model again"
        )
    check_seal(manifest, file)
    check_table(manifest, _FIELDS, file)
    return manifest


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).exists() or any(path.glob("ep-*-of-*.safetensors*"))


def open_checkpoint(source: ModelSource, names: Names, strict: bool = True) -> Checkpoint:
    """Open a Hugging Face directory or EP shards, whichever `source.path` is.

    Args:
        names: of the model that it is to fill.

    Raises:
        ExpertMeshError: it is damaged, incomplete, or does not fit the model (see `open_hf` and `open_shards`).
    """
    in_files = names if source.vocab_size is None else names.with_vocabulary(source.text_config_on_disk.vocab_size)
    checkpoint = open_shards(source, in_files) if is_shards(source.path) else open_hf(source, in_files, strict)
    if in_files is not names:
        checkpoint = checkpoint.grown(names)
    return checkpoint if source.rope_scaling is None else checkpoint.stretched(source.rope_scaling)


def open_shards(source: ModelSource, names: Names) -> Checkpoint:
    """Check a directory of EP shards against its manifest and the model, without reading the weights.

    Raises:
        ExpertMeshError: a file is missing, truncated or damaged in its header; or it is another model's.
    """
    if not (source.path / MANIFEST).exists():
        raise ExpertMeshError(
            f"{source.path}: has EP shards but no {MANIFEST}: the conversion did not finish; run it again"
        )
    manifest = read_manifest(source.path)
    tensors, row_sums = [], {}
    headers = _check_files(source.path, manifest["files"])
    listed = listed_tensors(manifest, source.path)
    if len(listed) != len(manifest["tensors"]):
        raise ExpertMeshError(f"{source.path / MANIFEST}: lists a tensor twice")
    with well_formed(source.path / MANIFEST):
        for entry in manifest["tensors"]:
            tensor, header = listed[entry["name"]], headers[entry["file"]]
            placed = tuple(header[part.name] for part in tensor.parts if part == header.get(part.name))
            if len(placed) < len(tensor.parts):
                raise ExpertMeshError(f"{tensor.file}: tensor {tensor.name} does not match {MANIFEST}")
            tensors.append(replace(tensor, parts=placed, regions=(_region_of(entry, tensor, names),)))
            row_sums[tensor.name] = int(entry["row_sum"], 16)
        _check_coverage(source, tensors, names)
        exported = exported_from(manifest["exported"], names)
        form = (source.quantization, names.experts_transposed)
        carried = list(_open_carried(source.path, manifest["carried"], headers, *form))
        every = [tensor.name for tensor in (*exported, *carried)]
        if len(set(every)) < len(every):
            raise ValueError("it lists a tensor of an export twice")
        places = {tensor.name: place for place, tensor in enumerate(exported)}
        for name, entries in manifest["stored"].items():
            stored = [StoredTensor(str(e["name"]), tuple(map(int, e["shape"])), str(e["dtype"])) for e in entries]
            encoded = _made_of(name, {part.name: part for part in stored}, *form)
            if encoded.encoding is None or name not in places:
                raise ValueError(f"it says how {name} is encoded, which no export has encoded")
            exported[places[name]] = replace(encoded, regions=exported[places[name]].regions)
    files = sorted(source.path / file for file in headers)
    path = source.path
    return Checkpoint(path, source, names, tensors, exported, carried=carried, row_sums=row_sums, files=files)


def _region_of(entry: dict[str, Any], tensor: DiskTensor, names: Names) -> Region:
    """What a tensor holds. Of a matrix beside experts' that was written with a release of transformers for which it is
    held the other way round, rows are columns.

    Raises:
        ValueError, LookupError, TypeError: the manifest is not as this version writes it.
    """
    parameter, rows = str(entry["parameter"]), range(*entry["rows"])
    is_transposed = entry.get("transposed")
    if not isinstance(is_transposed, bool):
        raise ValueError(f"{entry['name']}: transposed is {is_transposed!r:.80}, not true or false")
    if is_transposed == (parameter in names.transposed):
        return Region(parameter, rows)
    if parameter in names.experts or len(tensor.shape) != 2 or rows != range(tensor.shape[0]):
        raise ValueError(f"{tensor.name} is not a matrix, so it cannot be transposed")
    return Region(parameter, range(tensor.shape[1]), transposed=True)


def _check_files(path: Path, files: dict[str, Any]) -> dict[str, dict[str, StoredTensor]]:
    """The header of each safetensors file that the manifest lists, all listed files being there and complete."""
    headers = {}
    for name, entry in files.items():
        file = named_file(path, name, MANIFEST, depth=2)
        check_table(entry, {"bytes": int, "xxh3_128": str}, path / MANIFEST)
        if file.stat().st_size != entry["bytes"]:
            raise ExpertMeshError(f"{file}: has {file.stat().st_size} bytes; {MANIFEST} says {entry['bytes']}")
        of_header = entry.get("header_xxh3_128")
        sums = (file_checksum(file), entry["xxh3_128"]) if of_header is None else (_header_checksum(file), of_header)
        if sums[0] != sums[1]:
            raise ExpertMeshError(f"{file}: is damaged: its checksum is not the one in {MANIFEST}")
        if of_header is not None:
            headers[name] = read_header(file)
    return headers


def check_all_bytes(path: Path) -> None:
    """Verify every byte of EP shards against the manifest; does nothing for a directory without one.

    Raises:
        ExpertMeshError: a file is damaged; the message names it.
    """
    if not (path / MANIFEST).exists():
        return
    entries = read_manifest(path)["files"]
    files = {name: named_file(path, name, MANIFEST, depth=2) for name in entries}
    with CountedProgress(f"checking {path}", sum(file.stat().st_size for file in files.values())) as progress:
        for name, file in files.items():
            if file_checksum(file, progress.add) != entries[name]["xxh3_128"]:
                raise ExpertMeshError(f"{path / name}: is damaged: its checksum is not the one in {MANIFEST}")


def _header_checksum(file: Path) -> str:
    with open(file, "rb") as stream:
        length = stream.read(8)
        # a damaged length may be anything; the file's own size bounds what is read
        rest = stream.read(min(int.from_bytes(length, "little"), file.stat().st_size))
    return xxhash.xxh3_128(length + rest).hexdigest()


def _check_coverage(source: ModelSource, tensors: list[DiskTensor], names: Names) -> None:
    """Every row of every parameter is there once, with the right row shape."""
    rows: dict[str, list[range]] = {name: [] for name in names.parameters}
    for tensor in tensors:
        (region,) = tensor.regions
        whole = names.parameters.get(region.parameter)
        shape = None if whole is None else (len(region.rows), *whole[1:])
        if shape is not None and region.transposed:
            shape = shape[::-1]
        if tensor.shape != shape or region.rows.step != 1:
            raise ExpertMeshError(
                f"{source.path}: tensor {tensor.name} does not fit the model that config.json describes"
            )
        rows[region.parameter].append(region.rows)
    for name, shape in names.parameters.items():
        missing, repeated = uncovered(rows[name], rows_of(shape))
        if missing is not None:
            raise ExpertMeshError(f"{source.path}: {name} lacks the dim-0 slices from {missing} on")
        if repeated is not None:
            raise ExpertMeshError(f"{source.path}: {name} has dim-0 index {repeated} in two tensors")
        end = max((part.stop for part in rows[name]), default=0)
        if end > rows_of(shape):
            raise ExpertMeshError(
                f"{source.path}: {name} has {end} dim-0 slices; config.json describes a model with {rows_of(shape)}"
            )


def export_table(exported: Iterable[DiskTensor]) -> list[dict[str, Any]]:
    """What a manifest or a marker says of a model's Hugging Face form, for `exported_from`."""
    return [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in exported]


def exported_from(table: Sequence[dict[str, Any]], names: Names) -> list[DiskTensor]:
    """The tensors of this model's Hugging Face form, from a saved list of them.

    Raises:
        ValueError, LookupError, TypeError: the list is of another model, or no such list.
    """
    shapes = {str(entry["name"]): tuple(int(size) for size in entry["shape"]) for entry in table}
    dtypes = {str(entry["name"]): entry["dtype"] for entry in table}
    matched = names.match(shapes)
    if matched.problems or matched.untrained or len(shapes) != len(table):
        raise ValueError("the export that it describes is not of this model")
    if not all(dtype in DTYPE_NAMES for dtype in dtypes.values()):
        raise ValueError("it has a dtype that no export has")
    found = {**matched.tensors, **matched.tied_copies}
    return [DiskTensor(name, shapes[name], dtypes[name], regions) for name, regions in found.items()]
