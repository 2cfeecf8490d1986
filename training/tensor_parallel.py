"""Tensor parallelism, applied to a finished model: which modules the ranks of a group divide, and how these run.

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

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ..moe.experts.forward import Forward, current_forward
from ..moe.experts.lora import A, B
from ..moe.experts.model_layers import decoder_layers
from ..moe.hf_model.build import fp32_parameters
from ..moe.hf_model.families import families_with_plan
from ..moe.hf_model.family_exceptions import UNDIVIDED
from ..moe.hf_model.tensor_plan import Region, regions_of
from ..moe.hf_model.trial import counts_tokens
from ..moe.kernels.fp8_casts import MULTIPLE
from ..moe.linear.fp8 import Division
from ..moe.linear.linear import Linear, is_fp8, only_multiplies
from ..moe.linear.quantized import SCALES
from ..moe.util.errors import ExpertMeshError
from ..sharding.collectives.tensor_parallel import TPGroup
from ..sharding.parallelize.vocabulary import divided_vocabulary
from ..sharding.topology import divisors, either
from .attention.complete_sequences import rearranges
from .attention.layer_kinds import mixers_of
from .attention.packed_attention import tells_window
from .data.batch import SplitSequences
from .kept_positions import KeptPositions, is_kept_otherwise
from .overlapped_regions import Operators, gather_multiply, multiply_scatter


@dataclass
class TensorParallel:
    """What of a model the ranks of a group divide.

    Attributes:
        group: the ranks; without processes until the model is placed.
        regions: the modules.
        sequences: of the region that is running, where the group splits them; None where they are complete, or none
            is.
        rearranged: whether that region computes other sequences than it is given.
        operators: by which matmuls run beside exchanges, with --async-tp, once the model is placed.
        running: the hooks of each region, in the order of `regions`.
    """

    group: TPGroup
    regions: list[Region]
    sequences: int | None = None
    rearranged: bool = False
    operators: Operators | None = None
    running: list["_Region"] = field(default_factory=list)

    def line(self) -> str:
        """For a run's first lines."""
        kinds: dict[str, int] = {}
        for region in self.regions:
            name = region.path.rpartition(".")[2]
            kinds[name] = kinds.get(name, 0) + 1
        divided = ", ".join(f"{number} {name}" for name, number in kinds.items())
        return f"tensor parallelism over {self.group.size} ranks divides {divided}"

    def overlapped_line(self, quantized: Collection[nn.Module]) -> str:
        """Which exchanges --async-tp does in parts, for a run's first lines; of a model that has been tried with
        sequences that ranks share (see `apply_context_parallel`).

        Args:
            quantized: layers whose weights will be quantized when the model is placed.

        Raises:
            ExpertMeshError: none: every region begins and ends with layers that do more than multiply.
        """
        ends = [region.overlapping_ends(quantized) for region in self.running]
        found = sum(map(any, ends))
        if not found:
            raise ExpertMeshError(
                f"--async-tp: none of the {len(ends)} regions that --tp-size {self.group.size} divides begins or ends "
                "with layers that only multiply, as those with adapters or quantized weights do not: leave it out"
            )
        named = {
            (True, True): "at both ends",
            (True, False): "at the beginning alone",
            (False, True): "at the end alone",
        }
        parts = [f"{ends.count(each)} {what}" for each, what in named.items() if each in ends]
        latent = sum(not region.first_layers for region in self.running)
        why = f"; {latent} begin with layers that are not divided" if latent else ""
        return f"exchanges of {found} of {len(ends)} regions in parts beside GEMMs (async): {', '.join(parts)}{why}"


def apply_tensor_parallel(model: Any, tp_size: int) -> TensorParallel:
    """Have the modules that transformers' plan names run divided over the ranks of a group, in place.

    Args:
        model: from `build_model`, on the meta device, with its adapters.
        tp_size: ranks of the group.

    Returns:
        What is divided; `model.divided` has, for each parameter that is, the path of the module whose call needs it.

    Raises:
        ExpertMeshError: the plan has nothing for the family's attention, or its heads or widths cannot be divided.
    """
    mixing = {mixer for layer in decoder_layers(model) for mixer in mixers_of(layer)}
    mixers = {path for path, part in model.named_modules() if part in mixing}
    regions = regions_of(model)
    model_type = model.config.model_type
    if model_type in UNDIVIDED:
        raise ExpertMeshError(
            f"--tp-size {tp_size}: the attention of {model_type} cannot be divided: {UNDIVIDED[model_type]}; leave it "
            "out, or use --cp-size"
        )
    if not any(region.path in mixers for region in regions):
        raise ExpertMeshError(
            f"--tp-size {tp_size}: transformers has no plan (base_model_tp_plan) of how to divide the attention of "
            f"{model_type}; leave it out, or use --cp-size. It has one for "
            f"{', '.join(families_with_plan())}"
        )
    _check_heads(model, tp_size)
    parallel = TensorParallel(TPGroup(tp_size, 0, None), regions)
    model.divided = {}
    for region in regions:
        names = _divide(model, region, parallel, is_attention=region.path in mixers)
        model.divided |= dict.fromkeys(names, region.path)
    model.tensor_parallel = parallel
    return parallel


