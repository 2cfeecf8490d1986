"""Writes report.html: the figures as JSON inside a page with its own style and script, and no request to anywhere.

The page is of one run, or compares several.
"""

import base64
import hashlib
import html
import json
import os
import shlex
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal

import yaml

from ...checkpoints.files.directories import write_errors
from ...checkpoints.files.lock import DirectoryLock
from ...moe.util.atomic_write import PARTIAL, whole
from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig, flags_of_config
from ..metrics import METRICS, Chart
from .history import History, read_history
from .profiles import BETWEEN, EXCHANGE, read_profiles

State = Literal["running", "stopped", "finished"]

REPORT = "report.html"
COMPARISON = "comparison.html"
REFRESH_SECONDS = 60
"""Between two reports of a run while it trains, beside those that its evaluations and other events write; and between
two looks that an open page takes at it."""
MAX_RUNS = 8
"""Runs of a page, as many as there are colours."""
SCRIPTS = ("elements.js", "curves.js", "experts.js", "page.js")
"""In the order in which they make the page's one script."""


def write_report(output_dir: Path, state: State | None = None, history: History | None = None) -> Path:
    """Write OUTPUT_DIR/report.html from the run's metrics.jsonl and, if there, its config.yaml, environment.json and
    profiles.

    It is written atomically; an earlier one is replaced.

    Args:
        output_dir: of a run, which may still be running.
        state: of the run, if known. Else it is finished if its last step is logged, and otherwise left open.
        history: what metrics.jsonl says, where it is known; else it is read.

    Returns:
        The path of the report.

    Raises:
        ExpertMeshError: there is no metrics.jsonl, a file cannot be read, or the report cannot be written.
    """
    content = _read_run(output_dir, state, history)
    refresh = REFRESH_SECONDS if content["state"] == "running" else None
    return _write(output_dir / REPORT, render_page([content], content["name"], refresh))


def write_comparison(output_dirs: Sequence[Path], page: Path, running: Collection[Path] = ()) -> Path:
    """Write a page about several runs, of what each has written so far.

    Args:
        running: runs that go on, for which the page will be written again: an open one then loads its file again.

    Raises:
        ExpertMeshError: these are too many, one of them is named twice or has no metrics.jsonl, a file cannot be read,
            or the page cannot be written.
    """
    if len(output_dirs) > MAX_RUNS:
        raise ExpertMeshError(f"{len(output_dirs)} runs are too many; a page shows up to {MAX_RUNS}")
    if len({output_dir.resolve() for output_dir in output_dirs}) < len(output_dirs):
        raise ExpertMeshError("a run is given twice")
    contents = [_read_run(output_dir, "running" if output_dir in running else None) for output_dir in output_dirs]
    names = [content["name"] for content in contents]
    labels = names if len(set(names)) == len(names) else [str(output_dir) for output_dir in output_dirs]
    runs = [{**content, "label": label} for content, label in zip(contents, labels, strict=True)]
    return _write(page, render_page(runs, " · ".join(labels), REFRESH_SECONDS if running else None))


