"""Parameters and modules chosen by their names."""

import difflib
import re
from collections.abc import Collection, Iterable

from ...moe.util.errors import ExpertMeshError


def select(
    flag: str, pattern: str, names: Iterable[str], what: str, groups: Collection[str], hints: Iterable[str]
) -> set[str]:
    """The names in which a regular expression is found.

    Args:
        flag: that gave the pattern, where it was the name of no group.
        what: the names are of.
        groups: what could have been given instead of a pattern.
        hints: names among which, beside the groups, is looked for one that may have been meant.

    Raises:
        ExpertMeshError: the pattern is no regular expression, or found in no name.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ExpertMeshError(
            f"{flag} {pattern}: neither a group ({', '.join(groups)}) nor a regular expression: {error}"
        ) from error
    found = {name for name in names if compiled.search(name)}
    if not found:
        near = difflib.get_close_matches(pattern, [*groups, *hints], n=3, cutoff=0.4)
        raise ExpertMeshError(
            f"{flag} {pattern}: no {what} matches it; "
            + (f"did you mean {' or '.join(near)}?" if near else f"groups are {', '.join(groups)}")
        )
    return found
