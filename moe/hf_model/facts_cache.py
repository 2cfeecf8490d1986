"""Facts of models that were built before, so that a model of the same config and code need not run again.

They are kept in memory and, where a package's release or a file says what the code is, in the user's cache directory.
What facts depend on is in their key: the config, the code that the model runs, our sources and the packages that are
installed. So none is ever out of date, and the directory may be deleted at any time.
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

from ..experts.model_facts import Attention, ModelFacts, SeenExperts
from ..experts.router_stats import RouterKind
from ..util.atomic_write import whole
from ..util.sources import sources_digest
from ..util.user_cache import cache_directory

_OURS = __name__.partition(".")[0]
_RELEASED = {"torch", "transformers", _OURS, *sys.stdlib_module_names}
"""Packages of which the key of a file says which code they have."""

_known: dict["FactsKey", ModelFacts] = {}


@dataclass(frozen=True)
class FactsKey:
    """config: all that it says, as JSON. code: classes of the modules, and what else their files define or import, as
    it is in this process: whoever has exchanged a part of it has another key."""

    config: str
    code: frozenset[Any]


def key_of(model: Any) -> FactsKey:
    """
    Args:
        model: as transformers builds it.
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
    return FactsKey(json.dumps([type(model).__name__, names, content], sort_keys=True), frozenset(code))


def _defined(file: str) -> Iterator[Any]:
    for value in vars(sys.modules[file]).values():
        if inspect.isfunction(value) or inspect.isclass(value):
            yield value


def _package(code: Any) -> str:
    return str(code.__module__).partition(".")[0]


def recall(key: FactsKey) -> ModelFacts | None:
    """The facts of a model with this key, if one was built before."""
    if key not in _known and (file := _file(key)) is not None and (facts := _read(file)) is not None:
        _known[key] = facts
    return _known.get(key)


def keep(key: FactsKey, facts: ModelFacts) -> None:
    """Keep facts for `recall`; where the directory cannot be written, in this process alone."""
    _known[key] = facts
    file = _file(key)
    if file is None:
        return
    content = json.dumps(asdict(facts), default=sorted)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file, writer=f"{platform.node()}.{os.getpid()}") as partial:
            partial.write_text(f"{_digest(content)}\n{content}\n", encoding="utf-8")


def _file(key: FactsKey) -> Path | None:
    """None where another process with this key might have other code."""
    import transformers

    if "dev" in transformers.__version__ or not {_package(code) for code in key.code} <= _RELEASED:
        return None
    families = sorted({code.__module__ for code in key.code if code.__module__.startswith("transformers.models.")})
    everything = [key.config, [(name, _file_digest(name)) for name in families], _surroundings()]
    try:
        return cache_directory("facts") / f"{_digest(json.dumps(everything))[:32]}.json"
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


def _read(file: Path) -> ModelFacts | None:
    """What was written; nothing where there is no such file, or a damaged one."""
    try:
        digest, content = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return _facts(json.loads(content)) if digest == _digest(content) else None


def _facts(content: dict[str, Any]) -> ModelFacts:
    experts = {
        path: SeenExperts(**{**each, "kind": RouterKind(**each["kind"])}) for path, each in content["experts"].items()
    }
    attention = tuple(Attention(**each) for each in content["attention"])
    left_out = {path: frozenset(names) for path, names in content["left_out"].items()}
    sets = {name: frozenset(content[name]) for name in ("read_weights", "uncalled", "fp32_names")}
    return ModelFacts(**{**content, **sets, "experts": experts, "attention": attention, "left_out": left_out})
