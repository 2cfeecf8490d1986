"""Small models whose checkpoints bring a layer for multi-token prediction, and what such a layer should learn.

The reference is written here from the papers: transformers' own classes in one process, one sample after the other. Of
ours it uses nothing.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.families.configs import random_model, tiny_config
from tests.tiny import save_tokenizer

EXTRAS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
SETTINGS = {"deepseek_v3": "num_nextn_predict_layers", "glm4_moe": "num_nextn_predict_layers"}
"""Of families that number the layer on from the last one: what says in config.json that there is one."""


@dataclass
class Predicting:
    """A model of transformers with one layer more than its config says, and what that layer has beside the others.

    layers: how many it runs itself.
    """

    model: Any
    extras: dict[str, Any]
    layers: int

    @property
    def path(self) -> str:
        """Of its list of layers."""
        return next(path for path, part in self.model.named_modules() if part is self.base.layers)

    @contextmanager
    def with_all_layers(self) -> Iterator[Any]:
        """Within it, the config says how many layers there really are."""
        config = self.model.config
        config.get_text_config().num_hidden_layers = self.layers + 1
        yield config
        config.get_text_config().num_hidden_layers = self.layers

    @property
    def base(self) -> Any:
        return self.model.get_decoder()


def predicting(family: str, seed: int = 0, **changes: Any) -> Predicting:
    """A tiny model of a family, with random values."""
    config: Any = tiny_config(family, **changes)
    text = config.get_text_config()
    number = text.num_hidden_layers
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(text, name, None), list):
            of_last = "full_attention" if name == "layer_types" else getattr(text, name)[-1]
            setattr(text, name, [*getattr(text, name), of_last])
    text.num_hidden_layers = number + 1
    model: Any = random_model(config, seed)
    base, generator = model.get_decoder(), torch.Generator().manual_seed(seed + 1)
    width = base.norm.weight.shape[0]
    extras = {name.replace(".", "_"): type(base.norm)(width) for name in EXTRAS if name != "eh_proj"}
    extras["eh_proj"] = nn.Linear(2 * width, width, bias=False)
    for name, module in extras.items():
        if name != "eh_proj":
            module.load_state_dict(base.norm.state_dict())
            for other in ("eps", "variance_epsilon"):
                if hasattr(base.norm, other):
                    setattr(module, other, getattr(base.norm, other))
        weight: Any = module.weight
        with torch.no_grad():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    text.num_hidden_layers = model.config.get_text_config().num_hidden_layers = number
    return Predicting(model, extras, number)


def save(of: Predicting, path: Path, repeats: bool = True) -> None:
    """As such a model is published.

    Args:
        repeats: whether the layer repeats embedding and head, where its tensors are numbered.
    """
    model, number = of.model, of.layers
    model_type = model.config.get_text_config().model_type
    with of.with_all_layers():
        model.save_pretrained(path)
    tensors, prefix = load_file(path / "model.safetensors"), f"{of.path}.{number}."
    if not any(name.startswith(prefix) for name in tensors):  # called otherwise on disk
        prefix = next(n for n in tensors if f".layers.{number}." in n).partition(f".layers.{number}.")[0]
        prefix += f".layers.{number}."
    for name in EXTRAS:
        tensors[f"{prefix}{name}.weight"] = of.extras[name.replace(".", "_")].weight.detach().clone()
    if model_type in SETTINGS:
        if repeats:
            tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
            tensors[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    else:
        tensors = {apart(name, prefix): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    text = raw.get("text_config", raw)
    for name, value in text.items():
        if isinstance(value, list) and len(value) == number + 1:
            text[name] = value[:number]
    text |= {"num_hidden_layers": number, SETTINGS.get(model_type, "mtp_num_hidden_layers"): 1}
    (path / "config.json").write_text(json.dumps(raw))
    save_tokenizer(path)


def apart(name: str, prefix: str) -> str:
    """What a tensor of the layer is called in `mtp`."""
    if not name.startswith(prefix):
        return name
    own = name.removeprefix(prefix)
    for ours, theirs in APART.items():
        if own.startswith(f"{ours}."):
            return own.replace(ours, theirs, 1)
    return f"mtp.layers.0.{own}"


@dataclass
class Answer:
    """loss, mtp_loss: means over their targets. grads: of loss + weight · mtp_loss, as transformers names parameters,
    those of the layer's own modules with the layer's prefix. drafts: greedy, one for each position of each sample."""

    loss: float
    mtp_loss: float
    grads: dict[str, Tensor]
    drafts: list[Tensor]


def answer(of: Predicting, samples: Sequence[tuple[list[int], list[bool]]], weight: float, detach: bool) -> Answer:
    """Equations 21 to 25 of DeepSeek-V3 (arXiv 2412.19437) with the embedding first, as weights are published.

    Args:
        samples: tokens, and which of them are to be learned.
    """
    model, base, own, number = of.model, of.base, of.extras, of.layers
    model.zero_grad()
    for module in own.values():
        module.zero_grad()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    losses, drafted, drafts = [], [], []
    for tokens, is_trained in samples:
        tokens_1S = torch.tensor([tokens])
        positions_1S = torch.arange(len(tokens))[None]
        h_1SD = base(input_ids=tokens_1S, position_ids=positions_1S, use_cache=False).last_hidden_state
        losses += _losses(head(h_1SD)[0, :-1], tokens[1:], is_trained[1:])
        after_SD = embedding(torch.tensor([[*tokens[1:], 0]]))
        head_weight = head.weight
        if detach:
            h_1SD, after_SD, head_weight = h_1SD.detach(), after_SD.detach(), head.weight.detach()
        x_1SD = own["eh_proj"](torch.cat([own["enorm"](after_SD), own["hnorm"](h_1SD)], dim=-1))
        if isinstance(getattr(base, "rotary_emb", None), nn.Module):
            # of text, the same in all three dimensions that images have
            dimensions = (3,) if hasattr(base.rotary_emb, "mrope_section") else ()
            rotary = base.rotary_emb(x_1SD, positions_1S.expand(*dimensions, *positions_1S.shape))
        mask_11SS = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        x_1SD = base.layers[number](
            x_1SD, attention_mask=mask_11SS, position_embeddings=rotary, position_ids=positions_1S
        )
        logits_SV = F.linear(own["shared_head_norm"](x_1SD), head_weight)[0]
        drafted += _losses(logits_SV[:-2], tokens[2:], is_trained[2:])
        drafts.append(logits_SV.detach().argmax(-1))
    loss, mtp_loss = torch.stack(losses).mean(), torch.stack(drafted).mean()
    (loss + weight * mtp_loss).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = {name.replace(".", "_"): name for name in EXTRAS}
    grads |= {f"{of.path}.{number}.{names[name]}.weight": own[name].weight.grad for name in names}
    return Answer(float(loss.detach()), float(mtp_loss.detach()), grads, drafts)


def _losses(logits_SV: Tensor, tokens: list[int], is_trained: list[bool]) -> list[Tensor]:
    pairs = zip(logits_SV, tokens, is_trained, strict=True)
    return [F.cross_entropy(logits_V, torch.tensor(token)) for logits_V, token, is_one in pairs if is_one]
