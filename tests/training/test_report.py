"""report.html: what it shows of a run's files, its size, and that nothing in it is taken for code or loads anything."""

import base64
import hashlib
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from expertmesh.checkpoints.files.lock import DirectoryLock
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.report import history
from expertmesh.training.report.__main__ import main
from expertmesh.training.report.history import MAX_TEXT, ExpertLoad, Stretch
from expertmesh.training.report.page import State, write_comparison, write_report
from expertmesh.training.report.profiles import BETWEEN, MAX_PROFILES, read_profiles

LAYERS, EXPERTS = 2, 4


def training(step: int, **changes: Any) -> dict[str, Any]:
    """A line as the training loop writes it; expert 3 of layer 1 gets nothing, expert 0 of layer 0 twice the mean."""
    return {
        "step": step, "epoch": round(step / 10, 4), "seconds": 2.0 * step, "learning_rate": 1e-3 / step,
        "loss": 4 - step / 10, "grad_norm": 1.0, "tokens": 100, "target_tokens": 60, "tokens_per_second": 50.0,
        "peak_memory_mb": 300 + step, "expert_load_max_over_mean": 2.0, "dead_experts": 0.125,
        "router_entropy": [1.0, 1.25], "dropped_tokens": 0, "expert_tokens": [[100, 40, 40, 20], [60, 60, 80, 0]],
        **changes,
    }  # fmt: skip


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss), "eval_seconds": 1.0}


