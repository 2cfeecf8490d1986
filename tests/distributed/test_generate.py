"""Text from the sharded model: HF's own greedy `generate`, for every parallel layout, and training undisturbed."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.experts.expert_mlp import ExpertMLP
from expertmesh.moe.experts.forward import current_forward
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.gloo import GlooAllGather
from expertmesh.sharding.parallelize.parallelize import fsdp_units
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.generate import Sampling, _Drawn, generate
from expertmesh.training.steps.step import train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model, train_config
from tests.parity.case import MAX_GRAD_NORM, SAMPLES, Case
from tests.tiers import tiered
from tests.tiny import save_model, tiny_mixtral

NEW_TOKENS = 12
NOISE: dict[str, Any] = {"router_jitter_noise": 0.2, "attention_dropout": 0.1}


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts([5, 1, 9, 3, 14, 2])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate")
    save_model(path, **NOISE)
    return path


def hf_continuations(prompts: list[list[int]], eos: list[int] | int, **changes: Any) -> list[list[int]]:
    """One prompt at a time, without padding and without a KV cache."""
    model: Any = tiny_mixtral(**changes).eval()
    continued = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=False, eos_token_id=eos
        )
        continued.append(out[0, len(prompt) :].tolist())
    return continued


def ours(
    path: Path,
    topology: Topology,
    prompts: list[list[int]],
    eos: list[int],
    case: Case,
    new_tokens: int = NEW_TOKENS,
    per_device: int | None = None,
) -> list[list[int]]:
    """Non-expert parameters must be gathered once, however many tokens and batches there are."""
    model, _, _ = sharded_model(path, topology, case)
    units: list[Any] = [unit for unit in fsdp_units(model) if not isinstance(unit, ExpertMLP)]
    dense = [unit._get_fsdp_state()._fsdp_param_group._all_gather_comm for unit in units]
    gathered, gather = Counter[int](), GlooAllGather.__call__

    def counting(own: GlooAllGather, **given: Any) -> None:
        gathered[id(own)] += 1
        gather(own, **given)

    with mock.patch.object(GlooAllGather, "__call__", counting):
        found = generate(model.train(), prompts, new_tokens, eos, this_rank(), per_device)
    assert [gathered[id(each)] for each in dense] == [int(topology.ranks_per_stage > 1)] * len(dense)
    return found


def this_rank() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.HashStore())


@pytest.mark.parametrize(
    ("topology", "first", "early", "per_device"),
    tiered(
        [(Topology(2, 1), 1, False, None), (Topology(4, 2), 6, True, 1)],
        slow=[
            (Topology(1, 1), 6, False, None),
            (Topology(4, 4), 6, False, None),
            (Topology(4, 4), 2, True, None),
            (Topology(4, 2), 6, True, None),
        ],
    ),
    ids=str,
)
def test_equals_hf(
    ranks: RankPool, path: Path, topology: Topology, first: int, early: bool, per_device: int | None
) -> None:
    """With more prompts than ranks, so that lengths differ in a batch, or of the last batch some ranks have none; with
    fewer, and one that ends early; dropout, jitter and checkpointing, which training would have, play no part."""
    eos = [hf_continuations(PROMPTS[:first], eos=-1)[-1][4], 319] if early else []
    expected = hf_continuations(PROMPTS[:first], eos=eos or -1)  # tiny_mixtral's own end is token 2, which is none here
    lengths = [len(tokens) for tokens in expected]
    assert max(lengths) == NEW_TOKENS
    assert (min(lengths) <= 5) == early
    case = Case([], gradient_checkpointing="full")
    found = ranks.run(ours, topology.world_size, path, topology, PROMPTS[:first], eos, case, NEW_TOKENS, per_device)
    assert found == [expected] * topology.world_size


@pytest.mark.parametrize(("world_size", "ep_size", "reshard"), tiered(slow=[(4, 2, False)], release=[(4, 4, True)]))
def test_training_goes_on_as_if_nothing_had_happened(
    ranks: RankPool, path: Path, world_size: int, ep_size: int, reshard: bool
) -> None:
    """To the bit, with random noise in the router's input and in attention; also where gradients are waiting, or
    gathered parameters are kept between a layer's forward and backward."""
    topology = Topology(world_size, ep_size)
    plain = ranks.run(_train, world_size, path, topology, reshard, None)
    for position in ("between steps", "before the update"):
        disturbed = ranks.run(_train, world_size, path, topology, reshard, position)
        for (losses, weights, before, after), (other_losses, other_weights, _, _) in zip(disturbed, plain, strict=True):
            assert losses == other_losses, position
            assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == [], position
            # weights that are not those of the last forward's gathered copy
            assert before != after, position


