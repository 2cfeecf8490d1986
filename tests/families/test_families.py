"""Every causal MoE family of the installed transformers, each against its own class in one process.

A tiny random model of each: loss and every gradient on every kind of parallel layout, packed and not, beside quantized
weights, the way to EP shards and back, and an export that transformers loads. A family that a new release of
transformers brings is among them by itself; one that cannot pass stands in `moe.hf_model.family_exceptions` with the
reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertmesh.checkpoints.convert import HowToWrite, convert, export_offline
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import causal_families, families_with_plan
from expertmesh.moe.hf_model.family_exceptions import UNDIVIDED, UNSUPPORTED
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.state import state_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.cluster.families_command import main
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.step import compute_gradients
from expertmesh.training.tensor_parallel.divide import apply_tensor_parallel
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    attention_mask,
    in_full,
    in_our_layout,
    my_batches,
    ours,
    sharded_model,
    unshifted_labels,
)
from tests.families.configs import UNSHRINKABLE, few_choices, load_model, tiny_config, tiny_model
from tests.families.lora import reference
from tests.in_double import InDouble
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.reference import loss_of
from tests.rounding import OF_ADDED, OTHER_ORDER, error_beyond, gradient_errors, norm_of
from tests.tiers import REPRESENTATIVES

FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]
PLANNED = [family for family in FAMILIES if family in families_with_plan()]
"""Whose attention transformers has a plan to divide."""
UNPACKED = {"mistral_large4": "do not run with packed samples"}
"""Families that are refused, and what the error says: keys and values that a layer has from another one are not found
by sample."""
TOLERANCE = OTHER_ORDER
NOISE, MOST_NOISE = 10.0, 50.0
"""Where transformers in fp32 is off from itself in fp64, ours may be off by so many times as much, but not by more than
so many times the tolerance: gradients of scalars, say, which are one sum over all tokens."""
# of one token, and longer than windows (8) and than what DeepSeek-V4 compresses, of text tokens alone
SAMPLES = random_samples([9, 14, 27, 1, 17, 10, 4, 20], vocabulary=290)


CP, TP = Topology(2, 1, cp_size=2), Topology(2, 2, tp_size=2)


@dataclass(frozen=True)
class Layout:
    """attention: as a run has it, or eager."""

    topology: Topology
    packing: bool = False
    attention: str = "auto"
    micro_batches: int = 1


def layouts_of(family: str, few: bool) -> list[Layout]:
    """By world size; the last one is exported.

    Args:
        few: whether layers choose fewer tokens than sequences have.
    """
    packing = family not in UNPACKED
    found = [Layout(Topology(1, 1), attention="eager"), Layout(CP)]
    # a stage a layer, for most families: each boundary between layers is one between ranks
    found += (
        [Layout(Topology(4, 2, pp_size=2, cp_size=2), packing)]
        if few
        else [Layout(Topology(3, 1, pp_size=3), micro_batches=2)]
    )
    if packing:
        found += [Layout(Topology(1, 1), True, "eager"), Layout(CP, True)]
    if family in PLANNED:
        found += [Layout(TP, attention="eager"), Layout(TP, packing)]
        # ranks that share sequences, or stages, that are divided beside
        if family == "glm_moe_dsa" and few:
            found.append(Layout(Topology(4, 1, pp_size=2, tp_size=2), True))
        elif family in REPRESENTATIVES:
            found.append(Layout(Topology(4, 2, tp_size=2, cp_size=2), True))
    return sorted([*found, Layout(Topology(4, 2), attention="eager")], key=lambda layout: layout.topology.world_size)


QUICK = ("qwen3_next",)
"""One whose layers carry a state; tests of everything else run on one that has nothing particular."""


@pytest.mark.sample(14)
@pytest.mark.parametrize(
    ("family", "few"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES),
        *((name, True) for name in FAMILIES if few_choices(name)),
    ],
)
def test_family(ranks: RankPool, tmp_path: Path, family: str, few: bool) -> None:
    """Also with layers that choose few tokens: the choice is to come about in complete samples."""
    case = Case(SAMPLES, family=family, changes=few_choices(family) if few else {})
    theirs: Any = tiny_model(family, seed=1, **case.changes)
    theirs.save_pretrained(tmp_path / "hf")
    loss, grads = gradients_of(theirs, case)
    in_double = cache(lambda: gradients_in_double(tiny_model(family, seed=1, **case.changes), case))
    loaded = load_model(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    # buffers are those that were saved: transformers itself begins some of them anew when it loads (Zaya's, in part)
    weights = in_our_layout(loaded, "data") | dict(theirs.named_buffers())
    for world_size, some in groupby(layouts_of(family, few), lambda layout: layout.topology.world_size):
        layouts = list(some)
        found = ranks.run(figures_on_ranks, world_size, tmp_path / "hf", layouts, case, tmp_path / "out")[0]
        for (our_weights, our_loss, our_grads, divided), layout in zip(found, layouts, strict=True):
            alike = our_weights.keys() & weights.keys()
            assert not [name for name in alike if not torch.equal(our_weights[name], weights[name])], layout
            assert our_loss == pytest.approx(loss, rel=TOLERANCE), layout
            # a sum over several micro-batches rounds otherwise
            compare(our_grads, grads, str(layout), TOLERANCE * layout.micro_batches, in_double)
            assert bool(divided) == (layout.topology == TP)
            assert all(rows == whole // 2 for rows, whole in divided.values()), divided
    if not few:
        assert_round_trip(tmp_path, loaded)
        compare_adapters(ranks, tmp_path / "base", case)


def gradients_of(model: Any, case: Case) -> tuple[float, dict[str, Tensor]]:
    """Of HF's own class, in one process, on the full batch: the loss and gradients."""
    return loss_with_gradients(model, case), in_our_layout(model, "grad")


