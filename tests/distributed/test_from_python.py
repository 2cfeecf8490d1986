"""The ways in from Python, on real ranks: a loop of one's own, transformers' Trainer and trl's SFTTrainer do what
train_ep.py does with the same batches, to the last bit of the weights."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

import expertmesh
from expertmesh.training.data.batch import IGNORED
from expertmesh.training.data.samples import Sample
from expertmesh.training.run.loop import data_order
from expertmesh.training.start.inputs import read_inputs
from expertmesh.training.tasks.registry import task_of
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Ended, Runs, assert_same_bits, read
from tests.families.configs import tiny_model
from tests.rounding import near
from tests.tiers import tiered
from tests.tiny import save_tokenizer

trl = pytest.importorskip("trl")

STEPS, EVERY, WARM_UP, CLIP, ACCUMULATION, ROWS = 4, 2, 2, 0.5, 2, 2
"""EVERY: so many steps evaluates and saves a run."""
ON_CPU: dict[str, Any] = dict(use_cpu=True)
QUIET: dict[str, Any] = dict(use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False)
COMMON: dict[str, Any] = dict(
    learning_rate=1e-3, max_grad_norm=CLIP, weight_decay=0.1, max_steps=STEPS, warmup_steps=WARM_UP,
    per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATION,
)  # fmt: skip
LORA = dict(adapter="lora", lora_rank=4, base_dtype="float32")
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # family, ranks, settings: none has to do with who calls, and each is in one of the runs
    "plain": ("mixtral", 2, dict(ep_size=2)),
    "lora": ("qwen3_moe", 4, dict(ep_size=4, **LORA)),
    "stages": ("mixtral", 4, dict(ep_size=2, pp_size=2)),
}
Row = dict[str, list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in ("mixtral", "qwen3_moe")}
    for family, path in paths.items():
        tiny_model(family, seed=1).save_pretrained(path)
        save_tokenizer(path)
    return paths


Whole = Callable[[str], tuple[Path, int, dict[str, Any], Ended]]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run of train_ep.py: (model, number of ranks, settings, the run); made when first asked for."""
    directory = tmp_path_factory.mktemp("train-ep")
    for name, number in (("train", 100), ("held", 13)):
        rows = [{"prompt": f"say {name} {i}", "response": "x" * (i % 9 + 1) + str(i)} for i in range(number)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @cache
    def made(name: str) -> tuple[Path, int, dict[str, Any], Ended]:
        family, world_size, layout = SETTINGS[name]
        data = dict(dataset=[f"{directory}/train.jsonl"], eval_dataset=[f"{directory}/held.jsonl"])
        settings = {**data, **COMMON, **layout, "router_aux_loss_coef": 0.02}
        flags = " ".join(f"--{key} {value[0] if isinstance(value, list) else value}" for key, value in settings.items())
        runs = Runs(ranks, models[family], directory / "train.jsonl", directory)
        ended = runs(world_size, f"{flags} --eval_steps {EVERY} --save_steps 0", name)
        return models[family], world_size, settings | ON_CPU, ended

    return made


def labelled(sample: Sample) -> Row:
    """As a data set of transformers holds it."""
    labels = [token if trained else IGNORED for token, trained in zip(sample.tokens, sample.is_trained, strict=True)]
    return {"input_ids": list(sample.tokens), "labels": labels}


def collated(rows: list[Row]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    full = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in full])
        for name, value in fill.items()
    }


def read_data(engine: expertmesh.Engine) -> tuple[list[list[list[list[Row]]]], list[Row]]:
    """The rows that train_ep.py would read, by step, micro-batch and rank; and those to evaluate on."""
    inputs = read_inputs(engine.config, engine.source, engine.ranks, task_of(engine.config).check)
    rows, held = inputs.training, inputs.evaluation
    assert rows is not None
    assert held is not None
    order = data_order(engine.config, rows, engine.ranks.world_size)
    steps = []
    for step in range(STEPS):
        micros = zip(*(order.micro_batches(step, rank) for rank in range(engine.data_size)), strict=True)
        steps.append([[[labelled(rows[row][0]) for row in rank] for rank in micro] for micro in micros])
    return steps, [labelled(held[row][0]) for row in range(len(held))]


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
        if number in (EVERY, STEPS):
            logs.append({"step": number, "eval_loss": engine.evaluate([collated(mine[:2]), collated(mine[2:])]).loss})
        if number == EVERY:
            saved = engine.save(out / "saved")
            assert engine.resume(out / "saved") == saved, "to where it is already"
    engine.export(out / "model")
    return logs


class Killed(Exception):
    pass


