"""Packed sequences in modules that no mask keeps within a sample: while one of these runs, each sample is a sequence of
its own, padded on the right.

So a state, a convolution, a block of tokens or a choice of tokens begins anew with each sample, by the family's own
code: these modules are causal, and padding behind a sample changes nothing within it. All else of a layer, experts
above all, computes packed sequences. Which modules these are is found by trying.

Shape suffixes: B sequences, S positions, N = B·S positions of all sequences, M positions of all samples with their
padding, n samples of like length, L positions of the longest of them, Q queries and K keys of a sequence.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...moe.experts.forward import Forward, current_forward
from ...moe.experts.layer import DMoE
from ...moe.experts.model_layers import decoder_layers
from ...moe.hf_model.trial import counts_tokens, standing_in_for_weights
from ...moe.util.errors import ExpertMeshError
from ..data.batch import Batch, collate
from ..data.samples import Sample
from .layer_kinds import kinds_by_layer, seen_by_mask
from .packed_attention import tells_window
from .run_model import run_model

_ALIKE = 0.75
"""Samples that are at least this fraction as long as the longest are padded to its length."""

_CPU = torch.device("cpu")
_TRIED = [[5, 1, 7, 3], [9, 3, 2]]
"""Lengths of samples of the sequences that a model is tried with."""
_DIFFERENCE = 1e-3
"""By how much results of a trial have to differ, relative to the largest, to be more than rounding. What samples see of
one another changes them by far more."""


@dataclass(frozen=True)
class SampleLayout:
    """Where the positions of packed sequences go, as sequences of one sample each.

    place_M: for each position of these, which one of all N it is; behind a sample its last one is repeated.
    back_N: for each of all N, which one of the M it becomes.
    sizes: (n, L) of the batches of samples of like length, that the M make one after the other.
    """

    place_M: Tensor
    back_N: Tensor
    sizes: tuple[tuple[int, int], ...]


def lay_out(segments: Sequence[int], device: torch.device) -> SampleLayout:
    """The layout of samples of these lengths. At most a quarter of its positions are padding."""
    lengths = np.array(segments)
    starts = np.cumsum(lengths) - lengths
    by_length = np.argsort(-lengths, kind="stable")
    places, sizes, back = [], [], np.empty(lengths.sum(), dtype=np.int64)
    first = done = 0
    while first < len(by_length):
        longest = int(lengths[by_length[first]])
        alike = int((lengths >= _ALIKE * longest).sum())
        chosen = by_length[first:alike]
        place_nL = starts[chosen, None] + np.minimum(np.arange(longest), lengths[chosen, None] - 1)
        places.append(place_nL.ravel())
        is_sample_nL = np.arange(longest) < lengths[chosen, None]
        back[place_nL[is_sample_nL]] = done + np.flatnonzero(is_sample_nL)
        sizes.append((len(chosen), longest))
        first, done = alike, done + place_nL.size
    return SampleLayout(
        torch.tensor(np.concatenate(places), device=device), torch.tensor(back, device=device), tuple(sizes)
    )


class _UnknownError(Exception):
    """A module takes something that cannot be rearranged sample by sample."""


class BySample:
    """The forward of a module, with each sample of packed sequences as a sequence of its own; the module's own forward
    where the current `Forward` has one sample per sequence.

    What the module gives and takes that has a value per position, (B, S, ...), is rearranged; of masks, (B, ., Q, K),
    the parts within samples are taken. Integers with a value per position and key, as indices of chosen tokens are,
    count from the start of a sample.
    """

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = current_forward()
        segments = None if forward is None else forward.segments
        if forward is None or segments is None:
            return self.forward(*args, **kwargs)
        assert forward.split is None, "it is given complete sequences"
        if forward.layout is None:
            forward.layout = lay_out(segments, next(x.device for x in tree_leaves((args, kwargs)) if _is_tensor(x)))
        return by_sample(self.forward, forward.layout, *args, **kwargs)


def by_sample(forward: Callable[..., Any], layout: SampleLayout, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward once for each batch of a layout, with the arguments of packed sequences, and return its
    results for these."""
    # each sequence is a sample now
    kwargs = {name: value for name, value in kwargs.items() if name != "segments"}
    leaves, structure = tree_flatten((args, kwargs))
    sizes = (leaf.shape[:2] for leaf in leaves if _is_tensor(leaf) and leaf.dim() > 1)
    shape = next(size for size in sizes if size.numel() == len(layout.back_N))
    cut = [_cut(leaf, shape, layout) for leaf in leaves]
    results = []
    for index in range(len(layout.sizes)):
        own_args, own_kwargs = tree_unflatten([leaf[index] for leaf in cut], structure)
        results.append(tree_flatten(forward(*own_args, **own_kwargs)))
    structure = results[0][1]
    together = zip(*(leaves for leaves, _ in results), strict=True)
    return tree_unflatten([_put_back(parts, shape, layout) for parts in together], structure)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _cut(leaf: Any, shape: torch.Size, layout: SampleLayout) -> Sequence[Any]:
    """An argument for each batch of the layout."""
    rows, length = shape
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return [leaf] * len(layout.sizes)
    if leaf.dim() == 4 and leaf.shape[1] != length:
        return _cut_mask(leaf, shape, layout)
    if leaf.shape[:2] == (1, length):
        leaf = leaf.expand(rows, *leaf.shape[1:])
    if leaf.shape[:2] != shape:
        return [leaf] * len(layout.sizes)
    parts = leaf.flatten(0, 1).index_select(0, layout.place_M).split([n * longest for n, longest in layout.sizes])
    together = [part.unflatten(0, size) for part, size in zip(parts, layout.sizes, strict=True)]
    if not counts_tokens(leaf.dtype, leaf.dim()):
        return together
    # of indices of chosen tokens there are at most as many as tokens
    return [part[..., : part.shape[1]] for part in together]


