"""A loss of one's own over log-probabilities: the same with every parallel layout as of transformers' class in one
process on full logits, whatever it sums over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.batch import IGNORED, LossBatch
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, in_our_layout
from tests.families.configs import tiny_model
from tests.rounding import OTHER_ORDER, OtherOrder, gradient_errors, near

BETA, PAIRS = 0.7, 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "4 ep 2 hybrid": (4, dict(ep_size=2, dense_shard="hybrid")),
    "4 ep 2 cp 2": (4, dict(ep_size=2, cp_size=2)),
    "4 ep 2 pp 2": (4, dict(ep_size=2, pp_size=2)),
    "4 ep 2 tp 2": (4, dict(ep_size=2, tp_size=2)),
}
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "2 packed": (2, dict(ep_size=2, packing=True)),
    "4 cp 2 packed": (4, dict(ep_size=4, cp_size=2, packing=True)),
    "8 pp 2 cp 2": (8, dict(ep_size=2, pp_size=2, cp_size=2)),
    "4 cp 2 tp 2": (4, dict(ep_size=2, cp_size=2, tp_size=2, gradient_checkpointing="full")),
}
HEADS = {"num_key_value_heads": 4}


def pairs() -> list[tuple[list[int], list[int]]]:
    """Two sequences each, of which the first third is a prompt."""
    generator = torch.Generator().manual_seed(5)
    lengths = [(4 + (5 * i) % 9, 3 + (7 * i) % 8) for i in range(PAIRS)]
    both = [[torch.randint(3, 300, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    return [(chosen, rejected) for chosen, rejected in both]


def reference_of(pair: int) -> list[float]:
    return [-20.0 - pair, -21.0 + pair]


def weights_of(tokens: list[int]) -> list[float]:
    return [(token % 5) / 4 for token in tokens]


def batch_of(numbers: list[int], packs: bool) -> dict[str, Any] | None:
    """The sequences of pairs, padded on the left or, two to a sequence, packed."""
    if not numbers:
        return None
    samples = [sequence for number in numbers for sequence in pairs()[number]]
    rows = [samples[i : i + 2] for i in range(0, len(samples), 2)] if packs else [[sample] for sample in samples]
    length = max(sum(map(len, row)) for row in rows)
    names = ("input_ids", "labels", "attention_mask", "position_ids", "weight")
    table: dict[str, list[list[Any]]] = {name: [] for name in names}
    for row in rows:
        padding = length - sum(map(len, row))
        table["input_ids"].append([0] * padding + [token for sample in row for token in sample])
        labels = [token if i >= len(s) // 3 else IGNORED for s in row for i, token in enumerate(s)]
        table["labels"].append([IGNORED] * padding + labels)
        table["attention_mask"].append([0] * padding + [1] * (length - padding))
        table["position_ids"].append([0] * padding + [i for sample in row for i in range(len(sample))])
        table["weight"].append([0.0] * padding + [weight for sample in row for weight in weights_of(sample)])
    reference = [value for number in numbers for value in reference_of(number)]
    weight = torch.tensor(table.pop("weight"))
    return {
        **{name: torch.tensor(rows) for name, rows in table.items()},
        "loss_inputs": {"reference": torch.tensor(reference), "weight": weight},
    }


def preference(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
    """One term over pairs of samples, one over tokens."""
    margins = (batch.sums(logprobs_N) - batch["reference"]).view(-1, 2)
    margins_P = margins[:, 0] - margins[:, 1]
    of_tokens = (batch["weight"] * logprobs_N).sum()
    return -F.logsigmoid(BETA * margins_P).sum() - 0.1 * of_tokens, margins_P.sum(), of_tokens


def count_pairs(batch: LossBatch) -> float:
    return batch.num_samples / 2


FIGURES = ("margin", "weighted")


def ours(path: Path, settings: dict[str, Any]) -> Any:
    engine = expertmesh.load(str(path), use_cpu=True, **settings)
    mine, packs = list(range(PAIRS))[engine.data_rank :: engine.data_size], bool(engine.config.packing)
    batches = [batch_of(part, packs) for part in (mine[:1], mine[1:])]
    before = engine.evaluate(batches, loss=preference, count=count_pairs, figures=FIGURES)
    logprobs = engine.logprobs(batches)
    result = engine.forward_backward(batches, loss=preference, count=count_pairs, figures=FIGURES)
    grads = in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    told = [
        (numbers, found[batch["labels"] != IGNORED].tolist(), float(found[batch["labels"] == IGNORED].abs().sum()))
        for numbers, batch, found in zip((mine[:1], mine[1:]), batches, logprobs, strict=True)
        if batch is not None and found is not None
    ]
    return (before, result), grads, told


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    """Of each family, (the loss, figures, gradients, log-probabilities by pair)."""
    return {family: by_hand(tiny_model(family, seed=1, **HEADS)) for family in ("mixtral", "granitemoe")}


def by_hand(model: Any, order: OtherOrder | None = None) -> Any:
    model.train()
    terms, logprobs = [], []
    for number, pair in enumerate(pairs()):
        sums, of_tokens, told = [], torch.zeros(()), []
        for tokens, reference in zip(pair, reference_of(number), strict=True):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
            of_all = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
            is_target = torch.arange(1, len(tokens)) >= len(tokens) // 3
            sums.append(of_all[is_target].sum() - reference)
            of_tokens = of_tokens + (of_all * torch.tensor(weights_of(tokens))[1:])[is_target].sum()
            told += of_all[is_target].tolist()
        margin = sums[0] - sums[1]
        terms.append(torch.stack([-F.logsigmoid(BETA * margin) - 0.1 * of_tokens, margin, of_tokens]))
        logprobs.append(told)
    loss, *figures = torch.stack(terms).mean(dim=0)
    loss.backward()
    if order is not None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = order.undone({name: parameter.grad})[name]
    return float(loss.detach()), torch.stack(figures).tolist(), in_our_layout(model, "grad"), logprobs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in ("mixtral", "granitemoe"):
        paths[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, seed=1, **HEADS).save_pretrained(paths[family])
    return paths


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_with_any_layout(layout: str, ranks: RankPool, models: dict[str, Path], wanted: dict[str, Any]) -> None:
    compare("mixtral", *(LAYOUTS | FURTHER)[layout], ranks, models, wanted)


def test_of_a_family_that_scales_its_logits(ranks: RankPool, models: dict[str, Path], wanted: dict[str, Any]) -> None:
    compare("granitemoe", 2, dict(ep_size=2), ranks, models, wanted)


def compare(
    family: str, number: int, settings: dict[str, Any], ranks: RankPool, models: Any, wanted: dict[str, Any]
) -> None:
    check(ranks.run(ours, number, models[family], settings), wanted[family])


def check(results: list[Any], wanted: Any) -> None:
    """What ranks give, as transformers' class does by hand."""
    loss, figures, grads, logprobs = wanted
    # a margin is the difference of two sums of them
    added = sum(abs(x) for of_pair in logprobs for x in of_pair) / PAIRS
    for evaluated_and_trained, _, told in results:
        for result in evaluated_and_trained:
            assert result.loss == near(loss, added)
            assert list(result.figures.values()) == near(figures, added)
        for numbers, found, beside in told:
            assert found == near([x for number in numbers for x in logprobs[number]], added=1.0)
            assert beside == 0
    errors = gradient_errors(results[0][1], grads)
    assert max(errors.values()) <= OTHER_ORDER, errors


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_the_check_allows_rounding_and_nothing_else(family: str) -> None:
    """Both sides are another processor's. A scale of logits that is off by a thousandth is none."""

    def answer(seed: int, nudged: bool = False, scale: float = 1.0) -> Any:
        model: Any = tiny_model(family, seed=1, **HEADS)
        order = OtherOrder(model, seed, nudged)
        model.lm_head.weight.data *= scale
        return by_hand(model, order)

    def as_of_ranks(loss: float, figures: list[float], grads: dict[str, Tensor], logprobs: list[list[float]]) -> Any:
        result = SimpleNamespace(loss=loss, figures=dict(zip(FIGURES, figures, strict=True)))
        return [((result, result), grads, [([number], told, 0.0) for number, told in enumerate(logprobs)])]

    for seed in range(2):
        check(as_of_ranks(*answer(seed, nudged=bool(seed))), answer(100 + seed))
    loss, figures, grads, logprobs = answer(0)
    scaled, wanted = answer(0, scale=1.001), answer(100)
    for place in range(4):
        one_wrong = [loss, figures, grads, logprobs]
        one_wrong[place] = scaled[place]
        with pytest.raises(AssertionError):
            check(as_of_ranks(*one_wrong), wanted)