class Watch(TrainerCallback):
    """Remembers what is logged, and ends training without a word after a step."""

    def __init__(self, kill: int | None):
        self.kill = kill
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill:
            raise Killed


def with_trainer(
    kind: str, model: Path, settings: dict[str, Any], out: Path, resume: bool = False, kill: int | None = None
) -> list[dict[str, Any]]:
    settings = {name: value for name, value in settings.items() if name not in ("max_steps", "warmup_steps")}
    engine = expertmesh.load(str(model), **settings)
    steps, held = read_data(engine)
    # as Trainer deals them out: micro-batches in turn over ranks
    rows = [row for step in steps for micro in step for rank in micro for row in rank]
    watch = Watch(kill)
    arguments: dict[str, Any] = dict(
        **COMMON, **QUIET, output_dir=str(out), logging_steps=1, bf16=False, eval_strategy="steps", eval_steps=EVERY,
        save_steps=EVERY, dataloader_pin_memory=False, gradient_checkpointing=False,
    )  # fmt: skip
    given: dict[str, Any] = dict(
        model=engine,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(held),
        callbacks=[watch],
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
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{EVERY}") if resume else None)
    except Killed:
        return watch.logs
    trainer.save_model(str(out / "model"))
    return watch.logs


def assert_same_run(found: list[dict[str, Any]], expected: Ended, written: Path) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        want = {row["step"]: row[name] for row in expected.lines(name)}
        assert {row["step"]: row[name] for row in found if name in row} == near(want), name
        assert want, name
    assert_same_bits(read(written), expected.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "stages"])
def test_loop_of_ones_own(whole: Whole, ranks: RankPool, tmp_path: Path, name: str) -> None:
    """All ranks of a pipeline are given the same batches."""
    model, world_size, settings, expected = whole(name)
    logs = ranks.run(own_loop, world_size, model, settings, tmp_path)
    assert logs[0] == logs[-1]
    assert_same_run(logs[0], expected, tmp_path / "model")


