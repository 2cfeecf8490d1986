"""Pipelines with everything else switched on: training is that of the same run without a pipeline.

Each case is tested against a run with one pp index, the same other ranks, and the same micro-batches: loss and
gradients of the first step bit for bit wherever the sums are in the same order, all else to the tolerance of parallel
layouts.
"""

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe.experts.router_stats import over_ranks
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.replicas import check_replicas
from expertmesh.sharding.stages import layers_here
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import pack
from expertmesh.training.loss.balance import BiasUpdate, LossWeights
from expertmesh.training.metrics import METRICS
from expertmesh.training.model_setup.compiling import compilation
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.step import StepResult, compute_gradients, train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    MAX_GRAD_NORM,
    Case,
    config_of,
    hf_model,
    in_full,
    my_batches,
    random_samples,
    sharded_model,
)
from tests.tiny import relative_error

SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])
LAYERS = {"num_hidden_layers": 4}
TOLERANCE = 1e-5
OF_ROUTING = ("expert_load_max_over_mean", "dead_experts", "router_entropy", "dropped_tokens", "expert_tokens")
ROUNDED_8BIT, ROUNDED_BF16 = 3e-5, 3e-4
"""Of weights after a few steps with states in few bits: a value here and there is rounded the other way."""
CAPACITY = 48

PP = Topology(2, 1, pp_size=2)
PP_EP = Topology(4, 2, pp_size=2)
PP_DP = Topology(4, 1, pp_size=2)
PP_DP_EP = Topology(8, 2, pp_size=2)
PP_4 = Topology(4, 1, pp_size=4)
HYBRID = Topology(8, 2, "hybrid", pp_size=2)
CP = Topology(4, 2, cp_size=2, pp_size=2)
TP = Topology(4, 2, pp_size=2, tp_size=2)

LORA: dict[str, Any] = {"adapter": "lora", "lora_rank": 4}
INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
ZERO_BUBBLE: dict[str, Any] = {"pipeline_schedule": "zero-bubble"}
ZERO_BUBBLE_2: dict[str, Any] = ZERO_BUBBLE | {"pipeline_chunks": 2}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}


@dataclass(frozen=True)
class Row:
    """A case of the table.

    Attributes:
        topology: of the run with a pipeline.
        settings: of the run, without and with a pipeline; pipeline: with one.
        more: of its `Case`.
        is_exact: whether the first step's loss and gradients have the same bits. Of tied embeddings each copy's
            gradients are summed up over micro-batches before the sums are added.
        tolerance, after: of gradients, and of what comes after an update.
    """

    topology: Topology
    settings: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    tolerance: float = TOLERANCE
    after: float = TOLERANCE

    @property
    def case(self) -> Case:
        changes = LAYERS | self.more.get("changes", {})
        defaults: dict[str, Any] = {"samples": SAMPLES, "balance": 0.05, "z": 0.01, "accumulation": 4, "steps": 2}
        return Case(**defaults | self.more | {"changes": changes, "settings": self.settings})


def changed(**changes: Any) -> dict[str, Any]:
    return {"changes": changes}


FAMILY_WITH_BIAS: dict[str, Any] = {"family": "glm4_moe", "balance": 0.0, "z": 0.0, "changes": {}}

