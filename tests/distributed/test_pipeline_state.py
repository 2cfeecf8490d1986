"""Training checkpoints and exports of pipelines: the same bytes, and the same run, however layers are spread over
ranks."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.checkpoints.training_state.marker import whole_checkpoints
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.distributed.test_resume import STEPS, flags, run, stop_at_checkpoint
from tests.distributed.test_train_ep import assert_equal_weights
from tests.families.configs import tiny_model
from tests.tiny import relative_error, save_model, save_tokenizer

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}

Layout = tuple[int, ...]
Finished = Callable[[Layout], Path]


def spread(pp: int, dp: int, ep: int, cp: int = 1, tp: int = 1) -> list[str]:
    """Flags of a parallel layout, for the global batch of 12 sequences that `flags` are about, three a forward."""
    accumulation = 4 // (dp * ep // (cp * tp))
    return [
        "--pp-size", str(pp), "--ep-size", str(ep), "--cp-size", str(cp), "--tp-size", str(tp),
        "--per-device-train-batch-size", "3", "--gradient-accumulation-steps", str(accumulation),
    ]  # fmt: skip


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deeper")
    save_model(path, **LAYERS, num_key_value_heads=4)  # which tensor and context parallelism divide by four
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def finished(ranks: RankPool, model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Of a layout, as `spread` takes it, a whole run, with a checkpoint at step 4 of 6; made when first asked for."""

    @cache
    def made(layout: Layout) -> Path:
        out = tmp_path_factory.mktemp("finished") / "run"
        run(ranks, size(layout), [*flags(model, tiny_data, out), *spread(*layout)])
        assert [path.name for path in whole_checkpoints(out / "checkpoints")] == ["step-00000006", "step-00000004"]
        return out

    return made


def size(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


STAGES, HEADS, POSITIONS = (2, 1, 2, 1, 1), (1, 1, 2, 1, 2), (1, 1, 2, 2, 1)
"""Two ranks with half of the layers each; two with half of every attention layer's heads; two with half of every
sequence. As `spread` takes them."""

ARRANGEMENTS: list[tuple[Layout, Layout]] = [
    (HEADS, STAGES),
    *((STAGES, layout) for layout in [STAGES, (1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2, 2, 1, 1)]),
    *((STAGES, layout) for layout in [(4, 1, 2, 1, 1), (2, 1, 2, 2, 1), HEADS, (2, 1, 2, 1, 2)]),
    *((HEADS, layout) for layout in [HEADS, (1, 1, 1, 1, 1), POSITIONS, (1, 1, 4, 2, 2), (2, 2, 1, 1, 2)]),
    *((POSITIONS, layout) for layout in [STAGES, HEADS, (1, 1, 4, 1, 4)]),
]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(("saved", "layout"), ARRANGEMENTS, ids=str)
def test_resume_on_any_ranks(
    ranks: RankPool, finished: Finished, model: Path, tiny_data: Path, tmp_path: Path, saved: Layout, layout: Layout
) -> None:
    whole, out = finished(saved), tmp_path / "run"
    stop_at_checkpoint(whole, out)
    run(ranks, size(layout), [*flags(model, tiny_data, out), *spread(*layout), "--resume", "auto"])
    before, after = logged(whole), logged(out)
    assert [line["step"] for line in after] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "z_loss"):
        assert [line[name] for line in after] == pytest.approx([line[name] for line in before], rel=1e-5), name
    assert [line["expert_tokens"] for line in after] == [line["expert_tokens"] for line in before]
    weights, expected = read(out / "hf"), read(whole / "hf")
    assert_equal_weights(weights, expected)
    if layout == saved:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def of_mixtral(path: Path, **changes: Any) -> None:
    save_model(path, **LAYERS, **changes)


def of_deepseek(path: Path) -> None:
    """With a layer that has no experts, and routers with correction biases."""
    model: Any = tiny_model("deepseek_v3", seed=1, num_hidden_layers=4)
    model.to(torch.bfloat16).save_pretrained(path)


RUNS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "lora": (of_mixtral, ["--adapter", "lora", "--lora-rank", "4"]),
    "8-bit": (of_mixtral, ["--optim", "adamw_torch_8bit"]),
    "muon": (of_mixtral, ["--optim", "muon"]),
    "shampoo": (of_mixtral, ["--optim", "shampoo", "--shampoo-start", "2", "--shampoo-block-size", "24"]),
    "bf16": (of_mixtral, ["--optim", "adamw_bf16"]),
    "tied": (partial(of_mixtral, tie_word_embeddings=True), []),
    "bias update": (of_deepseek, ["--router-bias-update-rate", "0.001"]),
    "chunks": (of_mixtral, ["--pipeline-chunks", "2"]),
}
TOLERANCES = {"8-bit": 3e-5, "bf16": 3e-4, "lora": 1e-4}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_state_is_resumed(ranks: RankPool, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """On the same ranks bit for bit; on one, and on four in other stages, but for rounding."""
    save, more = RUNS[name]
    save(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    whole, steps = tmp_path / "whole", ["--save-steps", "2", "--max-steps", "4", *more]
    run(ranks, 2, [*flags(tmp_path / "model", tiny_data, whole), *spread(2, 1, 1), *steps])
    saved = whole / "checkpoints" / "step-00000002"
    expected = exported(whole)
    for pp, dp, ep in ((2, 1, 1), (1, 1, 1), (4, 1, 1)):
        if name == "chunks" and pp == 4:
            continue  # eight stages of four layers
        out = tmp_path / f"{pp}-{dp}-{ep}"
        shutil.copytree(saved, out / "checkpoints" / saved.name)
        layout = spread(pp, dp, ep) + (["--pipeline-chunks", "1"] if pp == 1 else [])
        run(ranks, pp * dp * ep, [*flags(tmp_path / "model", tiny_data, out), *steps, *layout, "--resume", "auto"])
        found = exported(out)
        assert found.keys() == expected.keys()
        if pp == 2:
            assert not [key for key in expected if not torch.equal(found[key], expected[key])]
        errors = {key: relative_error(found[key], expected[key]) for key in expected}
        assert max(errors.values()) <= TOLERANCES.get(name, 2e-5), errors
        if name == "bias update":
            biases = [key for key in expected if key.endswith("e_score_correction_bias")]
            assert biases
            assert all(torch.equal(found[key], expected[key]) for key in biases)


def exported(out: Path) -> dict[str, torch.Tensor]:
    return read(out / ("adapter" if (out / "adapter").exists() else "hf"))
