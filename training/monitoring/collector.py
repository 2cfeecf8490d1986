"""Python's collector of cyclic garbage, on all ranks at the same steps.

By itself it runs whenever a process has made so many objects. A run of it over all that transformers, torch and the
model are made of stops a rank for longer than a kernel takes, each rank at another time; and all others wait for it in
the next collective. A step leaves few objects for it, and no large tensors: those are freed without it.
"""

import gc
from types import TracebackType

EVERY = 50
"""Steps from one collection to the next."""


class SteadyCollector:
    """Inside, the collector runs only when told; around it, as before, also after an error."""

    def __enter__(self) -> "SteadyCollector":
        self._was_on = gc.isenabled()
        self._freezes = gc.get_freeze_count() == 0  # else somebody has, and would not have it undone
        gc.disable()
        gc.collect()
        if self._freezes:
            # what is there by now stays: a collection then only looks at what has come since
            gc.freeze()
        return self

    def step(self, done: int) -> None:
        """To be told after each step how many there have been. Old objects are looked through too: some may have become
        garbage since they grew old."""
        if done % EVERY == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
