"""Command lines of tests."""

import re
from collections.abc import Sequence


def last_of_each(argv: Sequence[str]) -> list[str]:
    """Of flags that are given twice, which commands refuse, the last: a test's own stand behind those of all tests."""
    groups: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if flag := re.fullmatch(r"--(?:no[-_])?(\w[\w-]*)(=.*)?", word, re.DOTALL):
            groups.pop(name := flag[1].replace("_", "-"), None)
        groups.setdefault(name, []).append(word)
    return [word for words in groups.values() for word in words]
