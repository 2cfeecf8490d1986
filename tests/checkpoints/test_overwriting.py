"""--overwrite: what a command is to read is never deleted, however OUT is spelled."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoints.commands import contents, run
from tests.tiny import tiny_mixtral

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def originals(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, shards/, and in runs/ the directory of an adapter."""
    root = tmp_path_factory.mktemp("originals")
    shutil.copytree(tiny_model, root / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_mixtral(), config).save_pretrained(root / "runs" / "adapter")
    run("convert", root / "base", root / "shards", "--ep-size", 2)
    return root


MERGING, CONVERTING, EXPORTING = "merge base runs/adapter", "convert base", "export shards"
MORE = {CONVERTING: ["--ep-size", 2]}


def command(root: Path, which: str, out: Path) -> list[object]:
    name, *read = which.split()
    return [name, *(root / path for path in read), out, *MORE.get(which, []), "--overwrite"]


@pytest.mark.parametrize(
    ("which", "out"),
    [
        *((MERGING, out) for out in ("base", "runs/adapter", "runs", "runs/adapter/../../runs", ".")),
        *((CONVERTING, out) for out in ("base", ".")),
        *((EXPORTING, out) for out in ("shards", "base/../shards", ".")),
    ],
)
def test_what_is_to_be_read_is_not_deleted(originals: Path, tmp_path: Path, which: str, out: str) -> None:
    """Nor through a link."""
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    before = contents(root)
    (tmp_path / "link").symlink_to(root / out)
    for target in (root / out, tmp_path / "link"):
        error = run(*command(root, which, target), code=2)
        assert str(target) in error
        assert "choose another output directory" in error
        assert contents(root) == before


def test_relative_names(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(originals, tmp_path / "root")
    monkeypatch.chdir(tmp_path / "root" / "runs")
    before = contents(tmp_path)
    run("merge", "../base", "adapter", ".", "--overwrite", code=2)
    run("merge", "../base", "adapter", "../runs", "--overwrite", code=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ["base", "runs/adapter"])
def test_links_into_it(originals: Path, tmp_path: Path, what: str) -> None:
    """A directory of links, as in the hub's cache, whose files lie in OUT; and one that OUT holds a link to."""
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    shutil.copytree(root / what, tmp_path / "blobs")
    for file in (root / what).iterdir():
        if file.is_file():
            file.unlink()
            file.symlink_to(tmp_path / "blobs" / file.name)
    before = contents(tmp_path)
    assert "choose another output directory" in run(*command(root, MERGING, tmp_path / "blobs"), code=2)
    assert contents(tmp_path) == before

    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(root)
    run(*command(out / "link", MERGING, out), code=2)
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
        run(*command(root, MERGING, out))
        assert not (out / "old").exists()
        assert (out / "config.json").exists()
    assert linked.is_symlink()
    assert {path: content for path, content in contents(root).items() if not path.startswith("base/merged/")} == before