def make_run(output_dir: Path, lines: list[dict[str, Any]], **config: Any) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (output_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    TrainConfig(model="m/model", dataset=["d"], **config).save(output_dir / "config.yaml")
    return output_dir


def content_of(page: Path) -> tuple[str, dict[str, Any]]:
    """A page without plotly, and what its script draws."""
    text = page.read_text(encoding="utf-8")
    assert text.count(get_plotlyjs()) == 1
    text = text.replace(get_plotlyjs(), "")
    data = re.search(r'<script type="application/json" id="run">(.*?)</script', text, re.DOTALL)
    assert data is not None
    drawn: dict[str, Any] = json.loads(data[1])
    return text, drawn


def tiles(page: str) -> dict[str, str]:
    """The single figures of a run."""
    return dict(re.findall(r'<span class="quiet">([^<]*)</span><b>([^<]*)</b>', page))


def rows(page: str, title: str) -> dict[str, str]:
    """A table of settings, by its title."""
    table = page.partition(f"<h3>{title}</h3>")[2].partition("</table>")[0]
    return {html.unescape(n): html.unescape(v) for n, v in re.findall(r"<td>(.*?)</td><td>(.*?)</td>", table)}


def report(output_dir: Path, *lines: dict[str, Any], state: State | None = None, **config: Any) -> Any:
    """The page of a run that has logged these lines, without plotly, and what its script draws of the run."""
    if lines:
        make_run(output_dir, list(lines), **config)
    page, drawn = content_of(write_report(output_dir, state))
    return page, drawn["runs"][0]


def test_content(tmp_path: Path) -> None:
    lines = [training(step) for step in range(1, 6)] + [evaluation(5, 3.0)]
    lines += [training(step, dropped_tokens=step - 5) for step in range(6, 8)] + [evaluation(7, 3.5)]
    make_run(tmp_path, lines, max_steps=20, run_name="first try", learning_rate=0.25)
    (tmp_path / "environment.json").write_text('{"torch": "2.13.0", "ranks": 4, "num_steps": 20}')
    page, content = report(tmp_path)
    assert "<title>first try</title>" in page
    assert "m/model" in page
    assert (content["step"], content["num_steps"], content["best"]) == (7, 20, [5, 3.0])
    assert tiles(page) == {
        "Loss": "3.3", "Best eval loss": "3", "Tokens seen": "700", "Tokens/s": "50", "Peak memory": "307MB",
        "Wall time": "0:14", "Dropped tokens": "3",
    }  # fmt: skip
    assert content["curves"]["eval_loss"] == {"steps": [5, 7], "mean": [3.0, 3.5], "per_point": 1}
    assert content["curves"]["router_entropy"]["low"] == [1.0] * 7
    assert content["curves"]["router_entropy"]["high"] == [1.25] * 7
    assert not {"mfu", "tflops_per_second", "balance_loss", "z_loss"} & set(content["curves"])
    assert content["load"]["load"] == [[[200, 80, 80, 40], [120, 120, 160, 0]]] * 7
    assert content["load"]["entropy"] == [[1.0, 1.25]] * 7
    changed = rows(page, "Differs from the defaults")
    assert changed["learning_rate"] == "0.25"
    assert {"run_name", "max_steps"} < changed.keys()
    assert not {"seed", "pipeline_chunks"} & changed.keys()
    assert rows(page, "Environment") == {"torch": "2.13.0", "ranks": "4", "num_steps": "20"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"metrics.jsonl", "config.yaml", "environment.json", "report.html"}


@pytest.mark.parametrize(("given", "shown"), [("expertmesh", "Mixtral-8x7B / first"), ("trial", "trial")])
def test_a_page_is_titled_by_model_and_run(tmp_path: Path, given: str, shown: str) -> None:
    """The name that trackers take where none is given says nothing of a run."""
    out = tmp_path / "first"
    out.mkdir()
    (out / "metrics.jsonl").write_text(json.dumps(training(1)) + "\n")
    TrainConfig(model="/models/Mixtral-8x7B", dataset=["d"], run_name=given).save(out / "config.yaml")
    page, content = content_of(write_report(out))
    assert f"<title>{shown}</title>" in page
    assert content["runs"][0]["label"] == shown


@pytest.mark.parametrize(
    ("last", "given", "shown"),
    [(19, None, None), (20, None, "finished"), (19, "stopped", "stopped"), (20, "running", "running")],
)
def test_state(tmp_path: Path, last: int, given: State | None, shown: State | None) -> None:
    (tmp_path / "environment.json").write_text('{"num_steps": 20}')
    content = report(tmp_path, training(last), state=given)[1]
    assert (content["num_steps"], content["state"]) == (20, shown)


def test_starts_of_a_resumed_run_are_added_up(tmp_path: Path) -> None:
    """The last two are of starts of their own: the steps of each took 2 seconds."""
    lines = [training(step, seconds=seconds) for step, seconds in enumerate([10, 20, 5, 15, 1, 2.5], start=1)]
    page = report(tmp_path, *lines)[0]
    assert tiles(page)["Wall time"] == "0:38"
    assert "in 4 starts" in page


def test_a_file_of_an_older_release_alone(tmp_path: Path) -> None:
    line = training(1)
    for name in ("seconds", "peak_memory_mb", "dead_experts", "router_entropy", "dropped_tokens"):
        del line[name]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page, content = report(tmp_path)
    assert not {"Wall time", "Dropped tokens"} & tiles(page).keys()
    assert (content["load"]["entropy"], content["label"]) == ([[None, None]], tmp_path.name)
    assert "<h2>Settings" not in page


def test_a_run_that_has_logged_little(tmp_path: Path) -> None:
    """Nothing yet, a cut-off line, skipped steps alone, evaluations alone."""
    for text in ("", '{"step": 3, "lo'):
        (tmp_path / "metrics.jsonl").write_text(text)
        page, content = report(tmp_path)
        assert (content["step"], content["curves"], content["load"]) == (0, {}, None)
        assert "No step has been logged yet" in page
        assert ("Unreadable lines of metrics.jsonl, skipped: 1" in page) == bool(text)
    make_run(tmp_path, [training(1), training(2)])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(training(3))[:-5])
    page, content = report(tmp_path)
    assert content["step"] == 2
    assert "skipped: 1" in page
    skipped = {"step": 1, "loss": None, "grad_norm": None, "skipped_steps": 1, "tokens": 10}
    page, content = report(tmp_path, skipped)
    assert (content["load"], content["curves"], "Loss" in tiles(page)) == (None, {}, False)
    content = report(tmp_path, evaluation(3, 1.0))[1]
    assert (content["step"], content["load"], list(content["curves"])) == (3, None, ["eval_loss", "eval_perplexity"])


