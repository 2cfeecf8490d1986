"""What follows for a number of sequences from fewer and from more, against what is measured of so many."""

from dataclasses import replace
from typing import Any

import pytest

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.measure import Measurer
from expertmesh.training.planning.rehearsal.run_setting import setting_of
from expertmesh.training.planning.rehearsal.seen_spans import SeenSpans, Tape, between, on_line
from tests.families.configs import tiny_config


def measurer_of(family: str) -> tuple[TrainConfig, Measurer]:
    config = TrainConfig(model="-", dataset=["-"], bf16=True)
    return config, Measurer(build_rehearsed(config, tiny_config(family), "cuda"), config)


# the second one has recurrent layers
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "jamba"])
@pytest.mark.parametrize(("checkpointing", "ep_size"), [("none", 1), ("selective", 2)])
def test_what_lies_between_is_as_measured(family: str, checkpointing: Any, ep_size: int) -> None:
    found = []
    for measured in ((2, 16, 4), (4,)):
        config, measurer = measurer_of(family)
        setting = setting_of(config, 8, seq_length=64, checkpointing=checkpointing, ep_size=ep_size)
        for number in measured:
            before = len(measurer.seen)
            model = measurer(replace(setting, micro_batch=number).workload(measurer.parameters))
        found.append((model, len(measurer.seen) - before))
    (told, told_anew), (run, run_anew) = found
    assert told == run
    assert told_anew == 0 < run_anew


def seen(*changes: int, when: str = "attention") -> SeenSpans:
    tape = Tape()
    tape.note(("begin", "start", ""))
    for more in changes:
        tape.note(("change", when), more)
    tape.note(("cut", "start", "", 0), len(changes))
    tape.note(("turn",))
    return tape.seen()


def test_peaks_are_found_anew() -> None:
    # one is of a fixed size, the other grows: with few sequences the one makes the peak, with many the other
    few, many = seen(100, -100, 1, -1), seen(100, -100, 161, -161)
    told = between(few, many, 4, 16)
    assert told is not None
    assert [each.measured().forward[0].peak for each in (few, told, many)] == [100, 100, 161]


def test_nothing_follows_where_what_is_done_differs() -> None:
    assert between(seen(1, 1), seen(1, 1, 1), 1, 2) is None
    assert between(seen(1), seen(3, when="router"), 1, 2) is None
    assert on_line((1, 2), (3, 5), 1, 2) is None
    assert on_line((1, 2), (3, 6), 1, 2) == (2, 4)
