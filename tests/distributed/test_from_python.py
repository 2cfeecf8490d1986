"""The ways in from Python, on real ranks: a loop of one's own, transformers' Trainer and trl's SFTTrainer do what
train_ep.py does with the same batches, to the last bit of the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

import expertmesh
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.data.batch import IGNORED
from expertmesh.training.data.samples import Sample
from expertmesh.training.inputs import read_inputs
from expertmesh.training.loop import data_order
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.distributed.test_train_ep import FIXED_PRODUCTS, run_main
from tests.families.configs import tiny_model
from tests.tiny import save_tokenizer

trl = pytest.importorskip("trl")

STEPS, WARM_UP, CLIP, ACCUMULATION, ROWS = 6, 2, 0.5, 2, 2
SETTINGS = [("mixtral", 2, False), ("qwen3_moe", 4, True)]
"""(family, --ep-size on 4 ranks, whether with LoRA): none has to do with who calls, and each is in one of the runs."""
IDS = [f"{family}-ep{ep}{'-lora' * lora}" for family, ep, lora in SETTINGS]


def settings_of(data: Path, ep_size: int, lora: bool) -> dict[str, Any]:
    settings = dict(
        dataset=[str(data)], eval_dataset=[str(data.with_name("held.jsonl"))],
        ep_size=ep_size, use_cpu=True, learning_rate=1e-3, max_grad_norm=CLIP, weight_decay=0.1, max_steps=STEPS,
        warmup_steps=WARM_UP, per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATION,
        router_aux_loss_coef=0.02, cpu_matmul="onednn",
    )  # fmt: skip
    return settings | (dict(adapter="lora", lora_rank=4, base_dtype="float32") if lora else {})


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)] if value is not True else [f"--{name}"]
    return flags


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in dict.fromkeys(family for family, _, _ in SETTINGS):
        paths[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, seed=1).save_pretrained(paths[family])
        save_tokenizer(paths[family])
    return paths


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    for name, number in (("train.jsonl", 100), ("held.jsonl", 13)):
        rows = [{"prompt": f"say {name} {i}", "response": "x" * (i % 9 + 1) + str(i)} for i in range(number)]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "train.jsonl"


def labelled(sample: Sample) -> dict[str, list[int]]:
    """As a data set of transformers holds it."""
    labels = [token if trained else IGNORED for token, trained in zip(sample.tokens, sample.is_trained, strict=True)]
    return {"input_ids": list(sample.tokens), "labels": labels}


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    full = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in full])
        for name, value in fill.items()
    }


def read_data(engine: expertmesh.Engine) -> tuple[list[list[list[list[dict[str, list[int]]]]]], Any]:
    """The rows that train_ep.py would read, by step, micro-batch and rank; and those to evaluate on."""
    ranks: Ranks = engine.ranks
    inputs = read_inputs(engine.config, engine.source, ranks)
    rows, held = inputs.training, inputs.evaluation
    assert rows is not None
    assert held is not None
    order = data_order(engine.config, rows, ranks.world_size)
    steps = []
    for step in range(STEPS):
        by_rank = [order.micro_batches(step, rank) for rank in range(engine.data_size)]
        micros = zip(*by_rank, strict=True)
        steps.append([[[labelled(rows[row][0]) for row in rank] for rank in micro] for micro in micros])
    return steps, [labelled(held[row][0]) for row in range(len(held))]


class Remember(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    """Ends training without a word after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def own_loop(model: Path, settings: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """A loop of one's own, in three pieces a step."""
    engine = expertmesh.load(str(model), **settings)
    steps, held = read_data(engine)
    logs: list[dict[str, Any]] = []
    mine = held[engine.data_rank :: engine.data_size]
    for number, step in enumerate(steps, 1):
        found = engine.forward_backward([collated(micro[engine.data_rank]) for micro in step])
        norm = engine.clip()
        engine.update(found)
        logs.append({"step": number, "loss": found.loss, "grad_norm": norm})
        if number == 3:
            logs.append({"step": 3, "eval_loss": engine.evaluate([collated(mine[:2]), collated(mine[2:])]).loss})
            saved = engine.save(out / "saved")
            assert engine.resume(out / "saved") == saved, "to where it is already"
    engine.export(out / "model")
    return logs


def with_trainer(
    kind: str, model: Path, settings: dict[str, Any], out: Path, resume: bool, kill: int | None
) -> list[dict[str, Any]]:
    settings = {name: value for name, value in settings.items() if name not in ("max_steps", "warmup_steps")}
    engine = expertmesh.load(str(model), **settings)
    steps, held = read_data(engine)
    # as Trainer deals them out: micro-batches in turn over ranks
    rows = [row for step in steps for micro in step for rank in micro for row in rank]
    remember = Remember()
    arguments: dict[str, Any] = dict(
        output_dir=str(out), use_cpu=True, max_steps=STEPS, warmup_steps=WARM_UP, learning_rate=1e-3,
        max_grad_norm=CLIP, weight_decay=0.1, per_device_train_batch_size=ROWS, logging_steps=1, bf16=False,
        gradient_accumulation_steps=ACCUMULATION, eval_strategy="steps", eval_steps=3, save_steps=3, report_to=[],
        disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, gradient_checkpointing=False,
    )  # fmt: skip
    given: dict[str, Any] = dict(
        model=engine,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(held),
        callbacks=[remember, *([Kill(kill)] if kill else [])],
    )

    class InOrder:
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(given["train_dataset"])

    if kind == "transformers":

        class OurTrainer(InOrder, expertmesh.Trainer):
            pass

        trainer: Any = OurTrainer(args=TrainingArguments(**arguments), data_collator=collated, **given)
    else:

        class OurSFT(InOrder, expertmesh.TrainerMixin, trl.SFTTrainer):  # type: ignore[name-defined]
            pass

        tokenizer = AutoTokenizer.from_pretrained(model)
        trainer = OurSFT(args=trl.SFTConfig(**arguments), processing_class=tokenizer, **given)
    try:
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-3") if resume else None)
    except Killed:
        return remember.logs
    trainer.save_model(str(out / "model"))
    return remember.logs


@pytest.fixture(scope="module", params=SETTINGS, ids=IDS)
def run(request: Any, models: dict[str, Path], data: Path, ranks: RankPool, tmp_path_factory: Any) -> Any:
    """A run of train_ep.py: (model, settings, its directory, its figures, its weights)."""
    family, ep_size, lora = request.param
    settings = settings_of(data, ep_size, lora)
    return train_ep(models[family], settings, ranks, tmp_path_factory.mktemp("train-ep"))


def train_ep(model: Path, settings: dict[str, Any], ranks: RankPool, out: Path) -> Any:
    flags = ["--model", str(model), "--output-dir", str(out), "--eval_steps", "3", "--save_steps", "0"]
    assert settings["cpu_matmul"] == FIXED_PRODUCTS[1]
    for code, errors in ranks.run(run_main, 4, [*flags, *flags_of(settings)], join_group=False):
        assert code == 0, errors
    figures = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return model, settings, out, figures, read(out / ("adapter" if "adapter" in settings else "hf"))


def assert_same_run(found: list[dict[str, Any]], run: Any, written: Path, since: int = 0) -> None:
    _, _, _, figures, weights = run
    for name in ("loss", "grad_norm", "eval_loss"):
        expected = {row["step"]: row[name] for row in figures if name in row and row["step"] > since}
        if found[-1]["step"] == STEPS and name == "eval_loss" and not any("eval_loss" in r for r in found[-3:]):
            expected.pop(STEPS)  # a loop of one's own that evaluates once
        ours = {row["step"]: row[name] for row in found if name in row}
        assert ours == pytest.approx(expected, rel=1e-5), name
        assert ours, name
    ours = read(written)
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], weights[name]) for name in weights), "other bits than train_ep.py's"


