"""The order in which modules of a model that transformers has built are changed: forwards and classes replaced, hooks
and wrappers put around them.

A later change wraps, sees or leaves alone what an earlier one has put there; in another order the same calls would
compute something else, and nothing would say so. So each begins with `begin_change`.
"""

from typing import Any

ORDER = {
    "text": "a model of several media runs the part of it that predicts tokens",
    "rotary positions": "a hook has them forget earlier batches; experts, which are found by a forward, need them",
    "experts": "ours in the place of transformers'; hooks on routers, and on the model, which gets a `Forward`",
    "images": "features of the image tokens that are here, as the `Forward` says, and hooks until the decoder",
    "linear layers": "ours of decoder layers, which adapters, fp8 and tensor parallelism add to",
    "packing": "mixers run sample by sample; the trial that finds which is one of the family's own code",
    "adapters": "linear layers and routers with updates of their own",
    "fp8": "linear layers that multiply in fp8, beside adapters, which do not",
    "tensor parallelism": "forwards of linear layers, which have their adapters by now, and hooks on their blocks",
    "context parallelism": "mixers see complete sequences, those that run sample by sample too",
    "compiling": "of parts that none of the three before it has changed",
    "liger": "norms and rotary positions that are not compiled",
    "loss head": "in the place of the model's head",
    "drafts": "the last layer's forward, which the head takes drafts of",
    "new tokens": "the embedding's forward, and rows that the head reads",
    "divided parameters": "the embedding's forward, which knows of new tokens",
    "checkpointing": "layers are recomputed, with all of the above in them, by their own code",
    "large tower": "hooks by which all ranks run it, or none; on the embedding, as FSDP's",
    "offloaded inputs": "around checkpointing",
    "sharding": "FSDP's hooks, outside of what is recomputed",
    "stages": "layers' classes and the model's forward, outside of FSDP's hooks",
    "watching": "hooks outside of all others",
}
"""Each change, first to last, and why it stands there."""

_PLACES = {change: place for place, change in enumerate(ORDER)}


def begin_change(model: Any, change: str) -> None:
    """To be called by what changes a model's modules, before it does; assert that no later change was made."""
    last = vars(model).get("_last_change", change)
    assert _PLACES[change] >= _PLACES[last], (
        f"{change} must be changed before {last}, which this model has already: {change}: {ORDER[change]}; "
        f"{last}: {ORDER[last]} (moe.util.change_order)"
    )
    vars(model)["_last_change"] = change
