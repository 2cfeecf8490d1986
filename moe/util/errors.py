"""The one exception for mistakes that a user can fix, a bad flag, file or tensor; and warnings of others."""

import sys
import warnings
from collections.abc import Iterable

_NOT_THE_USERS = {__name__.partition(".")[0], "accelerate", "contextlib", "torch", "transformers", "trl"}
"""Packages through which a call of the user's own code comes here."""


class ExpertMeshError(ValueError):
    """Bad input. The message names the flag, file or tensor, what was found, and what would work.

    Example:
        try:
            expertmesh.load("/nowhere")
        except expertmesh.ExpertMeshError as error:
            print(error)
    """


class SeveralMistakes(ExpertMeshError):
    """Mistakes that are told together, each once. problems: in words."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("; ".join(self.problems))


def problems_of(error: ExpertMeshError) -> tuple[str, ...]:
    """The mistakes that an error tells, in words."""
    return error.problems if isinstance(error, SeveralMistakes) else (str(error),)


def as_printed(error: ExpertMeshError) -> str:
    """What a command prints of an error: each mistake in a line of its own."""
    lines = [" ".join(problem.split()) for problem in problems_of(error)]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes:", *lines])


def warn_user(line: str) -> None:
    """Warn at the line of the user's own code that has led here, in a notebook at that of the cell."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(line.removeprefix("warning: "), stacklevel=level)
