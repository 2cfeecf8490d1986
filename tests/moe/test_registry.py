"""Entries that user code may add."""

from dataclasses import dataclass

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.registry import Registry


@dataclass(frozen=True)
class Fruit:
    name: str
    help: str
    seeds: int


def fruits() -> Registry[Fruit]:
    registry: Registry[Fruit] = Registry("--fruit", beside=("auto",))
    registry.register(Fruit("pear", "as in belle helene", 8))
    registry.register(Fruit("apple", "as in pie", 5))
    return registry


def test_entries_come_as_they_were_registered() -> None:
    registry = fruits()
    assert registry.names() == ("pear", "apple")
    assert [fruit.seeds for fruit in registry.entries()] == [8, 5]
    assert registry.get("apple").help == "as in pie"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ExpertMeshError, match="--fruit plum is unknown; use auto, pear, apple"):
        fruits().get("plum")


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        (Fruit("pear", "another", 0), "--fruit pear is already registered"),
        (Fruit("auto", "another", 0), "--fruit auto is already registered"),
        (Fruit("two words", "no value of a flag", 0), "--fruit 'two words': a name may have letters"),
        (Fruit("--pear", "no value of a flag", 0), "--fruit '--pear': a name may have letters"),
        (Fruit("plum", "", 1), "--fruit plum: has no help"),
    ],
)
def test_an_entry_is_refused_by_name(entry: Fruit, wrong: str) -> None:
    registry = fruits()
    with pytest.raises(ValueError, match=wrong):
        registry.register(entry)
    assert registry.names() == ("pear", "apple")


def test_what_a_test_registers_is_forgotten() -> None:
    registry = fruits()
    with registry.restored():
        registry.register(Fruit("plum", "as in jam", 1))
        assert registry.get("plum").seeds == 1
    assert registry.names() == ("pear", "apple")


def test_entries_from_outside_are_told_from_ours() -> None:
    registry = Registry("--fruit", ("auto",), (Fruit("pear", "as in belle helene", 8),))
    assert registry.choices() == ("auto", "pear")
    assert not registry.has_entries_from_outside()
    with registry.restored():
        registry.register(Fruit("apple", "as in pie", 5))
        assert registry.has_entries_from_outside()
    assert not registry.has_entries_from_outside()
