"""Sizes in bytes as people write them."""

import re

from .errors import ExpertMeshError


def parse_size(flag: str, text: str) -> int:
    """Bytes written like 5GB, 500MB or 80GiB; as in transformers, 1 GB is 10^9 bytes, and 1 GiB is 2^30.

    Raises:
        ExpertMeshError: it is no size above 0; `flag` names it.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([KMG])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ExpertMeshError(f"{flag} {text}: write it like 5GB or 500MB")
    step = 2**10 if match[3] else 10**3
    return int(match[1]) * step ** " KMG".index((match[2] or " ").upper())