@pytest.mark.parametrize("name", tiered(["plain"], slow=["lora"]))
def test_transformers_trainer(whole: Whole, ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Killed after its checkpoint and resumed, it ends with the same bits."""
    model, world_size, settings, expected = whole(name)
    first = ranks.run(with_trainer, world_size, "transformers", model, settings, tmp_path, kill=EVERY + 1)[0]
    assert [row["step"] for row in first if "loss" in row] == [1, 2]
    rest = ranks.run(with_trainer, world_size, "transformers", model, settings, tmp_path, resume=True)[0]
    assert rest[0]["step"] == EVERY + 1
    assert_same_run([*first, *rest], expected, tmp_path / "model")
    if "adapter" not in settings:
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


@pytest.mark.parametrize("name", tiered(["plain"], slow=["lora"]))
def test_trl(whole: Whole, ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Its own collator and its own ideas of a forward."""
    model, world_size, settings, expected = whole(name)
    logs = ranks.run(with_trainer, world_size, "trl", model, settings, tmp_path)[0]
    assert_same_run(logs, expected, tmp_path / "model")


def trainer_of(model: Path, rows: list[Row], out: Path, held: Any = None, metrics: Any = None, **more: Any) -> Any:
    engine = expertmesh.load(str(model), **ON_CPU)
    args, data = TrainingArguments(str(out), **(QUIET | more)), datasets.Dataset.from_list(rows)
    return expertmesh.Trainer(engine, args, collated, data, held, compute_metrics=metrics)


def evaluated(model: Path, rows: list[Row], out: Path) -> list[float]:
    """The loss over rows that do not come out even: by itself, with metrics, in batches of another size, of data
    without a length, and of a run that ends with its best model."""

    def evaluate(data: Any, size: int, metrics: Any = None, **more: Any) -> float:
        trainer = trainer_of(model, rows, out, data, metrics, per_device_eval_batch_size=size, **more)
        if more:
            trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
        return loss

    table, streamed = datasets.Dataset.from_list(rows), datasets.IterableDataset.from_generator(lambda: iter(rows))
    losses = [evaluate(table, 2), evaluate(table, 2, lambda _: {}), evaluate(table, 3, lambda _: {})]
    losses += [evaluate(streamed, 2)]
    saves: dict[str, Any] = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    best = evaluate(table, 2, load_best_model_at_end=True, max_steps=2, **saves)
    assert dist.get_rank() or (out / "checkpoint-2" / "trainer_state.json").is_file()
    return [*losses, best]


def rows_of(lengths: list[int]) -> list[Row]:
    return [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]


@pytest.mark.slow
def test_evaluations_of_trainer(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Each sequence counts once, however many ranks there are and whatever is made of it."""
    rows = rows_of([5 + i for i in range(7)])
    (alone,) = ranks.run(evaluated, 1, models["mixtral"], rows, tmp_path / "alone")
    assert alone[:4] == near([alone[0]] * 4)
    for found in ranks.run(evaluated, 2, models["mixtral"], rows, tmp_path / "two"):
        assert found[:4] == near(alone[:4])


def trained(model: Path, rows: list[Row], out: Path, logging_steps: int) -> tuple[list[float], float]:
    """(losses that are logged, the loss of the whole run)."""
    more = dict(save_strategy="no", per_device_train_batch_size=1, max_steps=2, logging_steps=logging_steps)
    trainer = trainer_of(model, rows, out, **more)
    loss: float = trainer.train().training_loss
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs], loss


def test_the_loss_of_a_whole_run(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Is that of all ranks, which have unequally many targets, also where no step was logged."""
    rows = rows_of([5 + 5 * i for i in range(7)])
    (logged, _), _ = ranks.run(trained, 2, models["mixtral"], rows, tmp_path, 1)
    for _, loss in ranks.run(trained, 2, models["mixtral"], rows, tmp_path, 9):
        assert loss == near(sum(logged) / 2)


def problems(calls: list[Callable[[], Any]]) -> list[str]:
    """What is said of each."""
    said = []
    for call in calls:
        with pytest.raises(expertmesh.ExpertMeshError) as error:
            call()
        said.append(str(error.value))
    return said


def given_other_batches(model: Path, size: str) -> list[str]:
    """What ranks of a pipeline or a context-parallel group are told whose batches differ, in all that a batch has, and
    by Trainer, which gives every rank other ones."""
    settings: Any = {size: 2}
    engine = expertmesh.load(str(model), use_cpu=True, **settings)
    ids = torch.arange(3, 12)[None]
    own = {"input_ids": ids + engine.ranks.rank, "labels": ids}
    cases: list[Any] = [own, {"input_ids": ids, "labels": own["input_ids"]}, None if engine.ranks.rank else own]
    said = problems([partial(engine.step, case) for case in cases])
    said += problems([partial(engine.evaluate, [case]) for case in cases])
    assert engine.step({"input_ids": ids, "labels": ids}).tokens == 9
    return said + problems([partial(expertmesh.Trainer, engine, TrainingArguments("unused", use_cpu=True))])


@pytest.mark.parametrize("size", ["pp_size", "cp_size"])
def test_ranks_that_work_on_the_same_sequences(ranks: RankPool, models: dict[str, Path], size: str) -> None:
    for *said, by_trainer in ranks.run(given_other_batches, 2, models["mixtral"], size):
        assert len(said) == 6
        assert all("ranks 0 and 1 get different batches" in line for line in said)
        assert all("engine.data_rank of engine.data_size" in line for line in said)
        assert f"{size}: Trainer gives each rank other sequences" in by_trainer
        assert "use the engine's step in your own loop, or train_ep.py" in by_trainer


def refused(model: Path) -> list[str]:
    """What ranks that differ are told, all of them."""
    engine = expertmesh.load(str(model), **ON_CPU, ep_size=2)
    ids = torch.arange(3, 12)[None]
    batch = {"input_ids": ids, "labels": ids}
    cases: list[Any] = [[batch] * (1 + dist.get_rank())]
    cases += [batch if dist.get_rank() == other else {"input_ids": ids} for other in (1, 0)]
    said = problems([partial(engine.step, case) for case in cases])
    engine.step(batch if dist.get_rank() else None)
    return said


def test_ranks_that_differ(ranks: RankPool, models: dict[str, Path]) -> None:
    for said in ranks.run(refused, 2, models["mixtral"]):
        assert "ranks have 1 to 2 micro-batches in one step" in said[0]
        assert "a batch has no labels" in said[1]
        assert said[2] == said[1]


def step_in_context_parallel(model: Path, cp_size: int, packed: bool) -> tuple[float, float, int, int]:
    """Padding on the left, or two samples in a sequence; the ranks of a group are given the same batch."""
    engine = expertmesh.load(str(model), **ON_CPU, cp_size=cp_size, packing=packed)
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
        assert found == near(alone)


def draws(model: Path, seed: int) -> float:
    """The first random number after loading."""
    expertmesh.load(str(model), **ON_CPU, seed=seed)
    return float(torch.rand(()))


def test_ranks_draw_random_numbers_of_their_own(ranks: RankPool, models: dict[str, Path]) -> None:
    """Those of dropout and jitter: others on each rank and with another seed, and the same in another run."""
    first, again, other = (ranks.run(draws, 2, models["mixtral"], seed) for seed in (5, 5, 7))
    assert first == again
    assert len({*first, *other}) == 4
