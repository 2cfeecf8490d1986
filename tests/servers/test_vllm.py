"""vLLM's own server takes `Engine.tensors` after each update, and then answers as transformers does on the export."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.whole_runs import ROOT
from tests.processes import free_ports
from tests.servers.loop import PROMPTS, STEPS, TOKENS
from tests.tiny import save_model, save_tokenizer

pytestmark = pytest.mark.release

SECONDS = 400.0
LORA: dict[str, Any] = dict(adapter="lora", lora_rank=4, base_dtype="float32")
SERVE = (
    "--dtype float32 --enforce-eager --max-model-len 128 --max-num-seqs 8 --max-logprobs -1 "
    "--logprobs-mode processed_logprobs --weight-transfer-config"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on CPUs needs heads of at least 32."""
    path = tmp_path_factory.mktemp("mixtral")
    save_model(path, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, initializer_range=0.2)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plugins")
    source = (ROOT / "tests/servers/gloo_transfer.py").read_text(encoding="utf-8")
    (directory / "gloo_transfer.py").write_text(source, encoding="utf-8")
    (information := directory / "gloo_transfer-0.dist-info").mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = gloo_transfer:register\n")
    return directory


@pytest.fixture
def url(vllm_python: Path, vllm_variables: dict[str, str], model: Path, plugins: Path, tmp_path: Path) -> Iterator[str]:
    """A server of the model."""
    (port,) = free_ports(1)
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    own = {name: os.environ[name] for name in ("HOME", "PATH")}
    own |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(plugins)}
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *SERVE.split(), '{"backend": "gloo"}'],
            env={**vllm_variables, **own},
            stdout=file,
            stderr=file,
        )
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
            while not _answers(url):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def greedy(directory: Path) -> list[list[int]]:
    """Of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id, made = None, []
    for prompt in PROMPTS:
        ids_1S = torch.tensor([prompt])
        mask_1S = torch.ones_like(ids_1S)
        out_1S = model.generate(ids_1S, attention_mask=mask_1S, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
        made.append(out_1S[0, len(prompt) :].tolist())
    return made


@pytest.mark.parametrize(
    ("by", "settings"),
    [("vllm", {}), ("vllm", LORA), ("trl", {}), ("trl", LORA)],
    ids=["vllm", "vllm-merged", "trl", "trl-merged"],
)
def test_answers_after_each_update(
    by: str, settings: dict[str, Any], vllm_python: Path, url: str, model: Path, tmp_path: Path
) -> None:
    """What is trained at ep 2, sent by vLLM's own trainer's engine, or by trl's client."""
    said = run("loop", vllm_python, url, model, tmp_path, by, json.dumps({"ep_size": 2, **settings}))
    wanted = [greedy(tmp_path / f"{'merged' if settings else 'step'}-{step}") for step in range(STEPS)]
    assert said == wanted
    assert len({str(each) for each in [greedy(model), *wanted]}) > STEPS, "each update changes some answer"


def run(script: str, python: Path, url: str, model: Path, out: Path, *more: str) -> Any:
    """What two ranks of a script left."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = [*command, f"tests.servers.{script}", packages, port, url, model, out, *more]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-5000:] + Path(out, "server.log").read_text()[-3000:]
    return json.loads(Path(out, "answers.json").read_text())


def test_answers_in_trl_s_grpo(vllm_python: Path, url: str, model: Path, tmp_path: Path) -> None:
    """Whose generations vLLM makes: before the first update, and after each."""
    said = run("grpo", vllm_python, url, model, tmp_path)
    assert said == (wanted := [greedy(tmp_path / f"step-{step}") for step in range(STEPS)])
    assert wanted[0] == greedy(model)
    assert len(set(map(str, wanted))) == STEPS, "each update changes some answer"
