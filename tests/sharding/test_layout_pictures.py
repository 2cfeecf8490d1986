"""The pictures of `docs/explanation/parallel-layout.md`, and what the page prints, are what its commands make."""

import re
import shlex
from pathlib import Path

import pytest

from expertmesh.sharding.topology import Topology
from expertmesh.training.cluster.commands import main
from expertmesh.training.cluster.layout_picture import layout_picture
from tests.test_readmes import blocks, commands

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "parallel-layout.md"
PICTURES = {
    "ep8": "--gpus 8",
    "dp2-full": "--gpus 16",
    "dp2-hybrid": "--gpus 16 --dense-shard hybrid",
    "cp2": "--gpus 16 --cp-size 2",
    "tp2": "--gpus 16 --tp-size 2",
    "pp2": "--gpus 16 --pp-size 2",
}
"""By name, the flags of `mesh --ep-size 8` that drew it."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_pictures_are_made_by_mesh(name: str, tmp_path: Path) -> None:
    shown = f"images/layout-{name}.svg"
    assert main(["mesh", "--ep-size", "8", *PICTURES[name].split(), "--picture", str(tmp_path / "made.svg")]) == 0
    assert (tmp_path / "made.svg").read_text() == (ROOT / "docs" / shown).read_text()
    assert f"(../{shown})" in PAGE.read_text()


def test_no_picture_is_left_over() -> None:
    made = {f"layout-{name}.svg" for name in PICTURES}
    assert made == {file.name for file in (ROOT / "docs" / "images").glob("layout-*.svg")}


def test_the_page_shows_what_mesh_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(commands(PAGE)[0])[3:])
    assert capsys.readouterr().out == blocks(PAGE, "text")[0]


def test_a_rank_has_what_its_layout_says() -> None:
    drawn = layout_picture(Topology(16, 4, "hybrid", cp_size=2, tp_size=2), 8, 16)
    boxes = re.split(r">rank (\d+)<", drawn)
    words = dict(zip(map(int, boxes[1::2]), (re.findall(r">([^<>]+)</text>", box) for box in boxes[2::2]), strict=True))
    assert words[0][:4] == ["expert 0", "heads 1/4", "others 1/4", "sequence 0"]
    assert words[15][:4] == ["expert 15", "heads 1/4", "others 1/4", "sequence 3"]


def test_too_many_ranks_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--gpus", "128", "--ep-size", "8", "--picture", str(tmp_path / "made.svg")]) == 2
    assert "--picture: draws at most 64 ranks; this layout has 128" in capsys.readouterr().err
