"""One enumeration of parameters and buffers: their layouts, what of them checkpoints hold, and their dtype."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model, fp32_parameters
from expertmesh.sharding import state
from expertmesh.sharding.state import (
    ShardedParameter,
    local_tensor,
    parameters_of,
    saved_state,
    set_parameter_dtype,
    state_of,
)
from expertmesh.sharding.topology import DENSE, EXPERT, REPLICATED
from tests.families.configs import tiny_config as config_of
from tests.tiny import in_memory, tiny_config

BIAS = "e_score_correction_bias"


def model_of(family: str, **changes: Any) -> Any:
    return build_model(config_of(family, **changes), "eager")


def test_every_parameter_and_buffer_is_enumerated_once() -> None:
    """First the parameters, then the buffers, each in the model's order."""
    model = build_model(tiny_config())
    state = state_of(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert list(state) == [*parameters, *buffers]
    for name, part in state.items():
        assert part.name == name
        assert part.tensor is (parameters[name] if part.is_parameter else buffers[name])
        assert part.shape == tuple(part.tensor.shape)
    assert list(parameters_of(model)) == list(parameters)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_layouts(family: str) -> None:
    """Experts' weights and biases are experts', whatever they are called; what is shared, gates and routers, is not."""
    model = model_of(family)
    layers = moe_layers(model)
    of_experts = {id(p): (layer, name) for layer in layers for name, p in layer.mlp.named_parameters()}
    state = state_of(model)
    found = {id(part.tensor) for part in state.values() if part.is_expert}
    assert found == set(of_experts)
    for part in state.values():
        if part.is_expert:
            layer, name = of_experts[id(part.tensor)]
            assert part.expert in layer.mlp.layout.parameters
            assert part.expert is not None
            assert part.expert.name == name
            assert part.num_rows == layer.shape.num_experts * part.expert.rows_an_expert
            assert part.layout == EXPERT
        else:
            assert part.layout == (DENSE if part.is_parameter else REPLICATED)


def test_buffers_that_checkpoints_hold() -> None:
    state = state_of(model_of("deepseek_v3"))
    buffers = {name: part for name, part in state.items() if not part.is_parameter}
    biases = {name for name in buffers if name.endswith(BIAS)}
    assert len(biases) == 2
    assert all(part.persistent == (name in biases) for name, part in buffers.items())
    assert any("rotary_emb" in name for name in buffers)
    assert not any(part.trainable for part in buffers.values())
    saved = saved_state(model_of("deepseek_v3"))
    assert biases <= set(saved)
    assert set(state) - set(saved) == set(buffers) - biases


def test_tied_weights_appear_under_their_first_name() -> None:
    state = state_of(build_model(tiny_config(tie_word_embeddings=True)))
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state
    assert "lm_head.weight" in state_of(build_model(tiny_config()))


def test_what_is_frozen_is_not_trainable() -> None:
    model = build_model(tiny_config())
    model.get_parameter("lm_head.weight").requires_grad_(False)
    frozen = [name for name, part in parameters_of(model).items() if not part.trainable]
    assert frozen == ["lm_head.weight"]


def test_rows_of_a_scalar() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    model.register_buffer("steps", torch.tensor(7))
    for part, value in zip(state_of(model).values(), (3.0, 7), strict=True):
        assert part.shape == ()
        assert part.num_rows == 1
        assert part.local.tolist() == [value]
    state_of(model)["scale"].local.fill_(4.0)
    assert model.scale.item() == 4.0, "local rows share their memory with the tensor"
    assert local_tensor(model.scale) is model.scale


def test_dtype_of_parameters_alone() -> None:
    """A correction bias that is rounded would choose other experts; what is tied stays one, what is frozen frozen."""
    model = in_memory(model_of("deepseek_v3", tie_word_embeddings=True))
    model.model.norm.weight.requires_grad_(False)
    before = {name: part.tensor.clone() for name, part in state_of(model).items() if not part.is_parameter}
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.arange(model.lm_head.weight.numel()).view_as(model.lm_head.weight))
    set_parameter_dtype(model, torch.bfloat16)
    state = state_of(model)
    kept = fp32_parameters(model)  # the router's weight, since transformers 5.24
    for name, part in parameters_of(model).items():
        assert part.tensor.dtype == (torch.float32 if name in kept else torch.bfloat16)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert float(model.lm_head.weight.flatten()[128]) == 128.0
    assert [name for name, part in parameters_of(model).items() if not part.trainable] == ["model.norm.weight"]
    for name, buffer in before.items():
        assert state[name].tensor.dtype == buffer.dtype
        assert torch.equal(state[name].tensor, buffer) or name.endswith(BIAS)  # which no config gives: it is NaN
    assert all(layer.mlp.w1.dtype == torch.bfloat16 for layer in moe_layers(model))


def test_dtype_before_there_is_memory() -> None:
    model = build_model(tiny_config())
    set_parameter_dtype(model, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


def shard_of(local: Tensor, rows: range) -> ShardedParameter:
    """A shard as it is of a parameter that is not quantized."""
    shard = object.__new__(ShardedParameter)
    shard.local, shard.rows, shard.row_shape = local, rows, local.shape[1:]
    shard.storage = shard.scales = None
    return shard


class Casts(TorchDispatchMode):
    """Notes the devices on which operators get a tensor of another dtype than they give or write."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        if len({tensor.dtype for tensor in tensors}) > 1:
            self.devices |= {tensor.device.type for tensor in tensors}
        return result


@pytest.mark.parametrize("at_once", [1, 100, 2**28])
def test_values_are_converted_where_the_shard_is(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on the way to it, on the CPU; some rows at a time, transposed ones too."""
    monkeypatch.setattr(state, "_BYTES_AT_ONCE", at_once)
    values = torch.randn(7, 6).bfloat16().t()
    with Casts() as casts:
        shard_of(torch.empty(9, 7, device="meta"), range(20, 29)).fill(range(22, 28), values)
    assert casts.devices == {"meta"}
    local = torch.zeros(9, 7)
    written = shard_of(local, range(20, 29)).fill(range(22, 28), values)
    assert torch.equal(written, values.float())
    assert torch.equal(local[2:8], values.float())
    assert not local[:2].any()
    assert not local[8:].any()