def divide_vocabulary(model: Any, cross_entropy: str) -> str:
    """Have embedding and head divided by vocabulary too, where they can be, in place.

    Args:
        model: that `apply_tensor_parallel` was given, with its `LossHead`.
        cross_entropy: of `--cross-entropy`.

    Returns:
        A line for a run's first ones.
    """
    size = model.tensor_parallel.group.size
    found = divided_vocabulary(model, size, cross_entropy)
    chosen = [model.get_input_embeddings()] * found.embedding + [model.get_output_embeddings()] * found.head
    for path, module in model.named_modules():
        if any(module is one for one in chosen):
            model.divided |= {f"{path}.{name}": path for name, _ in module.named_parameters(recurse=False)}
    return found.line()


_HEADS = re.compile(r"(?:^|_)num_(?:\w+_)?(attention|key_value)_heads$")


def _check_heads(model: Any, tp_size: int) -> None:
    # also those of layers of another kind, as num_global_key_value_heads
    for name, number in model.config.get_text_config().to_dict().items():
        if (found := _HEADS.search(name)) and isinstance(number, int) and number % tp_size:
            what = "attention heads" if found[1] == "attention" else "key and value heads"
            raise ExpertMeshError(
                f"--tp-size {tp_size} does not divide the {number} {what} of this model ({name}); use "
                f"{either(divisors(number))}"
            )


def _divide(model: Any, region: Region, parallel: TensorParallel, is_attention: bool) -> set[str]:
    """Returns the names of the parameters that are divided: of what the family keeps in fp32 each rank has all, of
    which it takes its part in every forward, as of adapters, as it has no FSDP unit with the others of its module."""
    module = model.get_submodule(region.path)
    owned = (*region.colwise, *region.rowwise)
    divided = {f"{path}.weight" for path in owned} | set(region.values)
    divided |= {f"{path}.bias" for path in region.colwise if model.get_submodule(path).bias is not None}
    for name in divided:
        if (rows := model.get_parameter(name).shape[0]) % parallel.group.size:
            raise ExpertMeshError(
                f"--tp-size {parallel.group.size} does not divide the {rows} rows of {name}; use a divisor of them"
            )
        part = rows // parallel.group.size
        if is_fp8(model.get_submodule(name.rpartition(".")[0])) and part % MULTIPLE:
            raise ExpertMeshError(
                f"--dense-precision fp8: its matmuls take widths that are multiples of {MULTIPLE}, and --tp-size "
                f"{parallel.group.size} leaves each rank {part} of the {rows} rows of {name}; use a smaller one, or "
                "leave out one of them"
            )
    entry = _Attention(parallel, region) if is_attention else _ByToken(parallel, region)
    parallel.running.append(entry)
    _run_on_part(module, entry)
    for path in region.colwise:
        _run_on_part(model.get_submodule(path), _Colwise(parallel, entry))
    for path in region.rowwise:
        hooks = _Rowwise(parallel, is_attention)
        _run_on_part(model.get_submodule(path), hooks)
        entry.last[model.get_submodule(path)] = hooks
    for path, part in module.named_modules():
        if is_fp8(part) and f"{region.path}.{path}" not in owned:
            part.register_forward_pre_hook(_Alike(parallel, entry).enter)
    if region.gathers:
        widths = {model.get_submodule(path).out_features for path in region.colwise}
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            if own and not isinstance(part, nn.Linear) and all(tuple(p.shape) in {(w,) for w in widths} for p in own):
                _run_on_part(part, _FullWidth(parallel))
    return divided - fp32_parameters(model).keys()


