"""Every causal MoE family of the installed transformers, each against its own class in one process.

A tiny random model of each: loss and every gradient for every parallel layout, the way to EP shards and back, and an
export that transformers loads. A family that a new release of transformers brings is among them by itself; one that
cannot pass stands in `moe.hf_model.family_exceptions` with the reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertmesh.checkpoints.convert import HowToWrite, convert, export_offline
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.sharding.state import state_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.planning.families_command import main
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    Case,
    attention_mask,
    in_full,
    in_our_layout,
    loss_of,
    my_batches,
    random_samples,
    sharded_model,
    unshifted_labels,
)
from tests.families.configs import UNSHRINKABLE, load_model, tiny_model
from tests.tiers import REPRESENTATIVES
from tests.tiny import relative_error

FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]
TOPOLOGIES = [Topology(1, 1), Topology(4, 2)]
ONE_GROUP = Topology(4, 4)
"""Experts over all ranks, as in each half of (4, 2): tested with the families that between them have all special
features."""
TOLERANCE = 1e-5
TOLERANCES = {"muse_spark": 2e-5, "hy_v4_vl": 2e-5, "inkling_text": 2e-5}
"""The first's experts' outputs are normed while they are small: transformers' own ways to compute experts differ by
9e-6. The second's gradients of connections are 1e-5 from those in fp64 in transformers too, and those of the third's
global scales, each of which is one sum over all tokens, up to 9.7e-6."""
CANCELLED = 1e-3
"""Gradients below this share of the norm of all are held to the tolerance at that share: they are what is left of
larger numbers that cancel."""
# rows of unlike lengths, of text tokens alone
SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=290)


@pytest.mark.release
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m expertmesh.moe families`, of some."""
    known = sorted(UNSUPPORTED.keys() & set(causal_families()))
    assert main(["families", "mixtral", "deepseek_v3", *known]) == 0
    _, mixtral, deepseek, *unsupported = capsys.readouterr().out.splitlines()
    assert mixtral.split() == ["mixtral", "MixtralForCausalLM", "32", "of", "32", "2", "of", "8", "yes"]
    assert deepseek.split() == ["deepseek_v3", "DeepseekV3ForCausalLM", "58", "of", "61", "8", "of", "256", "yes"]
    assert all("no: " in line or line.startswith(" ") for line in unsupported)
    assert main(["families", "llama"]) == 2
    assert "llama: no causal mixture-of-experts model" in capsys.readouterr().err


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(ranks: RankPool, tmp_path: Path, family: str) -> None:
    case = Case(SAMPLES, family=family)
    theirs: Any = tiny_model(family, seed=1)
    theirs.save_pretrained(tmp_path / "hf")
    loss, grads = gradients_of(theirs, case)
    loaded = load_model(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    # buffers are those that were saved: transformers itself begins some of them anew when it loads (Zaya's, in part)
    weights = in_our_layout(loaded, "data") | dict(theirs.named_buffers())
    all_topologies = [*TOPOLOGIES, *([ONE_GROUP] if family in REPRESENTATIVES else [])]
    for world_size in (1, 4):
        topologies = [topology for topology in all_topologies if topology.world_size == world_size]
        found = ranks.run(_figures_on_ranks, world_size, tmp_path / "hf", topologies, case, tmp_path / "out")[0]
        for (our_weights, our_loss, our_grads), topology in zip(found, topologies, strict=True):
            for name, weight in our_weights.items():
                if name in weights:
                    assert torch.equal(weight, weights[name]), (topology, name)
            assert our_loss == pytest.approx(loss, rel=TOLERANCE), topology
            compare(our_grads, grads, str(topology), TOLERANCES.get(family, TOLERANCE))

    exported = load_model(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    tokens_BS = collate([[sample] for sample in SAMPLES]).tokens_BS
    with torch.no_grad():
        for parameter in (*exported.parameters(), *loaded.parameters()):
            # not where the file has it: products of numbers that lie elsewhere may be summed in another order
            parameter.data = parameter.data.clone()
        logits = [model.eval()(input_ids=tokens_BS, use_cache=False).logits for model in (exported, loaded)]
    assert torch.equal(*logits)

    how = HowToWrite(10**9, workers=1)
    convert(tmp_path / "hf", tmp_path / "shards", 4, None, how)
    export_offline(tmp_path / "shards", tmp_path / "back", how)
    original = load_file(tmp_path / "hf" / "model.safetensors")
    for path in (tmp_path / "back", tmp_path / "out"):
        written = load_file(path / "model.safetensors")
        assert written.keys() == original.keys()
        for name, tensor in written.items():
            assert tensor.dtype == original[name].dtype, name
            assert torch.equal(tensor, original[name]), name


def gradients_of(model: Any, case: Case) -> tuple[float, dict[str, Tensor]]:
    """Gradients of HF's own class, in one process, on the full batch."""
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    out = model.train()(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), use_cache=False)
    loss = loss_of(model, out.logits, labels)
    loss.backward()
    return float(loss.detach()), in_our_layout(model, "grad")


def _figures_on_ranks(
    path: Path, topologies: Sequence[Topology], case: Case, out: Path
) -> list[tuple[dict[str, Tensor], float, dict[str, Tensor]]]:
    """Weights as loaded, loss and gradients of ours, on each parallel layout; the last one's model is exported."""
    rank, figures = torch.distributed.get_rank(), []
    for topology in topologies:
        model, _, checkpoint = sharded_model(path, topology, case)
        model.train()
        weights = in_full({name: part.tensor for name, part in state_of(model).items()})
        result = compute_gradients(model, my_batches(case, topology, rank), LossWeights(0.0, 0.0))
        grads = in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        figures.append((weights, result.loss, grads))
    export_model(model, checkpoint, topology, out)
    return figures


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], where: str, tolerance: float = TOLERANCE) -> None:
    norm = float(torch.stack([grad.norm() for grad in expected.values()]).norm())
    # what no token reaches has no gradient in HF's class, and zeros in ours
    for name in found.keys() ^ expected.keys():
        assert not found.get(name, expected.get(name)).any(), (where, name)  # type: ignore[union-attr]
    errors = {
        name: relative_error(found[name], grad, CANCELLED * norm) for name, grad in expected.items() if name in found
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, (where, wrong)
