"""What tensors on disk are to a model: the same weights as transformers makes of them, or the name of what is wrong."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import Chunk, WeightConverter

from expertmesh.checkpoints.files.tensors import Region
from expertmesh.checkpoints.hf.names import Matched, Names
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import causal_families
from tests.families.configs import skip_if_older, tiny_config, tiny_model
from tests.tiny import our_rows

Tensors = dict[str, Tensor]
PREFIX = "model.layers.0.block_sparse_moe.experts"
FUSED = "model.layers.0.mlp.experts"
MIXTRAL = tiny_config("mixtral")
HIDDEN, WIDTH, EXPERTS = MIXTRAL.hidden_size, MIXTRAL.intermediate_size, MIXTRAL.num_local_experts


@cache
def names_of(family: str, **changes: Any) -> Names:
    return Names(build_model(tiny_config(family, **changes), "eager"))


@cache
def theirs_of(family: str, **changes: Any) -> Any:
    return tiny_model(family, 0, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensors]:
    """What transformers writes of a tiny model: experts by themselves as its hub's checkpoints have them, or fused."""

    @cache
    def save(family: str, original: bool = True, **changes: Any) -> Tensors:
        path: Path = tmp_path_factory.mktemp(family)
        theirs_of(family, **changes).save_pretrained(path, save_original_format=original)
        tensors: Tensors = load_file(path / "model.safetensors")
        return tensors

    return save


def match(names: Names, tensors: Tensors) -> Matched:
    return names.match({name: tuple(tensor.shape) for name, tensor in tensors.items()})


def assembled(names: Names, tensors: Tensors) -> Tensors:
    """Our parameters, put together from tensors on disk, of which each row must be given once."""
    matched = match(names, tensors)
    assert matched.problems == {}
    found = {name: torch.full(shape, float("nan")) for name, shape in names.parameters.items()}
    for name, regions in matched.tensors.items():
        for region in regions:
            matrix = tensors[name][region.index].float()
            rows = matrix.view(1) if matrix.dim() == 0 else matrix.t() if region.transposed else matrix
            place = found[region.parameter].view(-1) if matrix.dim() == 0 else found[region.parameter]
            assert place[region.rows.start : region.rows.stop].isnan().all()
            place[region.rows.start : region.rows.stop] = rows[region.on_disk(region.rows)]
    return found


def expected(names: Names, theirs: Any) -> Tensors:
    """Our parameters, from transformers' own model."""
    tensors = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    wanted = {name: tensors[name].detach().float() for name in names.parameters if name not in names.experts}
    wanted |= {name: wanted[name].t() for name in names.transposed}
    for path, module in names.model.named_modules():
        if path.endswith(".mlp") and hasattr(module, "layout"):
            for part in module.layout.parameters:
                whole = tensors[f"{path.removesuffix('.mlp')}.{part.place.tensor}"]
                wanted[f"{path}.{part.name}"] = our_rows(part, whole.detach()).float()
    return wanted


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("original", [True, False], ids=["as on the hub", "as in memory"])
@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "granitemoe", "jamba"),
        # transformers has them under other classes; or joined along dim 0, of parts of unlike sizes, each with a name
        *("sarvam_moe", "sarvam_mla", "lara_mini"),
    ],
)
def test_same_weights_as_in_transformers(saved: Callable[..., Tensors], family: str, original: bool) -> None:
    assert_same(assembled(names_of(family), saved(family, original)), expected(names_of(family), theirs_of(family)))


def test_parts_of_unlike_sizes(saved: Callable[..., Tensors]) -> None:
    """Queries, keys and values of grouped attention, which are one matrix on the hub."""
    names, tensors = names_of("sarvam_moe"), saved("sarvam_moe")
    matched = match(names, tensors).tensors
    (joined,) = (name for name in matched if "1.attention.query_key_value" in name)
    attention = "model.layers.1.self_attn"
    assert matched[joined] == (
        Region(f"{attention}.q_proj.weight", range(64), first=0),
        Region(f"{attention}.k_proj.weight", range(32), first=64),
        Region(f"{attention}.v_proj.weight", range(32), first=96),
    )
    short = match(names, {**tensors, joined: tensors[joined][:-1]}).problems
    assert short == {joined: f"tensor {joined} has shape [127, 32]; config.json needs [128, 32]"}
    absent = match(names, {name: tensor for name, tensor in tensors.items() if name != joined}).problems
    assert absent == {joined: f"tensor {joined} is missing"}


