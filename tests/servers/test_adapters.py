"""What an export says of servers is what their own code does: vLLM's in an environment of its own, SGLang's out of its
wheel. An adapter that is said to be served gives PEFT's deltas, and its tokens; one that is to be merged does not."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import expertmesh
from expertmesh.checkpoints.adapters.servers import SGLANG, VLLM
from tests.families.configs import tiny_model
from tests.real.conftest import kept_packages
from tests.servers import sglang_code

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.release,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
]

RANK = 8
PROMPT = list(range(5, 13))
TOKENS = 4
"""That are generated: latent attention on CPUs takes a second for each."""
# what vLLM's attention on CPUs computes
SIZES = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
LATENT = dict(
    SIZES, q_lora_rank=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32,
    topk_method="noaux_tc", rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(SIZES, head_dim=32),
    "qwen2_moe": SIZES,
    "qwen3_moe": dict(SIZES, head_dim=32),
    "olmoe": dict(SIZES, clip_qkv=None),
    "deepseek_v3": LATENT,
    "glm4_moe": dict(SIZES, head_dim=32),
    "gpt_oss": dict(
        SIZES,
        head_dim=32,
        intermediate_size=64,
        sliding_window=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}
IN_VLLM = ("mixtral", "qwen3_moe", "deepseek_v3")
KINDS: dict[str, dict[str, Any]] = {
    "servable": dict(lora_targets="servable"),
    "attention": dict(lora_targets="attention"),
    "router": dict(lora_targets="attention,router"),
    "all-linear": dict(lora_targets="all-linear"),
    "packed": dict(lora_targets="attention,experts", adapter_format="packed"),
    "rsLoRA": dict(lora_targets="attention", use_rslora=True),
    "whole": dict(lora_targets="attention", modules_to_save="norms"),
}


class Exported(NamedTuple):
    """An adapter. said: of each server, by name; deltas: what PEFT adds to each matrix; tokens: greedy ones."""

    path: Path
    said: dict[str, str]
    deltas: dict[str, Tensor]
    tokens: list[int]


def name_of(tensor: str) -> str:
    """A name that all of them have for a matrix."""
    name = tensor.removesuffix(".weight").replace(".attn.", ".self_attn.")
    for theirs, ours in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        name = re.sub(rf"\.{theirs}$", f".{ours}", name)
    return re.sub(r"\.(block_sparse_moe|mlp)\.", ".mlp.", name)


def matrices_of(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Of a model, as its checkpoint has them; fused experts come apart."""
    model.save_pretrained(path, save_original_format=True)  # type: ignore[operator]
    found: dict[str, Tensor] = {}
    for tensor, value in load_file(path / "model.safetensors").items():
        name = name_of(tensor)
        if value.dim() == 3:  # GPT-OSS: (E, in, out), gate and up in alternate columns
            parent, _, own = name.rpartition(".")
            parts = {"gate_proj": value[..., ::2], "up_proj": value[..., 1::2]} if "up" in own else {own: value}
            for part, experts in parts.items():
                found |= {f"{parent}.{number}.{part}": each.T for number, each in enumerate(experts)}
        elif value.dim() == 2:
            found[name] = value
    return found


