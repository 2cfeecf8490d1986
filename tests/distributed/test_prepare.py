"""`--prepare-only`: the cache is filled without weights, and a run on ranks finds it."""

import datetime
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from expertmesh.training.start import inputs
from tests.distributed.whole_runs import Runs, Told, tell
from tests.tiers import tiered

SKIPPED = "*.safetensors"


def cached(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*.arrow")}


def tell_cached(argv: list[str], cache: Path) -> Told:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        return tell(argv)


def test_a_run_finds_what_was_prepared(runs: Runs, tmp_path: Path) -> None:
    """By another directory of the model, and with another layout."""
    bare, cache = tmp_path / "bare", tmp_path / "cache"
    shutil.copytree(runs.model, bare, ignore=shutil.ignore_patterns(SKIPPED))
    assert not list(bare.glob(SKIPPED))
    prepared = Runs(runs.ranks, bare, runs.data, tmp_path)
    ended = prepared(1, "--prepare-only --ep-size 2 --eval-ratio 0.1", "prepared", call=tell_cached, given=[cache])
    said = " ".join(ended.printed.split())
    assert said.startswith("note: --ep-size 2 has no effect because only the data are read (--prepare-only)")
    assert " trained), about " in said
    assert f"prepared: a run with the same data flags finds these samples in {cache / 'expertmesh'}" in said
    assert not ended.out.exists()
    before = cached(cache)
    assert len(before) == 2, "records, and their tokens"
    flags = "--ep-size 2 --max-steps 1 --save-steps 0 --no-export --eval-ratio 0.1 --packing"
    run = runs(2, flags, "run", call=tell_cached, given=[cache])
    assert run.lines("loss")
    assert cached(cache) == before


def tell_on(argv: list[str], days: list[str]) -> Told:
    """train_ep.py on this rank, on its day."""
    today = datetime.date.fromisoformat(days[int(os.environ["RANK"])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: today)))
        return tell(argv)


def test_all_samples_have_the_date_on_which_the_run_began(runs: Runs, tmp_path: Path) -> None:
    """On every node, also where one is in the next day; and when it is resumed on another day."""
    clock = "{{ '<s>' + strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.role + m.content + '</s>' }}{% endfor %}"
    (tmp_path / "clock.jinja").write_text(clock)
    flags = f"--chat-template {tmp_path / 'clock.jinja'} --global-batch-size 4 --save-steps 2 --no-export --resume auto"
    run = runs(2, f"{flags} --max-steps 2", call=tell_on, given=[["2026-02-28", "2026-03-01"]])
    assert "all samples have the date 2026-02-28" in run.printed
    assert "already finished" in runs(1, f"{flags} --max-steps 2", call=tell_on, given=[["2031-01-02"]]).printed
    newest = f"--resume {run.out}/checkpoints"  # as "auto" would find it
    resumed = runs(1, f"{flags} {newest} --max-steps 4", call=tell_on, given=[["2031-01-02"]])
    assert "all samples have the date 2026-02-28" in resumed.printed
    assert resumed.values("step") == [1, 2, 3, 4]
    said = "its chat template wrote 2026-02-28, now 2031-01-02 (--template-date sets it)"
    runs.refuses(1, f"{flags} --max-steps 6 --template-date 2031-01-02", said)
    one = f"--chat-template {tmp_path / 'clock.jinja'} --template-date 2031-01-02"
    assert "flags and --template-date 2031-01-02 finds" in " ".join(runs(1, f"{one} --prepare-only").printed.split())
    assert "2031-01-02user" in runs(1, f"{one} --preview").printed
    ended = runs(1, "--template-date 2031-01-02 --preview")
    assert "note: --template-date 2031-01-02 has no effect: no chat template reads the clock" in ended.errors


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
OPENED = {
    "add-tokens": "--add-tokens say {new}",
    "resize-vocab": "--resize-vocab --tokenizer {grown}",
    "nothing": "",
    "rope-scaling": "--rope-scaling linear:2",
    "chat-template": "--chat-template {template}",
    "init-adapter": "--adapter lora --init-adapter {adapter}",
    "new-tokens": "--adapter lora --lora-rank 2 --add-tokens {new} --train-new-tokens",
}
"""By what it shows: settings that change how a model, or its tokenizer, is opened."""


@pytest.mark.parametrize("setting", tiered(list(OPENED)[:2], slow=list(OPENED)[2:]))
def test_it_opens_the_model_as_the_run_does(setting: str, runs: Runs, tmp_path: Path) -> None:
    """With whatever else is given: the run finds the samples of the very same settings, and no others."""
    cache, grown, template, new = (tmp_path / name for name in ("cache", "grown", "template.jinja", "new.txt"))
    template.write_text(TEMPLATE)
    tokens = [f"<{number}>" for number in range(40)]  # more than the model has rows for
    new.write_text("\n".join(tokens))
    if setting == "resize-vocab":
        tokenizer = AutoTokenizer.from_pretrained(runs.model)
        tokenizer.add_tokens([*tokens, "say"])
        tokenizer.save_pretrained(grown)
    adapter = tmp_path / "first" / "adapter"
    if setting == "init-adapter":
        runs(1, "--adapter lora --lora-rank 2 --max-steps 1 --save-steps 0", "first")
    flags = OPENED[setting].format(grown=grown, template=template, new=new, adapter=adapter)
    runs(1, f"--prepare-only {flags}", "prepared", call=tell_cached, given=[cache])
    before = cached(cache)
    assert len(before) == 2, "records, and their tokens"
    run = runs(1, f"--max-steps 1 --save-steps 0 --no-export {flags}", "run", call=tell_cached, given=[cache])
    assert run.lines("loss")
    assert cached(cache) == before


def test_it_refuses_a_scaling_that_the_model_cannot_have(runs: Runs) -> None:
    """As the run does, in its words."""
    flags = """--rope-scaling '{"full_attention": {"rope_type": "linear", "factor": 2}}'"""
    said = "all layers of this model have one rotary embedding"
    errors = [runs.refuses(1, f"{more} {flags}", said).errors for more in ("--prepare-only", "--max-steps 1")]
    assert errors[0] == errors[1]
