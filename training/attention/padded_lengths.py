"""The lengths that sequences are padded to, for attention kernels that are prepared anew for each length."""

from typing import Any

from ...moe.experts.replay import route_reader
from ...moe.hf_model.images import images_of
from ...moe.hf_model.mtp import mtp_of
from ..config.train_config import TrainConfig
from ..data.batch import BatchMaker
from ..data.images import ImageReader
from .context_parallel_attention import looks_for_longest

_MULTIPLE = 128


def batch_maker_of(model: Any, config: TrainConfig, device_type: str) -> BatchMaker:
    """How batches of a model are padded.

    torch's sdpa on a GPU prefers cuDNN's attention where there is one, which builds a plan for every number of
    sequences and length that it has not seen before, 23 to 37 ms of the host each (Hopper, cuDNN 9): so lengths are
    rounded up there. Not in packed sequences, which are almost all of one length; not where the model's rotary
    positions depend on the length, as results would; and not beyond the positions that the model has.
    """
    looks_ahead, images = mtp_of(model) is not None, None if images_of(model) is None else ImageReader(model)
    routes = route_reader(model, looks_ahead)
    is_sdpa = model.config._attn_implementation == "sdpa" and not config.packing
    if device_type != "cuda" or not is_sdpa or any(looks_for_longest(module) for module in model.modules()):
        return BatchMaker(looks_ahead=looks_ahead, images=images, routes=routes)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) else None
    return BatchMaker(_MULTIPLE, limit, looks_ahead, images, routes=routes)
