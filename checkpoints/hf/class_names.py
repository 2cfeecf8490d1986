"""What modules are called in the class that config.json names, onto which PEFT loads an adapter.

The model that is trained may be a part of it: a language model beside a vision tower has another path there.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...moe.hf_model.build import model_class
from ...moe.util.errors import ExpertMeshError


@dataclass(frozen=True)
class ClassNames:
    """
    Attributes:
        model: of that class, on the meta device; None where our model is all of it.
        paths: (path in our model, path there) of the parts that both have.
    """

    model: nn.Module | None = None
    paths: tuple[tuple[str, str], ...] = ()

    def there(self, name: str) -> str:
        """What a module or tensor of our model is called in that class. A name of that class stays as it is."""
        if self.here(name) != name:
            return name
        return _renamed(name, self.paths)

    def here(self, name: str) -> str:
        """What a module or tensor of that class is called in our model. Any other name stays as it is."""
        return _renamed(name, [(there, here) for here, there in self.paths])


def whole_model(config: Any) -> Any:
    """On the meta device, the model that a config names, with all its parts; None where it is a causal language model
    without others, which is trained as it is. A config that names no class of transformers' own is of the one trained.

    Raises:
        ExpertMeshError: transformers cannot build it.
    """
    import transformers

    trained = model_class(config)
    name = next(iter(config.architectures or ()), "")
    named: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(named, type) or not issubclass(named, transformers.PreTrainedModel):
        named = trained
    if not isinstance(config, named.config_class or ()):
        return None
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if named is trained and is_causal and config.get_text_config() is config:
        return None
    try:
        with torch.device("meta"):
            return named(deepcopy(config))
    except Exception as error:
        raise ExpertMeshError(f"transformers cannot build the {named.__name__} of this config.json: {error}") from error


def class_names(model: Any, config: Any) -> ClassNames:
    """Build the class that a config names, if our model is not all of it, and find our model in it.

    Args:
        model: from `build_model`, sharded or not.
        config: that it was built from.

    Raises:
        ExpertMeshError: transformers cannot build that class.
    """
    whole = whole_model(config)
    if whole is None:
        return ClassNames()
    if isinstance(model, type(whole)):
        return ClassNames(whole)
    inner = getattr(model, model.base_model_prefix)
    found = next((path for path, module in whole.named_modules() if isinstance(inner, type(module))), None)
    head = whole.get_output_embeddings()
    if found is None or head is None:
        return ClassNames()
    paths = (model.base_model_prefix, found), (_path(model, model.get_output_embeddings()), _path(whole, head))
    return ClassNames(whole, paths)


def _path(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _renamed(name: str, paths: Any) -> str:
    for old, new in paths:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name
