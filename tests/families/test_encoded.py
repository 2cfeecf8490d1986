"""Models that come in FP8 and MXFP4, trained and exported at EP 4."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.sharding import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, sharded_model
from tests.distributed.test_checkpoints import read
from tests.distributed.test_train_ep import FIXED_PRODUCTS, run_main
from tests.encoded import save_fp8, save_mxfp4
from tests.families.configs import tiny_model
from tests.tiny import save_tokenizer

SAVE: dict[str, Callable[[Any, Path], None]] = {"deepseek_v3": save_fp8, "gpt_oss": save_mxfp4}
WIDTH: dict[str, dict[str, int]] = {"deepseek_v3": {}, "gpt_oss": {"intermediate_size": 64}}
"""Of experts in MXFP4, a multiple of 32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in SAVE}
    for family, path in paths.items():
        SAVE[family](tiny_model(family, seed=1, **WIDTH[family]), path)
        save_tokenizer(path)
    return paths


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(4, 4, "hybrid")], ids=str)
@pytest.mark.parametrize("family", SAVE)
def test_ranks_read_what_transformers_widens(
    ranks: RankPool, models: dict[str, Path], family: str, topology: Topology
) -> None:
    """Each its own rows, from within blocks too, with the bits that one process gives."""
    found = ranks.run(_logits, 4, models[family], topology, family)[0]
    alone = ranks.run(_logits, 1, models[family], Topology(1, 1), family)[0]
    assert found[1].keys() == alone[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in alone[1].items())
    theirs = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.bfloat16).float().eval()
    torch.testing.assert_close(found[0], theirs(TOKENS_BS).logits, rtol=1e-5, atol=1e-5)


TOKENS_BS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def _logits(path: Path, topology: Topology, family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, _, _ = sharded_model(path, topology, Case([], family=family, changes=WIDTH[family]))
    logits = model.eval()(TOKENS_BS).logits
    return logits, in_full(dict(model.named_parameters()))


@pytest.mark.parametrize("family", SAVE)
def test_trained_and_exported(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, family: str
) -> None:
    """The export is bf16, its config no longer says that it is quantised, and in transformers it gives the logits of
    the sharded model that it was written from."""
    argv = ["--model", str(models[family]), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    argv += ["--max-steps", "2", "--save-steps", "2", "--learning-rate", "1e-3", "--ep-size", "4", *FIXED_PRODUCTS]
    results = ranks.run(run_main, 4, [*argv, "--per-device-train-batch-size", "2"], join_group=False)
    assert [code for code, _ in results] == [0] * 4, results
    hf = tmp_path / "hf"
    assert "quantization_config" not in json.loads((hf / "config.json").read_text())
    assert {tensor.dtype for name, tensor in read(hf).items() if "bias" not in name} == {torch.bfloat16}
    resaved = tmp_path / "checkpoints" / "step-00000002" / "model" / "config.json"
    assert "quantization_config" not in json.loads(resaved.read_text())
    sharded, _ = ranks.run(_logits, 4, hf, Topology(4, 4), family)[0]
    exported = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    torch.testing.assert_close(sharded, exported(TOKENS_BS).logits, rtol=1e-5, atol=1e-5)
