"""Sequences of samples as tensors.

Shape suffixes: B sequences, S positions, N target tokens, L MoE layers, K experts per token.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...moe.experts.forward import Ahead, Targets
from ...moe.experts.replay import NO_ROUTE, ROUTED_EXPERTS, RouteReader
from ...moe.hf_model.images import PIXELS
from ...moe.util.errors import ExpertMeshError
from ...moe.util.step_parts import register_step_part
from ...sharding.collectives.context_parallel import CPGroup
from .images import ImageReader, Images
from .pictures import ImageProcessor
from .samples import Sample
from .sequences import Rows

register_step_part(__name__, "LM head, loss")

IGNORED = -100
CANDIDATES = "candidates"
"""Among what a loss of one's own gets by target: (N, K) int64, tokens whose log-probabilities it gets beside the
target's."""
WEIGHT = "weight"
"""Among what a loss gets by target: the weights that data have."""


@dataclass(frozen=True)
class SplitSequences:
    """The sequences that a context-parallel (CP) group splits: each rank holds a contiguous part of each.

    cp_group: these ranks. positions_BS: as in a `Batch` of all positions. is_packed: whether sequences hold several
        samples. num_targets: of each rank.
    """

    cp_group: CPGroup
    positions_BS: Tensor
    is_packed: bool
    num_targets: tuple[int, ...]


