"""What is known of a model that was built here, beside its modules: `probe` sees it when the model runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .router_stats import RouterKind

_ATTRIBUTE, _KEY = "_expertmesh_facts", "_expertmesh_facts_key"


@dataclass(frozen=True)
class Attention:
    """Attention layers in which a token sees equally many tokens: at most `window`, itself among them; 0: all before
    it. width: multiplications for a pair of tokens that see one another, in all of these layers: widths of the heads'
    keys and values.
    """

    window: int
    width: int


@dataclass(frozen=True)
class SeenExperts:
    """top_k: experts per token. router: path of the module that chose them, None where no module returned exactly the
    choice that the experts got. num_logits: logits per token that it returned beside its choice. kind: of router.
    beside: path of a module that is called after the experts, on their tokens alone; None where there is none.
    num_choices: how many scores per token the `topk` of the experts' block has chosen from: one for each expert, and
    perhaps for computing nothing; 0: no `topk` chose, None: but a table by token."""

    top_k: int
    router: str | None
    num_logits: int
    kind: "RouterKind"
    beside: str | None = None
    num_choices: int | None = 0


@dataclass(frozen=True)
class ProbedFacts:
    """experts: by the path of the experts module.

    head_is_last: whether the model's logits are its head's output, unchanged; some families scale or cap them.
    masks_by_position: whether its masks separate samples packed in a sequence, which restarting positions mark.
    read_weights: paths of linear layers whose weight, or its dtype, is read by other code than their own forward.
    handed: of those of which this code only hands it to a function that multiplies by it, or has the layer called (see
        `hf_model.called_layers`); they are not in `read_weights`.
    uncalled: paths of linear layers whose own forward is not called.
    attention: layers by what their tokens see, in ascending order of windows.
    draws: whether it draws random numbers in training.
    balance: the coefficient, by its config, of the balancing loss that it adds where it is asked for router logits;
        None where it adds none.
    fp32_names: parameters that its family keeps in fp32 beside others in bf16, both stored and computed with.
    left_out: by the path of a part that no text passes, the names of its tensors: they are not in the model, and
        checkpoints carry them over.
    """

    experts: Mapping[str, SeenExperts]
    head_is_last: bool
    masks_by_position: bool
    read_weights: frozenset[str]
    handed: frozenset[str]
    uncalled: frozenset[str]
    attention: tuple[Attention, ...]
    draws: bool
    balance: float | None = None
    fp32_names: frozenset[str] = frozenset()
    left_out: Mapping[str, frozenset[str]] = field(default_factory=dict)


def give_facts(model: "nn.Module", facts: ProbedFacts, key: object) -> None:
    """key: by which what is found out of the model may be kept, see `hf_model.facts_cache`."""
    vars(model)[_ATTRIBUTE] = facts
    vars(model)[_KEY] = key


def facts_of(model: "nn.Module") -> ProbedFacts:
    """What is known of a model from `build_model`; copies of the model have it too."""
    facts = vars(model).get(_ATTRIBUTE)
    assert isinstance(facts, ProbedFacts), f"this {type(model).__name__} is not from build_model"
    return facts


def key_of_facts(model: "nn.Module") -> Any:
    """See `give_facts`."""
    return vars(model)[_KEY]
