"""Adapters that go from tool to tool: ours, PEFT, merge and --init-adapter compute the same logits of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expertmesh
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.moe.hf_model.build import build_model
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.model_setup.lora_targets import adapt
from tests.distributed.pool import RankPool
from tests.families.configs import TEXT_IDS, load_model, tiny_model
from tests.rounding import OTHER_ORDER
from tests.tiers import tiered
from tests.tiny import relative_error, save_tokenizer

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")

ATTENTION = ["q_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BY_PEFT: dict[str, dict[str, Any]] = {
    "all-linear": dict(target_modules="all-linear"),
    "gate, up and down": dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]),
    "packed": dict(target_modules=ATTENTION, target_parameters=EXPERTS),
    "down alone": dict(target_modules=ATTENTION, target_parameters=EXPERTS[1:]),
    "rank": dict(target_modules=ATTENTION, rank_pattern={"o_proj": 8}),
    "alpha": dict(target_modules=ATTENTION, alpha_pattern={"o_proj": 3}, rank_pattern={"q_proj": 2}),
    "rsLoRA": dict(
        target_modules=ATTENTION, target_parameters=EXPERTS, rank_pattern={"gate_up_proj": 8}, use_rslora=True
    ),
    "one layer": dict(target_modules=ATTENTION, layers_to_transform=[1]),
    "not one layer": dict(target_modules=ATTENTION, exclude_modules=".*layers.0.*"),
}
BY_EXPERT = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Families whose checkpoints have a name for each expert's matrix."""


def logits_of(model: nn.Module) -> Tensor:
    text = torch.randint(3, TEXT_IDS, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=text, use_cache=False).logits
    return logits


def by_peft(base: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(load_model(base), adapter)


def kinds_of(family: str) -> dict[str, dict[str, Any]]:
    """Names of modules that a family has."""
    if family == "deepseek_v3":
        return {"packed": dict(target_modules=["o_proj"], target_parameters=EXPERTS)}
    lacking = ("gate, up and down",) * (family != "qwen3_moe")
    return {name: kind for name, kind in BY_PEFT.items() if name not in lacking}


def _begun(base: Path, work: Path, adapters: list[str], forms: list[str]) -> None:
    """Begin as each adapter, and export what was begun."""
    for name in adapters:
        begun: dict[str, Any] = dict(use_cpu=True, adapter="lora", init_adapter=str(work / name))
        for form in forms:
            engine = expertmesh.load(str(base), **(begun | {"adapter_format": form}))
            engine.export(str(work / f"{name} begun {form}"))


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_moe", ["all-linear", "alpha", "not one layer"]),
        *tiered(
            slow=[(each, list(BY_PEFT)) for each in ("mixtral", "gpt_oss")],
            release=[(each, list(BY_PEFT)) for each in BY_EXPERT if each != "mixtral"],
        ),
    ],
)
def test_every_tool_computes_the_same(family: str, kinds: list[str], ranks: RankPool, tmp_path: Path) -> None:
    """Of adapters that PEFT made, of our exports of them in both forms, and of those when PEFT has saved them again."""
    tiny_model(family, 0).save_pretrained(base := tmp_path / "base", save_original_format=True)
    save_tokenizer(base)
    before, wanted = logits_of(load_model(base)), dict[str, Tensor]()
    for name, kind in kinds_of(family).items():
        if name not in kinds:
            continue
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **kind)
        peft.get_peft_model(load_model(base), config).save_pretrained(tmp_path / name)
        wanted[name] = logits_of(by_peft(base, tmp_path / name))
        assert relative_error(wanted[name], before) > 1e-3
    forms = ["packed", *["per-expert"] * (family in BY_EXPERT and len(kinds) > 3)]
    ranks.run(_begun, 1, base, tmp_path, list(wanted), forms)
    again = []
    for name, want in list(wanted.items()):
        assert checkpoints_main(["merge", str(base), str(tmp_path / name), str(tmp_path / f"{name} merged")]) == 0
        found = {"merge": logits_of(load_model(tmp_path / f"{name} merged"))}
        for form in forms:
            saved = tmp_path / f"{name} {form} again"
            ours = by_peft(base, tmp_path / f"{name} begun {form}")
            found[form] = logits_of(ours)
            ours.save_pretrained(saved)
            found[f"{form} again"] = logits_of(by_peft(base, saved))
            if name in ("packed", "all-linear"):
                again.append(saved.name)
                wanted[saved.name] = want
        for tool, logits in found.items():
            error = relative_error(logits, want)
            print(f"{family:12} {name:18} {tool:18} {error:.1e}")
            assert error < OTHER_ORDER, (name, tool)
    ranks.run(_begun, 1, base, tmp_path, again, ["packed"])
    for name in again:
        error = relative_error(logits_of(by_peft(base, tmp_path / f"{name} begun packed")), wanted[name])
        print(f"{family:12} {name:18} {'begun':18} {error:.1e}")
        assert error < OTHER_ORDER, name


def test_all_linear_is_what_peft_adapts(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", 0).save_pretrained(base := tmp_path / "base", save_original_format=True)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    theirs = peft.get_peft_model(load_model(base), config).base_model
    ours = build_model(load_model(base).config, "eager")
    adapt(ours, TrainConfig(model="m", dataset=["d"], adapter="lora", lora_targets=["all-linear"]))
    found = {name.partition(".lora_")[0] for name in map(str, dict(ours.named_parameters())) if ".lora_" in name}
    parameters = {name.removesuffix(".weight") for name in theirs.targeted_parameter_names if "experts" not in name}
    wanted = {*theirs.targeted_module_names, *parameters}
    # PEFT takes these names for experts', and leaves out a dense layer's
    dense = {f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert (found - wanted, wanted - found) == (dense, set())
    assert any("experts" in name for name in theirs.targeted_parameter_names)
    assert any(name.endswith("w2_lora_A") for name, _ in ours.named_parameters())
