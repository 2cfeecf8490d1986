"""What a model's files are, in facts that can be compared with those of another node, or of the run that began.

Cheap for a model of any size: of each file its size, the digest of its header, and that of samples of its content.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from .ep_shards.manifest import MANIFEST, is_shards
from .hf.headers import weight_files
from .hf.json_files import read_json
from .hf.side_files import CONFIG

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MOST_HEADER_BYTES = 100 * 2**20
"""Largest header of a safetensors file, as in its library."""
_THREADS = 16
"""Threads that read at once: on a network file system each sample is a round trip."""
_SAYS_NOTHING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Keys of config.json, also of those within it, that change nothing here."""
_OF_PEFT = {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
"""Those of adapter_config.json."""


def model_facts(path: Path) -> dict[str, str]:
    """What a model directory of any form is made of, by name: each entry of config.json, and each file of weights.

    Raises:
        ExpertMeshError: config.json or a table of files cannot be read.
    """
    facts = {f"{CONFIG}: {name}:": value for name, value in flat(read_json(path / CONFIG)).items()}
    # of EP shards the manifest has checksums, and is compared with them
    files = sorted(path.glob("*.safetensors")) + [path / MANIFEST] if is_shards(path) else weight_files(path)
    return facts | file_facts(files)


def adapter_facts(path: Path) -> dict[str, str]:
    """The same of a directory with an adapter; none where it has no files of one.

    Raises:
        ExpertMeshError: adapter_config.json cannot be read.
    """
    config, weights = path / "adapter_config.json", sorted(path.glob("adapter_model*.safetensors"))
    said = flat(read_json(config)) if config.exists() else {}
    facts = {f"{config.name}: {name}:": value for name, value in said.items() if name not in _OF_PEFT}
    return facts | file_facts(weights)


def explain_model(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What two differing sets of a model's facts have in common, in words; empty where that is nothing."""
    configs = [{name: value for name, value in facts.items() if name.startswith(CONFIG)} for facts in (one, other)]
    if configs[0] == configs[1] and one.keys() & other.keys() == configs[0].keys():
        return f"the same {CONFIG}, and files of other names, which may contain the same weights in another form"
    return ""


def file_facts(files: list[Path]) -> dict[str, str]:
    """Size, header and samples of the content of safetensors or other files, by name.

    A model fine-tuned from another has the same headers; but each tensor's first bytes, and 64 samples over the file,
    agree nowhere that is worth its name.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip([f"{file.name}:" for file in files], pool.map(_describe, files), strict=True))


def _describe(file: Path) -> str:
    try:
        with open(file, "rb", buffering=0) as stream:
            descriptor, size = stream.fileno(), os.fstat(stream.fileno()).st_size
            length = min(int.from_bytes(os.pread(descriptor, 8, 0), "little"), size, _MOST_HEADER_BYTES)
            header = os.pread(descriptor, length, 8)
            content = xxhash.xxh3_64()
            for offset in _offsets(header, size):
                content.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{size:,} bytes, header {xxhash.xxh32_hexdigest(header)}, samples {content.hexdigest()}"


def _offsets(header: bytes, size: int) -> list[int]:
    """Where samples are taken: evenly over the content, and at the beginning of each tensor."""
    begin = min(8 + len(header), size)
    offsets = {begin + (size - begin) * number // _SAMPLES for number in range(_SAMPLES)}
    with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):  # the loader tells what is wrong
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        offsets |= {min(begin + int(entry["data_offsets"][0]), size) for entry in tensors}
    return sorted(offsets)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Entries of nested tables by dotted names, as JSON."""
    found: dict[str, str] = {}
    for name, value in sorted(config.items()):
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif name not in _SAYS_NOTHING:
            found[prefix + name] = json.dumps(value, sort_keys=True)
    return found