def _run_on_part(module: nn.Module, hooks: Any) -> None:
    module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
    module.register_forward_hook(hooks.leave, always_call=True)


def _show(module: nn.Module, values: dict[str, Tensor | None]) -> None:
    """Have a module's code find these in place of its parameters, until `_hide`."""
    vars(module).update(values)


def _hide(module: nn.Module) -> None:
    for name in module._parameters:
        vars(module).pop(name, None)


def _part(parameter: Tensor, group: TPGroup) -> Tensor:
    """This rank's rows of a parameter that is divided; of one that is not placed yet, of the whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else group.mine(parameter)


def _parts(module: nn.Module, names: Iterable[str], group: TPGroup) -> dict[str, Tensor | None]:
    own = module._parameters
    return {name: _part(p, group) for name in names if (p := own.get(name)) is not None}


class _Colwise:
    """Hooks of a linear layer that is divided by its outputs."""

    def __init__(self, parallel: TensorParallel, region: "_Region"):
        self.parallel, self.region = parallel, region

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        group, own = self.parallel.group, module._parameters
        if group.ranks is None:
            self.region.note_first(module, args)
        shown = _parts(module, ("weight", "weight" + SCALES, "bias"), group)
        if (lora_B := own.get(B)) is not None:
            shown[B] = group.mine(lora_B)
        _show(module, shown)
        if isinstance(module, Linear) and module.is_fp8:
            module.division = Division("outputs", group)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        _hide(module)


class _Alike:
    """Hook of a linear layer in fp8 that is in a region and not divided: it looks at each token by itself."""

    def __init__(self, parallel: TensorParallel, region: "_Region"):
        self.parallel, self.region = parallel, region

    def enter(self, module: Linear, args: Any) -> None:
        group, tokens, (x, *_) = self.parallel.group, self.region.tokens, args
        # of heads, which ranks have different ones of, gradients would be no summands
        if group.ranks is None and tokens and x.shape[:-1].numel() != tokens:
            raise _unlike(self.parallel, module, f"is given a tensor of shape {tuple(x.shape)}, of {tokens} tokens")
        module.division = Division("nothing", group)


class _Rowwise:
    """Hooks of a linear layer that is divided by its inputs, and whose results are added up.

    Args:
        is_attention: whether the ranks' positions lie one after the other in each sequence, not in all rows.
    """

    def __init__(self, parallel: TensorParallel, is_attention: bool):
        self.parallel, self.is_attention = parallel, is_attention

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        group, own = self.parallel.group, module._parameters
        shown = _parts(module, ("weight", "weight" + SCALES), group)
        shown["bias"] = None  # it is added once, to the sum
        if (lora_A := own.get(A)) is not None:
            shown[A] = group.mine(lora_A, dim=1)
        _show(module, shown)
        if isinstance(module, Linear) and module.is_fp8:
            module.division = Division("inputs", group)

    def overlapped(self, layer: Any, x: Tensor) -> Tensor:
        """The layer's forward beside the exchange of its results, which are this rank's alone."""
        parallel, weight_KN = self.parallel, layer.weight
        assert parallel.operators is not None
        if not self.is_attention or x.dim() == 3:
            return multiply_scatter(parallel.operators, x, weight_KN, 1 if self.is_attention else 0)
        by_sequence = x.unflatten(0, (parallel.sequences, -1))
        return multiply_scatter(parallel.operators, by_sequence, weight_KN, 1).flatten(0, 1)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        _hide(module)
        if not isinstance(output, Tensor):
            return None  # it has failed
        parallel, bias = self.parallel, module._parameters.get("bias")
        if "forward" in vars(module):
            summed = output  # see `_Region.begin`
        elif parallel.sequences is None:
            summed = parallel.group.all_reduce(output)
        elif parallel.rearranged:
            summed = parallel.group.sum(output)
        elif self.is_attention:
            by_sequence = output.unflatten(0, (parallel.sequences, -1)) if output.dim() == 2 else output
            summed = parallel.group.reduce_scatter(by_sequence, 1)
            summed = summed.flatten(0, 1) if output.dim() == 2 else summed
        else:
            summed = parallel.group.reduce_scatter(output, 0)
        return summed if bias is None else summed + bias


class _FullWidth:
    """Hooks of a module that needs all of a token's outputs of a colwise layer at once, such as a norm over them: it is
    given all columns of some of the positions."""

    def __init__(self, parallel: TensorParallel):
        self.parallel = parallel

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        (x,), group = args, self.parallel.group
        if self.parallel.sequences is None:
            return (group.all_gather(x, -1),), kwargs
        if self.parallel.rearranged:
            return (group.gather(x, -1),), kwargs
        return (group.to_positions(x.flatten(0, -2), 0),), kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        group = self.parallel.group
        if self.parallel.sequences is None or self.parallel.rearranged:
            return group.mine(output, -1)
        columns = group.to_columns(output, 0)
        return columns.unflatten(0, (self.parallel.sequences, -1))


class _Region:
    """What the hooks of a region have in common.

    Attributes:
        first: the layers that take what the region is given, by where it stands among the arguments: as the forward in
            which the model is tried has shown.
        last: the layers that end it.
        kept: what autograd keeps while it runs, where it does.
        tokens: that it has gathered, while it runs; 0 where it computes other sequences than it is given.
    """

    def __init__(self, parallel: TensorParallel, region: Region):
        self.parallel, self.region = parallel, region
        self.first: dict[str, list[nn.Linear]] = {}
        self.last: dict[nn.Module, _Rowwise] = {}
        self.given: dict[int, str] = {}
        self.kept: KeptPositions | None = None
        self.tokens = 0

    def note_first(self, layer: Any, args: Any) -> None:
        """A layer is called in the forward in which the model is tried."""
        name = self.given.get(id(args[0]))
        if name is not None and layer not in self.first.setdefault(name, []):
            self.first[name].append(layer)

    @property
    def first_layers(self) -> list[nn.Linear]:
        return [layer for taking in self.first.values() for layer in taking]

    def overlapping_ends(self, quantized: Collection[nn.Module]) -> tuple[bool, bool]:
        """Whether matmuls at its beginning, and at its end, can run beside its exchanges."""
        begins, ends = (
            any(only_multiplies(layer) and layer not in quantized for layer in layers)
            for layers in (self.first_layers, self.last)
        )
        return begins, ends

    def gather(self, name: str, x: Tensor, dim: int) -> Tensor:
        """All ranks' positions of what the region is given, and at once the outputs of layers that take it."""
        # which of them have been quantized since, shows only now
        parallel, layers = self.parallel, [layer for layer in self.first.get(name, ()) if only_multiplies(layer)]
        if self.kept is None and not is_kept_otherwise():
            self.kept = KeptPositions()
            self.kept.__enter__()
        note = partial(self._note, x, dim)
        if parallel.operators is None or not layers:
            gathered = parallel.group.gather(x, dim)
            note(gathered)
            self.given[id(gathered)] = name
            return gathered
        weights = [_part(layer.get_parameter("weight"), parallel.group) for layer in layers]
        gathered, outputs = gather_multiply(parallel.operators, parallel.group, x, weights, dim, note)
        for layer, output in zip(layers, outputs, strict=True):
            vars(layer)["forward"] = partial(_known, layer, output)
        return gathered

    def begin(self, split: SplitSequences, rearranged: bool = False) -> None:
        self.parallel.sequences, self.parallel.rearranged = len(split.positions_BS), rearranged
        tokens = split.positions_BS.numel() * self.parallel.group.size // split.cp_group.size
        self.tokens = 0 if rearranged else tokens
        for last, hooks in self.last.items():
            if self.parallel.operators is not None and only_multiplies(last) and not rearranged:
                vars(last)["forward"] = partial(hooks.overlapped, last)

    def _note(self, x: Tensor, dim: int, gathered: Tensor) -> None:
        if self.kept is not None:
            self.kept.note(gathered, self.parallel.group, x, dim)

    def end(self) -> None:
        if self.kept is not None:
            self.kept.__exit__()
            self.kept = None
        self.parallel.sequences, self.parallel.rearranged, self.tokens = None, False, 0
        self.given.clear()
        for layer in (*self.last, *self.first_layers):
            vars(layer).pop("forward", None)