def test_values_that_are_missing_or_not_finite_are_left_out(tmp_path: Path) -> None:
    """Of a layer without scores, too."""
    broken = training(2, loss=math.nan, router_entropy=[math.inf, 1.0], grad_norm=10**400)
    curves = report(tmp_path, training(1), broken, training(3))[1]["curves"]
    assert curves["loss"]["steps"] == curves["router_entropy"]["steps"] == [1, 3]
    lines = [training(step, router_entropy=[None, float(step)]) for step in (1, 2)]
    content = report(tmp_path, *lines)[1]
    assert content["curves"]["router_entropy"]["mean"] == [1.0, 2.0]
    assert all(layers[0] is None for layers in content["load"]["entropy"])


def test_losses_by_data_set(tmp_path: Path) -> None:
    """One chart for each, of training and evaluation; beside them what another script has registered."""
    lines = [training(1, **{"loss/code": 2.0, "loss/chat.v2": 3.0, "mine": 1.0}), {"step": 1, "eval_loss/code": 2.5}]
    make_run(tmp_path, lines)
    _, drawn = content_of(write_report(tmp_path))
    lines_of = {chart["title"]: [(s["name"], s["label"]) for s in chart["series"]] for chart in drawn["charts"]}
    assert lines_of["Loss: code"] == [("loss/code", "training"), ("eval_loss/code", "evaluation")]
    assert lines_of["Loss: chat.v2"] == [("loss/chat.v2", "training")]
    assert lines_of["mine"] == [("mine", "")]
    assert not [title for title in lines_of if "/" in title]


def test_skipped_steps_and_warnings(tmp_path: Path) -> None:
    """An interval without a finite step has neither losses nor routing."""
    skipped = training(2, loss=None, grad_norm=None, steps=1, skipped_steps=1)
    for name in ("expert_load_max_over_mean", "dead_experts", "router_entropy", "dropped_tokens", "expert_tokens"):
        del skipped[name]
    warning = {"step": 2, "warning": "loss spike"}
    page, content = report(tmp_path, training(1), skipped, warning, training(3, skipped_steps=4))
    assert content["curves"]["loss"]["steps"] == content["curves"]["grad_norm"]["steps"] == [1, 3]
    assert (tiles(page)["Skipped steps"], tiles(page)["Tokens seen"]) == ("5", "300")
    assert content["marks"]["warning"] == [[2, "loss spike"]]
    assert "Step 2: loss spike" in page


HOSTILE = "</script><script>alert(1)</script><!--<script><img src=x onerror=alert(1)> ${data} $data \u2028 \x00 é 漢"


def test_text_of_the_run_is_never_markup(tmp_path: Path) -> None:
    generations = {"step": 1, "generations": [{"prompt": HOSTILE, "text": "\ud83d" + HOSTILE, "reference": HOSTILE}]}
    warning = {"step": 1, "warning": HOSTILE}
    page, content = report(tmp_path, training(1), generations, warning, run_name=HOSTILE, prompt_column=HOSTILE)
    assert page.count("<script") == page.count("</script") == 3
    assert "<img" not in page
    assert "<!--" not in page
    assert content["label"] == rows(page, "Differs from the defaults")["prompt_column"] == HOSTILE
    texts = [html.unescape(text) for text in re.findall(r'<pre class="\w+" dir="auto">(.*?)</pre>', page, re.DOTALL)]
    assert texts == [HOSTILE, "?" + HOSTILE, HOSTILE]


