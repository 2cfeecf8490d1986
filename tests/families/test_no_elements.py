"""Parameters without elements, as a family builds them whose config has no shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from tests.distributed.pool import RankPool
from tests.distributed.test_train_ep import run_main
from tests.families.configs import tiny_config
from tests.tiny import save_tokenizer


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_trained_converted_and_exported(
    ranks: RankPool, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    config: Any = tiny_config("afmoe")
    config.num_shared_experts = 0
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(config)
    empty = {name for name, parameter in theirs.named_parameters() if not parameter.numel()}
    assert empty
    theirs.save_pretrained(model)
    save_tokenizer(model)
    argv = ["--model", model, "--dataset", tiny_data, "--output-dir", out, "--use-cpu", "--ep-size", 2]
    argv += ["--max-steps", 2, "--save-steps", 2, "--per-device-train-batch-size", 4, "--learning-rate", "1e-2"]
    results = ranks.run(run_main, 2, [str(flag) for flag in argv], join_group=False)
    assert [code for code, _ in results] == [0] * 2, results
    loaded: Any = AutoModelForCausalLM.from_pretrained(out / "hf", output_loading_info=True)
    trained, told = loaded
    assert not told["missing_keys"]
    assert empty <= set(trained.state_dict())
    assert not torch.equal(trained.lm_head.weight, theirs.lm_head.weight)

    def run(*arguments: Any) -> int:
        return checkpoints_main([str(argument) for argument in arguments])

    assert run("convert", out / "hf", tmp_path / "shards", "--ep-size", 2) == 0
    assert run("export", tmp_path / "shards", tmp_path / "back") == 0
    for other in (tmp_path / "shards", tmp_path / "back", out / "checkpoints" / "step-00000002"):
        assert run("verify", out / "hf", other) == 0, capsys.readouterr().out
        assert run("verify", model, other) == 1
    assert run("inspect", tmp_path / "shards", "--check") == 0
