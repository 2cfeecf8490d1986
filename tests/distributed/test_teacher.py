"""`--teacher`: equal to transformers' models in a plain loop with trl's divergence, the same with every parallel
layout, and when resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.hf_model.build import build_reference
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.tasks.dense_teacher import _places
from tests.checkpoints.test_upcycle import dense_model
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, assert_equal_weights, assert_same_bits, flip_a_bit
from tests.families.configs import VOCABULARY, tiny_model
from tests.rounding import OTHER_ORDER, near
from tests.tiny import save_tokenizer

RECORDS, STEPS, TOP_K, WEIGHT = 8, 3, 5, 0.7
FAMILIES = {"student": "mixtral", "teacher": "qwen3_moe", "scaled": "granitemoe"}
DENSE = ("dense", "tied")
"""Models without experts that scale their logits; the head of one is its embedding."""
FIGURES = ("loss", "teacher_kl", "cross_entropy", "grad_norm")


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"say {i}:", "completion": " hello" * (1 + i % 3) + f" {i}"} for i in range(RECORDS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        paths[name] = tmp_path_factory.mktemp(name)
        model = tiny_model(family, seed=number, num_key_value_heads=4)
        with torch.no_grad():  # predictions that are worth learning
            model.get_output_embeddings().weight.mul_(20)
        model.save_pretrained(paths[name])
        save_tokenizer(paths[name])
    for name in DENSE:
        paths[name] = tmp_path_factory.mktemp(name)
        changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "tie_word_embeddings": name == "tied"}
        dense = dense_model("granite", **changes)
        with torch.no_grad():
            dense.get_output_embeddings().weight.mul_(20)
        dense.save_pretrained(paths[name], max_shard_size="40KB")
        save_tokenizer(paths[name])
    return paths


@pytest.fixture
def runs(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> Runs:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return Runs(ranks, models["student"], data, tmp_path)


def flags(models: dict[str, Path], teacher: str = "teacher") -> str:
    return (
        f"--teacher {models[teacher]} --teacher-top-k {TOP_K} --teacher-weight {WEIGHT} --max-steps {STEPS} "
        "--learning-rate 1e-3 --lr-scheduler-type constant --weight-decay 0 --adam-epsilon 1e-4 --logging-steps 1 "
        f"--global-batch-size {RECORDS} --per-device-train-batch-size 2 --per-device-eval-batch-size 2 --save-steps 0"
    )


def in_a_plain_loop(student: Path, teacher: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    losses = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    tokenizer, model = AutoTokenizer.from_pretrained(student), AutoModelForCausalLM.from_pretrained(student)
    guide = AutoModelForCausalLM.from_pretrained(teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-4)
    lines = []
    for _ in range(STEPS):
        sums, number = torch.zeros(2, dtype=torch.float64), 0
        for row in rows():
            encoded = tokenizer(row["prompt"] + row["completion"], return_offsets_mapping=True)
            ids = encoded["input_ids"] + [tokenizer.eos_token_id] * (encoded["input_ids"][-1] != tokenizer.eos_token_id)
            ends = [end for _, end in encoded["offset_mapping"]][: len(ids)]
            is_trained = [end > len(row["prompt"]) for end in ends] + [True] * (len(ids) - len(ends))
            tokens = torch.tensor([ids])
            at = torch.tensor(is_trained[1:]).nonzero().flatten()
            own = model(tokens).logits[0, at].log_softmax(-1)
            with torch.no_grad():
                theirs, top = guide(tokens).logits[0, at].log_softmax(-1).topk(TOP_K)
            pair = losses.add_tail_bucket(own.gather(1, top)), losses.add_tail_bucket(theirs)
            sums = sums + torch.stack(
                [losses.compute_divergence(*pair, alpha=0.0).sum(), -own.gather(1, tokens[0, at + 1, None]).sum()]
            )
            number += len(at)
        divergence, cross_entropy = sums / number
        loss = WEIGHT * divergence + (1 - WEIGHT) * cross_entropy
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values = (loss.detach(), divergence.detach(), cross_entropy.detach(), norm)
        lines.append(dict(zip(FIGURES, (float(value) for value in values), strict=True)))
    return lines, dict(model.state_dict())


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("student", "teacher"),
        ("student", "dense"),
        pytest.param("scaled", "student", marks=pytest.mark.slow),
        pytest.param("student", "tied", marks=pytest.mark.slow),
    ],
)
def test_as_in_a_plain_loop(student: str, teacher: str, runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    theirs, weights = in_a_plain_loop(models[student], models[teacher])
    ended = Runs(runs.ranks, models[student], runs.data, runs.directory)(2, f"{flags(models, teacher)} --ep-size 2")
    assert theirs[0]["teacher_kl"] > 0.3
    for one, other in zip(ended.lines("loss"), theirs, strict=True):
        for name in FIGURES:
            assert one[name] == near(other[name], other["cross_entropy"], 2 * OTHER_ORDER), (one["step"], name)
    found = AutoModelForCausalLM.from_pretrained(ended.out / "hf").state_dict()
    assert_equal_weights({name: found[name] for name in weights}, weights)


def test_a_tied_head_is_read_as_the_embedding(models: dict[str, Path]) -> None:
    """One that is not tied has to be in the files."""
    tied, untied = (build_reference(open_source(models[name]).config, "eager", torch.float32) for name in DENSE[::-1])
    assert tied.state_dict().keys() - _places(tied, models["tied"]).values() == {"lm_head.weight"}
    assert untied.state_dict().keys() == {*_places(untied, models["dense"]).values()}
    with pytest.raises(ExpertMeshError, match=r"tensor lm_head.weight of GraniteForCausalLM is missing"):
        _places(untied, models["tied"])


LAYOUTS = {
    "packed": (2, "--packing --ep-size 2"),
}
FURTHER = {
    "tp 2": (2, "--tp-size 2 --ep-size 2"),
    "cp 2": (2, "--cp-size 2"),
    "pp 2 ep 2": (4, "--pp-size 2 --ep-size 2"),
    "hybrid": (4, "--ep-size 2 --dense-shard hybrid"),
    "packed cp 2": (4, "--packing --cp-size 2 --ep-size 2"),
    "cp 2 tp 2": (4, "--cp-size 2 --tp-size 2"),
    "pp 2 tp 2": (4, "--pp-size 2 --tp-size 2"),
}


@pytest.mark.parametrize("teacher", ["teacher", pytest.param("dense", marks=[pytest.mark.slow, pytest.mark.sample(3)])])
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sample(3)]) for name in FURTHER)]
)
def test_with_any_layout(layout: str, teacher: str, runs: Runs, models: dict[str, Path]) -> None:
    number, of_layout = (LAYOUTS | FURTHER)[layout]
    held_out = f"--eval-dataset {runs.data} --eval-steps 2"
    wanted = runs(1, f"{flags(models, teacher)} {held_out}", "one")
    found = runs(number, f"{flags(models, teacher)} {held_out} {of_layout}", "other")
    for key in ("loss", "eval_loss"):
        for one, other in zip(found.lines(key), wanted.lines(key), strict=True):
            for name in FIGURES if key == "loss" else ("eval_loss", "eval_teacher_kl", "eval_cross_entropy"):
                assert one[name] == near(
                    other[name], other["cross_entropy" if key == "loss" else "eval_cross_entropy"]
                ), (key, one["step"], name)
    assert_equal_weights(found.weights, wanted.weights)


def test_a_resumed_run_finds_the_predictions(runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    saving = flags(models).replace("--save-steps 0", "--save-steps 2") + " --ep-size 2"
    whole = runs(2, saving, "whole")
    stopped = runs.directory / "stopped"
    shutil.copytree(whole.out, stopped)
    shutil.rmtree(stopped / "hf")
    shutil.rmtree(stopped / "checkpoints" / f"step-{STEPS:08d}")
    (stopped / "finished.json").unlink()
    changed = stopped / "teacher" / "training.npy"
    kept = changed.read_bytes()
    runs.refuses(2, saving.replace(f"top-k {TOP_K}", "top-k 4") + " --resume auto", "--teacher-top-k", out=stopped)
    other = saving.replace(str(models["teacher"]), str(models["student"]))
    runs.refuses(2, f"{other} --resume auto", "is of another teacher", out=stopped)
    without = saving.replace(f"--teacher {models['teacher']}", "")
    runs.refuses(2, f"{without} --resume auto", "this one has no --teacher", "--allow-changed objective", out=stopped)
    assert changed.read_bytes() == kept
    flip_a_bit(changed)
    resumed = runs(2, f"{saving} --resume auto", stopped)
    assert "training.npy: is damaged" in resumed.printed
    assert changed.read_bytes() == kept
    assert_same_bits(resumed.weights, whole.weights)
    more = f"{saving} --resume auto --max-steps {STEPS + 1} --no-export"
    assert "read from teacher/" in runs(2, more, stopped).printed


@pytest.mark.slow
def test_its_own_teacher_teaches_nothing(runs: Runs, models: dict[str, Path]) -> None:
    """The student is where it is to go, with some tokens or all."""
    for top_k in (TOP_K, VOCABULARY):
        alone = f"--teacher {models['student']} --teacher-top-k {top_k} --max-steps 1 --save-steps 0 --no-export"
        (line,) = runs(1, alone, f"of {top_k}").lines("loss")
        assert line["loss"] == near(0.0, added=line["cross_entropy"])
        assert line["grad_norm"] < 1e-4
        assert line["cross_entropy"] > 1


def test_what_is_refused(runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(models["teacher"], other)
    vocabulary: dict[str, Any] = json.loads((other / "tokenizer.json").read_text())
    entries = vocabulary["model"]["vocab"]
    one, two = list(entries)[-2:]
    entries[one], entries[two] = entries[two], entries[one]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    for given, said in (
        (f"--teacher {tmp_path / 'nowhere'}", "--teacher"),
        (f"--teacher {other}", "4 tokens differ in its tokenizer and the student's"),
        (f"--teacher {models['teacher']} --teacher-top-k 100000", "--teacher-top-k 100000"),
        (f"--teacher {models['teacher']} --teacher-weight 0", "--teacher-weight 0.0: must be more than 0"),
        (f"--teacher {models['teacher']} --task dpo", f"--teacher {models['teacher']}: --task dpo does not read it"),
    ):
        runs.refuses(1, f"{given} --max-steps 1", said)
