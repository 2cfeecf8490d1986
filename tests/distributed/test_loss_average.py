"""`--loss-average` and `--loss-by-dataset`: plain sums over transformers' losses in one process, with every layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import LossInputs, collate
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Sample, Samples
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.tasks.sft import DATASET, WEIGHTED, by_sample
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs
from tests.rounding import near, norm_of
from tests.tiers import tiered

SIZES = {"short": 5, "long": 3}
"""Records of each data set; those of the second have longer answers."""
COMMON = (
    "--loss-by-dataset --max-steps 1 --learning-rate 0 --max-grad-norm 0 --save-steps 0 --no-export "
    "--global-batch-size 8 --per-device-train-batch-size 2 --max-seq-length 64 --eval-steps 1"
)
LAYOUTS = {"ep 2 packed": "--ep-size 2 --packing --per-device-train-batch-size 1"}
FURTHER = {
    "cp 2": "--cp-size 2",
    "cp 2 packed": "--cp-size 2 --packing",
    "pp 2": "--pp-size 2",
    "tp 2": "--tp-size 2",
}


@pytest.fixture
def data(tmp_path: Path) -> list[Path]:
    paths = []
    for name, number in SIZES.items():
        paths.append(tmp_path / f"{name}.jsonl")
        answers = [("ab " if name == "short" else "abc de ") * (i + 1) for i in range(number)]
        rows = [{"prompt": f"{name} {i}?", "response": answer} for i, answer in enumerate(answers)]
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def expected(path: Path, data: Sequence[Path], average: str) -> tuple[dict[str, float], float]:
    """(losses: of all, and of each data set; the gradient norm)."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    set_chat_template(tokenizer, "mistral")
    sums: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for file in data:
        samples = load_samples("--dataset", [str(file)], tokenizer, DataOptions(64), 0)
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            targets = tokens.masked_fill(~torch.tensor(sample.is_trained), -100)[1:]
            loss = F.cross_entropy(model(input_ids=tokens[None]).logits[0, :-1], targets, reduction="sum")
            number = int((targets != -100).sum())
            sums.setdefault(file.stem, []).append(loss / number if average == "sample" else loss)
            counts.setdefault(file.stem, []).append(1 if average == "sample" else number)
    total = torch.stack([loss for losses in sums.values() for loss in losses]).sum() / sum(map(sum, counts.values()))
    total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    of_data = {f"loss/{name}": float(torch.stack(sums[name]).sum().detach()) / sum(counts[name]) for name in sums}
    return {"loss": float(total.detach()), **of_data}, norm_of(grads)


@pytest.mark.parametrize("layout", tiered([*LAYOUTS], slow=[*FURTHER]))
def test_with_every_layout(ranks: RankPool, tiny_model: Path, tmp_path: Path, data: list[Path], layout: str) -> None:
    losses: dict[str, dict[str, float]] = {}
    given = f"--dataset {' '.join(map(str, data))} --chat-template mistral"
    for average in ("token", "sample"):
        runs = Runs(ranks, tiny_model, data[0], tmp_path)
        flags = f"{COMMON} {(LAYOUTS | FURTHER)[layout]} {given} --eval-dataset {' '.join(map(str, data))}"
        ended = runs(2, f"{flags} --loss-average {average}", out=average)
        losses[average], norm = expected(tiny_model, data, average)
        (line,), (held,) = ended.lines("loss"), ended.lines("eval_loss")
        assert line["grad_norm"] == near(norm)
        for name, loss in losses[average].items():
            assert line[name] == near(loss), (average, name)
            assert held[f"eval_{name}"] == near(loss), (average, name)
    assert all(abs(losses["token"][name] - losses["sample"][name]) > 1e-5 for name in ("loss", "loss/short"))


def test_steps_of_one_data_set(ranks: RankPool, tiny_model: Path, tmp_path: Path, data: list[Path]) -> None:
    """In an interval of several steps it is the mean over all of them; null of a data set that none has seen."""
    runs, given = Runs(ranks, tiny_model, data[0], tmp_path), f"--dataset {data[0]} {data[1]} --chat-template mistral"
    flags = f"--loss-by-dataset {given} --learning-rate 0 --save-steps 0 --no-export --max-grad-norm 0"
    alone = runs(1, f"{flags} --global-batch-size 1 --per-device-train-batch-size 1 --logging-steps 1", out="alone")
    assert all((line["loss/short"] is None) != (line["loss/long"] is None) for line in alone.lines("loss"))
    together = runs(1, f"{flags} --global-batch-size 1 --per-device-train-batch-size 1 --logging-steps 8", out="all")
    (line,) = together.lines("loss")
    for name, loss in expected(tiny_model, data, "token")[0].items():
        assert line[name] == near(loss), name
    assert "loss/short" in (tmp_path / "all" / "report.html").read_text()


def test_of_a_stream(ranks: RankPool, tiny_model: Path, tmp_path: Path, data: list[Path]) -> None:
    flags = f"{COMMON.replace('--loss-by-dataset', '').replace('--eval-steps 1', '')} --streaming --loss-average sample"
    given = f"--dataset {' '.join(map(str, data))} --chat-template mistral"
    (line,) = Runs(ranks, tiny_model, data[0], tmp_path)(1, f"{flags} {given}").lines("loss")
    assert line["loss"] == near(expected(tiny_model, data, "sample")[0]["loss"])


def test_weights_count_as_they_do_without_it() -> None:
    rows = [[Sample([1, 2, 3], [False, True, True], [1.0, 0.5, 2.0])], [Sample([4, 5], [False, True], [1.0, 3.0])]]
    batch = collate(rows, loss_inputs=LossInputs({DATASET: torch.tensor([1, 0])}), is_weighted=True)
    logprobs_N = torch.tensor([-1.0, -2.0, -4.0])
    objective = by_sample(False, True, ("a", "b"))
    loss, figures = objective.sums(logprobs_N, batch)
    assert (float(loss), objective.counted([batch])) == (16.5, 5.5)
    assert loss == WEIGHTED.loss(logprobs_N, batch.of_loss)
    assert objective.counted([batch]) == WEIGHTED.counted([batch])
    assert dict(zip(objective.figures, map(float, figures), strict=True)) == {
        "loss/a": 12.0, "share/a": 3.0, "loss/b": 4.5, "share/b": 2.5,
    }  # fmt: skip


def test_names_of_data_sets(tmp_path: Path) -> None:
    """The shortest that tell them apart."""

    def names(*given: str) -> Any:
        samples: Any = SimpleNamespace(origins=[SimpleNamespace(name=name) for name in given])
        return Samples.names.fget(samples)  # type: ignore[attr-defined]

    assert names("a/one.jsonl", "org/two", "v1.5") == ("one", "two", "v1.5")
    assert names("a/one.jsonl", "b/one.jsonl") == ("a/one.jsonl", "b/one.jsonl")
    assert names("a/one.jsonl", "a/one.jsonl") == ("a/one.jsonl#1", "a/one.jsonl#2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "dpo"}, "--task dpo does not read it; leave it out"),
        ({"teacher": "t"}, "does not work with --teacher; leave out one of them"),
        ({"train_mtp": 0.1}, "does not work with --train-mtp; leave out one of them"),
    ],
)
def test_what_they_do_not_go_with(settings: dict[str, Any], said: str) -> None:
    for flag, own in (
        ("--loss-average sample", {"loss_average": "sample"}),
        ("--loss-by-dataset", {"loss_by_dataset": True}),
    ):
        with pytest.raises(ExpertMeshError, match=f"{flag}: {said}"):
            TrainConfig(model="m", dataset=["d"], **settings, **own)
