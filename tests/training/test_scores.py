"""How answers are scored, and which questions are refused before a run begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.start.inputs import data_options
from expertmesh.training.start.questions import Questions, read_questions
from expertmesh.training.steps.scores import Extracted, calls_in, checked, exact, same_calls

GSM8K = Extracted(r"#### (-?\d+)")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.0, "x"]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("score", "answer", "expected", "right"),
    [
        (exact, " 42\n", "42", True),
        (exact, "42.", "42", False),
        (GSM8K, "#### 3, no: #### -4", "so it is\n#### -4", True),
        (GSM8K, "#### -4, no: #### 3", "#### -4", False),
        (GSM8K, "-4", "#### -4", False),
        (Extracted(r"\d+ (?:km|m)"), "5 km", "it is 5 km", True),
        (same_calls, 'Sure. {"arguments": "{\\"b\\": [2, \\"x\\"], \\"a\\": 1.0}", "name": "add"}', CALL, True),
        (
            same_calls,
            '{"function": {"name": "f", "arguments": "{}"}}',
            '{"function": {"name": "f", "arguments": {}}}',
            True,
        ),
        (same_calls, f'{CALL}{{"name": "stop"}}', f'{{"name": "stop"}} and {CALL}', True),
        (same_calls, CALL, CALL + CALL, False),
        (same_calls, CALL.replace("1", "true"), CALL, False),
        (same_calls, "none {needed}", "nothing to call", True),
        (same_calls, CALL[:-20], CALL, False),
        (same_calls, '{"a": ' * 12_000, CALL, False),
    ],
)
def test_right(score: Any, answer: str, expected: str, right: bool) -> None:
    assert score("", answer, expected) == right


def test_numbers_of_calls_are_exact() -> None:
    """Neither large integers nor what Python takes for alike are one number."""
    (call,) = calls_in('{"a": 9007199254740993, "b": NaN, "c": 1e400}')
    assert call == {"a": 9007199254740993, "b": "NaN", "c": float("inf")}
    for value in (None, "1", float("nan")):
        with pytest.raises(ValueError, match="not a finite number"):
            checked(value)
    assert checked(True) == 1.0


def not_to_be_called() -> float:
    return 1.0


NO_FUNCTION = 1


def asked(tiny_model: Path, tmp_path: Path, records: list[Any] | None, **settings: Any) -> Questions:
    """Records in a file; None: there is no file."""
    file = tmp_path / "asked.jsonl"
    if records is not None:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = TrainConfig(str(tiny_model), dataset=["d"], eval_generate=[str(file)], **settings)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "")
    questions = read_questions(config, tokenizer, data_options(config), checks=True, positions=512)
    assert questions is not None
    return questions


PAIR = {"prompt": "2 + 2?", "response": "#### 4"}


def test_the_last_answer_is_expected(tiny_model: Path, tmp_path: Path) -> None:
    """Of a conversation all before it is the prompt, earlier answers too, and the run's own --train-on says nothing."""
    turns = [{"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4"))]
    messages = [*turns, {"role": "user", "content": "and 3 + 3?"}, {"role": "assistant", "content": "6"}]
    questions = asked(tiny_model, tmp_path, [{"messages": messages}], train_on="all")
    assert [text.strip() for text in questions.expected] == ["6"]
    assert questions.texts == ["<s> [INST] 2 + 2? [/INST] 4</s> [INST] and 3 + 3? [/INST]"]
    assert questions.score is exact
    end = questions.tokenizer.eos_token_id
    for text, score in (("6", 1.0), ("4", 0.0)):
        assert questions.score_of([[*questions.tokenizer(text)["input_ids"], end]]) == score


@pytest.mark.parametrize(
    ("records", "settings", "said"),
    [
        (None, {}, r"--eval-generate .*asked.jsonl: no such file"),
        ([PAIR, {"prompt": "a", "response": ""}], {}, r"asked.jsonl.*2.*: has no answer to be expected"),
        ([{"text": "only text"}], {}, r"record 1 has nothing before its answer"),
        ([PAIR | {"prompt": "long " * 900}], {"max_seq_length": 64}, r"--max-seq-length"),
        ([PAIR, {"prompt": "a", "response": "4"}], {"eval_extract": r"#### (\d+)"}, r"'#### .*record 2 .*'4'"),
        ([PAIR], {"eval_score": "calls"}, r"--eval-score calls: no answer .*'#### 4'"),
        ([PAIR], {"eval_score": "no_such_module:f"}, r"no_such_module:f: cannot be imported: ModuleNotFoundError"),
        ([PAIR], {"eval_score": f"{__name__}:absent"}, r"cannot be imported: AttributeError"),
        ([PAIR], {"eval_score": f"{__name__}:NO_FUNCTION"}, r"is a int, not a function"),
        ([PAIR], {"eval_score": f"{__name__}:not_to_be_called"}, r"fails on the answer that record 1 .*TypeError"),
        ([PAIR], {"generate_max_new_tokens": 500}, r"prompt of \d+ tokens, .* 500 more are beyond the model's 512"),
        ([], {"eval_score": "f1"}, r"--eval-score f1: give exact, calls, or a function"),
        ([], {"eval_extract": "(4"}, r"--eval-extract '\(4': is no regular expression: missing \)"),
        ([], {"eval_extract": "4", "eval_score": "calls"}, r"--eval-extract and --eval-score calls: give one"),
    ],
)
def test_refused(tiny_model: Path, tmp_path: Path, records: list[Any] | None, settings: Any, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        asked(tiny_model, tmp_path, records, **settings)
