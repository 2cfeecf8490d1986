"""The images of a micro-batch: which inputs the model takes for them, and where they stand in its sequences.

One image is one run of image tokens, as in transformers' own code. Image tokens are never targets.

Shape suffixes: B sequences, S positions of full ones, L of them on this rank, N image tokens on this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...moe.hf_model.images import GRID, KINDS, PIXELS, images_of, rope_positions
from ...moe.util.child import cores
from ...moe.util.errors import ExpertMeshError
from .pictures import ImageProcessor, Picture


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch on one rank.

    inputs: what the model takes for them, complete on every rank that shares the sequences.
    sizes: the second of them, in host memory wherever the others are. num_tokens: image tokens of complete sequences.
    index_N: int64, where image tokens stand among those of this rank, B·L.
    rows_N: which of the images' features are for the image tokens that are here; None: all of them.
    positions_3BL: in time, height and width; None where the model has no such positions.
    kinds_BS: 1 for an image's token, of full sequences; None where no mask is made of them.
    """

    inputs: Mapping[str, Tensor]
    sizes: Tensor
    num_tokens: int
    index_N: Tensor
    rows_N: Tensor | None
    positions_3BL: Tensor | None
    kinds_BS: Tensor | None

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many images, patches, and pairs of patches of one image."""
        pixels = self.inputs[PIXELS]
        has_grid = GRID in self.inputs
        patches: list[int] = self.sizes.prod(-1).tolist() if has_grid else [pixels.shape[1]] * len(pixels)
        return len(patches), sum(patches), sum(number**2 for number in patches)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Images":
        """The same of moved tensors, but for `sizes`."""
        inputs = {name: move(value) for name, value in self.inputs.items()}
        others = (None if x is None else move(x) for x in (self.rows_N, self.positions_3BL, self.kinds_BS))
        return Images(inputs, self.sizes, self.num_tokens, move(self.index_N), *others)


class ImageReader:
    """Takes the images out of batches as transformers' and trl's data collators make them, and those of samples.

    Args:
        model: from `build_model`, with the parts that images pass.
    """

    def __init__(self, model: Any):
        facts = images_of(model)
        assert facts is not None
        self.model, self.facts = model, facts
        self.names = (*facts.inputs, KINDS)

    def of_pictures(self, pictures: Sequence[Picture], processor: ImageProcessor) -> dict[str, Tensor]:
        """What the model takes for images of samples, in host memory.

        Raises:
            ExpertMeshError: an image has changed since the samples were made.
        """
        with ThreadPoolExecutor(min(len(pictures), cores())) as pool:
            found = list(pool.map(processor.pixels, pictures))
        return self.read({name: torch.cat([each[name] for each in found]) for name in self.facts.inputs})

    def read(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a batch has for its images, in host memory; empty where it has none.

        Raises:
            ExpertMeshError: it is no tensor, or something is missing.
        """
        found: dict[str, Tensor] = {}
        for name in self.facts.inputs:
            value = inputs.get(name)
            if value is not None:
                try:
                    found[name] = torch.as_tensor(value).detach().cpu()
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ExpertMeshError(f"{name} of a batch is not a tensor: {error}") from error
        found = {name: value for name, value in found.items() if value.numel()}
        if found and len(found) < len(self.facts.inputs):
            missing = next(name for name in self.facts.inputs if name not in found)
            raise ExpertMeshError(f"a batch has {', '.join(found)} and no {missing}; give both, as its processor does")
        pixels, sizes = (found.get(name) for name in self.facts.inputs)
        if pixels is not None and sizes is not None:
            shape = {GRID: (len(sizes), 3)}.get(self.facts.inputs[1], (*pixels.shape[:2], 2))
            if sizes.shape != shape or sizes.is_floating_point() or not pixels.is_floating_point():
                raise ExpertMeshError(
                    f"a batch has {self.facts.inputs[0]} of {pixels.dtype} {tuple(pixels.shape)} and "
                    f"{self.facts.inputs[1]} of {sizes.dtype} {tuple(sizes.shape)}; give both as the model's processor "
                    "makes them"
                )
            if len(sizes.shape) == 2 and int(sizes.prod(-1).sum()) != len(pixels):
                raise ExpertMeshError(
                    f"a batch has {len(pixels)} patches in {self.facts.inputs[0]}, and {int(sizes.prod(-1).sum())} by "
                    f"its {GRID}"
                )
        return found

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What transformers' own forward of a complete batch takes for its images; empty where it has none."""
        found = self.read(inputs)
        if not found:
            return {}
        tokens_BS = inputs["input_ids"]
        kinds = {KINDS: (tokens_BS == self.facts.token).long()} if self.facts.takes_kinds else {}
        return {**{name: value.to(tokens_BS.device) for name, value in found.items()}, **kinds}

    def placed(
        self,
        found: Mapping[str, Tensor],
        tokens_BS: Tensor,
        is_token_BS: Tensor,
        lengths: Sequence[Sequence[int]],
        here: slice,
    ) -> Images | None:
        """The images of a batch of full sequences; None where it has none.

        Args:
            found: from `read`.
            lengths: of each sequence's samples; behind them is padding.
            here: the positions that are on this rank.

        Raises:
            ExpertMeshError: there are other images than image tokens say, or tokens for something else than images.
        """
        for name, token in self.facts.others.items():
            if bool(((tokens_BS == token) & is_token_BS).any()):
                raise ExpertMeshError(
                    f"input_ids of a batch has {token}, the {name} of this model: only images are supported"
                )
        is_image_BS = (tokens_BS == self.facts.token) & is_token_BS
        number = len(found[self.facts.inputs[1]]) if found else 0
        samples = [(row, start, length) for row, ls in enumerate(lengths) for start, length in _starts(ls)]
        runs = [_runs(is_image_BS[row, start : start + length]) for row, start, length in samples]
        if sum(runs) != number:
            raise ExpertMeshError(
                f"a batch has {number} images, and image tokens of {sum(runs)} (a run of {self.facts.token} in "
                "input_ids is one): give complete samples with all their images"
            )
        if not found:
            return None
        index_N = is_image_BS[:, here].flatten().nonzero().flatten()
        rows_N, positions_3BS = None, None
        if here != slice(0, tokens_BS.shape[1]):
            row_BS = (is_image_BS.flatten().cumsum(0) - 1).view_as(tokens_BS)
            rows_N = row_BS[:, here][is_image_BS[:, here]]
        first = 0
        for (row, start, length), images in zip(samples, runs, strict=True):
            sizes = found[self.facts.inputs[1]][first : first + images]
            first += images
            positions_3L = rope_positions(self.model, tokens_BS[row : row + 1, start : start + length], sizes)
            if positions_3L is not None:
                if positions_3BS is None:
                    positions_3BS = torch.zeros(3, *tokens_BS.shape, dtype=torch.int64)
                positions_3BS[:, row, start : start + length] = positions_3L
        kinds_BS = is_image_BS.long() if self.facts.sees_both_ways else None
        positions_3BL = None if positions_3BS is None else positions_3BS[:, :, here].contiguous()
        sizes, num_tokens = found[self.facts.inputs[1]], int(is_image_BS.sum())
        return Images(found, sizes, num_tokens, index_N, rows_N, positions_3BL, kinds_BS)


def _starts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of each sample of a sequence."""
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _runs(is_image_L: Tensor) -> int:
    """How many runs of image tokens there are."""
    return int((torch.nn.functional.pad(is_image_L.int(), (1, 0)).diff() == 1).sum())