def greedy(model: Any) -> list[int]:
    text = torch.tensor([PROMPT])
    for _ in range(TOKENS):
        with torch.no_grad():
            text = torch.cat([text, model(input_ids=text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    tokens: list[int] = text[0, len(PROMPT) :].tolist()
    return tokens


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def export(base: Path, out: Path, settings: dict[str, Any]) -> Exported:
    engine = expertmesh.load(str(base), use_cpu=True, adapter="lora", lora_rank=RANK, lora_alpha=2 * RANK, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if name.endswith("lora_B"):
                local = getattr(parameter, "to_local", lambda own=parameter: own)()
                local.copy_(0.2 * torch.randn(local.shape, generator=generator))
    lines = [line.removeprefix("adapter: ").split(" ", 1) for line in engine.export(str(out))]
    said = {name: rest for name, rest in lines if name in (VLLM.name, SGLANG.name)}
    model = peft.PeftModel.from_pretrained(load(base), out)
    tokens = greedy(model)
    before = matrices_of(load(base), out / "before")
    after = matrices_of(model.merge_and_unload(), out / "after")
    deltas = {name: after[name] - before[name] for name in after if not torch.equal(after[name], before[name])}
    return Exported(out, said, deltas, tokens)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def exported(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    base = (directory := tmp_path_factory.mktemp(family)) / "base"
    tiny_model(family, 0, **FAMILIES[family]).save_pretrained(base, save_original_format=True)
    kinds = KINDS | ({"kv_b_proj": dict(lora_targets="kv_b_proj")} if family == "deepseek_v3" else {})
    return {kind: export(base, directory / kind, settings) for kind, settings in kinds.items()}


def is_same(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> bool:
    """To within what adding to a weight, and taking it off again, rounds away."""
    named = {name_of(name): value for name, value in theirs.items()}
    return named.keys() == ours.keys() and all(torch.allclose(named[name], ours[name], atol=1e-5) for name in ours)


def rows_of(adapter: Exported, matrix: str) -> int:
    return len(adapter.deltas[name_of(matrix)])


def to_merge(adapter: Exported, server: str) -> bool:
    return adapter.said.get(server, "").endswith("; merge to serve there")


def ask_vllm(
    python: Path, variables: dict[str, str], adapters: dict[str, Exported], out: Path, **asked: Any
) -> dict[str, Any]:
    """Answers by kind of adapter, a message where one is refused; "" is the base."""
    out.mkdir()
    paths = [str(each.path) for each in adapters.values()]
    base = str(next(iter(adapters.values())).path.parent / "base")
    table = dict(base=base, prompt=PROMPT, tokens=TOKENS, adapters=paths, out=str(out), options={}) | asked
    script = str(Path(__file__).with_name("ask_vllm.py"))
    ran = subprocess.run(
        [python, script, json.dumps(table)], env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    if ran.returncode:
        return {"error": ran.stderr}
    found: dict[str, Any] = json.loads((out / "answers.json").read_text())
    return found


def test_vllm(
    family: str,
    exported: dict[str, Exported],
    tmp_path: Path,
    vllm_python: Path,
    vllm_variables: dict[str, str],
) -> None:
    if family not in IN_VLLM:
        pytest.skip("asked of SGLang alone")

    def check(kinds: list[str], work: Path, **asked: Any) -> dict[str, Any]:
        answers = ask_vllm(vllm_python, vllm_variables, {kind: exported[kind] for kind in kinds}, work, **asked)
        assert "error" not in answers, answers["error"][-3000:]
        assert answers["ranks"] == list(VLLM.ranks)
        for kind in kinds:
            adapter = exported[kind]
            is_right = isinstance(answers[kind], list) and is_same(
                load_file(work / f"{kind}.safetensors"), adapter.deltas
            )
            if any(".experts." in name for name in adapter.deltas):
                if any(name.endswith(tuple(VLLM.unused)) for name in adapter.deltas):
                    continue  # tokens alone show what is loaded and not used
            else:
                is_right = is_right and answers[kind] == adapter.tokens
            assert is_right is not to_merge(adapter, VLLM.name), (kind, adapter.said, answers[kind], answers[""])
            if found := re.search(r"--max-lora-rank (\d+)", adapter.said[VLLM.name]):
                assert answers[f"rank of {kind}"] == int(found[1])
        return answers

    # packed ones that it must be told of, which a server of its own would be started for, are not asked
    answers = check([kind for kind in exported if "mixed" not in exported[kind].said[VLLM.name]], tmp_path / "out")
    if family == "deepseek_v3":
        assert answers["kv_b_proj"] == answers[""] != exported["kv_b_proj"].tokens


def test_vllm_for_cpus_serves_no_moe_with_lora(
    exported: dict[str, Exported], family: str, tmp_path: Path, vllm_python: Path, vllm_variables: dict[str, str]
) -> None:
    """As the page says: it computes experts by a kernel in Triton, which its build for CPUs lacks."""
    if family != "mixtral":
        pytest.skip("one family shows it")
    adapters = {"servable": exported["servable"]}
    answers = ask_vllm(vllm_python, vllm_variables, adapters, tmp_path / "out", as_released=True)
    assert "module 'triton.language' has no attribute 'float32'" in answers["error"]


@pytest.fixture
def sglang() -> Iterator[None]:
    packages = kept_packages(f"sglang=={SGLANG.release}", "--no-deps", f"sglang=={SGLANG.release}")
    with sglang_code.sglang_of(packages):
        yield


@pytest.mark.usefixtures("sglang")
def test_sglang(family: str, exported: dict[str, Exported]) -> None:
    config = AutoConfig.from_pretrained(next(iter(exported.values())).path.parent / "base")
    for kind, adapter in exported.items():
        try:
            found: dict[str, Tensor] | str = sglang_code.deltas_of(adapter.path, config, partial(rows_of, adapter))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        is_right = isinstance(found, dict) and is_same(found, adapter.deltas)
        assert is_right is not to_merge(adapter, SGLANG.name), (kind, adapter.said, found)


@pytest.mark.usefixtures("sglang")
def test_sglang_knows_what_the_table_has() -> None:
    assert SGLANG.known is not None
    known = sglang_code.known_targets()
    assert sglang_code.normalized(sorted(SGLANG.known)) <= known
