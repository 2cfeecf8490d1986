"""Writes report.html: a page of tables, and the figures that its script draws with plotly, which the page has inside.

The page is of one run, or compares several, and loads nothing from anywhere.
"""

import base64
import hashlib
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from ...checkpoints.files.directories import write_errors
from ...checkpoints.files.lock import DirectoryLock
from ...moe.util.atomic_write import PARTIAL, whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.sizes import duration, thousands
from ..config.train_config import DEFAULTS, TrainConfig, flags_of_config
from ..metrics import Chart, metrics_of
from .history import History, read_history
from .profiles import BETWEEN, EXCHANGE, FIGURES, Profile, read_profiles

State = Literal["running", "stopped", "finished"]
Run = dict[str, Any]

REPORT = "report.html"
COMPARISON = "comparison.html"
REFRESH_SECONDS = 60
"""Between two reports of a run while it trains, beside those that its evaluations and other events write; and between
two looks that an open page takes at it."""
PLOTLY = "plotly"
MAX_RUNS = 8
"""Runs of a page, as many as there are colours."""
TIMES = {
    "waiting for data": "host clock, rank that waits longest",
    "training": "host clock, main process: compute, exchange between ranks, logging",
    "evaluation": "host clock, main process",
    "sample generations": "host clock, main process",
    "saving": "host clock: how long training waited",
    "other": "the rest of the wall time: comparing replicas, writing profiles",
}
"""What wall time is spent on, and who measures it."""
SPECIAL = re.compile(r"(<[|｜][^<>|｜]{1,48}[|｜]>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_\w+>|\[/?INST\])")
"""Tokens with a meaning of their own, as the families write them."""


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
    run = _read_run(output_dir, state, history)
    return _write(output_dir / REPORT, [run], run["name"], run["drawn"]["state"] == "running")


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
    runs = [_read_run(output_dir, "running" if output_dir in running else None) for output_dir in output_dirs]
    if len({run["name"] for run in runs}) < len(runs):
        for run, output_dir in zip(runs, output_dirs, strict=True):
            run["name"] = run["drawn"]["label"] = str(output_dir)
    return _write(page, runs, f"{len(runs)} runs compared", bool(running))


