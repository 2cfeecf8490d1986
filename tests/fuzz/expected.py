"""What a draw should give: transformers' own class in one process, sample by sample, with torch's AdamW."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.distributed.reference import train_config
from tests.families import lora
from tests.fuzz.draw import Draw
from tests.parity.case import Case, Figures
from tests.parity.reference import hf_adamw, labels_of

STEPS = 2
LARGE_EPSILON = 10.0
OPTIMIZER = {"learning_rate": LARGE_EPSILON, "adam_epsilon": LARGE_EPSILON, "weight_decay": 1e-3}
"""By which an update is nearly the gradient, where AdamW's would be its signs: a wrong factor shows."""


def expected(drawn: Draw, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Figures, dict[str, Tensor]]:
    """What is compared, and adapters before the first step; weights are those after it.

    Args:
        directory: an empty one, for files.
    """
    model: Any = drawn.model().to(dtype).train()
    # the others have no kernel for fp64, or sum in an order that depends on the device
    model.set_experts_implementation("eager")
    config = train_config(**{**OPTIMIZER, **drawn.flags})
    values: dict[str, nn.Parameter] = {}
    if drawn.has_adapters:
        model.requires_grad_(False)
        settings = {name: value for name, value in drawn.flags.items() if not name.startswith("router_")}
        values, parts, scale = lora.started(Case([], settings=settings), deepcopy(model.config))
        values = {name: nn.Parameter(value.detach().to(dtype)) for name, value in values.items()}
        optimizer = torch.optim.AdamW(
            values.values(), lr=config.learning_rate, eps=config.adam_epsilon, weight_decay=config.weight_decay
        )
    else:
        optimizer = hf_adamw(model, config)
    before = {name: value.detach().clone() for name, value in values.items()}
    losses, norms, balances, zs = [], [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        changed = lora.weights_with(model, values, parts, scale) if values else {}
        cross_entropy, routing = run(model, changed, drawn)
        total, balance, z = cross_entropy, torch.zeros(()), torch.zeros(())
        if routing is not None:
            has_balance = config.router_aux_loss_coef or 0.0
            parts_of_balance = [balancing_loss(*micro, config.router_aux_loss_per_layer) for micro in routing]
            balance = torch.stack(parts_of_balance).mean()
            logits_LTE = torch.cat([logits for logits, _ in routing], dim=1)
            z = logits_LTE.logsumexp(dim=-1).square().mean()
            total = cross_entropy + has_balance * balance + config.router_z_loss_coef * z
        total.backward()
        trained = [*values.values()] or [p for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)))
        optimizer.step()
        losses.append(float(cross_entropy.detach()))
        balances.append(float(balance.detach()))
        zs.append(float(z.detach()))
        if step == 0 and not values:
            model.save_pretrained(directory)
    weights = {} if values else load_file(directory / "model.safetensors")
    has_routing = routing is not None
    figures = Figures(
        losses,
        norms,
        balances if has_routing and config.router_aux_loss_coef else None,
        zs if has_routing and config.router_z_loss_coef else None,
        weights=weights,
        adapters={name: value.detach() for name, value in values.items()},
    )
    return figures, before


Routing = tuple[Tensor, Tensor]
"""Of a micro-batch: router logits of each layer and token, and the experts that were chosen."""


def run(model: Any, weights: Mapping[str, Tensor], drawn: Draw) -> tuple[Tensor, list[Routing] | None]:
    """The mean loss of a step, and the routing of each micro-batch; None where nobody asks for it, or transformers has
    no logits to tell."""
    is_asked = any(drawn.flags.get(name) for name in ("router_aux_loss_coef", "router_z_loss_coef"))
    targets = sum(sum(sample.is_trained[1:]) for row in drawn.rows for sample in row)
    loss, routing = torch.zeros(()), []
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs: chosen.append(choices(args, kwargs)), with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "is_concatenated")
    ]
    for number in range(drawn.micro_batches):
        logits_of_samples, choices_of_samples = [], []
        for row in drawn.rows[number :: drawn.micro_batches]:
            for sample in row:
                chosen.clear()
                inputs = drawn.inputs(model, sample)
                out = functional_call(
                    model, dict(weights), kwargs=inputs | ({"output_router_logits": True} if is_asked else {})
                )
                labels = torch.tensor([labels_of(sample.tokens, sample.is_trained)])
                loss = loss + model.loss_function(
                    out.logits, labels, out.logits.shape[-1], num_items_in_batch=torch.tensor(targets)
                )
                router_logits = getattr(out, "router_logits", None)
                if is_asked and router_logits:
                    length = len(sample.tokens)
                    logits_of_samples.append(torch.stack([one.reshape(length, -1) for one in router_logits]).float())
                    choices_of_samples.append(torch.stack([one.reshape(length, -1) for one in chosen]))
        if logits_of_samples:
            routing.append((torch.cat(logits_of_samples, dim=1), torch.cat(choices_of_samples, dim=1)))
    for hook in hooks:
        hook.remove()
    return loss, routing or None


def choices(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The experts of each token, of what an experts module of transformers is called with."""
    found: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
    return found


def balancing_loss(logits_LTE: Tensor, chosen_LTK: Tensor, by_layer: bool) -> Tensor:
    """transformers' loss where the experts of the largest logits are chosen; else the same over what was chosen."""
    if by_layer:
        layers = zip(logits_LTE, chosen_LTK, strict=True)
        return torch.stack([balancing_loss(one[None], other[None], False) for one, other in layers]).mean()
    num_experts, top_k = logits_LTE.shape[-1], chosen_LTK.shape[-1]
    highest_LTK = logits_LTE.topk(top_k, dim=-1).indices
    if torch.equal(highest_LTK.sort(dim=-1).values, chosen_LTK.sort(dim=-1).values):
        return torch.as_tensor(load_balancing_loss_func(tuple(logits_LTE), num_experts, top_k, None))
    logits_NE, chosen_NK = logits_LTE.flatten(0, 1), chosen_LTK.flatten(0, 1)
    share_E = chosen_NK.flatten().bincount(minlength=num_experts) / len(chosen_NK)
    return num_experts * (share_E * logits_NE.softmax(dim=-1).mean(dim=0)).sum()
