"""Routing replay: with given experts, or those of an earlier forward, as transformers' class with these in its router.

Shape suffixes: B sequences, S positions, T tokens, L MoE layers, K experts per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import expertmesh
from expertmesh.moe.experts.replay import RouteReader, route_reader
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, in_our_layout, local_grads
from tests.families.configs import tiny_model
from tests.families.test_families import FAMILIES, compare
from tests.in_double import InDouble
from tests.parity.case import random_samples
from tests.parity.reference import loss_of, padded
from tests.rounding import error_beyond, near
from tests.tiers import tiered

LENGTHS = [9, 14, 5, 12]
NOT_REPLAYED = {"phimoe": "chooses experts by other code than one topk"}
GROUPED = {"topk_method": "group_limited_greedy"}
"""Of DeepSeek-V2: weights are scores of which those of other groups are masked."""
HEADS = {"num_key_value_heads": 4}


def batch_of(lengths: list[int]) -> dict[str, Tensor]:
    rows = [list(sample.tokens) for sample in random_samples(lengths, vocabulary=290)]
    tokens_BS, mask_BS = padded(rows, 0), padded([[1] * len(row) for row in rows], 0)
    return {"input_ids": tokens_BS, "attention_mask": mask_BS, "labels": tokens_BS.masked_fill(mask_BS == 0, -100)}


def random_routes(reader: RouteReader, mask_BS: Tensor) -> Tensor:
    """(B, S, L, K) of experts of one half, as groups of them may be; some positions have none, and padding 0."""
    generator = torch.Generator().manual_seed(3)
    routes = torch.zeros(*mask_BS.shape, len(reader.num_choices), reader.top_k, dtype=torch.int64)
    for layer, number in enumerate(reader.num_choices):
        if number is not None:
            half = (number + 1) // 2
            order = torch.rand(*mask_BS.shape, half, generator=generator).argsort(dim=-1)[..., : reader.top_k]
            begin = torch.randint(0, 2, (*mask_BS.shape, 1), generator=generator) * (number - half)
            routes[:, :, layer] = order + begin
    routes[:, 3::4] = -1
    return routes.masked_fill(mask_BS[..., None, None] == 0, 0)


@contextmanager
def choosing(reader: RouteReader, routes_BSLK: Tensor | None) -> Iterator[list[Tensor]]:
    """Within it, transformers' code gets these experts, layer after layer and some sequences after others, whenever it
    asks for as many of as many scores; and the groups in which they are. Yields what its routers chose themselves."""
    numbers = [number for number, choices in enumerate(reader.num_choices) if choices is not None]
    chosen: list[Tensor] = []
    topk = torch.topk

    def instead(scores: Tensor, k: int, dim: int = -1, **others: Any) -> Any:
        own, columns = topk(scores, k, dim=dim, **others), scores.shape[-1]
        choices = max(number or 0 for number in reader.num_choices)
        number = numbers[len(chosen) % len(numbers)]
        begin = len(chosen) // len(numbers) * (tokens := scores.shape[:-1].numel())
        given = None if routes_BSLK is None else routes_BSLK[:, :, number].flatten(0, 1)[begin : begin + tokens]
        if given is not None and columns == 2 and scores.dim() == 2 and len(scores) == len(given):
            groups = torch.where(given[:, :k] < 0, own.indices, given[:, :k] // (choices // 2))
            return torch.return_types.topk((scores.gather(-1, groups), groups))
        if columns != choices or k != reader.top_k:
            return own
        chosen.append(own.indices.reshape(-1, k))
        if given is None:
            return own
        given = given.view_as(own.indices)
        used = torch.where(given < 0, own.indices, given)
        return torch.return_types.topk((scores.gather(-1, used), used))

    with mock.patch.object(torch, "topk", instead), mock.patch.object(Tensor, "topk", instead):
        yield chosen


def by_hand(model: Any, batch: dict[str, Tensor], routes_BSLK: Tensor | None) -> tuple[float, float, list[Tensor]]:
    """Of transformers' class, which gets gradients: the loss; the share of given choices that its routers would have
    made otherwise; what they chose, by layer."""
    reader = route_reader(build_model(model.config))
    with choosing(reader, routes_BSLK) as chosen:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = model.train()(**inputs, use_cache=False).logits
    loss = loss_of(model, logits, batch["labels"])
    loss.backward()
    changed, number = 0, 0
    if routes_BSLK is not None:
        layers = [n for n, choices in enumerate(reader.num_choices) if choices is not None]
        is_token_T = batch["attention_mask"].flatten() == 1
        for layer, own_TK in zip(layers, chosen, strict=True):
            given_TK = routes_BSLK[:, :, layer].flatten(0, 1)
            for own, given in zip(own_TK[is_token_T].tolist(), given_TK[is_token_T].tolist(), strict=True):
                if given[0] >= 0:
                    changed += len(set(given) - set(own))
                    number += len(given)
    return float(loss.detach()), changed / max(number, 1), chosen


def replayed(path: Path, settings: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """On a rank, with the batch's sequences as one micro-batch or, where ranks have parts, two."""
    engine = expertmesh.load(str(path), use_cpu=True, **settings)
    if not engine.config.packing:
        mine = [i for i in range(len(LENGTHS)) if i % engine.data_size == engine.data_rank]
        parts = [mine[:1], mine[1:]] if engine.data_size > 1 else [mine]
        batches: list[Any] = [{name: x[part] for name, x in batch.items()} if part else None for part in parts]
    else:
        batches = [packed(batch, rows) for rows in ([0, 1], [2, 3])][engine.data_rank :: engine.data_size]
    result = engine.forward_backward(batches)
    grads = in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    return result, grads


