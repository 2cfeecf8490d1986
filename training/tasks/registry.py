"""The task of a run, chosen by its settings.

One of your own is one call of `register_task`; docs/how-to/extend.md has an example.
"""

from ...moe.util.entry_checks import check_fields
from ...moe.util.registry import loaded
from ..config.tasks import SFT, TASKS, TaskEntry
from ..config.train_config import SETTINGS, TrainConfig
from .distillation import Distillation
from .task import Task


def task_of(config: TrainConfig) -> Task:
    """What a run with these settings learns."""
    if config.teacher and config.task == SFT.name:
        return Distillation()
    task: Task = loaded(config.task_entry.task)()
    return task


def register_task(entry: TaskEntry) -> None:
    """Add a value of `--task`.

    Raises:
        ValueError: its name is taken, something of it is missing or is no setting, or the class is none of `Task`.
    """
    task = loaded(entry.task)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"--task {entry.name}: {task!r} is no class made of Task")
    check_fields(f"--task {entry.name}", entry)
    if unknown := [name for name in entry.heeds if name not in SETTINGS]:
        raise ValueError(f"--task {entry.name}: there is no setting {unknown[0]}")
    TASKS.register(entry)