@dataclass(frozen=True)
class BatchMaker:
    """How sequences become the batches of a model.

    They are padded to the length of a batch's longest one, rounded up to a `multiple`, but not beyond `limit`. Padding
    has no loss and is not routed. looks_ahead: whether batches have what a layer for multi-token prediction is told.
    images: takes the images of batches; None: the model takes none. pictures: reads those of samples; None: samples
    have none. routes: reads the `routed_experts` of batches.
    """

    multiple: int = 1
    limit: int | None = None
    looks_ahead: bool = False
    images: ImageReader | None = None
    pictures: ImageProcessor | None = None
    routes: RouteReader | None = None

    def length(self, longest: int) -> int:
        rounded = -(-longest // self.multiple) * self.multiple
        return rounded if self.limit is None else max(longest, min(rounded, self.limit))

    def within(self, limit: int) -> "BatchMaker":
        """The same, not beyond this limit either."""
        return replace(self, limit=limit if self.limit is None else min(limit, self.limit))

    def pixels(self, samples: Iterable[Sample]) -> dict[str, Tensor]:
        """What the model takes for the images of samples; empty where they have none."""
        pictures = [picture for sample in samples for picture in sample.images]
        if self.images is None or not pictures:
            return {}
        assert self.pictures is not None
        return self.images.of_pictures(pictures, self.pictures)


AS_LONG_AS_LONGEST = BatchMaker()


@dataclass(frozen=True)
class LossBatch:
    """What a loss of your own gets beside the log-probabilities of this rank's target tokens (see `Engine.step`).

    A context-parallel group's ranks each have some of a sample's targets. What is counted by sample is on the first of
    them alone, so that a plain sum over ranks counts it once: on the others `num_samples` is 0, and tensors by sample
    are empty.

    Attributes:
        tokens_N: the target tokens, int64, sequence after sequence.
        sample_N: the number of the sample that each belongs to, int64, from 0 on in the order of the sequences.
        num_samples: samples of the micro-batch that are counted on this rank.
        inputs: what the batch has as `loss_inputs`: tensors by sample, (num_samples,), and by target, (N,).
        place_N: where the label of each target is in the `labels` that were given, flattened.
        num_all: samples of the micro-batch, whichever rank counts them.
        cp_group: the group whose ranks share the sequences.
    """

    tokens_N: Tensor
    sample_N: Tensor
    num_samples: int
    inputs: Mapping[str, Tensor]
    place_N: Tensor
    num_all: int
    cp_group: CPGroup | None = None

    def __getitem__(self, name: str) -> Tensor:
        """One of `inputs`; an empty tensor where the micro-batch has no sample.

        Raises:
            ExpertMeshError: the batch has no such input.
        """
        if name not in self.inputs:
            if self.num_all == 0:
                return self.tokens_N.new_empty(0, dtype=torch.float32)
            raise ExpertMeshError(f"the loss asks for {name!r}; loss_inputs of the batch has {list(self.inputs)}")
        return self.inputs[name]

    def sums(self, x_N: Tensor) -> Tensor:
        """The sum over each sample's targets, (num_samples,) fp64, as thousands of values may be added; differentiable.
        All ranks of a context-parallel group call it together, equally often.

        Args:
            x_N: a value for each target, such as log-probabilities.
        """
        sums = torch.zeros(self.num_all, dtype=torch.float64, device=x_N.device)
        sums = sums.index_add(0, self.sample_N, x_N.double())
        if self.cp_group is None:
            return sums
        collected: Tensor = _SumOnFirst.apply(sums, self.cp_group)
        return collected

    def moved(self, move: Callable[[Tensor], Tensor]) -> "LossBatch":
        """The same of moved tensors."""
        changed: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed["inputs"] = {name: move(value) for name, value in self.inputs.items()}
        return replace(self, **changed)


class _SumOnFirst(torch.autograd.Function):
    """The sum of all ranks' values on the first rank of a group, nothing on the others. Backward gives all ranks the
    gradient that the first one has."""

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, group: CPGroup) -> Tensor:
        ctx.group, ctx.number = group, len(x_M)
        sum_M = x_M.clone()
        if group.ranks is not None:
            dist.all_reduce(sum_M, group=group.ranks)
        return sum_M if group.index == 0 else sum_M[:0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: CPGroup = ctx.group
        grad_M = grad.clone() if group.index == 0 else grad.new_zeros(ctx.number)
        if group.ranks is not None:
            dist.all_reduce(grad_M, group=group.ranks)
        return grad_M, None


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank: sequences padded on the right or, where a CP group splits them, this rank's part of
    each.

    tokens_BS: int64.
    positions_BS: where each token stands within its own sample; None when every sequence is one sample. transformers
        takes a position that does not follow the one before it for the start of another sample, and lets none attend to
        another (`find_packed_sequence_indices`). Where a CP group splits sequences, there are positions always.
    segments: lengths of the samples, and of the padding behind them, sequence after sequence; None when every sequence
        is one sample. Where a CP group splits sequences, of the full ones.
    is_token_BS: False for padding, or None when there is none.
    targets_BS: the next token of the same sample where it is to be learned, else -100.
    target_index_N: the flat positions that have a target.
    num_tokens, num_targets: how many of each.
    spans: of each sample, the positions of its tokens that are here.
    split: what is to be known of the full sequences, where this is a part of each.
    for_loss: what a loss gets of it that is a function of each target's log-probability; None: it was not made for one.
    mismatched: of labelled answers, the same prompts before answers to others (see `training.tasks.kto`).
    ahead: for a layer for multi-token prediction; None where there is none.
    images: None where there is none.
    routed_experts_BSLK: see `Forward`; None where routers choose.
    place_BS: where each token was given, flat, of a batch that a collator made; undefined for padding.
    """

    tokens_BS: Tensor
    positions_BS: Tensor | None
    segments: tuple[int, ...] | None
    is_token_BS: Tensor | None
    targets_BS: Tensor
    target_index_N: Tensor
    num_tokens: int
    num_targets: int
    spans: tuple[range, ...]
    split: SplitSequences | None = None
    for_loss: LossBatch | None = None
    mismatched: "Batch | None" = None
    ahead: Ahead | None = None
    images: Images | None = None
    routed_experts_BSLK: Tensor | None = None
    place_BS: Tensor | None = None

    @property
    def of_loss(self) -> LossBatch:
        """What a loss of log-probabilities gets of it."""
        assert self.for_loss is not None, "it was made for a loss that needs none"
        return self.for_loss

    @property
    def is_weighted(self) -> bool:
        """Whether its losses have weights."""
        return self.for_loss is not None and WEIGHT in self.for_loss.inputs

    def to(self, device: torch.device) -> "Batch":
        """On a device; to a GPU by way of pinned memory, for which the host does not wait."""
        onto_gpu = device.type == "cuda"
        batch = self.pinned() if onto_gpu and not self.tokens_BS.is_cuda else self
        return batch.moved(lambda tensor: tensor.to(device, non_blocking=onto_gpu))

    def pinned(self) -> "Batch":
        """In pinned memory."""
        return self.moved(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.moved(note)
        return found

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """The same of moved tensors."""
        changed: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.split is not None:
            changed["split"] = replace(self.split, positions_BS=move(self.split.positions_BS))
        if self.for_loss is not None:
            changed["for_loss"] = self.for_loss.moved(move)
        if self.mismatched is not None:
            changed["mismatched"] = self.mismatched.moved(move)
        if self.ahead is not None:
            targets = Targets(move(self.ahead.targets.targets_BS), move(self.ahead.targets.index_N))
            changed["ahead"] = replace(self.ahead, tokens_BS=move(self.ahead.tokens_BS), targets=targets)
        if self.images is not None:
            changed["images"] = self.images.moved(move)
        return replace(self, **changed)


@dataclass(frozen=True)
class LossInputs:
    """What a loss of log-probabilities is to get of a batch of full sequences.

    by_sample: (samples,) tensors by name, samples in the order of the sequences. by_target_BS: values at each position
        with a target. place_BS: where a position's label was given, flat. by_target: (targets, ...) tensors, targets
        in the order of the sequences. mismatched: entries of the same numbers that make a second batch beside it, and
        what the loss is to get of that.
    """

    by_sample: Mapping[str, Tensor] = field(default_factory=dict)
    by_target_BS: Mapping[str, Tensor] = field(default_factory=dict)
    place_BS: Tensor | None = None
    by_target: Mapping[str, Tensor] = field(default_factory=dict)
    mismatched: "tuple[Rows, LossInputs] | None" = None


def collate(
    rows: Sequence[Sequence[Sample]],
    cp_group: CPGroup | None = None,
    maker: BatchMaker = AS_LONG_AS_LONGEST,
    loss_inputs: LossInputs | None = None,
    is_weighted: bool = False,
) -> Batch:
    """Each sequence's samples one after the other, padded on the right. No sequence at all gives as much padding as one
    position takes, for a rank that has nothing to do but must take part in the collectives.

    Args:
        cp_group: the CP group that splits the sequences, if any: this rank gets its part of each.
        maker: how long sequences become, and what batches have beside tokens.
        loss_inputs: for a loss of log-probabilities.
        is_weighted: whether it gets the samples' weights beside them.
    """
    lengths = [[sample.length for sample in row] for row in rows]
    tokens_BS = torch.zeros(max(len(rows), 1), max(map(sum, lengths), default=1), dtype=torch.int64)
    targets_BS = torch.full_like(tokens_BS, IGNORED)
    weights_BS = torch.ones(tokens_BS.shape if is_weighted else 0)
    for index, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + sample.length
            tokens = torch.tensor(sample.tokens, dtype=torch.int64)
            trained = torch.tensor(sample.is_trained, dtype=torch.bool)
            tokens_BS[index, start:end] = tokens[: sample.length]
            # position i predicts token i + 1; the last one of a sample predicts nothing but a token beyond the sequence
            predicting = slice(start, start + max(len(sample.tokens) - 1, 0))
            targets_BS[index, predicting] = torch.where(trained[1:], tokens[1:], IGNORED)
            if sample.weights is not None:
                weights_BS[index, predicting] = torch.tensor(sample.weights[1:])
            start = end
    if is_weighted:
        loss_inputs = replace(loss_inputs or LossInputs(), by_target_BS={WEIGHT: weights_BS})
    pixels = maker.pixels(itertools.chain(*rows))
    return _batch(tokens_BS, targets_BS, lengths, cp_group, maker, loss_inputs, pixels)


def collate_rows(
    rows: Rows,
    numbers: Sequence[int],
    cp_group: CPGroup | None,
    maker: BatchMaker,
    loss_inputs: LossInputs | None = None,
) -> Batch:
    """`collate` of entries of the data, each of which may become several sequences."""
    sequences = [sequence for number in numbers for sequence in rows.sequences(number)]
    batch = collate(sequences, cp_group, maker, loss_inputs, rows.samples.is_weighted)
    if loss_inputs is None or loss_inputs.mismatched is None:
        return batch
    others, of_others = loss_inputs.mismatched
    return replace(batch, mismatched=collate_rows(others, numbers, cp_group, maker, of_others))


_NEEDLESS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths", "num_items_in_batch"}
)
"""What collators of transformers and trl add to a batch that positions, or counting, tell already."""


def batch_of(
    inputs: Mapping[str, Any],
    packing: bool,
    cp_group: CPGroup | None = None,
    maker: BatchMaker = AS_LONG_AS_LONGEST,
    for_loss: bool = False,
) -> Batch:
    """One micro-batch as transformers' and trl's data collators make it.

    Padding may be on either side of a sequence, and has no loss, whatever its labels. Several samples in one sequence
    begin anew at position 0 each; across two of them nothing is predicted.

    Args:
        inputs: `input_ids` (B, S) and `labels` (B, S), integers, -100 where nothing is to be learned; perhaps
            `attention_mask` (B, S), of 0 and 1, `position_ids` (B, S) and, in place of `labels`, `shift_labels` (B, S),
            in which position i has the token to be predicted there, the last position's too; `routed_experts`, the
            experts of each token (see `RouteReader.read`); with `for_loss` perhaps `loss_inputs`, a dict of tensors:
            (samples,), or (B, S) as `labels` are.
        packing: whether the model keeps several samples in one sequence apart.
        cp_group: the CP group that splits the sequences, if any: this rank gets its part of each.
        maker: how long sequences become; what they are padded with already is taken off first.
        for_loss: whether the loss is one's own.

    Raises:
        ExpertMeshError: it has something else, or of another shape; or several samples in a sequence without `packing`.
    """
    images = maker.images
    known = ("input_ids", "labels", "attention_mask", "position_ids", "shift_labels")
    given = {name: _tensor(inputs, name) for name in known}
    tokens_BS, labels_BS, mask_BS, positions_BS, shifted_BS = given.values()
    if tokens_BS is None or (labels_BS is None and shifted_BS is None):
        missing = "input_ids" if tokens_BS is None else "labels"
        raise ExpertMeshError(f"a batch has no {missing}; it has {', '.join(map(str, inputs)) or 'nothing'}")
    is_known = {*known, *_NEEDLESS, *["loss_inputs"] * for_loss, *(images.names if images is not None else ())}
    is_known |= {ROUTED_EXPERTS} if maker.routes is not None else set()
    if others := [str(name) for name, value in inputs.items() if name not in is_known and value is not None]:
        of_images = f", {', '.join(images.names)}" if images is not None else ""
        hint = "; images need expertmesh.load(..., images=True)" if PIXELS in others else ""
        raise ExpertMeshError(
            f"a batch has {', '.join(others)}, which would be ignored; give only input_ids, labels, "
            f"attention_mask, position_ids, shift_labels and {ROUTED_EXPERTS}{of_images}{hint}"
        )
    pixels = {} if images is None else images.read(inputs)
    for name, value in given.items():
        if value is not None and value.shape != tokens_BS.shape:
            raise ExpertMeshError(
                f"a batch has {name} of shape {tuple(value.shape)} beside input_ids of shape {tuple(tokens_BS.shape)}; "
                "both must be (sequences, positions)"
            )
    if mask_BS is not None and bool((other := (mask_BS != 0) & (mask_BS != 1)).any()):
        raise ExpertMeshError(
            f"attention_mask of a batch has {mask_BS[other][0]}; it must be 1 for tokens and 0 for "
            "padding. Mark several samples in a sequence by position_ids that start again at 0"
        )
    is_token_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
    routes_BSLK: Tensor | None = None
    if maker.routes is not None and inputs.get(ROUTED_EXPERTS) is not None:
        routes_BSLK = maker.routes.read(inputs[ROUTED_EXPERTS], is_token_BS)
    targets_BS = shifted_BS if labels_BS is None or shifted_BS is not None else _shifted(labels_BS)
    assert targets_BS is not None
    by_sample: dict[str, Tensor] = {}
    by_target: dict[str, Tensor] = {}
    place_BS = torch.arange(tokens_BS.numel()).view_as(tokens_BS)
    if for_loss:
        by_sample, by_target = _loss_inputs(inputs.get("loss_inputs"), tokens_BS)
        by_target[_PLACE] = place_BS
        if targets_BS is not shifted_BS:
            by_target = {name: torch.nn.functional.pad(x_BS[:, 1:], (0, 1)) for name, x_BS in by_target.items()}
    parts = [tokens_BS, targets_BS, is_token_BS, place_BS, *([] if positions_BS is None else [positions_BS])]
    parts = _to_the_left([*parts, *by_target.values()], is_token_BS)
    by_target = dict(zip(by_target, parts[len(parts) - len(by_target) :], strict=True))
    tokens_BS, targets_BS, place_BS = parts[0], parts[1].clone(), parts[3]  # the labels are whose they are
    counts = parts[2].sum(dim=1).tolist()
    lengths = _lengths(parts[4], counts) if positions_BS is not None else [[count] if count else [] for count in counts]
    if routes_BSLK is not None:
        routes_BSLK = routes_BSLK.flatten(0, 1)[place_BS]
    if not packing and any(len(samples) > 1 for samples in lengths):
        raise ExpertMeshError(
            "position_ids of a batch start again within a sequence, so it has several samples, but "
            "the model was loaded without packing; give packing=True to expertmesh.load"
        )
    for index, samples in enumerate(lengths):
        for end in itertools.accumulate(samples):
            if shifted_BS is None or end < counts[index]:
                targets_BS[index, end - 1] = IGNORED
    if images is not None:
        targets_BS = targets_BS.masked_fill(targets_BS == images.facts.token, IGNORED)
    given_inputs: LossInputs | None = None
    if for_loss:
        labels_place_BS, number = by_target.pop(_PLACE), sum(map(len, lengths))
        for name, x in by_sample.items():
            if len(x) != number:
                raise ExpertMeshError(f"loss_inputs has {len(x)} values of {name} for {number} samples in a batch")
        given_inputs = LossInputs(by_sample, by_target, labels_place_BS)
    return _batch(tokens_BS, targets_BS, lengths, cp_group, maker, given_inputs, pixels, place_BS, routes_BSLK)


_PLACE = "labels"
"""Among values by target: where the label was given."""


def _loss_inputs(given: Any, tokens_BS: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(by sample, by target), in host memory.

    Raises:
        ExpertMeshError: they are no tensors of such shapes.
    """
    if not isinstance(given or {}, Mapping):
        raise ExpertMeshError(f"loss_inputs of a batch is a {type(given).__name__}; it must be a dict of tensors")
    by_sample: dict[str, Tensor] = {}
    by_target: dict[str, Tensor] = {}
    for name, value in (given or {}).items():
        try:
            tensor = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExpertMeshError(f"{name} in loss_inputs is not a tensor: {error}") from error
        if name == _PLACE or (tensor.dim() != 1 and tensor.shape != tokens_BS.shape):
            raise ExpertMeshError(
                f"{name} in loss_inputs has shape {tuple(tensor.shape)}; it must be (samples,), or that of input_ids, "
                f"{tuple(tokens_BS.shape)}, and not be called {_PLACE}"
            )
        (by_sample if tensor.dim() == 1 else by_target)[name] = tensor
    return by_sample, by_target


def _tensor(inputs: Mapping[str, Any], name: str) -> Tensor | None:
    """In host memory, int64."""
    value = inputs.get(name)
    if value is None:
        return None
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ExpertMeshError(f"{name} of a batch is not a tensor: {error}") from error
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_mask = tensor.dtype == torch.bool
    if tensor.dim() != 2 or tensor.numel() == 0 or not is_integer or (is_mask and name != "attention_mask"):
        raise ExpertMeshError(
            f"{name} of a batch is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be integers, (sequences, "
            "positions)"
        )
    return tensor.long()


def _shifted(labels_BS: Tensor) -> Tensor:
    """Where position i has what is to be predicted there: the label of position i + 1."""
    return torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)