def _known(layer: Any, output: Tensor, x: Tensor) -> Tensor:
    return output if layer.bias is None else output + layer.bias


class _ByToken(_Region):
    """Hooks of a region that looks at each token by itself."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parallel = self.parallel
        split = _split_by_tp()
        if split is None:
            _refuse_gradients(args)
            return None
        tensors = [leaf for leaf in tree_flatten((args[1:], kwargs))[0] if isinstance(leaf, Tensor)]
        if tensors or not isinstance(args[0], Tensor):
            raise _unlike(parallel, module, "is given other tensors than its tokens")
        self.begin(split)
        return (self.gather("0", args[0], 0), *args[1:]), kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.end()


class _Attention(_Region):
    """Hooks of a region that mixes positions."""

    def __init__(self, parallel: TensorParallel, region: Region):
        super().__init__(parallel, region)
        self.values = [path.rpartition(".")[2] for path in region.values]
        self.dims: dict[str, int | None] = {}
        self.inside: Forward | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parallel, split = self.parallel, _split_by_tp()
        _show(module, {name: _part(module.get_parameter(name), parallel.group) for name in self.values})
        if split is None:
            _refuse_gradients((args, kwargs))
            return None
        forward = current_forward()
        assert forward is not None
        if forward.within_tp is None:
            forward.within_tp = Within(_inside(forward), forward.gathered)
        within: Within = forward.within_tp
        args, kwargs = self._gathered(module, (args, kwargs), split, within)
        self.begin(split, rearranges(module.forward, within.forward))
        self.inside = within.forward.__enter__()
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        _hide(module)
        rearranged = self.parallel.rearranged
        self.end()
        if self.inside is not None:
            self.inside.__exit__()
            self.inside = None
        if not rearranged or output is None:
            return None
        leaves, structure = tree_flatten(output)
        return tree_unflatten([self.parallel.group.mine(leaves[0], dim=1), *leaves[1:]], structure)

    def _gathered(self, module: nn.Module, given: Any, split: SplitSequences, within: "Within") -> Any:
        """The arguments, with the positions of all the group's ranks."""
        with_paths, structure = tree_flatten_with_path(given)
        leaves = []
        for path, leaf in with_paths:
            if isinstance(leaf, Tensor):
                name = str(path)
                if name not in self.dims:
                    self.dims[name] = self._dim_of_positions(module, leaf, split)
                if (dim := self.dims[name]) is not None:
                    is_hidden = leaf.requires_grad or name in self.first or self.parallel.group.ranks is None
                    group = self.parallel.group
                    leaf = self.gather(name, leaf, dim) if is_hidden else within.gather(leaf, dim, group)
            leaves.append(leaf)
        return tree_unflatten(leaves, structure)

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
            raise _unlike(self.parallel, module, f"is given a tensor of shape {tuple(x.shape)}, of {length} positions")
        return dims[0] if dims else None


