"""PEFT's formats of adapters, against PEFT: what is written gives the right logits there, what it writes is read."""

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expertmesh.checkpoints.adapters.peft_format import (
    LoraPair,
    adapter_config,
    lora_names,
    pack_experts,
    packed_paths,
    rank_and_scaling,
    reads_by_expert,
    unpack_experts,
)
from expertmesh.checkpoints.hf.names import Names
from expertmesh.moe.experts.layout import ExpertLayout, expert_modules, read_layout
from expertmesh.moe.hf_model.build import build_model
from tests.families.configs import TEXT_IDS, skip_if_older, tiny_config, tiny_model
from tests.rounding import assert_near

peft = pytest.importorskip("peft")

pytestmark = [
    # it looks for a parameter's pattern among modules alone
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
    pytest.mark.filterwarnings("error:Found missing adapter keys"),
]

Tensors = dict[str, Tensor]
Pairs = dict[str, LoraPair]
Config = dict[str, Any]

RANK, ALPHA, EXPERTS = 3, 6.0, 6
FAMILIES = {
    "mixtral": dict(num_local_experts=EXPERTS, intermediate_size=24),
    "qwen3_moe": dict(num_experts=EXPERTS),
    "deepseek_v3": dict(n_routed_experts=EXPERTS),
    "qwen3_next": dict(num_experts=EXPERTS),
    # PEFT does not take its experts' names in target_modules
    "qwen2_moe": dict(num_experts=EXPERTS),
    # these have no names by expert
    "gpt_oss": dict(num_local_experts=EXPERTS, intermediate_size=24),
    "aria_text": dict(moe_num_experts=EXPERTS, intermediate_size=24),
    # no gate
    "nemotron_h": dict(n_routed_experts=EXPERTS),
}
BY_EXPERT = ["mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "qwen2_moe"]
FORMS = [(family, "packed") for family in FAMILIES] + [(family, "per expert") for family in BY_EXPERT]


@cache
def base_of(family: str) -> Any:
    model = tiny_model(family, 0, **FAMILIES.get(family, {})).eval()
    if not list(expert_modules(model)):
        skip_if_older(f"does not mark the experts of {family}")
    return model


def logits_of(model: nn.Module) -> Tensor:
    text = torch.randint(3, TEXT_IDS, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = model(input_ids=text, use_cache=False).logits
    return logits


def layouts_of(model: Any) -> dict[str, ExpertLayout]:
    return {path: read_layout(module, 2, path) for path, module in expert_modules(model)}


def linear_layers(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]


def attention(model: nn.Module) -> list[str]:
    return [path for path in linear_layers(model) if "attn" in path]


def outside_attention(model: nn.Module) -> list[str]:
    """Linear layers of dense MLPs and shared experts, and the routers."""
    routers = [path for path, module in model.named_modules() if type(module).__name__.lower().endswith("router")]
    return [path for path in linear_layers(model) if ".mlp." in path] + routers


def random_pair(generator: torch.Generator, out: int, into: int, *experts: int) -> LoraPair:
    a = torch.randn(*experts, RANK, into, generator=generator)
    return LoraPair(0.05 * a, 0.05 * torch.randn(*experts, out, RANK, generator=generator))


class Adapter:
    """Random pairs for linear layers and for every expert of a model.

    linear: by path. experts: by path of the experts module, then by the layout's names.
    """

    def __init__(self, model: Any, linear: Iterable[str]):
        generator = torch.Generator().manual_seed(1)
        self.linear = {path: random_pair(generator, *model.get_submodule(path).weight.shape) for path in linear}
        self.experts: dict[str, Pairs] = {}
        for path, layout in layouts_of(model).items():
            wide, narrow = layout.shape.expert_width, layout.shape.model_width
            assert wide < narrow
            assert layout.shape.num_experts == EXPERTS
            into = ("w1", "v1") if layout.shape.has_gate else ("w1",)
            pairs = {name: random_pair(generator, wide, narrow, EXPERTS) for name in into}
            self.experts[path] = {**pairs, "w2": random_pair(generator, narrow, wide, EXPERTS)}


def merged(model: Any, adapter: Adapter, scaling: float = ALPHA / RANK) -> Any:
    """A copy of the model with scaling · B A added to its weights, by transformers' flags alone."""
    model = deepcopy(model)
    with torch.no_grad():
        for path, (a, b) in adapter.linear.items():
            model.get_submodule(path).weight += scaling * b @ a
        for path, pairs in adapter.experts.items():
            module = model.get_submodule(path)
            for name, pair in pairs.items():
                tensor, rows = place_of(module, name)
                for weight, a, b in zip(getattr(module, tensor), *pair, strict=True):
                    matrix = weight.t() if module.is_transposed else weight
                    matrix[rows] += scaling * b @ a
    return model


def place_of(experts: Any, name: str) -> tuple[str, slice]:
    """transformers' tensor, and which rows of it, as a linear layer has them, are gate, up or down."""
    if name == "w2":
        return "down_proj", slice(None)
    if not experts.has_gate:
        return "up_proj", slice(None)
    if not experts.is_concatenated:
        return "gate_up_proj", slice(0 if name == "w1" else 1, None, 2)
    half = experts.gate_up_proj.shape[1 + experts.is_transposed] // 2
    return "gate_up_proj", slice(0, half) if name == "w1" else slice(half, None)


@cache
def names_on_disk(family: str) -> dict[tuple[str, int], str]:
    """What each expert's matrix is called in checkpoints, less `.weight`, by our parameter and the expert's number."""
    names = Names(build_model(tiny_config(family, **FAMILIES[family]), "eager"))
    with TemporaryDirectory() as folder:
        base_of(family).save_pretrained(folder, save_original_format=True)
        shapes = {name: tuple(x.shape) for name, x in load_file(Path(folder) / "model.safetensors").items()}
    return {
        (region.parameter, region.rows.start // names.experts[region.parameter]): name.removesuffix(".weight")
        for name, regions in names.match(shapes).tensors.items()
        for region in regions
        if region.parameter in names.experts
    }


def named(pairs: Iterable[tuple[str, LoraPair]]) -> Tensors:
    return {name: tensor for path, pair in pairs for name, tensor in zip(lora_names(path), pair, strict=True)}


def tensors_of(family: str, form: str, adapter: Adapter, config: Config) -> Tensors:
    """What a file holds of an adapter."""
    tensors = named(adapter.linear.items())
    if form == "per expert":
        for (parameter, expert), name in names_on_disk(family).items():
            path, _, matrix = parameter.rpartition(".mlp.")
            pair = adapter.experts[path][matrix]
            tensors |= named([(name, LoraPair(pair.a[expert], pair.b[expert]))])
        return tensors
    for path, layout in layouts_of(base_of(family)).items():
        paths = packed_paths(path, layout, config["target_parameters"])
        tensors |= named((paths[name], pair) for name, pair in pack_experts(adapter.experts[path], layout).items())
    return tensors


def config_of(model: Any, adapter: Adapter, use_rslora: bool = False) -> Config:
    linear = set(linear_layers(model))
    return adapter_config(
        base_model=None,
        rank=RANK,
        alpha=ALPHA,
        use_rslora=use_rslora,
        modules=[path for path in adapter.linear if path in linear],
        weights=[path for path in adapter.linear if path not in linear],
        experts=layouts_of(model),
        others=[name for path in linear - adapter.linear.keys() for name in (path, f"{path}.weight")],
    )


def in_peft(model: Any, config: Config, tensors: Tensors, folder: Path) -> Any:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return peft.PeftModel.from_pretrained(deepcopy(model), folder)


def assert_same_logits(found: nn.Module, wanted: nn.Module) -> None:
    assert_near(logits_of(found), logits_of(wanted))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "form"), FORMS)
def test_peft_gives_the_logits_of_merged_weights(family: str, form: str, tmp_path: Path) -> None:
    """Of attention; of routers, shared experts and dense layers, whose modules are called as experts' matrices are; and
    with rsLoRA: PEFT doubles alpha with the rank of gate and up by itself, a factor of √2 too much here."""
    model = base_of(family)
    others = outside_attention(model) if family in ("mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe") else []
    for linear, use_rslora in ((attention(model), False), (others, False), ([], True)):
        adapter = Adapter(model, linear)
        config = config_of(model, adapter, use_rslora)
        found = in_peft(model, config, tensors_of(family, form, adapter, config), tmp_path)
        assert (logits_of(found) - logits_of(model)).abs().max() > 0.01
        assert_same_logits(found, merged(model, adapter, ALPHA / (sqrt(RANK) if use_rslora else RANK)))
        # what it saves is ours, in the packed form, whichever it has loaded; and PEFT loads it as it was
        found.save_pretrained(tmp_path / "saved")
        assert_same_logits(peft.PeftModel.from_pretrained(deepcopy(model), tmp_path / "saved"), found)
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        for patterns in (config["rank_pattern"], config["alpha_pattern"]):
            assert not [n for n in names if sum(bool(re.match(rf"(.*\.)?({p})$", n)) for p in patterns) > 1]
        config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        for name, tensor in named(adapter.linear.items()).items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(read_back(model, config, tensors), adapter.experts, rtol=0, atol=0)


def swap_experts(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.a[[1, 0, *range(2, EXPERTS)]], pair.b)


def transpose_b(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.a, pair.b.transpose(1, 2).reshape(pair.b.shape))


def permute_rank_and_expert(packed: LoraPair) -> LoraPair:
    rank = packed.a.shape[0] // EXPERTS
    return LoraPair(packed.a.unflatten(0, (EXPERTS, rank)).transpose(0, 1).flatten(0, 1), packed.b)


def permute_in_b(packed: LoraPair) -> LoraPair:
    rank = packed.b.shape[1] // EXPERTS
    return LoraPair(packed.a, packed.b.unflatten(1, (rank, EXPERTS)).transpose(1, 2).flatten(1, 2))


@pytest.mark.parametrize(
    ("family", "part", "spoil"),
    [
        ("mixtral", "w1", swap_experts),
        ("mixtral", "w2", transpose_b),
        ("gpt_oss", "v1", transpose_b),
        ("gpt_oss", "w2", swap_experts),
        ("mixtral", "gate_up_proj", permute_rank_and_expert),
        ("gpt_oss", "gate_up_proj", permute_in_b),
        ("gpt_oss", "down_proj", permute_rank_and_expert),
        ("mixtral", "config", dict(alpha_pattern={})),
        ("mixtral", "config", dict(lora_alpha=2 * ALPHA)),
    ],
)
def test_what_is_spoilt_is_noticed(family: str, part: str, spoil: Any, tmp_path: Path) -> None:
    """A pair, or one of a packed file, or a scaling: logits are those of no other adapter."""
    model = base_of(family)
    adapter = Adapter(model, [])
    wanted, config = merged(model, adapter), config_of(model, adapter)
    if part.startswith("w") or part == "v1":
        for pairs in adapter.experts.values():
            pairs[part] = spoil(pairs[part])
    form = "packed" if family == "gpt_oss" or part.endswith("proj") else "per expert"
    tensors = tensors_of(family, form, adapter, config)
    for path, layout in layouts_of(model).items() if part.endswith("proj") else ():
        a, b = lora_names(packed_paths(path, layout, config["target_parameters"])[part])
        tensors |= dict(zip((a, b), spoil(LoraPair(tensors[a], tensors[b])), strict=True))
    found = in_peft(model, config | (spoil if part == "config" else {}), tensors, tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(found, wanted)


def read_back(model: Any, config: Config, tensors: Tensors) -> dict[str, Pairs]:
    """Experts' pairs of a packed file, by path of the module."""
    found = {}
    for path, layout in layouts_of(model).items():
        packed = {
            tensor: LoraPair(*(tensors[name] for name in lora_names(at)))
            for tensor, at in packed_paths(path, layout, config["target_parameters"]).items()
        }
        found[path] = unpack_experts(packed, layout, config["peft_version"])
    return found


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        *((family, ("w1", "w2")) for family in ("mixtral", "qwen3_next", "gpt_oss", "aria_text", "nemotron_h")),
        *((family, (name,)) for family in ("mixtral", "gpt_oss") for name in ("w1", "w2")),
    ],
)
def test_what_peft_made_is_read(family: str, adapted: tuple[str, ...], tmp_path: Path) -> None:
    """Both of an experts module's tensors, or one. Its gate and up share an A: each has it whole."""
    model = base_of(family)
    targets = [f"{path}.{place_of(module, name)[0]}" for path, module in expert_modules(model) for name in adapted]
    asked = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=targets)
    theirs = peft.get_peft_model(deepcopy(model), asked)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())

    adapter = Adapter(model, [])
    adapter.experts = read_back(model, config, load_file(tmp_path / "adapter_model.safetensors"))
    ranks = {pair.a.shape[1] for pairs in adapter.experts.values() for pair in pairs.values()}
    assert ranks == {RANK}
    assert (logits_of(theirs) - logits_of(model)).abs().max() > 0.01
    assert_same_logits(theirs, merged(model, adapter))


