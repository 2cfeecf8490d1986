"""The navigation of the site: the folders of docs/, each in the order in which index.md names its pages; .mkdocs.yml
calls it."""

import re
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
    """A folder's pages: those of the index first."""
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text(encoding="utf-8"))
    found = sorted(str(file.relative_to(docs)) for file in (docs / folder).glob("*.md"))
    return sorted(found, key=lambda page: linked.index(page) if page in linked else len(linked))


def exists(docs: Path, entry: dict[str, Any]) -> bool:
    """Whether a page is there, or a section has any."""
    (what,) = entry.values()
    return bool(what) if isinstance(what, list) else (docs / what).exists()
