"""What a flag's value can name, as entries that a user's own code may add to.

An entry says all of one thing, and names what does it: an object, or, of this project, text as in
"moe.kernels.loop:LOOP" (see `loaded`), so that flags are read without importing torch.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from .entry_checks import check_fields
from .errors import ExpertMeshError


class Entry(Protocol):
    """A frozen dataclass that says all of one thing; none of its fields has a default."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The flag's value that names it."""


E = TypeVar("E", bound=Entry)
T = TypeVar("T")


def loaded(named: str | T) -> T:
    """What an entry names: an object, or "module:attribute" within this project, whose module is imported now."""
    if not isinstance(named, str):
        return named
    module, _, attribute = named.partition(":")
    found: T = getattr(import_module(f"...{module}", __package__), attribute)
    return found


class Registry(Generic[E]):
    """Entries by their names, in the order in which they were registered.

    Args:
        flag: whose values they are, as in `--optim`.
        beside: its values that are no entries, such as auto.
        ours: the entries of this project.
    """

    def __init__(self, flag: str, beside: Sequence[str] = (), ours: Sequence[E] = ()):
        self.flag = flag
        self.beside = tuple(beside)
        self._entries: dict[str, E] = {}
        for entry in ours:
            self.register(entry)
        self._ours = frozenset(self._entries)

    def register(self, entry: E) -> None:
        """Add an entry.

        Raises:
            ValueError: its name is taken or cannot be given as a flag's value, one of its texts is empty, or a field is
                not of its type.
        """
        check_fields(f"{self.flag} {entry.name}", entry)
        if entry.name in self.choices():
            raise ValueError(f"{self.flag} {entry.name} is already registered; choose another name")
        if not re.fullmatch(r"\w[\w.-]*", entry.name):
            raise ValueError(
                f"{self.flag} {entry.name!r}: a name may have letters, digits, dots, dashes and underscores"
            )
        for field in fields(entry):
            if getattr(entry, field.name) == "":
                raise ValueError(f"{self.flag} {entry.name}: has no {field.name}")
        self._entries[entry.name] = entry

    def check_other_names(self, entry: E, others: Callable[[E], Sequence[str]]) -> None:
        """Check that no entry goes by a name that this one goes by.

        Args:
            others: the names of an entry beside its own.

        Raises:
            ValueError: one does.
        """
        for known in self.entries():
            names = (known.name, *others(known))
            if entry.name in others(known) or {*others(entry)} & {*names}:
                raise ValueError(
                    f"{self.flag} {entry.name}: {known.name} already has one of its names: {', '.join(names)}"
                )

    def get(self, name: str) -> E:
        """The entry of a name.

        Raises:
            ExpertMeshError: there is none.
        """
        if name not in self._entries:
            raise ExpertMeshError(f"{self.flag} {name} is unknown; use {', '.join(self.choices())}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def choices(self) -> tuple[str, ...]:
        """All values of the flag."""
        return (*self.beside, *self._entries)

    def entries(self) -> tuple[E, ...]:
        return tuple(self._entries.values())

    def has_entries_from_outside(self) -> bool:
        """Whether one is registered that is not of this project, whose text no digest of our sources includes."""
        return not self._ours.issuperset(self._entries)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """For tests: what is registered within is forgotten afterwards."""
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before
