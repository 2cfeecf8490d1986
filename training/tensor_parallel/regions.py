"""How a module runs that the ranks of a tensor-parallel group divide: a region.

A region (attention, a dense MLP, shared experts; see `tensor_plan`) is called with this rank's positions of
each sequence, as all of the model is. It begins by gathering those of the group, computes with this rank's part of its
weights, and ends by adding up the parts' results, each rank those of its positions. What a region has beside linear
layers (norms, rotary positions, projections that the plan does not divide) is computed by every rank alike; what is
made of it is not, so that each rank's gradients of it are one summand, as they are everywhere.

In a forward whose sequences are complete (generation) all ranks of the group have the same ones. Attention that is
computed sample by sample, or with complete sequences of a CP group, has the positions in another order inside: there
the parts' results are added up for all of them, and each rank takes its positions of what the attention returns.

Shape suffixes: n ranks of the group, B sequences, S positions, L = S/n of them on this rank, D model width.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ...moe.experts.forward import Forward, current_forward
from ...moe.hf_model.tensor_plan import DividedModule
from ...moe.hf_model.trial import counts_tokens
from ...moe.linear.division import part_of
from ...moe.linear.linear import Linear, only_multiplies
from ...moe.util.errors import ExpertMeshError
from ...moe.util.tensors import tensors_in
from ...sharding.collectives.tensor_parallel import TPGroup
from ...sharding.state import computing_with
from ..attention.complete_sequences import rearranges
from ..attention.packed_attention import tells_window
from ..data.batch import SplitSequences
from .kept_positions import KeptPositions, is_kept_otherwise
from .overlap import SymmetricMemory, gather_multiply, multiply_scatter


@dataclass
class TensorParallel:
    """What of a model the ranks of a group divide.

    Attributes:
        group: the ranks; without processes until the model is placed.
        regions: the modules, in the model's order.
        vocabulary: what tells embedding and head their ranks, where they are divided, by path.
        operators: by which matmuls run beside exchanges, with --async-tp, once the model is placed.
    """

    group: TPGroup
    regions: list["DividedRegion"] = field(default_factory=list)
    vocabulary: dict[str, Callable[[TPGroup], object]] = field(default_factory=dict)
    operators: SymmetricMemory | None = None

    def line(self) -> str:
        """For a run's first lines."""
        kinds = Counter(region.plan.path.rpartition(".")[2] for region in self.regions)
        divided = ", ".join(f"{number} {name}" for name, number in kinds.items())
        return f"tensor parallelism over {self.group.size} ranks shards {divided}"

    def overlapped_line(self, quantized: Collection[nn.Module]) -> str:
        """Which exchanges --async-tp does in parts, for a run's first lines; of a model that has been tried with
        sequences that ranks share (see `apply_context_parallel`).

        Args:
            quantized: layers whose weights will be quantized when the model is placed.

        Raises:
            ExpertMeshError: none: every region begins and ends with layers that do more than multiply.
        """
        first, last = (
            [any(only_multiplies(each.layer) and each.layer not in quantized for each in end) for end in ends]
            for ends in ([region.first_layers for region in self.regions], [region.last for region in self.regions])
        )
        number = len(self.regions)
        if not any(first + last):
            raise ExpertMeshError(
                f"--async-tp: none of the {number} regions that --tp-size {self.group.size} divides "
                "begins or ends with plain linear layers (without adapters or quantized weights); leave "
                "it out"
            )
        latent = sum(not region.first_layers for region in self.regions)
        why = f"; {latent} begin with layers that are not sharded" if latent else ""
        return (
            f"exchanges overlap with GEMMs (async): at the beginning of {sum(first)} of {number} "
            f"regions, at the end of {sum(last)}{why}"
        )

    def place(self, group: TPGroup, here: Collection[str]) -> None:
        """Tell what is divided its ranks. here: paths of the modules on this rank that have something that is."""
        self.group = group
        for region in self.regions:
            for layer in region.divided:
                assert layer.division is not None
                layer.division = replace(layer.division, ranks=group)
        for path, tell in self.vocabulary.items():
            if path in here:
                tell(group)


class Colwise:
    """The forward of a linear layer that is divided by its outputs.

    Attributes:
        ahead: the product that it is called for, where it was computed with the exchange that begins its region.
    """

    def __init__(self, layer: Linear, region: "DividedRegion"):
        self.layer, self.region = layer, region
        self.ahead: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.ahead is None:
            self.region.note_first(self, x)
            return Linear.forward(self.layer, x)
        bias = self.layer.part("bias")
        return self.ahead if bias is None else self.ahead + bias


class Rowwise:
    """The forward of a linear layer that is divided by its inputs, and whose results are added up."""

    def __init__(self, layer: Linear, region: "DividedRegion"):
        self.layer, self.region = layer, region

    def __call__(self, x: Tensor) -> Tensor:
        layer, region, operators = self.layer, self.region, self.region.parallel.operators
        if operators is not None and only_multiplies(layer) and region.split is not None and not region.rearranged:
            weight_KN = layer.part("weight")
            summed = region.by_positions(x, lambda x, dim: multiply_scatter(operators, x, weight_KN, dim))
        else:
            summed = region.sum(Linear.forward(layer, x))
        return summed if layer.bias is None else summed + layer.bias


