"""trl's batches of preference pairs, by trl's own collator, as an engine takes them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.batch import IGNORED
from expertmesh.training.tasks.dpo import SFT, TARGETS
from expertmesh.training.tasks.reference_logprobs import REFERENCE
from expertmesh.training.tasks.trl_pairs import COLUMNS, pairs_in_turn, with_reference

preference = pytest.importorskip("trl.trainer.dpo_trainer")

PAIRS = [
    {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7], "chosen_ids": [8], "rejected_ids": [9, 10]},
    {"prompt_ids": [11, 12, 13], "chosen_ids": [14], "rejected_ids": [15]},
]
IN_TURN = [([1, 2], [3, 4, 5]), ([1, 2], [6]), ([7], [8]), ([7], [9, 10]), ([11, 12, 13], [14]), ([11, 12, 13], [15])]
"""(prompt, answer): each pair's chosen answer and then its rejected one."""


def collate(rows: list[Any]) -> Any:
    return preference.DataCollatorForPreference(pad_token_id=0)(rows)


def test_a_pairs_answers_are_neighbours() -> None:
    batch = pairs_in_turn(collate(PAIRS))
    assert "loss_inputs" not in batch
    for row, (prompt, answer) in enumerate(IN_TURN):
        is_token_S = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][is_token_S].tolist() == prompt + answer
        assert batch["labels"][row][is_token_S].tolist() == [IGNORED] * len(prompt) + answer
        assert set(batch["labels"][row][~is_token_S].tolist()) <= {IGNORED}


def test_what_the_reference_gave_goes_along() -> None:
    given = [{**row, COLUMNS[0]: -1.0 - n, COLUMNS[1]: -10.0 - n} for n, row in enumerate(PAIRS)]
    inputs = pairs_in_turn(collate(given))["loss_inputs"]
    assert inputs[REFERENCE].tolist() == [-1, -10, -2, -11, -3, -12]
    assert inputs[TARGETS].tolist() == [len(answer) for _, answer in IN_TURN]
    assert inputs[SFT].tolist() == [0] * 6


def test_each_rank_computes_its_part_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, in batches of one pair: of each answer as many thousandths as the sum of its tokens."""
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: parts.append(sums.clone()))

    def logprobs(batches: list[Any]) -> list[torch.Tensor]:
        assert all(len(batch["input_ids"]) == 2 for batch in batches)
        return [batch["input_ids"] * (batch["labels"] != IGNORED) * -1e-3 for batch in batches]

    rows = Dataset.from_list(PAIRS)
    for rank in range(2):
        engine: Any = SimpleNamespace(
            ranks=SimpleNamespace(rank=rank, world_size=2, device="cpu"), logprobs=logprobs
        )  # fmt: skip
        with_reference(engine, rows, collate, 1)
    expected = torch.tensor([sum(answer) * -1e-3 for _, answer in IN_TURN], dtype=torch.float64).view(3, 2)
    torch.testing.assert_close(parts[0] + parts[1], expected)
    assert not parts[0][1].any()
    assert not parts[1][[0, 2]].any()
    found = with_reference(engine, rows, collate, 1)
    assert found[COLUMNS[0]] == parts[2][:, 0].tolist()
    assert found[COLUMNS[1]] == parts[2][:, 1].tolist()


def test_a_stream_is_refused() -> None:
    engine: Any = None
    with pytest.raises(ExpertMeshError, match=r"needs a datasets\.Dataset: the reference reads it before training"):
        with_reference(engine, iter(PAIRS), collate, 1)
