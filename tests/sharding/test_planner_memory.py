"""Each term of the memory formula against a real run."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.plan_accuracy import NO_LOSSES, balance_routing, build_run, full_batch
from moe import KERNELS, DroplessExperts, build_model, decoder_layers, moe_layers, take_stats, use_kernel
from sharding import local_tensor, set_parameter_dtype
from sharding.checkpointing import checkpoint_layers
from sharding.planner.memory import (
    LOGIT_CHUNK_BYTES,
    Memory,
    experts_saved,
    kernel_backward,
    layer_input,
    layer_kept,
    logits_peak,
    moments,
    outside_layers_saved,
    parameters_held,
    peak,
    rows_received,
)
from sharding.planner.setting import OPTIMIZERS, Setting, units_of
from tests.distributed.pool import RankPool
from tests.moe.test_kernels import fused
from tests.sharding.planned import ODD_SIZES, allocated, cpu_setting, model_shape
from tests.tiny import in_memory, tiny_config
from training import attach_loss_head
from training.head import CHUNK_BYTES, Targets, chunked_loss_sum
from training.step import compute_gradients, token_loss_sum, train_step

BIG = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
"""Large enough that what the formulas leave out, tensors of a few numbers, is below a percent."""


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of all storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def measure_lasting(setting: Setting, changes: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on this rank after a step."""
    config = tiny_config(**changes)
    model, optimizer, mesh = build_run(config, setting, torch.device("cpu"))
    train_step(model, optimizer, [full_batch(setting, config.vocab_size, dist.get_rank())], mesh, NO_LOSSES, 1.0)
    parameters = list(model.parameters())
    state = [t for p in parameters for t in optimizer.state[p].values() if t.dim() > 0]
    return (
        storage_bytes(local_tensor(p.detach()) for p in parameters),
        storage_bytes(local_tensor(p.grad) for p in parameters if p.grad is not None),
        sum(local_tensor(t).nbytes for t in state),
    )


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        (cpu_setting(4, 2), {}),
        (cpu_setting(4, 2), ODD_SIZES),
        (cpu_setting(4, 4, dense_shard="hybrid"), ODD_SIZES),
        (cpu_setting(2, 1, optimizer="adamw_bf16"), {}),
        (cpu_setting(2, 2, optimizer="adamw_torch_8bit"), {"hidden_size": 256}),
    ],
    ids=["ep2", "odd-sizes", "hybrid", "bf16-state", "8-bit-state"],
)
def test_what_lasts(ranks: RankPool, setting: Setting, changes: dict[str, Any]) -> None:
    """Rank 0 holds the most of every parameter. Norms keep fp32 state whatever the optimizer's."""
    found = ranks.run(measure_lasting, setting.world_size, setting, changes)[0]
    model = model_shape(**changes)
    held = parameters_held(units_of(model, setting), model.num_layers)
    each = OPTIMIZERS[setting.optimizer]
    assert found[:2] == (held * each.parameter, held * each.gradient)
    assert found[2] == pytest.approx(held * each.state, rel=0 if each.state == 8 else 0.01)


def measure_gathered(setting: Setting) -> list[tuple[int, int, int]]:
    """Bytes of a layer's, its experts' and the root's parameters, while each layer's experts compute."""
    config = tiny_config(**ODD_SIZES)
    model, _, _ = build_run(config, setting, torch.device("cpu"))
    found = []
    layer_of = {experts.mlp: layer for layer in decoder_layers(model) for experts in moe_layers(layer)}

    def look(experts: Any, *_: Any) -> None:
        layer = layer_of[experts]
        own = {id(p) for p in experts.parameters()}
        inside = {id(p) for each in layer_of.values() for p in each.parameters()}
        found.append(
            (
                storage_bytes(p.detach() for p in layer.parameters() if id(p) not in own),
                storage_bytes(local_tensor(p.detach()) for p in experts.parameters()),
                storage_bytes(p.detach() for p in model.parameters() if id(p) not in inside),
            )
        )

    for experts in layer_of:
        experts.register_forward_pre_hook(look)
    compute_gradients(model, [full_batch(setting, config.vocab_size, dist.get_rank())], NO_LOSSES)
    return found


