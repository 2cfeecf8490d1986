"""What happens to a run when something that only tells of it fails, such as a report, a tracker or a line: nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .errors import ExpertMeshError


class EndsRun(ExpertMeshError):
    """An error that ends a run wherever it is met, within `telling` too."""


@contextmanager
def telling(what: str = "", say: Callable[[str], object] | None = None) -> Iterator[list[str]]:
    """Catch what goes wrong inside: what only tells of a run never ends it, whatever it raises.

    It is for the work of one rank alone. Where others are in a collective with it, it would leave them waiting.

    Args:
        what: has come of it, in words, such as "report.html was not written".
        say: takes the warning, one line.

    Yields:
        A list that is empty unless something went wrong, of which it then has the words.

    Raises:
        EndsRun: met inside.
    """
    words: list[str] = []
    try:
        yield words
    except EndsRun:
        raise
    except Exception as error:
        # others' errors may say as little as the name of a key
        kind = "" if isinstance(error, ExpertMeshError | OSError) and str(error) else f"{type(error).__name__}: "
        words.append(" ".join(f"{kind}{error}".split()))
        if say is not None:
            with suppress(Exception):  # where a warning cannot be printed, nobody reads it
                say(f"warning: {what}: {words[0]}")
