"""What plans, dry runs and runs ask about a step: a model's facts, and a rank's cost breakdown by dry runs of short
models."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....moe.experts.lora import store_frozen
from ....moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from ....moe.hf_model.build import count_parameters, fp32_parameters
from ....moe.hf_model.images import image_parameters
from ....sharding.parallelize.recompute import keep_products
from ....sharding.pipeline.pipeline import pipeline_of
from ....sharding.pipeline.survey import survey
from ...config.train_config import TrainConfig
from ...engine.assembly import compute_dtype
from ...fused.liger_norm import is_by_liger
from ...optim.optimizer import matrix_rows, state_bytes
from ..planner.account import Account, Figures, SentBytes, at_layers, on_line, peaks_of_phases
from ..planner.asked import Asked
from ..planner.facts import Cuts, Held, LayerFacts, ModelFacts
from .building import DeviceType, build_rehearsed
from .figures import communicators, figures_of, stages_in_words
from .layer_kinds import kinds_of_layers
from .recorder import Event
from .recurrent_stand_in import computed_by
from .seconds import layer_costs
from .short import Short
from .world import Rehearsed, rehearse


def rehearsed_facts(config: TrainConfig, model_config: Any, device: DeviceType) -> ModelFacts:
    """What the model of a run consists of.

    Raises:
        ExpertMeshError: it cannot be built, or not trained with these flags.
    """
    model = build_rehearsed(config, model_config, device)
    counts = count_parameters(model)
    if (kind := config.quantized_base) is not None:
        store_frozen(model, kind)
    # layers that keep outputs of expert GEMMs are of another kind
    keep_products(model, config.keep_expert_products)
    layers, kinds = list(decoder_layers(model)), kinds_of_layers(model)
    held = _Bytes(model, config)
    shape, first = moe_shape(model), moe_layers(model)[0]
    firsts = [layers[kinds.index(kind)] for kind in range(max(kinds) + 1)]
    of_kinds = []
    for layer in firsts:
        experts = {p for each in moe_layers(layer) for p in each.mlp.parameters()}
        dense = [p for p in layer.parameters() if p not in experts]
        of_kinds.append(LayerFacts(held.of(dense), held.of(experts)))
    in_layers = {p for layer in layers for p in layer.parameters()}
    embedding = set(model.get_input_embeddings().parameters()) | set(image_parameters(model))
    around = [p for p in model.parameters() if p not in in_layers]
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    last = [p for p in around if p not in embedding or p is ends[1]]
    return ModelFacts(
        tuple(of_kinds),
        tuple(kinds),
        held.of(p for p in around if p in embedding),
        held.of(last),
        ends[0] is ends[1],
        model.config.get_text_config().hidden_size,
        shape.num_experts,
        shape.top_k,
        counts,
        first.mlp.kernel.recorded_as,
        computed_by(module for layer in firsts for module in layer.modules()),
        any(map(is_by_liger, model.modules())),
    )


class _Bytes:
    """Counts the bytes of a model's parameters, on the meta device."""

    def __init__(self, model: Any, config: TrainConfig):
        self.config = config
        self.kept = set(fp32_parameters(model).values())
        self.rows = matrix_rows(model, config)

    def of(self, parameters: Iterable[Tensor]) -> Held:
        return sum(map(self._of_one, parameters), Held())

    def _of_one(self, parameter: Tensor) -> Held:
        number, rows = parameter.numel(), self.rows.get(parameter, 0)
        is_computed = parameter.is_floating_point() and parameter not in self.kept
        each = compute_dtype(self.config).itemsize if is_computed else parameter.element_size()
        gradient = parameter.nbytes if parameter.requires_grad else 0
        return Held(parameter.nbytes, number * each, gradient, number * state_bytes(parameter, self.config, rows))


