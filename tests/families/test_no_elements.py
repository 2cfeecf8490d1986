"""Parameters without elements, as a family builds them whose config has no shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.training.data.batch import collate
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.families.configs import tiny_config, tiny_model
from tests.families.test_packing import loss_of, packable
from tests.parity.case import random_samples
from tests.rounding import near
from tests.tiny import save_tokenizer

NONE_SHARED = {"deepseek_v3": {"n_shared_experts": 0}, "qwen2_moe": {"shared_expert_intermediate_size": 0}}
"""Of the first transformers has a plan to divide them, of the second none."""


@pytest.mark.slow
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


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("family", NONE_SHARED)
def test_built_and_packed(family: str) -> None:
    theirs = tiny_model(family, seed=1, **NONE_SHARED[family])
    assert any(not parameter.numel() for parameter in theirs.parameters())
    samples = random_samples([13, 4, 9], vocabulary=290)
    found = loss_of(packable(family, "eager", NONE_SHARED[family]), collate([samples]))
    losses = []
    for sample in samples:
        with torch.no_grad():
            logits = theirs(torch.tensor([sample.tokens]), use_cache=False).logits[0, :-1]
        targets = torch.tensor(sample.tokens[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none")[sample.is_trained[1:]])
    assert found == near(float(torch.cat(losses).sum()))