class FullWidth:
    """Hooks of a module that needs all of a token's outputs of a colwise layer at once, such as a norm over them: it is
    given all columns of some of the positions."""

    def __init__(self, region: "DividedRegion"):
        self.region = region

    def enter(self, module: nn.Module, args: Any) -> Any:
        (x,), group = args, self.region.parallel.group
        if self.region.split is None:
            return (group.all_gather(x, -1),)
        return (group.gather(x, -1) if self.region.rearranged else group.to_positions(x.flatten(0, -2), 0),)

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        split, group = self.region.split, self.region.parallel.group
        if split is None or self.region.rearranged:
            return group.mine(output, -1)
        return group.to_columns(output, 0).unflatten(0, (len(split.positions_BS), -1))


class DividedRegion:
    """What the hooks of a region have in common.

    Attributes:
        first: the layers that take what the region is given, by where it stands among the arguments: as the forward in
            which the model is tried has shown.
        last: the layers that end it.
        divided: its layers that have a `division`: also those in fp8 of which nothing is divided.
        split: while it runs, the sequences, where the group splits them; None where they are complete.
        rearranged: whether it computes other sequences than it is given.
    """

    def __init__(self, parallel: TensorParallel, plan: DividedModule, values: Mapping[str, int]):
        self.parallel, self.plan, self.values = parallel, plan, values
        self.first: dict[str, list[Colwise]] = {}
        self.last: list[Rowwise] = []
        self.divided: list[Linear] = []
        self.running = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self.split: SplitSequences | None = None
        self.rearranged = False
        self.kept: KeptPositions | None = None
        self.given: dict[int, str] = {}

    @property
    def first_layers(self) -> list[Colwise]:
        return [layer for taking in self.first.values() for layer in taking]

    def note_first(self, layer: Colwise, x: Tensor) -> None:
        """A layer is called; in the forward in which the model is tried."""
        name = self.given.get(id(x))
        if self.parallel.group.ranks is None and name is not None and layer not in self.first.setdefault(name, []):
            self.first[name].append(layer)

    def check_alike(self, module: nn.Module, args: Any) -> None:
        """Of a layer in fp8 that is not divided: it looks at each token by itself. Of heads, which ranks have different
        ones of, gradients would be no summands."""
        if self.parallel.group.ranks is None and self.split is not None and not self.rearranged:
            tokens = self.split.positions_BS.numel() * self.parallel.group.size // self.split.cp_group.size
            if args[0].shape[:-1].numel() != tokens:
                raise self.unlike(module, f"is given a tensor of shape {tuple(args[0].shape)}, of {tokens} tokens")

    def by_positions(self, x: Tensor, exchange: Callable[[Tensor, int], Tensor]) -> Tensor:
        """An exchange along the positions of a layer's input or output."""
        return exchange(x, 0)

    def sum(self, out: Tensor) -> Tensor:
        """The sum of all ranks' results."""
        group = self.parallel.group
        if self.split is None:
            return group.all_reduce(out)
        return group.sum(out) if self.rearranged else self.by_positions(out, group.reduce_scatter)

    def begin(self, module: nn.Module, given: Any) -> SplitSequences | None:
        """The sequences that the group splits in the current forward; None where it splits none.

        Raises:
            ExpertMeshError: it splits none, and gradients are computed.
        """
        group = self.parallel.group
        parts = {name: part_of(module.get_parameter(name), rows, group) for name, rows in self.values.items()}
        self.running.enter_context(computing_with(module, parts))
        forward = current_forward()
        split: SplitSequences | None = None if forward is None else forward.split
        if split is not None and split.cp_group.tp is not None:
            self.split = split
            return split
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(given)):
            raise ExpertMeshError(
                "--tp-size: calling the model gives no gradients, because the ranks of a tensor-parallel "
                "group split batches; use the engine's step or forward_backward, or call the model under "
                "torch.no_grad()"
            )
        return None

    def gather(self, name: str, x: Tensor, dim: int) -> Tensor:
        """All ranks' positions of what the region is given, and at once the outputs of layers that take it."""
        group, operators = self.parallel.group, self.parallel.operators
        if self.kept is None and not is_kept_otherwise():
            self.kept = KeptPositions()
            self.running.enter_context(self.kept)
        note = partial(self._note, x, dim)
        # which of them have been quantized since, shows only now
        layers = [each for each in self.first.get(name, ()) if only_multiplies(each.layer)]
        if operators is None or not layers:
            gathered = group.gather(x, dim)
            note(gathered)
            self.given[id(gathered)] = name
            return gathered
        weights = [each.layer.part("weight") for each in layers]
        gathered, products = gather_multiply(operators, group, x, weights, dim, note)
        for each, product in zip(layers, products, strict=True):
            each.ahead = product
        return gathered

    def _note(self, x: Tensor, dim: int, gathered: Tensor) -> None:
        if self.kept is not None:
            self.kept.note(gathered, self.parallel.group, x, dim)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Also where it has failed."""
        self.running.close()
        self._forget()
        for layer in self.first_layers:
            layer.ahead = None

    def unlike(self, module: nn.Module, how: str) -> ExpertMeshError:
        return ExpertMeshError(
            f"--tp-size {self.parallel.group.size}: {type(module).__name__} {how}, which expertmesh "
            "cannot shard; leave --tp-size out"
        )


class ByToken(DividedRegion):
    """Hooks of a region that looks at each token by itself."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.begin(module, args) is None:
            return None
        if tensors_in(args[1:], kwargs) or not isinstance(args[0], Tensor):
            raise self.unlike(module, "gets other tensors than its tokens")
        return (self.gather("0", args[0], 0), *args[1:]), kwargs


