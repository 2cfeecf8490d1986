"""`merge` against PEFT: what is merged is what PEFT's model computes, or is refused by name."""

import dataclasses
import json
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from expertmesh.checkpoints.adapters.merge import Rounding
from expertmesh.checkpoints.adapters.peft_format import unread_settings
from tests.checkpoints.commands import change_tensors, lines, read, run
from tests.families.configs import TEXT_IDS, tiny_config, tiny_model
from tests.rounding import OF_ADDED, OTHER_ORDER, error_beyond
from tests.tiny import relative_error

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS_BS = torch.randint(3, TEXT_IDS, (2, 12), generator=torch.Generator().manual_seed(0))
LAYERS = r"model\.(language_model\.)?layers"


def saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A family whose experts have names of their own on disk, one whose have none, one with a vision tower, and one
    whose head is tied to its embedding."""
    root = tmp_path_factory.mktemp("bases")
    plain = {name: tiny_model(name, 0) for name in ("mixtral", "qwen3_moe", "gpt_oss")}
    torch.manual_seed(0)
    # in its own class; experts' matrices are not drawn by transformers
    whole: Any = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5_moe"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    models = {**plain, "qwen3_5_moe": whole, "tied": tiny_model("qwen3_moe", 0, tie_word_embeddings=True)}
    return {name: saved(model, root / name) for name, model in models.items()}


def load(path: Path) -> Any:
    """A model of the class that config.json names."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    auto = AutoModelForImageTextToText if name.endswith("ForConditionalGeneration") else AutoModelForCausalLM
    model: Any = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert type(model).__name__ == name
    return model.eval()


