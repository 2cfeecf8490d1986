"""Our dispatch and our experts' matmuls within transformers' own expert parallelism.

transformers loads the model, shards it and keeps every tensor as it is. This takes over the part of an experts module
between router and residual: rows are sorted by expert, sent, multiplied by a kernel of `moe.kernels.expert_kernels`,
and come back; activation and norms are the module's own. `moe.registration` registers it as
`ep_implementation="expertmesh"`.

Shape suffixes: T tokens on this rank, D model width, E experts, e experts on this rank, K experts per token, R rows
that this rank's experts get, I and O the widths of a product's input and output.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from .dispatch.alltoall import AllToAllDispatcher
from .dispatch.permute import count_experts
from .experts.layout import read_layout
from .kernels.expert_kernels import choose_kernel
from .kernels.expert_products import AddBias, Product
from .kernels.expert_rows import ExpertRows
from .kernels.kernel_registry import KernelNeeds
from .util.errors import ExpertMeshError


class ExpertMeshEP(EPImplementation):
    """One layer's experts, sharded over `ep_mesh` by transformers. Results and gradients are transformers' own but for
    rounding: sums over a token's experts are taken in fp32 and in one order, so two runs have the same bits.

    Attributes:
        expert_kernel: a name of `KERNELS`, or "auto".
    """

    expert_kernel = "auto"

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        """
        Args:
            experts: a module marked with `use_experts_implementation`, its parameters sharded over `ep_mesh` along dim
                0.
            ep_mesh: the ranks over which the experts are distributed.
            tp_mesh: the ranks that hold the same tokens; each computes a part of them.

        Raises:
            ExpertMeshError: the experts hold unknown parameters, as quantized ones do.
        """
        super().__init__(experts, ep_mesh, tp_mesh)
        where = f'ep_implementation="expertmesh": {type(experts).__name__}'
        if not all(hasattr(experts, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated")):
            raise ExpertMeshError(f"{where} is not marked by transformers (use_experts_implementation): not supported")
        # each call shows how many experts each token has
        layout = read_layout(experts, top_k=1, where=where)
        self.experts = experts
        self.shape = layout.shape
        self.first = layout.parameters[0].place.tensor
        self.dispatcher = AllToAllDispatcher(self.shape.num_experts, ep_mesh.get_group())
        self.products: dict[tuple[str, torch.dtype], Product] = {}

    # not compiled: the host reads how many rows come, and collectives are under way between autograd's nodes
    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, (T, D), in the dtype of the experts' weights.

        Args:
            hidden_states: x_TD. top_k_index: experts_TK, int64, of all E experts. top_k_weights: weights_TK.

        Raises:
            ExpertMeshError: `expert_kernel` cannot compute these experts.
        """
        # like transformers' own matmuls, these are in the weights' dtype, whatever autocast says
        with torch.autocast(hidden_states.device.type, enabled=False):
            x_TD = hidden_states.to(getattr(self.experts, self.first).dtype)
            if self.tp_mesh.size() == 1:
                return self._forward(x_TD, top_k_index, top_k_weights)
            mine = (self._part_of_tokens(tensor) for tensor in (x_TD, top_k_index, top_k_weights))
            return self._all_tokens(self._forward(*mine), x_TD.shape)

    def _forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        counts_E = count_experts(experts_TK, self.dispatcher.num_experts)
        weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        sent = self.dispatcher.send(x_TD, experts_TK, weights_TK, counts_E, has_padding=False)
        (part,), (sent_RD,) = sent.parts, sent.rows
        out_RD = self._compute(part.arrive(sent_RD), part.experts)
        return sent.combine([part.give_back(out_RD)])

    def _compute(self, rows_RD: Tensor, mine: ExpertRows) -> Tensor:
        """Compute this rank's experts on their rows; runs without rows too, as other ranks wait for its collectives."""
        experts = self.experts
        # gate and up in one matmul, as they are in one tensor
        first = self._linear(self.first, rows_RD, mine)
        hidden_RF = experts._apply_gate(first) if self.shape.has_gate else experts.act_fn(first)
        out_RD = self._linear("down_proj", hidden_RF, mine)
        return experts.post_expert_norm(out_RD) if getattr(experts, "has_post_expert_norm", False) else out_RD

    def _linear(self, name: str, x_RI: Tensor, mine: ExpertRows) -> Tensor:
        weight = getattr(self.experts, name)
        weight_eOI = weight.transpose(1, 2) if self.experts.is_transposed else weight
        out_RO = self._product(x_RI)(x_RI, mine, weight_eOI)
        if self.shape.has_bias:
            out_RO = AddBias.apply(out_RO, mine.counts_e, getattr(self.experts, f"{name}_bias"))
        return out_RO

    def _product(self, rows: Tensor) -> Product:
        key = rows.device.type, rows.dtype
        if key not in self.products:
            # fused kernels take gate and up apart, which transformers has in one tensor: copying them each time would
            # cost more than it gains
            needs = KernelNeeds(*key, ((self.shape.model_width, self.shape.expert_width),), is_swiglu=False)
            product = choose_kernel(self.expert_kernel, needs).kernel.code.product
            assert product is not None
            self.products[key] = product
        return self.products[key]

    def _part_of_tokens(self, tensor: Tensor) -> Tensor:
        """This rank's range of the tokens that all ranks of `tp_mesh` hold; in backward they exchange their
        gradients."""
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _all_tokens(self, out: Tensor, shape: torch.Size) -> Tensor:
        cut = DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        return cut.full_tensor()
