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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ...moe.util.errors import ExpertMeshError
from ...sharding.topology import rows_of
from ..files.checksums import check_seal, file_checksum, seal
from ..files.codes import CODES, SCALE_DTYPES
from ..files.dtype_names import DTYPE_NAMES
from ..files.encodings import (
    WIDE,
    Encoding,
    Scales,
    StoredForm,
    TensorInfo,
    decoded,
    is_stored,
    stored_forms,
)
from ..files.file_layout import DiskTensor, OutputFile, OutputTensor, Region, plan_files, uncovered
from ..files.paths import named_file
from ..hf.source import Checkpoint, ModelSource, check_fields, open_hf, read_header, read_json, well_formed
from ..hf.untrained_tensors import Carried

if TYPE_CHECKING:
    from ..hf.names import Names

MANIFEST = "manifest.json"
FORMAT = "expertmesh-ep-shards"
VERSION = 4

SCALES = ".scales"
"""What the name of an encoded tensor's scales ends with."""


def shard_files(
    names: Names, dtypes: dict[str, str], encodings: dict[str, Encoding], ep_size: int, max_shard_size: int
) -> list[OutputFile]:
    """The files of a model's EP shards: one per ep rank, and as many dense ones as the size asks for. `encodings` are
    of the parameters that stay encoded."""
    files = []
    for rank in range(ep_size):
        outputs = []
        for name, width in names.experts.items():
            num_rows, *row = names.parameters[name]
            block = num_rows // ep_size
            rows = range(rank * block, (rank + 1) * block)
            first, last = (n // width for n in (rows.start, rows.stop - 1))
            tensor = DiskTensor(f"{name}.{first}-{last}", (len(rows), *row), (Region(name, rows),))
            outputs += _outputs(tensor, dtypes[name], encodings.get(name))
        files.append(OutputFile(f"ep-{rank:05d}-of-{ep_size:05d}.safetensors", outputs))
    dense = []
    for name, shape in names.parameters.items():
        if name not in names.experts:
            tensor = DiskTensor(name, shape, (Region(name, range(rows_of(shape))),))
            dense += _outputs(tensor, dtypes[name], encodings.get(name))
    return files + plan_files(dense, max_shard_size, "dense")


def carried_files(carried: Sequence[Carried], as_stored: bool, max_shard_size: int) -> list[OutputFile]:
    """The files of what is carried over; encoded tensors `as_stored`, or dequantized."""
    outputs = [output for one in carried for output in (one.as_stored() if as_stored else [one.in_hf_form()])]
    return plan_files(outputs, max_shard_size, "carried") if outputs else []


def _outputs(tensor: DiskTensor, dtype: str, encoding: Encoding | None) -> list[OutputTensor]:
    """A tensor's own output; or its codes' and its scales'."""
    if encoding is None:
        return [OutputTensor(tensor, dtype)]
    rows, columns = tensor.shape
    codes = replace(tensor, shape=(rows, columns // encoding.codes_a_byte))
    scales = replace(tensor, name=tensor.name + SCALES, shape=encoding.num_scales((rows, columns)))
    return [
        OutputTensor(codes, encoding.stored_dtype, encoding, "codes"),
        OutputTensor(scales, encoding.scale_dtype, encoding, "scales"),
    ]


@dataclass(frozen=True)
class FileSum:
    """Checksums of a file: of all of it, and of a safetensors file's header."""

    num_bytes: int
    checksum: str
    header_checksum: str | None


def make_manifest(
    source: ModelSource,
    names: Names,
    ep_size: int,
    files: Sequence[OutputFile],
    file_sums: dict[str, FileSum],
    row_sums: dict[str, int],
    exported: Iterable[OutputTensor],
    carried: Sequence[Carried],
    origin: str,
    forms: Mapping[str, StoredForm],
) -> dict[str, Any]:
    """The content of manifest.json; `exported` is what a Hugging Face directory of this model holds, beside what is
    `carried`, and `forms` how some of it is stored there."""
    tensors = []
    for file in files:
        for output in file.tensors:
            if output.part == "scales" or output.content is not None:
                continue
            (region,) = output.tensor.regions
            width = names.experts.get(region.parameter)
            tensors.append(
                {
                    "name": output.tensor.name,
                    "parameter": region.parameter,
                    "rows": [region.rows.start, region.rows.stop],
                    "experts": [region.rows.start // width, region.rows.stop // width] if width else None,
                    "transposed": region.parameter in names.transposed,
                    "shape": list(_wide_shape(output)),
                    "dtype": output.dtype if output.encoding is None else WIDE,
                    "encoding": _encoding_entry(output.encoding),
                    "file": file.name,
                    "row_sum": f"{row_sums[output.tensor.name]:016x}",
                }
            )
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "family": source.model_type,
            "source": origin,
            "ep_size": ep_size,
            "tensors": tensors,
            "files": {
                name: {"bytes": s.num_bytes, "xxh3_128": s.checksum, "header_xxh3_128": s.header_checksum}
                for name, s in sorted(file_sums.items())
            },
            "exported": export_table(exported),
            "carried": list(_carried_entries(carried, files, row_sums)),
            "stored": {name: list(_part_entries(form)) for name, form in forms.items()},
        }
    )


def _part_entries(form: StoredForm) -> Iterator[dict[str, Any]]:
    for name, info in form.parts.items():
        yield {"name": name, "dtype": info.dtype, "shape": list(info.shape)}


def _open_forms(table: dict[str, Any], quantization: Any, transposed: bool) -> dict[str, StoredForm]:
    """
    Raises:
        ValueError, LookupError, TypeError: the manifest is not as this version writes it.
    """
    forms: dict[str, StoredForm] = {}
    for name, entries in table.items():
        shapes = {str(entry["name"]): tuple(int(size) for size in entry["shape"]) for entry in entries}
        dtypes = {str(entry["name"]): str(entry["dtype"]) for entry in entries}
        parts = {part: TensorInfo("", shape, dtypes[part]) for part, shape in shapes.items()}
        read = decoded(parts, quantization, transposed)
        if read.problems or read.infos.keys() != {name} or read.infos[name].encoding is None:
            raise ValueError(next(iter(read.problems.values()), f"{name} is not made of {', '.join(parts)}"))
        forms |= stored_forms(read.infos, parts)
    return forms


def _carried_entries(
    carried: Sequence[Carried], files: Sequence[OutputFile], sums: dict[str, int]
) -> Iterator[dict[str, Any]]:
    file_of = {output.tensor.name: file.name for file in files for output in file.tensors if output.content is not None}
    for one in carried:
        as_stored = all(name in file_of for name in one.stored)  # else dequantized
        names = list(one.stored) if as_stored else [one.name]
        stored = [{"name": name, "file": file_of[name], "sum": f"{sums[name]:016x}"} for name in names]
        block = list(one.info.encoding.block) if as_stored and one.info.encoding is not None else None
        yield {"name": one.name, "block": block, "stored": stored}


def _open_carried(
    path: Path, entries: list[Any], headers: dict[str, dict[str, TensorInfo]], quantization: Any, transposed: bool
) -> Iterator[Carried]:
    """
    Raises:
        ExpertMeshError: a tensor is not as the manifest has it.
        ValueError, LookupError, TypeError: the manifest is not as this version writes it.
    """
    for entry in entries:
        name, files = str(entry["name"]), {str(part["name"]): str(part["file"]) for part in entry["stored"]}
        missing = next((part for part, file in files.items() if part not in headers[file]), None)
        if missing is not None:
            raise ExpertMeshError(f"{path / files[missing]}: tensor {missing} is not as {MANIFEST} has it")
        stored = {part: headers[file][part] for part, file in files.items()}
        named = quantization if isinstance(quantization, dict) else {}
        read = decoded(stored, {**named, "weight_block_size": entry["block"]}, transposed)
        if read.problems or read.infos.keys() != {name}:
            raise ValueError(next(iter(read.problems.values()), f"{name} is not made of {', '.join(stored)}"))
        sums = {str(part["name"]): int(part["sum"], 16) for part in entry["stored"]}
        yield Carried(name, read.infos[name], stored, path, sums)


def _wide_shape(output: OutputTensor) -> tuple[int, ...]:
    """The shape of the values that a tensor holds, or that its codes stand for."""
    if output.encoding is None:
        return output.tensor.shape
    rows, columns = output.tensor.shape
    return rows, columns * output.encoding.codes_a_byte


def _encoding_entry(encoding: Encoding | None) -> dict[str, Any] | None:
    if encoding is None:
        return None
    return {"codes": encoding.codes, "block": list(encoding.block), "scale_dtype": encoding.scale_dtype}


def _encoding_of(entry: dict[str, Any]) -> Encoding | None:
    """
    Raises:
        ValueError, LookupError, TypeError: it is none.
    """
    encoding = entry.get("encoding")
    if encoding is None:
        return None
    rows, columns = encoding["block"]
    if encoding["codes"] not in CODES or encoding["scale_dtype"] not in SCALE_DTYPES or min(rows, columns) < 1:
        raise ValueError(f"{entry['name']}: {encoding} is no encoding")
    return Encoding(encoding["codes"], (int(rows), int(columns)), encoding["scale_dtype"])


def listed_tensors(manifest: dict[str, Any], path: Path) -> dict[str, TensorInfo]:
    """The tensors that a directory's manifest lists, by name.

    Raises:
        ExpertMeshError: it is not built as this version builds it.
    """
    listed = {}
    with well_formed(path / MANIFEST):
        for entry in manifest["tensors"]:
            shape = tuple(entry["shape"])
            if not all(type(size) is int and size >= 0 for size in shape) or entry["dtype"] not in DTYPE_NAMES:
                raise ValueError(f"{entry['name']} has shape {shape} and dtype {entry['dtype']}")
            info = TensorInfo(str(entry["file"]), shape, entry["dtype"], encoding=_encoding_of(entry))
            listed[str(entry["name"])] = info
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
            f"{file}: format {manifest.get('format')!r:.80} version {manifest.get('version')!r:.80} is unknown; "
            f"this version reads {FORMAT!r} version {VERSION}: convert the model again"
        )
    check_seal(manifest, file)
    check_fields(manifest, _FIELDS, file)
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
    checkpoint = open_shards(source, names) if is_shards(source.path) else open_hf(source, names, strict)
    return checkpoint if source.rope_scaling is None else checkpoint.stretched(source.rope_scaling, names)


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
    tensors, infos, row_sums = [], {}, {}
    headers = _check_files(source.path, manifest["files"])
    listed = listed_tensors(manifest, source.path)
    if len(listed) != len(manifest["tensors"]):
        raise ExpertMeshError(f"{source.path / MANIFEST}: lists a tensor twice")
    with well_formed(source.path / MANIFEST):
        for entry in manifest["tensors"]:
            name, file = entry["name"], entry["file"]
            info = _placed(name, listed[name], headers[file])
            if info is None:
                raise ExpertMeshError(f"{source.path / file}: tensor {name} is not as {MANIFEST} has it")
            tensors.append(DiskTensor(name, info.shape, (_region_of(entry, info, names),)))
            infos[name] = info
            row_sums[name] = int(entry["row_sum"], 16)
        _check_coverage(source, tensors, names)
        exported = exported_from(manifest["exported"], names)
        form = (source.quantization, names.experts_transposed)
        carried = list(_open_carried(source.path, manifest["carried"], headers, *form))
        every = [output.tensor.name for output in exported] + [tensor.name for tensor in carried]
        if len(set(every)) < len(every):
            raise ValueError("it lists a tensor of an export twice")
        forms = _open_forms(manifest["stored"], *form)
        if not forms.keys() <= {output.tensor.name for output in exported}:
            raise ValueError("it describes a tensor that no export has")
    files = sorted(source.path / file for file in headers)
    return Checkpoint(source, tensors, [], infos, exported, carried, row_sums=row_sums, files=files, stored_forms=forms)


def _region_of(entry: dict[str, Any], info: TensorInfo, names: Names) -> Region:
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
    if parameter in names.experts or len(info.shape) != 2 or rows != range(info.shape[0]):
        raise ValueError(f"{entry['name']} is no matrix that could be transposed")
    return Region(parameter, range(info.shape[1]), transposed=True)


def _placed(name: str, info: TensorInfo, header: dict[str, TensorInfo]) -> TensorInfo | None:
    """A listed tensor with its place in the file; None if the file's header has none like it."""
    codes, scales = header.get(name), header.get(name + SCALES)
    if info.encoding is None:
        return codes if codes == info else None
    if info.dtype != WIDE or not is_stored(info, codes, scales):
        return None
    assert codes is not None
    assert scales is not None
    return replace(info, offset=codes.offset, scales=Scales(name + SCALES, scales.file, name, scales.offset))


def _check_files(path: Path, files: dict[str, Any]) -> dict[str, dict[str, TensorInfo]]:
    """The header of each safetensors file that the manifest lists, all listed files being there and complete."""
    headers = {}
    for name, entry in files.items():
        file = named_file(path, name, MANIFEST, depth=2)
        check_fields(entry, {"bytes": int, "xxh3_128": str}, path / MANIFEST)
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
    for name, entry in read_manifest(path)["files"].items():
        if file_checksum(named_file(path, name, MANIFEST, depth=2)) != entry["xxh3_128"]:
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
            raise ExpertMeshError(f"{source.path}: {name} is missing from dim-0 index {missing} on")
        if repeated is not None:
            raise ExpertMeshError(f"{source.path}: {name} has dim-0 index {repeated} in two tensors")
        end = max((part.stop for part in rows[name]), default=0)
        if end > rows_of(shape):
            raise ExpertMeshError(
                f"{source.path}: {name} has {end} dim-0 slices, where the model that config.json describes has "
                f"{rows_of(shape)}"
            )


def export_table(exported: Iterable[OutputTensor]) -> list[dict[str, Any]]:
    """What a manifest or a marker says of a model's Hugging Face form, for `exported_from`."""
    return [{"name": o.tensor.name, "dtype": o.dtype, "shape": list(o.tensor.shape)} for o in exported]


def exported_from(table: Sequence[dict[str, Any]], names: Names) -> list[OutputTensor]:
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
    return [OutputTensor(tensor, dtypes[tensor.name]) for tensor in matched.tensors + matched.tied_copies]
