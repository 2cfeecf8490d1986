"""Everything of ours lies under `expertmesh`, installed from a wheel, as editable, or in a checkout: a user's own
folders called `moe`, `training`, `sharding` or `checkpoints` neither break it nor are broken by it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import redirect_stdout
from importlib.metadata import packages_distributions
from io import StringIO
from pathlib import Path

import pytest
import yaml

import expertmesh
from expertmesh.training.cluster import commands as cluster_commands

ROOT = Path(__file__).parents[1]
OWN = ("__init__.py", "launch.py", "py.typed", "report.py")
"""Files of the package itself, beside its folders."""
OURS = ("moe", "sharding", "checkpoints", "training")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
USE = """
import json, sys
import expertmesh
import moe, sharding, checkpoints, training
from expertmesh import train_ep
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.report.page import write_report
import expertmesh.sharding.topology, expertmesh.checkpoints.files.dtypes
ours = [sys.modules[name].__file__ for name in sorted(sys.modules) if name.startswith("expertmesh")]
theirs = [package.MARKER for package in (moe, sharding, checkpoints, training)]
print(json.dumps([ours, theirs]))
"""
"""A user's script beside folders of these names."""


def sources() -> dict[str, Path]:
    """The files of each package of ours, Python's and others that it needs, by the path in a wheel."""
    found = {f"expertmesh/{name}": ROOT / f".package/expertmesh/{name}" for name in OWN}
    files = [ROOT / "train_ep.py", *(file for folder in OURS for file in (ROOT / folder).rglob("*"))]
    ours = [file for file in files if file.suffix in (".py", ".html", ".css", ".js", ".json", ".jinja")]
    return found | {f"expertmesh/{file.relative_to(ROOT)}": file for file in ours}


def environment(*paths: Path) -> dict[str, str]:
    """Environment of a process that finds our package in these folders, or where it is installed, and not by this
    test's own path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def python(*command: str, cwd: Path, paths: tuple[Path, ...] = (), interpreter: str = sys.executable) -> str:
    done = subprocess.run(
        [interpreter, *command], cwd=cwd, env=environment(*paths), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(to: Path) -> Path:
    """The checkout, to build in: pip and setuptools write beside what they build."""
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "train_ep.py"):
        shutil.copy(ROOT / name, to / name)
    for folder in (".package", *OURS):
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return to


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A user's directory, with folders of their own and a script."""
    directory = tmp_path / "theirs"
    for name in OURS:
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text('MARKER = "theirs"\n')
    (directory / "script.py").write_text(USE)
    return directory


def check_use(theirs: Path, ours: Path, paths: tuple[Path, ...] = (), **how: str) -> None:
    """The user's script: its own folders are its own, and all of ours comes from one place."""
    files, markers = json.loads(python("script.py", cwd=theirs, paths=paths, **how))
    assert markers == ["theirs"] * len(OURS)
    assert all(Path(file).is_relative_to(ours) for file in files)


def test_every_folder_is_a_package() -> None:
    """setuptools finds those with an `__init__.py`, and of the files beside Python's what is named, nothing else."""
    without = {str(path.parent) for path in sources().values() if not (path.parent / "__init__.py").exists()}
    assert without == {str(ROOT)}, "train_ep.py lies in none"
    data = {
        f"{package.replace('.', '/')}/{name}" for package, names in SETUPTOOLS["package-data"].items() for name in names
    }
    assert data == {path for path in sources() if not path.endswith(".py")}


def test_a_checkout_beside_a_users_folders(theirs: Path) -> None:
    """Found by a path alone, which is all that an editable install adds."""
    check_use(theirs, ROOT, paths=(ROOT / ".package",))


@pytest.mark.slow
def test_a_wheel(theirs: Path, tmp_path: Path) -> None:
    """Built without a network; it has all that type checkers read, too."""
    checkout, site = copied(tmp_path / "checkout"), tmp_path / "site"
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path))
    python("-m", "pip", *build, str(checkout), cwd=tmp_path)
    (file,) = tmp_path.glob("*.whl")
    wheel = zipfile.ZipFile(file)
    assert set(sources()) == {name for name in wheel.namelist() if name.startswith("expertmesh/")}
    wheel.extractall(site)
    check_use(theirs, site, paths=(site,))
    for module in ("train_ep", "launch", "moe", "sharding", "checkpoints", "report"):
        assert "usage:" in python("-m", f"expertmesh.{module}", "--help", cwd=theirs, paths=(site,))
    assert "--gpus" in python("-m", "expertmesh.sharding", "plan", "--help", cwd=theirs, paths=(site,))