def _to_the_left(parts_BS: list[Tensor], is_token_BS: Tensor) -> list[Tensor]:
    """The parts of sequences whose padding comes last.

    Raises:
        ExpertMeshError: padding lies between tokens of a sequence.
    """
    edges_BS = torch.nn.functional.pad(is_token_BS.int(), (1, 0)).diff(dim=1)
    if bool(((edges_BS == 1).sum(dim=1) > 1).any()):
        raise ExpertMeshError(
            "attention_mask of a batch hides tokens in the middle of a sequence; padding must be at an end"
        )
    if bool((is_token_BS[:, 1:] <= is_token_BS[:, :-1]).all()):
        return parts_BS
    order_BS = (~is_token_BS).int().argsort(dim=1, stable=True)
    return [part_BS.gather(1, order_BS) for part_BS in parts_BS]


def _lengths(positions_BS: Tensor, counts: Sequence[int]) -> list[list[int]]:
    """Lengths of each sequence's samples.

    Raises:
        ExpertMeshError: a sample does not begin at position 0.
    """
    lengths = []
    for positions, count in zip(positions_BS.tolist(), counts, strict=True):
        starts = [i for i in range(count) if i == 0 or positions[i] != positions[i - 1] + 1]
        if any(positions[start] != 0 for start in starts):
            raise ExpertMeshError(
                "position_ids of a batch continue at "
                f"{next(positions[s] for s in starts if positions[s] != 0)} where a sample starts; each "
                "sample must start at 0"
            )
        lengths.append([stop - start for start, stop in zip(starts, [*starts[1:], count], strict=True)])
    return lengths


