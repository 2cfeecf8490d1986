"""What is compared: a case, and its figures, wherever they come from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import wrap
from expertmesh.training.data.truncation import Tokenized, truncate
from tests.families.configs import tiny_model
from tests.parity.reference import MAX_GRAD_NORM as MAX_GRAD_NORM
from tests.tiny import tiny_mixtral

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One comparison. `samples` are spread over ranks as the data order does, in one global batch each step.

    `changes` are to the model's config, `settings` to the run's. `family`: of the model, as transformers names it.
    `frozen`: a pattern of the names that what --freeze names has in transformers' model; `zeroed`: of weights that are
    zeros. `attention`: ours, where it is not auto (Mixtral's) or eager (other families'). `mxfp4`: whether the
    checkpoint has experts in MXFP4; weights are then those that are trained.
    """

    samples: list[Sample]
    balance: float = 0.0
    z: float = 0.0
    accumulation: int = 1
    kernel: str = "loop"
    cross_entropy: str = "chunked"
    gradient_checkpointing: Checkpointing = "none"
    compute_dtype: torch.dtype = torch.float32
    steps: int = STEPS  # at least one
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "mixtral"
    frozen: str = ""
    zeroed: str = ""
    attention: str = ""
    mxfp4: bool = False


@dataclass(frozen=True)
class Figures:
    """What one run gives, on rank 0.

    losses (cross-entropy), grad_norms, balances, zs: of each step; None, or without an entry for it, is what is not
    to be had. grads: of the first step, by name, full, where there is one. weights: buffers: full, after the last
    step; the fuzzer's, and adapters, as it says. routing: what the log tells of the last step's.
    """

    losses: list[float]
    grad_norms: list[float]
    balances: list[float] | None = None
    zs: list[float] | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    routing: dict[str, Any] = field(default_factory=dict)

    @property
    def balance_loss(self) -> float:
        return self.balances[0] if self.balances else 0.0

    @property
    def z_loss(self) -> float:
        return self.zs[0] if self.zs else 0.0


def random_samples(lengths: Sequence[int], vocabulary: int = 320, seed: int = 3) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample.of_prompt(torch.randint(0, vocabulary, (length,), generator=generator).tolist(), length // 3)
        for length in lengths
    ]


def split_texts(lengths: Sequence[int], max_length: int) -> list[Sample]:
    """Pieces of texts, as --truncation split makes them."""
    texts = [Tokenized(text.tokens, [True] * len(text.tokens)) for text in random_samples(lengths)]
    parts = [text.part(*part) for text in texts for part in truncate(text, "split", max_length).parts]
    return [Sample(list(part.tokens), list(part.is_trained)) for part in parts]


def wrapped_texts(lengths: Sequence[int], capacity: int) -> list[Sample]:
    """Pieces of texts, as --packing wrapped lays them into sequences of so many tokens."""
    texts = random_samples(lengths)
    pieces = [piece for row in wrap(torch.tensor(lengths), capacity, seed=0) for piece in row]
    found = [(texts[text].tokens[begin : end + 1], end < lengths[text]) for text, begin, end in pieces]
    return [Sample(tokens, [True] * len(tokens), beyond=beyond) for tokens, beyond in found]


SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])
"""Rows of 2 to 13 tokens, so that ranks differ in their token counts."""


def hf_model(case: Case, **changes: Any) -> Any:
    """The family's own model, small and random."""
    if case.family == "mixtral":
        model: Any = tiny_mixtral(**case.changes, **changes)
    else:
        model = tiny_model(case.family, **{"seed": 1, **case.changes, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if case.zeroed and re.search(case.zeroed, name):
                parameter.zero_()
    return model
