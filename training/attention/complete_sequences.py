"""Context parallelism for what mixes positions otherwise than by attention that goes through transformers' interface:
layers that carry a state, convolve, select or compress tokens.

Such a part of a layer (a mixer) is given complete sequences: each rank of a CP group gets some of those that the group
splits, computes these at all positions, and sends the results to the ranks of the positions. So nothing needs to be
known of what it computes. Mixers are recognised by the cache that they take (`layer_kinds.mixers_of`).

Shape suffixes: B sequences, n of them complete on this rank, S positions, L = S/c of them on this rank.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ...moe.experts.forward import Forward, current_forward
from ...moe.hf_model.trial import counts_tokens
from ...moe.util.errors import ExpertMeshError
from ..data.batch import SplitSequences
from .by_sample import BySample
from .packed_attention import tells_window

Place = Literal["positions", "axes", "sequences", "all"]
"""Which part of an argument is on each rank: its positions of all sequences, (B, L, ...) or (1, L, ...); the same
with several positions per token ahead, (axes, B, L); all positions of all sequences, (B, ...); what is used as it is:
what all sequences have in common, or indices of chosen tokens from a mixer of an earlier layer, (n, S, ...)."""


class CompleteSequences:
    """The forward of a mixer, with complete sequences in every `Forward` that is split over a CP group; the mixer's own
    in others.

    Which of its arguments are of positions it learns by their shapes in the first such forward: in that, no size of the
    model may be equal to the numbers of sequences and positions.

    Args:
        mixer: it gets this as its forward.
    """

    def __init__(self, mixer: nn.Module):
        self.mixer = mixer
        self.forward: Callable[..., Any] = mixer.forward
        self.places: dict[str, Place] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = current_forward()
        if forward is None or forward.split is None:
            return self.forward(*args, **kwargs)
        split: SplitSequences = forward.split
        segments = None if forward.segments is None else _segments_here(forward.segments, split)
        if kwargs.get("segments") is not None:
            kwargs["segments"] = segments
        args, kwargs = _complete(self.mixer, (args, kwargs), self.places, split)
        complete = forward.of_complete_sequences(segments)
        with complete:
            output = self.forward(*args, **kwargs)
        forward.layout = complete.layout
        return _ranges(output, split)


def complete_sequences_line(model: Any, cp_size: int, sequences: int) -> str | None:
    """How context parallelism computes what mixes positions otherwise than by attention, in words; None: there is no
    such part of a layer.

    Args:
        sequences: per micro-batch and CP group.
    """
    counts = Counter(type(part).__name__ for part in model.modules() if isinstance(part.forward, CompleteSequences))
    if not counts:
        return None
    mixers = ", ".join(f"{number} {name}" for name, number in counts.items())
    line = f"context parallelism: {mixers} with complete sequences, {-(-sequences // cp_size)} of {sequences} per rank"
    if sequences < cp_size:
        ranks = cp_size // sequences
        line += f": {ranks} ranks compute the same sequence, and each stores all its activations in these layers"
    return line


def rearranges(mixer: Callable[..., Any], forward: Forward) -> bool:
    """Whether what is a mixer's forward computes other sequences in a `Forward` than it is given."""
    if isinstance(mixer, CompleteSequences):
        return forward.split is not None or rearranges(mixer.forward, forward)
    return isinstance(mixer, BySample) and forward.segments is not None


def _ranges(output: Any, split: SplitSequences) -> Any:
    """What a mixer has returned, at this rank's positions."""
    number, length = split.positions_BS.shape
    here = len(split.cp_group.sequences_of(split.cp_group.index, number))
    leaves, structure = tree_flatten(output)
    # indices of chosen tokens stay complete, for the mixers of later layers: ranks may have different numbers of them
    complete = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape[:2] == (here, length)]
    of_positions = [i for i in complete if not counts_tokens(leaves[i].dtype, leaves[i].dim())]
    ranges = iter(split.cp_group.to_ranges(number, *(leaves[i] for i in of_positions)))
    for i, leaf in enumerate(leaves):
        if i in of_positions:
            leaves[i] = next(ranges)
        elif isinstance(leaf, Tensor) and i not in complete:
            # a state at the end of the sequences: who reads it must not find a part of them
            leaves[i] = leaf.new_empty(0)
    return tree_unflatten(leaves, structure)


def _complete(mixer: nn.Module, given: Any, places: dict[str, Place], split: SplitSequences) -> Any:
    """The arguments of a mixer, for this rank's sequences at all positions."""
    group, number = split.cp_group, len(split.positions_BS)
    mine = group.sequences_of(group.index, number)
    with_paths, structure = tree_flatten_with_path(given)
    leaves: list[Any] = [leaf for _, leaf in with_paths]
    of_positions = []
    for i, (path, leaf) in enumerate(with_paths):
        if not isinstance(leaf, Tensor):
            continue
        name = str(path)
        if name not in places:
            places[name] = _place(mixer, getattr(path[-1], "key", None), leaf, split)
        if places[name] in ("positions", "axes"):
            of_positions.append(i)
            x_BL = leaf.movedim(0, -1) if places[name] == "axes" else leaf
            leaves[i] = x_BL.expand(number, *x_BL.shape[1:])
        elif places[name] == "sequences":
            leaves[i] = leaf[mine.start : mine.stop]
    complete = group.to_sequences(*(leaves[i] for i in of_positions))
    for i, x_nS in zip(of_positions, complete, strict=True):
        leaves[i] = x_nS.movedim(-1, 0) if places[str(with_paths[i][0])] == "axes" else x_nS
    return tree_unflatten(leaves, structure)


def _place(mixer: nn.Module, name: str | None, x: Tensor, split: SplitSequences) -> Place:
    group, (number, full_length) = split.cp_group, split.positions_BS.shape
    length, shape = full_length // group.size, tuple(x.shape)
    here = len(group.sequences_of(group.index, number))
    if tells_window(x) or (counts_tokens(x.dtype, x.dim()) and shape[:2] == (here, full_length)):
        return "all"
    # where tokens have several, of images' time, height and width. By its shape alone it might be something else: there
    # may be as many sequences as axes
    if name == "position_ids" and shape[1:] in [(1, length), (number, length)]:
        return "axes"
    if shape[1:2] == (length,) and shape[0] in (1, number) and length not in shape[2:]:
        return "positions"
    # a mask may be left out of short sequences, as those that a model is tried with: so it may be of any length
    is_mask = x.dim() == 4 and shape[-1] == full_length
    if length in shape and not is_mask:
        raise ExpertMeshError(
            f"--cp-size {group.size}: {type(mixer).__name__} gets a tensor of shape {shape} for "
            f"{number} sequences of {full_length} positions; which part belongs to which rank is "
            "unknown; leave --cp-size out"
        )
    return "sequences" if shape[:1] == (number,) else "all"


def _segments_here(segments: tuple[int, ...], split: SplitSequences) -> tuple[int, ...]:
    """Of the lengths of all sequences' samples, those of this rank's."""
    number, length = split.positions_BS.shape
    mine = split.cp_group.sequences_of(split.cp_group.index, number)
    here, end = [], 0
    for segment in segments:
        if mine.start * length <= end < mine.stop * length:
            here.append(segment)
        end += segment
    return tuple(here)
