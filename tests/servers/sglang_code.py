"""SGLang's own code that reads adapters, out of its wheel: its files run as they are, and whatever else they import is
replaced by stand-ins, as it needs a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FILES = frozenset(
    f"sglang.srt.{name}" for name in ("lora.lora", "lora.lora_config", "lora.utils", "layers.utils.common")
)
SLICES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What SGLang stacks; an A for each lies one above the other (`get_stacked_multiply`)."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "sglang.srt.layers.utils":
            return getattr(import_module("sglang.srt.layers.utils.common"), name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, wheel: Path):
        self.wheel = wheel

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        if name in FILES:
            return spec_from_file_location(name, self.wheel / f"{name.replace('.', '/')}.py")
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def sglang_of(wheel: Path) -> Iterator[None]:
    """Have `sglang` be that of an unpacked wheel."""
    finder = _Finder(wheel)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


def known_targets() -> frozenset[str]:
    found: frozenset[str] = import_module("sglang.srt.lora.utils")._KNOWN_LORA_TARGET_MODULES
    return found


def normalized(names: list[str]) -> set[str]:
    found: set[str] = import_module("sglang.srt.lora.utils").get_normalized_target_modules(names)
    return found


def deltas_of(adapter: Path, config: Any, rows: Callable[[str], int]) -> dict[str, Tensor]:
    """B · A, scaled, of every matrix, as a server loads it that was given `--lora-target-modules all`.

    Args:
        config: of the base.
        rows: how many a matrix has, to take apart what is stacked.

    Raises:
        Exception: SGLang's own, where it does not load the adapter.
    """
    utils = import_module("sglang.srt.lora.utils")
    read = import_module("sglang.srt.lora.lora_config").LoRAConfig(path=str(adapter))
    lora = import_module("sglang.srt.lora.lora").LoRAAdapter("mine", read, config, None, None)
    lora.initialize_weights_from_tensors(load_file(adapter / "adapter_model.safetensors"))
    found: dict[str, Tensor] = {}
    for weights in (layer.weights for layer in lora.layers):
        for name in weights:
            utils.get_target_module_name(name, known_targets())  # raises in `load_lora_weight_to_buffer`, too
        for name, a in ((name, tensor) for name, tensor in weights.items() if "lora_A" in name):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            parent, _, module = path.rpartition(".")
            parts = SLICES.get(module, (module,))
            assert len(parts) == utils.get_stacked_multiply(module)
            sizes = [rows(f"{parent}.{part}") for part in parts]
            pairs = zip(a.chunk(len(parts)), weights[name.replace("lora_A", "lora_B")].split(sizes), strict=True)
            found |= {f"{parent}.{part}": lora.scaling * b @ own for part, (own, b) in zip(parts, pairs, strict=True)}
    return found
