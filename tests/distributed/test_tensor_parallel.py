"""Heads, dense MLPs and the vocabulary divided by ranks: the first law holds of them too."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import assert_equal_weights, lines, read, start
from tests.tiny import relative_error, save_model, save_tokenizer

HEADS: dict[str, Any] = {"num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("divided")
    save_model(path, **HEADS)
    return path


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--optim", "adamw_torch_8bit"),
        ("--adapter", "lora"),
        ("--adapter", "lora", "--base-dtype", "nf4"),
        ("--adapter", "lora", "--base-dtype", "fp8"),
    ],
    ids=" ".join,
)
def test_a_run(ranks: RankPool, tiny_data: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Packed, evaluated, asked, saved; and resumed by ranks that divide among more, sequences too, or nothing."""
    save_model(tmp_path / "model", **HEADS)
    save_tokenizer(tmp_path / "model")
    common = (
        *("--model", tmp_path / "model", "--dataset", tiny_data, "--eval-ratio", 0.2, "--eval-steps", 2),
        *("--generate-steps", 3, "--packing", "--max-seq-length", 90, "--global-batch-size", 8),
        *("--per-device-train-batch-size", 1, "--learning-rate", "1e-3", "--lr-scheduler-type", "constant"),
        *("--router-z-loss-coef", 0.01, "--save-steps", 1, "--gradient-checkpointing", "selective"),
        *("--per-device-eval-batch-size", 3, "--generate-max-new-tokens", 8, "--check-replicas", 2, *flags),
    )

    def run(out: Path, world_size: int, *more: object, steps: int = 5) -> None:
        argv = (*common, "--output-dir", out, "--max-steps", steps, *more)
        assert start(ranks, world_size, *argv) == [(0, "")] * world_size

    run(tmp_path / "whole", 2, "--ep-size", 2, "--save-steps", 0)
    run(tmp_path / "divided", 4, "--ep-size", 2, "--tp-size", 2, steps=2)
    run(tmp_path / "divided", 4, "--ep-size", 4, "--tp-size", 4, "--resume", "auto", steps=3)
    run(tmp_path / "divided", 4, "--ep-size", 2, "--tp-size", 2, "--cp-size", 2, "--resume", "auto", steps=4)
    run(tmp_path / "divided", 2, "--ep-size", 1, "--resume", "auto", "--save-steps", 0)
    for key in ("loss", "eval_loss", "grad_norm", "z_loss", "tokens"):
        found, expected = (
            {line["step"]: line[key] for line in lines(tmp_path / out, key)} for out in ("divided", "whole")
        )
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5), key
    answers, expected = (lines(tmp_path / out, "generations")[-1] for out in ("divided", "whole"))
    assert answers["generations"] == expected["generations"]
    if "--adapter" not in flags:
        assert_equal_weights(read(tmp_path / "divided" / "hf"), read(tmp_path / "whole" / "hf"))
        return
    found, expected = (read(tmp_path / out / "adapter") for out in ("divided", "whole"))
    # a B begins at zero: some of its first gradients are noise, of which Adam's step takes the sign
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-3


@pytest.mark.slow
def test_elastic(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks in place of four keep --tp-size, which does not divide three."""
    common = (
        *("--model", tiny_model, "--dataset", tiny_data, "--output-dir", tmp_path, "--per-device-train-batch-size", 2),
        *("--lr-scheduler-type", "constant", "--ep-size", 2, "--tp-size", 2, "--save-steps", 1, "--ranks-per-node", 2),
    )
    assert start(ranks, 4, *common, "--max-steps", 1) == [(0, "")] * 4
    elastic = (*common, "--max-steps", 2, "--resume", "auto", "--elastic")
    code, errors = start(ranks, 3, *elastic)[0]
    assert code == 2
    assert "--tp-size 2 does not divide the 3 ranks; use 1 or 3" in errors
    assert start(ranks, 2, *elastic) == [(0, "")] * 2
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (settings["tp_size"], settings["ep_size"], settings["global_batch_size"]) == (2, 2, 4)
    assert lines(tmp_path, "loss")[-1]["step"] == 2


def test_sizes_that_do_not_come_out_even(
    ranks: RankPool, model: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    argv = ("--dataset", tiny_data, "--output-dir", tmp_path / "out")
    for flags, said in (
        (("--tp-size", 4), "--tp-size 4 does not divide the 2 ranks; use 1 or 2"),
        (("--tp-size", 2, "--cp-size", 2), "make groups of 4 ranks, which do not divide the 2 ranks"),
        (("--tp-size", 2, "--dense-shard", "hybrid"), "--tp-size 2 does not divide --ep-size 1"),
    ):
        code, errors = start(ranks, 2, "--model", model, *argv, *flags)[0]
        assert code == 2
        assert said in errors
    for path, flags, said in (
        (
            tiny_model,
            ("--tp-size", 4),
            "does not divide the 2 key and value heads of this model (num_key_value_heads); use 1 or 2",
        ),
        (model, ("--tp-size", 4, "--cp-size", 2), "attention heads of this model's layers that --tp-size 4 leaves"),
    ):
        code, errors = start(ranks, 4, "--model", path, *argv, *flags)[0]
        assert code == 2
        assert said in errors
    assert not (tmp_path / "out").exists()
