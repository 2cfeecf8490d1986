"""The table of models in `moe/MODELS.md`, and its short form in the root README, are what the code says."""

import re

import pytest
import transformers

from expertmesh.moe.hf_model.families import causal_families, families_with_plan
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.training.planning.families_command import main
from expertmesh.training.planning.support import METHODS
from tests.families import test_families, test_packing
from tests.families.models_page import (
    PAGE,
    introduction,
    reasons,
    row_of,
    rows_in,
    short_table,
)
from tests.published.models import CONFIGS
from tests.test_readmes import ROOT

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = rows_in(TEXT)


@pytest.mark.sample(15)
@pytest.mark.parametrize("family", causal_families())
def test_a_familys_row(family: str) -> None:
    if family not in ROWS and written_for() != transformers.__version__:
        pytest.skip(f"the page is of transformers {written_for()}, which has no {family}")
    assert row_of(family) in TEXT


def written_for() -> str:
    (version,) = re.findall(r"of transformers ([\d.]+)\.", TEXT)
    return str(version)


def test_what_stands_around_the_table() -> None:
    assert TEXT.startswith(introduction(written_for()))
    if written_for() == transformers.__version__:  # another has other families
        assert TEXT.endswith(reasons())


def test_the_root_readme_has_its_short_form() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert short_table(TEXT) in readme
    supported = len(ROWS.keys() - UNSUPPORTED.keys())
    if written_for() == transformers.__version__:
        assert len(set(test_families.FAMILIES)) == supported, "whose gradients are compared"
    assert f"{supported} of the {len(ROWS)} causal MoE families in transformers {written_for()} are supported" in readme
    trained = TEXT.count(" | training |\n")
    assert f"loss and gradients of {supported} families, and updated weights of {trained}, are" in readme


@pytest.mark.release
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command on a family by its default config, also one that makes no model, and on a directory."""
    directory = str(CONFIGS / "granite-4.0-h-tiny")
    assert main(["families", "--table", "mixtral", "qwen4_exp", directory]) == 0
    _, _, mixtral, incomplete, granite = capsys.readouterr().out.splitlines()
    assert mixtral == "| mixtral | yes | yes | yes | yes | yes | yes |"
    assert incomplete == "| qwen4_exp | ? | ? | ? | ? | ? | ? |"
    assert granite == f"| {directory} | yes | yes | yes | yes | no | yes |"
    assert main(["families", "--table", "llama"]) == 2
    assert capsys.readouterr().err.startswith("moe: error: llama: no such file or directory")


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", ROWS)
def test_what_is_supported_is_supported_with_every_method(family: str) -> None:
    """As the tests of packing and of parallelism find, which leave out no family."""
    if written_for() != transformers.__version__:
        pytest.skip(f"the page is of transformers {written_for()}, in which more families have plans")
    expected = ["no" if family in UNSUPPORTED else "yes"] * len(METHODS)
    if family in test_packing.REFUSED:
        expected[METHODS.index("packing")] = "no"
    if family not in families_with_plan():
        expected[METHODS.index("TP")] = "no"
    assert list(ROWS[family]) == expected
