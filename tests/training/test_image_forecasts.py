"""What images cost by forecast: as much as a step of transformers' class, or a real one on a CPU, takes."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import expertmesh
from expertmesh.moe.hf_model import image_costs
from expertmesh.moe.hf_model.build import build_model, count_parameters
from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.moe.hf_model.image_costs import image_flops, image_of
from expertmesh.moe.hf_model.images import image_parameters
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize import tower
from expertmesh.sharding.state import local_tensor
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal import world
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.engine import account_of, rehearsed_facts
from expertmesh.training.planning.rehearsal.world import rehearse
from expertmesh.training.steps.micro_batch import StepCounts
from tests.distributed.pool import RankPool
from tests.distributed.test_pipeline_rehearsal import on_a_cpu
from tests.images import (
    BOTH_WAYS,
    FAMILIES,
    GRIDS,
    collated,
    image_config,
    image_model,
    picture,
    sample,
)
from tests.tiers import tiered
from tests.training.dry_runs import CLUSTER

TOKENS, LENGTH = 6, 24
WORLD_SIZE = 4
GATHERED = ("all-gather", "forward")
QUICK = ["qwen3_vl_moe", BOTH_WAYS]
FEW: dict[str, dict[str, Any]] = {"qwen3_vl_moe": {"num_hidden_layers": 2}}
"""As few layers of text as take features of the tower."""


def config_of(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(images=True, train_vision=["tower", "projector"], router_aux_loss_coef=0.0)
    settings |= dict(use_cpu=True, max_seq_length=LENGTH, per_device_train_batch_size=1)
    return TrainConfig(model="-", **(settings | changes))


def asked(config: TrainConfig, **routing: Any) -> Asked:
    return Asked(config, 1, CLUSTER, routing=GivenRouting(**{"samples": 1, **routing}), device="cpu")


@pytest.mark.parametrize("family", tiered(QUICK, [family for family in FAMILIES if family not in QUICK]))
def test_an_image_is_as_the_familys_processor_makes_it(family: str) -> None:
    model = build_model(image_config(family), images=True)
    wanted = picture(model, 2, 3, seed=0)
    found = image_of(model, wanted.tokens)
    with mock.patch.object(image_costs, "_size_of", side_effect=image_costs._size_of) as looked_for:
        assert all(map(torch.equal, list(image_of(model, wanted.tokens).values())[1:], list(found.values())[1:]))
        assert looked_for.call_count == 0, "what is known is looked for again"
        assert image_of(model, 4 * wanted.tokens)[next(iter(found))].numel() > next(iter(found.values())).numel()
    pixels, sizes = found.values()
    if family == BOTH_WAYS:
        # which pads: as many places as there are
        assert set(map(tuple, sizes[0].tolist())) == {tuple(each) for each in wanted.size.tolist() if each != [-1, -1]}
        assert pixels.shape[-1] == wanted.pixels.shape[-1]
    else:
        assert int(sizes.prod()) == len(pixels)
        assert pixels.shape[1] == wanted.pixels.shape[1]
        assert len(pixels) / wanted.tokens == pytest.approx(len(wanted.pixels) / wanted.tokens, rel=0.4)


def test_no_such_image() -> None:
    model = build_model(image_config("hy_v4_vl"), images=True)
    with pytest.raises(ExpertMeshError, match=r"--image-tokens 1: .* has no image of so many tokens"):
        image_of(model, 1)
    with pytest.raises(ExpertMeshError, match=r"--image-tokens 6: does not fit into samples of 7 tokens"):
        rehearse(asked(config_of(max_seq_length=7), image_tokens=6), image_config("qwen3_vl_moe"))


def flops_of_transformers(model: Any, image: dict[str, Any]) -> int:
    """Of a step's forward and backward with an image, by torch's counter, less those of a step without."""
    token, counts = model.config.image_token_id, []
    for given in (image, {}):
        tokens_1S = torch.full((1, LENGTH), 5)
        tokens_1S[0, 1 : 1 + TOKENS] = token if given else 5
        kinds = {"mm_token_type_ids": (tokens_1S == token).int()} if given else {}
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            model(input_ids=tokens_1S, use_cache=False, **given, **kinds).logits.sum().backward()
        counts.append(counted.get_total_flops())
    return int(counts[0] - counts[1])


def needed(config: TrainConfig, tokens: int) -> float:
    """FLOPs of a dry run of a step with an image of so many tokens, or without one."""
    model_config = image_config("qwen3_vl_moe", **FEW["qwen3_vl_moe"])
    step = rehearse(asked(config, trained=0.5, image_tokens=tokens), model_config)
    return sum(event.needed for event in step.recorder.events)


@cache
def needed_by_text() -> float:
    """Whatever is trained of what images pass."""
    return needed(config_of(), 0)


@pytest.mark.parametrize("trained", [["tower", "projector"], ["projector"], []])
def test_flops_are_those_that_torch_counts(trained: list[str]) -> None:
    """Of a step of transformers' class, of a dry run, and of what MFU is reckoned by."""
    theirs = image_model("qwen3_vl_moe", **FEW["qwen3_vl_moe"])
    config = config_of(train_vision=trained)
    ours = build_rehearsed(config, theirs.config, "cpu")
    image = {name: torch.zeros(x.shape) if x.is_meta else x for name, x in image_of(ours, TOKENS).items()}
    is_trained = {name: p.requires_grad for name, p in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(is_trained.get(name, True))
    wanted = flops_of_transformers(theirs, image)
    assert wanted > 0
    patches = len(image["pixel_values"])
    by_patch, by_pair = image_flops(ours)
    assert by_patch * patches + by_pair * patches**2 == pytest.approx(wanted, rel=1e-9)

    assert needed(config, TOKENS) - needed_by_text() == pytest.approx(wanted, rel=1e-9)
    counts = replace(count_parameters(ours), images=(by_patch, by_pair))
    of_step = counts, theirs.config, 8, 8, [64] * len(counts.attention)
    told = training_flops(*of_step, of_images=(1, patches, patches**2)) - training_flops(*of_step)
    assert told == pytest.approx(wanted, rel=1e-9)
    of_text = count_parameters(build_model(theirs.config))
    assert counts.active == of_text.active, "parameters of the tower are not those of tokens"


def held_by_a_run(path: str) -> tuple[list[int], tuple[int, ...]]:
    """Bytes of parameters, of those trained, of gradients, of the optimizer's state; and the images of a step."""
    settings: dict[str, Any] = dict(router_aux_loss_coef=0.0, use_cpu=True)
    engine = expertmesh.load(path, images=True, train_vision=["projector"], **settings)
    result = engine.step(collated(engine.model, [[sample(engine.model, 1, (2, 3), LENGTH - 7, seed=0)]]))
    parameters = list(engine.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = [x for state in engine.optimizer.state.values() for x in state.values()]
    of_kinds: Any = (parameters, trained, [p.grad for p in trained], states)
    return [sum(local_tensor(each).nbytes for each in kind) for kind in of_kinds], result.of_images


@pytest.mark.slow
def test_bytes_are_those_of_a_run(ranks: RankPool, tmp_path: Path) -> None:
    model = image_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    config = config_of(train_vision=["projector"])
    found = rehearse(asked(config, image_tokens=TOKENS), model.config)
    held, of_images = ranks.run(held_by_a_run, 1, str(tmp_path))[0]
    assert [found.parameter_bytes, found.trained_bytes, found.trained_bytes, found.state] == held
    assert of_images == (1, 24, 24**2)


def test_the_tower_stands_before_the_first_layer() -> None:
    """What lasts, what is kept for backward, and seconds: all on the first stage of a pipeline."""
    config, model_config = config_of(use_cpu=False), image_config("qwen3_vl_moe")
    model = build_rehearsed(config, model_config, "cuda")
    facts = rehearsed_facts(config, model_config, "cuda")
    embedding, images = model.get_input_embeddings().weight, image_parameters(model)
    assert facts.first.stored == embedding.nbytes + sum(p.nbytes for p in images)
    assert facts.last.stored < facts.first.stored
    costs = []
    for tokens in (0, TOKENS):
        step = asked(config, trained=0.5, image_tokens=tokens)
        costs.append(account_of(replace(step, device="cuda"), model_config, facts).layer_costs)
    without, with_image = costs
    more = with_image["before"] - without["before"]
    assert min(more.forward, more.backward, more.kept) > 0
    assert with_image["after"].kept == without["after"].kept


FLAGS: dict[str, dict[str, Any]] = {
    "all": {},
    "the projector": {"train_vision": ["projector"]},
    "recomputed": {"gradient_checkpointing": "full"},
}
"""By what is trained, and how."""


class Called(NamedTuple):
    """The collectives of a step of one micro-batch on a rank with a GPU; and how often the host waits for it."""

    collectives: list[tuple[Any, ...]]
    waits: int


@cache
def called(
    family: str, flags: str = "all", tokens: int = TOKENS, is_large: bool = False, is_here: bool = True
) -> Called:
    """
    Args:
        tokens: of the image that a rank has. is_here: whether it is this one.
        is_large: whether the tower counts as a large one, and is sharded by block.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tower, "LARGEST_IN_ROOT", 0 if is_large else tower.LARGEST_IN_ROOT)
        if tokens:
            over = StepCounts.over
            patched.setattr(StepCounts, "over", lambda counts, number: replace(over(counts, number), has_images=True))
        if not is_here:
            patched.setattr(world, "_with_images", lambda batch, *others: batch)
        given = asked(config_of(ep_size=2, use_cpu=False, **FLAGS[flags]), trained=0.5, image_tokens=tokens)
        given = replace(given, world_size=WORLD_SIZE, device="cuda")
        recorder = rehearse(given, image_config(family, **FEW.get(family, {}))).recorder
    return Called([(e.collective, e.ranks, e.sent, e.phase) for e in recorder.events if e.collective], recorder.waits)


@pytest.mark.parametrize("family", tiered(QUICK, GRIDS[1:]))
def test_an_image_is_not_waited_for(family: str) -> None:
    assert called(family).waits == called(family, tokens=0).waits


def test_a_large_tower_is_gathered_by_block() -> None:
    """By forecast: as many bytes in its forward, none of them twice; in more collectives, of which none is larger than
    a block or what lies around."""
    blocks = build_rehearsed(config_of(), image_config(QUICK[0]), "cpu").model.visual.blocks
    steps = [called(QUICK[0], is_large=is_large) for is_large in (False, True)]
    sent = [[size for name, _, size, phase in step.collectives if (name, phase) == GATHERED] for step in steps]
    assert len(sent[1]) - len(sent[0]) == len(blocks)
    assert sum(sent[1]) == pytest.approx(sum(sent[0]), rel=0.01)
    of_blocks = sum(p.nbytes for p in blocks.parameters())
    assert max(sent[0]) - max(sent[1]) == pytest.approx(of_blocks * (1 - 1 / WORLD_SIZE), rel=0.01)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("family", "flags"),
    tiered(
        [("qwen3_vl_moe", "all")],
        [("qwen3_vl_moe", "the projector"), ("qwen3_vl_moe", "recomputed"), (FAMILIES[1], "all")],
        [(family, "all") for family in FAMILIES[2:]],
    ),
)
def test_a_rank_without_images_calls_the_others_collectives(family: str, flags: str, is_large: bool) -> None:
    """On GPUs too, where units are gathered ahead: in the same order, and of the same sizes."""
    wanted = called(family, flags, is_large=is_large).collectives
    assert called(family, flags, is_large=is_large, is_here=False).collectives == wanted
    assert len(wanted) > 15


def figures(family: str, flags: dict[str, Any], is_large: bool, is_real: bool) -> tuple[list[Any], int]:
    """The events of the forward of what images pass, and of all else, in order; and the peak of memory in bytes.

    Args:
        is_large: whether the tower counts as a large one, and is sharded by block.
    """
    config = config_of(expert_kernel="torch-grouped", attn_implementation="eager", max_grad_norm=1e-6, **flags)
    limit = 0 if is_large else tower.LARGEST_IN_ROOT
    with on_a_cpu(is_real), mock.patch.object(tower, "LARGEST_IN_ROOT", limit):
        model = build_rehearsed(config, image_config(family), "cpu")
        step = world._rehearse(asked(config, samples=2, image_tokens=TOKENS), model, model.config)
    events = [(event.name, str(event.place), event.phase, event.flops) for event in step.recorder.events]
    return events, max(map(sum, step.held.values()))


def both(family: str, flags: dict[str, Any], is_large: bool) -> list[tuple[list[Any], int]]:
    return [figures(family, flags, is_large, is_real) for is_real in (False, True)]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("flags", [{}, {"train_vision": []}, {"gradient_checkpointing": "full"}], ids=str)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_dry_run_is_what_a_rank_does(ranks: RankPool, family: str, flags: dict[str, Any], is_large: bool) -> None:
    """The same operators in the same order, and as much memory."""
    ((dry, dry_peak), (real, peak)) = ranks.run(both, 1, family, flags, is_large)[0]
    assert dry == real
    assert len(dry) > 300
    assert dry_peak == pytest.approx(peak, rel=0.01)
