"""What is kept of forecasts, and found again."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util import child
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.cluster.commands import main
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.data.batch import BatchMaker
from expertmesh.training.data.record_kinds import CONVERSATIONS
from expertmesh.training.data.sequences import Rows
from expertmesh.training.planning import rank_memory
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner import forecasts, kept
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.forecasts import Forecasts, alike
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.rehearsal import engine, world
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config
from tests.published.models import CONFIGS
from tests.sharding.planned import launched
from tests.tiers import tiered
from tests.tiny import tiny_config as tiny_mixtral
from tests.training.dry_runs import CLUSTER, SETTINGS, flags_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def forecasts_of(load: Any = tiny_mixtral) -> Forecasts:
    return Forecasts(tiny_mixtral().to_dict(), load)


def asked(**flags: Any) -> Asked:
    return Asked(flags_of(max_seq_length=32, **flags), 2, CLUSTER)


def never() -> Any:
    raise AssertionError("found out a second time")


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("forecasts/*.json"))


AGAIN = """
import json, sys
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import preset
said, settings = json.loads(sys.stdin.read())
hardware = preset("H100", "infiniband-ndr")
asked = Asked(TrainConfig(**settings), 2, Cluster(hardware, 8, 0.0))
account = Forecasts(said, None).account(asked)
print(json.dumps([account.memory.peak, account.time.total, "torch" in sys.modules]))
"""


def test_what_was_found_out_is_found_again_by_other_processes_without_torch(own_cache: Path) -> None:
    account = forecasts_of().account(asked(ep_size=2))
    assert forecasts_of(never).account(asked(ep_size=2)) == account
    given = json.dumps([tiny_mixtral().to_dict(), asdict(asked(ep_size=2).config)])
    run = subprocess.run([sys.executable, "-c", AGAIN], input=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [account.memory.peak, account.time.total, False]
    # without a cache it is found out anew
    with pytest.raises(AssertionError, match="a second time"):
        Forecasts(tiny_mixtral().to_dict(), never, is_kept=False).account(asked(ep_size=2))


def test_a_models_facts_are_found_out_once() -> None:
    # a dry run asks with the kernel that "auto" has chosen
    own, config = forecasts_of(), asked(ep_size=2).config
    assert config.expert_kernel == "auto"
    with mock.patch.object(engine, "rehearsed_facts", side_effect=engine.rehearsed_facts) as found_out:
        facts = own.facts(config)
        own.account(asked(ep_size=2))
        chosen = replace(config, expert_kernel=facts.kernel)
        assert own.facts(chosen) == facts
        # nor by another process
        assert forecasts_of(never).facts(chosen) == facts
    assert found_out.call_count == 1
    assert Forecasts(tiny_mixtral().to_dict(), tiny_mixtral, is_kept=False).facts(chosen) == facts


def test_what_a_figure_may_depend_on_is_in_its_files_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own = forecasts_of()

    def key(each: Asked, said: Forecasts = own) -> str:
        return kept.key_of(said.said, each.device, *forecasts._key(said.settled(each)))

    base = asked(ep_size=2)
    same = [
        asked(ep_size=2, learning_rate=1e-3, max_steps=7, eval_ratio=0.1, save_steps=3),
        replace(base, cluster=replace(CLUSTER, memory=1.0)),
        asked(ep_size=2, gradient_accumulation_steps=2),
        asked(ep_size=2, global_batch_size=4),
    ]
    assert key(same[0]) == key(same[1]) == key(base)
    # however many micro-batches a step is said to have
    assert key(same[2]) == key(same[3]) != key(base)
    slower = replace(CLUSTER.hardware, inside=replace(CLUSTER.hardware.inside, bandwidth=1.0))
    others = [
        asked(),
        replace(base, rank=1),
        replace(base, world_size=4),
        replace(base, routing=GivenRouting(busiest=2.0)),
        replace(base, cluster=replace(CLUSTER, gpus_per_node=1)),
        replace(base, cluster=replace(CLUSTER, hardware=slower)),
    ]
    keys = [key(base), *map(key, others)]
    assert len(set(keys)) == len(keys)
    assert key(base, Forecasts(tiny_mixtral(num_hidden_layers=3).to_dict(), tiny_mixtral)) not in keys
    monkeypatch.setattr(kept, "PACKAGES", ("torch",))
    assert key(base) not in keys


def test_plan_rehearse_and_a_run_ask_for_one_dry_run(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second and the third find what the first has found out, and tell as much memory."""
    model = own_cache / "model"
    tiny_mixtral().save_pretrained(model)
    cluster = ["--gpus", "2", "--imbalance", "1", "--json"]
    flags = ["--ep-size", "2", "--tp-size", "1", "--max-seq-length", "32", "--per-device-train-batch-size", "1"]
    flags += ["--gradient-checkpointing", "full", "--gradient-accumulation-steps", "2", "--model", str(model)]
    assert main(["plan", *cluster, *flags]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    found_out = files(own_cache)

    monkeypatch.setattr(engine, "account_of", lambda *arguments: never())
    line = launched(plan["launch"])
    assert main(["rehearse", *cluster, *line]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert round(told["needed_bytes"]) == plan["memory"]["total"]

    # on a GPU, as a run sees it
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(rank_memory, "available_memory", lambda device, before: CLUSTER.memory)
    monkeypatch.setattr(rank_memory, "in_child", never)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    config = parse_config(line).settled()
    lengths = torch.full((8,), 32)
    samples = SimpleNamespace(
        lengths=lengths, longest=lengths, targets=lengths - 1, kind=CONVERSATIONS, most_image_tokens=0
    )
    inputs: Any = SimpleNamespace(training=Rows(samples))  # type: ignore[arg-type]
    kernel: Any = SimpleNamespace(kernel=SimpleNamespace(recorded_as="torch-grouped"))
    ranks = Ranks(0, 2, torch.device("cuda"), None)  # type: ignore[arg-type]
    own = rank_memory._asked(config.topology(2), kernel, config, inputs, ranks, BatchMaker())
    held = rank_memory._forecast(open_source(model), own)
    assert round(held.memory.total) == plan["memory"]["total"]
    assert files(own_cache) == found_out


def test_a_runs_forecast_in_a_new_process_is_that_of_a_fork(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a run whose process has a GPU."""
    if torch.version.cuda and not child.forks_compute():
        pytest.skip("torch's build for CUDA has threads behind a backward of a pretended GPU, as of a test before")
    tiny_mixtral().save_pretrained(own_cache / "model")
    source = open_source(own_cache / "model")
    found = []
    for forks in (True, False):
        monkeypatch.setattr(child, "forks_compute", lambda forks=forks: forks)
        monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / str(forks)))
        found.append(rank_memory._forecast(source, asked(ep_size=2)))
    assert found[0] == found[1]


def test_two_forms_of_one_model_are_one() -> None:
    file, source = find_config(str(CONFIGS / "mixtral-8x7b")), open_source(CONFIGS / "mixtral-8x7b")
    assert kept.of_model(file.content) == kept.of_model(source.said)


class _Noting(TrainConfig):
    """Notes which settings are read of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in TrainConfig.__dataclass_fields__:
            NOTED.add(name)
        return super().__getattribute__(name)


NOTED: set[str] = set()


@pytest.mark.parametrize(
    "name", tiered(["hybrid", "LoRA beside nf4", "divided, and shared rows"], slow=["shared rows", "frozen"])
)
def test_no_figure_depends_on_a_setting_that_is_not_in_the_key(name: str) -> None:
    """What a dry run reads of settings beside those is at its default in what is run."""
    family, world_size, flags = SETTINGS[name]
    config = alike(flags_of(**flags))
    noting = _Noting(**{field.name: getattr(config, field.name) for field in fields(TrainConfig) if field.init})
    NOTED.clear()
    build_rehearsed(noting, tiny_config(family), "cuda")
    rehearse(Asked(noting, world_size, CLUSTER), tiny_config(family))
    assert {"ep_size", "optim"} <= NOTED
    for setting in NOTED - forecasts.read_by("plan") - {"model", "dataset"}:
        assert getattr(config, setting) == getattr(TrainConfig(model="-"), setting), setting


def test_damaged_files_are_made_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = forecasts_of()
    account = own.account(asked())
    whole = {file: file.read_text() for file in files(own_cache)}
    assert len(whole) >= 2
    # found out again at once
    facts = own.facts(asked().config)
    monkeypatch.setattr(engine, "rehearsed_facts", lambda *arguments: facts)
    monkeypatch.setattr(engine, "account_of", lambda *arguments: account)
    for content in ("", "[]", "{}", '{"found": 1}', "more digits"):
        for file, text in whole.items():
            file.write_text(text.replace('"num_experts": ', '"num_experts": 1').replace('"peak": ', '"peak": 1'))
            if content != "more digits":
                file.write_text(content)
        assert forecasts_of().account(asked()) == account, content
        assert {file: json.loads(file.read_text()) for file in files(own_cache)} == {
            file: json.loads(text) for file, text in whole.items()
        }, content
    unread = next(iter(whole)).with_name("of-another-release.json")
    unread.write_text("{}")
    os.utime(unread, (0, 0))
    assert forecasts_of().account(asked(ep_size=2)) == account
    assert not unread.exists()
    assert all(file.exists() for file in whole)


def test_a_refusal_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = replace(asked(), config=flags_of(max_seq_length=2**26))
    for load in (tiny_mixtral, never):
        with pytest.raises(ExpertMeshError, match="2\\^31 elements"):
            forecasts_of(load).account(too_long)
    (refused,) = forecasts_of(never).accounts([too_long])
    assert isinstance(refused, ExpertMeshError)


@pytest.mark.parametrize("error", [MemoryError("no room"), ImportError("no such package")])
def test_what_fails_for_the_machines_sake_is_not_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Within a process it is not tried again; the next one is told."""
    with monkeypatch.context() as patch:
        patch.setattr(world, "train_step", mock.Mock(side_effect=error))
        own = forecasts_of()
        for _ in range(2):
            with pytest.raises(ExpertMeshError, match=f"the dry run fails .*{error}"):
                own.account(asked())
    assert not [file for file in files(own_cache) if "refused" in file.read_text()]
    assert isinstance(forecasts_of().account(asked()), Account)


def test_what_code_from_outside_may_change_is_not_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "has_code_from_outside", lambda config: True)
    own = forecasts_of()
    account = own.account(asked())
    assert files(own_cache) == []
    # within a process nothing is found out twice
    monkeypatch.setattr(engine, "account_of", lambda *arguments: never())
    assert own.account(asked()) == account


def test_an_optimizer_from_outside_is_code_from_outside() -> None:
    assert not forecasts.has_code_from_outside(flags_of())
    assert forecasts.has_code_from_outside(flags_of(attn_implementation="theirs"))


class Told(list[tuple[str, int, int]]):
    """What is told; other processes get a copy."""

    def __call__(self, what: str, done: int, number: int) -> None:
        self.append((what, done, number))


@pytest.mark.slow
def test_several_at_once_are_those_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [asked(ep_size=ep_size) for ep_size in (1, 2)] + [replace(asked(), config=flags_of(max_seq_length=2**26))]
    monkeypatch.setattr(forecasts, "cores", lambda: 2)
    own, told = forecasts_of(), Told()
    own.tell = told
    found = own.accounts(several)
    assert [isinstance(each, Account) for each in found] == [True, True, False]
    assert told[0] == ("looking at the model's layers", 0, 0)
    assert told[1:] == [("dry-running layouts", done, len(several)) for done in range(len(several) + 1)]
    alone = Forecasts(tiny_mixtral().to_dict(), tiny_mixtral, is_kept=False)
    assert [alone.account(each) for each in several[:2]] == found[:2]
    assert forecasts_of(never).known(several[0]) == found[0]
    assert forecasts_of(never).known(asked(ep_size=2, gradient_accumulation_steps=2)) is None


def test_a_directory_that_cannot_be_written_keeps_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = own_cache / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert forecasts_of().facts(flags_of()).num_experts == 8