def test_transposed_beside_experts(saved: Callable[..., Tensors]) -> None:
    """Ours is (in, out), the tensor on disk (out, in): our rows are its columns."""
    names, tensors = names_of("mixtral", head_dim=16), saved("mixtral", head_dim=16)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert name in names.transposed
    inputs, outputs = names.parameters[name]
    assert inputs != outputs
    assert tensors[name].shape == (outputs, inputs)
    assert match(names, tensors).tensors[name] == (Region(name, range(inputs), transposed=True),)
    assert_same(assembled(names, tensors), expected(names, theirs_of("mixtral", head_dim=16)))
    misshapen = match(names, {**tensors, name: tensors[name].t()}).problems
    assert misshapen == {name: f"tensor {name} has shape {[inputs, outputs]}; config.json needs {[outputs, inputs]}"}


@pytest.mark.parametrize("of_fused", [("layers.0.",), ("gate_up_proj", ".w1.", ".w3."), ("down_proj", ".w2.")], ids=str)
def test_mixed_sources(saved: Callable[..., Tensors], of_fused: tuple[str, ...]) -> None:
    """One layer fused and the other not; or gate and up, or down alone."""

    def chosen(name: str) -> bool:
        return any(part in name for part in of_fused)

    fused = {name: tensor for name, tensor in saved("mixtral", original=False).items() if chosen(name)}
    tensors = fused | {name: tensor for name, tensor in saved("mixtral").items() if not chosen(name)}
    assert any(".experts." in name for name in fused)
    assert_same(assembled(names_of("mixtral"), tensors), expected(names_of("mixtral"), theirs_of("mixtral")))


def test_tensors_come_in_the_models_order(saved: Callable[..., Tensors]) -> None:
    """Layer by layer, in a layer the experts one after another, whatever the order in the file."""
    tensors = saved("mixtral")
    matched = match(names_of("mixtral"), dict(reversed(tensors.items())))
    names = list(matched.tensors)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    experts = [name for name in names if name.startswith(PREFIX)]
    start = names.index(experts[0])
    assert names[start : start + len(experts)] == experts == [
        f"{PREFIX}.{n}.w{w}.weight" for n in range(EXPERTS) for w in (1, 2, 3)
    ]  # fmt: skip


def test_a_prefix_of_a_composite_model(saved: Callable[..., Tensors]) -> None:
    """As checkpoints have it that see and read; what they see with is left out, and said."""
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in saved("qwen3_5_moe").items()}
    names = names_of("qwen3_5_moe")
    assert_same(assembled(names, tensors), expected(names, theirs_of("qwen3_5_moe")))
    others = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    assert match(names, {**tensors, **others}).untrained == list(others)


def test_concatenated_tensors_that_are_no_experts(saved: Callable[..., Tensors]) -> None:
    if "kimi_linear" not in causal_families():
        pytest.skip("this transformers has no kimi_linear")
    tensors, names = saved("kimi_linear"), names_of("kimi_linear")
    assert any("q_conv1d" in name for name in tensors)
    assert_same(assembled(names, tensors), expected(names, theirs_of("kimi_linear")))
    key = next(name for name in tensors if "k_conv1d" in name)
    assert match(names, without(tensors, key)).problems


def test_layers_for_multi_token_prediction_are_left_out(saved: Callable[..., Tensors]) -> None:
    """They are numbered on from the last layer, as many as the config says."""
    tensors, names = saved("deepseek_v3"), names_of("deepseek_v3")
    config = names.model.config
    assert config.num_nextn_predict_layers == 1
    layers = config.num_hidden_layers
    parts = ("eh_proj.weight", "embed_tokens.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.gate_up_proj")
    beyond = {f"model.layers.{layers}.{part}": torch.ones(2) for part in parts}
    matched = match(names, {**tensors, **beyond})
    assert set(matched.untrained) == set(beyond)
    assert matched.problems == {}
    second = f"model.layers.{layers + 1}.eh_proj.weight"
    assert list(match(names, {**tensors, second: torch.ones(2)}).problems) == [second]


def test_what_is_computed_is_left_out(saved: Callable[..., Tensors]) -> None:
    for name in ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"):
        matched = match(names_of("mixtral"), {**saved("mixtral"), name: torch.ones(4)})
        assert matched.untrained == [name]
        assert matched.problems == {}


def test_buffers_are_matched(saved: Callable[..., Tensors]) -> None:
    names = names_of("deepseek_v3")
    biases = [name for name in names.parameters if name.endswith("e_score_correction_bias")]
    assert names.buffers == set(biases) != set()
    problems = match(names, without(saved("deepseek_v3"), biases[0])).problems
    assert problems == {biases[0]: f"tensor {biases[0]} is missing"}


