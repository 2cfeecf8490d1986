"""What is damaged, made once, and the process that reads it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.hostile.harness import run_campaign
from tests.hostile.models import ORIGINS, SMALL, UNTRAINED
from tests.tiny import save_model, save_tokenizer
from tests.untrained import add_tensors


@pytest.fixture(scope="session")
def origin(ranks: RankPool, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the directory of one of ORIGINS, or of "trained", a training checkpoint of one step."""

    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("origin") / name
        if name != "trained":
            ORIGINS[name](path)
            return path
        save_model(path, **{**SMALL, "vocab_size": 320})
        add_tensors(path, UNTRAINED)
        save_tokenizer(path)
        argv = ["--model", str(path), "--dataset", str(tiny_data), "--output-dir", str(path.parent), "--use-cpu"]
        argv += ["--max-steps", "1", "--save-steps", "1", "--no-export", "--overwrite-output-dir"]
        ((code, errors),) = ranks.run(run_main, 1, argv, join_group=False)
        assert code == 0, errors
        return path.parent / "checkpoints" / "step-00000001"

    return made


@pytest.fixture
def campaign(tmp_path: Path, _own_cache: None) -> Callable[..., int]:
    """A function that runs a campaign in a process of its own; the number of its cases."""

    def run(function: Callable[..., None], *args: object) -> int:
        directory = tmp_path / "watched"
        directory.mkdir()
        return run_campaign(function, directory, *args)[0]

    return run
