"""A vision tower that is too large for every rank to gather all of it: FSDP units of its own, one for each block.

Units gather and reduce among all ranks, so that all must run such a tower, or none: where other ranks' micro-batches
have images, a rank without any runs it too, on an image whose features go nowhere.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.experts.forward import Forward, current_forward
from ...moe.hf_model.image_costs import small_image
from ...moe.hf_model.images import PIXELS, image_features, image_parameters, image_prefixes
from ...moe.util.change_order import begin_change
from ...moe.util.gpu import computing_values

LARGEST_IN_ROOT = 600_000_000
"""Parameters that images alone pass and that every rank gathers with the root unit's. In bf16 they take 1.2 GB from
forward to backward, trained ones 2.4 GB of gradients more; units take two collectives by block, and a run without an
image."""


def tower_blocks(model: Any) -> list[nn.Module]:
    """The blocks of a model's tower that are to be FSDP units of their own, first to last: the longest list of
    modules in it; none where it is small. A frozen tower's too, which is gathered as another is."""
    if sum(p.numel() for p in image_parameters(model)) <= LARGEST_IN_ROOT:
        return []
    towers = [model.get_submodule(prefix[:-1]) for prefix in image_prefixes(model)]
    lists = [part for tower in towers for part in tower.modules() if isinstance(part, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def run_tower_together(model: Any) -> None:
    """Have all ranks run the tower where one of them has images, and none where none has, in place. A step's forwards
    are told which (see `Forward.runs_tower_idly`); of others all ranks agree when they call the model.

    Args:
        model: on the meta device, not sharded yet.
    """
    begin_change(model, "large tower")
    idly = _Idly(model)
    model.register_forward_pre_hook(idly.before_model, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(idly.after_embedding)


class _Idly:
    """Hooks that run a tower on an image whose features go nowhere: the gradients that they bring are zeros."""

    def __init__(self, model: Any):
        self.model = model
        self.inputs = small_image(model)

    def before_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        forward = _current()
        if forward.runs_tower_idly is None:
            has_images = kwargs.get(PIXELS) is not None
            forward.runs_tower_idly = on_some_rank([has_images])[0] and not has_images

    def after_embedding(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Where a forward with images comes to its tower."""
        forward = _current()
        if not forward.runs_tower_idly or (forward.stage is not None and forward.stage.number > 0):
            return None
        # once: a layer for multi-token prediction embeds tokens, too
        forward.runs_tower_idly = False
        if next(iter(self.inputs.values())).device != output.device:
            self.inputs = {
                name: torch.zeros_like(x, device=output.device) if x.is_meta else x.to(output.device)
                for name, x in self.inputs.items()
            }
        nothing = [x.flatten()[:0].sum() for x in image_features(self.model, self.inputs) if x.requires_grad]
        return output + torch.stack(nothing).sum().to(output.dtype) if nothing else None


def _current() -> Forward:
    forward = current_forward()
    assert forward is not None, "a model's parts are called within a forward of it"
    return forward


def on_some_rank(has_images_M: list[bool]) -> list[bool]:
    """Whether any rank has images, by micro-batch: agreed on between hosts. All ranks call it together."""
    with computing_values():
        counted_M = torch.tensor(has_images_M, dtype=torch.int64)
        dist.all_reduce(counted_M)
        return [count > 0 for count in counted_M.tolist()]