def watch(output_dirs: Sequence[Path], page: Path) -> None:
    """Write a page about several runs again each minute, until none of them goes on, or Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while running := [output_dir for output_dir in output_dirs if DirectoryLock(output_dir).is_held()]:
            write_comparison(output_dirs, page, running)
            time.sleep(REFRESH_SECONDS)
    write_comparison(output_dirs, page)


def sweep_reports(output_dir: Path) -> None:
    """Delete the reports that killed processes left half-written."""
    for partial in output_dir.glob(f"{REPORT}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def _write(path: Path, runs: list[Run], title: str, is_live: bool) -> Path:
    page = _render(runs, title, REFRESH_SECONDS if is_live else None).encode("utf-8", errors="replace")
    # a run writes its report while somebody has it made again
    with write_errors(path), whole(path, writer=str(os.getpid())) as partial:
        partial.write_bytes(page)
    return path


@cache
def _script(name: str) -> tuple[Markup, str]:
    """A script, ours or plotly's, and the hash by which the page's policy knows it."""
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs  # not for what writes no report

        text = get_plotlyjs()
    else:
        text = _file(name)
    return Markup(text), "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    page.filters |= {"number": _number, "seconds": _seconds, "size": _size, "duration": duration, "text": _as_text}
    page.filters |= {"percent": "{:.1%}".format, "total": lambda sizes: sum(sizes.values()), "marked": _marked}
    return page.from_string(_file("page.html"))


def _render(runs: list[Run], title: str, refresh_seconds: int | None) -> str:
    charts = _charts(runs)
    drawn: dict[str, Any] = {
        "runs": [run["drawn"] for run in runs],
        "charts": charts,
        "refresh_seconds": refresh_seconds,
    }
    # a browser reads a script element up to the first "</script": JSON does without "<"
    data = json.dumps(drawn, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _template().render(
        runs=runs,
        title=title,
        charts=charts,
        axes=_axes(runs),
        per_point=max([curve["per_point"] for run in drawn["runs"] for curve in run["curves"].values()], default=1),
        measured_by=TIMES,
        times={run["name"]: run["times"] for run in runs if run["times"]},
        colours=_colours([*TIMES], "other"),
        differing={part: _differing(runs, part) for part in ("config", "environment")},
        between=BETWEEN,
        is_live=refresh_seconds is not None,
        data=Markup(data),
        style=Markup(_file("page.css")),
        scripts=[_script(name) for name in (PLOTLY, "page.js")],
    )


def _read_run(output_dir: Path, state: State | None = None, history: History | None = None) -> Run:
    """Everything that the page shows of a run; under `drawn` what its script draws."""
    if history is None:
        history = read_history(output_dir / "metrics.jsonl")
    config, environment = _read_table(output_dir / "config.yaml"), _read_table(output_dir / "environment.json")
    profiles, unshown = read_profiles(output_dir)
    name, step, num_steps = _name(output_dir, config), history.last_step, environment.get("num_steps")
    if state is None and num_steps is not None and step >= num_steps:
        state = "finished"
    is_early = state == "finished" and num_steps is not None and step < num_steps
    reached = f"step {step:,}" + ("" if num_steps is None else f" of {num_steps:,}") + (", early" if is_early else "")
    by_state = {"finished": "finished at ", "running": "running, ", "stopped": "stopped at ", None: ""}
    evaluation, now = history.curves.get("eval_loss"), datetime.now(UTC)
    written = f"{now:%Y-%m-%d %H:%M} UTC"
    verb = "resumed" if history.num_starts > 1 else "started"
    started = [f"{verb} {environment['started']}"] if "started" in environment else []
    return {
        "name": name,
        "dates": [config.get("model") or "", *started, f"written {written}"],
        "badge": by_state[state] + reached,
        "progress": min(1, step / num_steps) if num_steps else None,
        "written": written,
        "history": history,
        "figures": _figures(history),
        "times": _times(history),
        "profiles": profiles,
        "profiles_not_shown": unshown,
        "exchanged": _exchanged(profiles),
        "parts": _colours(_parts(profiles), BETWEEN),
        "per_step": {figure: _per_step(profiles, figure) for figure in FIGURES},
        "command": _command(config),
        "config": config,
        "not_default": [name for name, value in DEFAULTS.items() if name in config and config[name] != value],
        "environment": environment,
        "drawn": {
            "label": name,
            "state": state,
            "written": now.isoformat(timespec="seconds"),
            "step": step,
            "num_steps": num_steps,
            "curves": {name: curve.summary() for name, curve in history.curves.items()},
            "positions": history.place(),
            "marks": {
                "save": [(at, f"saved at step {at:,}") for at in history.saves.with_last()],
                "resume": [(at, f"resumed after step {at:,}") for at in history.resumes.with_last()],
                "stop": [(step, f"stopped at step {step:,}")] if state == "stopped" or is_early else [],
                "warning": [(warning["step"], warning["text"]) for warning in history.warnings],
            },
            "best": evaluation and [evaluation.lowest_step, evaluation.lowest],
            "load": history.load and history.load.summary(),
        },
    }


def _name(output_dir: Path, config: dict[str, Any]) -> str:
    """--run-name or, where none was given, the last parts of the model's name and of the output directory's."""
    if (given := config.get("run_name")) not in (None, DEFAULTS["run_name"]):
        return str(given)
    return " / ".join(filter(None, [Path(str(config.get("model") or "")).name, output_dir.resolve().name]))


def _charts(runs: list[Run]) -> list[dict[str, Any]]:
    """How the page draws the curves, and where, in order."""
    logged = {name: run for run in reversed(runs) for name in run["history"].curves}
    metrics = metrics_of(logged)
    others = [(name, Chart(name)) for name in logged.keys() - {metric.name for metric in metrics}]
    charts: dict[str, dict[str, Any]] = {}
    for name, chart in [*((metric.name, metric.chart) for metric in metrics), *sorted(others)]:
        if chart is None or name not in logged:
            continue
        load = logged[name]["history"].load
        shared = {
            "title": chart.title,
            "note": chart.note,
            "format": chart.format,
            "include": chart.include,
            "references": chart.references(logged[name]["config"], load and load.num_experts),
            "reaches_all": chart.reaches_all,
            "series": [],
        }
        charts.setdefault(chart.title, shared)["series"].append(
            {"name": name, "label": chart.label, "smooth": chart.smooth}
        )
    return list(charts.values())


def _axes(runs: list[Run]) -> list[str]:
    """What curves may be drawn over: that of which all runs have positions."""
    positions = [run["drawn"]["positions"] for run in runs]
    axes = ("tokens", "epochs", "seconds")
    return ["steps", *(axis for axis in axes if all(None not in places.get(axis, [None]) for places in positions))]


def _figures(history: History) -> dict[str, tuple[str, str, str]]:
    """Single figures of the whole run, what each is of, and its style; without those that were not logged."""
    loss, evaluation, speed, mfu, memory = map(
        history.curves.get, ("loss", "eval_loss", "tokens_per_second", "mfu", "peak_memory_mb")
    )
    dropped, starts, seconds = history.dropped_tokens, history.num_starts, history.wall_seconds
    figures = {
        "Loss": loss and (_number(loss.last.mean), f"at step {loss.last.last_step:,}", ""),
        "Best eval loss": evaluation and (_number(evaluation.lowest), f"at step {evaluation.lowest_step:,}", ""),
        "Tokens seen": history.tokens and (thousands(history.tokens), "without padding", ""),
        "Tokens/s": speed and (thousands(speed.median()), "median", ""),
        "MFU": mfu and (f"{mfu.median():.1%}", "median", ""),
        "Peak memory": memory and (_size(1e6 * memory.highest()), "of any rank", ""),
        "Wall time": seconds and (duration(seconds), f"in {starts} starts" if starts > 1 else "", ""),
        "Dropped tokens": dropped is not None and (f"{dropped:,}", "all logged steps", "bad" if dropped else "good"),
        "Skipped steps": history.skipped_steps and (f"{history.skipped_steps:,}", "not finite", "bad"),
    }
    return {label: figure for label, figure in figures.items() if figure}


def _times(history: History) -> dict[str, float]:
    """What the wall time was spent on, by TIMES; nothing if no step was timed."""
    steps, data, *pauses = history.seconds.values()
    known = [min(data, steps), max(steps - data, 0.0), *pauses]
    return dict(zip(TIMES, [*known, max(history.wall_seconds - sum(known), 0.0)], strict=True)) if steps else {}


def _colours(names: Sequence[str], rest: str) -> dict[str, str]:
    """Of each part of a bar; of the one that is none, and of those beyond eight, others."""
    return {name: "rest" if name == rest else f"part-{at}" if at < 8 else "more" for at, name in enumerate(names)}


def _parts(profiles: list[Profile]) -> list[str]:
    """Those with the most time first, and last what is no part's."""
    sums: Counter[str] = Counter()
    for profile in profiles:
        sums.update({name: figures["seconds"] for name, figures in profile["parts"].items()})
    return sorted(sums, key=lambda name: (name == BETWEEN, -sums[name]))


