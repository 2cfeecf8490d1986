"""What was found out by trying models that were built before, their facts above all, so that a model of the same config
and code need not run again.

It is kept in memory and, where a package's release or a file says what the code is, in the user's cache directory.
What it depends on is in its key: the config, the code that the model runs, our sources and the packages that are
installed. So nothing is ever out of date, and the directory may be deleted at any time.
"""

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..experts.model_facts import Attention, ProbedFacts, SeenExperts
from ..experts.router_stats import RouterKind
from ..util.atomic_write import whole
from ..util.sources import sources_digest
from ..util.user_cache import cache_directory

_OURS = __name__.partition(".")[0]
_RELEASED = {"torch", "transformers", "accelerate", _OURS, *sys.stdlib_module_names}
"""Packages of which the key of a file says which code they have."""

_known: dict[tuple["FactsKey", str], str] = {}


@dataclass(frozen=True)
class FactsKey:
    """config: all that it says, as JSON. code: classes of the modules, and what else their files define or import, as
    it is in this process: whoever has exchanged a part of it has another key. images: whether the parts that images
    pass stay in the model."""

    config: str
    code: frozenset[Any]
    images: bool = False


def facts_key(model: Any, images: bool = False) -> FactsKey:
    """
    Args:
        model: as transformers builds it. images: see `FactsKey`.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config
    content = json.loads(config.to_json_string(use_diff=False))
    content.pop("_name_or_path", None)
    names = [str(part._attn_implementation) for part in (config, config.get_text_config())]
    classes = {type(module) for module in model.modules()}
    files = {kind.__module__ for kind in classes if _package(kind) != "torch"} | {masking_utils.__name__}
    attention = (ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    code = {
        *classes,
        *(kind.forward for kind in classes),
        *(value for file in files for value in _defined(file)),
        *(functions[name] for name in names for functions in attention if name in functions),
    }
    return FactsKey(json.dumps([type(model).__name__, names, content], sort_keys=True), frozenset(code), images)


def _defined(file: str) -> Iterator[Any]:
    for value in vars(sys.modules[file]).values():
        if inspect.isfunction(value) or inspect.isclass(value):
            yield value


def _package(code: Any) -> str:
    """Of a function that wraps another, and has its names, that of its own file."""
    module = code.__globals__["__name__"] if inspect.isfunction(code) else code.__module__
    return str(module).partition(".")[0]


def recall(key: FactsKey) -> ProbedFacts | None:
    """The facts of a model with this key, if one was built before."""
    content = recall_trial(key, "facts")
    if content is None:
        return None
    experts = {
        path: SeenExperts(**{**each, "kind": RouterKind(**each["kind"])}) for path, each in content["experts"].items()
    }
    attention = tuple(Attention(**each) for each in content["attention"])
    left_out = {path: frozenset(names) for path, names in content["left_out"].items()}
    sets = {name: frozenset(content[name]) for name in ("read_weights", "handed", "uncalled", "fp32_names")}
    return ProbedFacts(**{**content, **sets, "experts": experts, "attention": attention, "left_out": left_out})


def keep_facts(key: FactsKey, facts: ProbedFacts) -> None:
    """Keep facts for `recall`; where the directory cannot be written, in this process alone."""
    keep_trial(key, "facts", asdict(facts))


def recall_trial(key: FactsKey, what: str) -> Any:
    """What was found out by trying a model with this key, as JSON has it; None: it was not tried before.

    Args:
        what: was tried.
    """
    if (key, what) not in _known and (file := _file(key, what)) is not None:
        # None where there is no such file, or a damaged one
        with suppress(OSError, ValueError):
            digest, content = file.read_text(encoding="utf-8").splitlines()
            if digest == _digest(content):
                _known[key, what] = content
    return json.loads(_known.get((key, what), "null"))


def keep_trial(key: FactsKey, what: str, found: Any) -> None:
    """Keep what was found out for `recall_trial`."""
    content = _known[key, what] = json.dumps(found, default=sorted)
    file = _file(key, what)
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file, writer=f"{platform.node()}.{os.getpid()}") as partial:
                partial.write_text(f"{_digest(content)}\n{content}\n", encoding="utf-8")


def _file(key: FactsKey, what: str) -> Path | None:
    """None where another process with this key might have other code."""
    import transformers

    if "dev" in transformers.__version__ or not {_package(code) for code in key.code} <= _RELEASED:
        return None
    modules = {code.__module__ or "" for code in key.code}  # of what is made at run time there may be none
    families = sorted(name for name in modules if name.startswith("transformers.models."))
    everything = [what, key.config, key.images, [(name, _file_digest(name)) for name in families], _surroundings()]
    try:
        return cache_directory(what) / f"{_digest(json.dumps(everything))[:32]}.json"
    except RuntimeError:
        return None


@cache
def _file_digest(module: str) -> str:
    """Families are what people edit in an installed transformers."""
    file = sys.modules[module].__file__
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def _surroundings() -> tuple[str, ...]:
    """What else may decide which code a family runs: models take another way where some packages, or a GPU, are."""
    folders = [Path(folder) for folder in sys.path if Path(folder).is_dir()]
    installed = {
        file.name for folder in folders for file in folder.iterdir() if file.suffix in (".dist-info", ".egg-info")
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    ours = sources_digest(("moe", "training"))
    return (platform.python_version(), str(torch.__version__), str(accelerator), ours, *sorted(installed))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
