"""What tensor parallelism divides: parameters cut along dim 0 over the ranks of a tp group, then by FSDP over the ranks
with the same tp index."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from ...moe.linear.quantized import SCALES
from ..collectives.tensor_parallel import TPGroup
from ..mesh import Mesh
from ..stages import stages_of
from .vocabulary import divide_embedding


def divided_here(model: Any) -> Mapping[str, str]:
    """For each parameter of this rank's stages that is divided, the path of the module whose call needs it. The scales
    of a quantized one are divided as it is."""
    divided: Mapping[str, str] = getattr(model, "divided", {})
    stages = stages_of(model)
    here = {name: path for name, path in divided.items() if stages is None or stages.is_here(name)}
    parameters = {name for name, _ in model.named_parameters()} if here else set()
    return here | {name + SCALES: path for name, path in here.items() if name + SCALES in parameters}


def place_divided(model: Any, mesh: Mesh) -> None:
    """Give each tp rank its part of what is divided, in place, and the modules that are divided their group."""
    names = divided_here(model)
    if not getattr(model, "divided", None):
        return
    for name in names:
        owner, _, own_name = name.rpartition(".")
        weight = model.get_parameter(name)
        placed = distribute_tensor(weight.detach(), mesh.tp, [Shard(0)])
        module: nn.Module = model.get_submodule(owner)
        module.register_parameter(own_name, nn.Parameter(placed, requires_grad=weight.requires_grad))
    assert mesh.cp_group is not None
    assert mesh.cp_group.tp is not None
    give_group(model, set(names.values()), mesh.cp_group.tp)


def give_group(model: Any, paths: Collection[str], group: TPGroup) -> None:
    """Tell what is divided its ranks, in place. paths: of the modules that have something that is."""
    model.tensor_parallel.group = group
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    by_module: dict[Any, str] = {module: path for path, module in model.named_modules()}
    if by_module[embedding] in paths:
        divide_embedding(embedding, group)
    if by_module[head] in paths:
        head.vocabulary = group
