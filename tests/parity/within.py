"""What runs of the table are built and trained in: other backends of a compiler, kernels of a GPU on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from expertmesh.moe.dispatch.permute import WeightsToRows
from expertmesh.moe.experts import expert_mlp
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.linear import quantized
from expertmesh.training.engine import assembly
from expertmesh.training.fused import trial
from expertmesh.training.fused.liger import use_liger
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.model_setup.compiling import compilation
from tests.interpreter import interpret_liger, prepare_megablocks


@contextmanager
def inductor() -> Iterator[None]:
    with _compiled(None):
        yield


@contextmanager
def eager() -> Iterator[None]:
    with _compiled("eager"):
        yield


@contextmanager
def aot_eager() -> Iterator[None]:
    with _compiled("aot_eager"):
        yield


@contextmanager
def _compiled(backend: str | None) -> Iterator[None]:
    before = compilation()
    graphs, breaks = before.graphs, before.breaks
    torch.compiler.reset()  # what an earlier test compiled in this process
    with torch.compiler.set_stance(force_backend=backend):
        yield
    assert compilation().graphs >= graphs + 2, "attention and norms were to be compiled"
    assert backend != "aot_eager" or compilation().breaks == breaks, "what exchanges positions was not to be compiled"


@contextmanager
def liger() -> Iterator[None]:
    """liger-kernel's norms and rotary positions, interpreted."""

    def use_and_attach(model: Any, kind: Any) -> None:
        assert "differ" not in use_liger(model, torch.float32)
        attach_loss_head(model, kind)

    def takes_triton(tensor: Tensor) -> bool:
        return not tensor.is_meta

    with (
        mock.patch.object(trial, "takes_triton", takes_triton),
        mock.patch.object(assembly, "attach_loss_head", use_and_attach),
        pytest.MonkeyPatch.context() as patch,
    ):
        interpret_liger(patch)
        yield


@contextmanager
def joined() -> Iterator[None]:
    """Experts' gate and up in one GEMM, as on GPUs where a rank has whole experts."""
    with _as_on_gpu() as taken:
        yield
    assert expert_mlp._JOINED in {call.args[1] for call in taken.call_args_list}


@contextmanager
def gathered() -> Iterator[None]:
    """Experts' gate and up in two GEMMs, as on GPUs where ranks gather experts."""
    with _as_on_gpu() as taken:
        yield
    assert expert_mlp._JOINED not in {call.args[1] for call in taken.call_args_list}


@contextmanager
def weighed() -> Iterator[None]:
    """A token's weights applied to the hidden values of its experts, as on GPUs."""
    weigh = WeightsToRows.forward
    with _as_on_gpu(), mock.patch.object(WeightsToRows, "forward", side_effect=weigh) as weighing:
        yield
    assert weighing.called


@contextmanager
def _as_on_gpu() -> Iterator[mock.Mock]:
    take = expert_mlp.WorkingWeights.take
    with (
        mock.patch.object(expert_mlp, "computes_on_cpu", return_value=False),
        mock.patch.object(expert_mlp.WorkingWeights, "take", autospec=True, side_effect=take) as taken,
    ):
        yield taken


@contextmanager
def few_at_a_time() -> Iterator[None]:
    """Quantized experts' matrices dequantized in several parts, as those of large experts are."""
    sizes: list[list[int]] = []
    divide = ExpertRows.parts

    def parts(experts: ExpertRows, size: int) -> list[ExpertRows]:
        found = divide(experts, size)
        sizes.append([part.num_experts for part in found])
        return found

    with (
        mock.patch.object(quantized, "_WIDENED_BYTES", 2**14),
        mock.patch.object(ExpertRows, "parts", parts),
    ):
        yield
    assert sizes
    assert all(len(each) > 1 for each in sizes)


@contextmanager
def megablocks() -> Iterator[None]:
    """MegaBlocks' kernels, interpreted."""
    prepare_megablocks()
    yield
