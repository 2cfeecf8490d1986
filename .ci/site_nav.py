"""The navigation of the site, by the folders of docs/; .mkdocs.yml calls it."""

from pathlib import Path
from typing import Any

SECTIONS = {"How-to": "how-to", "Reference": "reference", "Explanation": "explanation"}


def on_config(config: Any) -> Any:
    config["nav"] = navigation(Path(config["docs_dir"]))
    return config


def navigation(docs: Path) -> list[dict[str, Any]]:
    """mkdocs' `nav`. A page beside these, or in another folder, is in no section, and the strict build fails."""
    entries: list[dict[str, Any]] = [{"Start": "index.md"}, {"Tutorial": "tutorial.md"}]
    entries += [{name: pages(docs, folder)} for name, folder in SECTIONS.items()]
    entries += [{"Glossary": "glossary.md"}]
    return [entry for entry in entries if exists(docs, entry)]


def pages(docs: Path, folder: str) -> list[str]:
    return sorted(str(file.relative_to(docs)) for file in (docs / folder).glob("*.md"))


def exists(docs: Path, entry: dict[str, Any]) -> bool:
    """Whether a page is there, or a section has any."""
    (what,) = entry.values()
    return bool(what) if isinstance(what, list) else (docs / what).exists()
