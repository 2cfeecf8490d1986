"""What --lora-targets names, in models of many families, and what an adapter begins with."""

from typing import Any

import pytest
import torch

from expertmesh.moe.experts.lora import first_values
from expertmesh.moe.hf_model.build import build_model, count_parameters, kernel_needs
from expertmesh.moe.kernels.expert_kernels import choose_kernel
from expertmesh.moe.kernels.kernel_entries import KERNELS, Precision
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.model_setup.lora_targets import adapt, unquantized_lines
from tests.families.configs import tiny_config
from tests.gpus import SetCapability
from tests.tiny import in_memory


def adapted(family: str, *targets: str, **settings: Any) -> set[str]:
    """Names of the parameters that are trained."""
    model = build_model(tiny_config(family))
    adapt(model, TrainConfig(model="m", dataset=["d"], adapter="lora", lora_targets=list(targets), **settings))
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def modules(names: set[str], layer: int) -> set[str]:
    """What has adapters in a layer, less the layer's own path."""
    start = f"model.layers.{layer}."
    return {name.removeprefix(start).rpartition("lora_")[0].rstrip("._") for name in names if name.startswith(start)}


ATTENTION = {f"self_attn.{which}_proj" for which in "qkvo"}
SHARED = ("shared_expert_gate", *(f"shared_expert.{which}_proj" for which in ("gate", "up", "down")))
EXPERTS = {f"mlp.experts.mlp.{name}" for name in ("w1", "v1", "w2")}