def test_page_loads_nothing(tmp_path: Path) -> None:
    """Its policy names its own scripts, of which one is plotly, and nothing else."""
    page = report(tmp_path, training(1))[0]
    assert re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]*)""", page) == ["data:,"]
    assert not re.search(r"url\(|@import|@font-face|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    digests = [
        hashlib.sha256(text.encode()).digest() for text in re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    ]
    assert allowed["script-src"].split() == [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert len(digests) == 2


def test_long_run_keeps_its_extremes_and_sums(tmp_path: Path) -> None:
    steps = 10 * history.MAX_POINTS + 3
    lines = [training(step, loss=1.0) for step in range(1, steps + 1)]
    lines[5000]["loss"], lines[7000]["loss"] = 9.0, 0.5
    page, content = report(tmp_path, *lines)
    loss = content["curves"]["loss"]
    assert len(loss["steps"]) <= history.MAX_POINTS
    assert loss["steps"][-1] == steps
    assert loss["per_point"] == 16
    assert (max(loss["high"]), min(loss["low"])) == (9.0, 0.5)
    assert loss["mean"][5000 // 16] == pytest.approx((15 * 1.0 + 9.0) / 16, rel=1e-5)
    load = content["load"]
    assert len(load["load"]) <= 64
    assert load["first_steps"][0] == 1
    assert load["last_steps"][-1] == steps
    assert [last + 1 for last in load["last_steps"][:-1]] == load["first_steps"][1:]
    assert tiles(page)["Tokens seen"] == "1M"
    # one token among many is not none
    few = training(1, expert_tokens=[[10**6, 10**6, 1, 0]], router_entropy=[1.0])
    assert report(tmp_path, few)[1]["load"]["load"] == [[[200, 200, 1, 0]]]


@pytest.mark.parametrize("num_logged", [1, 7, 8, 9, 16, 17, 100, 1000])
def test_expert_load_adds_neighbours_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, num_logged: int) -> None:
    monkeypatch.setattr(history, "MAX_CELLS", 8 * LAYERS * EXPERTS)
    tokens_NLE = np.random.default_rng(0).integers(0, 1000, (num_logged, LAYERS, EXPERTS))
    load = ExpertLoad(LAYERS, EXPERTS)
    for i, tokens_LE in enumerate(tokens_NLE):
        load.add(Stretch(i, i, np.column_stack([tokens_LE, np.full(LAYERS, float(i))])))
    assert len(load.items) <= 8
    assert {s.count for s in load.items[:-1]} <= {load.length}
    for s in load.items:
        assert s.count == s.last_step - s.first_step + 1
        assert (s.total[:, :-1] == tokens_NLE[s.first_step : s.last_step + 1].sum(axis=0)).all()
    assert sum(s.count for s in load.items) == num_logged
    mean = load.summary()["entropy"][0][0]
    assert mean == pytest.approx((load.items[0].count - 1) / 2)


def test_size_is_bounded_for_many_experts_and_long_generations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, 101):
        tokens = rng.integers(0, 10**6, (48, 128)).tolist()
        lines.append(training(step, expert_tokens=tokens, router_entropy=[1.0] * 48))
        lines.append({"step": step, "generations": [{"prompt": "p", "text": "<" * 10_000}] * 2})
    page = report(tmp_path, *lines)[0]
    assert len(page) < 4e6
    shown = [int(step) for step in re.findall(r"<summary>after step (\d+)</summary>", page)]
    assert (shown[0], shown[-1], len(shown) <= 17) == (1, 100, True)
    assert f"{len(shown)} of 100 times, evenly spread" in page
    assert f">{'&lt;' * MAX_TEXT}… (6,000 more" in page


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, [training(1)])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere/metrics.jsonl: cannot be read: No such file" in error
    assert "--output-dir" in error
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "expertmesh.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "report.html")), done.stderr
    (tmp_path / "config.yaml").write_text("- a\n- list\n")
    with pytest.raises(ExpertMeshError, match=r"config\.yaml: contains a list, not a table"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, [training(1)])
    before = write_report(tmp_path).read_bytes()

    def disk_is_full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_is_full)
    with pytest.raises(ExpertMeshError, match=r"report\.html: cannot be written: No space left on device"):
        write_report(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "metrics.jsonl", "report.html"]
    assert (tmp_path / "report.html").read_bytes() == before


def profile(rank: int, steps: list[int], **changes: Any) -> dict[str, Any]:
    parts = {
        "norms": {"seconds": 0.5, "calls": 12, "allocated_bytes": 4096},
        BETWEEN: {"seconds": 1.5, "calls": 0, "allocated_bytes": 0},
    }
    return {"rank": rank, "steps": steps, "device": "cpu", "wall_seconds": 2.0, "parts": parts, **changes}


def add_profile(output_dir: Path, name: str, content: str) -> None:
    (output_dir / "profile").mkdir(exist_ok=True)
    (output_dir / "profile" / name).write_text(content, encoding="utf-8")


def test_profiles_by_steps_and_ranks(tmp_path: Path) -> None:
    make_run(tmp_path, [training(1)])
    assert "Profiled steps" not in report(tmp_path)[0]
    made = [profile(0, [5]), profile(2, [5]), profile(10, [5]), profile(0, [12, 13])]
    for entry in reversed(made):
        add_profile(tmp_path, f"rank-{entry['rank']}.{entry['steps'][0]}.json", json.dumps(entry))
    page = report(tmp_path)[0]
    titles = ["rank 0, step 5", "rank 2, step 5", "rank 10, step 5", "rank 0, steps 12 – 13"]
    assert re.findall(r"<summary>(rank .*?)</summary>", page) == titles
    # of the last, a mean over its two steps
    table = page.partition(f"<summary>{titles[-1]}</summary>")[2].partition("</table>")[0]
    cells = [re.findall(r"<td>(?:<span.*?</span>)?(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert cells == [["norms", "250 ms", "25.0%", "6", "2.05kB"], [BETWEEN, "750 ms", "75.0%", "", "0B"]]
    assert "more profiles are in the directory" not in page
    for rank in range(MAX_PROFILES + 3):
        add_profile(tmp_path, f"rank-{rank}.5.json", json.dumps(profile(rank, [5])))
    page = report(tmp_path)[0]
    assert re.findall(r"<summary>(rank .*?)</summary>", page) == [f"rank {r}, step 5" for r in range(MAX_PROFILES)]
    assert "4 more profiles are in the directory" in page


def test_what_is_no_profile_is_passed_over(tmp_path: Path) -> None:
    make_run(tmp_path, [training(1)])
    add_profile(tmp_path, "rank-0.step-5.json", json.dumps(profile(0, [5])))
    add_profile(tmp_path, "rank-0.step-5.trace.json.gz", "no trace")
    broken = [
        "", "[]", "{}", "[" * 50_000, json.dumps(profile(0, [])), json.dumps(profile(0, [5], parts={})),
        json.dumps(profile(0, [5], parts={"norms": {"seconds": 1}})), json.dumps(profile(0, [5], parts=[])),
        json.dumps(profile(0, [5], wall_seconds=-1)), json.dumps(profile(0, [5], wall_seconds=math.nan)),
        json.dumps({**profile(0, [5]), "rank": None}), json.dumps(profile(0, [5])) + " " * 2**17,
    ]  # fmt: skip
    for number, text in enumerate(broken):
        add_profile(tmp_path, f"rank-{number + 1}.step-5.json", text)
    assert read_profiles(tmp_path) == ([profile(0, [5])], 0)
    assert report(tmp_path)[0].count("<summary>rank") == 1


def test_where_time_went_and_what_curves_are_marked_with(tmp_path: Path) -> None:
    lines = [training(step, steps=1, step_seconds=1.5, data_seconds=0.25) for step in (1, 2)]
    lines += [
        evaluation(2, 3.0),
        {"step": 2, "generations": [], "generate_seconds": 0.5},
        {"step": 2, "save_seconds": 2.0},
    ]
    # the clock of another start, which resumed after step 2
    lines += [training(3, steps=1, step_seconds=1.0, data_seconds=0.0, seconds=2.0), {"step": 3, "save_seconds": 1.0}]
    (tmp_path / "environment.json").write_text('{"num_steps": 5}')
    page, content = report(tmp_path, *lines, state="finished", learning_rate=0.25)
    table = page.partition("<h2>Where the time went")[2].partition("</table>")[0]
    found = re.findall(r"</span>([a-z ]+)</td>\s*<td>(.*?),", table)
    # of three steps; of the clocks' six seconds nothing is left
    assert dict(found) == {
        "waiting for data": "166.7 ms", "training": "1.167 s", "evaluation": "333.3 ms",
        "sample generations": "166.7 ms", "saving": "1 s",
    }  # fmt: skip
    marks = {"save": [2, 3], "resume": [2], "stop": [3], "warning": []}
    assert {kind: [step for step, _ in found] for kind, found in content["marks"].items()} == marks
    assert content["positions"] == {
        "steps": [1, 2, 3], "tokens": [100, 200, 300], "epochs": [0.1, 0.2, 0.3], "seconds": [2, 4, 6],
    }  # fmt: skip
    assert "finished at step 3 of 5, early" in page
    assert not {"save_seconds", "generate_seconds"} & content["curves"].keys()
    assert "train_ep.py --model m/model --dataset d --output-dir output --learning-rate 0.25" in page


@pytest.mark.parametrize("number", [1, 7, 8, 9, 1000])
def test_what_is_bounded_has_the_first_and_the_last(number: int) -> None:
    spread = history.Bounded(8)
    for item in range(number):
        spread.add(item)
    kept = spread.with_last()
    assert (kept[0], kept[-1]) == (0, number - 1)
    assert min(number, 4) <= len(kept) <= 9
    assert len(set(np.diff(kept[:-1]))) <= 1


def test_several_runs_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in "ab"]
    for run, rate in zip(runs, (0.25, 0.5), strict=True):
        run.mkdir()
        make_run(run, [training(1)], learning_rate=rate)
    page = tmp_path / "both.html"
    command = [*map(str, runs), "--output", str(page)]
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text, content = content_of(page)
    assert [run["label"] for run in content["runs"]] == ["model / a", "model / b"]
    assert re.search(r"<tr><td>learning_rate</td><td>0\.25</td><td>0\.5</td></tr>", text)
    assert "<td>model</td>" not in text.partition("<details")[0], "which is the same"
    assert content["refresh_seconds"] is None
    for wrong, said in (
        ([runs[0], runs[0] / ".." / "a"], "a run is given twice"),
        ([tmp_path] * 9, "9 runs are too many; a page shows up to 8"),
        ([runs[0], "--output", "x.html"], "--output is for several runs"),
        ([runs[0], "--watch"], "--watch is for several runs"),
    ):
        assert main(list(map(str, wrong))) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("ends_by", [None, KeyboardInterrupt])
def test_a_page_of_several_runs_is_written_again_until_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: type[BaseException] | None
) -> None:
    """Or until Ctrl-C. Only while one goes on, an open page loads itself again."""
    runs, page = [tmp_path / name for name in "ab"], tmp_path / "both.html"
    locks = [DirectoryLock(run) for run in runs]
    for run, lock in zip(runs, locks, strict=True):
        run.mkdir()
        make_run(run, [training(1)])
        lock.acquire()
    found: list[tuple[list[int], list[str | None], int | None]] = []

    def look() -> None:
        content = content_of(page)[1]
        steps, states = zip(*((run["step"], run["state"]) for run in content["runs"]), strict=True)
        found.append((list(steps), list(states), content["refresh_seconds"]))

    def a_minute(seconds: float) -> None:
        look()
        make_run(runs[1], [training(1), training(2)])
        locks[len(found) - 1].release()
        if ends_by is not None:
            raise ends_by

    monkeypatch.setattr(time, "sleep", a_minute)
    assert main([*map(str, runs), "--output", str(page), "--watch"]) == 0
    look()
    both, one, none = ([1, 1], ["running"] * 2, 60), ([1, 2], [None, "running"], 60), ([1, 2], [None] * 2, None)
    assert found == ([both, one, none] if ends_by is None else [both, none])
    for lock in locks:
        lock.release()


def test_only_the_page_of_a_run_that_goes_on_is_loaded_again(tmp_path: Path) -> None:
    make_run(tmp_path, [training(1)])
    for state, expected in (("running", '"refresh_seconds":60'), ("stopped", '"refresh_seconds":null')):
        assert expected in report(tmp_path, state=state)[0]  # type: ignore[arg-type]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")

MEASURING = """<iframe style="width: 375px; height: 800px; border: 0"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
const found = {};
let loads = 0;
frame.onload = async () => {
  loads += 1;
  const [page, view] = [frame.contentDocument, frame.contentWindow];
  try { await measure(page, view, loads); } catch (error) { found.error = String(error.stack); }
  document.querySelector("pre").textContent = JSON.stringify(found);
};
const card = (page, title) => [...page.querySelectorAll(".curves")].find((card) => card.textContent.startsWith(title));
const plot = (page, title) => card(page, title).querySelector(".plot");
const field = (page, name) => page.querySelector(`[name=${name}]`);
const isLine = (trace) => trace.mode?.startsWith("lines");
const lines = (plot) => plot.data.filter(isLine).map(({ x, y }) => [[...x], [...y]]);
function choose(page, view, name, value) {
  if (field(page, name).type === "checkbox") return field(page, name).click();
  field(page, name).value = value;
  field(page, name).dispatchEvent(new view.Event("input", { bubbles: true }));
}
async function measure(page, view, loads) { MEASURE }
frame.src = "SOURCE";
</script>"""


def in_browser(directory: Path, source: str, measure: str, seconds: int = 4) -> dict[str, Any]:
    """What a script finds in a page of the directory, in a window 375 pixels wide."""
    (directory / "measuring.html").write_text(MEASURING.replace("MEASURE", measure).replace("SOURCE", source))
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
        *(f"--virtual-time-budget={1000 * seconds}", f"--user-data-dir={directory / 'profile-of-browser'}"),
        *("--dump-dom", (directory / "measuring.html").as_uri()),
    ]
    page = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search("<pre>(.+?)</pre>", page)
    assert found is not None, page[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in measured, measured["error"]
    return measured


NARROW = """
  const right = (shown) => shown.getBoundingClientRect().right;
  const parts = [...page.querySelectorAll(".plot .main-svg, .bar")];
  found.parts = parts.map((part) => [right(part), right(part.closest(".card")) - 1]);
  found.tables = [...page.querySelectorAll(".wide")].map((table) => table.scrollWidth - table.clientWidth);
  found.too_wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const drawn = (plot) => plot.querySelectorAll(".trace, .heatmaplayer image").length;
  found.drawn = [...page.querySelectorAll(".plot")].map(drawn);
  const marks = plot(page, "Loss").data.filter((trace) => trace.yaxis === "y2").flatMap((trace) => trace.text);
  found.marks = marks.map((mark) => mark.replace("<br>", " "));
  await view.Plotly.Fx.hover(plot(page, "Loss"), { xval: 4 });
  found.labels = plot(page, "Loss").querySelector(".hoverlayer").textContent;
  found.markup = plot(page, "Loss").querySelectorAll(".hoverlayer a, .hoverlayer [style*=bold]").length;
  found.colours = ["--page", "--text"].map((name) => view.colour(name.slice(2)));
