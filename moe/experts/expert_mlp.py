"""The experts of one layer: their weights, all concatenated (see `moe.experts.layout`), and what they compute.

Shape suffixes: E experts, e experts on this rank, R rows, D model width, F expert width, r an adapter's rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dispatch.dispatcher_registry import ExpertChunk
from ..kernels.expert_products import AddBias
from ..kernels.expert_rows import ExpertRows
from ..kernels.kernel_entries import LOOP_ENTRY, KernelEntry
from ..kernels.weighing import WeighRows
from ..kernels.weight_gradients import ExpertsCall
from ..linear.low_rank import LowRank
from ..linear.quantized import SCALES, rows_for_few, storages_of, stored_product
from ..util.gpu import computes_on_cpu
from ..util.recompute_cache import for_backward_alone
from ..util.step_parts import register_step_part
from .activation import Activation
from .bf16_copies import WorkingWeights
from .forward import current_forward
from .layout import ExpertLayout

register_step_part(__name__, "expert GEMMs")

_JOINED = "w1 and v1"
"""Name of both in one tensor, (e, 2·F, D)."""


class ExpertMLP(nn.Module):
    """All experts of a layer, or those of this rank once their weights are distributed.

    Attributes:
        layout: its parameters; each is an attribute of that name.
        kernel: how it computes.
        low_rank: of its adapters, one per matrix; None without adapters.
        working: weights in the rows' dtype, where they are stored in another.
        most_apart: how many experts the kernel may multiply one after the other (see `ExpertRows`).
        keeps_products: whether selective checkpointing keeps the outputs of the first GEMMs (see `ExpertRows`).
    """

    def __init__(self, layout: ExpertLayout, activation: Activation, kernel: KernelEntry = LOOP_ENTRY):
        super().__init__()
        self.layout = layout
        self.activation = activation
        self.kernel = kernel
        self.low_rank: LowRank | None = None
        self.working = WorkingWeights()
        self.keeps_products = False
        self.most_apart = 1
        for parameter in layout.parameters:
            size = (layout.shape.num_experts * parameter.rows_an_expert, *parameter.row)
            self.register_parameter(parameter.name, nn.Parameter(torch.empty(size)))

    @property
    def is_swiglu(self) -> bool:
        """Whether it is silu(gate) * up, without biases, which kernels compute faster."""
        return self.activation.is_swiglu and not self.layout.shape.has_bias

    def forward(
        self,
        sent: Sequence[Tensor],
        parts: Sequence[ExpertChunk],
        reads_outputs: Callable[[], bool] = lambda: True,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """Pass each chunk's rows through its experts, once they have arrived, and send them back.

        Runs even without rows: an expert that sits out would leave the other ranks' collectives waiting.

        Args:
            sent: rows of each chunk, perhaps still being sent. Separate tensors, by which FSDP finds out when backward
                is done with this module.
            reads_outputs: whether results are read, once rows are weighed; if not, only what backward needs is computed
                (see `moe.util.recompute_cache`).
            finish: applied to the experts' results, which it reads.
        """
        returned = []
        call, weighs = self._deferrable_call(), finish is None and self._weighs(sent[0])
        sizes, are_joined = [part.experts.num_experts for part in parts], self._joins_gate_and_up(sent[0])
        by_part = self._weights(sent[0].dtype, sizes, call is not None, are_joined)
        is_beside = len(parts) > 1 and sent[0].is_cuda
        gathers = weighs and are_joined and self.kernel.code.gathers
        for rows_RD, part, weights in zip(sent, parts, by_part, strict=True):
            gathered = part.gather() if gathers and part.experts.num_rows else None
            rows_RD = part.arrive(rows_RD)
            experts = replace(
                part.experts,
                most_apart=self.most_apart,
                is_beside=is_beside,
                call=call,
                weights_R=part.weigh() if weighs else None,
                gathered=gathered,
            )
            out_RD = self._compute(rows_RD, experts, weights, finish is not None or reads_outputs())
            returned.append(part.give_back(out_RD if finish is None else finish(out_RD)))
        return returned

    def _deferrable_call(self) -> ExpertsCall | None:
        """This call, if its weights' gradients may be computed later. Adapters' are not, and what they are beside is
        frozen."""
        forward = current_forward()
        if forward is None or forward.weight_gradients is None or self.low_rank is not None:
            return None
        return ExpertsCall(forward.weight_gradients, self, dict(self.named_parameters(recurse=False)))

    def _compute(
        self, rows_RD: Tensor, experts: ExpertRows, weights: Mapping[str, Tensor], needs_output: bool
    ) -> Tensor:
        kernel = self.kernel.code
        if self._is_fused:
            experts = replace(experts, keeps_products=self.keeps_products)
            if (gate_up_eGD := weights.get(_JOINED)) is not None:
                assert kernel.joined is not None
                return kernel.joined(rows_RD, experts, gate_up_eGD, weights["w2"], needs_output=needs_output)
            assert kernel.fused is not None
            w1, v1, w2 = (weights[name] for name in ("w1", "v1", "w2"))
            return kernel.fused(rows_RD, experts, w1, v1, w2, needs_output=needs_output)
        weights_R, experts = experts.weights_R, replace(experts, weights_R=None)
        chunk = _Chunk(rows_for_few(rows_RD, experts, weights, storages_of(self)), weights)
        gate_RF = self._matmul("w1", rows_RD, chunk)
        up_RF = self._matmul("v1", rows_RD, chunk) if self.layout.shape.has_gate else None
        hidden_RF = self.activation(gate_RF, up_RF)
        if weights_R is not None:
            hidden_RF = WeighRows.apply(hidden_RF, weights_R)
        with for_backward_alone(not needs_output):
            return self._matmul("w2", hidden_RF, chunk)

    def _weighs(self, rows_RD: Tensor) -> bool:
        """Whether hidden values are multiplied by their rows' weights, and not results (see `moe.kernels.weighing`). It
        rounds otherwise: on GPUs alone, so that no result of a CPU's changes."""
        if self.layout.shape.has_bias or computes_on_cpu(rows_RD):
            return False
        return not self._is_fused or self.kernel.code.weighs

    @property
    def _is_fused(self) -> bool:
        """Whether a complete expert is computed at once."""
        # fused kernels compute the gradients of all weights, frozen or not
        is_trained = any(weight.requires_grad for weight in self.parameters()) or self.kernel.code.product is None
        return self.is_swiglu and self.kernel.code.fused is not None and is_trained and self.low_rank is None

    def _joins_gate_and_up(self, rows_RD: Tensor) -> bool:
        """Whether gate and up are one GEMM, where their weights are copied anyway, to another dtype. It reads less, and
        sums up in another order: on GPUs alone, so that no result of a CPU's changes."""
        if self.kernel.code.joined is None or not self._is_fused or computes_on_cpu(rows_RD):
            return False
        return all(weight.dtype != rows_RD.dtype for weight in (self.w1, self.v1))

    def _matmul(self, name: str, x_RI: Tensor, chunk: "_Chunk") -> Tensor:
        """Each expert's rows by one of its matrices, with its adapter and bias where it has them."""
        out_RO = self._multiply(name, x_RI, chunk)
        if self.low_rank is not None:
            out_RO = torch.add(out_RO, self._delta(name, x_RI, chunk, self.low_rank), alpha=self.low_rank.scale)
        if self.layout.shape.has_bias:
            bias_eO = chunk.weights[f"{name}_bias"].view(chunk.experts.num_experts, -1)
            out_RO = AddBias.apply(out_RO, chunk.experts.counts_e, bias_eO)
        return out_RO

    def _multiply(self, name: str, x_RI: Tensor, chunk: "_Chunk") -> Tensor:
        product, is_transposed = self.kernel.code.product, name == "w2"
        assert product is not None, self.kernel.name
        # the result of the last one is not needed again
        experts = replace(chunk.experts, keeps_products=self.keeps_products and name != "w2")
        if (storage := storages_of(self).get(name)) is not None:
            codes, scales = chunk.weights[name], chunk.weights[name + SCALES]
            return stored_product(x_RI, experts, codes, scales, storage, product, is_transposed != storage.is_turned)
        weight_eOI = chunk.by_expert(name)
        return product(x_RI, experts, weight_eOI.transpose(1, 2) if is_transposed else weight_eOI)

    def _delta(self, name: str, x_RI: Tensor, chunk: "_Chunk", low_rank: LowRank) -> Tensor:
        product = self.kernel.code.low_rank or self.kernel.code.product
        assert product is not None, self.kernel.name
        a_erI, b_eOr = (chunk.by_expert(f"{name}_lora_{matrix}").to(x_RI.dtype) for matrix in "AB")
        # of it the gradient of B is made
        with for_backward_alone(False):
            low_Rr = product(F.dropout(x_RI, low_rank.dropout, self.training), chunk.experts, a_erI)
        return product(low_Rr, chunk.experts, b_eOr)

    def _weights(
        self, dtype: torch.dtype, sizes: list[int], are_deferrable: bool, are_joined: bool
    ) -> list[dict[str, Tensor]]:
        """This rank's experts' weights by name, for each `sizes` experts in turn: each weight is taken once. The
        layout's parameters, but for quantized ones, are in `dtype`, the compute dtype. `are_deferrable`: whether their
        gradients may be computed later than backward. `are_joined`: whether gate and up are one tensor (e, 2·F, D)."""
        stored, computed_with = storages_of(self), {part.name for part in self.layout.parameters}
        by_part: list[dict[str, Tensor]] = [{} for _ in sizes]
        together = {name: [weight] for name, weight in self.named_parameters(recurse=False)}
        if are_joined:
            together[_JOINED] = together.pop("w1") + together.pop("v1")
        for name, weights in together.items():
            # autograd makes zeros of the gradients that a DTensor does not get; working weights take what is there
            is_taken = name in computed_with - stored.keys() and (weights[0].dtype != dtype or are_deferrable)
            if is_taken or name == _JOINED:
                pieces = self.working.take(name, weights, dtype, sizes)
                pieces = pieces if name == _JOINED else [piece.flatten(0, 1) for piece in pieces]
            else:
                (weight,) = weights
                # experts that have been distributed are DTensors; a kernel computes on this rank's part
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                rows = [local.shape[0] * size // sum(sizes) for size in sizes]
                pieces = [local] if len(rows) == 1 else local.split(rows)
            for part, piece in zip(by_part, pieces, strict=True):
                part[name] = piece
        return by_part


@dataclass(frozen=True)
class _Chunk:
    """A chunk's experts, and their weights by name."""

    experts: ExpertRows
    weights: Mapping[str, Tensor]

    def by_expert(self, name: str) -> Tensor:
        weight = self.weights[name]
        return weight.view(self.experts.num_experts, -1, weight.shape[1])