@pytest.mark.parametrize(
    ("family", "targets", "layer", "expected"),
    [
        ("mixtral", ["attention", "experts"], 0, ATTENTION | EXPERTS),
        ("mixtral", ["router"], 1, {"mlp.gate"}),
        ("mixtral", ["q_proj|v_proj"], 0, {"self_attn.q_proj", "self_attn.v_proj"}),
        ("gpt_oss", ["experts", "router"], 0, {"mlp.router"} | EXPERTS),
        ("qwen2_moe", ["dense-mlp"], 0, {f"mlp.{which}_proj" for which in ("gate", "up", "down")}),
        ("qwen2_moe", ["dense-mlp"], 1, set()),
        ("qwen2_moe", ["shared-experts"], 1, {f"mlp.{part}" for part in SHARED}),
        ("nemotron_h", ["experts"], 1, {"mixer.experts.mlp.w1", "mixer.experts.mlp.w2"}),
        ("mixtral", ["servable"], 0, ATTENTION | EXPERTS),
        # vLLM never uses an adapter of kv_b_proj
        (
            "deepseek_v3",
            ["servable"],
            1,
            EXPERTS
            | {f"self_attn.{each}" for each in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")}
            | {f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")},
        ),
        # SGLang reads no packed adapters, and knows no gate of a shared expert
        ("gpt_oss", ["servable"], 0, ATTENTION),
        ("qwen2_moe", ["servable"], 1, ATTENTION | EXPERTS | {f"mlp.{part}" for part in SHARED[1:]}),
        # dt_proj is not called, but its weight multiplied
        ("jamba", ["mamba"], 0, {f"mamba.{which}_proj" for which in ("in", "x", "out")}),
    ],
)
def test_targets(family: str, targets: list[str], layer: int, expected: set[str]) -> None:
    names = adapted(family, *targets)
    assert modules(names, layer) == expected
    assert all(name.endswith(("lora_A", "lora_B")) for name in names)


@pytest.mark.parametrize(("rank", "precision"), [(4, "same"), (12, "same"), (8, "fp8"), (4, "fp8")])
def test_no_rank_makes_the_base_experts_loop(set_capability: SetCapability, rank: int, precision: Precision) -> None:
    """On an H100 in bf16; 8 does not divide 4 and 12. Nor are the adapters' products a loop."""
    set_capability((9, 0))
    model = build_model(tiny_config("mixtral"))
    adapt(model, TrainConfig(model="m", dataset=["d"], adapter="lora", lora_targets=["experts"], lora_rank=rank))
    choice = choose_kernel("auto", kernel_needs(model, "cuda", torch.bfloat16), precision)
    assert choice.name == ("torch-grouped" if precision == "same" else "fp8")
    assert choice.kernel.code.low_rank is KERNELS.get("torch-grouped").code.low_rank is not None


def test_what_is_not_quantized_is_told() -> None:
    settings: dict[str, Any] = dict(model="m", dataset=["d"], adapter="lora", base_dtype="nf4")
    told = unquantized_lines(build_model(tiny_config("glm_moe_dsa")), TrainConfig(bf16=True, **settings))
    assert len(told) == 1
    assert "base in nf4, except 3 linear layers" in told[0]
    assert told[0].endswith(": self_attn.indexer.weights_proj")
    assert unquantized_lines(build_model(tiny_config("mixtral")), TrainConfig(**settings)) == []


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["shared-experts"], "this model has none; it has attention, experts, router"),
        (["q_prj"], "no linear layer matches it; did you mean q_proj"),
        (["("], r"neither a group \(experts, router, attention"),
        (["lm_head"], "no linear layer matches it"),
    ],
)
def test_mistakes(targets: list[str], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        adapted("mixtral", *targets)


def test_what_no_server_loads_is_not_servable() -> None:
    assert modules(adapted("mixtral", "servable", adapter_format="packed"), 0) == ATTENTION
    # a query without a latent has no value beside it, and SGLang stacks queries, keys and values
    model = build_model(tiny_config("deepseek_v3", q_lora_rank=None))
    told = adapt(model, TrainConfig(model="m", dataset=["d"], adapter="lora", lora_targets=["servable"]))
    assert told.targets == ("down_proj, gate_proj, up_proj, o_proj", "experts")


def test_layers_that_are_not_called() -> None:
    """Jamba's code multiplies by the weight of dt_proj, so an adapter would have no effect: refused by name if it is
    all that was asked for, told if it is among others."""
    with pytest.raises(
        ExpertMeshError, match=r"--lora-targets dt_\w+: dt_proj cannot have an adapter: the model's code"
    ):
        adapted("jamba", "dt_proj")
    config = TrainConfig(model="m", dataset=["d"], adapter="lora", lora_targets=["all-linear"])
    assert ", not on dt_proj (the model's code multiplies by the weight itself): " in told_of("jamba", config)
    assert "not on" not in told_of("mixtral", config)


def told_of(family: str, config: TrainConfig) -> str:
    return adapt(build_model(tiny_config(family)), config).line()


def test_share_is_told() -> None:
    model = build_model(tiny_config("mixtral"))
    config = TrainConfig(model="m", dataset=["d"], adapter="lora", lora_rank=2, lora_alpha=4, use_rslora=True)
    told = adapt(model, config)
    assert told.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert told.total == count_parameters(model).total
    assert told.lora.low_rank.scale == pytest.approx(4 / 2**0.5)
    assert told.line().startswith("adapter: LoRA, rank 2, alpha 4, rsLoRA, on attention, experts: ")


def test_targets_as_pefts_users_write_them() -> None:
    flags = ["--model", "m", "--dataset", "d", "--adapter", "lora", "--lora-targets"]
    targets = parse_config([*flags, "attention,experts", "q{1,2}_proj"]).lora_targets
    assert targets == ["attention", "experts", "q{1,2}_proj"]
    assert parse_config([*flags[:-1], "--lora-r", "8"]).lora_rank == 8


def test_impossible_settings() -> None:
    bad: dict[str, Any] = {"lora_dropout": 1.0, "lora_rank": 0, "lora_targets": [], "lora_alpha": -1.0}
    for name, value in bad.items():
        with pytest.raises(ExpertMeshError, match=f"--{name.replace('_', '-')}"):
            TrainConfig(model="m", dataset=["d"], adapter="lora", **{name: value})


def test_first_values_do_not_depend_on_how_they_are_cut() -> None:
    whole = first_values("x.w1_lora_A", range(24), 16, 4, seed=1)
    parts = [first_values("x.w1_lora_A", rows, 16, 4, seed=1) for rows in (range(3), range(3, 10), range(10, 24))]
    assert torch.equal(torch.cat(parts), whole)
    assert 0.9 / 4 < whole.abs().max() <= 1 / 4, "1/√in"
    assert len({tuple(matrix.flatten().tolist()) for matrix in whole.chunk(6)}) == 6, "each expert its own"
    assert not torch.equal(first_values("x.v1_lora_A", range(24), 16, 4, seed=1), whole)
    assert not torch.equal(first_values("x.w1_lora_A", range(24), 16, 4, seed=2), whole)
    assert not first_values("x.w1_lora_B", range(24), 16, 4, seed=1).any()


@pytest.mark.parametrize("target", ["attention", "experts"])
def test_dropout_is_of_training_alone(target: str) -> None:
    settings: dict[str, Any] = {"adapter": "lora", "lora_targets": [target], "lora_dropout": 0.5}
    model = build_model(tiny_config("mixtral"))
    adapt(model, TrainConfig(model="m", dataset=["d"], **settings))
    model = in_memory(model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.arange(3, 15).view(1, -1)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(tokens).logits
        return found

    model.train()
    assert not torch.equal(logits(), logits())
    model.eval()
    evaluated = logits()
    assert torch.equal(evaluated, logits())
    assert evaluated.isfinite().all()
