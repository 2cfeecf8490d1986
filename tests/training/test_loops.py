"""What is told of functions that loop over tokens, against the same functions run at full length."""

from typing import Any

import pytest

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.measured import Measured, MeasuredModel
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.measure import Measurer
from expertmesh.training.planning.rehearsal.rank_summary import parts_of
from expertmesh.training.planning.rehearsal.run_setting import setting_of
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config


def measurer_of(family: str) -> tuple[TrainConfig, Measurer]:
    config = TrainConfig(model="-", dataset=["-"], bf16=True)
    return config, Measurer(build_rehearsed(config, tiny_config(family), "cuda"), config)


def figures(part: Measured) -> dict[str, list[Any]]:
    """Those that must be the same; and `calls`, which must nearly be."""
    spans = [*part.forward, *part.backward]
    kernels = [[*span.kernels] for span in spans]
    return {
        "memory": [part.kept, part.kept_backward, part.carried, *((s.mark, s.peak, s.end) for s in spans)],
        "kernels": [sum(times for *_, times in each) for each in kernels],
        "moved": [sum(moved * times for _, moved, _, times in each) for each in kernels],
        "flops": [sum(flops * times for flops, _, _, times in each) for each in kernels],
        "needed": [span.needed for span in spans],
        "calls": [span.calls for span in spans],
    }


@pytest.mark.release
# lengths that end within a chunk, or a round of the short lengths
@pytest.mark.parametrize(
    ("family", "length", "rows", "checkpointing"), [("qwen3_next", 700, 1, "selective"), ("jamba", 43, 2, "none")]
)
def test_a_loop_is_told_as_it_is(family: str, length: int, rows: int, checkpointing: str) -> None:
    found: list[MeasuredModel] = []
    for is_told in (True, False):
        config, measurer = measurer_of(family)
        changes: dict[str, Any] = dict(seq_length=length, micro_batch=rows, checkpointing=checkpointing, ep_size=2)
        if not is_told:
            measurer.looping = {}
        found.append(measurer(setting_of(config, 8, **changes).workload(measurer.parameters)))
        assert any(measurer.loops.values()) == is_told
    told, run = found
    for a, b in zip((*told.kinds, told.root), (*run.kinds, run.root), strict=True):
        of_told, of_run = figures(a), figures(b)
        assert of_told.pop("calls") == pytest.approx(of_run.pop("calls"), rel=0.01)
        for name, values in of_run.items():
            if name in ("flops", "needed"):
                assert of_told[name] == pytest.approx(values, rel=1e-12)
            else:
                assert of_told[name] == values, name


@pytest.mark.release
@pytest.mark.parametrize(
    ("family", "length", "checkpointing"), [("qwen3_next", 700, "selective"), ("jamba", 43, "none")]
)
def test_a_dry_run_is_told_as_well(family: str, length: int, checkpointing: str) -> None:
    """With the loops that were predicted for the planner a dry run is the one that runs them."""
    flags: dict[str, Any] = dict(max_seq_length=length, gradient_checkpointing=checkpointing, ep_size=2)
    config = TrainConfig(model="-", dataset=["-"], bf16=True, per_device_train_batch_size=1, **flags)
    measurer = Measurer(build_rehearsed(config, tiny_config(family), "cuda"), config)
    found = measurer.loops_of(setting_of(config, 8).workload(measurer.parameters))
    assert found
    told = rehearse(config, tiny_config(family), 8, loops=lambda: found)
    run = rehearse(config, tiny_config(family), 8)
    assert told.memory.peak == run.memory.peak
    # what a loop keeps is one tensor, which is kept until its backward begins
    terms = (each.memory.kinds.terms() for each in (told, run))
    assert list(next(terms).values()) == pytest.approx(list(next(terms).values()), rel=0.05)
    assert len(told.recorder.events) < len(run.recorder.events)
    hardware = preset("H100", "infiniband-ndr")
    # of all parts together: some of what a loop's backward makes is of no part that can be told
    totals = [parts_of(each, 1, hardware) for each in (told, run)]
    for figure in ("flops", "moved", "kernels", "sent"):
        of_told, of_run = (sum(getattr(part, figure) for part in parts) for parts in totals)
        assert of_told == pytest.approx(of_run, rel=1e-9), figure
