"""`plan` and `rehearse` of published models as they stand on the hub: the smallest with each kind of layer."""

import json

import pytest

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import moe_shape
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.training.cluster.commands import main
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.layer_kinds import kinds_of_layers
from expertmesh.training.planning.rehearsal.short import Short
from tests.published.models import CONFIGS, MODELS
from tests.test_configs import PUBLISHED
from tests.tiers import tiered
from tests.training.dry_runs import flags_of

GPUS = 16
TOKENS = 1024
LASTING = 4 + 4 + 8
"""Bytes of a parameter, its gradient and AdamW's moments."""
MOST_REHEARSED = 20
"""Billions of parameters of the largest model that is rehearsed here."""


def kinds(name: str) -> set[str]:
    """Kinds of a model's layers, and whether its attention has latent keys and values."""
    config = find_config(str(CONFIGS / name)).load().get_text_config()
    said: list[str] = getattr(config, "layer_types", None) or ["full_attention"]
    # two names of the same
    plain = {"attention", "full_attention"}
    latent = {"latent_attention"} if getattr(config, "kv_lora_rank", None) else set()
    return (set(said) - plain) | latent


def billions(name: str) -> float:
    return float(MODELS[name].total.billions)


BY_SIZE = sorted(MODELS, key=billions)
OF_RECIPES = {kind for name in PUBLISHED.values() for kind in kinds(name)}
"""Planned and rehearsed with the recipes."""
# where layers look experts up by token, a plan takes 100 CPU-seconds: it is left out
OTHERS = {kind: name for name in reversed(BY_SIZE) if not MODELS[name].has_table for kind in kinds(name) - OF_RECIPES}
PLANNED = [BY_SIZE[0], *OTHERS.values()]
"""The smallest of all, which fits, and that with each kind of layer that no recipe's model has."""


def told(capsys: pytest.CaptureFixture[str], command: str, name: str, *flags: str) -> tuple[int, str]:
    code = main([command, "--model", str(CONFIGS / name), "--gpus", str(GPUS), *flags])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "run"),
    tiered([("gemma-4-26b-a4b", 18), ("trinity-mini", 20), ("qwen3-next-80b", 12)], slow=[("kimi-linear-48b-a3b", 18)]),
)
def test_a_dry_run_has_few_layers(name: str, run: int) -> None:
    """Of hybrids, whose first and last layers are of other kinds."""
    model = build_rehearsed(flags_of(), find_config(str(CONFIGS / name)).load(), "cuda")
    assert Short.complete(kinds_of_layers(model)).shortest.run == run


@pytest.mark.release
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rehearsal needs as much as is planned."""
    flags = ["--micro-batch", "1", "--tp-size", "1", "--seq-length", str(TOKENS), "--gradient-accumulation-steps", "1"]
    code, said = told(capsys, "plan", name, *flags)
    plans = json.loads(told(capsys, "plan", name, *flags, "--json")[1])
    model = open_source(CONFIGS / name).build()
    counts, experts = count_parameters(model), moe_shape(model).num_experts
    assert f"{counts.total / 1e9:,.2f} B parameters, {counts.active / 1e9:,.2f} B active" in said
    possible = {ep for ep in range(1, GPUS + 1) if GPUS % ep == 0 and experts % ep == 0}
    found = {plan["ep"] for plan in plans}
    assert found <= possible
    assert (code == 0) == plans[0]["fits"] == ("\nrecommended" in said) == ("\nnothing fits" not in said)
    multiplied = counts.active - model.get_input_embeddings().weight.numel()
    for plan in plans:
        assert plan["memory"]["total"] >= LASTING * counts.total / GPUS
        assert plan["model_flops"] > 6 * multiplied * TOKENS * 0.98
        assert plan["tokens_per_second_a_gpu"] > 0
        assert plan["fits"] == (plan["memory"]["total"] <= 80 * 2**30)
    if billions(name) > MOST_REHEARSED:
        return
    run = ["--bf16", "--per-device-train-batch-size", "1", "--max-seq-length", str(TOKENS)]
    code, said = told(capsys, "rehearse", name, *run, "--json")
    (account,) = json.loads(said)
    assert account["parameters"] == counts.total
    assert account["layers"][1] == model.config.get_text_config().num_hidden_layers
    assert (code == 0) == account["fits"] == (account["needed_bytes"] <= 80 * 2**30)
    same = [*flags, "--ep-size", "1", "--gradient-checkpointing", "none"]
    (alike,) = json.loads(told(capsys, "plan", name, *same, "--json")[1])
    # at most a layer's gathered parameters and a communicator's buffers apart, which weigh in a small model
    assert alike["memory"]["total"] == pytest.approx(account["needed_bytes"], rel=0.01, abs=0.3 * 2**30)
    assert alike["tokens_per_second_a_gpu"] == pytest.approx(account["tokens_per_second"], rel=0.12)