def _length(longest: int, cp_group: CPGroup | None, maker: BatchMaker) -> int:
    """Positions per sequence, such that it can be cut into parts of equal length."""
    runs = 1 if cp_group is None else cp_group.size
    return -(-maker.length(max(longest, 1)) // runs) * runs


def _resized(x_BS: Tensor, length: int, fill: int = 0) -> Tensor:
    """Of so many positions: cut at the end, or filled there."""
    return torch.nn.functional.pad(x_BS[:, :length], (0, max(length - x_BS.shape[1], 0)), value=fill)


def _batch(
    tokens_BS: Tensor,
    targets_BS: Tensor,
    lengths: Sequence[Sequence[int]],
    cp_group: CPGroup | None,
    maker: BatchMaker,
    loss_inputs: LossInputs | None,
    pixels: Mapping[str, Tensor],
    place_BS: Tensor | None = None,
    routes_BSLK: Tensor | None = None,
) -> Batch:
    """A batch of full sequences: what every batch is made by.

    Args:
        tokens_BS, targets_BS: each sequence's samples one after the other; whatever is behind them is padding.
        lengths: of each sequence's samples.
        loss_inputs: for a loss of one's own; None: there is none.
        pixels: what the model takes for the images, complete.
        place_BS, routes_BSLK: see `Batch`; of the same positions as tokens_BS.
    """
    length = _length(max(map(sum, lengths), default=1), cp_group, maker)
    tokens_BS, targets_BS = _resized(tokens_BS, length), _resized(targets_BS, length, IGNORED)
    positions_BS, is_token_BS = torch.zeros_like(tokens_BS), torch.zeros_like(tokens_BS, dtype=torch.bool)
    for index, samples in enumerate(lengths):
        start = 0
        for number in samples:
            positions_BS[index, start : start + number] = torch.arange(number)
            start += number
        is_token_BS[index, :start] = True
    tokens_BS, targets_BS = tokens_BS.where(is_token_BS, 0), targets_BS.where(is_token_BS, IGNORED)
    is_packed = any(len(samples) > 1 for samples in lengths)
    split, run, is_target_BS = None, slice(0, length), targets_BS != IGNORED
    ahead = _ahead(tokens_BS, positions_BS, is_token_BS, targets_BS, cp_group) if maker.looks_ahead else None
    if cp_group is not None:
        if not is_packed:
            # padding takes the last position that a token has: what looks for the longest sequence must find it
            longest = max(map(sum, lengths), default=1)
            positions_BS = torch.arange(length).clamp(max=max(longest - 1, 0)).expand_as(positions_BS)
        each = length // cp_group.size
        num_targets = is_target_BS.unflatten(1, (cp_group.size, each)).sum(dim=(0, 2))
        split = SplitSequences(cp_group, positions_BS, is_packed, tuple(num_targets.tolist()))
        run = slice(each * cp_group.index, each * (cp_group.index + 1))
    images: Images | None = None
    if maker.images is not None:
        images = maker.images.placed(pixels, tokens_BS, is_token_BS, lengths, run)
    if split is not None:
        parts = (tokens_BS, positions_BS, is_token_BS, targets_BS)
        tokens_BS, positions_BS, is_token_BS, targets_BS = (part[:, run].contiguous() for part in parts)
    if place_BS is not None:
        place_BS = _resized(place_BS, length)[:, run].contiguous()
    if routes_BSLK is not None:
        filled = (0, 0, 0, 0, 0, max(length - routes_BSLK.shape[1], 0))
        routes_BSLK = torch.nn.functional.pad(routes_BSLK[:, :length], filled, value=NO_ROUTE)[:, run].contiguous()
    target_index_N = (targets_BS.flatten() != IGNORED).nonzero().flatten()
    num_tokens = int(is_token_BS.sum())
    has_padding = num_tokens < tokens_BS.numel()
    for_loss: LossBatch | None = None
    if loss_inputs is not None:
        for_loss = _for_loss(loss_inputs, lengths, is_target_BS, run, targets_BS, target_index_N, cp_group)
    return Batch(
        tokens_BS,
        positions_BS if is_packed or split is not None else None,
        _segments(lengths, length) if is_packed else None,
        is_token_BS if has_padding else None,
        targets_BS,
        target_index_N,
        num_tokens,
        len(target_index_N),
        _spans(lengths, run),
        split,
        for_loss,
        ahead=ahead,
        images=images,
        routed_experts_BSLK=routes_BSLK,
        place_BS=place_BS,
    )


def _ahead(
    tokens_BS: Tensor, positions_BS: Tensor, is_token_BS: Tensor, targets_BS: Tensor, cp_group: CPGroup | None
) -> Ahead:
    """What a layer for multi-token prediction is told, of the positions that are here.

    Args:
        positions_BS: each within its own sample. The others are of full sequences too.
    """
    following = torch.nn.functional.pad(is_token_BS[:, 1:] & (positions_BS[:, 1:] > 0), (0, 1))
    next_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1)).where(following, 0)
    after_BS = _shifted(targets_BS).where(following, IGNORED)
    num_targets: tuple[int, ...] = ()
    if cp_group is not None:
        by_rank = [part.chunk(cp_group.size, dim=1) for part in (next_BS, after_BS)]
        num_targets = tuple(int((part != IGNORED).sum()) for part in by_rank[1])
        next_BS, after_BS = (parts[cp_group.index].contiguous() for parts in by_rank)
    return Ahead(next_BS, Targets(after_BS, (after_BS.flatten() != IGNORED).nonzero().flatten()), num_targets)