def test_packing_and_back() -> None:
    """Every bit of any dtype."""
    for model in map(base_of, FAMILIES):
        for path, layout in layouts_of(model).items():
            experts = Adapter(model, []).experts[path]
            pairs = {name: LoraPair(*(x.bfloat16() for x in pair)) for name, pair in experts.items()}
            packed = pack_experts(pairs, layout)
            assert {x.dtype for pair in packed.values() for x in pair} == {torch.bfloat16}
            torch.testing.assert_close(unpack_experts(packed, layout, "0.21.2"), pairs, rtol=0, atol=0)


def test_what_was_trained_on_is_no_longer_in_blocks() -> None:
    """PEFT trains the zeros beside the blocks, too: gate and up then have all of A."""
    model = base_of("gpt_oss")
    ((path, layout), *_) = layouts_of(model).items()
    packed = pack_experts(Adapter(model, []).experts[path], layout)
    packed["gate_up_proj"].b[0, -1] = 0.5
    found = unpack_experts(packed, layout, "0.21.2")
    assert [found[name].a.shape[1] for name in ("w1", "v1", "w2")] == [2 * RANK, 2 * RANK, RANK]
    assert found["w1"].b[-1, 0, -1] == 0.5


# what each version computes of lora_A (E·r, i) and lora_B (o, r·E): (E, i, o), or (E, o, i) where it swaps these
VERSIONS = [
    *((version, is_transposed, "eio") for version in (None, "0.18.1") for is_transposed in (False, True)),
    *(("0.19.0", False, "eio"), ("0.19.0", True, "eoi"), ("0.19.1", False, "eoi"), ("0.19.1", True, "eio")),
    ("0.21.3.dev0@2c4a1b0", False, "eoi"),
]


