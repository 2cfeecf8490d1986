"""Log-probabilities by the reference: whose they are, where they are kept, and when they are not taken."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.tasks.dpo import SFT, TARGETS, PairInputs
from expertmesh.training.tasks.kto import DESIRABLE, LabelledInputs
from expertmesh.training.tasks.reference_logprobs import FILE, RECORD, REFERENCE, kept_or_computed
from tests.distributed.whole_runs import flip_a_bit

REFERENCE_P2 = torch.arange(8, dtype=torch.float64).view(4, 2)


def rows(*groups: list[int]) -> Any:
    """Entries of the data, each of so many pairs."""
    return SimpleNamespace(numbers=lambda number: groups[number])


def test_pairs_of_a_batch_in_their_order() -> None:
    """In entries of two pairs and of one; a step of three pairs has 6 chosen targets, so each counts half in a mean
    over pairs."""
    inputs = PairInputs(torch.tensor([[2, 5], [1, 1], [9, 9], [3, 4]]), REFERENCE_P2)
    given = inputs.within(rows([3, 0], [2], [1]), together=[0, 2])([2, 0])
    assert given is not None
    found = given.by_sample
    assert found[REFERENCE].tolist() == [2, 3, 6, 7, 0, 1]
    assert found[TARGETS].tolist() == [1, 1, 3, 4, 2, 5]
    assert found[SFT].tolist() == [0.5, 0] * 3


@pytest.mark.parametrize("estimates", [True, False])
def test_labelled_answers_of_a_batch(estimates: bool) -> None:
    entries = rows([3], [0, 2], [1])
    inputs = LabelledInputs(torch.tensor([1.0, 0.0, 0.0, 1.0]), REFERENCE_P2, entries if estimates else None)
    found = inputs.within(entries, together=[0, 1, 2])([1, 0])
    assert found is not None
    assert found.by_sample[REFERENCE].tolist() == [0, 4, 6]
    assert found.by_sample[DESIRABLE].tolist() == [1, 0, 1]
    assert (found.mismatched is not None) == estimates
    if found.mismatched is not None:
        others, of_others = found.mismatched
        assert others is entries
        assert of_others.by_sample[REFERENCE].tolist() == [1, 5, 7]


Parts = dict[str, torch.Tensor]


@dataclass
class Passes:
    """computed: the data of which something was computed, by the only rank."""

    directory: Path
    computed: list[Any] = field(default_factory=list)

    def __call__(
        self, key: str, held_out: Any = None, can_compute: bool = True, told: list[str] | None = None
    ) -> tuple[Parts, bool]:
        ranks: Any = SimpleNamespace(rank=0, world_size=1, device="cpu", store=dist.HashStore(), watchdog=None)
        parts = {"training": DATA} | ({} if held_out is None else {"evaluation": held_out})
        tell = ([] if told is None else told).append
        return kept_or_computed(self.directory, parts, key, can_compute, self.compute, ranks, tell)

    def compute(self, part: Any) -> torch.Tensor:
        self.computed.append(part)
        return REFERENCE_P2[: len(part.samples)] + len(self.computed)


DATA: Any = SimpleNamespace(samples=[0] * 4)


@pytest.fixture
def passes(tmp_path: Path) -> Iterator[Passes]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Passes(tmp_path)
    dist.destroy_process_group()


def test_what_is_kept_is_taken_by_the_same_model_and_data_alone(passes: Passes, tmp_path: Path) -> None:
    held_out: Any = SimpleNamespace(samples=[0] * 3)
    first, was_kept = passes("a", held_out)
    assert (was_kept, passes.computed) == (False, [DATA, held_out])
    kept = load_file(tmp_path / FILE)
    assert torch.equal(kept["training"], REFERENCE_P2 + 1)
    assert torch.equal(kept["evaluation"], REFERENCE_P2[:3] + 2)
    # a resumed run, which has not read the reference's weights, computes nothing
    again, was_kept = passes("a", held_out, can_compute=False)
    assert (was_kept, len(passes.computed)) == (True, 2)
    assert all(torch.equal(again[name], first[name]) for name in ("training", "evaluation"))
    with pytest.raises(ExpertMeshError, match=r"reference\.safetensors: is of another model or other data"):
        passes("b", held_out, can_compute=False)
    _, was_kept = passes("b", held_out)
    assert (was_kept, len(passes.computed)) == (False, 4)


def test_a_damaged_one_is_computed_anew(passes: Passes, tmp_path: Path) -> None:
    """With a note, as it may be the disk; also a file without its record, as earlier releases left it."""
    passes("a")
    content, anew = (tmp_path / FILE).read_bytes(), "; the reference's log-probabilities are computed anew"
    cut = f"{tmp_path / FILE}: is damaged: its checksum is not the one in {RECORD}"
    for times, (file, change, said) in enumerate(
        (
            (FILE, lambda: flip_a_bit(tmp_path / FILE), cut),
            (FILE, lambda: (tmp_path / FILE).write_bytes(content[:100]), cut),
            (RECORD, lambda: flip_a_bit(tmp_path / RECORD), f"{tmp_path / RECORD}: is damaged, or not there"),
            (RECORD, lambda: (tmp_path / RECORD).unlink(), f"{tmp_path / RECORD}: is damaged, or not there"),
        ),
        start=2,
    ):
        change()
        with pytest.raises(ExpertMeshError, match=rf"--resume: .*{file}: is damaged.* begin anew"):
            passes("a", can_compute=False)
        told: list[str] = []
        found, was_kept = passes("a", told=told)
        assert not was_kept
        assert told == [f"note: {said}{anew}"]
        assert torch.equal(found["training"], REFERENCE_P2 + times)
        assert passes("a", can_compute=False)[1]


@pytest.mark.parametrize(
    ("content", "said"), [(None, f"{FILE}: is not there"), (b"x", f"{RECORD}: is damaged, or not there")]
)
def test_a_resumed_run_without_them_is_refused(
    passes: Passes, tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ExpertMeshError, match=rf"--resume: .*{said}.*bring the file back, or begin anew"):
        passes("a", can_compute=False)
    assert not passes.computed
