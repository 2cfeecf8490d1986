"""Sizes in bytes as people write them."""

import re

from moe.errors import ExpertMeshError


def parse_size(flag: str, text: str) -> int:
    """Bytes written like 5GB or 500MB; as in transformers, 1 GB is 10^9 bytes.

    Raises:
        ExpertMeshError: it is no size above 0; `flag` names it.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ExpertMeshError(f"{flag} {text}: write it like 5GB or 500MB")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2].upper()]
