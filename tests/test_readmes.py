"""What pages say of files, flags, commands and links is so, and each folder's README names all that is in it."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.plan_accuracy import cases
from expertmesh.training.config.train_config import make_parser
from tests.commands_page import parser_within

ROOT = Path(__file__).parents[1]
SOURCES = ("*.py", "*.yaml", "*.sh", "*.sbatch", "*.html", "*.css", "*.js")
FOLDERS = sorted(
    path
    for path in ROOT.iterdir()
    if path.is_dir() and not path.name.startswith(".") and (any(path.glob("*.py")) or any(path.glob("*.yaml")))
)
READMES = [ROOT / "README.md", *sorted(file for folder in FOLDERS for file in folder.rglob("*.md"))]
"""And the pages beside them."""
DOCS = ROOT / "docs"
PAGES = [*READMES, *sorted(DOCS.rglob("*.md"))]
CODE_WIDTH = 85
"""Characters of a line of code that a page of the site shows without scrolling."""
FOREIGN_FLAGS = {
    *("--no-deps", "--no-build-isolation"),
    *("--numprocesses", "--extra-index-url", "--index-url", "--no-index", "--find-links", "--constraint"),
    *("--gpus", "--rm", "--shm-size", "--local-dir", "--target", "--outfile", "--outtype", "--override-kv", "--base"),
    *(
        "--port",
        "--enable-lora",
        "--enable-mixed-moe-lora-format",
        "--lora-modules",
        "--lora-paths",
        "--lora-target-modules",
        "--max-lora-rank",
        "--model-path",
    ),
    *("--model", "--model_args", "--tasks", "--include_path", "--build"),
}
"""Of tools that are not ours, but for torchrun's: pytest-xdist, pip, docker, hf, cmake, llama.cpp, vLLM, SGLang,
lm-eval."""
FILES_ELSEWHERE = ("train_ep.py", "convert_hf_to_gguf.py", "convert_lora_to_gguf.py")
"""Of the root, and of llama.cpp."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(readme: Path) -> list[str]:
    """Its command lines and code spans."""
    text = readme.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return commands(readme) + [" ".join(span.split()) for span in spans]


def commands(readme: Path) -> list[str]:
    """The lines of its blocks of shell code, those that end in a backslash joined with the next."""
    return [line for block in blocks(readme, "sh") for line in block.replace("\\\n", " ").splitlines()]


def blocks(readme: Path, language: str) -> list[str]:
    """Its blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)


def flags(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)


@cache
def options_of(module: str) -> set[str]:
    """The flags of `python -m module`: of a benchmark, by its parser; of others, whose parsers mostly live inside a
    `main`, by the `add_argument` calls in its source and in that of the modules whose `add_..._flags` it imports."""
    module = module.removeprefix("expertmesh.")
    if module.startswith("benchmarks.") and module != "benchmarks.inject":
        return {option for action in parser_within(module)._actions for option in action.option_strings}
    file = ROOT / HANDED_OVER.get(module, module).replace(".", "/")
    source = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
    tree = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    calls = [node for node in tree if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    texts = [a.value for call in added for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    package = source.parent.relative_to(ROOT).parts
    shared = [
        ".".join((*package[: len(package) - node.level + 1], str(node.module)) if node.level else (str(node.module),))
        for node in tree
        if isinstance(node, ast.ImportFrom) and any(re.fullmatch(r"add_\w+_flags", a.name) for a in node.names)
    ]
    own = {text for text in texts if text.startswith("--")} | {"--help"}
    return own.union(*(options_of(imported) for imported in shared))


@cache
def training_options() -> set[str]:
    return {option for action in make_parser()._actions for option in action.option_strings}


TORCHRUN = {option for action in get_args_parser()._actions for option in action.option_strings}
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in FOLDERS
    for file in folder.rglob("*.py")
    if folder.name != "tests" and '\nif __name__ == "__main__"' in file.read_text(encoding="utf-8")
)


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
OF_TRAINING = ("train_ep", "my_train.py", "torchrun.sh", "slurm.sbatch", "sharding rehearse", "sharding plan")
"""Programs that take the flags of a run."""
HANDED_OVER = {
    "sharding": "training.cluster.commands",
    "moe": "training.cluster.families_command",
    "report": "training.report",
}
"""What a command hands its flags to."""
REHEARSE = "expertmesh.training.planning.rehearsal.rehearse_flags"
"""What `python -m expertmesh.sharding rehearse` hands its flags to."""
PLAN = "expertmesh.training.planning.plan_flags"
"""And `plan`."""


def options_for(command: str) -> set[str]:
    """What flags a command line may have: those of all programs in it."""
    known = set(FOREIGN_FLAGS)
    if "torchrun" in command:
        known |= TORCHRUN
    if any(program in command for program in OF_TRAINING):
        known |= training_options()
    if "sharding rehearse" in command:
        known |= options_of(REHEARSE)
    if "sharding plan" in command:
        known |= options_of(PLAN)
    for module in re.findall(r"-m (?:expertmesh\.)?([\w.]+)", command):
        known |= options_of(module) if module in (*MODULES, *HANDED_OVER) else set()
    return known


def slugs(readme: Path) -> set[str]:
    """The anchors of a README's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for pattern in SOURCES:
            yield from (file for file in folder.rglob(pattern) if file.name != "__init__.py")


