"""A digest of our own code, for what depends on it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def sources_digest(folders: Iterable[str]) -> str:
    """SHA-256 of all Python files in these folders of the project, in hex."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted((_ROOT / folder).rglob("*.py"))
        assert files, f"no source in {_ROOT / folder}"
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()
