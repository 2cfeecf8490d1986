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
PICTURED = [line for line in commands(PAGE) if "--picture" in line]


@pytest.mark.parametrize("command", PICTURED, ids=lambda line: line.rsplit("/", 1)[-1])
def test_the_pages_pictures_are_made_by_its_commands(command: str, tmp_path: Path) -> None:
    arguments, shown = command.split(" --picture ")
    assert main([*shlex.split(arguments)[3:], "--picture", str(tmp_path / "made.svg")]) == 0
    assert (tmp_path / "made.svg").read_text() == (ROOT / shown).read_text()
    assert f"(../../{shown})".replace("../../docs", "..") in PAGE.read_text()


def test_no_picture_is_left_over() -> None:
    made = {Path(line.rsplit(" ", 1)[-1]).name for line in PICTURED}
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