@pytest.mark.slow
def test_an_editable_install(theirs: Path, tmp_path: Path) -> None:
    """In an environment that sees this one's packages, and comes before them."""
    checkout, venv = copied(tmp_path / "checkout"), tmp_path / "venv"
    python("-m", "venv", "--without-pip", "--system-site-packages", str(venv), cwd=tmp_path)
    interpreter = str(venv / "bin" / "python")
    find = "import site; print(site.getsitepackages()[0])"
    site = Path(python("-c", find, cwd=tmp_path, interpreter=interpreter).strip())
    # a venv sees the packages of the Python that it was made of, not those of a venv around it
    outer = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "outer.pth").write_text(f"{outer}\n")
    install = ["--python", interpreter, "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    python("-m", "pip", *install, "--ignore-installed", "--editable", str(checkout), cwd=tmp_path)
    check_use(theirs, checkout, interpreter=interpreter)
    for command in ("expertmesh-train", "expertmesh-launch", "expertmesh-checkpoints", "expertmesh-plan"):
        assert "usage:" in python(str(venv / "bin" / command), "--help", cwd=theirs, interpreter=interpreter)


def test_unknown_names_are_told(tmp_path: Path) -> None:
    """By a type checker or an editor, though the package finds its names as they are asked for."""
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    package = ROOT / ".package"
    # neither torch nor the modules behind the names are read
    check = [sys.executable, "-m", "mypy", "--follow-imports", "skip", "--explicit-package-bases", "--config-file="]
    check += ["--cache-dir", str(tmp_path / "cache"), str(package / "expertmesh/__init__.py"), str(script)]

    def told(text: str) -> str:
        script.write_text(text)
        environment = {**os.environ, "MYPYPATH": str(package)}
        return subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    names = ("__version__", *expertmesh.__all__)
    known = "import expertmesh\n" + "".join(f"print(expertmesh.{name})\n" for name in names)
    assert "Success" in told(known)
    said = told(f"{known}expertmesh.lode('x')\nfrom expertmesh import Trainr\n")
    assert 'Module has no attribute "lode"' in said
    assert 'has no attribute "Trainr"' in said


BLOCKED = """
import contextlib, importlib.machinery, io, json, sys
find, names = importlib.machinery.PathFinder.find_spec, set(sys.argv[1].split(","))
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, *others: None if name.partition(".")[0] in names else find(name, *others)
)
from expertmesh.checkpoints.__main__ import main as checkpoints
from expertmesh.moe.util.command import end_at_once
from expertmesh.training.cluster.commands import main as sharding
from expertmesh.train_ep import main as train

said = {}
for line in sys.stdin.read().splitlines():
    command, *arguments = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        said[f"{command} {arguments[0]}"] = globals()[command](arguments), out.getvalue()
assert not names & set(sys.modules)
print(json.dumps(said))
end_at_once(0)
"""
"""Commands, in a process that finds no package of these names, and ends as that of a command."""


def extras() -> set[str]:
    """What packages of our extras, and MegaBlocks, are imported as."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {re.split(r"[^\w-]", requirement)[0].lower() for name in wanted for requirement in wanted[name]}
    needed |= {"megablocks", "stanford-stk"}
    of = packages_distributions()
    return {name for name in of if any(package.lower().replace("_", "-") in needed for package in of[name])}


@pytest.mark.slow
def test_with_nothing_but_what_is_required(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Without triton, as beside a torch for CPUs, and without any extra, every command works, and a dry run of a GPU,
    whose torch brings triton, says the same."""
    rehearse = ["rehearse", "--model", str(tiny_model), "--gpus", "2", "--ep-size", "2", "--max-seq-length", "32"]
    rehearse += ["--bf16", "--adapter", "lora", "--base-dtype", "nf4", "--optim", "adamw_torch_8bit", "--json"]
    plan = ["plan", "--model", str(tiny_model), "--gpus", "2", "--micro-batch", "1", "--tp-size", "1", "--no-cache"]
    plan += ["--ep-size", "2", "--gradient-checkpointing", "none"]
    shards, out = str(tmp_path / "shards"), str(tmp_path / "out")
    lines = [
        ["sharding", *rehearse],
        ["sharding", *plan],
        ["checkpoints", "convert", str(tiny_model), shards, "--ep-size", "2"],
        ["checkpoints", "verify", str(tiny_model), shards],
        ["train", "--model", shards, "--dataset", str(tiny_data), "--max-steps", "1", "--use-cpu", "--output-dir", out],
    ]
    names = extras()
    assert {"triton", "pytest", "peft", "trl", "tensorboard"} <= names
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, ",".join(names)], input="\n".join(map(json.dumps, lines)), cwd=tmp_path,
        env=environment(ROOT / ".package"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [code for code, _ in said.values()] == [0] * len(lines), done.stderr
    with redirect_stdout(StringIO()) as told:
        assert cluster_commands.main(rehearse) == 0
    assert json.loads(said["sharding rehearse"][1]) == json.loads(told.getvalue())
    assert (Path(out) / "hf" / "config.json").exists()


def test_the_image_has_the_versions_of_make_install() -> None:
    dockerfile, makefile = ((ROOT / name).read_text() for name in (".docker/Dockerfile", "Makefile"))
    (torch,) = re.findall(r"^TORCH +\?= (.+)$", makefile, re.MULTILINE)
    assert f'ARG TORCH="{torch}"' in dockerfile
    (tested,) = re.findall(r"^TESTED \?= (.+)$", makefile, re.MULTILINE)
    assert f"--constraint {tested} " in dockerfile


def test_the_workflow_runs_ci_with_the_torch_of_make_install() -> None:
    (torch,) = re.findall(r"^TORCH +\?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["env"]["TORCH"].split()[0] == torch
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (minutes,) = re.findall(r"A run may take (\d+) minutes", (ROOT / ".ci/run").read_text())
    assert job["timeout-minutes"] >= int(minutes)


def test_megablocks_is_the_same_everywhere() -> None:
    wanted = set(re.findall(r"(?:megablocks|stanford-stk)==[\d.]+", (ROOT / "Makefile").read_text()))
    assert len(wanted) == 2
    for name in (".docker/Dockerfile", "docs/how-to/install.md"):
        assert set(re.findall(r"(?:megablocks|stanford-stk)==[\d.]+", (ROOT / name).read_text())) == wanted, name


@pytest.mark.slow
def test_the_commands_that_install_megablocks(tmp_path: Path) -> None:
    """As the page has them, beside this torch; what they install computes."""
    page = (ROOT / "docs/how-to/install.md").read_text()
    (commands,) = re.findall(r"## MegaBlocks\n.*?```sh\n(.*?)```", page, re.DOTALL)
    (target := tmp_path / "packages").mkdir()
    quiet = {"PIP_QUIET": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def bash(line: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-e", "-c", line]
        return subprocess.run(words, env=environment() | quiet | more, capture_output=True, text=True, timeout=600)

    if bash(f"pip download --no-deps --dest {tmp_path} stanford-stk==0.7.1", TORCH_CUDA_ARCH_LIST="8.0").returncode:
        pytest.skip("no packages of PyPI here")
    done = bash(commands, PIP_TARGET=str(target))
    assert done.returncode == 0, done.stderr
    code = "import megablocks, stk; print(megablocks.__file__, stk.__file__)"
    load = "from expertmesh.moe.kernels.megablocks import load_megablocks; load_megablocks()"
    said = python("-c", f"{load}\n{code}", cwd=tmp_path, paths=(target, ROOT / ".package"))
    assert all(Path(file).is_relative_to(target) for file in said.splitlines()[-1].split())


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [cited[name] for name in ("title", "version", "license")] == [
        project[name] for name in ("name", "version", "license")
    ]