_MOST_GATHERED = 8
"""Tensors that are kept for the next layers: cosines and sines of a few kinds of rotary positions."""


class Within:
    """What the regions of a forward have in common.

    Attributes:
        forward: the `Forward` for what is in them.
        gathered: see `Forward`.
    """

    def __init__(self, forward: Forward, gathered: dict[int, tuple[Tensor, Tensor]]):
        self.forward, self.gathered = forward, gathered

    def gather(self, x: Tensor, dim: int, group: TPGroup) -> Tensor:
        """All ranks' positions of what has no gradient, as rotary positions, once for all layers."""
        if not torch.is_grad_enabled():
            return group.gather(x, dim)
        known = self.gathered.pop(id(x), None) or (x, group.all_gather(x, dim))
        self.gathered[id(x)] = known
        # hidden states of frozen layers have no gradient either, and are not asked for again
        if len(self.gathered) > _MOST_GATHERED:
            del self.gathered[next(iter(self.gathered))]
        return known[1]


def _inside(forward: Forward) -> Forward:
    within = forward.split.cp_group.within_tp
    if within is not None:
        return forward.of_split(replace(forward.split, cp_group=within))
    complete = forward.of_complete_sequences(forward.segments)
    complete.layout = None
    return complete


def _split_by_tp() -> SplitSequences | None:
    """The sequences of the current forward, where a tensor-parallel group splits them."""
    forward = current_forward()
    split: SplitSequences | None = None if forward is None else forward.split
    return None if split is None or split.cp_group.tp is None else split


def _refuse_gradients(given: Any) -> None:
    leaves, _ = tree_flatten(given)
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise ExpertMeshError(
            "--tp-size: gradients are computed of batches that the ranks of a tensor-parallel group split: call the "
            "engine's step, or forward_backward, in place of the model; without gradients the model may be called"
        )


def _unlike(parallel: TensorParallel, module: nn.Module, how: str) -> ExpertMeshError:
    return ExpertMeshError(
        f"--tp-size {parallel.group.size}: {type(module).__name__} {how}, and it is not known how to divide it; leave "
        "--tp-size out"
    )