def packed(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """Two sequences in one, without padding, as `DataCollatorWithFlattening` makes them."""
    parts = [{name: x[row, : LENGTHS[row]] for name, x in batch.items()} for row in rows]
    joined = {name: torch.cat([part[name] for part in parts])[None] for name in batch if name != "attention_mask"}
    joined["position_ids"] = torch.cat([torch.arange(LENGTHS[row]) for row in rows])[None]
    return joined


def compare_with_hand(
    ranks: RankPool, path: Path, family: str, world_size: int, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    model: Any = tiny_model(family, seed=1, **changes)
    model.save_pretrained(path)
    batch = batch_of(LENGTHS)
    routes_BSLK = random_routes(route_reader(build_model(model.config)), batch["attention_mask"])
    loss, changed, _ = by_hand(model, batch, routes_BSLK)

    @cache
    def in_double() -> dict[str, Tensor]:
        exact: Any = tiny_model(family, seed=1, **changes).double()
        exact.set_experts_implementation("eager")
        with InDouble():
            by_hand(exact, batch, routes_BSLK)
        return in_our_layout(exact, "grad")

    results = ranks.run(replayed, world_size, path, settings, {**batch, "routed_experts": routes_BSLK})
    for result, _ in results:
        assert result.loss == near(loss)
        assert result.figures["router_replay_changed"] == pytest.approx(changed)
    compare(results[0][1], in_our_layout(model, "grad"), f"{family} {settings}", in_double=in_double)
    assert 0.3 < changed < 1
    # with the routers' own choice they are others
    own: Any = tiny_model(family, seed=1, **changes)
    by_hand(own, batch, None)
    own_grads = in_our_layout(own, "grad")
    assert max(error_beyond(0.0, own_grads[name], grad) for name, grad in in_our_layout(model, "grad").items()) > 0.1


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "deepseek_v3")) for name in FAMILIES]
)
def test_every_family(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """On one rank; refused by name, or as transformers' class that is given the same experts."""
    if family in NOT_REPLAYED:
        tiny_model(family, seed=1).save_pretrained(tmp_path)
        assert NOT_REPLAYED[family] in ranks.run(refused, 1, tmp_path, 2)[0]
        return
    compare_with_hand(ranks, tmp_path, family, 1, {"attn_implementation": "eager"}, {})


@pytest.mark.slow
def test_groups_that_mask_scores(ranks: RankPool, tmp_path: Path) -> None:
    compare_with_hand(ranks, tmp_path, "deepseek_v2", 2, {"ep_size": 2}, {**GROUPED, "n_group": 2, "topk_group": 1})


def refused(path: Path, layers: int) -> str:
    engine = expertmesh.load(str(path), use_cpu=True)
    batch = batch_of(LENGTHS)
    routes = torch.zeros(*batch["input_ids"].shape, layers, 2, dtype=torch.int64)
    with pytest.raises(ExpertMeshError) as error:
        engine.step({**batch, "routed_experts": routes})
    return str(error.value)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ep 2 selective": (2, dict(ep_size=2, gradient_checkpointing="selective")),
}
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "1 full": (1, dict(gradient_checkpointing="full")),
    "1 selective": (1, dict(gradient_checkpointing="selective")),
    "4 ep 2 hybrid full": (4, dict(ep_size=2, dense_shard="hybrid", gradient_checkpointing="full")),
    "4 ep 2 tp 2 selective": (4, dict(ep_size=2, tp_size=2, gradient_checkpointing="selective")),
    "4 ep 2 cp 2": (4, dict(ep_size=2, cp_size=2)),
    "4 ep 2 pp 2": (4, dict(ep_size=2, pp_size=2, pipeline_schedule="1f1b")),
    "2 pp 2": (2, dict(pp_size=2, gradient_checkpointing="full")),
    "2 packed": (2, dict(ep_size=2, packing=True)),
    "4 cp 2 packed": (4, dict(ep_size=2, cp_size=2, packing=True)),
    "2 overlapped": (2, dict(ep_size=2, overlap_chunks=2)),
    "2 compiled": (2, dict(ep_size=2, compile=True)),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_any_layout(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    compare_with_hand(ranks, tmp_path, "qwen3_moe", *(LAYOUTS | FURTHER)[layout], HEADS)


def recorded(path: Path, settings: dict[str, Any], batch: dict[str, Any]) -> Any:
    """(this rank's sequences; the experts that their log-probabilities were computed by; whether a step with these is,
    bit for bit, one without, and the share of choices that it says has changed, before and after an update; whether
    these experts are used when they are given)."""
    engine = expertmesh.load(str(path), use_cpu=True, learning_rate=0.03, deterministic=True, **settings)
    part = slice(engine.data_rank, None, engine.data_size)
    mine = {name: x[part] for name, x in batch.items()}
    (before,), (routes,) = engine.logprobs([mine], return_routed_experts=True)
    assert torch.equal(before, engine.logprobs([mine])[0])

    def gradients(given: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        engine.optimizer.zero_grad()
        result = engine.forward_backward(given)
        return result, {name: grad.clone() for name, grad in local_grads(engine.model).items()}

    told = []
    for _ in range(2):
        own, own_grads = gradients(mine)
        result, grads = gradients({**mine, "routed_experts": routes})
        is_same = result.loss == own.loss and all(torch.equal(grads[name], own_grads[name]) for name in own_grads)
        told.append((is_same, result.figures["router_replay_changed"]))
        engine.step(mine)
    again = engine.logprobs([{**mine, "routed_experts": routes}], return_routed_experts=True)[1][0]
    return part, routes, told, torch.equal(again, routes)


@pytest.mark.parametrize(
    "layout",
    tiered(["1 full"], slow=["4 ep 2 tp 2 selective", "4 ep 2 cp 2", "4 ep 2 pp 2", "2 pp 2"]),
)
def test_experts_that_were_recorded(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """They are those of transformers' routers; a step that replays them at once is the same in every bit."""
    model: Any = tiny_model("qwen3_moe", seed=1, **HEADS)
    model.save_pretrained(tmp_path)
    batch = batch_of(LENGTHS)
    for rows in batch.values():
        rows[3] = rows[3].roll(2)  # padded on the left
    shape = batch["input_ids"].shape
    expected = torch.stack([chosen_TK.unflatten(0, shape) for chosen_TK in by_hand(model, batch, None)[2]], dim=2)
    expected = expected.masked_fill(batch["attention_mask"][..., None, None] == 0, -1)
    for part, routes, told, is_used in ranks.run(recorded, *layouts(tmp_path, layout), batch):
        assert routes.dtype == torch.int16
        assert torch.equal(routes.long().sort(dim=-1).values, expected[part].sort(dim=-1).values)
        (is_same, changed), (is_same_later, changed_later) = told
        assert (is_same, changed) == (True, 0)
        assert not is_same_later
        assert 0.02 < changed_later < 1
        assert is_used


def layouts(path: Path, layout: str) -> tuple[int, Path, dict[str, Any]]:
    world_size, settings = (LAYOUTS | FURTHER)[layout]
    return world_size, path, settings


def test_what_is_no_route_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """And all layers' experts, as vLLM has them, are taken: 0 in layers without, none for the last token."""
    tiny_model("deepseek_v3", seed=1).save_pretrained(tmp_path)
    ranks.run(wrong_routes, 1, tmp_path)


def wrong_routes(path: Path) -> None:
    engine = expertmesh.load(str(path), use_cpu=True)
    batch = batch_of(LENGTHS)
    reader = engine.batch_maker.routes
    assert reader is not None
    routes = random_routes(reader, batch["attention_mask"])
    wrong = {
        r"torch.float32 of shape \(4, 14, 2, 2\); it must be integers": routes.float(),
        r"of shape \(4, 13, 2, 2\).* \(4, 14, 2, 2\) or \(4, 14, 3, 2\).*; -1 where a position has none": routes[:, 1:],
        r"of shape \(4, 14, 1, 2\)": routes[:, :, :1],
        r"\[0, 8\] in sequence 1 at position 2, MoE layer 1; it must be 2 different experts, 0 to 7": [0, 8],
        r"\[3, 3\] in sequence 1": [3, 3],
        r"\[-1, 3\] in sequence 1": [-1, 3],
        r"\[-2, -2\] in sequence 1": [-2, -2],
        "not a tensor": "a word",
    }
    for said, given in wrong.items():
        if isinstance(given, list):
            given = torch.where((torch.arange(14) == 2)[:, None, None], torch.tensor(given), routes[1])[None]
            given = torch.cat([routes[:1], given, routes[2:]])
            given[1, 2, 0] = routes[1, 2, 0]
        with pytest.raises(ExpertMeshError, match=f"routed_experts of a batch .*{said}"):
            engine.step({**batch, "routed_experts": given})
    assert engine.step_number == 0
    result = engine.forward_backward({**batch, "routed_experts": routes})
    ends = torch.tensor(LENGTHS) - 1
    of_all = torch.zeros(4, 14, 3, 2, dtype=torch.int64)
    of_all[:, :, 1:] = routes
    # of the last token there is no loss, nor does another attend to it
    of_all[torch.arange(4), ends] = -1
    as_vllm = of_all.numpy().astype(np.int16)
    assert engine.forward_backward({**batch, "routed_experts": as_vllm}).loss == result.loss


def with_trainer(path: Path, out: Path, batch: dict[str, Any]) -> list[dict[str, float]]:
    """A Trainer's log, whose data collator gives the experts of each sequence."""
    rows = [{name: x[row] for name, x in batch.items()} for row in range(len(LENGTHS))]
    args = transformers.TrainingArguments(
        str(out), use_cpu=True, max_steps=1, logging_steps=1, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    engine = expertmesh.load(str(path), use_cpu=True)

    def collate(of_rows: list[Any]) -> dict[str, Tensor]:
        return {name: torch.stack([row[name] for row in of_rows]) for name in batch}

    trainer = expertmesh.Trainer(engine, args, train_dataset=rows, data_collator=collate)
    trainer.train()
    return trainer.state.log_history


@pytest.mark.slow
def test_a_collator_of_trainer_gives_experts(ranks: RankPool, tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe", seed=1)
    model.save_pretrained(tmp_path / "model")
    batch = batch_of(LENGTHS)
    routes_BSLK = random_routes(route_reader(build_model(model.config)), batch["attention_mask"])
    loss, changed, _ = by_hand(model, batch, routes_BSLK)
    log = ranks.run(with_trainer, 1, tmp_path / "model", tmp_path / "out", {**batch, "routed_experts": routes_BSLK})[0]
    assert log[0]["loss"] == near(loss, tolerance=1e-4)
    assert log[0]["router_replay_changed"] == pytest.approx(changed)
