"""What ends the answers that a model is trained on ends generation wherever it is written, whoever writes it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, TrainingArguments, default_data_collator

import expertmesh
from expertmesh.checkpoints.__main__ import main as checkpoints
from tests.distributed.whole_runs import Runs
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer

TEMPLATE = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EOS, END, OTHER = "</s>", "<|im_end|>", "<|im_start|>"


@pytest.fixture(params=[True, False], ids=["generation config", "config alone"])
def base(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, int]]:
    """A base model, whose chat template ends turns with another token than its EOS; and the ids of its tokens."""
    path = tmp_path / "base"
    save_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (END, OTHER)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    ids = {token: tokenizer.get_vocab()[token] for token in (EOS, END, OTHER)}
    save_model(path, eos_token_id=ids[EOS])
    file = path / "generation_config.json"
    if request.param:
        file.write_text(json.dumps({"eos_token_id": ids[EOS], "temperature": 0.6, "do_sample": True}))
    else:
        file.unlink()
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    (tmp_path / "data.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return path, ids


def ends(directory: Path) -> Any:
    return GenerationConfig.from_pretrained(directory).eos_token_id


def eos(directory: Path) -> Any:
    return json.loads((directory / "tokenizer_config.json").read_text())["eos_token"]


@pytest.mark.parametrize("adapter", tiered(slow=["", "--adapter lora --merge"]))
def test_of_a_run(runs: Runs, base: tuple[Path, dict[str, int]], tmp_path: Path, adapter: str) -> None:
    model, ids = base
    ended = runs(2, f"--model {model} --dataset {tmp_path}/data.jsonl --max-steps 1 --save-steps 1 {adapter}")
    out, shards, again = ended.out, str(tmp_path / "shards"), tmp_path / "again"
    if adapter:
        assert checkpoints(["merge", str(model), str(out / "adapter"), str(again)]) == 0
    else:
        assert checkpoints(["convert", str(ended.checkpoint(1)), shards, "--ep-size", "2"]) == 0
        assert checkpoints(["export", shards, str(again)]) == 0
    assert ends(out / "hf") == ends(again) == [ids[EOS], ids[END]]
    for directory in (out / "hf", again, *([out / "adapter"] if adapter else [])):
        # which llama.cpp goes by, as it reads no generation_config.json; nothing else differs from the base's files
        assert eos(directory) == END
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (directory / name).read_bytes() == (model / name).read_bytes()
        said, there = (json.loads((path / "tokenizer_config.json").read_text()) for path in (directory, model))
        assert said == {**there, "eos_token": END}
    for directory in (out / "hf", again):
        assert json.loads((directory / "config.json").read_text())["eos_token_id"] == ids[END]
    if (model / "generation_config.json").exists():
        assert GenerationConfig.from_pretrained(out / "hf").temperature == 0.6


def test_of_plain_text(runs: Runs, base: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """It ends with EOS, which ends generation already: the file is the model's own, or none."""
    model, _ = base
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "Q", "completion": "A"}) + "\n")
    out = runs(1, f"--model {model} --dataset {tmp_path}/data.jsonl --max-steps 1").out
    written, own = (path / "generation_config.json" for path in (out / "hf", model))
    assert written.exists() == own.exists()
    assert not own.exists() or written.read_bytes() == own.read_bytes()


@pytest.mark.parametrize("adapter", tiered(["none"], slow=["lora"]))
def test_from_python(base: tuple[Path, dict[str, int]], tmp_path: Path, adapter: Any) -> None:
    """Of a loop of one's own, by the tokenizer of the model; of Trainer, by its own, which may have another EOS."""
    model, ids = base
    try:
        engine = expertmesh.load(str(model), use_cpu=True, adapter=adapter)
        said = engine.export(tmp_path / "one")
        assert any(f"answers end with {END} ({ids[END]}), and generation with {EOS} ({ids[EOS]})" in s for s in said)
        assert ends(tmp_path / "one") == [ids[EOS], ids[END]]
        assert engine.end_tokens(engine.tokenizer) == sorted([ids[EOS], ids[END]])
        saved = engine.save(tmp_path / "saved")
        assert ends(saved / "model") == [ids[EOS], ids[END]]
        assert eos(tmp_path / "one") == eos(saved / "model") == END

        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.eos_token = OTHER
        row = {"input_ids": torch.arange(9), "labels": torch.arange(9)}
        arguments = TrainingArguments(
            str(tmp_path / "two"), max_steps=1, use_cpu=True, report_to=[], remove_unused_columns=False
        )
        trainer = expertmesh.Trainer(
            engine, arguments, default_data_collator, train_dataset=[row] * 8, processing_class=tokenizer
        )
        with pytest.warns(UserWarning, match="answers end with"):
            trainer.train()
        trainer.save_model()
        assert ends(tmp_path / "two") == [ids[EOS], *sorted([ids[END], ids[OTHER]])]
        assert eos(tmp_path / "two") == OTHER, "there are two new ones: neither takes the place of EOS"
        (saved,) = (tmp_path / "two" / "checkpoint-1" / "expertmesh").glob("step-*")
        assert ends(saved / "model") == ends(tmp_path / "two")
    finally:
        dist.destroy_process_group()