"""


WARNING = "experts without <b>tokens</b> & <a href='javascript:alert(1)'>more</a> " * 3


def write_two_runs(directory: Path) -> None:
    timed = {"steps": 1, "step_seconds": 1.5, "data_seconds": 0.25}
    lines = [training(step, router_entropy=[0.2 + step / 10, 2 - step / 10], **timed) for step in range(1, 6)]
    lines += [
        evaluation(3, 3.0),
        {"step": 4, "save_seconds": 1.0},
        {"step": 4, "warning": WARNING},
    ]
    lines += [{"step": 5, "generations": [{"prompt": "p" * 999, "text": "t</s>", "reference": "r"}]}]
    for name in "ab":
        (directory / name).mkdir()
        make_run(directory / name, lines, run_name=f"{name}-{'long' * 12}", learning_rate=len(name))
        add_profile(directory / name, "rank-0.5.json", json.dumps(profile(0, [5])))
        write_report(directory / name)
    write_comparison([directory / "a", directory / "b"], directory / "both.html")


@needs_browser
@pytest.mark.parametrize("source", ["a/report.html", pytest.param("both.html", marks=pytest.mark.slow)])
def test_in_a_narrow_window(tmp_path: Path, source: str) -> None:
    """On a telephone nothing leaves its card, all is drawn, and a run's text is no markup for plotly either."""
    write_two_runs(tmp_path)
    measured = in_browser(tmp_path, source, NARROW)
    assert measured["too_wide"] == 0
    assert len(measured["tables"]) > 1
    # those that compare runs scroll
    assert not any(measured["tables"]) or source == "both.html", measured["tables"]
    assert len(measured["parts"]) > 8
    assert all(right <= card for right, card in measured["parts"]), measured["parts"]
    assert all(measured["drawn"])
    assert "saved at step 4" in measured["marks"]
    assert "<b>tokens</b> & <a href=" in measured["labels"]
    assert measured["markup"] == 0
    assert len(set(measured["colours"])) == 2