@pytest.mark.slow
def test_loop_of_ones_own(run: Any, ranks: RankPool, tmp_path: Path) -> None:
    model, settings, *_ = run
    logs = ranks.run(own_loop, 4, model, settings, tmp_path)[0]
    assert_same_run(logs, run, tmp_path / "model")


@pytest.mark.slow
def test_transformers_trainer(run: Any, ranks: RankPool, tmp_path: Path) -> None:
    """Killed after its checkpoint and resumed, it ends with the same bits."""
    model, settings, *_ = run
    first = ranks.run(with_trainer, 4, "transformers", model, settings, tmp_path, False, 4)[0]
    assert [row["step"] for row in first if "loss" in row] == [1, 2, 3]
    rest = ranks.run(with_trainer, 4, "transformers", model, settings, tmp_path, True, None)[0]
    assert rest[0]["step"] == 4
    assert_same_run([*first, *rest], run, tmp_path / "model")
    if settings.get("adapter") != "lora":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


@pytest.mark.slow
def test_trl(run: Any, ranks: RankPool, tmp_path: Path) -> None:
    """Its own collator and its own ideas of a forward."""
    model, settings, *_ = run
    logs = ranks.run(with_trainer, 4, "trl", model, settings, tmp_path, False, None)[0]
    assert_same_run(logs, run, tmp_path / "model")