@pytest.mark.parametrize(("version", "is_transposed", "order"), VERSIONS)
def test_orientation_by_version(version: str | None, is_transposed: bool, order: str) -> None:
    model = base_of("aria_text" if is_transposed else "mixtral")
    ((_, layout), *_) = layouts_of(model).items()
    packed, deltas = {}, {}
    generator = torch.Generator().manual_seed(3)
    for tensor in ("gate_up_proj", "down_proj"):
        sizes = dict(zip(order, layout.tensors[tensor], strict=True))
        a = torch.randn(EXPERTS, RANK, sizes["i"], generator=generator)
        b = torch.randn(sizes["o"], RANK, EXPERTS, generator=generator)
        packed[tensor] = LoraPair(a.flatten(0, 1), b.flatten(1, 2))
        deltas[tensor] = torch.einsum(f"ore,eri->{order}", b, a)
    found = unpack_experts(packed, layout, version)
    whole = {"gate_up_proj": torch.cat([found[name].b @ found[name].a for name in ("w1", "v1")], 1)}
    whole["down_proj"] = found["w2"].b @ found["w2"].a
    for tensor, delta in deltas.items():
        assert_near(whole[tensor], delta.mT if is_transposed else delta)


def test_tensors_of_another_shape_are_refused() -> None:
    model = base_of("mixtral")
    ((path, layout), *_) = layouts_of(model).items()
    packed = pack_experts(Adapter(model, []).experts[path], layout)
    with pytest.raises(ValueError, match=r"of gate_up_proj have shapes \[36, 32\] and \[48, 36\].*PEFT 0\.18\.1 with"):
        unpack_experts(packed, layout, "0.18.1")
    with pytest.raises(ValueError, match=r"down_proj have shapes \[17, 24\]"):
        unpack_experts({"down_proj": LoraPair(packed["down_proj"].a[:-1], packed["down_proj"].b)}, layout, "0.21.2")
    with pytest.raises(ValueError, match="peft_version is 'new'"):
        unpack_experts(packed, layout, "new")


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", [*FAMILIES, "dots3_note", "granitemoe"])
def test_which_families_peft_reads_by_expert(family: str) -> None:
    model = base_of(family)
    ((path, layout), *_) = layouts_of(model).items()
    built = build_model(tiny_config(family, **FAMILIES.get(family, {})), "eager")
    assert reads_by_expert(model, path, layout) is reads_by_expert(built, path, layout) is (family in BY_EXPERT)