class AttentionRegion(DividedRegion):
    """Hooks of a region that mixes positions: those of a rank lie one after the other in each sequence, not in all
    rows."""

    def __init__(self, parallel: TensorParallel, plan: DividedModule, values: Mapping[str, int]):
        super().__init__(parallel, plan, values)
        self.dims: dict[str, int | None] = {}

    def by_positions(self, x: Tensor, exchange: Callable[[Tensor, int], Tensor]) -> Tensor:
        if x.dim() > 2:
            return exchange(x, 1)
        assert self.split is not None
        return exchange(x.unflatten(0, (len(self.split.positions_BS), -1)), 1).flatten(0, 1)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        split, forward = self.begin(module, (args, kwargs)), current_forward()
        if split is None:
            return None
        assert forward is not None
        if forward.within_tp is None:
            forward.within_tp = _within(forward, split)
        with_paths, structure = tree_flatten_with_path((args, kwargs))
        given = [self._gathered(module, str(path), leaf, split, forward) for path, leaf in with_paths]
        self.rearranged = rearranges(module.forward, forward.within_tp)
        self.running.enter_context(forward.within_tp)
        return tree_unflatten(given, structure)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        rearranged = self.rearranged
        super().leave(module, args, output)
        if not rearranged or output is None:
            return None
        leaves, structure = tree_flatten(output)
        return tree_unflatten([self.parallel.group.mine(leaves[0], dim=1), *leaves[1:]], structure)

    def _gathered(self, module: nn.Module, name: str, x: Any, split: SplitSequences, forward: Forward) -> Any:
        """An argument, with the positions of all the group's ranks."""
        if not isinstance(x, Tensor):
            return x
        if name not in self.dims:
            self.dims[name] = self._dim_of_positions(module, x, split)
        dim, group = self.dims[name], self.parallel.group
        if dim is None:
            return x
        if x.requires_grad or name in self.first or group.ranks is None:
            return self.gather(name, x, dim)
        return gather_once(forward, x, dim, group)

    def _dim_of_positions(self, module: nn.Module, x: Tensor, split: SplitSequences) -> int | None:
        """Which dim of an argument has this rank's positions, if one has. To be asked in a forward in which no size of
        the model is equal to their number, as the one in which a model is tried."""
        full_length = split.positions_BS.shape[1]
        length = full_length // split.cp_group.size
        # indices of chosen tokens have all positions, as they come from another layer's attention
        is_complete = counts_tokens(x.dtype, x.dim()) and x.shape[1] in (length * self.parallel.group.size, full_length)
        # and so have masks, which may be left out of short sequences as those that a model is tried with
        is_mask = x.dim() == 4 and x.shape[-1] == full_length
        if tells_window(x) or is_complete or is_mask:
            return None
        dims = [dim for dim, size in enumerate(x.shape) if size == length]
        if len(dims) > 1:
            raise self.unlike(module, f"is given a tensor of shape {tuple(x.shape)}, of {length} positions")
        return dims[0] if dims else None


def _within(forward: Forward, split: SplitSequences) -> Forward:
    """The `Forward` for what is in the regions of one."""
    if split.cp_group.within_tp is not None:
        return forward.of_split(replace(split, cp_group=split.cp_group.within_tp))
    complete = forward.of_complete_sequences(forward.segments)
    complete.layout = None
    return complete


_MOST_GATHERED = 8
"""Tensors that are kept for the next layers: cosines and sines of a few kinds of rotary positions."""


def gather_once(forward: Forward, x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """All ranks' positions of what has no gradient, as rotary positions, once for all layers."""
    if not torch.is_grad_enabled():
        return group.gather(x, dim)
    known = forward.gathered.pop(id(x), None) or (x, group.all_gather(x, dim))
    forward.gathered[id(x)] = known
    # hidden states of frozen layers have no gradient either, and are not asked for again
    if len(forward.gathered) > _MOST_GATHERED:
        del forward.gathered[next(iter(forward.gathered))]
    return known[1]
