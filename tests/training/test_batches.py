"""Our batches by hand, and those that data collators make against ours of the same samples."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.data.batch import IGNORED, WEIGHT, Batch, LossInputs, batch_of, collate
from expertmesh.training.data.samples import Sample

samples = st.lists(st.tuples(st.integers(3, 90), st.booleans()), min_size=1, max_size=9).map(
    lambda pairs: Sample([token for token, _ in pairs], [trained for _, trained in pairs])
)


def labels_of(sample: Sample) -> list[int]:
    # a sample's first label is nobody's target
    return [token if trained else IGNORED for token, trained in zip(sample.tokens, sample.is_trained, strict=True)]


def assert_made_of(inputs: dict[str, Any], found: Batch, expected: Batch) -> None:
    """The batch of a collator's `inputs` is the expected one, and knows where among them its tokens stood."""
    assert found.place_BS is not None
    given_BS = torch.as_tensor(inputs["input_ids"]).flatten()[found.place_BS]
    is_token_BS = torch.ones_like(given_BS, dtype=torch.bool) if found.is_token_BS is None else found.is_token_BS
    assert torch.equal(given_BS[is_token_BS], found.tokens_BS[is_token_BS])
    assert_same(replace(found, place_BS=expected.place_BS), expected)


def assert_same(found: Batch, expected: Batch) -> None:
    for field in fields(Batch):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs), field.name
        elif field.name == "split" and theirs is not None:
            assert torch.equal(ours.positions_BS, theirs.positions_BS)
            assert ours.num_targets == theirs.num_targets
            assert theirs.num_targets[theirs.cp_group.index] == expected.num_targets
        else:
            assert ours == theirs, field.name


def test_targets_are_the_trained_tokens() -> None:
    samples = [Sample.of_prompt([10, 11, 12, 13], 2), Sample.of_prompt([20, 21], 0), Sample.of_prompt([30, 31], 2)]
    batch = collate([[sample] for sample in samples])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 0, 0]]
    assert batch.positions_BS is None
    assert batch.is_token_BS is not None
    assert batch.is_token_BS.sum(dim=1).tolist() == [4, 2, 2]
    assert batch.targets_BS.tolist() == [[-100, 12, 13, -100], [21, -100, -100, -100], [-100] * 4]
    assert batch.target_index_N.tolist() == [1, 2, 4]
    assert (batch.num_tokens, batch.num_targets, batch.spans) == (8, 3, (range(4), range(2), range(2)))


def test_packed_rows() -> None:
    samples = [Sample.of_prompt([10, 11, 12], 1), Sample.of_prompt([20], 0), Sample.of_prompt([30, 31], 0)]
    batch = collate([samples, [samples[2]]])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 20, 30, 31], [30, 31, 0, 0, 0, 0]]
    assert batch.positions_BS is not None
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 0, 0, 0]]
    # the last token of a sample has no target: what follows is another sample
    assert batch.targets_BS.tolist() == [[11, 12, -100, -100, 31, -100], [31, -100, -100, -100, -100, -100]]
    assert sum(map(len, batch.spans)) == batch.num_tokens


def test_a_token_beyond_the_sequence_is_a_target_alone() -> None:
    text = Sample([10, 11, 12], [True] * 3, beyond=True)
    row = [text, Sample([30, 31], [True] * 2, [0.5, 0.25], beyond=True), Sample([20, 21], [True] * 2)]
    batch = collate([row], loss_inputs=LossInputs(), is_weighted=True)
    assert batch.tokens_BS.tolist() == [[10, 11, 30, 20, 21]]
    assert batch.positions_BS is not None
    assert batch.positions_BS.tolist() == [[0, 1, 0, 0, 1]]
    assert batch.targets_BS.tolist() == [[11, 12, 31, 21, -100]]
    assert batch.of_loss[WEIGHT].tolist() == [1, 1, 0.25, 1]
    assert (batch.segments, batch.num_tokens, batch.num_targets) == ((2, 1, 2), 5, 4)
    parts = [collate([[row[0], row[2]]], CPGroup(2, index, None)).targets_BS.tolist() for index in range(2)]
    assert parts == [[[11, 12]], [[21, -100]]]


