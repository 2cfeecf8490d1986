"""`ep_implementation="expertmesh"` within transformers' own expert parallelism, against transformers' own `all_to_all`,
and against the model in one process."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.moe.registration import NAME, register_ep_implementation
from expertmesh.moe.util.errors import ExpertMeshError
from tests.distributed.pool import RankPool
from tests.families.configs import UNSHRINKABLE, is_older, tiny_model
from tests.rounding import OTHER_ORDER, gradient_errors
from tests.tiers import tiered
from tests.tiny import relative_error

pytestmark = pytest.mark.skipif(is_older(), reason="this transformers has no EPImplementationInterface")

THEIRS = "all_to_all"
STEPS = 3
TOLERANCE = OTHER_ORDER
ROUNDING = 3e-2
"""In bf16, which has 8 bits."""
RANKS = 4
SIZES = {"fsdp_size": 4, "ep_size": 2}
FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]

BROKEN = {
    "gemma4": "Cannot concatenate overlapping meshes",
    "gemma4_text": "Cannot concatenate overlapping meshes",
    "lara_mini": "a tensor is split by the sizes of all ranks' parts where there is one rank's",
    "qwen4_exp": "sizes that do not match when it is loaded",
}
"""Families that transformers' own expert parallelism cannot run, whichever implementation it is asked for."""


@dataclass(frozen=True)
class Case:
    """sizes: of transformers' DistributedConfig. dtype: that parameters are held in. autocast: to bf16. kernel: ours.
    checkpointing: of every layer. length: of the one row that each rank with tokens of its own has. steps: of SGD with
    momentum, which changes weights by as much as gradients differ, and not by their signs."""

    sizes: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    kernel: str = "auto"
    checkpointing: bool = False
    length: int = 13
    steps: int = STEPS

    def rows(self, dp_size: int, step: int) -> Tensor:
        """Tokens of all ranks, (dp, length): text alone."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(3, 290, (dp_size, self.length), generator=generator)


@dataclass(frozen=True)
class Figures:
    """losses: a step. grads: of each step, by name, full. logits: after the last step, of the rank's rows, without a
    graph."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    logits: Tensor


def loaded(path: Path, implementation: str, case: Case) -> Any:
    """As a user would, on this rank of several."""
    from transformers import DistributedConfig

    register_ep_implementation()
    config = DistributedConfig(**case.sizes, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=case.dtype, attn_implementation="eager", distributed_config=config
    )


def trained(path: Path, implementation: str, case: Case) -> Figures:
    """On this rank of several."""
    from expertmesh.moe.ep_implementation import ExpertMeshEP

    ExpertMeshEP.expert_kernel = case.kernel
    model = loaded(path, implementation, case)
    dp_size, tp_size = case.sizes["fsdp_size"], case.sizes.get("tp_size", 1)
    number = dist.get_rank() // tp_size
    found = train(model, case, slice(number, number + 1), dp_size)
    losses = torch.tensor(found.losses)
    dist.all_reduce(losses)
    return replace(found, losses=(losses / dist.get_world_size()).tolist())


def trained_with_each(path: Path, case: Case, *implementations: str) -> list[Figures]:
    return [trained(path, implementation, case) for implementation in implementations]


