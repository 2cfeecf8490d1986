"""Linear layers by which a package's kernel would multiply in their place, with a stand-in for the package."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from expertmesh.moe.experts.lora import Lora, add_adapters, store_frozen
from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.hf_model import families
from expertmesh.moe.hf_model.build import build_model, use_kernel, without_computing
from expertmesh.moe.hf_model.trial import standing_in_for_weights
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.linear.quantized import SCALES, Kind, fill, storages_of
from expertmesh.moe.transformers_private import projecting_functions
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config
from tests.tiny import in_memory, relative_error
from tests.training.dry_runs import CLUSTER, flags_of

KERNEL, PACKAGE = "mamba_split_conv1d_scan_combined", "mamba_ssm"


def read_elsewhere() -> dict[str, set[str]]:
    """By family, names of linear layers whose weight, not only its dtype, its file in transformers reads."""
    found: dict[str, set[str]] = {}
    for family in families.causal_families():
        text = families.family_source("modeling", family)
        for name in re.findall(r"self\.(\w+) = [\w.]*Linear\(", text):
            # a family's head may be called in its weight's dtype only: what else is done with it is not of a layer
            if re.search(rf"self\.{name}\.weight\b(?!\.dtype)", text.partition("PreTrainedModel)")[0]):
                found.setdefault(family, set()).add(name)
    return found


READ = read_elsewhere()
HANDED = [family for family in READ if "outproj_weight=" in families.family_source("modeling", family)]


def test_whose_weights_transformers_takes() -> None:
    """By the text of all families' files: none is taken of a layer that could get an adapter without effect."""
    assert len(HANDED) >= 2
    for family, names in READ.items():
        facts = facts_of(build_model(tiny_config(family)))
        assert {path.rpartition(".")[2] for path in facts.handed | facts.uncalled} == names
        assert bool(facts.handed) == (family in HANDED)


class Installed:
    """mamba-ssm's kernel, in torch, with its signature, by transformers' own functions of the rest of a mixer.

    given: of each call, whether it got the weight of the last layer.
    """

    def __init__(self, file: Any):
        self.conv = inspect.unwrap(file.causal_conv1d_fn)
        self.scan = inspect.unwrap(file.mamba2_chunk_scan)
        self.given: list[bool] = []

    def __call__(
        self,
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        initial_states: Any = None,
        seq_idx: Any = None,
        dt_limit: Any = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str = "silu",
        rmsnorm_weight: Any = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Tensor | None = None,
        outproj_bias: Tensor | None = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
        state_dtype: Any = None,
    ) -> Tensor:
        assert zxbcdt.device.type == "cpu", "Triton would read this tensor's memory"
        assert headdim is not None
        self.given.append(outproj_weight is not None)
        dim, (B, S, _) = len(D) * headdim, zxbcdt.shape
        states = (conv1d_weight.shape[0] - dim) // 2
        gate, x, dt = zxbcdt.split([dim, conv1d_weight.shape[0], len(D)], -1)
        x = self.conv(x.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation).transpose(1, 2)
        x, b, c = x.split([dim, states, states], -1)
        b, c = (part.view(B, S, ngroups, -1) for part in (b, c))
        x = x.reshape(B, S, len(D), headdim)
        y = self.scan(x, dt, A, b, c, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit)
        gated = (y.reshape(B, S, dim) * F.silu(gate)).unflatten(-1, (ngroups, -1))
        out = F.rms_norm(gated, gated.shape[-1:], eps=rmsnorm_eps).flatten(-2) * rmsnorm_weight
        return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


def model_of(family: str, kind: Kind | None, target: str) -> Any:
    """In memory, with random values and an adapter on a layer of the mixers, beside frozen weights of a kind."""
    model = build_model(tiny_config(family), "eager")
    mixers = [path.rpartition(".")[0] for path in facts_of(model).handed]
    add_adapters(model, Lora(4, 8.0), [f"{mixer}.{target}" for mixer in mixers], (), experts=False)
    if kind:
        store_frozen(model, kind)
    use_kernel(in_memory(model), KERNELS.get("loop"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if name in storages_of(module):
                    storage = storages_of(module)[name]
                    rows = torch.randn(len(parameter), storage.columns, generator=generator)
                    fill(parameter, module.get_parameter(name + SCALES), 0.2 * rows, storage)
                elif parameter is not None and parameter.is_floating_point() and not name.endswith(SCALES):
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.isnan().any():
                    buffer.zero_()
    return model.train()


def trained(model: Any) -> dict[str, Tensor]:
    """The logits of a model in training, and the gradients of its adapters."""
    logits = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
    logits.square().mean().backward()
    return {"": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@contextmanager
def installed(family: str) -> Iterator[Installed]:
    """Within it, transformers finds the package."""
    functions = projecting_functions(build_model(tiny_config(family), "eager").modules())
    ((file, named),) = functions.items()
    ((name, function),) = named.items()
    kernel = Installed(file)
    in_package = SimpleNamespace(ops=SimpleNamespace(triton=SimpleNamespace(ssd_combined=SimpleNamespace())))
    setattr(in_package.ops.triton.ssd_combined, KERNEL, kernel)
    with mock.patch.dict(sys.modules, {PACKAGE: in_package}):
        decorated = use_kernel_func_from_hub_with_fallback(KERNEL, PACKAGE)(inspect.unwrap(function))
    with mock.patch.object(file, name, decorated):
        yield kernel


@pytest.mark.parametrize("family", HANDED)
@pytest.mark.parametrize("kind", [None, "nf4", "fp8"])
def test_layer_that_does_more_is_called(family: str, kind: Kind | None) -> None:
    """As transformers calls it where the package is missing."""
    expected = trained(model_of(family, kind, "out_proj"))
    with installed(family) as kernel:
        found = trained(model_of(family, kind, "out_proj"))
    assert kernel.given
    assert not any(kernel.given)
    assert found.keys() == expected.keys()
    assert len(found) == 1 + 2 * len(kernel.given)
    assert all(expected[name].any() for name in expected)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 2e-5


@pytest.mark.parametrize("family", HANDED)
def test_kernel_multiplies_by_other_layers(family: str) -> None:
    expected = trained(model_of(family, None, "in_proj"))
    with installed(family) as kernel:
        found = trained(model_of(family, None, "in_proj"))
    assert kernel.given
    assert all(kernel.given)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 2e-5


def test_layer_with_hooks_is_called() -> None:
    with installed(HANDED[0]) as kernel:
        model = model_of(HANDED[0], None, "in_proj")
        hooked, calls = next(iter(facts_of(model).handed)), []
        model.get_submodule(hooked).register_forward_hook(lambda *given: calls.append(given))
        trained(model)
    assert len(calls) == 1
    assert kernel.given.count(False) == 1


@pytest.mark.parametrize("family", HANDED)
def test_kernels_read_no_tensor_without_memory(family: str) -> None:
    """Forwards that show facts of a model, trials and dry runs run what transformers has in Python."""
    with installed(family) as kernel:
        model = build_model(tiny_config(family), "eager")
        with without_computing(model):
            model.train()(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
        with standing_in_for_weights(model):
            model.train()(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
        rehearse(Asked(flags_of(ep_size=2), 2, CLUSTER), tiny_config(family))
    assert not kernel.given
