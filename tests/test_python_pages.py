"""The Python of the pages runs as it stands, on one rank. Pages name all that is public, and all that a run writes."""

import inspect
import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import expertmesh
from benchmarks import demo
from expertmesh.sharding.runtime.watchdog import STUCK
from expertmesh.training.run import output
from tests.families.configs import is_older
from tests.tiers import tiered

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")


OF_TRL = ["how-to/use-trainer-or-trl.md", "how-to/reinforcement-learning.md"]


@pytest.mark.parametrize("page", tiered(["how-to/use-your-own-loop.md"], slow=OF_TRL))
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its model and as many records as it takes, in fewer steps. Blocks of a page are run in turn."""
    if page in OF_TRL and is_older():
        pytest.skip("its last example needs a later transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TRAIN_ROWS", 2000)
    os.mkdir("demo-run")
    demo.make_inputs(Path("demo-run/model"), Path("demo-run/train.jsonl"), seed=0)
    names: dict[str, Any] = {"__name__": "an_example"}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL):
        code = code.replace("ep_size=2", "ep_size=1").replace("range(60)", "range(20)")
        code = re.sub(r"max_steps=\d+", "max_steps=20", code).replace("sums/hf", "demo-run/model")
        exec(compile(code, page, "exec"), names)
    if page not in OF_TRL:
        assert re.match(r"20 StepResult\(loss=\d", capsys.readouterr().out)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    dist.destroy_process_group()


def signature(name: str, function: Any) -> str:
    """A call as a page writes it: names and defaults, without self and types."""
    written = []
    for parameter in inspect.signature(function).parameters.values():
        prefix = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        written.append(f"{prefix}{parameter.name}{default}")
    return f"{name}({', '.join(word for word in written if word != 'self')})"


OF_TRAINING_LOOPS = {"train_step", "progress", "save"}
"""Methods of an engine with arguments for train_ep.py's loop alone."""


def members(kind: Any) -> list[str]:
    """What a class has that is public, as a page writes it."""
    found = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for name, value in vars(kind).items():
        if name.startswith("_") or name in found:
            continue
        # those of a Trainer are as transformers has them
        is_method = inspect.isfunction(value) and name not in OF_TRAINING_LOOPS and kind is not expertmesh.TrainerMixin
        found.append(signature(name, value) if is_method else name)
    return found


@pytest.mark.parametrize("name", ["Engine", "StepResult", "Evaluation", "TrainerMixin"])
def test_what_is_public_is_on_the_page(name: str) -> None:
    kind = getattr(expertmesh, name)
    section = REFERENCE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    unnamed = [member for member in members(kind) if f"`{member}`" not in section and f"`{member}(" not in section]
    assert not unnamed
    if name == "Engine":
        for line in re.findall(r"^    ([a-z_0-9]+(?:, [a-z_0-9]+)*):", inspect.getdoc(kind) or "", re.MULTILINE):
            assert all(f"`{attribute}`" in section for attribute in line.split(", ")), line


def test_every_name_is_on_the_page() -> None:
    assert [name for name in expertmesh.__all__ if f"\n## {name}\n" not in REFERENCE] == []
    assert "`load(model, **settings)`" in REFERENCE


def test_every_file_of_a_run_is_on_the_page() -> None:
    page = (DOCS / "reference" / "output-directory.md").read_text(encoding="utf-8")
    written = [*output._FILES, *(f"{name}/" for name in (*output._DIRECTORIES, STUCK))]
    assert [name for name in written if f"| `{name}` |" not in page] == []
