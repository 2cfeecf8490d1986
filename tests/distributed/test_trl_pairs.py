"""The mix-in before trl's DPOTrainer: equal to that in one process, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from tests.distributed.pool import RankPool
from tests.distributed.test_dpo import LOSSES, PAIRS, STEPS, added_up, by_trl, models, rows  # noqa: F401
from tests.distributed.whole_runs import assert_equal_weights
from tests.rounding import OTHER_ORDER, near

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
ARGUMENTS: dict[str, Any] = dict(
    use_cpu=True, bf16=False, max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0,
    max_grad_norm=1.0, adam_epsilon=1e-4, beta=0.5, logging_steps=1, report_to=[], save_strategy="no",
    disable_tqdm=True, router_aux_loss_coef=0.0, gradient_checkpointing=False, dataloader_pin_memory=False,
    eval_strategy="steps", eval_steps=STEPS,
)  # fmt: skip
TRAINED = (
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
EVALUATED = ("eval_loss", "eval_rewards/chosen", "eval_rewards/margins", "eval_logps/rejected")


class Ours(expertmesh.TrainerMixin, trl.DPOTrainer):  # type: ignore[name-defined]
    pass


def trainer_of(path: Path, out: Path, settings: dict[str, Any], **given: Any) -> Any:
    held = {"eval_dataset": datasets.Dataset.from_list(rows()[:5])} if "eval_strategy" in settings else {}
    return Ours(
        model=expertmesh.load(str(path), use_cpu=True, **given.pop("loaded", {})),
        args=trl.DPOConfig(str(out), **settings), processing_class=AutoTokenizer.from_pretrained(path),
        train_dataset=datasets.Dataset.from_list(rows()), **held, **given,
    )  # fmt: skip


def ours(path: Path, out: Path, settings: dict[str, Any], loaded: dict[str, Any]) -> list[dict[str, float]]:
    trainer = trainer_of(path, out, ARGUMENTS | settings, loaded=loaded)
    trainer.train()
    trainer.save_model(str(out / "model"))
    return list(trainer.state.log_history)


ON: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, dict(per_device_train_batch_size=PAIRS), {}),
    "ep 2": (2, dict(per_device_train_batch_size=2, gradient_accumulation_steps=2), dict(ep_size=2)),
}


@pytest.mark.parametrize(
    ("family", "loss", "on"),
    [
        ("mixtral", "sigmoid", "ep 2"),
        pytest.param("mixtral", "sigmoid", "one rank", marks=pytest.mark.slow),
        pytest.param("granitemoe", "ipo", "ep 2", marks=pytest.mark.slow),
    ],
)
def test_as_trl(family: str, loss: str, on: str, ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    of_loss = LOSSES[loss][1]
    held = datasets.Dataset.from_list(rows()[:5])
    evaluates: dict[str, Any] = dict(eval_strategy="steps", eval_steps=STEPS, per_device_eval_batch_size=5)
    theirs, weights = by_trl(models[family], tmp_path / "trl", held, **of_loss, **evaluates)
    number, settings, loaded = ON[on]
    logs = ranks.run(ours, number, models[family], tmp_path / "ours", settings | of_loss, loaded)[0]
    for key, names in (("loss", TRAINED), ("eval_loss", EVALUATED)):
        found, wanted = ([line for line in told if key in line] for told in (logs, theirs))
        assert len(found) == len(wanted) > 0
        for one, other in zip(found, wanted, strict=True):
            for name in names:
                assert one[name] == near(other[name], added_up(other), 2 * OTHER_ORDER), (one["step"], name)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "model").state_dict()
    assert_equal_weights({name: exported[name] for name in weights}, weights)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(loss_type=["hinge"]), r"loss_type=\['hinge'\]: the loss of pairs is sigmoid or ipo alone"),
    (dict(loss_type=["sigmoid", "sft"]), r"loss_type=\['sigmoid', 'sft'\]"),
    (dict(label_smoothing=0.1), "label_smoothing=0.1: the loss of pairs is DPO's or IPO's as published"),
    (dict(sync_ref_model=True), "sync_ref_model=True: the reference is the model as it is before training"),
]


def test_what_is_refused(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    ranks.run(refused, 1, models["mixtral"], tmp_path)


def refused(path: Path, out: Path) -> None:
    for settings, said in REFUSED:
        with pytest.raises(ExpertMeshError, match=said):
            trainer_of(path, out, {"use_cpu": True, "report_to": [], **settings})
    with pytest.raises(ExpertMeshError, match=r"ref_model: not possible .* is the engine's model"):
        trainer_of(path, out, {"use_cpu": True}, ref_model=AutoModelForCausalLM.from_pretrained(path))
    with pytest.raises(ExpertMeshError, match="compute_metrics: not possible for DPOTrainer"):
        trainer_of(path, out, {"use_cpu": True}, compute_metrics=dict)

    class OfLabels(expertmesh.TrainerMixin, trl.KTOTrainer):  # type: ignore[name-defined]
        pass

    with pytest.raises(ExpertMeshError, match=r"KTOTrainer computes its own loss.* --task dpo or kto"):
        OfLabels(model=expertmesh.load(str(path), use_cpu=True), args=trl.KTOConfig(str(out), use_cpu=True))