@pytest.mark.release
def test_loop_of_ones_own_through_stages(models: dict[str, Path], data: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Both ranks of a pipeline are given the same batches."""
    settings = settings_of(data, 2, lora=False) | {"pp_size": 2}
    run = train_ep(models["mixtral"], settings, ranks, tmp_path / "train-ep")
    logs = ranks.run(own_loop, 4, models["mixtral"], settings, tmp_path)
    assert logs[0] == logs[3]
    assert_same_run(logs[0], run, tmp_path / "model")


def evaluated(model: Path, rows: list[dict[str, list[int]]], out: Path) -> list[float]:
    """The loss over rows that do not come out even: by itself, with metrics, in batches of another size, and of data
    without a length; and that of a run that ends with its best model."""

    def evaluate(data: Any, size: int, metrics: Any = None, **more: Any) -> float:
        settings: dict[str, Any] = dict(use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False)
        args = TrainingArguments(str(out), per_device_eval_batch_size=size, **(settings | more))
        trainer = expertmesh.Trainer(
            engine, args, collated, datasets.Dataset.from_list(rows), data, compute_metrics=metrics
        )
        if more:
            trainer.train()
        return trainer.evaluate()["eval_loss"]

    engine = expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn")
    table, streamed = datasets.Dataset.from_list(rows), datasets.IterableDataset.from_generator(lambda: iter(rows))
    losses = [evaluate(table, 2), evaluate(table, 2, lambda _: {}), evaluate(table, 3, lambda _: {})]
    losses += [evaluate(streamed, 2)]
    saves: dict[str, Any] = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    best = evaluate(table, 2, load_best_model_at_end=True, max_steps=2, **saves)
    assert dist.get_rank() or (out / "checkpoint-2" / "trainer_state.json").is_file()
    return [*losses, best]


def test_evaluations_of_trainer(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Each sequence counts once, however many ranks there are and whatever is made of it."""
    rows = [{"input_ids": [*range(3, 8 + i)], "labels": [*range(3, 8 + i)]} for i in range(7)]
    (alone,) = ranks.run(evaluated, 1, models["mixtral"], rows, tmp_path / "alone")
    assert alone[:4] == pytest.approx([alone[0]] * 4, rel=1e-6)
    for found in ranks.run(evaluated, 2, models["mixtral"], rows, tmp_path / "two"):
        assert found[:4] == pytest.approx(alone[:4], rel=1e-6)


def trained(model: Path, rows: list[dict[str, list[int]]], out: Path, logging_steps: int) -> tuple[list[float], float]:
    """(losses that are logged, the loss of the whole run)."""
    engine = expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn")
    args = TrainingArguments(
        str(out), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", per_device_train_batch_size=1,
        max_steps=2, logging_steps=logging_steps,
    )  # fmt: skip
    trainer = expertmesh.Trainer(engine, args, collated, datasets.Dataset.from_list(rows))
    loss = trainer.train().training_loss
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs], loss