def test_little_to_collate() -> None:
    """No sample is one position of padding; where there is no padding, there is no mask."""
    batch = collate([])
    assert batch.tokens_BS.shape == (1, 1)
    assert batch.is_token_BS is not None
    assert not batch.is_token_BS.any()
    assert (batch.num_tokens, batch.num_targets) == (0, 0)
    assert collate([[Sample.of_prompt([1, 2], 1)], [Sample.of_prompt([3, 4], 1)]]).is_token_BS is None


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(samples, min_size=1, max_size=4),
    left=st.booleans(),
    more=st.integers(0, 3),
    runs=st.sampled_from([1, 2]),
)
def test_padded_sequences(rows: list[Sample], left: bool, more: int, runs: int) -> None:
    """On either side, by more than it takes, for one rank or a context-parallel group of two."""
    length = max(len(row.tokens) for row in rows) + more

    def padded(values: list[int], fill: int) -> list[int]:
        padding = [fill] * (length - len(values))
        return padding + values if left else values + padding

    inputs = {
        "input_ids": torch.tensor([padded(row.tokens, 7) for row in rows]),
        "labels": torch.tensor([padded(labels_of(row), IGNORED) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.tokens), 0) for row in rows]),
    }
    for index in range(runs):
        cp_group = None if runs == 1 else CPGroup(runs, index, None)
        assert_made_of(inputs, batch_of(inputs, False, cp_group), collate([[row] for row in rows], cp_group))


@settings(max_examples=60, deadline=None)
@given(row=st.lists(samples, min_size=1, max_size=4), runs=st.sampled_from([1, 2]))
def test_samples_in_one_sequence(row: list[Sample], runs: int) -> None:
    """As trl packs them, or DataCollatorWithFlattening puts them together: positions begin anew."""
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[token for sample in row for token in sample.tokens]]),
        "labels": torch.tensor([[label for sample in row for label in labels_of(sample)]]),
        "position_ids": torch.tensor([[i for sample in row for i in range(len(sample.tokens))]]),
        "seq_idx": None,
        "max_length_q": 9,
    }
    for index in range(runs):
        cp_group = None if runs == 1 else CPGroup(runs, index, None)
        assert_made_of(inputs, batch_of(inputs, True, cp_group), collate([row], cp_group))


IDS = torch.arange(3, 9)[None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": None}, "has no labels"),
        ({"input_ids": None}, "has no input_ids"),
        ({"pixel_values": torch.zeros(1)}, "has pixel_values, which would be ignored"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "hides tokens in the middle"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])}, "attention_mask of a batch has 2; .* by position_ids"),
        ({"labels": IDS[:, :4]}, r"labels of shape \(1, 4\)"),
        ({"labels": IDS[:, :4].tolist()}, r"labels of shape \(1, 4\)"),
        ({"labels": IDS.bool()}, "labels of a batch is torch.bool"),
        ({3: IDS}, "has 3, which would be ignored"),
        ({"input_ids": IDS.float()}, "it must be integers"),
        ({"input_ids": "text"}, "not a tensor"),
        ({"position_ids": torch.arange(6)[None] + 4}, "continue at 4"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "give packing=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_batch(changes: dict[Any, Any], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        batch_of({"input_ids": IDS, "labels": IDS, **changes}, packing=False)


def test_the_same_in_other_forms() -> None:
    """Targets that are where they are predicted already, and lists."""
    expected = batch_of({"input_ids": IDS, "labels": IDS}, False)
    shifted = torch.tensor([[4, 5, 6, 7, 8, IGNORED]])
    for inputs in ({"input_ids": IDS, "shift_labels": shifted}, {"input_ids": IDS.tolist(), "labels": IDS.tolist()}):
        assert_made_of(inputs, batch_of(inputs, False), expected)


def test_shift_labels_of_the_last_position() -> None:
    """Where a text is cut into sequences, the last token's target is known too; that of another sample is none."""
    shifted = torch.tensor([[4, 5, 6, 7, 8, 9]])
    assert batch_of({"input_ids": IDS, "shift_labels": shifted}, False).targets_BS.tolist() == shifted.tolist()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = batch_of({"input_ids": IDS, "shift_labels": shifted, "position_ids": positions}, True)
    assert packed.targets_BS.tolist() == [[4, 5, IGNORED, 7, 8, 9]]
    assert shifted.tolist() == [[4, 5, 6, 7, 8, 9]]  # what was given stays as it is
    left = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = batch_of({"input_ids": IDS, "shift_labels": shifted, "attention_mask": left}, False)
    assert padded.targets_BS.tolist() == [[6, 7, 8, 9]]
