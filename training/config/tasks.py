"""The tasks of `--task`. Nothing here imports torch, as flags are read before it is loaded: the code is named, and is
`training.tasks`'."""

from dataclasses import dataclass
from typing import Any

from ...moe.util.registry import Registry
from ..data.labels import LABELLED_ANSWERS
from ..data.pairs import PAIRS
from ..data.record_kinds import CONVERSATIONS, RecordKind


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A value of `--task`.

    Attributes:
        name, help: of the flag.
        records: what a record of its data is.
        has_reference: whether its loss compares with the model as it began.
        heeds: of the settings that not every task reads, those that it does, but for those that `records` says.
        losses: the values of --preference-loss that it knows; with_divergence: those of them that need an estimate of
            the divergence from the reference.
        task: its class, one made of `training.tasks.task.Task` (see `moe.util.registry`).
    """

    name: str
    help: str
    records: RecordKind
    has_reference: bool
    heeds: tuple[str, ...]
    losses: tuple[str, ...]
    with_divergence: tuple[str, ...]
    task: str | type[Any]

    def reads(self, name: str) -> bool:
        """Whether it, or what reads its records, follows a setting that not every task does."""
        return name in self.heeds or name in self.records.heeds


SFT = TaskEntry(
    name="sft",
    help="supervised fine-tuning",
    records=CONVERSATIONS,
    has_reference=False,
    heeds=("weight_column", "loss_average", "loss_by_dataset", "streaming", "teacher", "train_mtp"),
    losses=(),
    with_divergence=(),
    task="training.tasks.sft:NextTokens",
)
DPO = TaskEntry(
    name="dpo",
    help="direct preference optimization, on pairs of answers",
    records=PAIRS,
    has_reference=True,
    heeds=("preference_loss", "preference_beta", "preference_sft_weight"),
    losses=("sigmoid", "ipo"),
    with_divergence=(),
    task="training.tasks.dpo:PreferencePairs",
)
KTO = TaskEntry(
    name="kto",
    help="Kahneman-Tversky optimization, on answers labelled as desirable or not",
    records=LABELLED_ANSWERS,
    has_reference=True,
    heeds=("preference_loss", "preference_beta", "desirable_weight", "undesirable_weight"),
    losses=("sigmoid", "apo_zero_unpaired"),
    with_divergence=("sigmoid",),
    task="training.tasks.kto:LabelledAnswers",
)
TASKS = Registry("--task", ours=(SFT, DPO, KTO))


def tasks_in_words() -> str:
    """For `--help`."""
    return "; ".join(f"{entry.name}: {entry.help}" for entry in TASKS.entries())