def _cut_mask(mask: Tensor, shape: torch.Size, layout: SampleLayout) -> Sequence[Any]:
    """Within samples it is as it was; padding is unseen by all before it."""
    rows, length = shape
    if mask.shape[-2:] != (length, length):
        if not tells_window(mask):
            raise _UnknownError(f"an argument of shape {tuple(mask.shape)}, in sequences of {tuple(shape)}")
        return [mask if mask.shape[-1] < longest else None for _, longest in layout.sizes]
    mask_BHQK = mask.expand(rows, *mask.shape[1:])
    cut = []
    for place_M, size in zip(layout.place_M.split([n * long for n, long in layout.sizes]), layout.sizes, strict=True):
        place_nL = place_M.view(size)
        row_n11, place_nL = (place_nL[:, 0] // length).view(-1, 1, 1), place_nL % length
        mask_nQKH = mask_BHQK.movedim(1, -1)[row_n11, place_nL.unsqueeze(2), place_nL.unsqueeze(1)]
        is_later_QK = torch.ones(size[1], size[1], dtype=torch.bool, device=mask.device).triu(1)
        unseen = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        cut.append(mask_nQKH.movedim(-1, 1).masked_fill(is_later_QK, unseen))
    return cut


def _put_back(parts: Sequence[Any], shape: torch.Size, layout: SampleLayout) -> Any:
    """A result for packed sequences, of those of the layout's batches; None for what has no value per position, as a
    matrix of attention."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if any(part.shape[:2] != size for part, size in zip(parts, layout.sizes, strict=True)):
        return None
    if counts_tokens(parts[0].dtype, parts[0].dim()):
        width = max(part.shape[-1] for part in parts)
        # a token that is chosen twice is no other choice
        parts = [torch.cat([p, p[..., :1].expand(*p.shape[:-1], width - p.shape[-1])], dim=-1) for p in parts]
    x_M = torch.cat([part.flatten(0, 1) for part in parts])
    return x_M.index_select(0, layout.back_N).unflatten(0, shape)


def apply_packing(model: Any) -> None:
    """Have a model keep the samples of packed sequences apart, in place: modules in which they would see one another
    run sample by sample.

    Which ones is tried at once, with stand-ins for weights: modules of layers whose results differ if each sample is a
    sequence of its own, and those that mix tokens in layers of a kind that sees more than a mask shows, such as a
    choice among more tokens than the trial has. Then it is tried whether the complete model gives the same for packed
    samples as for each alone.

    Args:
        model: from `build_model`, on the meta device.

    Raises:
        ExpertMeshError: samples would still see one another, or the model does not run with packed ones.
    """
    vocabulary = model.config.get_text_config().vocab_size
    packed = collate([[_sample(length, place, vocabulary) for length in row] for place, row in enumerate(_TRIED)])
    alone = collate([[_sample(length, place, vocabulary)] for place, row in enumerate(_TRIED) for length in row])
    layers = decoder_layers(model)
    try:
        found = _seeing_others(model, packed)
        for layer, form in zip(layers, _forms(model), strict=True):
            for name, child in layer.named_children():
                if (form, name) in found:
                    child.forward = BySample(child.forward)
        results = zip(_layers_results(model, packed), _layers_results(model, alone), strict=True)
    except Exception as error:
        raise _refused(model, f"do not run with packed samples ({type(error).__name__}: {error})") from error
    for (of_packed_NX, of_alone_NX), layer in zip_longest(results, layers):
        if _differ(of_packed_NX, of_alone_NX):
            raise _refused(
                model, f"({type(layer or model).__name__}) give others for packed samples than for each alone"
            )
    for child in (child for layer in layers for child in layer.children()):
        if isinstance(child.forward, BySample) and any(isinstance(part, DMoE) for part in child.modules()):
            raise _refused(model, f"({type(child).__name__}) mix tokens beside experts")


def _refused(model: Any, why: str) -> ExpertMeshError:
    return ExpertMeshError(
        f"--packing: layers of {type(model).__name__} {why}; leave it out, --group-by-length saves padding"
    )


def _sample(length: int, place: int, vocabulary: int) -> Sample:
    """Tokens of which few are alike. A vocabulary may be smaller than that: tables of tokens have no more rows."""
    return Sample.of_prompt([(3 + (11 * place + 5 * length + 3 * i * i) % 200) % vocabulary for i in range(length)], 1)


def _forms(model: Any) -> list[Any]:
    """What the decoder layers are made of, equal for layers that do the same."""
    return [
        (kind, *((path, type(part), _shapes(part), _switches(part)) for path, part in layer.named_modules()))
        for layer, kind in zip(decoder_layers(model), kinds_by_layer(model), strict=True)
    ]


def _shapes(module: nn.Module) -> tuple[torch.Size | None, ...]:
    return tuple(None if p is None else p.shape for p in module._parameters.values())


def _switches(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """What is true or false of a module, as whether a later layer takes its keys and values."""
    return tuple((name, x) for name, x in vars(module).items() if isinstance(x, bool) and name != "training")


def _seeing_others(model: Any, batch: Batch) -> set[tuple[Any, str]]:
    """Modules of layers in which packed samples would see one another: the layer's form, and the module's name."""
    assert batch.segments is not None
    samples, tokens = lay_out(batch.segments, _CPU), lay_out([1] * sum(batch.segments), _CPU)
    found: set[tuple[Any, str]] = set()

    def trying(own: Callable[..., Any], is_masked: bool, key: tuple[Any, str]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            packed = own(*args, **kwargs)
            leaves = tree_leaves((args, kwargs))
            if not any(_is_tensor(x) and x.shape[:2] == batch.tokens_BS.shape for x in leaves):
                return packed
            if is_masked and any(isinstance(x, MutableMapping) and x for x in leaves):
                # in which layers leave keys and values for one another: a try by sample would leave some of one sample.
                # Whether it had to be is found out by the complete model's results
                return packed
            try:
                apart = by_sample(own, samples, *args, **kwargs)
            except _UnknownError:
                # whether it had to be is found out by the complete model's results
                return packed
            if _differ(packed, apart) or not (
                is_masked or not _differ(packed, by_sample(own, tokens, *args, **kwargs))
            ):
                found.add(key)
            return apart

        return forward

    with standing_in_for_weights(model):
        for layer, form in zip(decoder_layers(model), _forms(model), strict=True):
            for name, child in layer.named_children():
                child.forward = trying(child.forward, seen_by_mask(form[0]), (form, name))
        _run(model, batch)
    return found


def _layers_results(model: Any, batch: Batch) -> list[Tensor]:
    """What each layer and, last, the model gives, for all tokens of a batch, sample after sample."""
    results: list[Tensor] = []

    def note(layer: nn.Module, args: Any, output: Any) -> None:
        results.append(tree_leaves(output)[0])

    hooks = [layer.register_forward_hook(note) for layer in decoder_layers(model)]
    with standing_in_for_weights(model):
        results.append(_run(model, batch))
    for hook in hooks:
        hook.remove()
    return [x_BSX if batch.is_token_BS is None else x_BSX[batch.is_token_BS] for x_BSX in results]


def _run(model: Any, batch: Batch) -> Tensor:
    """The logits, (B, S, V). Of layers of one form the first is run; the others give what it gave."""
    given: dict[Any, Any] = {}

    def once(own: Callable[..., Any], form: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if form not in given:
                given[form] = own(*args, **kwargs)
            return given[form]

        return forward

    for layer, form in zip(decoder_layers(model), _forms(model), strict=True):
        layer.forward = once(layer.forward, form)
    logits_BSV: Tensor = run_model(model, batch, Forward(batch.is_token_BS, segments=batch.segments)).logits
    return logits_BSV


def _differ(ours: Any, theirs: Any) -> bool:
    """Whether results differ by more than rounding, in their values of floating-point numbers."""
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
    return any(
        (one.float() - other.float()).abs().max() > _DIFFERENCE * other.abs().max()
        for one, other in pairs
        if _is_tensor(other) and other.is_floating_point()
    )
