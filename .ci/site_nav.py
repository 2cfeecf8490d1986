"""The navigation of the site, which .mkdocs.yml calls: the tutorial, a section per folder of docs/, the glossary."""

from pathlib import Path
from typing import Any

SECTIONS = {"How-to": "how-to", "Reference": "reference", "Explanation": "explanation"}


def on_config(config: Any) -> Any:
    config["nav"] = navigation(Path(config["docs_dir"]))
    return config


def navigation(docs: Path) -> list[Any]:
    """mkdocs' `nav`. A page beside these, or in another folder, is in no section, and the strict build fails."""
    sections = [{name: pages(docs, folder)} for name, folder in SECTIONS.items()]
    entries: list[Any] = ["index.md", {"Tutorial": "tutorial.md"}, *sections, {"Glossary": "glossary.md"}]
    return [entry for entry in entries if exists(docs, entry)]


def pages(docs: Path, folder: str) -> list[str]:
    return sorted(str(file.relative_to(docs)) for file in (docs / folder).glob("*.md"))


def exists(docs: Path, entry: Any) -> bool:
    """Whether a page is there, or a section has any."""
    (what,) = entry.values() if isinstance(entry, dict) else (entry,)
    return bool(what) if isinstance(what, list) else (docs / what).exists()