def cuts_of(config: TrainConfig, model_config: Any, device: DeviceType) -> Cuts:
    """Where the model can be cut into the stages of a pipeline.

    Raises:
        ExpertMeshError: nowhere.
    """
    found = survey(build_rehearsed(config, model_config, device), compute_dtype(config))
    return Cuts(found.name, found.flops, tuple(sorted(found.skips)))


def account_of(
    asked: Asked, model_config: Any, facts: ModelFacts, every_layer: bool = False, order: list[Event] | None = None
) -> Account:
    """The cost breakdown of a rank's step, by dry runs of short models where layers repeat.

    Args:
        every_layer: whether all layers are run. order: takes the collectives of the shortest model that was run.

    Raises:
        ExpertMeshError: the model cannot be built, or its experts not be divided among the ranks; or an operator fails.
    """
    config = asked.config
    complete = Short.complete(facts.layers, config.layers_of_stages, asked.own_stages)
    base, longer = complete.shortest, complete.shortest.longer
    if every_layer or base.number + sum(each.number for each, _ in longer) >= complete.number:
        base, longer = complete, []
    update = None
    if longer and config.optimizer_entry.takes_matrices:
        # dealt out to ranks, of which one has a matrix more than another: no straight line
        update = rehearse(asked, model_config, is_update_alone=True)

    def run(short: Short) -> Rehearsed:
        return _run_short(asked, model_config, facts, short, update)

    first = run(base)
    if order is not None:
        order += [event for event in first.recorder.events if event.collective is not None]
    shown = figures_of(first, base.names)
    figures = on_line(shown, [(figures_of(run(short), short.names), times) for short, times in longer])
    return _told(asked, facts, first, shown.layers, figures, [facts.layers[layer] for layer in base.layers])


def _run_short(asked: Asked, model_config: Any, facts: ModelFacts, short: Short, update: Rehearsed | None) -> Rehearsed:
    """Dry-run the step of a short model, or of the complete one.

    Args:
        update: of the complete one, which takes the place of the short one's.
    """
    with_experts = [layer for layer, kind in enumerate(facts.layers) if facts.kinds[kind].experts.stored]
    # the last ones of the complete model that are kept
    keep = set(with_experts[max(0, len(with_experts) - asked.config.keep_expert_products) :])
    config = replace(asked.config, keep_expert_products=len(keep.intersection(short.layers)))
    if short.stages:
        config = replace(config, pipeline_layers=",".join(map(str, short.layers_of_stages)))
    asked = replace(asked, config=config)
    rehearsed = rehearse(asked, model_config, None if short.is_complete else short.layers)
    return rehearsed if update is None else rehearsed.with_update(update)


def _told(
    asked: Asked, facts: ModelFacts, first: Rehearsed, run: int, figures: Figures, kinds: Sequence[int]
) -> Account:
    """A rank's account.

    Args:
        first: of the shortest model that was run, with `run` layers of these kinds. figures: of the complete one.
    """
    config, events, pipeline = asked.config, first.recorder.events, pipeline_of(first.model)
    stages = config.layers_of_stages or ([] if pipeline is None else list(map(len, pipeline.stages.layers)))
    sent = (SentBytes(*key, int(times), total, between) for key, (times, total, between) in figures.sent.items())
    return Account(
        asked.rank,
        config.micro_batches(asked.world_size),
        (figures.layers, len(facts.layers)),
        run,
        stages_in_words(asked.own_stages, stages),
        facts.counts.total,
        figures.peak,
        float(figures.in_host),
        tuple(communicators(events, first.groups)),
        tuple(at_layers(figures.held)),
        tuple(peaks_of_phases(figures.held, figures.in_host if config.offload_experts else 0)),
        tuple(sorted(sent, key=lambda each: -each.total)),
        dict(sorted(figures.parts.items(), key=lambda item: -item[1].seconds)),
        figures.time,
        figures.actions,
        figures.needed,
        figures.host_waits,
        figures.update_operators,
        {} if config.pp_size > 1 else layer_costs(events, first.kept, kinds, asked.cluster),
    )
