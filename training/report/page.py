"""Writes report.html: the figures as JSON inside a page with its own style and script, and no request to anywhere."""

import base64
import hashlib
import html
import json
import os
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
import yaml

from checkpoints import write_errors
from moe import ExpertMeshError
from moe.whole import PARTIAL, whole
from training.config import TrainConfig
from training.report.history import Curve, History, read_history
from training.report.profiles import BETWEEN, read_profiles

State = Literal["running", "stopped", "finished"]

REPORT = "report.html"

MAX_GENERATIONS = 20
"""Logged steps whose generations are shown, evenly spread from the first to the last."""
MAX_WARNINGS = 50
"""Warnings that are shown, the latest."""
MAX_SAMPLES = 16
"""Generations of a logged step that are shown."""
MAX_TEXT = 4000
"""Characters of a prompt or generation that are shown."""


def write_report(output_dir: Path, state: State | None = None) -> Path:
    """Write OUTPUT_DIR/report.html from the run's metrics.jsonl and, if there, its config.yaml, environment.json and
    profiles.

    It appears whole or not at all; an earlier one is replaced.

    Args:
        output_dir: of a run, which may still be going on.
        state: of the run, if known. Else it is finished if its last step is logged, and otherwise left open.

    Returns:
        The path of the report.

    Raises:
        ExpertMeshError: there is no metrics.jsonl, a file cannot be read, or the report cannot be written.
    """
    history = read_history(output_dir / "metrics.jsonl")
    config = _read_table(output_dir / "config.yaml")
    profiles, unshown = read_profiles(output_dir)
    content = _content(history, config, _read_table(output_dir / "environment.json"), state)
    page = render(content | {"profiles": profiles, "profiles_not_shown": unshown, "between": BETWEEN})
    report = output_dir / REPORT
    # a run writes it while somebody has it made again
    with write_errors(report), whole(report, writer=str(os.getpid())) as partial:
        partial.write_bytes(page)
    return report


def sweep_reports(output_dir: Path) -> None:
    """Delete the reports that killed processes left half-written."""
    for partial in output_dir.glob(f"{REPORT}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def render(content: dict[str, Any]) -> bytes:
    """The page. Its policy lets a browser use its own script and style, known by their hashes, and load nothing."""
    page, style, script = (
        files("training.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js")
    )
    # a browser reads a script element up to the first "</script": JSON does without "<"
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_policy_hash(script)}'; style-src '{_policy_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = Template(page).substitute(
        title=html.escape(content["name"]), policy=policy, style=style, data=data, script=script
    )
    return text.encode("utf-8", errors="replace")


def _policy_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _content(
    history: History, config: dict[str, Any], environment: dict[str, Any], state: State | None
) -> dict[str, Any]:
    """Everything that the page shows."""
    num_steps = _num_steps(history, config)
    if state is None and num_steps is not None and history.last_step >= num_steps:
        state = "finished"
    return {
        "name": str(config.get("run_name") or "expertmesh"),
        "model": config.get("model"),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "state": state,
        "step": history.last_step,
        "num_steps": num_steps,
        "summary": _summary(history),
        "curves": {name: curve.downsampled() for name, curve in history.curves.items()},
        "load": None if history.load is None else history.load.summary(),
        "warnings": history.warnings[-MAX_WARNINGS:],
        "generations": [_shown(logged) for logged in _spread(history.generations, MAX_GENERATIONS)],
        "num_generations": len(history.generations),
        "adapters": _of_adapters(history.adapter_norms),
        "max_grad_norm": config.get("max_grad_norm"),
        "config": {str(name): _as_text(value) for name, value in config.items()},
        "not_default": [name for name, value in _defaults().items() if name in config and config[name] != value],
        "environment": {str(name): _as_text(value) for name, value in environment.items()},
        "unreadable_lines": history.unreadable_lines,
    }


def _of_adapters(norms_LE: list[list[float]]) -> dict[str, str]:
    """In words, by layer: how far the experts' adapters have come, and which have not begun."""
    told = {}
    for layer, norms_E in enumerate(norms_LE):
        still = [str(expert) for expert, norm in enumerate(norms_E) if norm == 0]
        spread = f"{min(norms_E):.3g} to {max(norms_E):.3g}, mean {sum(norms_E) / len(norms_E):.3g}"
        told[f"layer {layer}"] = spread + (f"; no token has reached {', '.join(still)}" if still else "")
    return told


def _num_steps(history: History, config: dict[str, Any]) -> int | None:
    """How many steps the run is to make; None where the files do not say.

    Without --max-steps they follow from the steps an epoch has. Those follow from a step and its epoch, if the error
    of that, which is logged to four decimals, leaves only one whole number.
    """
    if config.get("max_steps", -1) >= 0:
        return int(config["max_steps"])
    if history.epoch <= 0 or "num_train_epochs" not in config:
        return None
    steps_per_epoch = history.epoch_step / history.epoch
    if steps_per_epoch * 5e-5 / history.epoch >= 0.5:
        return None
    return int(np.ceil(config["num_train_epochs"] * round(steps_per_epoch)))


def _summary(history: History) -> dict[str, Any]:
    """Single figures of the whole run; None for what was not logged."""
    curves = history.curves
    loss, evaluation = curves.get("loss"), curves.get("eval_loss")
    best_value, best_step = min(zip(evaluation.values, evaluation.steps, strict=True)) if evaluation else (None, None)
    memory = curves.get("peak_memory_mb")
    return {
        "loss": loss.values[-1] if loss else None,
        "best_eval_loss": best_value,
        "best_eval_step": best_step,
        "tokens": history.tokens or None,
        "tokens_per_second": _median(curves.get("tokens_per_second")),
        "mfu": _median(curves.get("mfu")),
        "peak_memory_mb": max(memory.values) if memory else None,
        "wall_seconds": history.wall_seconds or None,
        "num_starts": history.num_starts,
        "dropped_tokens": history.dropped_tokens,
        "skipped_steps": history.skipped_steps,
    }


def _median(curve: Curve | None) -> float | None:
    return float(np.median(curve.values)) if curve else None


def _spread(items: list[dict[str, Any]], at_most: int) -> list[dict[str, Any]]:
    if len(items) <= at_most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, at_most).round().astype(int)]


def _shown(logged: dict[str, Any]) -> dict[str, Any]:
    samples = [{"prompt": _cut(s["prompt"]), "text": _cut(s["text"])} for s in logged["samples"][:MAX_SAMPLES]]
    return {"step": logged["step"], "samples": samples, "not_shown": len(logged["samples"]) - len(samples)}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"


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
        raise ExpertMeshError(f"{file}: holds a {type(table).__name__}, not a table")
    return table
