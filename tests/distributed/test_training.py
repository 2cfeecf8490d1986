"""What train_ep.py does besides steps: packing, evaluation, the best checkpoint, early stops, sample generations, the
report."""

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, MixtralForCausalLM

from expertmesh import train_ep
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.distributed.test_train_ep import FIXED_PRODUCTS, assert_equal_weights, run_main, train

ARRANGEMENTS = [(1, 1), (4, 2), (4, 4)]


def lines(out: Path, key: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have a key."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if key in line]


def start(ranks: RankPool, world_size: int, *argv: object) -> list[tuple[int, str]]:
    results: list[tuple[int, str]] = ranks.run(run_main, world_size, [*map(str, argv), "--use-cpu"], join_group=False)
    return results


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 conversations of unequal length."""
    file = tmp_path_factory.mktemp("chats") / "train.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": "say " * (i % 5)},
                {"role": "assistant", "content": str(i) * (i % 9)},
            ]
        }
        for i in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.release
@pytest.mark.parametrize("how", ["--packing", "--group-by-length"])
def test_rows_of_any_kind_at_any_arrangement(
    ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path, how: str
) -> None:
    """The chat template, packed or grouped by length, gives the same weights and the same evaluation everywhere."""
    common = (
        "--max-seq-length",
        "128",
        "--eval-ratio",
        "0.2",
        "--eval-steps",
        "2",
        "--router-z-loss-coef",
        "0.01",
        how,
    )
    weights, losses = [], []
    for world_size, ep_size in ARRANGEMENTS:
        out = tmp_path / f"{world_size}-{ep_size}"
        batch = ("--per-device-train-batch-size", str(4 // world_size), "--per-device-eval-batch-size", "3")
        weights.append(train(ranks, world_size, tiny_model, chats, out, *batch, *common, "--ep-size", str(ep_size)))
        losses.append([line["eval_loss"] for line in lines(out, "eval_loss")])
        assert {line["eval_target_tokens"] for line in lines(out, "eval_loss")} == {
            lines(tmp_path / "1-1", "eval_loss")[0]["eval_target_tokens"]
        }
    assert len(losses[0]) == 2, "at step 2, and at the end"
    for other_weights, other_losses in zip(weights[1:], losses[1:], strict=True):
        assert_equal_weights(other_weights, weights[0])
        assert other_losses == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_evaluation_is_that_of_transformers(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """The last evaluation against the exported model and tokenizer in transformers, conversation by conversation."""
    train(ranks, 2, tiny_model, chats, tmp_path, "--ep-size", "2", "--eval-dataset", str(chats))
    model = MixtralForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    total, targets = 0.0, 0
    for row in map(json.loads, chats.read_text().splitlines()):
        question = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        text = str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        answer = tokenizer(text.removeprefix(str(question)), add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"] + answer])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, -len(answer) - 1 : -1]
        total += float(F.cross_entropy(logits, tokens[0, -len(answer) :], reduction="sum"))
        targets += len(answer)
    (found,) = lines(tmp_path, "eval_loss")
    assert found["eval_target_tokens"] == targets
    assert found["eval_loss"] == pytest.approx(total / targets, rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-4)


@pytest.mark.slow
def test_early_stop_and_best_checkpoint(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """A rate that makes things worse after a while: training stops, the best checkpoint outlives --save-total-limit,
    its weights are exported, and a restart does not train on."""
    argv = [
        "--model", tiny_model, "--dataset", chats, "--output-dir", tmp_path, "--ep-size", 2, "--eval-ratio", 0.25,
        "--eval-steps", 1, "--early-stopping-patience", 3, "--learning-rate", 0.05, "--max-grad-norm", 0,
        "--lr-scheduler-type", "constant", "--max-steps", 60, "--save-steps", 1, "--save-total-limit", 2,
        "--load-best-model-at-end", "--per-device-train-batch-size", 8,
    ]  # fmt: skip
    assert [code for code, _ in start(ranks, 2, *argv)] == [0, 0]
    losses = [line["eval_loss"] for line in lines(tmp_path, "eval_loss")]
    best = losses.index(min(losses)) + 1
    assert best + 3 == len(losses) < 60
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {f"step-{step:08d}" for step in (best, best + 2, best + 3)}
    link = tmp_path / "checkpoints" / "best"
    assert link.is_symlink()
    assert link.resolve().name == f"step-{best:08d}"

    evaluated = tmp_path / "evaluated"
    again = ["--model", tmp_path / "hf", "--dataset", chats, "--output-dir", evaluated, "--eval-ratio", 0.25]
    assert start(ranks, 1, *again, "--max-steps", 1, "--learning-rate", 0, "--no-export", "--save-steps", 0)[0][0] == 0
    assert lines(evaluated, "eval_loss")[0]["eval_loss"] == pytest.approx(min(losses), rel=1e-5)

    exported = read(tmp_path / "hf")
    assert [code for code, _ in start(ranks, 2, *argv, "--resume", "auto")] == [0, 0]
    assert len(lines(tmp_path, "eval_loss")) == len(losses)
    assert all(torch.equal(tensor, exported[name]) for name, tensor in read(tmp_path / "hf").items())


def _printed(argv: list[object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert train_ep.main([*FIXED_PRODUCTS, *map(str, argv)]) == 0
    return output.getvalue()


def test_of_improvements_the_best_is_kept(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """Every evaluation is better than the one before it: of their checkpoints the best stays, beside those that
    --save-steps asks for and the last; and the last lines say which weights are exported."""
    argv = [
        "--model", tiny_model, "--dataset", chats, "--output-dir", tmp_path, "--use-cpu", "--eval-ratio", 0.25,
        "--eval-steps", 1, "--learning-rate", 1e-3, "--lr-scheduler-type", "constant", "--save-steps", 4,
    ]  # fmt: skip
    (said,) = ranks.run(_printed, 1, [*argv, "--max-steps", 7], join_group=False)
    losses = [line["eval_loss"] for line in lines(tmp_path, "eval_loss")]
    assert losses == sorted(losses, reverse=True)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000007"]
    assert f"{tmp_path}/hf holds the weights of the last step, 7, and of the best evaluation (step 7, loss" in said
    # spoilt: the best is no longer the last, and is told how to be had
    spoil = ["--max-steps", 9, "--resume", "auto", "--learning-rate", 2.0, "--max-grad-norm", 0]
    (said,) = ranks.run(_printed, 1, [*argv, *spoil], join_group=False)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000007", "step-00000008", "step-00000009"]
    assert "hf holds the weights of the last step, 9, not those of the best evaluation (step 7, loss" in said
    assert f"`expertmesh-checkpoints export {tmp_path}/checkpoints/best DIR` exports them" in said
    assert "--load-best-model-at-end exports them" in said
    (said,) = ranks.run(_printed, 1, [*argv, *spoil, "--load-best-model-at-end"], join_group=False)
    assert "holds the weights of the best evaluation (step 7" in said
    assert f"export {tmp_path}/checkpoints/step-00000009 DIR` exports them" in said


@pytest.mark.release
def test_resumed_evaluations_go_on_counting(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """A run stopped and resumed on other ranks has the same evaluations, best one and end as one that was not."""
    common = [
        "--model", tiny_model, "--dataset", chats, "--eval-ratio", 0.25, "--eval-steps", 1, "--save-steps", 3,
        "--early-stopping-patience", 3, "--learning-rate", 0.05, "--max-grad-norm", 0,
        "--lr-scheduler-type", "constant",
    ]  # fmt: skip
    whole, parts = ["--output-dir", tmp_path / "whole"], ["--output-dir", tmp_path / "parts"]
    four = ["--per-device-train-batch-size", 4, "--max-steps", 60]
    assert start(ranks, 4, *common, *whole, *four, "--ep-size", 2)[0][0] == 0
    all_losses = [line["eval_loss"] for line in lines(tmp_path / "whole", "eval_loss")]
    stop_at = len(all_losses) - 2
    assert start(ranks, 4, *common, *parts, *four[:2], "--ep-size", 2, "--max-steps", stop_at)[0][0] == 0
    two = ["--per-device-train-batch-size", 8, "--max-steps", 60, "--resume", "auto"]
    assert start(ranks, 2, *common, *parts, *two)[0][0] == 0
    assert [line["eval_loss"] for line in lines(tmp_path / "parts", "eval_loss")] == pytest.approx(all_losses, rel=1e-3)
    assert (tmp_path / "parts/checkpoints/best").resolve().name == (tmp_path / "whole/checkpoints/best").resolve().name


@pytest.mark.slow
def test_best_checkpoint_after_going_back(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """Resumed from before the best step, at a rate that spoils the model: that step is made again, with other weights,
    and what counts as best is what was best at the point of resumption. In another directory it is found, too."""
    common = [
        "--model", tiny_model, "--dataset", chats, "--eval-ratio", 0.25, "--eval-steps", 2, "--save-steps", 2,
        "--load-best-model-at-end", "--max-steps", 4, "--lr-scheduler-type", "constant", "--max-grad-norm", 0,
    ]  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    assert start(ranks, 2, *common, "--learning-rate", 1e-3, "--output-dir", first)[0][0] == 0
    losses = [line["eval_loss"] for line in lines(first, "eval_loss")]
    assert losses[1] < losses[0]
    back = ["--resume", first / "checkpoints" / "step-00000002", "--learning-rate", 2.0]
    for out in (second, first):
        assert start(ranks, 2, *common, *back, "--output-dir", out)[0][0] == 0
        assert (out / "checkpoints" / "best").resolve().name == "step-00000002"
        assert lines(out, "eval_loss")[-1]["eval_loss"] > losses[0]
        exported = ["--model", out / "hf", "--dataset", chats, "--output-dir", tmp_path / "e", "--eval-ratio", 0.25]
        flags = ["--max-steps", 1, "--learning-rate", 0, "--no-export", "--save-steps", 0, "--overwrite-output-dir"]
        assert start(ranks, 1, *exported, *flags)[0][0] == 0
        assert lines(tmp_path / "e", "eval_loss")[0]["eval_loss"] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.release
def test_threshold_stops_but_does_not_choose(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """As in transformers: an evaluation that is better by less than the threshold is still the best."""
    argv = [
        "--model", tiny_model, "--dataset", chats, "--output-dir", tmp_path, "--eval-ratio", 0.25, "--eval-steps", 1,
        "--early-stopping-patience", 3, "--early-stopping-threshold", 0.5, "--learning-rate", 1e-3, "--max-steps", 9,
        "--logging-steps", 100,
    ]  # fmt: skip
    assert start(ranks, 2, *argv)[0][0] == 0
    losses = [line["eval_loss"] for line in lines(tmp_path, "eval_loss")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4, "the first, and three that were not better by 0.5"
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000004"
    assert sum(line["steps"] for line in lines(tmp_path, "loss")) == 4, "every step is in a logged interval"


@pytest.mark.slow
def test_resumed_run_logs_the_same_intervals(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    common = ["--model", tiny_model, "--dataset", chats, "--logging-steps", 4, "--save-steps", 3, "--output-dir"]
    assert start(ranks, 2, *common, tmp_path / "whole", "--max-steps", 6)[0][0] == 0
    assert start(ranks, 2, *common, tmp_path / "parts", "--max-steps", 3, "--lr-scheduler-type", "constant")[0][0] == 0
    again = ["--max-steps", 6, "--resume", "auto", "--no-export"]
    assert start(ranks, 2, *common, tmp_path / "parts", *again)[0][0] == 0
    whole, parts = lines(tmp_path / "whole", "loss"), lines(tmp_path / "parts", "loss")
    assert [(line["step"], line["steps"], line["tokens"]) for line in parts] == [
        (line["step"], line["steps"], line["tokens"]) for line in whole
    ]
    assert [line["step"] for line in whole] == [3, 4, 6]


@pytest.mark.slow
def test_router_collapse_is_warned_of_once(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """No router is quite even: over the second step and the fourth, two windows, the load is above 1."""
    argv = ["--model", tiny_model, "--dataset", chats, "--output-dir", tmp_path, "--ep-size", 2, "--max-steps", 4]
    assert start(ranks, 2, *argv, "--router-warn-steps", 2, "--router-warn-load", 1, "--no-export")[0][0] == 0
    warnings = [line for line in lines(tmp_path, "warning") if "--router-warn-load 1;" in line["warning"]]
    assert [line["step"] for line in warnings] == [2]
    load = max(
        max(tokens) / (sum(tokens) / len(tokens))
        for tokens in (
            [sum(both) for both in zip(*layers, strict=True)]
            for layers in zip(*(line["expert_tokens"] for line in lines(tmp_path, "loss")[:2]), strict=True)
        )
    )
    assert f"{load:.2f} times the mean in 2 steps" in warnings[0]["warning"]


@pytest.mark.parametrize("prompts", [[], ["--generate-prompts", "Once upon"]])
def test_answers_of_plain_text(ranks: RankPool, tiny_model: Path, tmp_path: Path, prompts: list[str]) -> None:
    """No chat template, and nothing before the first trained token: the first words are the prompt."""
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} says hello to the world of experts"}) + "\n" for i in range(8)))
    argv = ["--model", tiny_model, "--dataset", data, "--output-dir", tmp_path / "out", "--max-steps", 1, *prompts]
    assert start(ranks, 1, *argv, "--generate-steps", 1, "--generate-max-new-tokens", 3)[0] == (0, "")
    (answered,) = lines(tmp_path / "out", "generations")
    asked = [one["prompt"] for one in answered["generations"]]
    assert asked == prompts[1:] if prompts else [len(text) > 1 for text in asked] == [True] * 3
    if prompts:
        assert not any("reference" in one for one in answered["generations"])
    else:  # with the token that ends it
        texts = [one["prompt"] + one["reference"] for one in answered["generations"]]
        assert texts == [f"{json.loads(line)['text']}</s>" for line in data.read_text().splitlines()[:3]]
    assert not (tmp_path / "out" / "hf" / "chat_template.jinja").exists()


@pytest.mark.slow
def test_answers_while_training(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    """Every so many steps and at the end, and nothing of training is different for it."""
    plain = train(ranks, 2, tiny_model, chats, tmp_path / "plain", "--ep-size", "2", "--eval-ratio", "0.1")
    flags = ("--generate-steps", "2", "--generate-max-new-tokens", "5")
    found = train(ranks, 2, tiny_model, chats, tmp_path / "a", "--ep-size", "2", "--eval-ratio", "0.1", *flags)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    own = ("--generate-prompts", "say hello", "say nothing")
    train(ranks, 2, tiny_model, chats, tmp_path / "b", "--ep-size", "2", *flags, *own)
    answered = lines(tmp_path / "a", "generations")
    assert [line["step"] for line in answered] == [2, 3]
    assert all("[INST]" in one["prompt"] for line in answered for one in line["generations"])
    assert all(one["reference"].endswith("</s>") for line in answered for one in line["generations"])
    last = lines(tmp_path / "b", "generations")[-1]["generations"]
    assert [one["prompt"] for one in last] == ["say hello", "say nothing"]

    # against transformers' own model and cache, after the last step
    model = MixtralForCausalLM.from_pretrained(tmp_path / "b" / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "b" / "hf")
    for one in last:
        question = [{"role": "user", "content": one["prompt"]}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
        assert one["text"] == tokenizer.decode(out[0, tokens.shape[1] :])


@pytest.mark.slow
def test_report_and_trackers(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        ranks, 2, tiny_model, chats, tmp_path, "--ep-size", "2", "--eval-ratio", "0.1", "--eval-steps", "2",
        "--report-to", "tensorboard", "--generate-steps", "2", "--packing", "--logging-steps", "2",
    )  # fmt: skip
    report = (tmp_path / "report.html").read_text()
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', report, re.DOTALL)
    assert {"loss", "eval_loss", "grad_norm", "learning_rate", "peak_memory_mb"} <= json.loads(data)["curves"].keys()
    assert json.loads(data)["state"] == "finished"
    assert json.loads(data)["generations"]
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("eval_loss")] == [2, 3]
    assert [scalar.step for scalar in events.Scalars("loss")] == [2, 3]

    logged = lines(tmp_path, "loss")
    assert [line["step"] for line in logged] == [2, 3], "every second step, and the last"
    assert all(line["dropped_tokens"] == 0 for line in logged)
    assert all(0 <= entropy <= math.log(8) for line in logged for entropy in line["router_entropy"])
    # two experts a token, in each layer, over both steps of the interval
    assert all([sum(layer) for layer in line["expert_tokens"]] == [2 * line["tokens"]] * 2 for line in logged)


@pytest.mark.slow
def test_preview_trains_and_writes_nothing(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--model", tiny_model, "--dataset", chats, "--output-dir", out, "--packing", "--preview"]
    assert start(ranks, 2, *argv) == [(0, ""), (0, "")]
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--eval-ratio", "1"], "--eval-ratio 1.0: must be in"),
        (["--eval-ratio", "0.1", "--eval-dataset", "x.jsonl"], "--eval-dataset and --eval-ratio: give one"),
        (["--eval-dataset", "/no/x.jsonl"], "--eval-dataset /no/x.jsonl: no such file"),
        (["--early-stopping-patience", "2"], "--early-stopping-patience: there is nothing to evaluate on"),
        (
            ["--load-best-model-at-end", "--eval-ratio", "0.1", "--save-steps", "0"],
            "--save-steps 0 saves no checkpoint",
        ),
        (["--packing", "--group-by-length"], "--packing and --group-by-length"),
        (["--chat-template", "mistral", "--prompt-template", "{prompt}"], "--prompt-template and --chat-template"),
        (["--chat-template", "nothing"], "--chat-template nothing: neither a built-in one"),
        (["--train-on", "some"], "--train-on"),
        (["--prompt-template", "x"], "has no {prompt} in it"),
        (["--text-column", "nothing"], "line 1 has the columns messages, but one of these is needed: nothing"),
        (["--packing", "--attn-implementation", "flash_attention_2"], "with --packing use sdpa"),
        (["--warmup-steps", "2", "--lr-scheduler-type", "constant"], "constant knows no warm-up"),
        (["--on-nonfinite", "continue"], "--on-nonfinite"),
        (["--detect-anomaly", "--compile"], "--detect-anomaly: does not see into what --compile compiles"),
        (["--check-replicas", "-1"], "--check-replicas -1: must be 0 or more"),
        (["--router-warn-steps", "-1"], "--router-warn-steps -1: must be 0 or more"),
        (["--router-warn-load", "0.5"], "--router-warn-load 0.5: must be 1 or more"),
        (["--generate-steps", "-1"], "--generate-steps -1: must be 0 or more"),
    ],
)
def test_bad_flags(ranks: RankPool, tiny_model: Path, chats: Path, tmp_path: Path, flags: list[str], said: str) -> None:
    argv = ["--model", tiny_model, "--dataset", chats, "--output-dir", tmp_path, "--max-steps", 1, *flags]
    ((code, errors),) = start(ranks, 1, *argv)
    assert code == 2
    assert said in errors
    assert not (tmp_path / "hf").exists()