TIED: dict[str, Any] = {"tie_word_embeddings": True}


def test_tied_embeddings(saved: Callable[..., Tensors]) -> None:
    """Once; twice, the second being a copy; or under the head's name alone."""
    names, tensors = names_of("mixtral", **TIED), saved("mixtral", **TIED)
    assert "lm_head.weight" not in names.parameters
    table = tensors["model.embed_tokens.weight"]
    wanted = expected(names, theirs_of("mixtral", **TIED))
    assert_same(assembled(names, tensors), wanted)

    twice = {**tensors, "lm_head.weight": table}
    assert_same(assembled(names, twice), wanted)
    ((copy, (region,)),) = match(names, twice).tied_copies.items()
    assert (copy, region.parameter) == ("lm_head.weight", "model.embed_tokens.weight")

    of_head = {"lm_head.weight": table, **without(tensors, "model.embed_tokens.weight")}
    assert_same(assembled(names, of_head), wanted)
    assert not match(names, of_head).tied_copies

    assert match(names, without(tensors, "model.embed_tokens.weight")).problems == {
        "model.embed_tokens.weight": "tensor model.embed_tokens.weight is missing"
    }
    misshapen = match(names, {**tensors, "lm_head.weight": table[:-1]}).problems
    assert list(misshapen) == ["lm_head.weight"]
    assert "config.json needs" in misshapen["lm_head.weight"]


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


PROJECTIONS = {w: [f"{PREFIX}.{n}.{w}.weight" for n in range(EXPERTS)] for w in ("w1", "w2", "w3")}
DOWN = f"{PREFIX}.5.w2.weight"
Change = Callable[[Tensors, Tensors], Tensors]
"""Of tensors as on the hub and as in memory."""

NORM, ROUTER, NO_PLACE = "model.norm.weight", "model.layers.1.block_sparse_moe.gate.weight", "no place in this model"
FUSED_DOWN, GATE, SURPLUS = f"{FUSED}.down_proj", f"{PREFIX}.0.w1.weight", f"{PREFIX}.{EXPERTS}.w2.weight"
BEYOND = "model.layers.99.input_layernorm.weight"
PROBLEMS: dict[str, tuple[Change, str, str]] = {
    # what was done, the tensor that is named, and what is said of it
    "one expert's down": (lambda hub, _: without(hub, DOWN), DOWN, "is missing"),
    "one expert": (lambda hub, _: without(hub, f"{PREFIX}.3."), "", f"tensor {PREFIX}.3.w1.weight is missing"),
    "one expert's up": (lambda hub, _: without(hub, f"{PREFIX}.7.w3."), f"{PREFIX}.7.w3.weight", "is missing"),
    "gates of a layer": (lambda hub, _: without(hub, *PROJECTIONS["w1"]), PROJECTIONS["w1"][0], "is missing"),
    "ups of a layer": (lambda hub, _: without(hub, *PROJECTIONS["w3"]), PROJECTIONS["w1"][0],
                       f"tensors that form {FUSED}.gate_up_proj with it are missing"),
    "downs of a layer": (lambda hub, _: without(hub, *PROJECTIONS["w2"]), PROJECTIONS["w2"][0], "is missing"),
    "fused": (lambda _, own: without(own, FUSED_DOWN), FUSED_DOWN, "is missing"),
    "a norm": (lambda hub, _: without(hub, NORM), NORM, "is missing"),
    "a router": (lambda hub, _: without(hub, ROUTER), ROUTER, "is missing"),
    "another name": (lambda hub, _: {**hub, "model.x": torch.ones(2)}, "model.x", NO_PLACE),
    "an expert too many": (lambda hub, _: {**hub, SURPLUS: hub[DOWN]}, SURPLUS, NO_PLACE),
    "a layer too many": (lambda hub, _: {**hub, BEYOND: torch.ones(HIDDEN)}, BEYOND, NO_PLACE),
    "turned": (lambda hub, _: {**hub, DOWN: hub[DOWN].t()}, DOWN,
               f"has shape [{WIDTH}, {HIDDEN}]; config.json needs [{HIDDEN}, {WIDTH}]"),
    "fused for fewer experts": (
        lambda _, own: {**own, FUSED_DOWN: own[FUSED_DOWN][1:]}, FUSED_DOWN,
        f"has shape {[EXPERTS - 1, HIDDEN, WIDTH]}; config.json needs {[EXPERTS, HIDDEN, WIDTH]}",
    ),
    "a vector for a matrix": (lambda hub, _: {**hub, DOWN: torch.ones(3)}, DOWN, "has shape [3]; config.json needs"),
    "a scalar for a vector": (lambda hub, _: {**hub, NORM: torch.ones(())}, NORM, "has shape []; config.json"),
    "a gate of another width": (lambda hub, _: {**hub, GATE: hub[GATE][1:]}, GATE,
                                f"has shape [{WIDTH - 1}, {HIDDEN}]; config.json needs [{WIDTH}, {HIDDEN}]"),
    "fused and by themselves": (lambda hub, own: {**hub, FUSED_DOWN: own[FUSED_DOWN]}, "", "repeats dim-0 slices of"),
}  # fmt: skip