def language_model(model: Any) -> dict[str, Tensor]:
    """What the head, and what stands under it, have in floating point: where an adapter may be."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    kept = {id(tensor) for part in parts for tensor in part.state_dict(keep_vars=True).values()}
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) in kept and tensor.is_floating_point()
    }


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS_BS, use_cache=False).logits
    return logits


def adapter_of(base: Path, out: Path, **settings: Any) -> Path:
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings})
    model = peft.get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # which some ways to begin leave at zero
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(out)
    return out


def merged(base: Path, adapter: Path, out: Path) -> Path:
    run("merge", base, adapter, out)
    return out


SHAPES: dict[str, dict[str, Any]] = {
    "attention": dict(target_modules=ATTENTION),
    "experts too": dict(target_modules=ATTENTION, target_parameters=EXPERTS),
    "rslora": dict(target_modules=ATTENTION, target_parameters=EXPERTS, use_rslora=True),
    "one of the experts' tensors": dict(target_modules=[], target_parameters=EXPERTS[1:]),
    "a pattern with the path of the class": dict(
        target_modules=ATTENTION,
        rank_pattern={LAYERS + r"\.1\.self_attn\.q_proj": 8},
        alpha_pattern={LAYERS + r"\.\d+\.self_attn\.[qk]_proj": 24},
    ),
    "patterns from the beginning": dict(
        target_modules=ATTENTION,
        rank_pattern={"^" + LAYERS + r"\.1\.self_attn\.q_proj": 8, "v_proj": 2},
        alpha_pattern={"^" + LAYERS + r"\.1\.self_attn\.q_proj": 1},
    ),
    "patterns of experts": dict(
        target_modules=["q_proj"],
        target_parameters=EXPERTS,
        rank_pattern={"experts.gate_up_proj": 6, LAYERS + r"\.1\.mlp\.experts\.down_proj": 2},
        alpha_pattern={"experts.down_proj": 3, r".*\.1\.mlp\.experts\.gate_up_proj": 30},
        use_rslora=True,
    ),
    "the first pattern that fits": dict(target_modules=["q_proj"], alpha_pattern={"q_proj": 24, ".*q_proj": 1}),
    "a weight, and a pattern of its name": dict(
        target_modules=[], target_parameters=["q_proj.weight"], alpha_pattern={"q_proj": 1, "q_proj.weight": 24}
    ),
    "some layers": dict(target_modules=["q_proj"], layers_to_transform=[1]),
    "all but some": dict(target_modules="all-linear", exclude_modules=r".*(k_proj|visual|lm_head).*"),
    "by a regular expression": dict(target_modules=LAYERS + r"\.1\.self_attn\.[qv]_proj"),
    "biases that are not there": dict(target_modules=["q_proj"], bias="lora_only"),
    "fan in, fan out": dict(target_modules=["q_proj"], fan_in_fan_out=True),
    "gaussian": dict(target_modules=["q_proj"], init_lora_weights="gaussian"),
    "orthogonal": dict(target_modules=["q_proj"], init_lora_weights="orthogonal"),
}


# each on one family whose experts have names of their own and on one whose have none; not biases beside biases
PLACES = [
    (shape, family)
    for number, shape in enumerate(SHAPES)
    for family in (("mixtral", "qwen3_moe")[number % 2], ("gpt_oss", "qwen3_5_moe")[number // 2 % 2])
    if not (family == "gpt_oss" and "bias" in SHAPES[shape])
]


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize(("shape", "family"), PLACES)
def test_as_peft_merges(bases: dict[str, Path], tmp_path: Path, family: str, shape: str) -> None:
    """Tensor by tensor, and in what it computes."""
    base = bases[family]
    adapter = adapter_of(base, tmp_path / "adapter", **SHAPES[shape])
    theirs = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
    ours = load(merged(base, adapter, tmp_path / "merged"))
    want, found, before = language_model(theirs), language_model(ours), language_model(load(base))
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        # of the update, beyond what is rounded of the weight that it is added to
        rounding = OF_ADDED * float(before[name].norm())
        assert error_beyond(rounding, found[name] - before[name], tensor - before[name]) <= OTHER_ORDER, name
    assert any(not torch.equal(before[name], tensor) for name, tensor in want.items())


def test_a_vision_tower(bases: dict[str, Path], tmp_path: Path) -> None:
    """As PEFT merges into the complete model; EP shards only carry the tower over."""
    base = bases["qwen3_5_moe"]
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["qkv", "linear_fc1", "q_proj"])
    theirs = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    found, before = load(merged(base, adapter, tmp_path / "merged")).state_dict(), load(base).state_dict()
    for name, tensor in theirs.items():
        rounding = OF_ADDED * float(before[name].float().norm())
        assert error_beyond(rounding, found[name] - before[name], tensor - before[name]) <= OTHER_ORDER, name
    changed = {name.split(".")[1] for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert changed == {"visual", "language_model"}
    run("convert", base, tmp_path / "shards", "--ep-size", 2)
    told = run("merge", tmp_path / "shards", adapter, tmp_path / "not", code=2)
    assert "which EP shards only carry over; give the model that" in told
    assert not (tmp_path / "not").exists()


def test_what_rounding_takes_is_told(bases: dict[str, Path], tmp_path: Path) -> None:
    """And nothing is taken where the result is in float32, which its config says, too."""
    base = saved(load(bases["mixtral"]).to(torch.bfloat16), tmp_path / "base")
    settings = dict(target_modules=ATTENTION, target_parameters=EXPERTS, lora_alpha=0.003)
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    told = run("merge", base, adapter, tmp_path / "narrow")
    told_wide = run("merge", base, adapter, tmp_path / "wide", "--dtype", "float32")
    before, narrow, wide = (read(path) for path in (base, tmp_path / "narrow", tmp_path / "wide"))
    adapted = [name for name, tensor in wide.items() if not torch.equal(tensor, before[name].float())]
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.float32

    def joined(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].double().flatten() for name in adapted])

    changed = (joined(narrow) != joined(before)).double().mean()
    lost = (joined(narrow) - joined(wide)).norm() / (joined(wide) - joined(before)).norm()
    assert lost > 0.5
    said = re.search(
        r"merge: (\S+)% of the (\S+) elements .*; rounding to bfloat16 took (\S+)% from the LoRA deltas", told
    )
    assert said is not None, told
    assert float(said[1]) == pytest.approx(100 * float(changed), abs=0.06)
    assert int(said[2].replace(",", "")) == joined(wide).numel()
    assert float(said[3]) == pytest.approx(100 * float(lost), abs=0.06)
    assert "merge with --dtype float32 (in a run --merge-dtype float32)" in told
    assert "; rounding to" not in told_wide
    assert "elements of adapted matrices changed" in told_wide


def test_a_remedy_is_named_where_much_is_lost() -> None:
    base, said = torch.ones(64, 64), []
    for size in (1e-4, 1.0):
        rounding = Rounding({"w": "BF16"})
        update = torch.full((64, 64), size, dtype=torch.float64)
        rounding.add("w", base.bfloat16(), update, (base.double() + update).float())
        said.append(rounding.line() or "")
    assert ["--dtype float32" in line for line in said] == [True, False]
    assert said[0].startswith(
        "merge: 0.0% of the 4,096 elements of adapted matrices changed; rounding to bfloat16 took 1"
    )
    assert said[1] == "merge: 100.0% of the 4,096 elements of adapted matrices changed"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe"])
def test_patterns_of_whole_paths(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    """As PEFT writes them where it finds ranks by itself."""
    path = next(path for path, _ in load(bases[family]).named_modules() if path.endswith("layers.1.self_attn.q_proj"))
    settings = dict(target_modules=["q_proj"], rank_pattern={path: 8}, alpha_pattern={f"^{path}": 48})
    adapter = adapter_of(bases[family], tmp_path / "adapter", **settings)
    want = language_model(peft.PeftModel.from_pretrained(load(bases[family]), adapter).merge_and_unload())
    found = language_model(load(merged(bases[family], adapter, tmp_path / "merged")))
    assert max(relative_error(found[name], tensor) for name, tensor in want.items()) < OTHER_ORDER


def test_adapters_of_earlier_transformers(bases: dict[str, Path], tmp_path: Path) -> None:
    """Each expert's linear layers were modules then, and patterns went by their names, and by those of the blocks that
    they stood in."""
    base = load_file(bases["mixtral"] / "model.safetensors")
    block = "model.layers.1.block_sparse_moe"
    ranks = {f"{block}.gate": 2, **{f"{block}.experts.{n}.{w}": r for n in range(8) for w, r in OLD_RANKS.items()}}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for module, rank in ranks.items():
        rows, columns = base[f"{module}.weight"].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    config = {
        "peft_type": "LORA",
        "peft_version": "0.15.0",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["gate", "w1", "w2", "w3"],
        "rank_pattern": {"block_sparse_moe.gate": 2, "w1": 3},
        "alpha_pattern": {r"block_sparse_moe\.experts\.\d\.w2": 40, "gate": 6},
    }
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = load_file(merged(bases["mixtral"], adapter, tmp_path / "merged") / "model.safetensors")
    scales = {"gate": 6 / 2, "w1": 8 / 3, "w2": 40 / 4, "w3": 8 / 4}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module in ranks:
            a, b = (tensors[f"base_model.model.{module}.lora_{which}.weight"].double() for which in "AB")
            tensor = (tensor.double() + scales[module.rpartition(".")[2]] * (b @ a)).float()
        assert torch.equal(found[name], tensor), name


OLD_RANKS = {"w1": 3, "w2": 4, "w3": 4}


@pytest.mark.parametrize("copied", [False, True], ids=["", "head stored too"])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens.weight"])
def test_beside_one_of_two_tied(bases: dict[str, Path], tmp_path: Path, target: str, copied: bool) -> None:
    """They part, so that each is what PEFT's model multiplied by before it merged them into one."""
    base = tmp_path / "base"
    shutil.copytree(bases["tied"], base)
    if copied:
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = tmp_path / "adapter"
    torch.manual_seed(1)
    modules, parameters = ([target], []) if target == "lm_head" else ([], [target])
    config = peft.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, target_modules=[*modules, "q_proj"], target_parameters=parameters
    )
    theirs = peft.get_peft_model(load(base), config).eval()
    theirs.save_pretrained(adapter, save_embedding_layers=False)
    ours = load(merged(base, adapter, tmp_path / "merged"))
    assert ours.config.tie_word_embeddings is False
    assert relative_error(logits_of(ours), logits_of(theirs)) < OTHER_ORDER
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert sorted(after) == sorted({*before, "lm_head.weight"})
    other = "model.embed_tokens.weight" if target == "lm_head" else "lm_head.weight"
    assert torch.equal(after[other], before["model.embed_tokens.weight"])