def gradients_in_double(model: Any, case: Case) -> dict[str, Tensor]:
    exact = model.double()
    # the others have no kernel for fp64
    exact.set_experts_implementation("eager")
    with InDouble():
        loss_with_gradients(exact, case)
    return in_our_layout(exact, "grad")


def loss_with_gradients(model: Any, case: Case) -> float:
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    out = model.train()(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), use_cache=False)
    loss = loss_of(model, out.logits, labels)
    loss.backward()
    return float(loss.detach())


Found = tuple[dict[str, Tensor], float, dict[str, Tensor], dict[str, tuple[int, int]]]


def figures_on_ranks(path: Path, layouts: Sequence[Layout], case: Case, out: Path) -> list[Found]:
    """Weights as loaded, loss, gradients, and of what is divided its rows here and in all; of each parallel layout."""
    rank, figures = torch.distributed.get_rank(), []
    for layout in layouts:
        topology = layout.topology
        how = replace(case, attention=layout.attention, accumulation=layout.micro_batches)
        model, mesh, checkpoint = sharded_model(path, topology, replace(how, settings={"packing": layout.packing}))
        weights = in_full({name: part.tensor for name, part in state_of(model).items() if part.is_here})
        if layout.packing:
            rows = [some for some in (case.samples[:3], case.samples[3:5], case.samples[5:]) if some]
            batches = [collate(rows[topology.data_index(rank) :: topology.data_size], mesh.cp_group)]
        else:
            batches = my_batches(how, topology, rank, mesh.cp_group)
        result = compute_gradients(model.train(), batches, LossWeights(0.0, 0.0))
        parameters = dict(model.named_parameters())
        grads = in_full({name: p.grad for name, p in parameters.items() if p.grad is not None})
        names = getattr(model, "divided", ()) if topology.world_size == 2 else ()
        divided = {name: (len(parameters[name].to_local()), len(parameters[name])) for name in names}
        figures.append((weights, result.loss, grads, divided))
    if topology.world_size == 4:
        export_model(model, checkpoint, topology, out)
    return figures