def _train(path: Path, topology: Topology, reshard: bool, position: str | None) -> Any:
    """(losses, weights on this rank, text before the first step, text after the last)"""
    settings = {"reshard_after_forward": reshard}
    case = Case(SAMPLES[:16], balance=0.05, z=0.01, gradient_checkpointing="full", settings=settings)
    model, mesh, _ = sharded_model(path, topology, case)
    optimizer = build_optimizer(model.train(), train_config(), mesh)
    optimizer.param_groups[0]["lr"] = 0.02
    batches = my_batches(case, topology, dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    losses, texts = [], []
    if position == "before the update":
        optimizer.register_step_pre_hook(lambda *_: texts.append(_generate_leaving_no_trace(model)))
    for _ in range(3):
        losses.append(train_step(model, optimizer, batches, mesh, LossWeights(0.05, 0.01), MAX_GRAD_NORM).loss)
        if position == "between steps":
            texts.append(_generate_leaving_no_trace(model))
    weights = {name: local_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    return losses, weights, texts[0] if texts else None, texts[-1] if texts else None


def _generate_leaving_no_trace(model: Any) -> list[list[int]]:
    settings, random_state = model.generation_config, torch.get_rng_state()
    text = generate(model, PROMPTS[:3], NEW_TOKENS, [], this_rank())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.generation_config is settings
    assert all(module.training for module in model.modules())
    assert current_forward() is None
    return text


def test_settings_of_the_model_play_no_part_and_long_prompts_keep_their_end(ranks: RankPool, path: Path) -> None:
    (long,) = random_prompts([600])
    assert ranks.run(_long_and_empty, 2, path, long) == [hf_continuations([long[-500:]], eos=-1)] * 2


def test_sampled_by_probability() -> None:
    """With the frequencies of softmax(logits / temperature), and the same again by the same seed."""
    logits_BV = torch.tensor([[2.0, 0.0, -torch.inf, 1.0]]).expand(4000, -1)
    first, again = (_Drawn(Sampling(2.0, "5"), range(4000))(torch.empty(0), logits_BV) for _ in range(2))
    assert torch.equal(first, again)
    assert (first.isfinite().sum(1) == 1).all()
    expected_V = (logits_BV[0] / 2).softmax(0)
    assert (first.isfinite().float().mean(0) - expected_V).abs().max() < 0.03  # 3.8 standard deviations


def _long_and_empty(path: Path, long: list[int]) -> list[list[int]]:
    model, _, _ = sharded_model(path, Topology(2, 2), Case([]))
    for name, value in {"do_sample": True, "max_length": 3, "repetition_penalty": 5.0, "min_new_tokens": 40}.items():
        setattr(model.generation_config, name, value)
    assert generate(model, [], NEW_TOKENS, [], this_rank()) == []
    drawn = [generate(model, PROMPTS, 4, [], this_rank(), size, Sampling(1.5, "0 7")) for size in (1, None)]
    assert drawn[0] == drawn[1] != generate(model, PROMPTS, 4, [], this_rank(), None, Sampling(1.5, "0 8"))
    with pytest.raises(ExpertMeshError, match="has no token"):
        generate(model, [[1], []], NEW_TOKENS, [], this_rank())
    return generate(model, [long], NEW_TOKENS, [], this_rank())