def test_tied_ones_stay_tied_where_neither_changes(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = adapter_of(bases["tied"], tmp_path / "adapter", target_modules=["q_proj"])
    ours = load(merged(bases["tied"], adapter, tmp_path / "merged"))
    assert ours.config.tie_word_embeddings is True
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def test_settings_are_understood_or_refused() -> None:
    """All that PEFT's config has: its defaults are read, and what it calls a variant is not."""
    defaults = peft.LoraConfig().to_dict()
    assert unread_settings(json.loads(json.dumps(defaults, default=list))) == {}
    variants = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")]
    for name in (*variants, "layer_replication", "of_a_later_peft"):
        assert unread_settings({**defaults, name: [1]}) == {name: [1]}
    (inits,) = [field.type for field in dataclasses.fields(peft.LoraConfig) if field.name == "init_lora_weights"]
    hints = typing.get_type_hints(peft.LoraConfig).get("init_lora_weights", inits)
    names = [name for part in typing.get_args(hints) for name in typing.get_args(part)]
    assert {"pissa", "olora", "loftq"} < set(names)
    read = [name for name in names if not unread_settings({"init_lora_weights": name})]
    assert read == ["gaussian", "eva", "orthogonal", "mica"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (dict(use_dora=True), "use_dora"),
        (dict(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (dict(init_lora_weights="olora"), "init_lora_weights is 'olora'"),
        (dict(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"), "alora_invocation_tokens"),
        (dict(target_modules=["embed_tokens"]), "embed_tokens.base_layer.weight has no place"),
        (dict(bias="all", target_modules=["q_proj"]), "bias 'all'"),
    ],
    ids=str,
)
def test_refused_by_name(bases: dict[str, Path], tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    base = bases["gpt_oss"]
    adapter = adapter_of(base, tmp_path / "adapter", **{"target_modules": ["q_proj"], **settings})
    (error,) = lines("merge", base, adapter, tmp_path / "merged", code=2)
    assert what in error
    assert not (tmp_path / "merged").exists()


def test_ranks_are_held_against_the_config(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = adapter_of(bases["mixtral"], tmp_path / "adapter", target_modules=["q_proj"], target_parameters=EXPERTS)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    for changes, said in (
        ({"r": 8}, "says rank 8 x 8 experts"),
        ({"rank_pattern": {"q_proj": 2}}, "says rank 2"),
        ({"rank_pattern": {"experts.down_proj": 5}}, "says rank 5 x 8 experts"),
        ({"rank_pattern": {"q_proj": "x"}}, "the scale of"),
    ):
        file.write_text(json.dumps({**config, **changes}))
        assert said in run("merge", bases["mixtral"], adapter, tmp_path / "merged", code=2)
    file.write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    name = next(name for name in load_file(weights) if "q_proj.lora_B" in name)
    change_tensors(weights, lambda tensors: tensors.update({name: tensors[name][:, :3]}))
    assert "lora_B.weight [64, 3]; " in run("merge", bases["mixtral"], adapter, tmp_path / "merged", code=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("names", ["of the whole model", "of the language model"])
def test_names_of_either_class_are_read(bases: dict[str, Path], tmp_path: Path, names: str) -> None:
    """An adapter of the language model alone, as peft makes it, has its names."""
    base = bases["qwen3_5_moe"]
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=EXPERTS)
    want = language_model(load(merged(base, adapter, tmp_path / "want")))
    if names == "of the language model":
        weights = adapter / "adapter_model.safetensors"
        tensors = load_file(weights)
        assert all(".language_model." in name for name in tensors)
        save_file({name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}, weights)
    found, before = language_model(load(merged(base, adapter, tmp_path / "found"))), language_model(load(base))
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    changed = {
        name.rpartition(".layers.1.")[2] for name, tensor in want.items() if not torch.equal(before[name], tensor)
    }
    assert {"self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= changed


@pytest.mark.parametrize("target", ["attention", "experts"])
def test_an_adapter_of_another_model_is_refused(bases: dict[str, Path], tmp_path: Path, target: str) -> None:
    """With fewer or more layers, other widths, and for experts another number of them."""
    targets = (
        dict(target_modules=["q_proj"])
        if target == "attention"
        else dict(target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    )
    adapter = adapter_of(bases["mixtral"], tmp_path / "adapter", **targets)
    config = json.loads((bases["mixtral"] / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    others: list[dict[str, Any]] = [{"num_hidden_layers": layers + 1}, {"num_hidden_layers": layers - 1}]
    others += [{"hidden_size": 2 * config["hidden_size"]}]
    others += [{"num_local_experts": 2 * experts}] if target == "experts" else []
    for number, changes in enumerate(others):
        other = saved(tiny_model("mixtral", 0, **changes), tmp_path / str(number))
        assert str(adapter) in run("merge", other, adapter, tmp_path / "merged", code=2), changes
        assert not (tmp_path / "merged").exists()
    run("merge", bases["mixtral"], adapter, tmp_path / "merged")


def test_an_adapter_of_another_base_is_told(bases: dict[str, Path], tmp_path: Path) -> None:
    """Of the same shape; not of a directory that was moved, or of a snapshot of the hub's."""
    base = bases["mixtral"]
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    names = {str(base): False, f"/moved/{base.name}": False, f"org/{base.name}": False, "org/Other": True, "/a/b": True}
    for number, (name, is_told) in enumerate(names.items()):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        said = run("merge", base, adapter, tmp_path / str(number))
        assert (f"names {name} as the adapter's base" in said) is is_told
    snapshot = tmp_path / "models--org--Other" / "snapshots" / "0a1b"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(base, snapshot)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/Other"}))
    assert "as the adapter's base" not in run("merge", snapshot, adapter, tmp_path / "of the hub")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "qkv"): x for name, x in load_file(weights).items()}, weights)
    said = run("merge", base, adapter, tmp_path / "of another family", code=2)
    assert f"has no place in this model, of the family mixtral: the adapter is of {base}" in said
