"""Packed sequences in modules that no mask keeps within a sample: while one of these runs, each sample is a sequence of
its own, padded on the right.

So a state, a convolution, a block of tokens or a choice of tokens begins anew with each sample, by the family's own
code: these modules are causal, and padding behind a sample changes nothing within it. All else of a layer, experts
above all, computes packed sequences. Which modules these are is said by `layer_kinds`, and tried.

Shape suffixes: B sequences, S positions, N = B·S positions of all sequences, M positions of all samples with their
padding, n samples of like length, L positions of the longest of them, Q queries and K keys of a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...moe.experts.forward import Forward, current_forward
from ...moe.experts.layer import DMoE
from ...moe.experts.model_facts import key_of_facts
from ...moe.experts.model_layers import decoder_layers
from ...moe.hf_model.facts_cache import keep_trial, recall_trial
from ...moe.hf_model.trial import counts_tokens, standing_in_for_weights
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...moe.util.gpu import bring_to
from ..data.batch import Batch, collate
from ..data.samples import Sample
from .layer_kinds import attends, has_layer_kinds_from_outside, kinds_by_layer, mixers_of
from .packed_attention import run_model, tells_window

_ALIKE = 0.75
"""Samples that are at least this fraction as long as the longest are padded to its length."""

_TRIED = [[5, 1, 7, 3], [9, 3, 2]]
"""Lengths of samples of the sequences that a model is tried with."""
_TRIAL = "packing"
"""What is kept of a trial that has succeeded: the places of the layers that ran sample by sample for it alone."""
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
    place_M, back_N = (bring_to(torch.from_numpy(each), device) for each in (np.concatenate(places), back))
    return SampleLayout(place_M, back_N, tuple(sizes))


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
        if forward is None or forward.segments is None:
            return self.forward(*args, **kwargs)
        assert forward.split is None, "it gets complete sequences"
        # each sequence is a sample now
        kwargs.pop("segments", None)
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]
        if forward.layout is None:
            forward.layout = lay_out(forward.segments, tensors[0].device)
        layout: SampleLayout = forward.layout
        shape = next(x.shape[:2] for x in tensors if x.shape[:2].numel() == len(layout.back_N))
        cut = [_cut(leaf, shape, layout) for leaf in leaves]
        results = []
        for index in range(len(layout.sizes)):
            own_args, own_kwargs = tree_unflatten([leaf[index] for leaf in cut], structure)
            results.append(tree_flatten(self.forward(*own_args, **own_kwargs)))
        together = zip(*(leaves for leaves, _ in results), strict=True)
        return tree_unflatten([_put_back(parts, shape, layout) for parts in together], results[0][1])


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
            raise ExpertMeshError(
                f"--packing: a mask of shape {tuple(mask.shape)}, in sequences of {tuple(shape)}, cannot "
                "be split into samples; leave --packing out"
            )
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
    """Have a model keep the samples of packed sequences apart, in place: what mixes tokens in layers of a kind that
    sees more than a mask shows (see `training.attention.layer_kinds`) runs sample by sample.

    Then it is tried at once, with stand-ins for weights, whether each layer gives the same for packed samples as for
    each alone. A layer that does not, as one whose attention knows no mask, runs sample by sample too, if that helps.

    Args:
        model: from `build_model`, on the meta device.

    Raises:
        ExpertMeshError: samples would still see one another, or the model does not run with packed ones.
    """
    begin_change(model, "packing")
    vocabulary = model.config.get_text_config().vocab_size
    packed = collate([[_sample(length, place, vocabulary) for length in row] for place, row in enumerate(_TRIED)])
    alone = collate([[_sample(length, place, vocabulary)] for place, row in enumerate(_TRIED) for length in row])
    layers, kinds = decoder_layers(model), kinds_by_layer(model)
    for layer, kind in zip(layers, kinds, strict=True):
        if not attends(kind):
            _run_by_sample(model, layer)
    # what was kept was tried with these kinds of layers alone
    key = None if has_layer_kinds_from_outside() else key_of_facts(model)
    known = None if key is None else recall_trial(key, _TRIAL)
    if known is not None:
        for place in known:
            _run_by_sample(model, layers[place])
        return
    tried: set[int] = set()
    forms = [_form(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    while True:
        try:
            results = zip(*(_layers_results(model, forms, batch) for batch in (packed, alone)), strict=True)
        except Exception as error:
            raise _refused(model, f"do not run with packed samples ({type(error).__name__}: {error})") from error
        unlike = next((place for place, (ours, theirs) in enumerate(results) if _differ(ours, theirs)), None)
        if unlike is None:
            break
        same = {place for place, form in enumerate(forms) if form == [*forms, None][unlike]}
        if not [_run_by_sample(model, layers[place]) for place in same].count(True):
            name = type([*layers, model][unlike]).__name__
            raise _refused(model, f"({name}) compute different outputs for packed samples than for each alone")
        tried |= same
    if key is not None:
        keep_trial(key, _TRIAL, sorted(tried))


def _run_by_sample(model: Any, layer: nn.Module) -> bool:
    """Have what mixes tokens in a layer run sample by sample, in place; whether anything does that did not before."""
    found = [part for part in mixers_of(layer) if not isinstance(part.forward, BySample)]
    for part in found:
        if any(isinstance(module, DMoE) for module in part.modules()):
            raise _refused(model, f"({type(part).__name__}) mix tokens outside of attention")
        part.forward = BySample(part.forward)
    return bool(found)


def _refused(model: Any, why: str) -> ExpertMeshError:
    return ExpertMeshError(
        f"--packing: layers of {type(model).__name__} {why}; leave --packing out (--group-by-length also saves padding)"
    )


def _sample(length: int, place: int, vocabulary: int) -> Sample:
    """Tokens of which few are alike. A vocabulary may be smaller than that: tables of tokens have no more rows."""
    return Sample.of_prompt([(3 + (11 * place + 5 * length + 3 * i * i) % 200) % vocabulary for i in range(length)], 1)


def _form(layer: nn.Module, kind: str | None) -> Any:
    """What a decoder layer is made of, equal for layers that do the same: its kind, the classes and shapes of its
    modules, and what is true or false of them, as whether a later layer takes its keys and values."""
    return kind, tuple(
        (
            *(path, type(part), tuple(None if p is None else p.shape for p in part._parameters.values())),
            tuple((name, x) for name, x in vars(part).items() if isinstance(x, bool) and name != "training"),
        )
        for path, part in layer.named_modules()
    )


def _layers_results(model: Any, forms: list[Any], batch: Batch) -> list[Tensor]:
    """What each layer and, last, the model gives, for all tokens of a batch, sample after sample. Of layers of one form
    the first is run; the others give what it gave."""
    results: list[Tensor] = []
    given: dict[Any, Any] = {}

    def once(own: Callable[..., Any], form: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if form not in given:
                given[form] = own(*args, **kwargs)
            results.append(tree_leaves(given[form])[0])
            return given[form]

        return forward

    with standing_in_for_weights(model):
        for layer, form in zip(decoder_layers(model), forms, strict=True):
            layer.forward = once(layer.forward, form)
        results.append(run_model(model, batch, Forward(batch.is_token_BS, segments=batch.segments)).logits)
    return [x_BSX if batch.is_token_BS is None else x_BSX[batch.is_token_BS] for x_BSX in results]


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    """Whether results differ by more than rounding."""
    return bool((ours.float() - theirs.float()).abs().max() > _DIFFERENCE * theirs.abs().max())
