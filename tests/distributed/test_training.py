"""What train_ep.py does besides steps: evaluation, the best checkpoint, early stops, sample generations, the report."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, MixtralForCausalLM

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Ended, Runs, Told, assert_same_bits, tell
from tests.rounding import near


@pytest.fixture
def chats(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> Runs:
    """Runs over 40 conversations of unequal length."""
    rows = [
        [{"role": "user", "content": "say " * (i % 5)}, {"role": "assistant", "content": str(i) * (i % 9)}]
        for i in range(40)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return Runs(ranks, tiny_model, file, tmp_path)


def by_transformers(path: Path, data: Path, exported: Path) -> tuple[float, int]:
    """Mean loss of the answers and the number of their tokens, conversation by conversation.

    Args:
        exported: what has the tokenizer and its chat template.
    """
    model = MixtralForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    total, targets = 0.0, 0
    for row in map(json.loads, data.read_text().splitlines()):
        question = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        text = str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        answer = tokenizer(text.removeprefix(str(question)), add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"] + answer])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, -len(answer) - 1 : -1]
        total += float(F.cross_entropy(logits, tokens[0, -len(answer) :], reduction="sum"))
        targets += len(answer)
    return total / targets, targets


@pytest.mark.slow
def test_evaluation_is_that_of_transformers(chats: Runs) -> None:
    """The last evaluation against the exported model and tokenizer in transformers."""
    ended = chats(2, f"--ep-size 2 --max-steps 3 --learning-rate 1e-3 --eval-dataset {chats.data}")
    loss, targets = by_transformers(ended.out / "hf", chats.data, ended.out / "hf")
    (found,) = ended.lines("eval_loss")
    assert found["eval_target_tokens"] == targets
    assert found["eval_loss"] == near(loss)
    assert found["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_before_the_first_step(chats: Runs) -> None:
    """The model as it was given is evaluated, answers, and never counts as the best, as no checkpoint has it. Training
    is the same."""
    common = f"--ep-size 2 --max-steps 2 --learning-rate 1 --eval-dataset {chats.data}"
    flags = f"{common} --eval-on-start --generate-steps 2 --load-best-model-at-end --save-steps 2"
    flags += " --generate-max-new-tokens 4"
    ended = chats(2, flags)
    begun, trained = ended.lines("eval_loss")
    assert (begun["step"], trained["step"]) == (0, 2)
    assert begun["eval_loss"] == near(by_transformers(chats.model, chats.data, ended.out / "hf")[0])
    assert begun["eval_loss"] < trained["eval_loss"]
    assert [line["step"] for line in ended.lines("generations")] == [0, 2]
    assert "; before training" in ended.printed
    assert "hf has the weights of the last step, 2, and of the best evaluation (step 2" in ended.printed
    assert_same_bits(ended.weights, chats(2, common, "without").weights)
    for left in ("checkpoints", "hf"):  # of a run that was killed in its first step
        shutil.rmtree(ended.out / left)
    (ended.out / "finished.json").unlink()
    again = chats(2, f"{flags} --resume auto")
    assert [line["step"] for line in again.lines("eval_loss")] == [0, 2]


def evaluated(runs: Runs, model: Path) -> float:
    """The loss of a model over the held-out quarter."""
    flags = "--eval-ratio 0.25 --max-steps 1 --learning-rate 0 --no-export --save-steps 0 --overwrite-output-dir"
    loss: float = runs(1, f"--model {model} {flags}", "evaluated").values("eval_loss")[0]
    return loss


def best_of(ended: Ended) -> str:
    link = ended.checkpoint("best")
    assert link.is_symlink()
    return link.resolve().name


def tell_within(argv: list[str], directory: Path) -> Told:
    """train_ep.py on this rank, started in a directory."""
    with contextlib.chdir(directory):
        return tell(argv)


def test_the_best_score(chats: Runs, tmp_path: Path) -> None:
    """By a function of the user's own, which fails at two evaluations, and without evaluation data: the best one is
    that of the highest score, which decides about an early stop and the export. Its answers are transformers'."""
    # of the check before the first step, then of two answers at each evaluation
    figures = "[0, 1, 2, 5, 'none', 3.5, 3, 0, 1]"
    function = f"FIGURES = iter({figures})\n\n\ndef of(prompt, answer, expected):\n    return next(FIGURES)\n"
    (tmp_path / "own_scores.py").write_text(function)
    asked = tmp_path / "asked.jsonl"
    rows = [{"prompt": "say 1", "response": "1"}, {"prompt": "say a few words", "response": "a few words"}]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        f"--ep-size 2 --max-steps 9 --eval-steps 1 --save-steps 9 --early-stopping-patience 2 --learning-rate 1e-2 "
        f"--eval-generate {asked} --eval-score own_scores:of --generate-max-new-tokens 5 --load-best-model-at-end"
    )
    ended = chats(2, flags, call=tell_within, given=[tmp_path])
    assert ended.values("eval_score") == [1.5, None, 3.25, 0.5, None]
    assert ended.values("eval_answers") == [2] * 5
    assert "ValueError: gave 'none', not a finite number" in ended.printed
    assert "step 3: eval score 3.2500 of 2 answers" in ended.printed
    assert "stopped early: the last 2 evaluations not better by 0; the best is 3.2500, of step 3" in ended.printed
    assert "hf has the weights of the best evaluation (step 3, score 3.2500)" in ended.printed
    assert best_of(ended) == "step-00000003"
    model = MixtralForCausalLM.from_pretrained(ended.out / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(ended.out / "hf")
    for one, row in zip(ended.values("answers")[2], rows, strict=True):
        assert one["reference"].strip() == row["response"]
        tokens = torch.tensor([tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
        assert one["text"] == tokenizer.decode(out[0, tokens.shape[1] :])


@pytest.mark.slow
def test_early_stop_and_best_checkpoint(chats: Runs) -> None:
    """A rate that makes things worse after a while: training stops, the best checkpoint outlives --save-total-limit,
    its weights are exported, and a restart does not train on. Every step is in a logged interval."""
    flags = (
        "--ep-size 2 --eval-ratio 0.25 --eval-steps 1 --early-stopping-patience 3 --learning-rate 0.05 "
        "--max-grad-norm 0 --lr-scheduler-type constant --max-steps 60 --save-steps 1 --save-total-limit 2 "
        "--load-best-model-at-end --per-device-train-batch-size 8 --logging-steps 100"
    )
    ended = chats(2, flags)
    losses = ended.values("eval_loss")
    best = losses.index(min(losses)) + 1
    assert best + 3 == len(losses) < 60
    assert sum(ended.values("steps")) == len(losses)
    assert ended.saved == [best, best + 2, best + 3]
    assert best_of(ended) == f"step-{best:08d}"
    assert evaluated(chats, ended.out / "hf") == near(min(losses))
    exported = ended.weights
    again = chats(2, f"{flags} --resume auto")
    assert again.values("eval_loss") == losses
    assert_same_bits(again.weights, exported)


def test_of_improvements_the_best_is_kept(chats: Runs) -> None:
    """Every evaluation is better than the one before it: of their checkpoints the best stays, beside those that
    --save-steps asks for and the last; and the last lines say which weights are exported."""
    flags = "--eval-ratio 0.25 --eval-steps 1 --learning-rate 1e-3 --lr-scheduler-type constant --save-steps 4"
    ended = chats(1, f"{flags} --max-steps 7")
    losses = ended.values("eval_loss")
    assert losses == sorted(losses, reverse=True)
    assert ended.saved == [4, 7]
    hf, saved = ended.out / "hf", ended.out / "checkpoints"
    assert f"{hf} has the weights of the last step, 7, and of the best evaluation (step 7, loss" in ended.printed
    # spoilt: the best is no longer the last, and is told how to be had
    flags += " --max-steps 9 --resume auto --learning-rate 2.0 --max-grad-norm 0"
    ended = chats(1, flags)
    assert ended.saved == [4, 7, 8, 9]
    assert "hf has the weights of the last step, 9, not those of the best evaluation (step 7, loss" in ended.printed
    assert f"`expertmesh-checkpoints export {saved}/best DIR` exports them" in ended.printed
    assert "--load-best-model-at-end exports them" in ended.printed
    ended = chats(1, f"{flags} --load-best-model-at-end")
    assert "has the weights of the best evaluation (step 7" in ended.printed
    assert f"export {saved}/step-00000009 DIR` exports them" in ended.printed


@pytest.mark.slow
def test_best_checkpoint_after_going_back(chats: Runs) -> None:
    """Resumed from before the best step, at a rate that spoils the model: that step is made again, with other weights,
    and what counts as best is what was best at the point of resumption. In another directory it is found, too."""
    flags = (
        "--eval-ratio 0.25 --eval-steps 2 --save-steps 2 --load-best-model-at-end --max-steps 4 --max-grad-norm 0 "
        "--lr-scheduler-type constant --learning-rate"
    )
    first = chats(2, f"{flags} 1e-3", "first")
    losses = first.values("eval_loss")
    assert losses[1] < losses[0]
    for out in ("second", "first"):
        ended = chats(2, f"{flags} 2.0 --resume {first.checkpoint(2)}", out)
        assert best_of(ended) == "step-00000002"
        assert ended.values("eval_loss")[-1] > losses[0]
        assert evaluated(chats, ended.out / "hf") == near(losses[0])


@pytest.mark.slow
def test_resumed_run_logs_the_same_intervals(chats: Runs) -> None:
    flags = "--logging-steps 4 --save-steps 3 --max-steps"
    whole = chats(2, f"{flags} 6", "whole")
    chats(2, f"{flags} 3 --lr-scheduler-type constant", "parts")
    parts = chats(2, f"{flags} 6 --resume auto --no-export", "parts")
    for name in ("step", "steps", "tokens"):
        assert parts.values(name) == whole.values(name)
    assert whole.values("step") == [3, 4, 6]


@pytest.mark.slow
def test_router_collapse_is_warned_of_once(chats: Runs) -> None:
    """No router is quite even: over the second step and the fourth, two windows, the load is above 1."""
    ended = chats(2, "--ep-size 2 --max-steps 4 --router-warn-steps 2 --router-warn-load 1 --no-export")
    (warning,) = (line for line in ended.lines("warning") if "--router-warn-load 1;" in line["warning"])
    assert warning["step"] == 2
    tokens = torch.tensor(ended.values("expert_tokens")[:2]).sum(0)
    load = float((tokens.amax(1) / tokens.double().mean(1)).max())
    assert f"{load:.2f} times the mean in 2 steps" in warning["warning"]


@pytest.mark.parametrize("prompt", ["", "Once upon"])
def test_answers_of_plain_text(runs: Runs, tmp_path: Path, prompt: str) -> None:
    """No chat template, and nothing before the first trained token: the first words are the prompt."""
    texts = [f"{i} says hello to the world of experts" for i in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = f"--dataset {tmp_path}/text.jsonl --max-steps 1 --generate-steps 1 --generate-max-new-tokens 3"
    ended = runs(1, f"{flags} --generate-prompts '{prompt}'" if prompt else flags)
    assert ended.errors == ""
    (answers,) = ended.values("generations")
    if prompt:
        assert [one["prompt"] for one in answers] == [prompt]
        assert "reference" not in answers[0]
    else:  # with the token that ends it
        assert all(len(one["prompt"]) > 1 for one in answers)
        assert [one["prompt"] + one["reference"] for one in answers] == [f"{text}</s>" for text in texts[:3]]
    assert not (ended.out / "hf" / "chat_template.jinja").exists()


@pytest.mark.slow
def test_answers_while_training(chats: Runs) -> None:
    """Every so many steps and at the end, and nothing of training is different for it."""
    flags, asking = "--ep-size 2 --max-steps 3 --eval-ratio 0.1", "--generate-steps 2 --generate-max-new-tokens 5"
    found = chats(2, f"{flags} {asking}", "asked")
    assert_same_bits(found.weights, chats(2, flags, "plain").weights)
    answered = found.lines("generations")
    assert [line["step"] for line in answered] == [2, 3]
    for one in (one for line in answered for one in line["generations"]):
        assert "[INST]" in one["prompt"]
        assert one["reference"].endswith("</s>")
    ended = chats(2, f"{flags} {asking} --generate-prompts 'say hello' 'say nothing'", "own")
    last = ended.values("generations")[-1]
    assert [re.findall(r"\[INST\] *(.*?) *\[/INST\]", one["prompt"]) for one in last] == [
        ["say hello"],
        ["say nothing"],
    ]
    # against transformers' own model and cache, after the last step
    model = MixtralForCausalLM.from_pretrained(ended.out / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(ended.out / "hf")
    for one in last:
        tokens = torch.tensor([tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
        assert one["text"] == tokenizer.decode(out[0, tokens.shape[1] :])


@pytest.mark.slow
def test_report_and_trackers(chats: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = chats(
        2,
        "--ep-size 2 --max-steps 3 --eval-ratio 0.1 --eval-steps 2 --report-to tensorboard --generate-steps 2 "
        "--packing --logging-steps 2",
    )
    report = (ended.out / "report.html").read_text()
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', report, re.DOTALL)
    data = json.loads(text)["runs"][0]
    assert {"loss", "eval_loss", "grad_norm", "learning_rate", "peak_memory_mb"} <= data["curves"].keys()
    assert data["state"] == "finished"
    assert "<summary>after step 2</summary>" in report
    events = EventAccumulator(str(next(ended.out.rglob("events.out.tfevents*")).parent))
    events.Reload()
    for name in ("eval_loss", "loss"):
        assert [scalar.step for scalar in events.Scalars(name)] == [2, 3]
    logged = ended.lines("loss")
    assert [line["step"] for line in logged] == [2, 3], "every second step, and the last"
    assert all(line["dropped_tokens"] == 0 for line in logged)
    assert all(0 <= entropy <= math.log(8) for line in logged for entropy in line["router_entropy"])
    # two experts a token, in each layer, over both steps of the interval
    assert all([sum(layer) for layer in line["expert_tokens"]] == [2 * line["tokens"]] * 2 for line in logged)