@pytest.mark.parametrize("which", PROBLEMS)
def test_what_does_not_match_is_named(saved: Callable[..., Tensors], which: str) -> None:
    change, name, said = PROBLEMS[which]
    problems = match(names_of("mixtral"), change(saved("mixtral"), saved("mixtral", original=False))).problems
    assert problems
    if name:
        assert list(problems) == [name]
    for tensor, problem in problems.items():
        assert problem.startswith((f"tensor {tensor} ", f"tensor {tensor}: "))
    assert said in next(iter(problems.values()))


def test_nothing_is_there() -> None:
    problems = names_of("mixtral").match({}).problems
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < set(problems)
    assert all(problem.startswith(f"tensor {name} is missing") for name, problem in problems.items())


class Turned(Chunk):
    """An operation that this version does not know."""

    def __repr__(self) -> str:
        return "Turned(dim=0)"


def test_an_unknown_operation_is_named(saved: Callable[..., Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers may make a tensor in a way of its own: never read as if it were another."""

    def mapping(model: Any, *args: Any, **kwargs: Any) -> Any:
        return [WeightConverter("model.norm.turned", "model.norm.weight", operations=[Turned(dim=0)])]

    tensors = saved("mixtral", original=False)
    tensors = {**without(tensors, "model.norm.weight"), "model.norm.turned": tensors["model.norm.weight"]}
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    assert match(names_of("mixtral"), tensors).problems == {
        "model.norm.turned": "tensor model.norm.turned: transformers makes model.norm.weight of it by Turned(dim=0), "
        "which expertmesh cannot read"
    }


def test_a_padded_head_is_named() -> None:
    """Inkling 2 drops the rows with which its checkpoints pad the head, by an operation of its own."""
    skip_if_older("it has no Inkling 2")
    names = names_of("inkling2_text")
    rows, width = names.parameters["lm_head.weight"]
    name = "model.llm.unembed.weight"
    problems = names.match({name: (rows + 8, width)}).problems
    assert problems[name] == (
        f"tensor {name}: transformers makes lm_head.weight of it by Inkling2UnpadVocab, which expertmesh cannot read"
    )
    # a part of the model is not said to be missing where what holds it is there
    assert "lm_head.weight" not in problems


def in_pairs(name: str) -> str:
    """The name of a Mixtral tensor where each layer is one of attention and one of experts on disk."""
    layer = re.match(r"model\.layers\.(\d+)\.(self_attn|mlp)\.", name)
    if layer is None:
        return name
    number = 2 * int(layer[1]) + (layer[2] == "mlp")
    return name.replace(layer[0], f"model.layers.{number}.mixer.")


def test_layers_in_pairs(saved: Callable[..., Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers collapses such pairs by a renaming that counts, with no way back: a tensor that is not there goes by
    the name that transformers itself would save it by, one of a layer too many by its own."""
    collapse: Any = getattr(core_model_loading, "LayerPairCollapse", None)
    if collapse is None:
        skip_if_older("it has no layers in pairs")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [collapse()])
    names, own = names_of("mixtral"), saved("mixtral", original=False)
    tensors = {in_pairs(name): tensor for name, tensor in own.items()}
    assert "model.layers.3.mixer.experts.down_proj" in tensors
    assert_same(assembled(names, tensors), expected(names, theirs_of("mixtral")))
    problems = match(names, without(tensors, "model.layers.2.mixer.q_proj.weight")).problems
    missing = "model.layers.1.self_attn.q_proj.weight"
    assert problems == {missing: f"tensor {missing} is missing"}
    beyond = f"model.layers.{2 * MIXTRAL.num_hidden_layers}.mixer.q_proj.weight"
    problems = match(names, {**tensors, beyond: tensors["model.layers.0.mixer.q_proj.weight"]}).problems
    assert list(problems) == [beyond]
    assert "no place in this model" in problems[beyond]
