"""One layer run for all that are like it, with the same outcome as all of them."""

from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3NextConfig

from expertmesh.moe.hf_model.build import build_model
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.rehearsal.rank_summary import PartCost, ledger
from expertmesh.training.planning.rehearsal.recorder import Event
from expertmesh.training.planning.rehearsal.shortened import kinds_of_layers, shortened_stack
from expertmesh.training.planning.rehearsal.world import Rehearsed, rehearse

SIZES: dict[str, Any] = dict(
    vocab_size=100, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2
)


def uniform() -> Any:
    return MixtralConfig(**SIZES, intermediate_size=64, num_hidden_layers=7, num_local_experts=8)


def dense_first() -> Any:
    return DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        first_k_dense_replace=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def alternating() -> Any:
    return GptOssConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=8, head_dim=16, num_local_experts=8, sliding_window=16
    )


def hybrid() -> Any:
    return Qwen3NextConfig(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=8,
        layer_types=["linear_attention", "full_attention"] * 4,
        head_dim=16,
        num_experts=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


@pytest.mark.slow
def test_kinds_are_found_in_the_model_itself() -> None:
    assert kinds_of_layers(build_model(uniform(), "sdpa")) == [0] * 7
    assert kinds_of_layers(build_model(dense_first(), "sdpa")) == [0] * 2 + [1] * 6
    assert kinds_of_layers(build_model(alternating(), "eager")) == [0, 1] * 4
    assert kinds_of_layers(build_model(hybrid(), "sdpa")) == [0, 1] * 4


def test_layers_that_gradients_do_not_go_through_are_of_another_kind() -> None:
    model = build_model(uniform(), "sdpa")
    model.get_input_embeddings().weight.requires_grad_(False)
    assert kinds_of_layers(model) == [0] + [1] * 6


@pytest.mark.parametrize(
    ("kinds", "stand_ins"),
    [
        ("A", [0]),
        ("AAAAA", [0, 1, 2, 3, 4]),
        ("AAAAAAA", [0, 1, 2, 2, 2, 5, 6]),
        ("ABABABABAB", [0, 1, 2, 3, 2, 3, 2, 3, 8, 9]),
        ("ABBBBBBB", [0, 1, 2, 3, 3, 3, 6, 7]),
        ("ABCDEFG", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_layer_stands_for_those_with_neighbours_like_its_own(kinds: str, stand_ins: list[int]) -> None:
    stack = shortened_stack(kinds)
    assert list(stack.stand_ins) == stand_ins
    assert sum(stack.times(n) for n in range(len(kinds)) if stack.is_rehearsed(n)) == len(kinds)


def test_many_layers_of_an_irregular_stack_are_cut_out() -> None:
    """As of Nemotron-H: mixers of three kinds, one after the other without a period."""
    kinds = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    stack = shortened_stack(kinds)
    assert len(set(stack.stand_ins)) <= 12
    padded = f"  {kinds}  "
    for number, stand_in in enumerate(stack.stand_ins):
        assert padded[number : number + 5] == padded[stand_in : stand_in + 5]


def rehearsed(model_config: Any, world_size: int, shortened: bool, **flags: Any) -> Rehearsed:
    settings: dict[str, Any] = dict(ep_size=8, gradient_checkpointing="selective", router_aux_loss_coef=0.0)
    config = TrainConfig(
        model="-",
        dataset=["-"],
        bf16=True,
        max_seq_length=32,
        per_device_train_batch_size=1,
        **settings | flags,
    )
    return rehearse(config, model_config, world_size, rank=1, shortened=shortened)


def figures(event: Event) -> tuple[Any, ...]:
    work = (event.flops, event.needed, event.moved)
    return (event.name, event.place, event.phase, event.micro, *work, event.collective, event.sent, event.ranks)


CASES: list[tuple[Any, int, dict[str, Any]]] = [
    (
        uniform,
        16,
        {"gradient_checkpointing": "none", "dense_shard": "hybrid", "router_aux_loss_coef": 0.01, "optim": "muon"},
    ),
    (
        uniform,
        8,
        {
            "ep_size": 4,
            "overlap_chunks": 2,
            "keep_expert_products": 1,
            "reshard_after_forward": False,
            "optim": "adamw_torch_8bit",
            "gradient_accumulation_steps": 2,
        },
    ),
    (uniform, 8, {"adapter": "lora", "base_dtype": "nf4"}),
    (uniform, 2, {"ep_size": 1, "freeze": ["embeddings", "experts"], "gradient_checkpointing": "full"}),
    (dense_first, 16, {"optim": "adamw_bf16", "router_z_loss_coef": 0.01, "router_bias_update_rate": 0.001}),
    (alternating, 8, {"offload_activations": True, "cp_size": 2}),
    (hybrid, 16, {"gradient_checkpointing": "full"}),
    (uniform, 16, {"tp_size": 2, "cp_size": 2}),
]


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "world_size", "flags"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_shortened_model_tells_the_whole_step(model: Any, world_size: int, flags: dict[str, Any]) -> None:
    whole, short = (rehearsed(model(), world_size, shortened, **flags) for shortened in (False, True))
    assert len(set(short.stack.stand_ins)) < len(set(whole.stack.stand_ins))
    assert list(map(figures, short.step.events)) == list(map(figures, whole.step.events))
    assert short.memory == whole.memory
    assert short.counts == whole.counts
    hardware = preset("H100", "infiniband-ndr")
    accounts = [ledger(step, 4, hardware, gpus_per_node=8) for step in (whole, short)]
    of_whole, of_short = ({part.name: part for part in account.parts} for account in accounts)
    assert of_whole.keys() == of_short.keys()
    for name, part in of_whole.items():
        assert totals(of_short[name]) == pytest.approx(totals(part), rel=1e-9)
    assert accounts[1].seconds == pytest.approx(accounts[0].seconds, rel=1e-9)
    # what stands in for routers calls a few itself in backward
    assert sum(short.step.calls.values()) == pytest.approx(sum(whole.step.calls.values()), rel=2e-3)
    for micro, calls in whole.step.calls.items():
        assert short.step.calls[micro] == pytest.approx(calls, rel=1e-2)


def totals(part: PartCost) -> list[float]:
    return [part.flops, part.recomputed, part.moved, part.kernels, part.sent, part.seconds]
