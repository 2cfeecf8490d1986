"""Routing replay for trl's GRPOTrainer and RLOOTrainer: see `RoutingReplay`.

Shape suffixes: B sequences, S positions, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...moe.experts.replay import NO_ROUTE, ROUTED_EXPERTS, RouteReader, recording, replaying
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class RoutingReplay(_Base):
    """A mix-in that has the policy's updates use the experts of the policy that generated.

    They are those by which the old log-probabilities were computed (R2), where trl computes any: in an update whose
    step is the first one since the generation, the policy is the old one. If a `rollout_func` of GRPOTrainer returns
    `routed_experts` beside its `completion_ids`, they are these (R3), for the old log-probabilities too: of each
    completion an array (tokens, MoE layers or all layers, experts per token) as vLLM gives it, of the prompt's tokens
    and the completion's, or of all of these but the last.

    Example:
        from trl import GRPOTrainer

        class GRPO(expertmesh.RoutingReplay, expertmesh.TrainerMixin, GRPOTrainer):
            pass

    Raises:
        ExpertMeshError: the model cannot replay experts.
    """

    def __init__(self, model: Any, *more: Any, **others: Any):
        reader = getattr(getattr(model, "batch_maker", None), "routes", None)
        if isinstance(reader, RouteReader):  # what is no engine, TrainerMixin refuses
            reader.check()
            self._reader = reader
        self._is_scoring = False
        self._given: Sequence[Any] | None = None
        self._routes_BSLK: Tensor | None = None
        super().__init__(model, *more, **others)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """As trl's; takes the experts out of what a rollout gives beside tokens, which is for reward functions."""
        found = super()._generate(*args, **kwargs)
        extra = next((part for part in found if isinstance(part, dict)), {}) if isinstance(found, tuple) else {}
        self._given = extra.pop(ROUTED_EXPERTS, None)
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """As trl's; the experts go with the sequences, which trl shuffles and divides into micro-batches."""
        self._is_scoring, self._given, self._routes_BSLK = True, None, None
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._is_scoring = False
        if self._given is not None:
            self._read(torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1))
        return output if self._routes_BSLK is None else {**output, ROUTED_EXPERTS: self._routes_BSLK}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *more: Any, **others: Any
    ) -> Any:
        given = model, input_ids, attention_mask, *more
        if not self._is_scoring or model is not self.model:
            return super()._get_per_token_logps_and_entropies(*given, **others)
        if self._given is not None:
            with replaying(self._read(attention_mask)):
                return super()._get_per_token_logps_and_entropies(*given, **others)
        with recording() as found:
            result = super()._get_per_token_logps_and_entropies(*given, **others)
        self._routes_BSLK = torch.cat(found).unflatten(0, input_ids.shape)
        return result

    def _compute_loss(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
        routes_BSLK = inputs.get(ROUTED_EXPERTS)
        with nullcontext() if routes_BSLK is None else replaying(routes_BSLK):
            return super()._compute_loss(model, inputs, *more, **others)

    def _read(self, mask_BS: Tensor) -> Tensor:
        """The experts that the rollout has given, where trl has put its tokens.

        Args:
            mask_BS: 1 for tokens.

        Raises:
            ExpertMeshError: they are of other tokens, or are no experts of the model.
        """
        if self._routes_BSLK is not None:
            return self._routes_BSLK
        assert self._given is not None
        with raise_together():
            try:
                of_rows = [torch.as_tensor(given).long().cpu() for given in self._given]
            except (TypeError, ValueError, RuntimeError) as error:
                raise ExpertMeshError(f"{ROUTED_EXPERTS} of the rollout has what is no tensor: {error}") from error
            is_token_BS = mask_BS.bool().cpu()
            numbers = is_token_BS.sum(dim=1).tolist()
            if len(of_rows) != len(numbers):
                raise ExpertMeshError(
                    f"{ROUTED_EXPERTS} of the rollout has {len(of_rows)} entries for {len(numbers)} completions; give "
                    "one for each"
                )
            given_BSLK = torch.full((*is_token_BS.shape, *of_rows[0].shape[1:]), NO_ROUTE)
            for row, (routes, number) in enumerate(zip(of_rows, numbers, strict=True)):
                if len(routes) not in (number - 1, number) or routes.shape[1:] != given_BSLK.shape[2:]:
                    raise ExpertMeshError(
                        f"{ROUTED_EXPERTS} of the rollout's completion {row} has shape {tuple(routes.shape)}; it must "
                        f"be (tokens, layers, experts per token) as the others, of its {number} tokens, those of the "
                        "prompt among them, or of all but the last"
                    )
                given_BSLK[row, is_token_BS[row].nonzero().flatten()[: len(routes)]] = routes
            self._routes_BSLK = self._reader.read(given_BSLK, is_token_BS).to(mask_BS.device)
        return self._routes_BSLK
