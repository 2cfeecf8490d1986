"""How far a plan or a dry run is, on a terminal."""

import sys

from ...moe.util.progress import ProgressLine


class DryRuns(ProgressLine):
    """What is being done, and how many dry runs are done and under way: from the first one on, as each may take
    seconds; of what is no terminal nothing."""

    def __init__(self) -> None:
        super().__init__(sys.stderr.isatty())
        self._finished = 0

    def __call__(self, what: str, done: int, number: int) -> None:
        """
        Args:
            what: is done. done: how many are, of this number.
        """
        if self.is_shown:
            how_far = f": {self._finished + done} done, {number - done} under way" if number else ""
            self.say(f"{what}{how_far}")
        if done == number:
            self._finished += number