ROWS = {
    "interleaved, full": Row(PP_EP, FULL, INTERLEAVED),
    "tied embeddings": Row(PP_DP, {}, more=changed(tie_word_embeddings=True), is_exact=False),
    "adapters in nf4": Row(
        PP_EP,
        LORA | {"base_dtype": "nf4"} | SELECTIVE,
        {"pipeline_layers": "1,3"},
        changed(intermediate_size=80) | {"balance": 0.0, "z": 0.0},
    ),
    "muon, hybrid": Row(HYBRID, {"optim": "muon"}),
    "first layers frozen": Row(PP_EP, {"freeze": ["embeddings", r"layers\.[01]\."]}),
    "bias update": Row(PP, {"router_bias_update_rate": 0.01}, more=FAMILY_WITH_BIAS),
    "pp 4": Row(PP_4, SELECTIVE | {"keep_expert_products": 3}),
    "cp": Row(CP, SELECTIVE),
    "hybrid, full, uneven": Row(HYBRID, FULL, {"pipeline_layers": "3,1"}),
    "selective": Row(PP_DP_EP, SELECTIVE, more={"kernel": "torch-grouped"}),
    "interleaved": Row(PP, {}, INTERLEAVED),
    "interleaved, 8 layers": Row(PP_4, {}, INTERLEAVED, changed(num_hidden_layers=8)),
    "interleaved, uneven": Row(PP_EP, {}, INTERLEAVED | {"pipeline_layers": "1,2,1,2"}, changed(num_hidden_layers=6)),
    "interleaved, 3 micro-batches": Row(PP, {}, INTERLEAVED, {"accumulation": 3}),
    "one micro-batch": Row(PP_4, more={"accumulation": 1}),
    "a rank without a sequence": Row(PP_EP, more={"samples": SAMPLES[:5], "accumulation": 3}),
    "packing": Row(PP_EP, {"packing": True}),
    "balanced per layer": Row(PP_EP, {"router_aux_loss_per_layer": True}, INTERLEAVED),
    "no auxiliary losses": Row(PP_EP, more={"balance": 0.0, "z": 0.0}),
    "adapters everywhere, interleaved": Row(
        PP_EP, LORA | {"lora_targets": ["attention", "experts", "router"]} | FULL, INTERLEAVED
    ),
    "adapters in fp8, hybrid": Row(
        HYBRID, LORA | {"base_dtype": "fp8"}, more=changed(intermediate_size=80) | {"balance": 0.0, "z": 0.0}
    ),
    "adapters of two layers": Row(PP_EP, LORA | {"lora_targets": [r"layers\.[01]\..*(q_proj|v_proj)"]}),
    "offload": Row(PP_DP, {"offload": True}),
    "offload, adapters": Row(PP_EP, {"offload": True} | LORA),
    "offload, muon": Row(PP_EP, {"offload": True, "optim": "muon"}),
    "activations offloaded": Row(PP_EP, {"offload_activations": True} | FULL, INTERLEAVED),
    "activations offloaded, selective": Row(PP_4, {"offload_activations": True} | SELECTIVE),
    "8 bit, interleaved": Row(
        PP_EP, {"optim": "adamw_torch_8bit"}, INTERLEAVED, changed(hidden_size=256), after=ROUNDED_8BIT
    ),
    "bf16 adamw": Row(PP_EP, {"optim": "adamw_bf16"}, more=changed(hidden_size=256), after=ROUNDED_BF16),
    # gradients are summed up in bf16 too
    "bf16 adamw, tied": Row(
        *(PP, {"optim": "adamw_bf16"}, {}, changed(hidden_size=256, tie_word_embeddings=True)),
        is_exact=False,
        tolerance=1e-2,
        after=1e-2,
    ),
    "shampoo": Row(PP_EP, {"optim": "shampoo", "shampoo_start": 2, "shampoo_block_size": 24}),
    "shampoo, offload": Row(PP_EP, {"optim": "shampoo", "shampoo_start": 2, "offload": True}, INTERLEAVED),
    "muon, head alone": Row(PP, {"optim": "muon", "freeze": [r"^(?!lm_head)"]}, more={"balance": 0.0, "z": 0.0}),
    "tied, interleaved": Row(PP_EP, FULL, INTERLEAVED, changed(tie_word_embeddings=True), is_exact=False),
    "tied, hybrid, muon": Row(HYBRID, {"optim": "muon"}, more=changed(tie_word_embeddings=True), is_exact=False),
    "tied, offload": Row(PP_DP, {"offload": True}, more=changed(tie_word_embeddings=True), is_exact=False),
    "tied, pp 4": Row(PP_4, more=changed(tie_word_embeddings=True), is_exact=False),
    "tied, frozen": Row(PP, {"freeze": ["embeddings"]}, more=changed(tie_word_embeddings=True)),
    "tied, adapters": Row(PP, LORA, more=changed(tie_word_embeddings=True)),
    "head alone": Row(PP_EP, {"freeze": [r"^(?!lm_head)"]}, more={"balance": 0.0, "z": 0.0}),
    "head alone, interleaved": Row(PP, {"freeze": [r"^(?!lm_head)"]} | FULL, INTERLEAVED, {"balance": 0.0, "z": 0.0}),
    "first layer alone": Row(PP_4, {"freeze": [r"^(?!model\.layers\.0\.)"]}),
    "first layer alone, full": Row(PP_EP, {"freeze": [r"^(?!model\.layers\.0\.)"]} | FULL, INTERLEAVED),
    "experts frozen": Row(PP_EP, {"freeze": ["experts"]}),
    "all but experts frozen": Row(PP_DP, {"freeze": ["router", "embeddings", "norms", "attention"]}),
    "no reshard, interleaved": Row(PP_DP, {"reshard_after_forward": False} | SELECTIVE, INTERLEAVED),
    "overlap, interleaved": Row(PP_EP, {"overlap_chunks": 2} | SELECTIVE, INTERLEAVED),
    "bf16, full, interleaved": Row(PP_DP, FULL, INTERLEAVED, {"compute_dtype": torch.bfloat16}),
    "zero-bubble, full": Row(PP_EP, FULL, ZERO_BUBBLE),
    "zero-bubble, selective, uneven": Row(
        PP_EP, SELECTIVE | {"keep_expert_products": 3}, ZERO_BUBBLE | {"pipeline_layers": "1,3"}
    ),
    "zero-bubble, selective, chunks": Row(PP_DP, SELECTIVE, ZERO_BUBBLE_2, {"kernel": "torch-grouped"}),
    "zero-bubble, hybrid, muon": Row(HYBRID, {"optim": "muon"}, ZERO_BUBBLE),
    "zero-bubble, cp": Row(CP, SELECTIVE, ZERO_BUBBLE_2),
    "zero-bubble, adapters": Row(PP_DP, LORA, ZERO_BUBBLE),
    "zero-bubble, adapters in nf4": Row(
        PP_EP, LORA | {"base_dtype": "nf4"} | FULL, ZERO_BUBBLE_2, changed(intermediate_size=80)
    ),
    "zero-bubble, offload": Row(PP_DP, {"offload": True}, ZERO_BUBBLE),
    "zero-bubble, offload, one rank": Row(PP, {"offload": True, "offload_activations": True} | FULL, ZERO_BUBBLE_2),
    "zero-bubble, overlap": Row(PP_EP, {"overlap_chunks": 2}, ZERO_BUBBLE),
    "zero-bubble, tied": Row(PP_EP, {}, ZERO_BUBBLE, changed(tie_word_embeddings=True), is_exact=False),
    "zero-bubble, experts frozen": Row(PP_EP, {"freeze": ["experts"]}, ZERO_BUBBLE),
    "zero-bubble, first layer alone": Row(PP_4, {"freeze": [r"^(?!model\.layers\.0\.)"]}, ZERO_BUBBLE),
    "zero-bubble, no reshard, bf16": Row(
        PP_DP, {"reshard_after_forward": False}, ZERO_BUBBLE, {"compute_dtype": torch.bfloat16}
    ),
    "zero-bubble, 8 bit": Row(
        PP_EP, {"optim": "adamw_torch_8bit"}, ZERO_BUBBLE, changed(hidden_size=256), after=ROUNDED_8BIT
    ),
    "zero-bubble, one micro-batch": Row(PP_4, {}, ZERO_BUBBLE, {"accumulation": 1}),
    "zero-bubble, bias update": Row(PP, {"router_bias_update_rate": 0.01}, ZERO_BUBBLE, FAMILY_WITH_BIAS),
    "tp, adapters": Row(TP, LORA),
    "tp, adapters in nf4": Row(TP, LORA | {"base_dtype": "nf4"} | SELECTIVE, more=changed(intermediate_size=80)),
    "tp, 8 bit": Row(TP, {"optim": "adamw_torch_8bit"}, more=changed(hidden_size=256), after=ROUNDED_8BIT),
    "tp, muon": Row(TP, {"optim": "muon"}),
    "tp, shampoo": Row(TP, {"optim": "shampoo", "shampoo_start": 2, "shampoo_block_size": 24}),
    "tp, packing": Row(TP, {"packing": True}),
    "bias update, dp": Row(PP_DP, {"router_bias_update_rate": 0.01}, more=FAMILY_WITH_BIAS),
}