def by_token(logprobs_N: Tensor, batch: LossBatch) -> Tensor:
    return logprobs_N


def without_figures(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
    return (logprobs_N.sum(),)


def of_an_unknown(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
    return (batch["reward"] * batch.sums(logprobs_N)).sum(), logprobs_N.sum()


WRONG: dict[Any, str] = {
    by_token: r"gave a tensor of shape \(\d+,\); it must give one number",
    without_figures: "for each of loss, margin",
    of_an_unknown: "asks for 'reward'; loss_inputs of the batch has",
    "nll": "loss is a str",
}


def test_what_ranks_must_have_in_common(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(refused_together, 2, models["mixtral"])


def refused_together(path: Path) -> None:
    engine = expertmesh.load(str(path), use_cpu=True, ep_size=2)
    rank, batch = engine.ranks.rank, batch_of([0, 1], False)
    figures = FIGURES if rank else ("margin",)
    with pytest.raises(ExpertMeshError, match=r"rank 0 gives a loss of its own with the figures \['margin'\], rank 1"):
        engine.forward_backward(batch, loss=preference, figures=figures)
    with pytest.raises(ExpertMeshError, match="rank 0 gives none, rank 1 a loss of its own"):
        engine.evaluate([batch if rank else {k: v for k, v in (batch or {}).items() if k != "loss_inputs"}],
            loss=preference if rank else None, figures=FIGURES if rank else ())  # fmt: skip
    wrong: dict[str, Any] = {
        "a NoneType": None, "-1": -1, "nan": float("nan"), "a str": "2", r"a tensor of shape \(2,\)": torch.ones(2)
    }  # fmt: skip
    for said, gave in wrong.items():
        with pytest.raises(ExpertMeshError, match=f"count gave {said}; it must give a number, 0 or more"):
            engine.step(batch, loss=preference, count=Mock(return_value=gave), figures=FIGURES)
    told: list[str] = []
    engine.tell = told.append
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    result = engine.step(batch, loss=preference, count=lambda _: 0, figures=FIGURES)
    assert not result.is_finite
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert told == [
        "warning: the loss of a step is NaN, so it is skipped: count gave 0 for all micro-batches of all ranks"
    ]


def test_what_is_no_loss_is_refused(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(refused, 1, models["mixtral"])


def refused(path: Path) -> None:
    engine = expertmesh.load(str(path), use_cpu=True)
    batch = batch_of([0, 1], False)
    assert batch is not None
    for loss, said in WRONG.items():
        with pytest.raises(ExpertMeshError, match=said):
            engine.forward_backward(batch, loss=loss, figures=("margin",))
    wrong = {"one value for two": torch.ones(3), "another shape": torch.ones(2, 2, 2)}
    for name, value in wrong.items():
        with pytest.raises(ExpertMeshError, match=f"{name}.*"):
            engine.forward_backward({**batch, "loss_inputs": {name: value}}, loss=preference, figures=FIGURES)
    with pytest.raises(ExpertMeshError, match="loss_inputs, which would be ignored"):
        engine.forward_backward(batch)
    with pytest.raises(ExpertMeshError, match="for a loss of your own"):
        engine.forward_backward(batch, count=count_pairs)
