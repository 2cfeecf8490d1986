"""Which runs may not go on from a checkpoint: those that read something else, or to which its state means nothing."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.start import consistency
from expertmesh.training.start.consistency import start_facts
from expertmesh.training.start.resume import check_data_order, compare_run

PATH = Path("step-00000002")
PLAIN: dict[str, Any] = dict(model="m", dataset=["d"])
LORA: dict[str, Any] = PLAIN | dict(adapter="lora")
FACTS = {"model": {"config.json": "1", "weights": "2"}, "data": {"samples": "3"}, "evaluation data": {"samples": "4"}}


def compare(saved: TrainConfig, now: TrainConfig, here: dict[str, dict[str, str]]) -> list[str]:
    """What is told."""
    told: list[str] = []
    compare_run(PATH, FACTS, asdict(saved), now, here, told.append)
    return told


def test_the_same_run_goes_on_without_a_word() -> None:
    for settings in (PLAIN, LORA):
        assert not compare(TrainConfig(**settings), TrainConfig(**settings), FACTS)


@pytest.mark.parametrize("name", list(FACTS))
@pytest.mark.parametrize("change", [{"weights": "9", "samples": "9"}, {"more": "5"}, None], ids=str)
def test_what_was_read(name: str, change: dict[str, str] | None) -> None:
    """Another fact, one more, and one less; --allow-changed permits each, and it is told."""
    config, which = TrainConfig(**PLAIN), "model" if name == "model" else "data"
    facts = dict(list(FACTS[name].items())[1:]) if change is None else {**FACTS[name], **change}
    with pytest.raises(ExpertMeshError, match=f"--resume {PATH}: is of .*--allow-changed {which}"):
        compare(config, config, {**FACTS, name: facts})
    (line,) = compare(config, replace(config, allow_changed=[which]), {**FACTS, name: facts})
    assert line.startswith(f"warning: resuming with a different {name} (--allow-changed): ")


def test_settings_that_make_other_samples_are_named_as_the_cause() -> None:
    saved, here = TrainConfig(**PLAIN), {**FACTS, "data": {"samples": "9"}}
    now = replace(saved, split_turns=True, max_seq_length=64)
    words = ("no --split-turns, --max-seq-length 1024", "--split-turns, --max-seq-length 64")
    causes = [f"that run had {one}, this one has {other}: " for one, other in (words, words[::-1])]
    for (one, other), cause in zip(((saved, now), (now, saved)), causes, strict=True):
        with pytest.raises(ExpertMeshError, match=f"is of other data .*{cause}in that run"):
            compare(one, other, here)
    templated = replace(saved, chat_template="chatml")
    for one, other, cause in ((saved, templated, "no --chat-template"), (templated, saved, "--chat-template chatml")):
        with pytest.raises(ExpertMeshError, match=f"is of other data .*that run had {cause}, this one has"):
            compare(one, other, here)
    with pytest.raises(ExpertMeshError, match=r"is of other data \(it began with \['d'\]\): in that run"):
        compare(saved, replace(saved, dataset=["moved"]), here)


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (PLAIN, {"adapter": "lora"}, "--adapter none, this one has --adapter lora"),
        (LORA, {"lora_rank": 5}, "--lora-rank"),
        (LORA, {"lora_alpha": 5.0}, "--lora-alpha"),
        (LORA, {"use_rslora": True}, "had no --use-rslora, this one has --use-rslora"),
        (LORA, {"lora_targets": ["experts"]}, "--lora-targets"),
        (LORA, {"base_dtype": "nf4"}, "--base-dtype"),
        (PLAIN, {"optim": "muon"}, "--optim"),
        (PLAIN, {"rope_scaling": "yarn:4"}, "no --rope-scaling, this one has --rope-scaling yarn:4"),
        (PLAIN, {"freeze": ["embeddings"]}, "no --freeze, this one has --freeze embeddings"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_its_state_means_nothing_to(base: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    saved, now = TrainConfig(**base), TrainConfig(**base | changes)
    with pytest.raises(ExpertMeshError, match=f"--resume {PATH}: that run had .*") as error:
        compare(saved, now, FACTS)
    assert said in str(error.value)
    with pytest.raises(ExpertMeshError, match=f"--resume {PATH}: that run had"):
        compare(now, saved, FACTS)


def test_all_that_differs_is_told_at_once() -> None:
    """With what permits all of it, and what was permitted before."""
    saved = TrainConfig(**PLAIN, task="dpo")
    now = replace(saved, preference_beta=0.5, allow_changed=["model"])
    other = {**FACTS, "data": {"samples": "9"}}
    with pytest.raises(ExpertMeshError) as refused:
        compare(saved, now, other)
    said = str(refused.value)
    assert "is of other data" in said
    assert "had --preference-beta 0.1, this one has --preference-beta 0.5, so it would minimise something else" in said
    assert said.endswith("; use the same, or resume anyway with --allow-changed model data objective")
    told = compare(saved, replace(now, allow_changed=["data", "objective"]), other)
    assert [line.split()[5] for line in told] == ["data", "objective"]
    with pytest.raises(ExpertMeshError, match=r"has --optim muon; take the same; is of other data .* --allow-changed"):
        compare(saved, replace(now, optim="muon"), other)


def test_the_batches_to_come() -> None:
    config = TrainConfig(**PLAIN)
    there = {"rows": 50, "tokens": 900, "global_batch_size": 8, "seed": 1}
    check_data_order(there, there, config, PATH)
    for name in there:
        for allowed in ([], ["data"]):
            other, may = replace(config, allow_changed=allowed), bool(allowed) and name in ("rows", "tokens")
            here = {**there, name: there[name] + 1}
            if may:
                check_data_order(there, here, other, PATH)
                continue
            with pytest.raises(ExpertMeshError, match=f"that run had {name.replace('_', ' ')} {there[name]}"):
                check_data_order(there, here, other, PATH)


def test_flags_that_nodes_are_started_with() -> None:
    """A setting of the run is compared by its value, "auto" too, and a place of what is read by whether it is given."""
    config = TrainConfig(**PLAIN, use_cpu=True)
    facts = start_facts(config)
    assert facts["--learning-rate"] == str(config.learning_rate)
    assert facts["--attn-implementation"] == '"auto"'
    assert facts["--model"] == "given"
    assert "--output-dir" not in facts
    for changes in ({"learning_rate": 0.5}, {"attn_implementation": "eager"}, {"ep_size": 2}, {"resume": "auto"}):
        assert start_facts(replace(config, **changes)) != facts, changes
    assert start_facts(replace(config, model="elsewhere")) == facts


def test_nodes_with_a_gpu_have_the_same_liger_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels compute what others do, though not bit for bit, and are faster: one node would hold up the others."""
    config = TrainConfig(**PLAIN)
    versions = {"": "not installed", "0.8.5": "0.8.5"}
    for device, told in (("cpu", {}), ("cuda", versions)):
        monkeypatch.setattr(consistency, "device_type", lambda _, device=device: device)
        for installed in versions:
            monkeypatch.setattr(consistency, "installed_version", lambda _, installed=installed: installed)
            assert start_facts(config).get("liger-kernel") == told.get(installed)
