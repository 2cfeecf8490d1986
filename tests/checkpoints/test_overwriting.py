"""--overwrite: what a command is to read is never deleted, however OUT is spelled."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expertmesh.checkpoints.__main__ import main
from tests.tiny import tiny_mixtral

peft = pytest.importorskip("peft")

Places = dict[str, Path]


@pytest.fixture(scope="module")
def originals(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, shards/, and in runs/ the directory of an adapter."""
    root = tmp_path_factory.mktemp("originals")
    shutil.copytree(tiny_model, root / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_mixtral(), config).save_pretrained(root / "runs" / "adapter")
    assert main(["convert", str(root / "base"), str(root / "shards"), "--ep-size", "2"]) == 0
    return root


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def merging(root: Path, out: Path) -> list[str]:
    return ["merge", str(root / "base"), str(root / "runs" / "adapter"), str(out)]


def converting(root: Path, out: Path) -> list[str]:
    return ["convert", str(root / "base"), str(out), "--ep-size", "2"]


def exporting(root: Path, out: Path) -> list[str]:
    return ["export", str(root / "shards"), str(out)]


@pytest.mark.sample(9)
@pytest.mark.parametrize("links", [False, True], ids=["", "links"])
@pytest.mark.parametrize(
    ("command", "out"),
    [
        (merging, "base"),
        (merging, "runs/adapter"),
        (merging, "runs"),
        (merging, "runs/adapter/../../runs"),
        (merging, "."),
        (converting, "base"),
        (converting, "."),
        (exporting, "shards"),
        (exporting, "base/../shards"),
        (exporting, "."),
    ],
)
def test_what_is_to_be_read_is_not_deleted(
    originals: Path,
    tmp_path: Path,
    command: Callable[[Path, Path], list[str]],
    out: str,
    links: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    target = root / out
    if links:
        target = tmp_path / "link"
        target.symlink_to(root / out)
    before = contents(root)
    assert main([*command(root, target), "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert str(target) in error
    assert "choose another directory" in error
    assert contents(root) == before


def test_relative_names(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(originals, tmp_path / "root")
    monkeypatch.chdir(tmp_path / "root" / "runs")
    before = contents(tmp_path)
    assert main(["merge", "../base", "adapter", ".", "--overwrite"]) == 2
    assert main(["merge", "../base", "adapter", "../runs", "--overwrite"]) == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ["base", "runs/adapter"])
def test_links_into_it(originals: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of links, as in the hub's cache, whose files lie in OUT; and one that OUT holds a link to."""
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    shutil.copytree(root / what, tmp_path / "blobs")
    for file in (root / what).iterdir():
        if file.is_file():
            file.unlink()
            file.symlink_to(tmp_path / "blobs" / file.name)
    before = contents(tmp_path)
    assert main([*merging(root, tmp_path / "blobs"), "--overwrite"]) == 2
    assert "choose another directory" in capsys.readouterr().err
    assert contents(tmp_path) == before

    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(root)
    assert main([*merging(out / "link", out), "--overwrite"]) == 2
    assert (out / "link").exists()


def test_beside_and_within_it_is_written(originals: Path, tmp_path: Path) -> None:
    """Within the base too, and through a link, whose directory is emptied and stays."""
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    before = contents(root)
    within, linked, real = root / "base" / "merged", tmp_path / "linked", tmp_path / "real"
    for out in (within, real):
        out.mkdir()
        (out / "old").write_text("old")
    linked.symlink_to(real)
    for out in (within, linked):
        assert main([*merging(root, out), "--overwrite"]) == 0
        assert not (out / "old").exists()
        assert (out / "config.json").exists()
    assert linked.is_symlink()
    assert {path: content for path, content in contents(root).items() if within not in path.parents} == before
