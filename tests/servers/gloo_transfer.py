"""vLLM's weight transfer over gloo: its NCCL engines, trainer's and worker's, but for what carries the bytes.

A server's processes import it as a plugin of vLLM's, beside nothing else of this checkout; a trainer's ranks too.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


class Gloo:
    """In place of a NCCL communicator."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        limit = timedelta(minutes=1)
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=limit)
        self.group: Any = dist.ProcessGroupGloo(store, rank, world_size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def destroy(self) -> None:
        self.group = None


def of_trainer(info: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, 0, info.world_size)


class Worker(nccl_engine.NCCLWeightTransferEngine):
    """Of a server with one worker."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = Gloo(init_info.master_address, init_info.master_port, 1, init_info.world_size)

    def start_weight_update(self) -> None:
        super().start_weight_update()
        for layer in self.model.modules():
            # vLLM 0.32 for CPUs lays experts' weights out for its kernel only when it makes the kernel: make it again
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight, 0)
            self.model.load_weights([(name, weight)])


class Trainer(nccl_engine.NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source: Any, meta: Any) -> None:
        if not self.is_sender:
            return super()._broadcast(source, meta)
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor, 0)


def sent(iterator: Any, group: Gloo, src: int, post_iter_func: Any) -> None:
    """In place of `packed_nccl_broadcast_producer`."""
    for pair in iterator:
        group.broadcast(post_iter_func(pair), src)


def register() -> None:
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", Worker)
        nccl_engine.open_trainer_endpoint = of_trainer
