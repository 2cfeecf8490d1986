"""The table of models in `docs/reference/models.md` is what the code says."""

import re

import pytest
import transformers

from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.training.cluster.families_command import main
from expertmesh.training.cluster.support import METHODS
from tests.families.models_page import IMAGES, PAGE, introduction, reasons, refusals, refused_images, row_of, rows_in
from tests.families.test_families import FAMILIES, PLANNED, UNPACKED
from tests.published.models import CONFIGS
from tests.test_readmes import ROOT

TEXT = PAGE.read_text(encoding="utf-8")
ROWS, OF_IMAGES = rows_in(TEXT), TEXT.partition(IMAGES)[2]


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral_large4", "minimax_m3_vl"])
def test_a_familys_row(family: str) -> None:
    check_row(family)


SHARES = 6


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_familys_row(share: int) -> None:
    for family in causal_families()[share::SHARES]:
        check_row(family)


def check_row(family: str) -> None:
    """It is what our code says of its tiny model, and as the tests of packing and of parallelism find, which leave out
    no family: what is supported is supported with every method but these."""
    if written_for() != transformers.__version__:
        if family not in ROWS:  # the page is of another transformers, in which more families have plans
            return
    else:
        expected = {"packing": family in UNPACKED, "TP": family not in PLANNED}
        assert ROWS[family] == tuple(m for m in METHODS if family in UNSUPPORTED or expected.get(m))
    assert row_of(family) in TEXT
    assert refusals(family) in TEXT
    assert UNPACKED.get(family, "") in refusals(family)
    why = None if family in UNSUPPORTED else refused_images(family)
    line = f"\n- `{family}`: {why}.\n"
    assert (f"`{family}`" in OF_IMAGES) == (why is not None)
    assert (line in OF_IMAGES) == bool(why), line


def written_for() -> str:
    (version,) = re.findall(r"of transformers (\d+\.\d+\.\d+)", TEXT)
    return str(version)


def test_what_stands_around_the_table() -> None:
    assert TEXT.startswith(introduction(written_for()))
    if written_for() == transformers.__version__:  # another has other families
        assert reasons() in TEXT


def test_the_root_readme_counts_the_families() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    supported = len(ROWS.keys() - UNSUPPORTED.keys())
    if written_for() == transformers.__version__:
        assert len(set(FAMILIES)) == supported, "whose gradients are compared"
    assert f"{supported} of the {len(ROWS)} causal MoE families in transformers {written_for()}" in readme


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