DRAWN = """
  for (const title of ["Loss", "Gradient norm", "Router entropy"]) found[title] = lines(plot(page, title));
  choose(page, view, "x", "tokens");
  found.tokens = lines(plot(page, "Loss"))[0][0];
  choose(page, view, "x", "seconds");
  found.seconds = lines(plot(page, "Loss"))[0][0];
  const [grid, time] = page.querySelectorAll(".load .plot");
  found.shares = grid.data[0].customdata.map((row) => row.map(([share]) => share));
  found.crossed = grid.data[0].text;
  found.busiest = time.data[0].customdata.map((row) => row[0].slice(0, 2));
"""


@needs_browser
def test_what_is_drawn_is_what_was_logged(tmp_path: Path) -> None:
    """plotly's lines and cells against the lines of metrics.jsonl."""
    logged = [training(step, router_entropy=[0.2 + step / 10, 2 - step / 10]) for step in range(1, 6)]
    (tmp_path / "run").mkdir()
    write_report(make_run(tmp_path / "run", [*logged, evaluation(2, 3.0), evaluation(4, 2.5)]))
    measured = in_browser(tmp_path, "run/report.html", DRAWN)
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    of = {name: [line[name] for line in steps] for name in ("step", "loss", "grad_norm", "router_entropy", "seconds")}
    assert measured["Loss"] == [[of["step"], pytest.approx(of["loss"])], [[2, 4], [3.0, 2.5]]]
    assert measured["Gradient norm"] == [[of["step"], of["grad_norm"]]]
    entropies = np.array(of["router_entropy"])
    band = [entropies.min(axis=1), entropies.max(axis=1), entropies.mean(axis=1)]
    assert [y for _, y in measured["Router entropy"]] == [pytest.approx(list(edge)) for edge in band]
    assert measured["tokens"] == list(np.cumsum([line["tokens"] for line in steps]))
    assert measured["seconds"] == of["seconds"]
    tokens_LE = np.array(steps[-1]["expert_tokens"])
    assert np.allclose(measured["shares"], tokens_LE / tokens_LE.mean(axis=1, keepdims=True))
    assert np.array_equal(np.array(measured["crossed"]) == "×", tokens_LE == 0)
    assert measured["busiest"] == [[0, 2.0], [2, 1.6]]


