"""Runs of adapters: saved, resumed, refused, and with everything else that a run can have."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expertmesh.checkpoints.training_state.state_table import StateReader
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model
from tests.distributed.whole_runs import FIXED_PRODUCTS, run_main
from tests.tiny import relative_error, save_tokenizer

FAMILIES = ["mixtral", "gpt_oss"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp("base") / family for family in FAMILIES}
    for family, path in paths.items():
        hf_model(Case([], family=family), seed=1).save_pretrained(path)
        save_tokenizer(path)
    return paths


def train(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: object) -> Any:
    """(exit code, standard error) of each rank."""
    argv = ["--model", model, "--dataset", data, "--output-dir", out, "--use-cpu", "--adapter", "lora"]
    argv += ["--lora-rank", 4, "--learning-rate", "1e-2", "--max-steps", 3, "--ep-size", 2, "--logging-steps", 1]
    argv += ["--global-batch-size", 8, "--per-device-train-batch-size", 8 // world_size, *FIXED_PRODUCTS, *flags]
    return ranks.run(run_main, world_size, [str(flag) for flag in argv], join_group=False)


def trained(*arguments: Any) -> dict[str, torch.Tensor]:
    """The exported adapter of a run that comes through."""
    results = train(*arguments)
    assert [code for code, _ in results] == [0] * len(results), results
    adapter: dict[str, torch.Tensor] = load_file(arguments[4] / "adapter" / "adapter_model.safetensors")
    return adapter


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_runs_end_alike(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, family: str
) -> None:
    """On the same ranks bit for bit (of one family), on others but for rounding; a checkpoint holds no weights of the
    base."""
    whole = trained(ranks, 4, models[family], tiny_data, tmp_path / "whole", "--save-steps", 2)
    saved = tmp_path / "whole" / "checkpoints" / "step-00000002"
    marker = json.loads((saved / "checkpoint.json").read_text())
    assert marker["base"] == {"path": str(models[family])}
    assert "samples" in marker["facts"]["model"]["model.safetensors:"]
    for world_size in (4, 2) if family == "mixtral" else (2,):
        out = tmp_path / f"on-{world_size}"
        shutil.copytree(saved, out / "checkpoints" / saved.name)
        resumed = trained(ranks, world_size, models[family], tiny_data, out, "--resume", "auto")
        errors = {name: relative_error(resumed[name], tensor) for name, tensor in whole.items()}
        assert max(errors.values()) <= (0 if world_size == 4 else 1e-4), errors
    saved_names = StateReader(saved / "state").read_metadata().state_dict_metadata
    of_model = [name for name in saved_names if name.startswith("model.")]
    assert len(of_model) >= len(whole) // 8
    assert all("lora_" in name for name in of_model)


@pytest.mark.release
def test_what_does_not_belong_together_is_refused(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path
) -> None:
    trained(ranks, 2, models["mixtral"], tiny_data, tmp_path / "run", "--save-steps", 2)
    saved = str(tmp_path / "run" / "checkpoints" / "step-00000002")

    def refused(*flags: object, model: Path = models["mixtral"]) -> str:
        results = train(
            ranks, 1, model, tiny_data, tmp_path / "other", "--overwrite-output-dir", "--ep-size", 1, *flags
        )
        assert [code for code, _ in results] == [2]
        return results[0][1]

    other = tmp_path / "another base"
    hf_model(Case([]), seed=2).save_pretrained(other)
    save_tokenizer(other)
    said = refused("--resume", saved, model=other)
    assert "is of another model" in said
    assert "--allow-changed model" in said
    assert str(models["mixtral"]) in said
    assert "had --lora-rank 4, this one has 8" in refused("--resume", saved, "--lora-rank", 8)
    assert "--lora-targets" in refused("--resume", saved, "--lora-targets", "experts")
    assert "had --adapter lora, this one has none" in refused("--resume", saved, "--adapter", "none")
    assert "--lora-targets shared-experts: this model has none" in refused("--lora-targets", "shared-experts")
    assert "did you mean q_proj" in refused("--lora-targets", "q_prj")
    assert "neither a group (" in refused("--lora-targets", "layers.(0")
    assert "leave out --freeze" in refused("--freeze", "router")
    assert "--optim muon" in refused("--optim", "muon")
    assert "have no router bias" in refused("--router-bias-update-rate", "0.001")
    assert "--adapter-format per-expert" in train(
        ranks, 1, models["gpt_oss"], tiny_data, tmp_path / "g", "--ep-size", 1, "--adapter-format", "per-expert"
    )[0][1]  # fmt: skip


@pytest.mark.release
@pytest.mark.parametrize(
    "flags",
    [
        ["--packing", "--max-seq-length", 64],
        ["--optim", "adamw_torch_8bit"],
        ["--optim", "adamw_bf16"],
        ["--bf16", "--gradient-checkpointing", "full"],
        ["--eval-ratio", 0.2, "--eval-steps", 2, "--generate-steps", 2, "--generate-max-new-tokens", 4],
        ["--check-replicas", 1, "--dense-shard", "hybrid", "--router-aux-loss-coef", 0.02],
        ["--gradient-checkpointing", "selective", "--max-grad-norm", 0.1, "--lora-targets", "q_proj,experts,router"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_whatever_else_a_run_has(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, flags: list[object]
) -> None:
    """Several ranks end with the adapter of one, as near as the numbers have digits."""
    # four where the optimizer or the shards are others; what a rank computes otherwise by itself shows with two
    world_size = 4 if {"--optim", "--dense-shard", "--max-grad-norm"} & set(flags) else 2
    several = trained(ranks, world_size, models["mixtral"], tiny_data, tmp_path / "several", "--save-steps", 0, *flags)
    one = [*flags, "--ep-size", 1]
    alone = trained(ranks, 1, models["mixtral"], tiny_data, tmp_path / "alone", "--save-steps", 0, *one)
    found, want = (torch.cat([run[name].float().flatten() for name in sorted(run)]) for run in (several, alone))
    assert relative_error(found, want) < (0.05 if "--bf16" in flags or "adamw_bf16" in flags else 1e-4)
    assert any(tensor.any() for name, tensor in several.items() if "lora_B" in name)