def _for_loss(
    given: LossInputs,
    lengths: Sequence[Sequence[int]],
    is_target_BS: Tensor,
    run: slice,
    targets_BS: Tensor,
    target_index_N: Tensor,
    cp_group: CPGroup | None,
) -> LossBatch:
    """
    Args:
        is_target_BS: of the full sequences. run: the positions of them that are here.
        targets_BS, target_index_N: of these positions.
    """
    counted = itertools.count()
    sample_BS = torch.zeros_like(is_target_BS, dtype=torch.int64)
    for index, samples in enumerate(lengths):
        start = 0
        for number in samples:
            sample_BS[index, start : start + number] = next(counted)
            start += number
    num_all = next(counted)
    is_first = cp_group is None or cp_group.index == 0

    def here(x_BS: Tensor) -> Tensor:
        return _resized(x_BS, is_target_BS.shape[1])[:, run].flatten().index_select(0, target_index_N)

    inputs = {name: x if is_first else x[:0] for name, x in given.by_sample.items()}
    inputs |= {name: here(x_BS) for name, x_BS in given.by_target_BS.items()}
    if given.by_target:
        number_N = here(is_target_BS.flatten().cumsum(0).view_as(is_target_BS) - 1)
        inputs |= {name: x[number_N] for name, x in given.by_target.items()}
    place_BS = torch.arange(sample_BS.numel()).view_as(sample_BS) if given.place_BS is None else given.place_BS
    tokens_N = targets_BS.flatten().index_select(0, target_index_N)
    return LossBatch(tokens_N, here(sample_BS), num_all * is_first, inputs, here(place_BS), num_all, cp_group)


def _spans(lengths: Sequence[Sequence[int]], run: slice) -> tuple[range, ...]:
    """
    Args:
        run: of each sequence, the part that is here.
    """
    spans = []
    for row in lengths:
        start = 0
        for length in row:
            spans.append(range(max(run.start - start, 0), min(run.stop - start, length)))
            start += length
    return tuple(span for span in spans if span)


def _segments(lengths: Sequence[Sequence[int]], length: int) -> tuple[int, ...]:
    """Padding in segments no longer than the longest sample, so that it reaches nothing that no sample does, such as
    what compresses so many tokens to one."""
    longest = max(itertools.chain([1], *lengths))
    segments: list[int] = []
    for row in lengths:
        padding = length - sum(row)
        segments += [*row, *[longest] * (padding // longest), *[padding % longest] * (padding % longest > 0)]
    return tuple(segments)