CHOICES = """
  const shown = plot(page, "Loss");
  const state = (name) => (found[name] = [shown.layout.xaxis.title.text, shown.layout.yaxis.type, view.location.hash]);
  state("first");
  choose(page, view, "x", "tokens");
  choose(page, view, "log");
  state("chosen");
  await view.Plotly.relayout(shown, { "xaxis.range[0]": 150, "xaxis.range[1]": 350 });
  await new Promise((done) => setTimeout(done, 200));
  state("zoomed");
  found.ranges = ["Loss", "Gradient norm"].map((title) => plot(page, title).layout.xaxis.range);
  page.getElementById("reset").click();
  state("reset");
  found.generated = [...page.querySelectorAll(".sample pre")].map((made) => made.textContent);
  found.special = [...page.querySelectorAll(".special")].map((made) => made.textContent);
"""


@needs_browser
def test_what_a_reader_chooses(tmp_path: Path) -> None:
    """The axis, its scale and a part of it are drawn at once, and are kept in the address."""
    write_two_runs(tmp_path)
    measured = in_browser(tmp_path, "a/report.html", CHOICES)
    assert measured["first"] == ["steps", "linear", ""]
    assert measured["chosen"] == ["tokens", "log", "#x=tokens&log=true"]
    assert measured["zoomed"] == ["tokens", "log", "#x=tokens&log=true&from=150&to=350"]
    assert measured["ranges"] == [[150, 350]] * 2, "all charts follow"
    assert measured["reset"] == measured["chosen"]
    assert measured["generated"][1:] == ["t</s>", "r"]
    assert measured["special"] == ["</s>"]


AGAIN = """
  if (loads === 1) {
    choose(page, view, "log");
    view.scrollTo(0, 700);
    return;
  }
  found.loads = loads;
  found.scroll = view.scrollY;
  found.log = field(page, "log").checked;
"""


@needs_browser
@pytest.mark.slow
def test_the_page_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path) -> None:
    """From a file, where it was and with what was chosen."""
    lines = [training(step) for step in range(1, 6)]
    report(tmp_path, *lines, state="running")
    measured = in_browser(tmp_path, "report.html", AGAIN, seconds=70)
    assert measured == {"loads": 2, "scroll": 700, "log": True}
