"""Stands in for kernels of flash-linear-attention and mamba-ssm in a dry run, whose figures are those of a GPU with
them, whatever is installed here: they compute what transformers has as a loop over tokens or chunks.

Each of a package's kernels is recorded with what it reads, writes and multiplies; tensors are made, kept for backward
and freed where the package does so: flash-linear-attention of August 2026 (`fla/ops/gated_delta_rule/chunk.py`,
`fla/ops/kda/chunk_{fwd,bwd}.py`), mamba-ssm of July 2026 (`mamba_ssm/ops/selective_scan_interface.py`,
`csrc/selective_scan/selective_scan.cpp`).

Shape suffixes: B sequences, S tokens, N chunks of C tokens; H heads of keys, G of values, K and V their widths;
D channels, T values of a channel's state.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ....moe.transformers_private import kernel_name_of, looping_functions, replacing_functions

Record = Callable[..., None]
"""`Recorder.kernel`."""
Kept = tuple[Tensor | None, ...]
"""What a forward keeps for backward."""
_BLOCK = 16
"""Tokens of the blocks in which a chunk's triangular system is solved."""
_WIDEST = 128
"""Key widths that a kernel for the gradients of queries and keys takes at once, on an H100."""
_WIDEST_BY_CHANNEL = 32
"""The same where each key channel has a gate."""
_SCANNED_AT_ONCE = 2048
"""Tokens after which a selective scan keeps its state for backward."""


def replaced_functions(modules: Iterable[nn.Module]) -> dict[ModuleType, dict[str, FunctionType]]:
    """Functions that these modules call, by the files that they call them in, which have a stand-in."""
    found = {
        file: {name: function for name, function in named.items() if _kernel_name(function) in _KERNELS}
        for file, named in looping_functions(modules).items()
    }
    return {file: named for file, named in found.items() if named}