def test_the_loss_of_a_whole_run(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Is that of all ranks, which have unequally many targets, also where no step was logged."""
    rows = [{"input_ids": [*range(3, 8 + 5 * i)], "labels": [*range(3, 8 + 5 * i)]} for i in range(7)]
    (logged, _), _ = ranks.run(trained, 2, models["mixtral"], rows, tmp_path, 1)
    for _, loss in ranks.run(trained, 2, models["mixtral"], rows, tmp_path, 9):
        assert loss == pytest.approx(sum(logged) / 2, rel=1e-6)


def refused_by_trainer(model: Path, size: str) -> str:
    settings: Any = {size: 2}
    engine = expertmesh.load(str(model), use_cpu=True, **settings)
    with pytest.raises(expertmesh.ExpertMeshError, match=f"{size}: Trainer gives every rank other sequences") as told:
        expertmesh.Trainer(model=engine, args=TrainingArguments("unused", use_cpu=True))
    return str(told.value)


@pytest.mark.parametrize("size", ["pp_size", "cp_size"])
def test_trainer_refuses_ranks_with_the_same_sequences(ranks: RankPool, models: dict[str, Path], size: str) -> None:
    for said in ranks.run(refused_by_trainer, 2, models["mixtral"], size):
        assert "take the engine's step in a loop of your own, or train_ep.py" in said


def given_other_batches(model: Path, size: str) -> list[str]:
    """What ranks of a pipeline or a context-parallel group are told whose batches differ, in all that a batch has."""
    settings: Any = {size: 2}
    engine = expertmesh.load(str(model), use_cpu=True, **settings)
    ids = torch.arange(3, 12)[None]
    own = {"input_ids": ids + engine.ranks.rank, "labels": ids}
    cases: list[Any] = [own, {"input_ids": ids, "labels": own["input_ids"]}, None if engine.ranks.rank else own]
    said = []
    for run in (engine.step, lambda batch: engine.evaluate([batch])):
        for case in cases:
            try:
                run(case)
            except expertmesh.ExpertMeshError as error:
                said.append(str(error))
    assert engine.step({"input_ids": ids, "labels": ids}).tokens == 9
    return said


@pytest.mark.parametrize("size", ["pp_size", "cp_size"])
def test_ranks_that_work_on_the_same_sequences(ranks: RankPool, models: dict[str, Path], size: str) -> None:
    for said in ranks.run(given_other_batches, 2, models["mixtral"], size):
        assert len(said) == 6
        assert all("ranks 0 and 1 are given different batches" in line for line in said)
        assert all("engine.data_rank of engine.data_size" in line for line in said)


def refused(model: Path) -> list[str]:
    """What ranks that differ are told, all of them."""
    engine = expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn", ep_size=2)
    ids = torch.arange(3, 12)[None]
    batch, said = {"input_ids": ids, "labels": ids}, []
    cases: list[Any] = [[batch] * (1 + dist.get_rank())]
    cases += [batch if dist.get_rank() == other else {"input_ids": ids} for other in (1, 0)]
    for case in cases:
        try:
            engine.step(case)
        except expertmesh.ExpertMeshError as error:
            said.append(str(error))
    engine.step(batch if dist.get_rank() else None)
    return said


def test_ranks_that_differ(ranks: RankPool, models: dict[str, Path]) -> None:
    for said in ranks.run(refused, 2, models["mixtral"]):
        assert "ranks have 1 to 2 micro-batches in one step" in said[0]
        assert "a batch has no labels" in said[1]
        assert said[2] == said[1]


def step_in_context_parallel(model: Path, cp_size: int, packed: bool) -> tuple[float, float, int, int]:
    """Padding on the left, or two samples in a sequence; the ranks of a group are given the same batch."""
    engine = expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn", cp_size=cp_size, packing=packed)
    ids = torch.arange(3, 25).view(2, 11)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(22) != 0).view(2, 11).long()}
    if packed:
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[*range(4), *range(7)]] * 2)}
    found = engine.step(batch)
    return found.loss, found.grad_norm, found.tokens, engine.data_size


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_context_parallelism(ranks: RankPool, models: dict[str, Path], packed: bool) -> None:
    (alone,) = ranks.run(step_in_context_parallel, 1, models["mixtral"], 1, packed)
    for found in ranks.run(step_in_context_parallel, 2, models["mixtral"], 2, packed):
        assert found == pytest.approx(alone, rel=1e-5)
