"""The user's cache directory, where what was found out once is kept for later processes."""

import os
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The folder for what is of one kind.

    Raises:
        RuntimeError: nothing says where the user's home is.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expertmesh" / kind
