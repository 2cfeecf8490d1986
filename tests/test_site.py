"""The site of docs/: every page is in a section, what is broken fails the build, and nothing comes from a network."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BROKEN = {
    "how-to/wrong.md": "[a](nowhere.md) [b](../reference/flags.md#no-heading) [c](../../README.md) [d](#none)\n",
    "beside.md": "In no section.\n",
}
"""Pages, and below what the build says of them."""
SAID = ("nowhere.md", "#no-heading", "../../README.md", "#none", "beside.md")


def navigation(docs: Path) -> list[Any]:
    """By the file that .mkdocs.yml calls."""
    spec = spec_from_file_location("site_nav", ROOT / ".ci" / "site_nav.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    entries: list[Any] = module.navigation(docs)
    return entries


def build(root: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_sections_are_the_folders_in_the_indexs_order(tmp_path: Path) -> None:
    for page in ("index.md", "tutorial.md", "glossary.md", "how-to/b.md", "how-to/a.md", "explanation/c.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).touch()
    (tmp_path / "index.md").write_text("[last](how-to/b.md), [first](how-to/a.md#b)")
    assert navigation(tmp_path) == [
        {"Start": "index.md"},
        {"Tutorial": "tutorial.md"},
        {"How-to": ["how-to/b.md", "how-to/a.md"]},
        {"Explanation": ["explanation/c.md"]},
        {"Glossary": "glossary.md"},
    ]


def test_every_page_is_in_a_section() -> None:
    named = re.findall(r"'([^']+\.md)'", str(navigation(ROOT / "docs")))
    assert set(named) == {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}


@pytest.mark.slow
def test_a_broken_page_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    for name in (".ci", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".mkdocs.yml", tmp_path)
    assert build(tmp_path)[0] == 0
    pages = list((tmp_path / "build" / "site").rglob("*.html"))
    loaded = [re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(?:https?:)?//', page.read_text()) for page in pages]
    assert pages
    assert not any(loaded), "what a page loads comes with the site"
    for name, text in BROKEN.items():
        (tmp_path / "docs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    code, said = build(tmp_path)
    assert code == 1
    assert all(word in said for word in SAID), said


def test_the_first_page_leads_to_every_other() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text(encoding="utf-8")))
    assert linked == {str(file.relative_to(docs)) for file in docs.rglob("*.md")} - {"index.md"}