def test_peft_drops_what_it_does_not_read_by_expert(tmp_path: Path) -> None:
    """Why `reads_by_expert` is to be asked: there is no error."""
    model = base_of("nemotron_h")
    adapter = Adapter(model, [])
    config = config_of(model, adapter)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        found = in_peft(model, config, tensors_of("nemotron_h", "per expert", adapter, config), tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(found, merged(model, adapter))


def test_targets_take_in_nothing_else(tmp_path: Path) -> None:
    """Attention of one layer, the experts of two; PEFT adapts these and no others."""
    model = base_of("qwen3_moe")
    experts = dict(list(layouts_of(model).items())[1:])
    modules = [path for path in attention(model) if ".layers.1." in path]
    every = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    tensors = [f"{path}.{name}" for path in experts for name in ("gate_up_proj", "down_proj")]
    others = set(every) - {*modules, *tensors}
    config = adapter_config(base_model=None, rank=RANK, alpha=ALPHA, modules=modules, experts=experts, others=others)
    asked = peft.LoraConfig(**{key: value for key, value in config.items() if key != "peft_type"})
    found = peft.get_peft_model(deepcopy(model), asked).base_model
    assert sorted(found.targeted_module_names) == sorted(modules)
    assert sorted(found.targeted_parameter_names) == sorted(tensors)


def test_a_weights_target_says_whose() -> None:
    """`weight` alone would be every module's."""
    config = adapter_config(
        base_model=None, rank=RANK, alpha=ALPHA, modules=["model.layers.1.mlp.shared_experts.up_proj"]
    )
    assert (config["target_modules"], config["target_parameters"]) == ([], ["up_proj.weight"])


@pytest.mark.parametrize("use_rslora", [False, True])
def test_rank_and_scaling_as_in_peft(use_rslora: bool, tmp_path: Path) -> None:
    model = base_of("qwen3_moe")
    adapter = Adapter(model, attention(model))
    config = config_of(model, adapter, use_rslora)
    config["rank_pattern"] |= {"q_proj": 5, r".*layers\.1\.self_attn\.[kv]_proj": 4}
    config["alpha_pattern"] |= {"layers.0.self_attn.o_proj": 20, "^proj": 1, "j_proj": 1, "model.norm": 2}
    asked = peft.LoraConfig(**{key: value for key, value in config.items() if key != "peft_type"})
    found = 0
    for path, module in peft.get_peft_model(deepcopy(model), asked).base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            wrapped = f".{module.parameter_name}" if hasattr(module, "parameter_name") else ""
            rank, scaling = rank_and_scaling(config, path.replace(".base_layer", "") + wrapped)
            assert rank == module.r["default"]
            assert scaling == pytest.approx(module.scaling["default"], rel=1e-12)
            found += 1
    assert found == len(adapter.linear) + 2 * len(adapter.experts)
    assert rank_and_scaling(config, "model.layers.0.mlp.experts.4.gate_proj")[0] == RANK


def test_a_pattern_that_is_none_is_refused() -> None:
    config = adapter_config(base_model=None, rank=RANK, alpha=ALPHA, modules=["q_proj"]) | {"rank_pattern": {"(": 2}}
    with pytest.raises(ValueError, match=r"rank_pattern has '\('"):
        rank_and_scaling(config, "q_proj")
