"""llama.cpp, as PyPI's llama-cpp-python has it: what converts a model to GGUF, and what runs that.

Compiled once, in some ten minutes of two cores, and kept in the user's cache: `python -m benchmarks.llama_cpp MODEL
--ask "What is 3 + 4?"` converts a model and prints its answer.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.commands import command, parser_of
from benchmarks.real_model import lock, make
from expertmesh.moe.util.user_cache import cache_directory

SOURCE = "llama-cpp-python==0.3.36"
PACKAGES = ("diskcache==5.6.3", "sentencepiece==0.2.1")
"""What it, and its converter, import. numpy and jinja2, too, which are here."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="of Hugging Face form")
    parser.add_argument("--ask", default="What is 3 + 4?", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=100, help="of the answer, at most")
    arguments = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with tempfile.TemporaryDirectory() as name:
        program = llama_cpp(cache_directory("real"))
        file = program.converted(arguments.model, Path(name) / "model.gguf")
        print(tokenizer.decode(program.answer(file, prompt(tokenizer, arguments.ask), arguments.tokens)))
    return 0


def prompt(tokenizer: Any, question: str) -> str:
    """By the model's chat template."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@dataclass(frozen=True)
class LlamaCpp:
    """source: has the script that converts. packages: has the module that runs."""

    source: Path
    packages: Path

    def converted(self, model: Path, out: Path) -> Path:
        """A model of Hugging Face form as one file, GGUF, in fp32."""
        script = self.source / "convert_hf_to_gguf.py"
        self._run([str(script), str(model), "--outfile", str(out), "--outtype", "f32"])
        return out

    def answer(self, model: Path, text: str, number: int) -> list[int]:
        """The likeliest tokens after a text, up to the one that ends an answer, or so many."""
        return [int(token) for token in json.loads(self._run(["-c", _ANSWER, str(model), text, str(number)]))]

    def _run(self, words: Sequence[str]) -> str:
        paths = os.pathsep.join([str(self.source / "gguf-py"), str(self.packages)])
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"{words[:2]}: {done.stderr[-2000:]}")
        return done.stdout


_ANSWER = """
import json, os, sys
from llama_cpp import Llama
file, text, number = sys.argv[1:]
model = Llama(file, n_ctx=1024, n_threads=os.cpu_count(), verbose=False)
tokens = []
for token in model.generate(model.tokenize(text.encode(), add_bos=False, special=True), top_k=1, repeat_penalty=1.0):
    tokens.append(token)
    if token == model.token_eos() or len(tokens) == int(number):
        break
print(json.dumps(tokens))
model.close()
"""


def llama_cpp(directory: Path) -> LlamaCpp:
    """The program, compiled.

    Args:
        directory: in which it is kept.

    Raises:
        ExpertMeshError: it cannot be had, or not be compiled.
    """
    source = llama_cpp_source(directory)
    with lock(directory):
        if not (packages := directory / "llama-cpp").exists():
            (file,) = (directory / _ARCHIVE).glob("*.tar.gz")
            make(packages, [*_PIP, "install", "--no-deps", str(file), *PACKAGES, "--target"], CMAKE_ARGS=_CMAKE)
    return LlamaCpp(source, packages)


def llama_cpp_source(directory: Path) -> Path:
    """Its source alone, in which the script that converts is.

    Args:
        directory: in which it is kept.

    Raises:
        ExpertMeshError: it cannot be had.
    """
    with lock(directory):
        if not (archive := directory / _ARCHIVE).exists():
            make(archive, [*_PIP, "download", "--no-deps", "--no-binary", SOURCE.split("==")[0], SOURCE, "--dest"])
        (file,) = archive.glob("*.tar.gz")
        if not (source := directory / "llama-cpp-source").exists():
            make(source, [sys.executable, "-m", "tarfile", "-e", str(file)])
    (unpacked,) = source.glob("*/vendor/llama.cpp")
    return unpacked


_PIP = (sys.executable, "-m", "pip", "--quiet")
_ARCHIVE = "llama-cpp-archive"
_CMAKE = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF"


if __name__ == "__main__":
    sys.exit(main())
