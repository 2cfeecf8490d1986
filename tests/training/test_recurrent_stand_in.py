"""What stands in for kernels of recurrent layers, against transformers' Python code, which it takes the place of."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.moe.transformers_private import replacing_functions
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.coverage import assumed_code
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors
from expertmesh.training.planning.rehearsal.recurrent_stand_in import computed_by, recorded, replaced_functions
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import UNSHRINKABLE, tiny_config
from tests.training.dry_runs import CLUSTER

FAMILIES = ("qwen3_next", "kimi_linear", "jamba")
CHANGES: dict[str, dict[str, Any]] = {"qwen3_next": {"linear_value_head_dim": 24}}
"""So that keys and values are of different widths."""
ROWS, LENGTH = 2, 128
"""Whole chunks."""


class Called:
    """A family's model, and how a layer of it calls a function that loops: tensors of its own, with gradients."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **CHANGES.get(family, {}))).to(dtype)
        self.functions = replaced_functions(model.modules())
        calls: list[Any] = []

        def note(function: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        with replacing_functions(self.functions, note):
            model(torch.randint(0, 32, (ROWS, LENGTH)), use_cache=False)
        self.function, self.args, self.kwargs = calls[0]

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def leaves(self) -> list[Tensor]:
        """New inputs, in place of those that it was called with."""
        made: dict[int, Tensor] = {}

        def fresh(x: Any) -> Any:
            return made.setdefault(id(x), x.detach().requires_grad_(x.requires_grad)) if isinstance(x, Tensor) else x

        self.args = tuple(map(fresh, self.args))
        self.kwargs = {name: fresh(value) for name, value in self.kwargs.items()}
        return list(made.values())

    def by(self, record: Callable[..., None] | None) -> Any:
        """The result by the stand-in, or by the function itself."""
        if record is None:
            return self.function(*self.args, **self.kwargs)
        (file,) = (file for file, named in self.functions.items() if self.function in named.values())
        (name,) = (name for name, function in self.functions[file].items() if function is self.function)
        with recorded(self.functions, record):
            return vars(file)[name](*self.args, **self.kwargs)


class Recorded:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.flops, self.needed = [0.0], [0.0]

    def __call__(
        self, name: str, read: Any, written: Any, flops: float = 0.0, needed: float | None = None, *rest: Any
    ) -> None:
        assert read
        assert written
        self.names.append(name)
        self.flops[-1] += flops
        self.needed[-1] += flops if needed is None else needed

    def turn(self) -> None:
        self.flops.append(0.0)
        self.needed.append(0.0)


def forms(tensors: Sequence[Any]) -> list[Any]:
    return [(tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor for tensor in tensors]


# of selective scans in bf16 the Python code gives fp32, as it does not cast what its fp32 parameters widen
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), *((family, torch.bfloat16) for family in FAMILIES[:2])],
)
def test_results_and_gradients_are_like_those_of_the_loop(family: str, dtype: torch.dtype) -> None:
    called = Called(family, dtype)
    found = []
    for record in (None, Recorded()):
        inputs = called.leaves()
        result = called.by(record)
        results = tree_leaves(result, is_leaf=lambda x: x is None)
        outputs = [each for each in results if isinstance(each, Tensor)]
        torch.autograd.backward([each for each in outputs if each.requires_grad], [torch.ones_like(outputs[0])])
        found.append((type(result), forms(results), forms([tensor.grad for tensor in inputs])))
    loop, stand_in = found
    assert stand_in == loop
    assert sum(gradient is not None for gradient in loop[2]) >= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_loop(family: str) -> None:
    """Those of its matmuls, and what it computes without one: triangular systems, of the delta rule with a gate per
    channel products of pairs of tokens, of a scan the states' decay. A backward takes twice as much, and through the
    systems' inverse two products of chunks."""
    called, record = Called(family), Recorded()
    called.leaves()
    with FlopCounterMode(display=False) as counter:
        called.by(None)
    called.leaves()
    out = tree_leaves(called.by(record))[0]
    record.turn()
    out.sum().backward()
    *_, last = first = called.tensors()[:3]
    if family == "jamba":
        states = first[0].numel() * first[2].shape[1]
        besides, inverse = 2 * states, 0
    else:
        tokens, K, V, C = prod(last.shape[:3]), first[1].shape[-1], last.shape[-1], 64
        besides = 2 * tokens * (C * K + (C * V if family == "qwen3_next" else C * K))
        inverse = 2 * tokens * 2 * C * C
    assert record.needed[0] == record.flops[0] == counter.get_total_flops() + besides
    assert record.needed[1] == 2 * record.needed[0] + inverse
    assert record.flops[1] > record.needed[1]