def train(model: Any, case: Case, mine: slice, dp_size: int) -> Figures:
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    computing = torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()
    losses, grads = [], []
    for step in range(case.steps):
        tokens = case.rows(dp_size, step)[mine]
        with computing:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), computing:
        logits = model.eval()(input_ids=case.rows(dp_size, STEPS)[mine], use_cache=False).logits
    return Figures(losses, grads, logits)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def alone(path: Path, case: Case) -> Figures:
    """The model in one process on all ranks' rows."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=case.dtype, attn_implementation="eager")
    dp_size = case.sizes["fsdp_size"]
    return train(model, case, slice(dp_size), dp_size)


def assert_same(found: Figures, expected: Figures, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    for ours, theirs in zip(found.grads, expected.grads, strict=True):
        errors = gradient_errors(ours, theirs)
        assert max(errors.values()) <= tolerance, max(errors.items(), key=lambda item: item[1])


def distance(found: Figures, exact: Figures) -> float:
    """Relative, of all gradients of the first step."""
    ours, theirs = (
        torch.cat([grads[name].flatten() for name in exact.grads[0]]) for grads in (found.grads[0], exact.grads[0])
    )
    return relative_error(ours, theirs)


def assert_same_bits(found: Figures, expected: Figures) -> None:
    assert found.losses == expected.losses
    for ours, theirs in zip(found.grads, expected.grads, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert torch.equal(found.logits, expected.logits)


def save(path: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    model: Any = tiny_model(family, seed=1, **changes)
    model.to(dtype).save_pretrained(path)


def has_plan(path: Path) -> bool:
    """Whether transformers knows which tensors of a model its ranks shard as experts."""
    config = AutoConfig.from_pretrained(path)
    return "ep_dispatch_experts" in (getattr(config.get_text_config(), "base_model_ep_plan", None) or {}).values()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ep_size"), [("mixtral", 2), ("gpt_oss", 4)])
def test_trains_as_transformers_own(ranks: RankPool, tmp_path: Path, family: str, ep_size: int) -> None:
    """And as one process; without a graph too."""
    case = Case({**SIZES, "ep_size": ep_size})
    save(tmp_path, family)
    found = ranks.run(trained_with_each, RANKS, tmp_path, case, NAME, THEIRS)
    expected = alone(tmp_path, case)
    for ours, theirs in found:
        assert_same(ours, theirs)
        assert_same(ours, expected)
        assert relative_error(ours.logits, theirs.logits) <= TOLERANCE
    assert relative_error(torch.cat([ours.logits for ours, _ in found]), expected.logits) <= TOLERANCE


OTHERS = sorted((MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & set(FAMILIES)) - {"mixtral"})


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sample(10)]) for name in OTHERS)]
)
def test_families(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Every one whose config has a plan for transformers' own expert parallelism, and that runs with it, on two ranks,
    of which each has half of the experts. Some of transformers' own gradients are 3e-5 off those of one process, in
    fp32, and those of the two 3.005e-5 off each other (Qwen3-Next's convolution)."""
    if family in BROKEN:
        pytest.skip(f"transformers' own expert parallelism fails: {BROKEN[family]}")
    save(tmp_path, family)
    if not has_plan(tmp_path):
        pytest.skip(f"transformers has no tensor-parallel plan (base_model_tp_plan) for {family}")
    case = Case({"fsdp_size": 2, "ep_size": 2}, steps=2)
    ((ours, theirs), *_) = ranks.run(trained_with_each, 2, tmp_path, case, NAME, THEIRS)
    assert_same(ours, theirs, 5 * TOLERANCE)
    assert relative_error(ours.logits, theirs.logits) <= 3 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "case"),
    tiered(
        # the ranks of a tp group hold the same tokens, and share them out among themselves
        slow=[("mixtral", Case({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}))],
        release=[
            ("gpt_oss", Case({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, length=3, steps=1)),
            ("gpt_oss", Case(SIZES, kernel="torch-grouped")),
        ],
    ),
    ids=["tp, ep 4", "tp, ep 2, odd", "torch-grouped"],
)
def test_other_settings(ranks: RankPool, tmp_path: Path, family: str, case: Case) -> None:
    save(tmp_path, family)
    for ours, theirs in ranks.run(trained_with_each, RANKS, tmp_path, case, NAME, THEIRS):
        assert_same(ours, theirs)


MIXED = {**SIZES, "fsdp_mixed_precision": True}


