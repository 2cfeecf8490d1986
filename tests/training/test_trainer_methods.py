"""What becomes of every method of transformers' Trainer that a class overrides behind the mix-in."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import transformers
from transformers import AutoModelForCausalLM

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError

pytestmark = pytest.mark.usefixtures("leaving_group")
ROWS = datasets.Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 8)
METHODS = {name: value for name, value in vars(transformers.Trainer).items() if callable(value) and name != "__init__"}


def overriding(names: Any, called: set[str]) -> Any:
    """A class of somebody's Trainer that notes which of these methods are called."""

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            own = getattr(transformers.Trainer, name)
            return own(*args, **kwargs) if isinstance(METHODS[name], staticmethod) else own(self, *args, **kwargs)

        return method

    return type("Mine", (transformers.Trainer,), {name: noting(name) for name in names})


def behind_mixin(kind: Any) -> Any:
    return type("Ours", (expertmesh.TrainerMixin, kind), {})


def run(kind: Any, model: Any, out: Path) -> None:
    """A short run that trains, evaluates, saves, resumes and loads the best model."""
    args = transformers.TrainingArguments(
        str(out), use_cpu=True, max_steps=2, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, logging_steps=1, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = kind(model, args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    trainer.save_model(str(out / "model"))


def test_each_method_is_called_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Of those that Trainer itself calls: behind the mix-in each one is called in a run, or refused, and never both."""
    by_trainer, by_ours = set[str](), set[str]()
    run(overriding(METHODS, by_trainer), AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "theirs")
    engine = expertmesh.load(str(tiny_model), use_cpu=True)
    trainer = "expertmesh.training.api.hf_trainer"
    with patch(f"{trainer}.uncalled_methods", return_value=[]), patch(f"{trainer}._learns_labels", return_value=False):
        run(behind_mixin(overriding(METHODS, by_ours)), engine, tmp_path / "ours")
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    behind_mixin(overriding(by_ours, set()))(engine, args, train_dataset=ROWS)
    uncalled = by_trainer - by_ours
    assert {"create_optimizer", "save_model", "_move_model_to_device"} < uncalled
    assert by_ours > {"training_step", "compute_loss", "get_batch_samples", "prediction_step", "evaluation_loop"}
    for name in uncalled:
        with pytest.raises(ExpertMeshError, match=rf"Mine\.{name} would never be called"):
            behind_mixin(overriding([name], set()))(engine, args, train_dataset=ROWS)


def test_methods_before_the_mixin_are_called(tiny_model: Path, tmp_path: Path) -> None:
    """Where the mix-in's own are reached by `super`; what no code of the engine calls is refused there, too."""
    called: list[str] = []

    class Before:
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            called.append("training_step")
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    class NoDecay:
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return []

    def train(kind: Any) -> None:
        args = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
        )
        kind(expertmesh.load(str(tiny_model), use_cpu=True), args, train_dataset=ROWS).train()

    train(type("Ours", (Before, expertmesh.TrainerMixin, transformers.Trainer), {}))
    assert called == ["training_step"]
    with pytest.raises(ExpertMeshError, match=r"NoDecay\.get_decay_parameter_names would never be called.*: leave it"):
        train(type("Ours", (NoDecay, expertmesh.TrainerMixin, transformers.Trainer), {}))
