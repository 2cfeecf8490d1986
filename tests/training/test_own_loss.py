"""Which Trainers' losses an engine computes itself, and what it refuses of the others; on one rank."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.api.hf_trainer import _LabelLoss
from tests.distributed.own_losses import Smoothed, collate, focal, tokens

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("leaving_group"), pytest.mark.filterwarnings("ignore")]
BASE: dict[str, Any] = dict(
    use_cpu=True, report_to=[], max_steps=1, save_strategy="no", disable_tqdm=True, bf16=False,
    remove_unused_columns=False, dataloader_pin_memory=False, per_device_train_batch_size=2,
)  # fmt: skip
PAIRS = [{"prompt": f"say {i}", "chosen": " hello", "rejected": " no"} for i in range(4)]


def behind(kind: Any) -> Any:
    return type("Ours", (expertmesh.TrainerMixin, kind), {})


@pytest.fixture
def engine(tiny_model: Path) -> expertmesh.Engine:
    return expertmesh.load(str(tiny_model), use_cpu=True)


def made(kind: Any, engine: Any, out: Path, args: Any = None, **given: Any) -> Any:
    args = args or transformers.TrainingArguments(str(out), **BASE)
    rows = datasets.Dataset.from_list(tokens())
    return behind(kind)(engine, args=args, train_dataset=rows, **{"data_collator": collate, **given})


def test_the_engine_computes_the_cross_entropy_alone(engine: expertmesh.Engine, tmp_path: Path) -> None:
    """Of classes that have no loss of their own; a class derived from the user's takes TrainerMixin's place in it."""

    class Kept(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    class Logged(transformers.Trainer):
        def training_step(self, *args: Any, **more: Any) -> Any:
            return super().training_step(*args, **more)

    smoothed = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **BASE)
    sft = trl.SFTConfig(str(tmp_path), **BASE)
    dft = trl.SFTConfig(str(tmp_path), loss_type="dft", **BASE)
    for kind, given, is_fast in (
        (transformers.Trainer, {}, True), (Kept, {}, True), (trl.SFTTrainer, {"args": sft}, True),
        (Logged, {}, False), (Smoothed, {}, False), (transformers.Trainer, {"args": smoothed}, False),
        (trl.SFTTrainer, {"args": dft}, False), (transformers.Trainer, {"compute_loss_func": focal}, False),
    ):  # fmt: skip
        trainer = made(kind, engine, tmp_path, **given)
        assert isinstance(trainer, _LabelLoss) is is_fast, (kind, given)
        assert isinstance(trainer, kind)
        assert type(trainer).__name__ == "Ours"


def test_what_is_refused(engine: expertmesh.Engine, tiny_model: Path, tmp_path: Path) -> None:
    """By name, before the first update."""

    class Summed(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    with pytest.raises(ExpertMeshError, match=r"did not call self\.accelerator\.backward\(loss\)"):
        made(Summed, engine, tmp_path).train()
    with pytest.raises(ExpertMeshError, match="RewardTrainer trains a classifier"):
        made(trl.RewardTrainer, engine, tmp_path, trl.RewardConfig(str(tmp_path), **BASE))
    pairs: dict[str, Any] = {
        "args": trl.DPOConfig(str(tmp_path), **BASE),
        "train_dataset": datasets.Dataset.from_list(PAIRS),
    }
    for reference, said in ((engine, "ref_model is the engine that is trained"), ("DIR", "complete on each rank")):
        with pytest.raises(ExpertMeshError, match=said):
            behind(trl.DPOTrainer)(engine, ref_model=reference, **pairs)
    tokens_alone: dict[str, Any] = {"add_tokens": ["<tool>"], "train_new_tokens": True}
    adapted = expertmesh.load(str(tiny_model), use_cpu=True, adapter="lora", **tokens_alone)
    with pytest.raises(ExpertMeshError, match="train_new_tokens: of the head, only the new tokens' rows are trained"):
        behind(trl.DPOTrainer)(adapted, **pairs)
    made(Smoothed, adapted, tmp_path).train()  # which reads logits


def test_arguments_by_place_are_as_the_class_has_them(engine: expertmesh.Engine, tmp_path: Path) -> None:
    """DPOTrainer takes a reference before the training arguments."""
    args = trl.DPOConfig(str(tmp_path), **BASE)
    other = expertmesh.load(str(engine.source.path), use_cpu=True)
    trainer = behind(trl.DPOTrainer)(engine, other, args, train_dataset=datasets.Dataset.from_list(PAIRS))
    assert trainer.ref_model is other.model
    assert not any(parameter.requires_grad for parameter in other.model.parameters())
    assert all(parameter.requires_grad for parameter in engine.model.parameters())
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(0.693147, abs=1e-5), "that of equal models"


def test_evaluations_are_the_classes_own(engine: expertmesh.Engine, tmp_path: Path) -> None:
    """Against the same loss of transformers' model."""
    rows = datasets.Dataset.from_list(tokens()[:6])
    args = transformers.TrainingArguments(str(tmp_path), **BASE, per_device_eval_batch_size=3)
    ours = made(Smoothed, engine, tmp_path, args, eval_dataset=rows).evaluate()["eval_loss"]
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.source.path, dtype=torch.float32)
    theirs = Smoothed(model, args, collate, eval_dataset=rows).evaluate()["eval_loss"]
    assert ours == pytest.approx(theirs, rel=1e-5)
