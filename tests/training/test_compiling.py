"""Compiled attention and norms: the same gradients, from few graphs, none of them broken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.attention.context_parallel_attention import apply_context_parallel
from expertmesh.training.attention.packed_attention import OWN
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.model_setup.compiling import compile_layers
from expertmesh.training.steps.evaluate import inference
from expertmesh.training.steps.micro_batch import token_loss_sum
from expertmesh.training.tensor_parallel.divide import apply_tensor_parallel
from tests.families.configs import tiny_config as tiny_family
from tests.rounding import OTHER_ORDER, gradient_errors
from tests.tiny import loaded, tiny_config, tiny_mixtral


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    """Counters from zero, and nothing compiled left behind for other tests."""
    torch.compiler.reset()
    counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch.compiler.reset()


def built(attention: str, compiled: bool) -> Any:
    model: Any = loaded(build_model(tiny_config(), attention), tiny_mixtral())
    if compiled:
        compile_layers(model)
    attach_loss_head(model, "chunked")
    return model.train()


def batch_of(*lengths: int) -> Batch:
    """Rows of samples of these lengths, two alike in each row."""
    generator = torch.Generator().manual_seed(sum(lengths))
    draws = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]
    return collate([[Sample.of_prompt(tokens, 1)] * 2 for tokens in draws])


def gradients(model: Any, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    token_loss_sum(model, batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "graphs"), [("sdpa", 2), (OWN, 1)])
def test_graphs_of_many_lengths(attention: str, graphs: int) -> None:
    """Eight lengths of rows, one graph for all norms and one for all attentions; the same gradients as without; an
    evaluation compiles nothing."""
    model, plain = (built(attention, compiled) for compiled in (True, False))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for length in range(8):
        batch = batch_of(7 + length, 9, 5)
        found = gradients(model, batch)
    with inference(model):
        token_loss_sum(model, batch_of(8, 11))
    expected = gradients(plain, batch)
    errors = gradient_errors(found, expected)
    assert max(errors.values()) <= OTHER_ORDER, errors
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "tp_size", "said"),
    [
        ("eager", 1, "3 DeepseekV2Attention, 1 DeepseekV2MLP, 6 DeepseekV2RMSNorm"),
        (OWN, 1, "6 DeepseekV2RMSNorm"),
        ("eager", 2, "6 DeepseekV2RMSNorm"),
    ],
)
def test_says_what_is_compiled(attention: str, tp_size: int, said: str) -> None:
    """What ranks divide, attention and the dense MLP, is not."""
    model = build_model(tiny_family("deepseek_v2"), attention)
    if tp_size > 1:
        apply_tensor_parallel(model, tp_size)
        apply_context_parallel(model, 1, False, tp_size)
    assert compile_layers(model) == f"torch.compile: {said}"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(ExpertMeshError, match=r"--compile needs a C\+\+ compiler, but .*no-such-compiler"):
        built("sdpa", compiled=True)