def watch(output_dirs: Sequence[Path], page: Path) -> None:
    """Write a page about several runs again each minute, until none of them goes on, or Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while running := [output_dir for output_dir in output_dirs if DirectoryLock(output_dir).is_held()]:
            write_comparison(output_dirs, page, running)
            time.sleep(REFRESH_SECONDS)
    write_comparison(output_dirs, page)


def _read_run(output_dir: Path, state: State | None = None, history: History | None = None) -> dict[str, Any]:
    """Everything that the page shows of a run."""
    if history is None:
        history = read_history(output_dir / "metrics.jsonl")
    profiles, unshown = read_profiles(output_dir)
    config, environment = _read_table(output_dir / "config.yaml"), _read_table(output_dir / "environment.json")
    return _content(history, config, environment, state) | {"profiles": profiles, "profiles_not_shown": unshown}


def _write(path: Path, page: bytes) -> Path:
    # a run writes its report while somebody has it made again
    with write_errors(path), whole(path, writer=str(os.getpid())) as partial:
        partial.write_bytes(page)
    return path


def sweep_reports(output_dir: Path) -> None:
    """Delete the reports that killed processes left half-written."""
    for partial in output_dir.glob(f"{REPORT}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def render_page(runs: list[dict[str, Any]], title: str, refresh_seconds: int | None = None) -> bytes:
    """The page. Its policy lets a browser use its own script and style, known by their hashes, and load nothing.

    Args:
        refresh_seconds: after which an open page loads its file again, whose run goes on; None: never.
    """
    page, style, *scripts = (
        files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = "\n".join(scripts)
    content = {"runs": runs, "refresh_seconds": refresh_seconds, "between": BETWEEN, "exchange": EXCHANGE}
    # a browser reads a script element up to the first "</script": JSON does without "<"
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_policy_hash(script)}'; style-src '{_policy_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = Template(page).substitute(title=html.escape(title), policy=policy, style=style, data=data, script=script)
    return text.encode("utf-8", errors="replace")


def _policy_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _content(
    history: History, config: dict[str, Any], environment: dict[str, Any], state: State | None
) -> dict[str, Any]:
    """Everything that the page shows."""
    num_steps = environment.get("num_steps")
    if state is None and num_steps is not None and history.last_step >= num_steps:
        state = "finished"
    return {
        "name": str(config.get("run_name") or "expertmesh"),
        "model": config.get("model"),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": state,
        "stopped_early": state == "finished" and num_steps is not None and history.last_step < num_steps,
        "step": history.last_step,
        "num_steps": num_steps,
        "summary": _summary(history),
        "curves": {name: curve.summary() for name, curve in history.curves.items()},
        "charts": _charts(history, config),
        "positions": history.place(),
        "marks": {"saves": history.saves.items(), "resumes": history.resumes.items()},
        "seconds": asdict(history.seconds),
        "command": _command(config),
        "load": None if history.load is None else history.load.summary(),
        "warnings": list(history.warnings),
        "generations": history.generations.spread(),
        "num_generations": history.generations.number,
        "config": {str(name): _as_text(value) for name, value in config.items()},
        "not_default": [name for name, value in _defaults().items() if name in config and config[name] != value],
        "environment": {str(name): _as_text(value) for name, value in environment.items()},
        "unreadable_lines": history.unreadable_lines,
    }


def _charts(history: History, config: dict[str, Any]) -> list[dict[str, Any]]:
    """How the page draws the curves, and where, in order."""
    num_experts = None if history.load is None else history.load.num_experts
    others = [(name, Chart(name)) for name in history.curves.keys() - {metric.name for metric in METRICS}]
    charts: dict[str, dict[str, Any]] = {}
    for name, chart in [*((metric.name, metric.chart) for metric in METRICS), *sorted(others)]:
        if chart is None:
            continue
        shared = {
            "title": chart.title,
            "note": chart.note,
            "format": chart.format,
            "include": chart.include,
            "references": chart.references(config, num_experts),
            "reaches_all": chart.reaches_all,
            "series": [],
        }
        line = {"name": name, "label": chart.label, "smooth": chart.smooth}
        charts.setdefault(chart.title, shared)["series"].append(line)
    return [chart for chart in charts.values() if any(line["name"] in history.curves for line in chart["series"])]


def _summary(history: History) -> dict[str, Any]:
    """Single figures of the whole run; None for what was not logged."""
    curves = history.curves
    loss, evaluation, mfu = curves.get("loss"), curves.get("eval_loss"), curves.get("mfu")
    speed, memory = curves.get("tokens_per_second"), curves.get("peak_memory_mb")
    return {
        "loss": loss.last if loss else None,
        "best_eval_loss": evaluation.lowest if evaluation else None,
        "best_eval_step": evaluation.lowest_step if evaluation else None,
        "tokens": history.tokens or None,
        "tokens_per_second": speed.median() if speed else None,
        "mfu": mfu.median() if mfu else None,
        "peak_memory_mb": memory.highest() if memory else None,
        "wall_seconds": history.wall_seconds or None,
        "num_starts": history.num_starts,
        "dropped_tokens": history.dropped_tokens,
        "skipped_steps": history.skipped_steps,
    }


def _command(config: dict[str, Any]) -> str | None:
    """The command line that asks for these settings; None where this release does not know them."""
    try:
        return shlex.join(["train_ep.py", *flags_of_config(TrainConfig(**config), ("model", "dataset", "output_dir"))])
    except (TypeError, ExpertMeshError):
        return None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _defaults() -> dict[str, Any]:
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(TrainConfig)}


def _read_table(file: Path) -> dict[str, Any]:
    """A YAML (or JSON, which is YAML) file with a table in it; empty where there is no such file."""
    try:
        table = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ExpertMeshError(f"{file}: cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ExpertMeshError(f"{file}: contains a {type(table).__name__}, not a table")
    return table