def test_every_folder_has_a_readme() -> None:
    assert {folder / "README.md" for folder in FOLDERS} <= set(READMES)


@pytest.mark.parametrize("readme", PAGES, ids=name_of)
def test_what_a_page_says_is_so(readme: Path) -> None:
    for check in (check_links, check_files, check_flags, check_commands, check_code, check_tables):
        check(readme)


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=name_of)
def test_pages_of_the_site_link_within_it(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    assert all((page.parent / target).resolve().is_relative_to(DOCS) for target in targets)


def test_every_file_is_named_by_the_readme_above_it() -> None:
    """All but tests, whose folders mirror the others and whose first lines say what they test."""
    unnamed = []
    for file in sources():
        if file.is_relative_to(ROOT / "tests") and file.name.startswith("test_"):
            continue
        readme = next(folder / "README.md" for folder in file.parents if (folder / "README.md").exists())
        spans = [Path(span.rstrip("/")).name for span in code(readme)]
        if readme == ROOT / "README.md" or file.name not in spans:
            unnamed.append(f"{name_of(file)} in {name_of(readme)}")
    assert not unnamed


def check_links(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", readme.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = readme.parent / path if path else readme
        assert file.is_file(), f"{target}: no such file"
        if anchor:
            assert anchor in slugs(file), f"{target}: has no such heading"


def check_files(readme: Path) -> None:
    """What looks like a source file or a folder of the project: the path itself, or, for a bare name, one in here."""
    for span in code(readme):
        for word in re.findall(r"[\w./-]+\.(?:py|sh|sbatch|js|css)\b", span):
            near = [readme.parent / word, ROOT / word]
            found = any(path.exists() for path in near) or (
                "/" not in word
                and (any(readme.parent.rglob(word)) or word in FILES_ELSEWHERE or word.startswith("my_"))
            )
            assert found, f"{word}: no such file; one that the reader writes is called my_..."
        if re.fullmatch(r"(?:moe|sharding|checkpoints|training|configs|benchmarks|tests)(?:/\w+)+/?", span):
            assert (ROOT / span).exists() or (ROOT / f"{span}.py").exists(), f"{span}: no such file or folder"


def check_flags(readme: Path) -> None:
    """In a command line to that command, be it in a remark behind it; elsewhere to any."""
    everything = training_options() | TORCHRUN | {flag.replace("_", "-") for flag in FOREIGN_FLAGS}
    everything = everything.union(*(options_of(module) for module in (*MODULES, REHEARSE, PLAN)))
    for span in code(readme):
        for flag in flags(span):
            assert flag.replace("_", "-") in everything, f"{flag}: no command has it"
    for command in commands(readme):
        for flag in flags(command):
            assert flag in options_for(command), f"{flag}: not a flag of: {command}"


def check_commands(readme: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for span in code(readme):
        for target in re.findall(r"\bmake ([a-z]+)", span):
            assert target in targets, f"make {target}: the Makefile has no such target"
        for module in re.findall(r"-m (?:expertmesh\.)?((?:moe|sharding|checkpoints|training|benchmarks)[\w.]*)", span):
            assert module in MODULES, f"{module}: cannot be run"
        for script in re.findall(r"\bexpertmesh-\w+", span):
            assert script in SCRIPTS, f"{script}: is not installed"
        for module in re.findall(r"^(benchmarks\.\w+)", span):
            assert module in MODULES, f"{module}: cannot be run"


def test_commands_are_those_of_an_installed_package() -> None:
    """In READMEs, recipes, help and messages alike: `-m sharding` is found in a checkout alone."""
    package = "|".join(folder.name for folder in FOLDERS if (folder / "__init__.py").exists())
    for file in [*PAGES, *(file for file in sources() if file.parts[len(ROOT.parts)] != "tests")]:
        text = file.read_text(encoding="utf-8")
        for module in re.findall(rf"-m\s+[\"'`]*((?:expertmesh|{package})\b[\w.]*)", text):
            assert module.startswith(("expertmesh.", "benchmarks.", "tests.")), f"{name_of(file)}: -m {module}"
            assert find_spec(module.rstrip(".")) is not None, f"{name_of(file)}: -m {module}"
    for target in SCRIPTS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


def check_code(readme: Path) -> None:
    """It can be read; on pages of the site it does not scroll, but for records of data."""
    if readme.is_relative_to(DOCS) or readme == ROOT / "README.md":
        shown = [
            line
            for language in ("sh", "python", "text")
            for block in blocks(readme, language)
            for line in block.splitlines()
        ]
        assert not [line for line in shown if len(line) > CODE_WIDTH]
    for block in blocks(readme, "python"):
        ast.parse(block)
    for block in blocks(readme, "json"):
        assert all(json.loads(line) for line in block.splitlines())


def check_tables(readme: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


def test_the_planners_accuracy_is_told_alike() -> None:
    """The number of settings is the same on the root's page, on the planner's, and in the command."""
    planner = (DOCS / "explanation" / "planning.md").read_text(encoding="utf-8")
    told = r"(\d+) of the command's\s(\d+) settings were measured.*?memory is within 5 % in\s(all|\d+)"
    ((measured, settings, within),) = re.findall(told, planner, re.DOTALL)
    assert int(settings) == len(cases())
    assert within == "all"
    root = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"Against {measured} measured settings on CPU ranks, peak memory is within 5 %" in root