@pytest.mark.parametrize(
    ("family", "case"),
    tiered(
        slow=[("gpt_oss", Case(MIXED, autocast=True, checkpointing=True))],
        release=[
            ("mixtral", Case(MIXED)),
            ("gpt_oss", Case({**SIZES, "ep_size": 4}, dtype=torch.bfloat16)),
            ("mixtral", Case(SIZES, autocast=True)),
        ],
    ),
    ids=["mixed, autocast, checkpointing", "mixed", "bf16", "autocast"],
)
def test_in_bf16(ranks: RankPool, tmp_path: Path, family: str, case: Case) -> None:
    """No further from fp32 than transformers' own. Tokens are given all experts: of two that a router has all but tied,
    rounding would decide."""
    case = replace(case, steps=1)
    save(tmp_path, family, case.dtype, num_experts_per_tok=8)
    ((ours, theirs), *_) = ranks.run(trained_with_each, RANKS, tmp_path, case, NAME, THEIRS)
    exact = alone(tmp_path, Case(case.sizes, steps=1))
    assert ours.losses == pytest.approx(exact.losses, rel=ROUNDING)
    assert distance(ours, exact) <= 1.25 * distance(theirs, exact)


@pytest.mark.slow
def test_ranks_without_rows(ranks: RankPool, tmp_path: Path) -> None:
    """Routers of zeros tie all experts, and every token takes the same two: of the others' ranks none gets a row."""
    model = tiny_model("mixtral", seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(tmp_path)
    case = Case({**SIZES, "ep_size": 4}, steps=1)
    ((ours, theirs), *_) = ranks.run(trained_with_each, RANKS, tmp_path, case, NAME, THEIRS)
    assert_same(ours, theirs)
    assert_same(ours, alone(tmp_path, case))
    (down,) = (grad for name, grad in ours.grads[0].items() if name.endswith("layers.0.mlp.experts.down_proj"))
    assert sum(bool(grad.any()) for grad in down) == 2


@pytest.mark.slow
def test_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """Two runs give the same bits, and so does one that recomputes its layers in backward."""
    save(tmp_path, "mixtral")
    case = Case(SIZES)
    first, second = ranks.run(trained_with_each, RANKS, tmp_path, case, NAME, NAME)[0]
    assert_same_bits(second, first)
    assert_same_bits(ranks.run(trained, RANKS, tmp_path, NAME, replace(case, checkpointing=True))[0], first)


def trained_by_trainer(path: Path, implementation: str, output_dir: Path) -> list[float]:
    """Loss and norm of the gradients of each step of transformers.Trainer, on this rank of several."""
    from transformers import Trainer, TrainingArguments

    case = Case(SIZES)
    arguments = TrainingArguments(
        output_dir=str(output_dir), per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows: Any = [{"input_ids": row, "labels": row} for row in case.rows(24, step=0)]
    trainer = Trainer(loaded(path, implementation, case), arguments, train_dataset=rows)
    trainer.train()
    return [line[key] for line in trainer.state.log_history if "grad_norm" in line for key in ("loss", "grad_norm")]


@pytest.mark.slow
def test_in_trainer(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "model", "qwen3_moe")
    ours, theirs = (
        ranks.run(trained_by_trainer, RANKS, tmp_path / "model", implementation, tmp_path / "out")[0]
        for implementation in (NAME, THEIRS)
    )
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-4)


def refusals(path: Path) -> list[str]:
    """What is said of experts that cannot be computed, on each of these ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from expertmesh.moe.ep_implementation import ExpertMeshEP

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    model = AutoModelForCausalLM.from_pretrained(path)
    experts = model.model.layers[0].mlp.experts
    experts.register_parameter("down_proj_scale_inv", torch.nn.Parameter(torch.ones(8)))
    said = []
    for module in (experts, model.model.layers[1].mlp):
        module.num_experts = 4
        with pytest.raises(ExpertMeshError) as raised:
            ExpertMeshEP(module, mesh["ep"], mesh["tp"])
        said.append(str(raised.value))
    return said


def test_unknown_experts_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    quantized, unmarked = ranks.run(refusals, 2, tmp_path)[0]
    assert 'ep_implementation="expertmesh": MixtralExperts' in quantized
    assert "down_proj_scale_inv" in quantized
    assert "MixtralSparseMoeBlock" in unmarked
