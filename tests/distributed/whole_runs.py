"""train_ep.py on ranks of the pool: started by a line of flags, and what came of it."""

import contextlib
import io
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from safetensors.torch import load_file

from expertmesh import train_ep
from expertmesh.training.planning.rank_memory import Forecast
from expertmesh.training.run import run
from tests.distributed.pool import RankPool
from tests.flags import last_of_each
from tests.rounding import AFTER_ADAMW
from tests.tiny import relative_error, save_model, save_tokenizer

ROOT = Path(__file__).parents[2]
SIX_STEPS = (
    "--max-steps 6 --save-steps 4 --learning-rate 1e-3 --warmup-steps 2 --lr-scheduler-type cosine --weight-decay 0.1 "
    "--router-z-loss-coef 0.01"
)
"""The 50 rows of `tiny_data` in batches of 12: they end in the second epoch, and the fifth is a short batch."""

Told = tuple[int, str, str]
"""Exit code, standard output, standard error."""


def tell(argv: list[str]) -> Told:
    """train_ep.py on this rank, without the forecast of its memory."""
    with without_forecast():
        return tell_with_forecast(argv)


def without_forecast() -> AbstractContextManager[object]:
    """A tiny run's costs several times as much as its steps."""
    return mock.patch.object(run, "forecast_memory", return_value=Forecast("this test does not look at it"))


def tell_with_forecast(argv: list[str]) -> Told:
    """train_ep.py on this rank, all of it."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = train_ep.main(last_of_each(["--verbose", *argv]))
    return code, printed.getvalue(), errors.getvalue()


def run_main(argv: list[str]) -> tuple[int, str]:
    """(exit code, standard error) of train_ep.py on this rank."""
    code, _, errors = tell(argv)
    return code, errors


def tell_signalled(argv: list[str], metrics: Path, number: int) -> Told:
    """train_ep.py on this rank; the last one gets a signal after two steps."""

    def send() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        threading.Thread(target=send, daemon=True).start()
    return tell(argv)


@dataclass(frozen=True)
class Ended:
    """A run. printed, errors: of rank 0."""

    out: Path
    codes: list[int]
    printed: str
    errors: str

    def lines(self, key: str = "step") -> list[dict[str, Any]]:
        return lines(self.out, key)

    def values(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines(key)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return read(self.out / ("hf" if (self.out / "hf").exists() else "adapter"))

    @property
    def saved(self) -> list[int]:
        """Steps of which there is a checkpoint, and nothing but these and the link to the best is there."""
        names = {path.name for path in (self.out / "checkpoints").iterdir()} - {"best"}
        steps = sorted(int(name.removeprefix("step-")) for name in names)
        assert names == {f"step-{step:08d}" for step in steps}
        return steps

    def checkpoint(self, step: int | str) -> Path:
        return self.out / "checkpoints" / (step if isinstance(step, str) else f"step-{step:08d}")


@dataclass(frozen=True)
class Runs:
    """Starts runs of `model` over `data`, in a directory within `directory`, unless flags say otherwise."""

    ranks: RankPool
    model: Path
    data: Path
    directory: Path

    def of(self, name: str = "model", **changes: Any) -> "Runs":
        """From a tiny Mixtral with other settings."""
        save_model(self.directory / name, **changes)
        save_tokenizer(self.directory / name)
        return replace(self, model=self.directory / name)

    def __call__(
        self,
        world_size: int,
        flags: str,
        out: str | Path = "run",
        code: int | None = 0,
        call: Callable[..., Told] = tell,
        given: Sequence[Any] = (),
        seconds: float = 600.0,
    ) -> Ended:
        """
        Args:
            code: what every rank is to end with; None: whatever it is.
            call: what a rank runs, with `given` after argv.
            seconds: after which it counts as hung.
        """
        out = self.directory / out
        argv = ["--model", str(self.model), "--dataset", str(self.data), "--output-dir", str(out), "--use-cpu"]
        all_flags = [*argv, *shlex.split(flags)]
        results = self.ranks.run(call, world_size, all_flags, *given, join_group=False, timeout=seconds)
        codes = [result[0] for result in results]
        assert code is None or codes == [code] * world_size, results
        return Ended(out, codes, *results[0][1:])

    def refuses(self, world_size: int, flags: str, *said: str, **more: Any) -> Ended:
        """A run that every rank ends with 2, and one of them says why."""
        ended = self(world_size, flags, code=2, **more)
        assert all(words in ended.errors for words in said), ended.errors
        return ended


def lines(out: Path, key: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have a key, all of them JSON without its usual extensions. By default all but
    those of saves and warnings, which follow the steps that they are of."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    found = [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]
    besides = {"save_seconds", "warning"} if key == "step" else set()
    return [line for line in found if key in line and not besides & line.keys()]


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_equal_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = AFTER_ADAMW
) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= most, {name: error for name, error in errors.items() if error > most}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def batch_of_12(world_size: int, accumulation: int = 1) -> str:
    rows = 12 // (world_size * accumulation)
    return f"--per-device-train-batch-size {rows} --gradient-accumulation-steps {accumulation}"


def stop_at_checkpoint(finished: Path, out: Path) -> None:
    """Make `out` what a run of SIX_STEPS killed between the checkpoint and the end leaves behind."""
    shutil.copytree(finished, out)
    shutil.rmtree(out / ("adapter" if (out / "adapter").exists() else "hf"))
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    (out / "finished.json").unlink()


def flip_a_bit(path: Path) -> None:
    """In what a file holds last."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
