"""Fine-tune Hugging Face mixture-of-experts models with expert parallelism, from Python.

    import expertmesh

    engine = expertmesh.load("mistralai/Mixtral-8x7B-v0.1", ep_size=8, bf16=True, adapter="lora", lora_rank=16)
    for batch in batches:  # input_ids, labels and attention_mask, as a data collator of transformers makes them
        figures = engine.step(batch)
    engine.export("out")

`Trainer` does the same with `transformers.Trainer`, `TrainerMixin` with any class that is built on it, such as trl's
`SFTTrainer`; `RoutingReplay` stands before it with trl's `GRPOTrainer`. To import this package changes nothing in the
process, and loads neither torch nor transformers; each name is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .moe.registration import register_ep_implementation
    from .moe.util.errors import ExpertMeshError
    from .training.api.hf_trainer import Trainer, TrainerMixin
    from .training.api.library import load
    from .training.api.replay import RoutingReplay
    from .training.config.train_config import TrainConfig
    from .training.engine.engine import Engine
    from .training.steps.evaluate import Evaluation
    from .training.steps.step import StepResult

    __version__: str

__all__ = [
    "Engine",
    "Evaluation",
    "ExpertMeshError",
    "RoutingReplay",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "TrainerMixin",
    "load",
    "register_ep_implementation",
]

_MODULES = {
    "Engine": "training.engine.engine",
    "Evaluation": "training.steps.evaluate",
    "ExpertMeshError": "moe.util.errors",
    "RoutingReplay": "training.api.replay",
    "StepResult": "training.steps.step",
    "TrainConfig": "training.config.train_config",
    "Trainer": "training.api.hf_trainer",
    "TrainerMixin": "training.api.hf_trainer",
    "load": "training.api.library",
    "register_ep_implementation": "moe.registration",
}


if not TYPE_CHECKING:  # else no name would be unknown to editors and type checkers

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
            globals()[name] = value  # looked up only once
            return value
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError as error:
            raise AttributeError(f"{__name__} is not installed, and has no version") from error


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