# kept, and most held in forward and backward: by flash-linear-attention's own functions, of August 2026, whose kernels
# were not launched; of the tensors that `test_memory_is_the_packages` makes
OF_PACKAGE: dict[tuple[str, torch.dtype], tuple[int, int, int]] = {
    ("torch_chunk_gated_delta_rule", torch.float32): (462848, 921600, 1550336),
    ("torch_chunk_gated_delta_rule", torch.bfloat16): (233472, 462848, 779264),
    ("chunk_kimi_delta_attention", torch.float32): (362496, 657408, 1119232),
    ("chunk_kimi_delta_attention", torch.bfloat16): (198656, 346112, 742400),
}


@pytest.mark.parametrize(("name", "dtype"), OF_PACKAGE)
def test_memory_is_the_packages(name: str, dtype: torch.dtype) -> None:
    by_channel = name == "chunk_kimi_delta_attention"
    B, S, H, G, K, V = 1, 128, 2, 2 if by_channel else 4, 32, 64
    q, k, v = torch.randn(B, S, 2 * H * K + G * V).to(dtype).split([H * K, H * K, G * V], -1)
    gates = -torch.rand(B, S, G, *([K] if by_channel else []))
    inputs = [q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (G, V)), gates]
    inputs.append(torch.rand(B, S, G).to(dtype))
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    family = "kimi_linear" if by_channel else "qwen3_next"
    functions = replaced_functions(build_model(tiny_config(family)).modules())
    ((file, _),) = functions.items()
    with recorded(functions, Recorded()), LiveTensors([]) as live:
        out, _ = vars(file)[name](*inputs, use_qk_l2norm_in_kernel=True)
        kept, forward = live.total, live.peak
        gradient = torch.ones_like(out)
        live.peak = live.total
        out.backward(gradient)
    assert (kept, forward, live.peak) == OF_PACKAGE[name, dtype]


@pytest.mark.slow
def test_a_dry_run_is_as_short_for_long_sequences() -> None:
    """With the loop it has more operators the more chunks there are."""
    counts = []
    for length in (256, 512):
        config = TrainConfig(
            model="-", dataset=["-"], bf16=True, per_device_train_batch_size=1, max_seq_length=length, ep_size=2
        )
        events = rehearse(Asked(config, 2, CLUSTER), tiny_config("qwen3_next")).recorder.events
        counts.append(Counter(event.name for event in events))
    assert counts[0] == counts[1]
    assert counts[0]["chunk_fwd_kernel_o"] == counts[0]["chunk_bwd_kernel_dqkwg"] > 0


def modules_of(family: str) -> list[nn.Module]:
    layers = decoder_layers(build_model(tiny_config(family)))
    return [module for layer in layers for module in layer.modules()]


@pytest.mark.release
def test_kernels_of_all_families_are_known() -> None:
    """Of every family that trains here, none of whose layers calls a loop for which a package has a kernel that has
    no stand-in."""
    families = [family for family in causal_families() if family not in UNSHRINKABLE.keys() | UNSUPPORTED.keys()]
    looped = {family: computed_by(modules_of(family)) for family in families}
    assert {family for family, found in looped.items() if found} >= set(FAMILIES)
    assert [(family, name) for family, found in looped.items() for name, package in found if not package] == []


def test_whose_kernels_are_assumed() -> None:
    lines = assumed_code([("a", "mamba_ssm"), ("b", ""), ("c", "mamba_ssm")], by_liger=False)
    assert [line.split(", token by token")[0] for line in lines] == [
        "assumed: no figures of kernels are known, so transformers' Python code computes b",
        "assumed: mamba_ssm is installed; without it transformers' Python code computes a, c",
    ]
