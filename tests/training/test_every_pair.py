"""Settings by twos and threes: each that is given is heeded, told, or refused by a message that names one given."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import flag_of
from expertmesh.training.config.train_config import SETTINGS, GivenSettings, TrainConfig, as_flag, make_parser
from tests.tiers import tiered
from tests.training.other_values import BESIDE, other

DEFAULTS = TrainConfig(model="m", dataset=["d"])
FILE = "run.yaml"
HOSTILE: list[dict[str, Any]] = [
    {}, {"export": False}, {"max_steps": 0}, {"preview": True}, {"prepare_only": True}, {"use_cpu": True},
]  # fmt: skip
"""What leaves out a part of a run."""
NAMES = [name for name in SETTINGS if name != "model"]
PAIRS = list(itertools.combinations(NAMES, 2))


def given(*names: str, **more: Any) -> dict[str, Any]:
    """Another value for each than the default, with what it cannot do without."""
    beside = {key: value for name in names for key, value in BESIDE.get(name, {}).items()}
    return {**beside, **{name: other(SETTINGS[name], DEFAULTS) for name in names}, **more}


def refusal(settings: dict[str, Any]) -> str:
    """What is said of them; empty: nothing."""
    try:
        TrainConfig(**{"model": "m", "dataset": ["d"], **settings})
    except ExpertMeshError as error:
        return str(error)
    return ""


def named(text: str) -> set[str]:
    """The settings whose flags a text has."""
    flags = text.replace("--no-", "--").replace(",", " ").replace(":", " ").split()
    return {name for name in SETTINGS if flag_of(name) in flags}


@pytest.mark.parametrize(
    "hostile", tiered(slow=HOSTILE[:1], release=HOSTILE[1:]), ids=lambda hostile: "".join(hostile) or "none"
)
def test_every_pair(hostile: dict[str, Any]) -> None:
    for pair in PAIRS:
        check_together(given(*pair, **hostile))


def test_some_threes() -> None:
    draw = random.Random(0)
    for _ in range(800):
        check_together(given(*draw.sample(NAMES, 3), **draw.choice(HOSTILE)))


def check_together(settings: dict[str, Any]) -> None:
    if said := refusal(settings):
        assert named(said) & settings.keys(), (settings, said)
        return
    config = TrainConfig(**{"model": "m", "dataset": ["d"], **settings})
    assert {name: getattr(config, name) for name in settings} == settings, "a value given is the one that there is"
    for line in config.without_effect:
        # before what would have to be given
        told = named(line.partition(" ha")[0])
        assert told
        assert told <= settings.keys(), (settings, line)


def in_file_and_flag() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every two that are refused together and by themselves are not, the first of which gives way or stays."""
    for one, two in PAIRS:
        base = {key: value for key, value in given(one, two).items() if key not in (one, two)}
        alone = [{**base, name: other(SETTINGS[name], DEFAULTS)} for name in (one, two)]
        if refusal(alone[0] | alone[1]) and not any(map(refusal, alone)):
            yield {one: alone[0][one], **base}, {two: alone[1][two]}
            yield {two: alone[1][two], **base}, {one: alone[0][one]}


@pytest.mark.slow
def test_a_flag_wins_over_what_it_excludes() -> None:
    """Over a key of the file, whichever of the two excludes the other; not over what says which kind of run it is. Two
    flags, or two keys, are refused."""
    won = kept = 0
    for file, flags in in_file_and_flag():
        (flag,) = flags
        merged = GivenSettings(flags, file, FILE)
        assert GivenSettings(file | flags, {}, FILE).all == GivenSettings({}, file | flags, FILE).all == file | flags
        if said := refusal(merged.all):
            assert "give --" in said or any(SETTINGS[name].metadata.get("is_firm") for name in file), said
            kept += 1
            continue
        gone = file.keys() - merged.all.keys()
        assert merged.all[flag] == flags[flag]
        assert len(merged.overridden) == len(gone)
        for line in merged.overridden:
            assert line.startswith(f"{as_flag(flag, flags[flag])} overrides ")
            assert line.endswith(f" of {FILE}")
            assert line.removeprefix(f"{as_flag(flag, flags[flag])} overrides ").partition(":")[0] in gone
        won += 1
    assert won > 50
    assert kept > 10


def test_flags_that_a_parser_takes_are_all_settings() -> None:
    assert set(make_parser().names.values()) == SETTINGS.keys()


def test_what_is_for_another_device() -> None:
    """In words, with what computes there and without."""
    config = TrainConfig(model="m", offload=True, gradient_checkpointing="full")
    assert config.without_effect_on("cpu") == ["--offload has no effect on a CPU"]
    assert DEFAULTS.without_effect_on("cuda") == DEFAULTS.without_effect_on("cpu") == []
