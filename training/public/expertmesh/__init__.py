"""Fine-tune Hugging Face mixture-of-experts models with expert parallelism, from Python.

    import expertmesh

    engine = expertmesh.load("mistralai/Mixtral-8x7B-v0.1", ep_size=8, bf16=True, adapter="lora", lora_rank=16)
    for batch in batches:  # input_ids, labels and attention_mask, as a data collator of transformers makes them
        figures = engine.step(batch)
    engine.export("out")

`Trainer` does the same with `transformers.Trainer`, `TrainerMixin` with any class that is built on it, such as trl's
`SFTTrainer`. To import this package changes nothing in the process, and loads neither torch nor transformers; each name
is imported when it is first asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if not Path(__file__).with_name("moe").is_dir():
    # a checkout, perhaps installed as editable: the packages lie in its root
    __path__.append(str(Path(__file__).parents[3]))

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    __version__: str

    from expertmesh.moe.base.errors import ExpertMeshError
    from expertmesh.moe.registration import register_ep_implementation
    from expertmesh.training.config.load_settings import LoadSettings
    from expertmesh.training.engine import Engine
    from expertmesh.training.evaluate import Evaluation
    from expertmesh.training.hf_trainer import Trainer, TrainerMixin
    from expertmesh.training.library import load
    from expertmesh.training.step import StepResult
else:
    _find = import_on_demand(__name__)

    def __getattr__(name):
        if name != "__version__":
            return _find(name)
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError as error:
            raise AttributeError(f"{__name__} is not installed, and has no version") from error


__all__ = [
    "Engine",
    "Evaluation",
    "ExpertMeshError",
    "LoadSettings",
    "StepResult",
    "Trainer",
    "TrainerMixin",
    "load",
    "register_ep_implementation",
]


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
