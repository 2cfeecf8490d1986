"""Model cards: README.md beside a model or an adapter, with the YAML header that the hub, llama.cpp and others read."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..moe.util.atomic_write import whole
from ..moe.util.telling import telling

CARD = "README.md"
_OWN = "<!-- Written by expertmesh. Complete it, then remove this comment: later exports keep a card without it. -->"
_LICENCE = ("license", "license_name", "license_link")
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Training:
    """What a card says of how weights were made.

    Attributes:
        base: the model's name on the hub or, of a directory, the last part of its path; `is_on_hub` says which.
        tags: of the hub. datasets: names on the hub.
        rows: of a table: what, and how.
        code: that repeats it, of `language`.
        versions: of what it was made with.
        how: they were made of the base's, in a word.
    """

    base: str
    is_on_hub: bool
    tags: Sequence[str] = ()
    datasets: Sequence[str] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    language: str = "sh"
    versions: Mapping[str, str] = field(default_factory=dict)
    how: str = "fine-tuned"


def model_card(training: Training, base: Path, is_adapter: bool) -> str:
    """The card of a trained model or adapter.

    Args:
        base: directory of the model that it was trained from, whose card may name a licence.
    """
    import yaml

    tags = {"expertmesh", *training.tags}
    if is_adapter:
        # as PEFT's own
        tags |= {"lora", "transformers", *([f"base_model:adapter:{training.base}"] if training.is_on_hub else [])}
    name = f"{training.base.rpartition('/')[2]}-{training.how.replace('-', '')}"
    header = {
        **({"base_model": training.base} if training.is_on_hub else {}),
        **({"datasets": list(training.datasets)} if training.datasets else {}),
        "library_name": "peft" if is_adapter else "transformers",
        **_licence(base),
        "model_name": name,
        "pipeline_tag": _pipeline_tag(base),
        "tags": sorted(tags),
    }
    named = f"[{training.base}](https://huggingface.co/{training.base})" if training.is_on_hub else training.base
    return "\n".join(
        [
            *("---", yaml.safe_dump(header, allow_unicode=True) + "---", "", _OWN, "", f"# {name}", ""),
            *(f"{training.how.capitalize()} from {named} with expertmesh.", "", "| | |", "| --- | --- |"),
            *(f"| {name} | {_cell(value)} |" for name, value in training.rows.items()),
            *(("", f"```{training.language}", training.code, "```") if training.code else ()),
            *("", "Made with:", ""),
            *(f"- {name} {version}" for name, version in training.versions.items()),
            "",
        ]
    )


def _pipeline_tag(base: Path) -> str:
    """What the hub is to take a model for: one of text or, by the class in its base's config.json, of images too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    made: Any = []
    with suppress(OSError, ValueError, RecursionError, AttributeError):  # what is no table has no `get`
        made = json.loads((base / "config.json").read_text(encoding="utf-8")).get("architectures")
    sees = isinstance(made, list) and not set(map(str, made)).isdisjoint(
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    )
    return "image-text-to-text" if sees else "text-generation"


def read_card(directory: Path) -> str:
    """The card in a directory; empty where there is none that can be read."""
    return (directory / CARD).read_text(encoding="utf-8-sig") if _header(directory / CARD) else ""


def merged_card(adapter: Path) -> str:
    """The card of a model with an adapter merged into its weights, from the adapter's; empty where that has none that
    can be read."""
    from huggingface_hub import ModelCard

    with telling():
        if text := read_card(adapter):
            card: Any = ModelCard(text, ignore_metadata_errors=True)
            card.data.library_name = "transformers"
            of_adapters = ("lora", "base_model:adapter:")
            card.data.tags = [tag for tag in card.data.tags or [] if not str(tag).startswith(of_adapters)]
            return str(card)
    return ""


def write_card(text: str, directory: Path, out: Path) -> list[str]:
    """Write a card into `directory`, which is to take the place of `out`; where that has one that is not ours, this is
    kept.

    Returns:
        A line that says so, or that it could not be written.

    Raises:
        OSError: one that is not ours cannot be kept.
    """
    if is_kept(out):
        if directory != out:
            shutil.copyfile(out / CARD, directory / CARD)
        return [f"{out / CARD}: kept as it was"]
    lines: list[str] = []
    if text:
        with telling(f"{out / CARD} was not written", lines.append), whole(directory / CARD) as partial:
            partial.write_text(text, encoding="utf-8")
    return lines


def is_kept(directory: Path) -> bool:
    """Whether there is a card that was not written here, or was made somebody's own since."""
    file = directory / CARD
    return file.is_file() and _OWN.encode() not in file.read_bytes()


def _cell(value: str) -> str:
    return value.replace("|", r"\|").replace("\n", " ")


def _licence(base: Path) -> dict[str, str]:
    found = _header(base / CARD)
    return {name: said for name in _LICENCE if isinstance(said := found.get(name), str)}


def _header(card: Path) -> dict[str, Any]:
    """The YAML header of a card; empty where there is none that can be read."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        if not card.is_file() or card.stat().st_size > _MOST_BYTES:
            return {}
        return metadata_load(card) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