@dataclass(frozen=True)
class Trained:
    """What a training gave, on rank 0 of it.

    Attributes:
        figures: of each step: cross-entropy, balancing loss, z-loss, gradient norm.
        grads: of the first step, full. weights: parameters and buffers after the last one, full.
        routing: what the log tells of the last step's.
    """

    figures: list[tuple[float, float, float, float]]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    routing: dict[str, Any]


def trained(path: Path, topology: Topology, case: Case) -> Trained | None:
    """Clipped steps. Replicas, copies of tied parameters among them, are compared after each."""
    model, mesh, _ = sharded_model(path, topology, case)
    config = config_of(case, topology)
    optimizer = build_optimizer(model.train(), config, mesh)
    rate = config.router_bias_update_rate
    bias_update = BiasUpdate(model, rate) if rate else None
    rank = dist.get_rank()
    make = _packed if config.packing else my_batches
    batches = make(case, topology, rank, mesh.cp_group)
    weights = LossWeights(case.balance, case.z, config.router_aux_loss_per_layer)
    results: list[StepResult] = []
    grads: dict[str, Tensor] = {}

    def take_grads(doing: str) -> None:
        if doing == "the gradient norm" and not results:
            grads.update(in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))

    for step in range(case.steps):
        results.append(train_step(model, optimizer, batches, mesh, weights, MAX_GRAD_NORM, bias_update, at=take_grads))
        check_replicas(model, topology, torch.device("cpu"), step, {"steps": step})
    final = in_full(dict(model.named_parameters())) | dict(model.named_buffers())
    known = SimpleNamespace(routing=over_ranks(results[-1].routing), top_k=2)
    routing = {metric.name: metric.value(known) for metric in METRICS if metric.name in OF_ROUTING}
    if rank > 0:
        return None
    figures = [(result.loss, result.balance_loss, result.z_loss, result.grad_norm) for result in results]
    return Trained(figures, grads, final, routing)


