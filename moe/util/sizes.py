"""Sizes in bytes, large numbers and durations as people write them."""

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


def thousands(value: float) -> str:
    """Three digits of a large number, such as 950, 6.34k, 181k or 1.25M."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def duration(seconds: float) -> str:
    """As 1:02:03, or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
