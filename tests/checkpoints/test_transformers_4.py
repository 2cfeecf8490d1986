"""Exports in programs built on transformers 4: transformers 4.57 itself, and llama.cpp's converter.

Bases are as transformers 4 publishes them (`in_transformers_4.py`); runs add tokens and another chat template.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM

from benchmarks.llama_cpp import LlamaCpp, llama_cpp_source
from benchmarks.real_model import dense_model
from expertmesh.moe.util.errors import ExpertMeshError
from tests.real.conftest import KEPT, kept_packages

pytestmark = pytest.mark.release

SENTENCEPIECE = "sentencepiece==0.2.1"
PINNED = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.2", SENTENCEPIECE)
"""Beside our own torch. The first is what llama.cpp pins for its converter."""
SCRIPT = Path(__file__).with_name("in_transformers_4.py")
FAMILIES = ("qwen3_moe", "olmoe", "mixtral")
TOKENS = ["<a>", "b c", "<|turn|>"]
TEMPLATE = """\
{% for m in messages %}{{ '<|turn|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
TALK = [{"role": "user", "content": "say hello"}]
TEXTS = ["say hello<a>to the b c world", "say<|turn|>", "", "b c"]


@dataclass(frozen=True)
class Exported:
    """Directories: of the base; of a full export; of an adapter; of what the run, and the command, merged."""

    base: Path
    full: Path
    adapter: Path
    merged: Path
    by_command: Path

    @property
    def directories(self) -> list[Path]:
        return [self.full, self.adapter, self.merged, self.by_command]


@pytest.fixture(scope="module")
def older() -> Path:
    return kept_packages("transformers-4", "--no-deps", *PINNED)


@pytest.fixture(scope="module")
def sentencepiece() -> Path:
    """For runs, which have transformers 5."""
    return kept_packages("sentencepiece", "--no-deps", SENTENCEPIECE)


def python(packages: str, *words: object) -> str:
    environment = {**os.environ, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def exported(in_common: Path, older: Path, sentencepiece: Path) -> Callable[[str], Exported]:
    """What a run of a family exports; made by the first worker that asks."""
    with FileLock(in_common / "transformers-4.lock"):
        if not (bases := in_common / "transformers-4").exists():
            try:
                fast = dense_model(KEPT) / "tokenizer.json"
            except ExpertMeshError as error:
                pytest.skip(f"no real tokenizer: {error}")
            bases.mkdir()
            python(str(older), SCRIPT, "bases", bases, fast)

    def made(family: str) -> Exported:
        base, out = bases / family, bases / f"{family}-runs"
        with FileLock(in_common / f"{family}.lock"):
            if not out.exists():
                _run(base, out, sentencepiece)
        return Exported(base, out / "full" / "hf", out / "lora" / "adapter", out / "lora" / "hf", out / "merged")

    return made


def _run(base: Path, out: Path, sentencepiece: Path) -> None:
    out.mkdir()
    row = {"messages": [*TALK, {"role": "assistant", "content": "hello<a>world"}]}
    (out / "data.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (out / "chat.jinja").write_text(TEMPLATE)
    # <|im_end|> is in the vocabulary of the first two
    tokens = ",".join([*TOKENS, "<|im_end|>"])
    common = [
        *("-m", "expertmesh.train_ep", "--model", base, "--dataset", out / "data.jsonl", "--use-cpu"),
        *("--add-tokens", tokens, "--chat-template", out / "chat.jinja", "--max-steps", 1, "--learning-rate", "1e-3"),
    ]
    packages = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(sentencepiece)]))
    python(packages, *common, "--output-dir", out / "full")
    lora = ["--adapter", "lora", "--lora-rank", 4, "--lora-alpha", 8, "--train-new-tokens", "--merge"]
    python(packages, *common, "--output-dir", out / "lora", *lora)
    python(packages, "-m", "expertmesh.checkpoints", "merge", base, out / "lora" / "adapter", out / "merged")


@pytest.mark.parametrize("family", FAMILIES)
def test_in_transformers_4(exported: Any, older: Path, tmp_path: Path, family: str) -> None:
    """Its class is the base's, its tokens are those that transformers 4 gives the base with the same ones added, and it
    talks by the new template; all tensors are read, and logits are those of transformers 5."""
    made: Exported = exported(family)
    tokens = [*TOKENS, "<|im_end|>"]
    for number, directory in enumerate(made.directories):
        is_model = directory != made.adapter
        logits = tmp_path / f"{number}"
        asked = {"export": str(directory), "base": str(made.base), "tokens": tokens, "texts": TEXTS, "talk": TALK}
        asked |= {"model": str(logits) if is_model else ""}
        said = json.loads(python(str(older), SCRIPT, "look", json.dumps(asked)).splitlines()[-1])
        for key in ("classes", "ids", "sizes"):
            assert said[key][0] == said[key][1], key
        text = jinja2.Template(TEMPLATE).render(messages=TALK, add_generation_prompt=True)
        assert said["talk"] == text
        assert said["eos"] == ("</s>" if family == "mixtral" else "<|im_end|>")
        if is_model:
            assert said["unread"] == []
            model: Any = AutoModelForCausalLM.from_pretrained(directory)
            with torch.no_grad():
                expected_SV = model(torch.tensor([said["ids"][0][0]])).logits[0]
            assert (torch.load(logits) - expected_SV).abs().max() < 1e-5 * max(1.0, float(expected_SV.abs().max()))
            assert expected_SV.std() > 0.01


_READ = """
import json, sys
from gguf import GGUFReader
fields = {name: field.contents() for name, field in GGUFReader(sys.argv[1]).fields.items() if name.startswith("token")}
print(json.dumps({name.removeprefix("tokenizer."): said for name, said in fields.items()}))
"""


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_in_llama_cpps_converter(exported: Any, older: Path, tmp_path: Path, family: str) -> None:
    """GGUF has the template, the tokens at their ids, and the token that ends answers. Of Qwen's tokenizer it knows the
    published vocabulary alone."""
    try:
        source = llama_cpp_source(KEPT)
    except ExpertMeshError as error:
        pytest.skip(f"no source of llama.cpp: {error}")
    made: Exported = exported(family)
    for directory in (made.full, made.by_command):
        file = LlamaCpp(source, older).converted(directory, tmp_path / f"{directory.parent.name}.gguf")
        said = json.loads(python(str(source / "gguf-py"), "-c", _READ, file))
        assert said["chat_template"] == TEMPLATE
        added = TOKENS if family != "mixtral" else [*TOKENS, "<|im_end|>"]
        ids = [said["ggml.tokens"].index(token) for token in added]
        first = json.loads((made.base / "config.json").read_text())["vocab_size"] - 8
        assert ids == list(range(first, first + len(added)))
        assert said["ggml.tokens"][said["ggml.eos_token_id"]] == ("</s>" if family == "mixtral" else "<|im_end|>")