def _title(profile: Profile) -> str:
    first, last = profile["steps"][0], profile["steps"][-1]
    return f"rank {profile['rank']}, " + (f"step {first:,}" if first == last else f"steps {first:,} – {last:,}")


def _per_step(profiles: list[Profile], figure: str) -> dict[str, dict[str, float]]:
    """Of each profile, by its title, the figure of each part."""
    return {
        _title(profile): {name: figures[figure] / len(profile["steps"]) for name, figures in profile["parts"].items()}
        for profile in profiles
    }


def _exchanged(profiles: list[Profile]) -> float | None:
    """The share of profiled time in which ranks exchange; None without a profile."""
    parts = [(name, figures["seconds"]) for profile in profiles for name, figures in profile["parts"].items()]
    total = sum(seconds for _, seconds in parts) or 1
    return sum(seconds for name, seconds in parts if name in EXCHANGE) / total if parts else None


def _differing(runs: list[Run], part: str) -> list[list[str]]:
    """What is not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run[part])
    rows = [[str(name), *(_as_text(run[part].get(name, "–")) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _command(config: dict[str, Any]) -> str | None:
    """The command line that asks for these settings; None where this release does not know them."""
    try:
        return shlex.join(["train_ep.py", *flags_of_config(TrainConfig(**config), ("model", "dataset", "output_dir"))])
    except (TypeError, ExpertMeshError):
        return None


_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML has it: a report is written again and again."""


def _read_table(file: Path) -> dict[str, Any]:
    """A YAML or JSON file with a table in it; empty where there is no such file."""
    try:
        text = file.read_text(encoding="utf-8")
        table = json.loads(text) if file.suffix == ".json" else yaml.load(text, _YAML)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ExpertMeshError(f"{file}: cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ExpertMeshError(f"{file}: contains a {type(table).__name__}, not a table")
    return table


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 or value == 0 else f"{1000 * value:.4g} ms"


def _size(value: float) -> str:
    return f"{thousands(value)}B"


def _marked(text: str) -> Markup:
    """A generated text, its special tokens marked."""
    marked = [
        Markup('<span class="special">{}</span>').format(part) if at % 2 else part
        for at, part in enumerate(SPECIAL.split(text))
    ]
    return Markup("").join(marked)