def _packed(case: Case, topology: Topology, rank: int, cp_group: CPGroup | None) -> list[Batch]:
    """Micro-batches of packed rows."""
    lengths = torch.tensor([len(sample.tokens) for sample in case.samples])
    rows: list[list[Sample]] = [[case.samples[i] for i in row] for row in pack(lengths, CAPACITY, seed=0)]
    mine = rows[topology.data_index(rank) :: topology.data_size]
    return [collate(mine[number :: case.accumulation], cp_group) for number in range(case.accumulation)]


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ROWS)
def test_equals_one_pp_index(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert_stages_equal_one(ranks, tmp_path, ROWS[name], trained)


def assert_stages_equal_one(ranks: RankPool, tmp_path: Path, row: Row, train: Callable[..., Any]) -> None:
    hf_model(row.case, seed=1).save_pretrained(tmp_path)
    flat = replace(row.topology, world_size=row.topology.ranks_per_stage, pp_size=1)
    want = ranks.run(train, flat.world_size, tmp_path, flat, row.case)[0]
    case = replace(row.case, settings=row.settings | row.pipeline)
    found = ranks.run(train, row.topology.world_size, tmp_path, row.topology, case)[0]
    assert_same(found, want, row)


@pytest.mark.release
def test_compiled(ranks: RankPool, tmp_path: Path) -> None:
    assert_stages_equal_one(ranks, tmp_path, Row(PP, SELECTIVE | {"compile": True}, INTERLEAVED), _compiled)


def _compiled(path: Path, topology: Topology, case: Case) -> Trained | None:
    before = compilation().graphs
    torch.compiler.reset()  # what an earlier test compiled in this process
    with torch.compiler.set_stance(force_backend="eager"):
        found = trained(path, topology, case)
    assert compilation().graphs >= before + 2, "attention and norms were to be compiled"
    return found


def test_nothing_is_held_after_a_step(ranks: RankPool, tmp_path: Path) -> None:
    """No activation waits for the collector of cyclic garbage, which a run calls every 50 steps."""
    case = Row(PP).case
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for held in ranks.run(_held, PP.world_size, tmp_path, case):
        assert held == [0] * 6


def test_forwards_without_a_backward_are_forgotten(ranks: RankPool, tmp_path: Path) -> None:
    """Where nothing on a rank is trained: FSDP would remember every forward of the run."""
    row = Row(PP, {"freeze": ["^(?!lm_head)"]}, more={"balance": 0.0, "z": 0.0})
    hf_model(row.case, seed=1).save_pretrained(tmp_path)
    assert ranks.run(_remembered, PP.world_size, tmp_path, row.case) == [0, 0]


def _remembered(path: Path, case: Case) -> int:
    model, mesh, _ = sharded_model(path, PP, case)
    optimizer = build_optimizer(model.train(), config_of(case, PP), mesh)
    batches = my_batches(case, PP, dist.get_rank())
    for _ in range(2):
        train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.0), MAX_GRAD_NORM)
    return len(model._get_fsdp_state()._comm_ctx.post_forward_order)


