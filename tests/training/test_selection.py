"""Parameters and modules that a pattern chooses, and what is said of one that chooses none."""

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.selection import select

NAMES = ["model.layers.0.q_proj", "model.layers.10.q_proj", "model.layers.1.gate", "lm_head"]


def chosen(pattern: str) -> set[str]:
    return select("--freeze", pattern, iter(NAMES), "parameter", ["experts", "routers"], ["q_proj", "gate"])


@pytest.mark.parametrize(
    ("pattern", "numbers"), [("q_proj", [0, 1]), (r"layers\.1\.", [2]), ("^lm_head$", [3]), (".", [0, 1, 2, 3])]
)
def test_names_in_which_it_is_found(pattern: str, numbers: list[int]) -> None:
    assert chosen(pattern) == {NAMES[number] for number in numbers}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("qproj", "--freeze qproj: no parameter matches it; did you mean q_proj?"),
        ("xx", "--freeze xx: no parameter matches it; groups are experts, routers"),
        ("router", "--freeze router: no parameter matches it; did you mean routers"),
        ("(", "--freeze (: neither a group (experts, routers) nor a regular expression: missing ), "),
    ],
)
def test_what_chooses_nothing_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ExpertMeshError) as caught:
        chosen(pattern)
    assert str(caught.value).startswith(said)
