"""What is said of the data before the first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertmesh.training.config.train_config import make_config
from expertmesh.training.data.samples import Sample
from expertmesh.training.environment import unseen_gpus
from expertmesh.training.run.banner import _on_cpu, _unknown


def inputs(tokens: list[list[int]], **tokenizer: Any) -> Any:
    known = dict(unk_token_id=0, unk_token="<unk>", bos_token_id=1, eos_token_id=2, pad_token_id=None)
    samples = [Sample(each, [True] * len(each)) for each in tokens]
    return SimpleNamespace(tokenizer=SimpleNamespace(**known | tokenizer), training=SimpleNamespace(samples=samples))


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "share"),
    [
        ([[1, 0, 0, 5, 2], [1, 0, 7, 8, 2]], {}, "30%"),
        ([[1, 0, 5, 2]] + [[1, 5, 6, 7, 2]] * 8, {}, None),
        ([[1, 0, 0, 5, 2]], dict(unk_token_id=None), None),
        ([[0, 0, 0, 5, 2]], dict(pad_token_id=0), None),
        ([[5, 6]] * 100 + [[0, 0]] * 900, {}, None),
    ],
    ids=["much", "little", "none", "padding", "not read"],
)
def test_text_without_tokens_is_warned_of(
    tokens: list[list[int]], tokenizer: dict[str, Any], share: str | None
) -> None:
    said = _unknown(inputs(tokens, **tokenizer))
    assert [line.split(" of the first")[0] for line in said] == ([] if share is None else [f"warning: {share}"])


@pytest.mark.parametrize("visible", [None, "", "-1", "0,1"])
@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("files", [[], ["nvidiactl"], ["nvidia1", "nvidia0"]])
def test_gpus_that_torch_does_not_see(
    visible: str | None, is_seen: bool, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: is_seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for file in files:
        (tmp_path / file).touch()
    said = unseen_gpus(tmp_path)
    assert ("CUDA_VISIBLE_DEVICES is 0,1" in said) == (visible == "0,1" and not is_seen)
    assert (f"there is {tmp_path}/nvidia0" in said) == (len(files) == 2 and not is_seen)
    assert bool(said) == (not is_seen and (visible == "0,1" or len(files) == 2))


def test_a_run_on_the_cpu_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (said,) = _on_cpu(make_config({"model": "m"}))
    assert said.startswith("warning: this run is on the CPU: CUDA_VISIBLE_DEVICES is 0")
    assert said.endswith("give --use-cpu")
    assert _on_cpu(make_config({"model": "m", "use_cpu": True})) == []