def _held(path: Path, case: Case) -> list[int]:
    """Storages of layers' outputs that are still there after a step's backward."""
    found = []
    for more in (INTERLEAVED, ZERO_BUBBLE):
        for mode in ("none", "full", "selective"):
            one = replace(case, settings=more, gradient_checkpointing=mode)
            model, *_ = sharded_model(path, PP, one)
            seen: list[Any] = []

            def note(layer: Any, args: Any, output: Any, seen: list[Any] = seen) -> None:
                seen.append(weakref.ref((output[0] if isinstance(output, tuple) else output).untyped_storage()))

            for layer in layers_here(model):
                layer.register_forward_hook(note)
            batches = my_batches(one, PP, dist.get_rank())
            gc.disable()
            compute_gradients(model.train(), batches, LossWeights(one.balance, one.z))
            assert len(seen) >= len(batches) * LAYERS["num_hidden_layers"] // 2
            found.append(sum(storage() is not None for storage in seen))
            gc.enable()
    return found


def test_a_flipped_bit_of_either_copy_is_found(ranks: RankPool, tmp_path: Path) -> None:
    """Of tied embeddings, which the first and the last stage hold."""
    case = Row(PP_EP, more=changed(tie_word_embeddings=True)).case
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for told in ranks.run(_flipped, PP_EP.world_size, tmp_path, PP_EP, case):
        assert len(told) == 2
        for message in told:
            assert "1 of " in message
            assert re.search(r"model.embed_tokens.weight \((rank 1 against rank 3|rank 3 against rank 1)\)", message)


def _flipped(path: Path, topology: Topology, case: Case) -> list[str]:
    """What is said of one bit on rank 1, then on rank 3, whose rows are the same."""
    model, *_ = sharded_model(path, topology, case)
    bits = local_tensor(model.get_parameter("model.embed_tokens.weight").detach()).view(torch.int32)
    told = []
    for rank in (1, 3):
        mine = dist.get_rank() == rank
        bits[3, 5] ^= int(mine)
        with pytest.raises(ExpertMeshError) as error:
            check_replicas(model, topology, torch.device("cpu"), 1, {})
        bits[3, 5] ^= int(mine)
        told.append(str(error.value))
    check_replicas(model, topology, torch.device("cpu"), 2, {})
    return told


def assert_same(found: Trained, want: Trained, row: Row) -> None:
    assert found.grads.keys() == want.grads.keys()
    if row.is_exact:
        # the norm's square is summed up in another order
        assert found.figures[0][:3] == want.figures[0][:3]
        assert [name for name, grad in found.grads.items() if not torch.equal(grad, want.grads[name])] == []
    _compare(found.grads, want.grads, row.tolerance)
    _compare_figures(found.figures, want.figures, row.after)
    assert found.weights.keys() == want.weights.keys()
    _compare(found.weights, want.weights, row.after)
    _compare_figures(found.routing.pop("router_entropy"), want.routing.pop("router_entropy"), row.after)
    tokens, wanted = (torch.tensor(routing.pop("expert_tokens")) for routing in (found.routing, want.routing))
    # rounded weights choose another expert for a token here and there
    allowed = 0.02 * float(wanted.sum()) if row.after >= ROUNDED_BF16 and not row.is_exact else 0.0
    assert float((tokens - wanted).abs().sum()) <= allowed
    assert found.routing.keys() == want.routing.keys()
    assert allowed or found.routing == want.routing


def _compare(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: relative_error(found[name].float(), tensor.float()) for name, tensor in want.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def _compare_figures(found: list[Any], want: list[Any], tolerance: float) -> None:
    """Lists of figures, or of lists of them."""
    assert torch.tensor(found).flatten().tolist() == pytest.approx(torch.tensor(want).flatten().tolist(), rel=tolerance)
