"""What a process makes when it first needs it and keeps, made here once for all ranks, which are forked after this
import: a rank that has to make it by itself takes twice as long for its first job."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.torch_private import FakeStore
from expertmesh.training.report.page import _template
from tests.tiny import tiny_config


def update_sharded() -> None:
    """AdamW's rules for sharded tensors; no other rank is asked, and no thread is left behind."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False).requires_grad_()
    weight.grad = weight.detach().clone()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.optim.AdamW([weight], fused=True).step()
    dist.destroy_process_group()


get_checkpoint_conversion_mapping("")
_template()
build_model(tiny_config())
update_sharded()
