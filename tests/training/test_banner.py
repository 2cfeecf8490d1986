"""What is said of the data before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from expertmesh.training.data.samples import Sample
from expertmesh.training.run.banner import _unknown


def inputs(tokens: list[list[int]], **tokenizer: Any) -> Any:
    known = dict(unk_token_id=0, unk_token="<unk>", bos_token_id=1, eos_token_id=2, pad_token_id=None)
    samples = [Sample(each, [True] * len(each)) for each in tokens]
    return SimpleNamespace(tokenizer=SimpleNamespace(**known | tokenizer), training=SimpleNamespace(samples=samples))


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "share"),
    [
        ([[1, 0, 0, 5, 2], [1, 0, 7, 8, 2]], {}, "30%"),
        ([[1, 0, 5, 2]] + [[1, 5, 6, 7, 2]] * 8, {}, None),
        ([[1, 0, 0, 5, 2]], dict(unk_token_id=None), None),
        ([[0, 0, 0, 5, 2]], dict(pad_token_id=0), None),
        ([[5, 6]] * 100 + [[0, 0]] * 900, {}, None),
    ],
    ids=["much", "little", "none", "padding", "not read"],
)
def test_text_without_tokens_is_warned_of(
    tokens: list[list[int]], tokenizer: dict[str, Any], share: str | None
) -> None:
    said = _unknown(inputs(tokens, **tokenizer))
    assert [line.split(" of the first")[0] for line in said] == ([] if share is None else [f"warning: {share}"])