@pytest.mark.parametrize("setting", [cpu_setting(4, 2), cpu_setting(4, 2, bf16=True)], ids=["fp32", "bf16"])
def test_gathered_parameters(ranks: RankPool, setting: Setting) -> None:
    units = units_of(model_shape(**ODD_SIZES), setting)
    expected = tuple(setting.compute_bytes * u.gathered for u in (units.layer, units.experts, units.root))
    for found in ranks.run(measure_gathered, setting.world_size, setting):
        assert found == [expected] * 2


def plain_model(setting: Setting, **changes: Any) -> Any:
    """The model of one process, without FSDP2."""
    model: Any = build_model(tiny_config(**changes))
    use_kernel(model, KERNELS[setting.expert_kernel])
    attach_loss_head(model, "chunked")
    checkpoint_layers(model, setting.checkpointing)
    in_memory(model)
    set_parameter_dtype(model, torch.bfloat16 if setting.bf16 else torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    balance_routing(model)
    return model.train()


@pytest.mark.parametrize(
    "setting",
    [
        cpu_setting(1, 1, seq_length=128),
        cpu_setting(1, 1, seq_length=128, bf16=True, expert_kernel="torch-grouped"),
        cpu_setting(1, 1, seq_length=128, checkpointing="full"),
        cpu_setting(1, 1, seq_length=128, checkpointing="selective"),
    ],
    ids=["fp32", "bf16-grouped", "full-checkpointing", "selective-checkpointing"],
)
def test_activations(setting: Setting) -> None:
    """What is allocated once forward is done: activations and, from the loss, the gradients of the head."""
    model, shape = plain_model(setting, **BIG), model_shape(**BIG)
    batch = full_batch(setting, shape.vocabulary, seed=0)
    # held, so that nothing of it is freed under the measurement's eyes
    before = token_loss_sum(model, batch), take_stats(model)
    _, kept, _ = allocated(lambda: token_loss_sum(model, batch))
    assert before
    c, D = setting.compute_bytes, shape.moe.model_width
    of_head = (shape.vocabulary + setting.tokens) * D * c
    expected = shape.num_layers * layer_kept(setting, shape) + outside_layers_saved(setting, shape) + of_head
    assert kept == pytest.approx(expected, rel=0.015)


def measure_rows(setting: Setting) -> list[int]:
    """Bytes that the experts' kernels and the permutations keep in a forward on this rank."""
    config = tiny_config()
    model, _, _ = build_run(config, setting, torch.device("cpu"))
    kept: list[int] = []

    def run_and_look(layer: DroplessExperts) -> None:
        saved: list[Tensor] = []
        inner = layer.forward

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        def forward(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                out: Tensor = inner(x_TD, experts_TK, weights_TK)
            of_others = {local_tensor(w).shape for w in layer.parameters()} | {x_TD.shape}
            widths = (layer.shape.model_width, layer.shape.expert_width)
            wide = [t for t in saved if t.shape[-1:] and t.shape[-1] in widths and t.shape not in of_others]
            kept.append(storage_bytes(wide))
            return out

        layer.forward = forward  # type: ignore[method-assign]

    for layer in moe_layers(model):
        run_and_look(layer)
    compute_gradients(model, [full_batch(setting, config.vocab_size, dist.get_rank())], NO_LOSSES)
    return kept


@pytest.mark.parametrize("ep_size", [2, 4])
def test_rows_of_the_all_to_alls(ranks: RankPool, ep_size: int) -> None:
    setting = cpu_setting(4, ep_size, seq_length=64)
    for found in ranks.run(measure_rows, 4, setting):
        assert found == [experts_saved(setting, model_shape())] * 2


@pytest.mark.parametrize(("kernel", "ep_experts"), [("loop", 8), ("loop", 1), ("torch-grouped", 8)])
def test_experts_backward(monkeypatch: pytest.MonkeyPatch, kernel: str, ep_experts: int) -> None:
    """One rank's experts, all 8 or 1 of 8, beside the gradient that comes in and the residual stream's."""
    # as oneDNN does with AVX-512: it copies a transposed operand. Without, it copies others too, in an order of its own
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda a_MK, b_NK, *_: a_MK.contiguous() @ b_NK.t())
    setting = cpu_setting(8 // ep_experts, 8 // ep_experts, seq_length=256, expert_kernel=kernel)
    shape = model_shape(**BIG)
    D, F = shape.moe.model_width, shape.moe.expert_width
    R = int(rows_received(setting, shape))
    weights = [torch.randn(ep_experts * F, D).requires_grad_() for _ in range(3)]
    rows_RD, grad_RD = torch.randn(R, D).requires_grad_(), torch.randn(R, D)
    out_RD = fused(kernel)(rows_RD, torch.full((ep_experts,), R // ep_experts), *weights)
    _, _, most = allocated(lambda: torch.autograd.grad(out_RD, [rows_RD, *weights], grad_RD, retain_graph=True))
    outside = 4 * (R * D + setting.tokens * D)
    expected = kernel_backward(setting, shape) - outside + sum(weight.nbytes for weight in weights)
    assert most == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("seq_length", [64, 4096], ids=["one-chunk", "two-chunks"])
def test_logits(bf16: bool, seq_length: int) -> None:
    setting = cpu_setting(1, 1, micro_batch=2, seq_length=seq_length, bf16=bf16)
    shape = model_shape(vocab_size=4096, hidden_size=64)
    dtype = torch.bfloat16 if bf16 else torch.float32
    x_BSD = torch.randn(2, seq_length, 64).to(dtype).requires_grad_()
    weight_VD = torch.randn(4096, 64).to(dtype).requires_grad_()
    targets = Targets(torch.zeros(2, seq_length, dtype=torch.int64), torch.arange(2 * seq_length))
    _, _, most = allocated(lambda: chunked_loss_sum(x_BSD, weight_VD, None, targets))
    assert most == pytest.approx(logits_peak(setting, shape), rel=0.03)


def test_chunks_are_those_of_the_head() -> None:
    assert LOGIT_CHUNK_BYTES == CHUNK_BYTES


def test_terms_add_up() -> None:
    _, memory = peak(model_shape(), cpu_setting(4, 2))
    assert memory.total == sum(memory.terms().values()) == pytest.approx(memory.total)
    assert Memory(parameters=1, gradients=2, optimizer=3, logits=4).lasting == 6


def test_products_that_are_kept() -> None:
    """Gate and up of the last layers, all of them until the loss; in backward of a layer those of the layers before."""
    setting = Setting(4, 4, seq_length=512, checkpointing="selective")
    model = model_shape(num_hidden_layers=8)
    size = 2 * 2 * model.moe.top_k * 512 * model.moe.expert_width

    def more(kept: int) -> dict[str, float]:
        plain = dict(moments(model, setting))
        found = dict(moments(model, replace(setting, keep_expert_products=kept)))
        return {when: (memory.activations - plain[when].activations) / size for when, memory in found.items()}

    last = model.num_layers - 1
    found = more(5)
    assert found["loss"] == pytest.approx(5)
    assert found[f"backward of attention, layer {last}"] == pytest.approx(4)
    assert found["backward of attention, layer 0"] == 0
    assert more(model.num_layers)[f"backward of experts, layer {last}"] == pytest.approx(last)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_inputs_in_host_memory(checkpointing: Any) -> None:
    """All but one, which is on its way back."""
    kept = cpu_setting(2, 2, checkpointing=checkpointing)
    shape = model_shape(num_hidden_layers=6)
    offloaded = replace(kept, offload_activations=True)
    assert layer_kept(kept, shape) - layer_kept(offloaded, shape) == layer_input(kept, shape)
    at_loss, at_loss_offloaded = (dict(moments(shape, setting))["loss"] for setting in (kept, offloaded))
    assert at_loss.activations - at_loss_offloaded.activations == 5 * layer_input(kept, shape)
