"""What several ranks hold copies of: checksums, which tensors are replicated, and what is said of bad ones."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding import replicas
from expertmesh.sharding.replicas import check_replicas, checksum, replicated_state
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.engine import engine
from expertmesh.training.run.banner import replica_lines
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.distributed.whole_runs import SIX_STEPS, Runs, Told, assert_same_bits, batch_of_12, tell
from tests.parity.case import Case
from tests.tiers import tiered

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
INV_FREQ = "model.rotary_emb.inv_freq"
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = checksum(tensor)
    assert checksum(tensor.clone()) == expected
    assert checksum(tensor.t().contiguous().t()) == expected, "whatever the strides"
    integers = tensor.view(-1).view(replicas._INTEGERS[dtype.itemsize])
    for position in (0, 17, 34):
        for bit in range(8 * dtype.itemsize):
            mask = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(integers.dtype)
            integers[position] ^= mask
            assert checksum(tensor) != expected
            integers[position] ^= mask
    assert checksum(tensor) == expected


def test_positions_count_and_chunks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1001.0)
    whole, swapped = checksum(tensor), tensor.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert checksum(swapped) != whole
    for size in (1, 10, 1000, 1001):
        monkeypatch.setattr(replicas, "CHUNK", size)
        assert checksum(tensor) == whole
    assert checksum(tensor[:0]) == 0


def flip(tensor: Tensor, ranks: list[int]) -> None:
    """Change the last bit of the first element, on these ranks."""
    if dist.get_rank() in ranks:
        local_tensor(tensor.detach()).view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def find(model_dir: Path, topology: Topology, flipped: dict[str, list[int]], rates: list[float]) -> tuple[Any, str]:
    """Names of what is replicated, and what is said once these tensors were changed on these ranks."""
    model, *_ = sharded_model(model_dir, topology, Case([]))
    names = sorted(replicated_state(model, topology))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cpu = torch.device("cpu")
    check_replicas(model, topology, cpu, 6, {"the rate": rates[0]})
    for name, ranks in flipped.items():
        flip(tensors[name], ranks)
    try:
        check_replicas(model, topology, cpu, 7, {"the rate": rates[dist.get_rank()]})
    except ExpertMeshError as error:
        return names, str(error)
    return names, ""


def found(ranks: RankPool, model_dir: Path, topology: Topology, flipped: Any, rates: Any = None) -> tuple[Any, str]:
    results = ranks.run(find, topology.world_size, model_dir, topology, flipped, rates or [1.0] * topology.world_size)
    assert len({str(result) for result in results}) == 1, "not the same on all ranks"
    return results[0]


@pytest.mark.parametrize(
    ("topology", "flipped", "said"),
    [
        # ranks (dp, ep) are (0, 1), (2, 3): copies are on 0 and 2, and on 1 and 3
        (
            Topology(4, 2, "hybrid"),
            {Q_PROJ: [3], INV_FREQ: [1, 2]},
            [f"{Q_PROJ} (rank 1 against rank 3)", f"{INV_FREQ} (ranks 0, 3 against ranks 1, 2)", "--resume auto"],
        ),
        # of three replicas the odd one is told, and the same change on all is none
        (
            Topology(6, 2, "hybrid"),
            {Q_PROJ: [2], "lm_head.weight": [1, 3, 5]},
            ["after step 7, 1 of", f"{Q_PROJ} (rank 2 against ranks 0, 4)"],
        ),
    ],
)
def test_hybrid_replicates_what_is_no_expert(
    ranks: RankPool, tiny_model: Path, topology: Topology, flipped: dict[str, list[int]], said: list[str]
) -> None:
    names, told = found(ranks, tiny_model, topology, flipped)
    assert {Q_PROJ, INV_FREQ, "lm_head.weight", "model.layers.0.mlp.gate.weight"} < set(names)
    assert not [name for name in names if ".experts." in name]
    assert f"of {len(names) + 1} tensors differ between the ranks" in told
    assert all(words in told for words in said), told


@pytest.mark.parametrize("topology", tiered([Topology(2, 2, "hybrid")], slow=[Topology(4, 1), Topology(4, 2)]))
def test_full_shards_replicate_only_buffers(ranks: RankPool, tiny_model: Path, topology: Topology) -> None:
    rates = [1.0] * (topology.world_size - 1) + [2.0]
    names, told = found(ranks, tiny_model, topology, {Q_PROJ: [0]}, rates)
    assert all("rotary_emb" in name for name in names)
    assert Q_PROJ not in told
    assert "1 of 3 tensors" in told
    assert "the rate (rank" in told


def test_one_rank_has_no_replicas(ranks: RankPool, tiny_model: Path) -> None:
    assert found(ranks, tiny_model, Topology(1, 1), {Q_PROJ: [0]}) == ([], "")


def _told(model_dir: Path, topology: Topology) -> str:
    """What a run says of --check-replicas 1."""
    model, *_ = sharded_model(model_dir, topology, Case([]))
    config = TrainConfig(model="m", dataset=["d"], check_replicas=1, dense_shard=topology.dense_shard)
    assert config.without_effect == []
    return "".join(replica_lines(Mock(config=config, topology=topology, model=model)))


@pytest.mark.parametrize(
    ("topology", "told"),
    [
        (Topology(2, 1, "hybrid"), ""),
        (
            Topology(2, 2, "hybrid"),
            "no parameter is replicated with --dense-shard hybrid and dp 1 (with hybrid and dp 2",
        ),
        (Topology(2, 1), "no parameter is replicated with --dense-shard full and dp 2 (with hybrid and dp 2"),
        (Topology(1, 1), "has no effect on 1 rank"),
    ],
)
def test_a_run_says_what_has_no_copies(ranks: RankPool, tiny_model: Path, topology: Topology, told: str) -> None:
    said, *_ = ranks.run(_told, topology.world_size, tiny_model, topology)
    assert told in said
    assert bool(told) == bool(said)


def tell_flipped(argv: list[str], step: int) -> Told:
    """A run in which, after a step, from 1 on, rank 2 has a bit of an attention weight changed."""
    train_step, done = engine.train_step, 0

    def flipping_train_step(model: Any, *args: Any, **more: Any) -> Any:
        nonlocal done
        result = train_step(model, *args, **more)
        done += 1
        if done == step:
            flip(model.get_parameter(Q_PROJ), [2])
        return result

    with patch.object(engine, "train_step", flipping_train_step):
        return tell(argv)


HYBRID = f"{SIX_STEPS} {batch_of_12(4)} --ep-size 2 --dense-shard hybrid"


@pytest.mark.slow
def test_a_run_stops_before_it_saves_bad_replicas(runs: Runs) -> None:
    """Checked every fifth step, and before the save at step 4; then the run resumes from the save at step 2, to the
    weights of one that nobody disturbed."""
    flags = f"{HYBRID} --check-replicas 5 --save-steps 2"
    said = ("--check-replicas: after step 4, 1 of", f"{Q_PROJ} (rank 0 against rank 2)")
    assert runs.refuses(4, flags, *said, call=tell_flipped, given=[3]).saved == [2]
    assert_same_bits(runs(4, f"{flags} --resume auto").weights, runs(4, flags, "undisturbed").weights)


def test_checked_every_so_many_steps(runs: Runs) -> None:
    flags = f"{HYBRID} --check-replicas 3 --save-steps 0"
    runs.refuses(4, flags, "--check-replicas: after step 3, 1 of", call=tell_flipped, given=[1])
