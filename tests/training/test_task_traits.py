"""A task from outside is refused, and allowed, what its own entry says, and no more."""

from collections.abc import Iterator
from typing import Any

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.tasks import SFT, TASKS, TaskEntry
from expertmesh.training.config.train_config import SETTINGS, as_flag, parse_config
from expertmesh.training.data.record_kinds import CONVERSATIONS, RecordKind
from expertmesh.training.loss.objective import Objective
from expertmesh.training.start.inputs import data_options
from expertmesh.training.tasks.distillation import Distillation
from expertmesh.training.tasks.registry import register_task, task_of
from expertmesh.training.tasks.task import DataTraits, Task

OF_TASK = {
    "weight_column": "--weight-column w",
    "loss_average": "--loss-average sample",
    "loss_by_dataset": "--loss-by-dataset",
    "streaming": "--streaming --max-steps 2",
    "teacher": "--teacher t",
    "train_mtp": "--train-mtp",
}
OF_RECORDS = {
    "messages_column": "--messages-column c",
    "prompt_column": "--prompt-column q",
    "response_column": "--response-column r",
    "text_column": "--text-column t",
    "prompt_template": "--prompt-template {prompt}",
    "train_on": "--train-on all",
    "split_turns": "--split-turns",
    "images": "--images",
}
CASES = [(name, flags) for table in (OF_TASK, OF_RECORDS) for name, flags in table.items()]


class Focal(Task):
    def objective(self, config: Any, data: DataTraits) -> Objective:
        return Objective(lambda logprobs_N, batch: -logprobs_N.sum())


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with TASKS.restored():
        yield


def parse(flags: str) -> Any:
    return parse_config(["--model", "m", "--dataset", "d", *flags.split()])


def register(heeds: tuple[str, ...], of_records: tuple[str, ...]) -> None:
    by_turns = RecordKind("verdict by verdict") if "split_turns" in of_records else None
    records = RecordKind("verdicts", heeds=of_records, by_turns=by_turns)
    register_task(
        TaskEntry(
            name="focal",
            help="own",
            records=records,
            has_reference=False,
            heeds=heeds,
            losses=(),
            with_divergence=(),
            task=Focal,
        )
    )


def test_the_tables_have_every_trait() -> None:
    """What supervised fine-tuning reads and another task may not; nothing else depends on the name of a task."""
    assert set(OF_TASK) == set(SFT.heeds)
    assert set(OF_RECORDS) == set(CONVERSATIONS.heeds)
    assert {*OF_TASK, *OF_RECORDS} <= SETTINGS.keys()


@pytest.mark.parametrize(("name", "flags"), CASES, ids=[name for name, _ in CASES])
def test_a_trait_on_and_off(name: str, flags: str) -> None:
    """Where it alone is missing, the refusal names it, and nothing of another task's."""
    register(tuple(OF_TASK.keys() - {name}), tuple(OF_RECORDS.keys() - {name}))
    with pytest.raises(ExpertMeshError) as caught:
        parse(f"--task focal {flags}")
    reads = name in OF_RECORDS
    why = "is not for verdicts, which --task focal reads" if reads else "--task focal does not read it"
    why = "--task focal needs a fixed set of data" if name == "streaming" else why
    said = "--prompt-template" if name == "prompt_template" else as_flag(name, getattr(parse(flags), name))
    assert str(caught.value) == f"{said}: {why}; leave it out"


@pytest.mark.parametrize(("name", "flags"), CASES, ids=[name for name, _ in CASES])
def test_what_it_declares_it_may(name: str, flags: str) -> None:
    register((name,) if name in OF_TASK else (), (name,) if name in OF_RECORDS else ())
    config = parse(f"--task focal {flags}")
    assert getattr(config, name) == getattr(parse(flags), name)
    assert isinstance(task_of(config), Focal), "a teacher, too, is the task's own affair"
    assert data_options(config).kind.name == ("verdict by verdict" if name == "split_turns" else "verdicts")
    assert isinstance(task_of(parse("--teacher t")), Distillation)


def test_what_of_it_the_data_decide_is_refused_before_the_first_step() -> None:
    """Weights that records have without a flag, and an own loss beside drafts."""
    register(("train_mtp",), ())
    weighted: Any = type("Samples", (), {"is_weighted": True})
    plain: Any = type("Samples", (), {"is_weighted": False})
    with pytest.raises(ExpertMeshError, match="--task focal: reads no weights, which records of the data have"):
        Focal().check(parse("--task focal"), weighted, None)
    Focal().check(parse("--task focal"), plain, plain)
    with pytest.raises(ExpertMeshError, match="--train-mtp: goes with the cross-entropy alone, and --task focal has"):
        Focal().check(parse("--task focal --train-mtp"), plain, None)