def compare(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    where: str,
    tolerance: float = TOLERANCE,
    in_double: Callable[[], dict[str, Tensor]] | None = None,
) -> None:
    # what no token reaches has no gradient in HF's class, and zeros in ours
    for name in found.keys() ^ expected.keys():
        assert not found.get(name, expected.get(name)).any(), (where, name)  # type: ignore[union-attr]
    rounding = OF_ADDED * norm_of(expected)
    errors = {name: error_beyond(rounding, found[name], grad) for name, grad in expected.items() if name in found}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong and in_double is not None:
        exact = in_double()
        noise = {name: NOISE * error_beyond(0.0, expected[name], exact[name]) for name in wrong}
        wrong = {n: error for n, error in wrong.items() if not error <= min(noise[n], MOST_NOISE * tolerance)}
    assert not wrong, (where, wrong)


def assert_round_trip(path: Path, loaded: Any) -> None:
    """What was exported gives the same logits, and has the bits of the source; so has what went through EP shards."""
    exported = load_model(path / "out", dtype=torch.float32, attn_implementation="eager")
    tokens_BS = collate([[sample] for sample in SAMPLES]).tokens_BS
    with torch.no_grad():
        for parameter in (*exported.parameters(), *loaded.parameters()):
            # not where the file has it: products of numbers that lie elsewhere may be summed in another order
            parameter.data = parameter.data.clone()
        logits = [model.eval()(input_ids=tokens_BS, use_cache=False).logits for model in (exported, loaded)]
    assert torch.equal(*logits)
    how = HowToWrite(10**9, workers=1)
    convert(path / "hf", path / "shards", 4, None, how)
    export_offline(path / "shards", path / "back", how)
    original = load_file(path / "hf" / "model.safetensors")
    for name in ("back", "out"):
        written = load_file(path / name / "model.safetensors")
        assert written.keys() == original.keys()
        for key, tensor in written.items():
            assert tensor.dtype == original[key].dtype, key
            assert torch.equal(tensor, original[key]), key


def compare_adapters(ranks: RankPool, path: Path, case: Case) -> None:
    """Loss, and the gradient of each adapter, on every linear layer and all experts, beside quantized weights. Which
    matrices are quantized goes by the family, and not by the kind; how, by the kind alone."""
    kind = ("fp8", "nf4")[FAMILIES.index(case.family) % 2]
    lora: dict[str, Any] = {"adapter": "lora", "lora_rank": 2, "base_dtype": kind, "lora_targets": [".", "experts"]}
    case = replace(case, settings=lora, steps=1)
    hf_model(case, seed=1).save_pretrained(path)
    expected = reference(case)
    found = ranks.run(ours, 2, path, Topology(2, 2), case)[0]
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    # what no rank's sequences reach has zeros, until the ranks agree that it has no gradient
    assert expected.grads.keys() == {name for name, grad in found.grads.items() if name in expected.grads or grad.any()}
    errors = gradient_errors({name: found.grads[name] for name in expected.grads}, expected.grads)
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "jamba"])
def test_tensor_parallelism_is_refused_without_a_plan(family: str) -> None:
    said = "cannot shard the attention of .*" if family in UNDIVIDED else "transformers has no tensor-parallel plan"
    with pytest.raises(ExpertMeshError, match=f"--tp-size 2: {said}"):
        apply_tensor_parallel(build_model(tiny_config(family)), 2)


@pytest.mark.slow
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m expertmesh.moe families`, of some."""
    assert len(PLANNED) >= 30
    known = sorted(UNSUPPORTED.keys() & set(causal_families()))
    assert main(["families", "mixtral", "deepseek_v3", *known]) == 0
    _, mixtral, deepseek, *unsupported = capsys.readouterr().out.splitlines()
    assert mixtral.split() == ["mixtral", "MixtralForCausalLM", "32", "of", "32", "2", "of", "8", "yes"]
    assert deepseek.split() == ["deepseek_v3", "DeepseekV3ForCausalLM", "58", "of", "61", "8", "of", "256", "yes"]
    assert all("no: " in line or line.startswith(" ") for line in unsupported)
    assert main(["families", "llama"]) == 2
    assert "llama: transformers has no causal mixture-of-experts model" in capsys.readouterr().err
