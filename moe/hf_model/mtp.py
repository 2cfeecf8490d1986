"""A layer for multi-token prediction (MTP): how checkpoints name it, and how it becomes a layer of our model.

After DeepSeek-V3 (arXiv 2412.19437, section 2.2). transformers' classes have no such layer, so the model is built with
one decoder layer more than its config says, of the family's own class. That layer gets what the others lack: two norms
and a projection before it, a norm after it. As a decoder layer among the others it is sharded and computed as they are.

Published names are of two kinds:

- numbered on from the last decoder layer N - 1 (DeepSeek-V3, GLM-4.5): `layers.N.enorm`, `hnorm`, `eh_proj` and
  `shared_head.norm` beside those of a decoder layer; `embed_tokens` and `shared_head.head` repeat the model's own;
- apart (Qwen3-Next, Qwen3.5): `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.fc`, `mtp.norm`, and those of
  a decoder layer in `mtp.layers.0`.

In our model it has the names of the first kind. Which is which, and the order of the projection's inputs, is as vLLM
has it (`deepseek_mtp`, `glm4_moe_mtp`, `qwen3_next_mtp` and `qwen3_5_mtp` in vllm/model_executor/models).

Shape suffixes: D model width.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..experts.model_facts import facts_of
from ..experts.model_layers import decoder_layers
from ..util.errors import ExpertMeshError

_APART = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
"""Beginnings of names, and what takes their place in the layer."""
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
_NUMBERED = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_ATTRIBUTE = "_expertmesh_mtp"


@dataclass(frozen=True)
class PublishedMTP:
    """The layer for multi-token prediction that a checkpoint brings.

    Attributes:
        number: of the layer in our model: how many decoder layers there are beside it.
        like: the number of a decoder layer that has the same modules.
        is_apart: whether its tensors are called `mtp.*`, not numbered on.
    """

    number: int
    like: int
    is_apart: bool

    def ours(self, name: str, layers: str) -> str:
        """What a tensor of a checkpoint is called as a part of our model, whose decoder layers are at `layers`."""
        if self.is_apart:
            for theirs, ours in _APART.items():
                if name.startswith(theirs):
                    return f"{layers}.{self.number}.{ours}{name.removeprefix(theirs)}"
        return name

    def line(self, weight: float, detach: bool) -> str:
        """For a run's first lines."""
        where = "mtp.*" if self.is_apart else f"layer {self.number}"
        what = "the layer alone" if detach else "the whole model"
        return f"multi-token prediction: {where}, loss weighted {weight:g}, which trains {what}"

    def with_layer(self, config: Any) -> Any:
        """A config of transformers with one decoder layer more, of the kind that this one is of."""
        config = deepcopy(config)
        text = config.get_text_config()
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == self.number:
                setattr(text, name, [*value, value[self.like]])
        text.num_hidden_layers = self.number + 1
        return config


def find_mtp(names: Iterable[str], num_layers: int) -> PublishedMTP:
    """The layer for multi-token prediction among the tensors of a checkpoint.

    Args:
        num_layers: how many decoder layers its config has.

    Raises:
        ExpertMeshError: there is none, or more than one, or it is not built as those that are known.
    """
    layers: dict[int, set[str]] = {}
    apart: set[str] = set()
    for name in names:
        if name.startswith("mtp."):
            apart.add(name)
        elif (found := _NUMBERED.fullmatch(name)) and not name.endswith("inv_freq"):
            layers.setdefault(int(found[1]), set()).add(found[2])
    beyond = sorted(number for number in layers if number >= num_layers)
    if len(beyond) > 1:
        raise ExpertMeshError(
            f"--train-mtp: the checkpoint brings {len(beyond)} layers for multi-token prediction ({beyond[0]} to "
            f"{beyond[-1]}); only a single one can be trained"
        )
    if beyond:
        own = layers[beyond[0]]
    elif apart:
        own = {_in_layer(name) for name in apart}
    else:
        raise ExpertMeshError(
            f"--train-mtp: the checkpoint brings no layer for multi-token prediction: it has no tensors of layers "
            f"beyond the {num_layers} of config.json, and none called mtp.*; leave it out"
        )
    missing = [part for part in _OWN if not any(name.startswith(part) for name in own)]
    built = _parts(name for name in own if not name.startswith((*_OWN, "embed_tokens.", "shared_head.head.")))
    like = [number for number, found in layers.items() if number < num_layers and _parts(found) == built]
    if missing or not like:
        others = [_parts(found) for number, found in layers.items() if number < num_layers]
        differing = min((sorted(parts ^ built) for parts in others), key=len, default=[])
        why = "it has no " + ", ".join(part.rstrip(".") for part in missing)
        if not missing:
            why = f"it differs from all decoder layers, from the most similar one in {', '.join(differing)}"
        raise ExpertMeshError(
            f"--train-mtp: the checkpoint's layer for multi-token prediction is of a kind that is not known: {why}; "
            "leave it out"
        )
    return PublishedMTP(num_layers, max(like), not beyond)


def _in_layer(name: str) -> str:
    theirs = next((theirs for theirs in _APART if name.startswith(theirs)), "")
    return _APART.get(theirs, "") + name.removeprefix(theirs)


def _parts(names: Iterable[str]) -> set[str]:
    """The modules of a decoder layer, down to those of attention and MLP: experts may be stored in many ways."""
    return {".".join(name.split(".")[:2]) for name in names}


def add_mtp(model: Any, mtp: PublishedMTP) -> None:
    """Give a model's last layer what a layer for multi-token prediction has beside a decoder layer, in place.

    Args:
        model: from `build_model` with the config from `PublishedMTP.with_layer`.

    Raises:
        ExpertMeshError: its final norm is not found, or its logits are scaled after the head.
    """
    norm, (*_, layer) = final_norm(model), decoder_layers(model)
    if not facts_of(model).head_is_last:
        raise ExpertMeshError(f"--train-mtp: {type(model).__name__} scales its logits after the head; not supported")
    width = norm.weight.shape[0]
    layer.enorm, layer.hnorm = deepcopy(norm), deepcopy(norm)
    layer.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta")
    layer.shared_head = nn.Module()
    layer.shared_head.norm = deepcopy(norm)
    vars(model)[_ATTRIBUTE] = mtp


def final_norm(model: Any) -> Any:
    """The norm behind a model's last decoder layer.

    Raises:
        ExpertMeshError: it is not the only norm beside the layers.
    """
    layers = decoder_layers(model)
    owner = next(module for module in model.modules() if any(child is layers for child in module.children()))
    norms = {name: child for name, child in owner.named_children() if "norm" in type(child).__name__.lower()}
    if len(norms) != 1:
        raise ExpertMeshError(
            f"--train-mtp: {type(owner).__name__} has {', '.join(norms) or 'no norm'} beside its layers; expected is "
            "one norm, behind the last of them"
        )
    return next(iter(norms.values()))


def mtp_of(model: Any) -> PublishedMTP | None:
    """The layer for multi-token prediction that is a model's last layer; None where it has none."""
    found: PublishedMTP | None = vars(model).get(_ATTRIBUTE)
    return found


def shared_with_mtp(model: Any) -> dict[str, str]:
    """Names under which checkpoints repeat the model's own embedding and head in the layer, and those of the latter."""
    layers = decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {_EMBEDDING: model.get_input_embeddings(), _HEAD: model.get_output_embeddings()}
    return {f"{path}.{len(layers) - 1}.{name}": names[id(module.weight)] for name, module in shared.items()}
