"""Weights of messages and records: the weighted mean of transformers' losses in one process, with every layout."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

import expertmesh
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.formats import Columns
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.run.loop import _collated
from expertmesh.training.steps.evaluate import evaluate
from expertmesh.training.steps.step import compute_gradients
from expertmesh.training.tasks.sft import WEIGHTED
from expertmesh.training.tasks.task import TaskInputs
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, in_our_layout
from tests.distributed.whole_runs import Runs
from tests.families.configs import tiny_model
from tests.rounding import OTHER_ORDER, gradient_errors, near
from tests.tiny import save_tokenizer

RECORDS, CAPACITY = 8, 90
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 packed": (2, dict(ep_size=2, packing=True)),
}
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "1, full": (1, dict(cross_entropy="full")),
    "4 ep 2 cp 2": (4, dict(ep_size=2, cp_size=2)),
    "4 ep 2 pp 2": (4, dict(ep_size=2, pp_size=2)),
    "4 ep 2 tp 2": (4, dict(ep_size=2, tp_size=2)),
    "1": (1, {}),
    "4 ep 2 hybrid": (4, dict(ep_size=2, dense_shard="hybrid")),
    "4 cp 2 packed": (4, dict(ep_size=4, cp_size=2, packing=True)),
    "2 tp 2": (2, dict(tp_size=2)),
    "4 pp 2 packed": (4, dict(ep_size=2, pp_size=2, packing=True)),
}


def turns(number: int) -> list[tuple[str, str, float]]:
    """(question, answer, the answer's weight)"""
    weights = (0.25, 1.0, 0.0, 2.5)
    return [(f"q{number}{i}", "ab" * (i + 1) + "c" * (number % 3), weights[(number + i) % 4]) for i in range(2)]


def record_weight(number: int) -> float:
    return (1.0, 0.5, 3.0)[number % 3]


def record(number: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for question, answer, weight in turns(number):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "weight": weight})
    return {"messages": messages, "importance": record_weight(number)}


def pieces(number: int) -> list[tuple[str, float]]:
    """The text and the weight of each of its parts, written from the record."""
    parts = []
    for i, (question, answer, weight) in enumerate(turns(number)):
        parts.append((f"{' ' if i else '<s> '}[INST] {question} [/INST]", 0.0))
        parts.append((f" {answer}</s>", weight * record_weight(number)))
    return parts


def samples_of(path: Path) -> Samples:
    tokenizer = AutoTokenizer.from_pretrained(path)
    set_chat_template(tokenizer, "mistral")
    options = DataOptions(CAPACITY, Columns(weight="importance"))
    return load_samples("--dataset", [str(path / "data.jsonl")], tokenizer, options, 0)


def ours(path: Path, settings: dict[str, Any]) -> Any:
    engine = expertmesh.load(str(path), use_cpu=True, **settings)
    rows = make_rows(samples_of(path), engine.config.packing, CAPACITY, 0)
    order = DataOrder(len(rows), engine.data_size, 1, -(-len(rows) // engine.data_size), seed=0)
    run: Any = SimpleNamespace(
        inputs=SimpleNamespace(training=rows, stream=None),
        order=order,
        engine=engine,
        batch_maker=engine.batch_maker,
        task_inputs=TaskInputs(),
    )
    before = evaluate(engine.model, rows, 2, engine.mesh, engine.batch_maker, WEIGHTED)
    result = compute_gradients(engine.model, _collated(run, 0), engine.balance.weights, WEIGHTED)
    grads = in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    return before, result, grads


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in ("mixtral", "granitemoe"):
        paths[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, seed=1, num_key_value_heads=4).save_pretrained(paths[family])
        save_tokenizer(paths[family])
        (paths[family] / "data.jsonl").write_text("".join(json.dumps(record(n)) + "\n" for n in range(RECORDS)))
    return paths


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> dict[str, Any]:
    """Of each family, (the loss, gradients, targets)."""
    found = {}
    for family, path in models.items():
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = tiny_model(family, seed=1, num_key_value_heads=4).train()
        total, divisor, targets = torch.zeros(()), 0.0, 0
        for number in range(RECORDS):
            tokens, weights = [], []
            for text, weight in pieces(number):
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                tokens += ids
                weights += [weight] * len(ids)
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
            losses = F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
            total = total + (torch.tensor(weights[1:]) * losses).sum()
            divisor += sum(weights[1:])
            targets += sum(weight > 0 for weight in weights[1:])
        loss = total / divisor
        loss.backward()
        found[family] = float(loss.detach()), in_our_layout(model, "grad"), targets
    return found


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_with_any_layout(layout: str, ranks: RankPool, models: dict[str, Path], wanted: dict[str, Any]) -> None:
    compare("mixtral", *(LAYOUTS | FURTHER)[layout], ranks, models, wanted)


def test_of_a_family_that_scales_its_logits(ranks: RankPool, models: dict[str, Path], wanted: dict[str, Any]) -> None:
    compare("granitemoe", 2, dict(ep_size=2), ranks, models, wanted)


def compare(
    family: str, number: int, settings: dict[str, Any], ranks: RankPool, models: Any, wanted: dict[str, Any]
) -> None:
    loss, grads, targets = wanted[family]
    results = ranks.run(ours, number, models[family], settings)
    for before, result, _ in results:
        assert before.loss == near(loss)
        assert result.loss == near(loss)
        assert before.targets == result.targets == targets
    ours_full = results[0][2]
    errors = gradient_errors(ours_full, grads)
    assert max(errors.values()) <= OTHER_ORDER, errors


@pytest.mark.slow
def test_a_run_heeds_them(ranks: RankPool, models: dict[str, Path], wanted: dict[str, Any], tmp_path: Path) -> None:
    """In training and in evaluation; without the record's weights the loss is another one."""
    path = models["mixtral"]
    runs = Runs(ranks, path, path / "data.jsonl", tmp_path)
    flags = (
        "--max-steps 1 --learning-rate 0 --global-batch-size 8 --logging-steps 1 --save-steps 0 --no-export "
        f"--ep-size 2 --chat-template mistral --eval-dataset {path / 'data.jsonl'}"
    )
    run = runs(2, f"{flags} --weight-column importance", "one")
    assert run.lines("loss")[0]["loss"] == near(wanted["mixtral"][0])
    assert run.lines("eval_loss")[0]["eval_loss"] == near(wanted["mixtral"][0])
    assert "8 with weights of their own" in run.printed
    other = runs(2, flags, "other")
    assert other.lines("loss")[0]["loss"] != pytest.approx(wanted["mixtral"][0], rel=1e-3)
