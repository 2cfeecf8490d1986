"""What transformers loads of an export and saves again is, for `verify`, the export."""

from pathlib import Path

import pytest

from tests.checkpoints.commands import run
from tests.families.configs import load_model, tiny_model
from tests.tiers import REPRESENTATIVES, tiered

QUICK = ("mixtral", "gpt_oss")
"""One whose experts have tensors of their own in files, and one whose have none."""
FAMILIES = (*REPRESENTATIVES, "qwen3_5_moe_text", "granitemoe", "ernie4_5_moe", "minimax_m2")


@pytest.mark.parametrize("family", tiered(quick=QUICK, slow=[name for name in FAMILIES if name not in QUICK]))
def test_what_transformers_saves_of_an_export(family: str, tmp_path: Path) -> None:
    """In its files' own form, and with experts fused as its module has them; of each bit for bit."""
    tiny_model(family, seed=1).save_pretrained(model := tmp_path / "model")
    run("convert", model, tmp_path / "shards", "--ep-size", 2)
    run("export", tmp_path / "shards", out := tmp_path / "out", "--max-shard-size", "50KB")
    loaded = load_model(out, dtype="auto")
    for as_in_files in (True, False):
        saved = tmp_path / f"saved {as_in_files}"
        loaded.save_pretrained(saved, save_original_format=as_in_files)
        run("verify", model, saved, "--ignore-config")  # which may claim layers that the files lack
        run("verify", saved, out)