def computed_by(modules: Iterable[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Names of functions that loop over tokens, and for which transformers looks for a kernel in a package: each with
    this package; with "" where the kernel has no stand-in, and a dry run runs the loop."""
    functions = {name: function for named in looping_functions(modules).values() for name, function in named.items()}
    kernels = {name: kernel for name, function in functions.items() if (kernel := kernel_name_of(function)) is not None}
    known = _KERNELS.keys() | _DECODING
    return tuple(sorted((name, kernel.package if kernel.name in known else "") for name, kernel in kernels.items()))


@contextmanager
def recorded(functions: dict[ModuleType, dict[str, FunctionType]], record: Record) -> Iterator[None]:
    """Within it, these functions do what a package's kernels would do, in memory and in what is recorded.

    Args:
        functions: of `replaced_functions`.
        record: is told of each kernel its name, the tensors that it reads, those that it writes, and its FLOPs.
    """
    with replacing_functions(functions, partial(_call, record)):
        yield


def _call(record: Record, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments.get("initial_state") is not None or any(bound.arguments.get(name) for name in _STATES):
        return function(*args, **kwargs)  # which training does not ask for
    return _KERNELS[_kernel_name(function)](record, bound.arguments)


def _kernel_name(function: FunctionType) -> str:
    kernel = kernel_name_of(function)
    return kernel.name if kernel else ""


class _Kernels(torch.autograd.Function):
    """What `forward(*inputs)` gives is the result, and what is kept for `backward(kept, gradient)`."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *inputs: Tensor | None) -> Tensor:
        out, kept = forward(*inputs)
        ctx.save_for_backward(*kept)
        ctx.backward_of_kernels = backward
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_of_kernels(ctx.saved_tensors, gradient)


@dataclass(frozen=True)
class _DeltaRule:
    """flash-linear-attention's chunk_gated_delta_rule, whose gates are one per head. Its functions are these methods.

    Attributes:
        chunk: tokens of it.
        normalizes: queries and keys.
    """

    record: Record
    chunk: int
    normalizes: bool

    @classmethod
    def call(cls, record: Record, arguments: dict[str, Any]) -> tuple[Tensor, None]:
        rule = cls(record, arguments["chunk_size"], arguments["use_qk_l2norm_in_kernel"])
        return _Kernels.apply(rule.forward, rule.backward, *list(arguments.values())[:5]), None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Kept]:
        """inputs: queries and keys (B, S, H, K), values (B, S, G, V), gates (B, S, G) or (B, S, G, K), and what is
        learned per token (B, S, G)."""
        own_q, own_k, *others = (x.contiguous() for x in inputs)
        (q, q_factor), (k, k_factor) = self._normed(own_q), self._normed(own_k)
        out, kept = self.outputs(q, k, *others)
        return out, (q, q_factor, k, k_factor, *kept)

    def backward(self, kept: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, q_factor, k, k_factor, *others = kept
        d_q, d_k, *rest = self.gradients(q, k, gradient.contiguous(), *others)
        d_q = self._unnormed(q, q_factor, d_q)
        d_k = self._unnormed(k, k_factor, d_k)
        return (d_q, d_k, *rest)

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, own_g: Tensor, beta: Tensor) -> tuple[Tensor, Kept]:
        """The result, and what is kept besides queries and keys."""
        g, (K, V, C) = self._summed(own_g), self._sizes(k, v)
        inverse = k.new_zeros(*v.shape[:3], C)
        name = "chunk_gated_delta_rule_fwd_kkt_solve_kernel"
        self.record(name, [k, g, beta], [inverse], self._flops(v, C * K))
        w, u = self._new_values([k, v, beta, inverse, g], k, v)
        h, v_new = self._states(k, w, u, g)
        out = torch.empty_like(v)
        self.record("chunk_fwd_kernel_o", [q, k, v_new, h, g], [out], self._flops(v, K * V, C * K, C * V))
        return out, (v, g, beta, inverse)

    def gradients(
        self, q: Tensor, k: Tensor, d_out: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor
    ) -> tuple[Tensor, ...]:
        """Of queries and keys as normalized, and of the other inputs. Names that are bound anew free tensors where the
        package does."""
        K, V, C = self._sizes(k, v)
        w, u = self._new_values([k, v, beta, inverse, g], k, v, again=True)
        h, v_new = self._states(k, w, u, g, again=True)
        d_v, flops, needed = torch.empty_like(d_out), self._flops(v, C * K, C * V), self._flops(v, C * V)
        self.record("chunk_bwd_kernel_dv_local", [q, k, g, d_out], [d_v], flops, needed)
        d_h, d_v = self._state_gradients(q, k, w, g, d_out, d_v)
        d_q, d_k = (k.new_empty(*v.shape[:3], K) for _ in range(2))
        d_w, d_g = torch.empty_like(w), g.new_empty(-(-K // _WIDEST), *g.shape)
        flops = self._flops(v, 3 * K * V, 2 * C * K, C * V)
        self.record("chunk_bwd_kernel_dqkwg", [q, k, v_new, g, h, d_v, d_out, d_h], [d_q, d_k, d_w, d_g], flops)
        d_q = self._by_key_head(d_q, k)
        d_k = self._by_key_head(d_k, k)
        d_g = d_g.sum(0)
        d_k_2, d_v_2 = k.new_empty(*v.shape[:3], K), torch.empty_like(v)
        d_g_2, d_beta = torch.empty_like(g), torch.empty_like(beta)
        needed = self._flops(v, 4 * C * K, 2 * C * V, 2 * C * C)
        self.record(
            "prepare_wy_repr_bwd_kernel",
            [k, v, beta, g, inverse, d_w, d_v],
            [d_k_2, d_v_2, d_beta, d_g_2],
            needed + self._flops(v, C * K),
            needed,
        )
        d_k_2 = self._by_key_head(d_k_2, k)
        d_v = d_v_2
        d_k.add_(d_k_2)
        d_g.add_(d_g_2)
        d_g = self._summed(d_g)
        return d_q, d_k, d_v, d_g, d_beta

    def _sizes(self, k: Tensor, v: Tensor) -> tuple[int, int, int]:
        return k.shape[-1], v.shape[-1], self.chunk

    def _flops(self, of: Tensor, *products: int) -> float:
        """FLOPs of matmuls that take so many multiplications per token and head of a (B, S, G, ...)."""
        return 2.0 * of.shape[0] * of.shape[1] * of.shape[2] * sum(products)

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.normalizes:
            return x, None
        out, factor = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        self.record("l2norm_fwd_kernel", [x], [out, factor])
        return out, factor

    def _unnormed(self, x: Tensor, factor: Tensor | None, gradient: Tensor) -> Tensor:
        if factor is None:
            return gradient.to(x.dtype)
        out = torch.empty_like(x)
        self.record("l2norm_bwd_kernel", [x, factor, gradient], [out])
        return out

    def _summed(self, g: Tensor) -> Tensor:
        out = torch.empty_like(g, dtype=torch.float32)
        self.record("chunk_local_cumsum_kernel", [g], [out])
        return out

    def _new_values(
        self, read: list[Tensor], k: Tensor, v: Tensor, beside: Iterable[Tensor] = (), again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """beside: what is written besides. again: whether the forward has done the same."""
        w, u, (K, V, C) = k.new_empty(*v.shape[:3], k.shape[-1]), torch.empty_like(v), self._sizes(k, v)
        flops = self._flops(v, C * K, C * V)
        self.record("recompute_w_u_fwd_kernel", read, [w, u, *beside], flops, 0.0 if again else flops)
        return w, u

    def _states(self, k: Tensor, w: Tensor, u: Tensor, g: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
        (B, S, G, V), K = u.shape, k.shape[-1]
        h, v_new, flops = k.new_empty(B, -(-S // self.chunk), G, K, V), torch.empty_like(u), self._flops(u, 2 * K * V)
        name = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
        self.record(name, [k, w, u, g], [h, v_new], flops, 0.0 if again else flops)
        return h, v_new

    def _state_gradients(
        self, q: Tensor, k: Tensor, w: Tensor, g: Tensor, d_out: Tensor, d_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        (B, S, G, V), K = d_out.shape, k.shape[-1]
        d_h, d_v_2 = q.new_empty(B, -(-S // self.chunk), G, K, V), torch.empty_like(d_v)
        name, flops = "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", self._flops(d_out, 3 * K * V)
        self.record(name, [q, k, w, g, d_out, d_v], [d_h, d_v_2], flops)
        return d_h, d_v_2

    def _by_key_head(self, x: Tensor, k: Tensor) -> Tensor:
        """Summed up over heads of values that share a head of keys."""
        heads = k.shape[2]
        return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3)


class _DeltaRuleByChannel(_DeltaRule):
    """flash-linear-attention's chunk_kda, whose gates are one per head and channel of keys."""

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, own_g: Tensor, beta: Tensor) -> tuple[Tensor, Kept]:
        g, (K, V, C) = self._summed(own_g), self._sizes(k, v)
        scores, inverse = self._pairs(q, k, v, g, beta)
        decayed_k = k.new_empty(*v.shape[:3], K)
        w, u = self._new_values([k, v, beta, inverse, g], k, v, [decayed_k])
        h, v_new = self._states(decayed_k, w, u, g)
        out = torch.zeros_like(v)
        self.record("chunk_gla_fwd_kernel_o", [q, v_new, g, h, scores], [out], self._flops(v, K * V, C * V))
        return out, (v, g, own_g, beta, scores, inverse)

    def _pairs(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens in a chunk: queries with keys, and the inverse of keys with keys."""
        K, _, C = self._sizes(k, v)
        scores, inverse = k.new_empty(*v.shape[:3], C), k.new_zeros(*v.shape[:3], C)
        diagonal = g.new_empty(*v.shape[:3], _BLOCK)
        self.record("chunk_kda_fwd_kernel_intra_token_parallel", [q, k, g, beta], [scores, diagonal])
        name, flops = "chunk_kda_fwd_kernel_inter_solve_fused", self._flops(v, 2 * C * K)
        self.record(name, [q, k, g, beta, diagonal], [scores, inverse], flops)
        return scores, inverse

    def gradients(self, q: Tensor, k: Tensor, d_out: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        v, g, own_g, beta, scores, inverse = kept
        K, V, C = self._sizes(k, v)
        decayed_q, decayed_k = (k.new_empty(*v.shape[:3], K) for _ in range(2))
        w, u = self._new_values([q, k, v, beta, inverse, g], k, v, [decayed_q, decayed_k], again=True)
        h, v_new = self._states(decayed_k, w, u, g, again=True)
        d_scores, d_v = g.new_empty(*v.shape[:3], C), torch.empty_like(d_out)
        self.record("chunk_kda_bwd_kernel_dAv", [v_new, d_out, scores], [d_scores, d_v], self._flops(v, 2 * C * V))
        d_h, d_v = self._state_gradients(decayed_q, decayed_k, w, g, d_out, d_v)
        d_q, d_k, d_g = (torch.empty_like(g) for _ in range(3))
        d_v_2, d_beta = torch.empty_like(v), torch.empty_like(beta, dtype=g.dtype)
        d_inverse = torch.empty_like(inverse, dtype=g.dtype)
        self.record(
            "chunk_kda_bwd_kernel_wy_dqkg_fused",
            [q, k, v, v_new, g, beta, inverse, h, d_out, d_h, d_v],
            [d_q, d_k, d_v_2, d_g, d_beta, d_inverse],
            self._flops(v, 3 * K * V, 2 * C * K, 2 * C * V, 2 * C * C),
        )
        d_v = d_v_2
        d_q_2, d_k_2, d_g_2 = (torch.empty_like(g) for _ in range(3))
        d_beta_2 = g.new_empty(-(-K // _WIDEST_BY_CHANNEL), *beta.shape)
        self.record(
            "chunk_kda_bwd_kernel_intra",
            [q, k, g, beta, d_scores, d_inverse, d_q, d_k, d_g],
            [d_q_2, d_k_2, d_g_2, d_beta_2],
            self._flops(v, 4 * C * K),
        )
        d_beta = d_beta_2.sum(0).add_(d_beta)
        d_q = self._by_key_head(d_q_2, k)
        d_k = self._by_key_head(d_k_2, k)
        d_g = self._summed(d_g_2)
        return d_q, d_k, d_v, d_g.to(own_g.dtype), d_beta.to(beta.dtype)


@dataclass(frozen=True)
class _SelectiveScan:
    """mamba-ssm's selective_scan_fn: no matmul of tensor cores, but a multiplication and an addition each for a state's
    decay, and for what it gives."""

    record: Record

    @staticmethod
    def call(record: Record, arguments: dict[str, Any]) -> Tensor:
        scan = _SelectiveScan(record)
        out: Tensor = _Kernels.apply(scan.forward, scan.backward, *list(arguments.values())[:8])
        return out

    def forward(
        self,
        x_BDS: Tensor,
        delta_BDS: Tensor,
        a_DT: Tensor,
        b_BTS: Tensor,
        c_BTS: Tensor,
        skip_D: Tensor | None,
        gate_BDS: Tensor | None,
        delta_bias_D: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        x, delta, b, c = (each.contiguous() for each in (x_BDS, delta_BDS, b_BTS, c_BTS))
        gate = None if gate_BDS is None else gate_BDS.contiguous()
        (B, D, S), T = delta.shape, a_DT.shape[1]
        out = torch.empty_like(delta)
        gated = None if gate is None else torch.empty_like(gate)
        states = a_DT.new_empty(B, D, -(-S // _SCANNED_AT_ONCE), 2 * T)
        inputs = (x, delta, a_DT, b, c, skip_D, gate, delta_bias_D)
        flops, written = 4.0 * B * D * S * T, _given(out, gated, states)
        self.record("selective_scan_fwd_kernel", _given(*inputs), written, flops, flops, "matmul fp32")
        return (out, (*inputs, states, None)) if gated is None else (gated, (*inputs, states, out))

    def backward(self, kept: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, out = kept
        x, delta, a_DT, b, c, skip_D, gate, delta_bias_D = inputs
        d_out, (B, D, S), T = gradient.contiguous(), delta.shape, a_DT.shape[1]
        d_x, d_delta, d_a = torch.empty_like(x), torch.empty_like(delta), torch.zeros_like(a_DT)
        d_b, d_c = (torch.zeros_like(each, dtype=torch.float32) for each in (b, c))
        d_skip, d_bias = (None if each is None else torch.zeros_like(each) for each in (skip_D, delta_bias_D))
        d_gate = None if gate is None else torch.empty_like(gate)
        found = (d_x, d_delta, d_a, d_b, d_c, d_skip, d_gate, d_bias)
        # states are computed once more
        needed = 8.0 * B * D * S * T
        read = _given(*inputs, states, out, d_out)
        self.record("selective_scan_bwd_kernel", read, _given(*found), 1.25 * needed, needed, "matmul fp32")
        return (d_x, d_delta, d_a, d_b.to(b.dtype), d_c.to(c.dtype), d_skip, d_gate, d_bias)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


_KERNELS: dict[str, Callable[[Record, dict[str, Any]], Any]] = {
    "chunk_gated_delta_rule": _DeltaRule.call,
    "chunk_kda": _DeltaRuleByChannel.call,
    "selective_scan_fn": _SelectiveScan.call,
}
"""By the names that packages give them."""
_DECODING = {"fused_recurrent_gated_delta_rule", "fused_recurrent_kda"}
"""Kernels that generation alone calls, token by token."""
_STATES = ("output_final_state", "return_last_state")
"""Arguments that ask for a layer's last state, to go on from."""
