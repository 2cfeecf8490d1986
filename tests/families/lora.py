"""The reference implementation of adapters: a family's own class in one process, in which every adapted matrix is W + s
· B · A, put together anew in each forward, expert by expert."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from expertmesh.moe.experts.lora import first_values, store_frozen
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.linear.quantized import dequantize, quantize
from expertmesh.sharding.state import adapters_of, state_of
from expertmesh.training.data.batch import collate
from expertmesh.training.model_setup.lora_targets import adapt
from tests.distributed.reference import attention_mask, train_config, unshifted_labels
from tests.parity.case import MAX_GRAD_NORM, Case, hf_model
from tests.parity.reference import loss_of
from tests.tiny import our_rows


@dataclass(frozen=True)
class LoraFigures:
    """losses, grad_norms: a step. grads: of the first step; weights: after the last, of adapters alone."""

    losses: list[float]
    grad_norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def started(case: Case, model_config: Any = None) -> tuple[dict[str, nn.Parameter], dict[str, Any], float]:
    """Adapters as a run begins with them, by our names; what each is; and their scale.

    Args:
        model_config: where it is not that of the case's model.
    """
    config = train_config(**{"adapter": "lora", **case.settings})
    model = build_model(model_config or hf_model(case, seed=1).config, "eager")
    scale = adapt(model, config).lora.low_rank.scale
    parts = adapters_of(model)
    values = {}
    for name, part in parts.items():
        rows_a_matrix = part.num_rows if part.expert is None else part.expert.rows_an_expert
        values[name] = nn.Parameter(first_values(name, range(part.num_rows), part.shape[1], rows_a_matrix, config.seed))
    return values, parts, scale


def weights_with(model: Any, values: dict[str, Any], parts: dict[str, Any], scale: float) -> dict[str, Tensor]:
    """transformers' own parameters with the adapters' updates added."""
    theirs: dict[str, Tensor] = dict(model.named_parameters())
    changed: dict[str, Tensor] = {}
    for name_a in (name for name in values if name.endswith("lora_A")):
        a, b, part = values[name_a], values[name_a.removesuffix("A") + "B"], parts[name_a]
        if part.expert is None:
            name = name_a.removesuffix("lora_A") + "weight"
            changed[name] = theirs[name] + scale * b @ a
            continue
        name = f"{name_a.rpartition('.mlp.')[0]}.{part.expert.place.tensor}"
        num_experts = theirs[name].shape[0]
        deltas = [
            scale * own_b @ own_a for own_a, own_b in zip(a.chunk(num_experts), b.chunk(num_experts), strict=True)
        ]
        rows_EFD = torch.stack([delta.t() if ".w2_" in name_a else delta for delta in deltas])
        place = part.expert.place
        index = torch.arange(rows_EFD.shape[1]) * place.step + place.first
        whole = changed[name] if name in changed else theirs[name]
        update = torch.zeros_like(whole).movedim(place.dim, 1).index_copy(1, index, rows_EFD).movedim(1, place.dim)
        changed[name] = whole + update
    return changed


def round_weights(model: Any, kind: Any) -> None:
    """Give transformers' layers the numbers that codes of this kind stand for, row by row of our layout."""
    ours = build_model(model.config, "eager")
    ours.requires_grad_(False)
    store_frozen(ours, kind)
    theirs = dict(model.named_parameters())
    for name, part in state_of(ours).items():
        if part.storage is None:
            continue
        if part.expert is None:
            rows = theirs[name].t() if part.transposed else theirs[name]
            rows.copy_(dequantize(*quantize(rows, part.storage), part.storage, torch.float32))
            continue
        place = part.expert.place
        whole = theirs[f"{name.rpartition('.mlp.')[0]}.{place.tensor}"]
        rows = our_rows(part.expert, whole)
        rounded = dequantize(*quantize(rows, part.storage), part.storage, torch.float32)
        index = torch.arange(part.expert.rows_an_expert) * place.step + place.first
        whole.movedim(place.dim, 1).index_copy_(1, index, rounded.unflatten(0, (whole.shape[0], -1)))


def reference(case: Case) -> LoraFigures:
    """Steps of AdamW, clipped, on the adapters alone."""
    model: Any = hf_model(case, seed=1)
    model.requires_grad_(False).train()
    values, parts, scale = started(case)
    config = train_config(**{"adapter": "lora", **case.settings})
    if config.base_dtype != "auto":
        round_weights(model, config.base_dtype)
    optimizer = torch.optim.AdamW(values.values(), lr=config.learning_rate, weight_decay=config.weight_decay)
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    losses, grad_norms, grads = [], [], {}
    for step in range(case.steps):
        optimizer.zero_grad()
        arguments = dict(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), use_cache=False)
        logits = functional_call(model, weights_with(model, values, parts, scale), kwargs=arguments).logits
        loss = loss_of(model, logits, labels)
        loss.backward()
        if step == 0:
            grads = {name: p.grad.clone() for name, p in values.items() if p.grad is not None}
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(list(values.values()), MAX_GRAD_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return LoraFigures(losses, grad_norms, grads, {name: p.detach() for name, p in values.items()})
