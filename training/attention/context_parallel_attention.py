"""Context-parallel attention: any of transformers' attentions, on some heads of the full sequences.

It stands between a model and the attention that was chosen, in transformers' registry of such functions, and so serves
every family whose attention goes by it. Masks are made of the full sequences too. What mixes positions otherwise gets
complete sequences (`training.attention.complete_sequences`).

Shape suffixes: B sequences, S positions, L of them on this rank, H heads, G heads of keys and values, h and g of them
on this rank, A head width.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...moe.experts.forward import Forward, current_forward
from ...moe.experts.model_layers import decoder_layers
from ...moe.hf_model.build import without_computing
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...sharding.collectives.context_parallel import CPGroup
from ...sharding.collectives.tensor_parallel import TPGroup
from ...sharding.topology import divisors, either
from ..data.batch import SplitSequences, collate
from ..data.samples import Sample
from .by_sample import BySample
from .complete_sequences import CompleteSequences
from .layer_kinds import attends, kinds_by_layer, mixers_of, seen_in
from .packed_attention import BOTH_WAYS, CP_PREFIX, OWN, run_model, window_told

_IN_MASK = frozenset({"position_ids"})
"""Tensors that attention is given and does not need: what they say is in the mask, or in the order of the positions."""


def apply_context_parallel(model: Any, cp_size: int, packing: bool, tp_size: int = 1) -> None:
    """Have a model's attention see full sequences, and other mixers complete ones, in place: in a `Forward` that is
    split over a CP group; in others they stay what they were.

    It is tried at once, in a forward on the meta device. That shows layers without attention, or with one that knows
    nothing of full sequences; those that mix tokens beside their attention are told by the config's names of kinds of
    layers and by modules of convolutions.

    Args:
        model: from `build_model`, on the meta device.
        cp_size: size of the CP group, or a multiple of it.
        packing: whether sequences will hold several samples.
        tp_size: of a tensor-parallel group, whose ranks share sequences too.

    Raises:
        ExpertMeshError: `cp_size` does not divide the heads; or a layer sees other tokens by what is neither attention
            that goes through transformers' interface nor a module that takes a cache.
    """
    begin_change(model, "context parallelism")
    inner = model.config._attn_implementation
    for layer, kind in zip(decoder_layers(model), kinds_by_layer(model), strict=True):
        is_by_sample = any(isinstance(part.forward, BySample) for part in layer.modules())
        if is_by_sample or _convolves(layer) or not attends(kind):
            _mix_complete(model, inner, layer, kind or type(layer).__name__)
    AttentionInterface.register(CP_PREFIX + inner, partial(cp_attention, inner))
    if inner in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(CP_PREFIX + inner, partial(full_sequence_mask, inner))
    text, parts = (
        model.config.get_text_config(),
        [getattr(model.config, name, None) for name in model.config.sub_configs],
    )
    beside = [(part, part._attn_implementation) for part in parts if part and part.get_text_config() is not text]
    model.config._attn_implementation = CP_PREFIX + inner
    for part, of_images in beside:  # images are complete on every rank
        part._attn_implementation = of_images
    for module in model.modules():
        if looks_for_longest(module):
            module.register_forward_pre_hook(_with_full_positions, with_kwargs=True)
            module.register_forward_hook(_cut_to_this_rank)
    group = _shape_of_group(cp_size, tp_size)
    if silent := _try(model, inner, group, packing):
        for layer in silent:
            _mix_complete(model, inner, layer, type(layer).__name__)
        _try(model, inner, group, packing)


def _shape_of_group(cp_size: int, tp_size: int) -> CPGroup:
    if tp_size == 1:
        return CPGroup(cp_size, 0, None)
    within = CPGroup(cp_size, 0, None) if cp_size > 1 else None
    return CPGroup(cp_size * tp_size, 0, None, TPGroup(tp_size, 0, None), within)


def _convolves(part: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in part.modules())


def _mix_complete(model: Any, inner: str, layer: nn.Module, which: str) -> None:
    """Have a layer's mixers compute complete sequences, by the attention within. They are to see its name: by that,
    modules that select tokens decide whether their attention gets a mask of these or, as a kernel would, indices.

    Raises:
        ExpertMeshError: nothing in the layer takes a cache, or it convolves beside what does.
    """
    mixers = list(mixers_of(layer))
    rest = {module for module in layer.modules() if _convolves(module)}
    rest -= {layer, *(module for mixer in mixers for module in mixer.modules())}
    if not mixers or rest:
        raise ExpertMeshError(
            f"--cp-size: layers of {type(model).__name__} ({which}) read other tokens by something "
            "else than attention or a module with a cache, which cannot be split over ranks; leave "
            "--cp-size out"
        )
    for mixer in mixers:
        mixer.forward = CompleteSequences(mixer)
        for module in mixer.modules():
            if "config" in vars(module):
                vars(module)["config"] = _Seen(module.config, _attn_implementation=inner)


def looks_for_longest(module: nn.Module) -> bool:
    """Whether it gives rotary positions of a kind, or of a scale, that depends on the longest position of a forward."""
    types = getattr(module, "rope_type", None)
    if types is None:
        return False
    # a type with a scale of its own for long sequences takes it by the longest position, whatever the kind
    has_two_scales = "long_mscale" in (getattr(module.config, "rope_parameters", None) or {})
    kinds = types.values() if isinstance(types, dict) else [types]
    return has_two_scales or any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _with_full_positions(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before it is called: replace this rank's positions by those of the full sequences."""
    split = _split_sequences()
    if split is None:
        return None
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": split.positions_BS}
    return (args[0], split.positions_BS, *args[2:]), kwargs


def _cut_to_this_rank(rotary: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """After it: keep this rank's positions of what it gave."""
    split = _split_sequences()
    if split is None:
        return output
    size, index = split.cp_group.size, split.cp_group.index
    return tree_map_only(Tensor, lambda x_BSA: x_BSA.chunk(size, dim=1)[index].contiguous(), output)


def _split_sequences() -> SplitSequences | None:
    """The sequences of the current forward, where a CP group splits them."""
    forward = current_forward()
    return None if forward is None else forward.split


@torch.no_grad()
def _try(model: Any, inner: str, cp_group: CPGroup, packing: bool) -> list[nn.Module]:
    """Run a forward of sequences split over a CP group, of which the shapes alone are computed; returns the layers that
    have neither called attention nor a mixer with complete sequences, and are not known to have none."""
    modules, heads, size = [], 0, cp_group.size
    flag = f"--cp-size {size}" if cp_group.tp is None else f"--tp-size {cp_group.tp.size}"
    # of the group that divides heads
    cp_size = 1

    def remembered(
        module: Any, query_BHLA: Tensor, key_BGLA: Tensor, value_BGLA: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal heads, cp_size
        modules.append(module)
        if (split := _split_sequences()) is None:
            return cp_attention(inner, module, query_BHLA, key_BGLA, value_BGLA, *args, **kwargs)
        rows, num_heads, length, _ = query_BHLA.shape
        heads, cp_size = gcd(heads, num_heads), split.cp_group.size
        if num_heads % cp_size:
            # no rank could have its heads: the error comes when those of all layers are known
            return query_BHLA.new_empty(rows, length, num_heads, value_BGLA.shape[-1]), None
        return cp_attention(inner, module, query_BHLA, key_BGLA, value_BGLA, *args, **kwargs)

    samples = [Sample.of_prompt([0] * _unlike_sizes(model, size) * size, 1)] * 2
    batch = collate([samples if packing else samples[:1]] * 3, cp_group).to(torch.device("meta"))
    with without_computing(model):
        AttentionInterface.register(CP_PREFIX + inner, remembered)
        try:
            run_model(model, batch, Forward(split=batch.split, segments=batch.segments))
        except ExpertMeshError:
            raise
        except Exception as error:
            raise ExpertMeshError(
                f"{flag}: {type(model).__name__} does not run with sequences split over ranks: "
                f"{type(error).__name__}: {error}; leave it out"
            ) from error
        finally:
            AttentionInterface.register(CP_PREFIX + inner, partial(cp_attention, inner))
    if heads % cp_size:
        left = "" if cp_group.tp is None else f" that a rank has at --tp-size {cp_group.tp.size}"
        raise ExpertMeshError(
            f"--cp-size {cp_size} does not divide the {heads} attention heads of this model's layers{left}; "
            f"use {either(divisors(heads))}"
        )
    return [
        layer
        for layer, kind in zip(decoder_layers(model), kinds_by_layer(model), strict=True)
        if seen_in(kind) != "itself"
        and not any(part in modules or isinstance(part.forward, CompleteSequences) for part in layer.modules())
    ]


def _unlike_sizes(model: Any, cp_size: int) -> int:
    """Positions per rank for a trial, such that no size of the model is equal to them or to those of some of the ranks:
    tensors' shapes tell them apart."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {leaf for leaf in tree_leaves(model.config.to_dict()) if isinstance(leaf, int)}
    return next(length for length in count(5, 2) if sizes.isdisjoint(length * ranks for ranks in divisors(cp_size)))


def full_sequence_mask(inner: str, **arguments: Any) -> Any:
    """The mask for attention by `inner`, in the signature of transformers' mask functions; for the full sequences where
    a CP group splits them."""
    split, function = _split_sequences(), masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[inner]
    if split is None:
        return function(**arguments)
    length = arguments["q_length"] * split.cp_group.size
    arguments |= {"q_length": length, "kv_length": length}
    if split.is_packed and inner not in (OWN, BOTH_WAYS):
        positions_BS = split.positions_BS
        before_BS = torch.cat([positions_BS[:, :1] - 1, positions_BS[:, :-1]], dim=1)
        sample_BS = (positions_BS != before_BS + 1).cumsum(dim=1)
        arguments["mask_function"] = masking_utils.and_masks(
            masking_utils.packed_sequence_mask_function(sample_BS),
            _by_positions(arguments["mask_function"], positions_BS),
        )
        arguments["allow_is_causal_skip"] = False
    return function(**arguments)


def _by_positions(mask_function: Callable[..., Any], positions_BS: Tensor) -> Callable[..., Any]:
    """A mask function of transformers that asks `mask_function` of positions within samples, not within rows."""

    def of_positions(row: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(row, head, positions_BS[row, query], positions_BS[row, key])

    return of_positions


def cp_attention(
    inner: str,
    module: Any,
    query_BHLA: Tensor,
    key_BGLA: Tensor,
    value_BGLA: Tensor,
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention by `inner`, in the signature of transformers' attention functions; (B, L, H, A) out, where A is the
    width of the values. Where a CP group splits sequences it is over the full ones.

    Raises:
        ExpertMeshError: the module gives its attention a tensor, or a mask, that is not of the full sequences.
    """
    changed: dict[str, Any] = {"config": _Seen(module.config, _attn_implementation=inner)}
    split = _split_sequences()
    if split is None:
        seen = _Seen(module, **changed)
        out_BLHA, _ = _function(inner, module)(seen, query_BHLA, key_BGLA, value_BGLA, attention_mask, **arguments)
        return out_BLHA, None
    group = split.cp_group
    num_heads, num_groups = query_BHLA.shape[1], key_BGLA.shape[1]
    arguments = {name: _of_heads(module, name, value, num_heads, group) for name, value in arguments.items()}
    if getattr(module, "sinks", None) is not None:
        changed["sinks"] = _mine(module.sinks, group)
    # KV heads are replicated if CP does not divide them, so that each rank has its own
    copies = lcm(num_groups, group.size) // num_groups
    if copies > 1:
        key_BGLA, value_BGLA = (x.repeat_interleave(copies, dim=1) for x in (key_BGLA, value_BGLA))
    query_BhSA, key_BgSA, value_BgSA = group.to_heads(query_BHLA, key_BGLA, value_BGLA)
    changed["num_key_value_groups"] = query_BhSA.shape[1] // key_BgSA.shape[1]
    mask = _mask_of_heads(module, attention_mask, num_heads, query_BhSA.shape[2], group)
    seen = _Seen(module, **changed)
    out_BShA, _ = _function(inner, module)(seen, query_BhSA, key_BgSA, value_BgSA, mask, **arguments)
    return group.to_positions(out_BShA), None


_EAGER = "eager_attention_forward"


class _Seen:
    """An attention module, or its config, as its attention function is to see it: the module itself, except for what is
    set here."""

    def __init__(self, itself: Any, **changed: Any):
        self._itself = itself
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        if name == "_itself" or name.startswith("__"):
            # asked for by what copies it, before it has anything
            raise AttributeError(name)
        return getattr(self._itself, name)


def _function(inner: str, module: Any) -> Callable[..., Any]:
    if inner == "eager":
        # each family has its own, beside its attention, whose class FSDP may have derived another from
        files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
        eager: Callable[..., Any] = next(file[_EAGER] for file in files if _EAGER in file)
        return eager
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[inner]
    return function


def _of_heads(module: Any, name: str, value: Any, num_heads: int, group: CPGroup) -> Any:
    """What attention is given beside queries, keys and values, for this rank's heads."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return value
    if name in _IN_MASK:
        return None
    if isinstance(value, Tensor) and value.shape == (num_heads,):
        return _mine(value, group)
    raise ExpertMeshError(
        f"--cp-size {group.size}: {type(module).__name__} gives its attention {name}, which "
        "expertmesh cannot split over a CP group; leave --cp-size out"
    )


def _mask_of_heads(module: Any, mask: Any, num_heads: int, length: int, group: CPGroup) -> Any:
    if not isinstance(mask, Tensor) or window_told(mask, length) is not None:
        return mask
    if mask.shape[-1] not in (1, length):
        raise ExpertMeshError(
            f"--cp-size {group.size}: {type(module).__name__} gives its attention a mask of "
            f"{mask.shape[-1]} positions, not made by transformers' mask functions; complete "
            f"sequences have {length}; leave --cp-size out"
        )
    return _mine(mask.transpose(0, 1), group).transpose(0, 1) if mask.shape[1] == num_heads > 1 else mask


def _mine(of_heads: Tensor, group: CPGroup) -> Tensor:
    """This rank's part of dim 0."""
    return of_heads.chunk(group.size)[group.index]
