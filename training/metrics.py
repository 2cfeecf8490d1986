"""What a run logs: one entry for each figure, which meter, console, trackers, Trainer, report and planner read.

A figure of your own is one call of `register_metric`, before the run begins; docs/how-to/extend.md has an example.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..moe.util.entry_checks import check_fields
from ..moe.util.telling import telling

if TYPE_CHECKING:
    from torch import Tensor

    from ..moe.experts.router_stats import Routing
    from .steps.interval import Interval

LOSS_OF, SHARE_OF = "loss/", "share/"
"""What figures by data set begin with: the sum of what the loss is a mean of, and how many of these there are, both
divided by the number in all."""
REPLAY_CHANGED = "router_replay_changed"
"""Also of what a step tells of batches with `routed_experts`."""
Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class Chart:
    """Where the report draws a metric. Metrics whose charts have one title share it; the first one's chart counts.

    Attributes:
        title, note: above the chart.
        label: of the metric's line, where several share a chart.
        format: of its values.
        include: values that the axis must reach.
        smooth: whether a moving mean is drawn over many points.
        references: dashed lines, as values and their labels, from config.yaml and the number of experts, if known.
        reaches_all: whether the axis must reach the references and all of the band, which spikes may else leave.
    """

    title: str
    note: str = ""
    label: str = ""
    format: Literal["number", "percent", "memory"] = "number"
    include: tuple[float, ...] = ()
    smooth: bool = False
    references: Callable[[Record, int | None], list[tuple[float, str]]] = lambda config, num_experts: []
    reaches_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of metrics.jsonl, of which trackers get the scalars.

    Attributes:
        name: its key there.
        unit, meaning: for docs/reference/metrics.md.
        of: logged of the steps since the last logged one, of an evaluation, or of the answers of --eval-generate.
        value: that figure. A number, None where there is none, or a list: of numbers, one for each MoE layer, the
            report draws the mean, and the lowest to the highest as a band.
        over_ranks: what becomes of the ranks' values: "alike" means that each rank has that of all ranks; else they are
            numbers, and their sum, mean or maximum is logged.
        is_logged: whether it is, the same on all ranks.
        console: text at the end of the console's line, made from the line's record; not called if the value is None.
        verbose: whether the console shows it with --verbose only.
        chart: of the report; None: it is not drawn.
        in_trainer: whether transformers' Trainer logs it, too, beside its own figures.
        imbalance: what `plan --imbalance` takes from it, the load of the busiest expert over the mean; 0.0: nothing.
    """

    name: str
    unit: str
    meaning: str
    of: Literal["steps", "evaluation", "answers"]
    value: Callable[[Any], Any]
    over_ranks: Literal["alike", "sum", "mean", "max"]
    is_logged: Callable[[Any], bool] = lambda known: True
    console: Callable[[Record], str] | None = None
    verbose: bool = False
    chart: Chart | None = None
    in_trainer: bool = False
    imbalance: Callable[[Any], float] | None = None


_OF_LINES = ("step", "generations", "answers", "generate_seconds", "save_seconds", "warning")
"""What lines of metrics.jsonl have beside metrics."""


def _load_LE(routing: Routing) -> Tensor:
    """Each expert's tokens over the mean of its layer: 1 is even, E/K is all tokens on the same experts."""
    counts_LE = routing.counts_LE.double()
    return counts_LE / counts_LE.mean(dim=1, keepdim=True).clamp(min=sys.float_info.min)


def _entropy(interval: Interval) -> list[float | None]:
    routing = interval.routing
    tokens_L = routing.counts_LE.double().sum(dim=1) / interval.top_k
    entropies: list[float] = (routing.entropy_L / tokens_L.clamp(min=1)).tolist()
    return [None if math.isnan(entropy) else entropy for entropy in entropies]


def _even_entropy(config: Record, num_experts: int | None) -> list[tuple[float, str]]:
    return [(math.log(num_experts), "even, ln E")] if num_experts else []


def _clipping(config: Record, num_experts: int | None) -> list[tuple[float, str]]:
    limit = config.get("max_grad_norm")
    if isinstance(limit, int | float) and 0 < limit < math.inf:
        return [(limit, f"clipped to {limit:.4g}")]
    return []


def _mean_busiest(tokens_LE: list[list[int]]) -> float:
    """Mean over layers."""
    loads = [max(tokens_E) * len(tokens_E) / sum(tokens_E) for tokens_E in tokens_LE or []]
    return sum(loads) / len(loads) if loads else 0.0


def _replay_changed(routing: Routing) -> float | None:
    changed, number = routing.replayed_2.tolist()
    return changed / number if number else None


def _is_routing_known(interval: Interval) -> bool:
    return interval.has_routing


def _of_preferences(figure: str, meaning: str, console: Callable[[float], str] | None = None) -> list[Metric]:
    """What is told of preference data, in steps and in evaluations."""
    return _of_own_loss(figure, meaning, f"Preferences: {figure}", console)


def _of_student(figure: str, meaning: str, console: Callable[[float], str] | None = None) -> list[Metric]:
    """What is told of learning from a teacher, in steps and in evaluations."""
    return _of_own_loss(figure, f"{meaning}; with `--teacher`", f"Teacher: {figure}", console)


def _of_data_set(name: str) -> list[Metric]:
    meaning = f"the loss of the data set {name}, with `--loss-by-dataset`"
    return _of_own_loss(LOSS_OF + name, meaning, f"Loss: {name}", lambda loss: f"{name} {loss:.4f}")


def _of_own_loss(figure: str, meaning: str, title: str, console: Callable[[float], str] | None) -> list[Metric]:
    """What another loss than the cross-entropy tells beside itself, in steps and in evaluations."""
    name = f"eval_{figure}"
    return [
        Metric(
            name=figure,
            unit="",
            meaning=meaning,
            of="steps",
            value=lambda interval: of_preferences(figure, interval.figures),
            over_ranks="alike",
            is_logged=lambda interval: _is_told(figure, interval.steps[0].figures),
            console=None if console is None else lambda line: console(line[figure]),
            chart=Chart(title, label="training", smooth=True),
        ),
        Metric(
            name=name,
            unit="",
            meaning=f"`{figure}` of the data held out",
            of="evaluation",
            value=lambda found: of_preferences(figure, found.figures),
            over_ranks="alike",
            is_logged=lambda found: _is_told(figure, found.figures),
            console=None if console is None else lambda line: console(line[name]),
            chart=Chart(title, label="evaluation"),
        ),
    ]


def _is_told(figure: str, figures: Mapping[str, float]) -> bool:
    return figure in figures or (figure == "rewards/margins" and "chosen" in figures)


def of_preferences(figure: str, means: Mapping[str, float]) -> float | None:
    """A figure, of means over what the loss is a mean of; None where there are none.

    Of labelled answers, those of chosen and rejected ones are sums over them divided by all answers, and `chosen` and
    `rejected` are their shares.
    """
    if figure.startswith(LOSS_OF):
        share = means.get(figure.replace(LOSS_OF, SHARE_OF, 1))
        return means[figure] / share if share else None
    if "chosen" not in means or figure == "kl":
        return means.get(figure)
    if figure == "rewards/margins":
        chosen, rejected = (of_preferences(f"rewards/{side}", means) for side in ("chosen", "rejected"))
        return None if chosen is None or rejected is None else chosen - rejected
    share = means[figure.partition("/")[2]]
    return means[figure] / share if share else None


METRICS = [
    Metric(
        name="epoch",
        unit="",
        meaning="epochs done",
        of="steps",
        value=lambda interval: interval.epoch,
        over_ranks="alike",
    ),
    Metric(
        name="steps",
        unit="",
        meaning="steps since the line before",
        of="steps",
        value=lambda interval: len(interval.steps),
        over_ranks="alike",
    ),
    Metric(
        name="skipped_steps",
        unit="",
        meaning="steps that were not finite and made no update; absent if there are none",
        of="steps",
        value=lambda interval: len(interval.steps) - len(interval.finite),
        over_ranks="alike",
        is_logged=lambda interval: len(interval.finite) < len(interval.steps),
        console=lambda line: f"{line['skipped_steps']} skipped",
    ),
    Metric(
        name="seconds",
        unit="s",
        meaning="wall time since training started or was resumed",
        of="steps",
        value=lambda interval: round(interval.seconds_in_all, 3),
        over_ranks="alike",
    ),
    Metric(
        name="loss",
        unit="nats",
        meaning="mean cross-entropy of the target tokens, weighted if the data have weights; with `--task` or "
        "`--teacher` the mean of another loss",
        of="steps",
        value=lambda interval: interval.mean("loss", "weight"),
        over_ranks="alike",
        chart=Chart("Loss", label="training", smooth=True),
    ),
    Metric(
        name="eval_loss",
        unit="nats",
        meaning="mean cross-entropy of the held-out target tokens, or mean loss of the held-out pairs or answers",
        of="evaluation",
        value=lambda found: found.loss,
        over_ranks="alike",
        chart=Chart("Loss", label="evaluation"),
    ),
    Metric(
        name="eval_perplexity",
        unit="",
        meaning="exponential of `eval_loss`; not of preference data",
        of="evaluation",
        value=lambda found: found.perplexity,
        over_ranks="alike",
        is_logged=lambda found: not found.figures,
        chart=Chart("Evaluation perplexity"),
    ),
    Metric(
        name="eval_target_tokens",
        unit="tokens",
        meaning="target tokens that were evaluated",
        of="evaluation",
        value=lambda found: found.targets,
        over_ranks="alike",
    ),
    Metric(
        name="eval_seconds",
        unit="s",
        meaning="wall time of the evaluation",
        of="evaluation",
        value=lambda found: round(found.seconds, 3),
        over_ranks="alike",
    ),
    Metric(
        name="eval_score",
        unit="",
        meaning="mean score of the answers of `--eval-generate`: the share that is right, or the mean of a function",
        of="answers",
        value=lambda found: found.score,
        over_ranks="alike",
        chart=Chart("Evaluation score", include=(0,)),
    ),
    Metric(
        name="eval_answers",
        unit="",
        meaning="how many answers were scored",
        of="answers",
        value=lambda found: found.number,
        over_ranks="alike",
    ),
    Metric(
        name="eval_answers_cut",
        unit="",
        meaning="answers that were cut off at `--generate-max-new-tokens`",
        of="answers",
        value=lambda found: found.unended,
        over_ranks="alike",
    ),
    *_of_student("teacher_kl", "divergence of the prediction from the teacher's", lambda mean: f"kl {mean:.3f}"),
    *_of_student("cross_entropy", "mean cross-entropy of the target tokens"),
    Metric(
        name="mtp_loss",
        unit="nats",
        meaning="mean cross-entropy of what the layer for multi-token prediction drafts, unweighted; only with "
        "`--train-mtp`",
        of="steps",
        value=lambda interval: interval.figures.get("mtp_loss"),
        over_ranks="alike",
        is_logged=lambda interval: "mtp_loss" in interval.steps[0].figures,
        console=lambda line: f"mtp loss {line['mtp_loss'] or math.nan:.4f}",
        chart=Chart("Loss", label="multi-token prediction", smooth=True),
    ),
    *_of_preferences(
        "rewards/chosen",
        "`--preference-beta` times the chosen, or desirable, answer's log-probability less the reference's",
    ),
    *_of_preferences("rewards/rejected", "the same of the rejected, or undesirable, answer"),
    *_of_preferences("rewards/margins", "`rewards/chosen` less `rewards/rejected`", lambda mean: f"margin {mean:.3f}"),
    *_of_preferences(
        "rewards/accuracies", "share of pairs with a positive margin", lambda mean: f"accuracy {mean:.0%}"
    ),
    *_of_preferences("logps/chosen", "log-probability of the chosen answer"),
    *_of_preferences("logps/rejected", "log-probability of the rejected answer"),
    *_of_preferences(
        "kl", "estimate of the divergence from the reference, with `--task kto`", lambda kl: f"kl {kl:.3f}"
    ),
    Metric(
        name="grad_norm",
        unit="",
        meaning="gradient norm of the last finite step, before clipping",
        of="steps",
        value=lambda interval: interval.finite[-1].grad_norm if interval.finite else None,
        over_ranks="alike",
        chart=Chart("Gradient norm", "before clipping", include=(0,), smooth=True, references=_clipping),
    ),
    Metric(
        name="learning_rate",
        unit="",
        meaning="learning rate of the last step",
        of="steps",
        value=lambda interval: interval.learning_rate,
        over_ranks="alike",
        chart=Chart("Learning rate", include=(0,)),
    ),
    Metric(
        name="balance_loss",
        unit="",
        meaning="load-balancing loss, unweighted; only if it has a weight",
        of="steps",
        value=lambda interval: interval.mean("balance_loss", None),
        over_ranks="alike",
        is_logged=lambda interval: interval.weights.balance > 0,
        chart=Chart("Load-balancing loss", "unweighted", smooth=True),
        in_trainer=True,
    ),
    Metric(
        name="z_loss",
        unit="",
        meaning="router z-loss, unweighted; only if it has a weight",
        of="steps",
        value=lambda interval: interval.mean("z_loss", "tokens"),
        over_ranks="alike",
        is_logged=lambda interval: interval.weights.z > 0,
        chart=Chart("Router z-loss", "unweighted", smooth=True),
        in_trainer=True,
    ),
    Metric(
        name="tokens",
        unit="tokens",
        meaning="tokens of all ranks, without padding",
        of="steps",
        value=lambda interval: interval.total("tokens"),
        over_ranks="alike",
    ),
    Metric(
        name="target_tokens",
        unit="tokens",
        meaning="tokens that were to be predicted",
        of="steps",
        value=lambda interval: interval.total("targets"),
        over_ranks="alike",
    ),
    Metric(
        name="images",
        unit="images",
        meaning="images of all ranks, with `--images`",
        of="steps",
        value=lambda interval: interval.of_images[0],
        over_ranks="alike",
        is_logged=lambda interval: bool(interval.of_images),
    ),
    Metric(
        name="image_patches",
        unit="patches",
        meaning="patches that the vision tower sees of them",
        of="steps",
        value=lambda interval: interval.of_images[1],
        over_ranks="alike",
        is_logged=lambda interval: bool(interval.of_images),
    ),
    Metric(
        name="tokens_per_second",
        unit="tokens/s",
        meaning="`tokens` over the wall time without pauses",
        of="steps",
        value=lambda interval: round(interval.total("tokens") / interval.seconds, 1),
        over_ranks="alike",
        chart=Chart("Throughput", "tokens/s, all ranks", include=(0,), smooth=True),
    ),
    Metric(
        name="step_seconds",
        unit="s",
        meaning="wall time per step, without pauses for evaluations, sample generations and saves",
        of="steps",
        value=lambda interval: round(interval.seconds / len(interval.steps), 6),
        over_ranks="alike",
        chart=Chart("Seconds per step", "without pauses", label="step", include=(0,), smooth=True),
    ),
    Metric(
        name="data_seconds",
        unit="s",
        meaning="the part of `step_seconds` spent waiting for batches, on the rank that waits longest",
        of="steps",
        value=lambda interval: round(interval.seconds_waited / len(interval.steps), 6),
        over_ranks="max",
        chart=Chart("Seconds per step", label="waiting for data", smooth=True),
    ),
    Metric(
        name="tflops_per_second",
        unit="TFLOP/s",
        meaning="per rank, forward and backward without recomputation",
        of="steps",
        value=lambda interval: round(interval.tflops_per_second, 4),
        over_ranks="alike",
        chart=Chart("Model FLOP/s", "TFLOP/s per rank", include=(0,), smooth=True),
    ),
    Metric(
        name="mfu",
        unit="",
        meaning="`tflops_per_second` over the device's bf16 peak, if that is known",
        of="steps",
        value=lambda interval: round(interval.tflops_per_second / interval.peak_tflops, 4),
        over_ranks="alike",
        is_logged=lambda interval: interval.peak_tflops is not None,
        console=lambda line: f"MFU {line['mfu']:.1%}",
        verbose=True,
        chart=Chart("MFU", "model FLOP/s of the device's peak", format="percent", include=(0,), smooth=True),
    ),
    Metric(
        name="peak_memory_mb",
        unit="MB",
        meaning="most that a rank has held since it started: allocated by torch on a GPU, resident on a CPU",
        of="steps",
        value=lambda interval: round(interval.most_memory / 1e6, 1),
        over_ranks="max",
        chart=Chart("Memory", "of the rank with the most", label="peak", format="memory", include=(0,)),
    ),
    Metric(
        name="host_memory_mb",
        unit="MB",
        meaning="resident host memory now, of the rank with the most",
        of="steps",
        value=lambda interval: round(interval.host_memory / 1e6, 1),
        over_ranks="max",
        chart=Chart("Memory", label="host, now", format="memory"),
    ),
    Metric(
        name="gpu_utilization",
        unit="",
        meaning="share of the last second in which a kernel ran, mean over ranks; null without nvidia-ml-py",
        of="steps",
        value=lambda interval: interval.gpu_utilization,
        over_ranks="mean",
        is_logged=lambda interval: interval.is_on_gpu,
        chart=Chart("GPU utilization", "mean over ranks, sampled by the driver", format="percent", include=(0, 1)),
    ),
    Metric(
        name="expert_load_max_over_mean",
        unit="",
        meaning="tokens of the busiest expert over the mean of its layer, for the worst layer: from 1 to E/K",
        of="steps",
        value=lambda interval: float(_load_LE(interval.routing).max()),
        over_ranks="alike",
        is_logged=_is_routing_known,
        console=lambda line: f"expert load {line['expert_load_max_over_mean']:.2f}x mean",
        verbose=True,
        chart=Chart(
            "Most loaded expert",
            "times the mean, largest of all layers",
            include=(1,),
            smooth=True,
            references=lambda config, num_experts: [(1, "even")],
        ),
        imbalance=lambda load: float(load),
    ),
    Metric(
        name="dead_experts",
        unit="",
        meaning="share of all layers' experts that got no token",
        of="steps",
        value=lambda interval: float((interval.routing.counts_LE == 0).double().mean()),
        over_ranks="alike",
        is_logged=_is_routing_known,
        chart=Chart("Experts without tokens", "share of all layers' experts", format="percent", include=(0,)),
    ),
    Metric(
        name="router_entropy",
        unit="nats",
        meaning="mean entropy of the router's scores, per layer; null if a layer has none",
        of="steps",
        value=_entropy,
        over_ranks="alike",
        is_logged=_is_routing_known,
        chart=Chart(
            "Router entropy",
            "of the scores, nats per token, mean over layers; band: lowest to highest layer",
            references=_even_entropy,
            reaches_all=True,
        ),
    ),
    Metric(
        name=REPLAY_CHANGED,
        unit="",
        meaning="share of the replayed choices of experts that routers would have made otherwise; only with "
        "`routed_experts`, in a loop of your own or a Trainer",
        of="steps",
        value=lambda interval: _replay_changed(interval.routing),
        over_ranks="alike",
        is_logged=lambda interval: interval.has_routing and _replay_changed(interval.routing) is not None,
        in_trainer=True,
    ),
    Metric(
        name="dropped_tokens",
        unit="tokens",
        meaning="routed tokens that no expert computed: always 0",
        of="steps",
        value=lambda interval: int(interval.routing.counts_LE.sum() - interval.routing.rows_computed_L.sum()),
        over_ranks="alike",
        is_logged=_is_routing_known,
    ),
    Metric(
        name="expert_tokens",
        unit="tokens",
        meaning="tokens routed to each expert, per layer",
        of="steps",
        value=lambda interval: interval.routing.counts_LE.tolist(),
        over_ranks="alike",
        is_logged=_is_routing_known,
        imbalance=_mean_busiest,
    ),
]
"""In the order of the console's line and of the report's charts."""


def metrics_of(names: Iterable[str]) -> list[Metric]:
    """METRICS, and those of data sets, of figures or of keys of metrics.jsonl."""
    figures = (name.removeprefix("eval_") for name in names)
    data_sets = dict.fromkeys(name.removeprefix(LOSS_OF) for name in figures if name.startswith(LOSS_OF))
    return [*METRICS, *(metric for name in data_sets for metric in _of_data_set(name))]


def register_metric(added: Metric, before: str | None = None) -> None:
    """Log one more figure; docs/how-to/extend.md has an example.

    Args:
        before: name of the metric that it comes before, on the console and in the report; None: at the end.

    Raises:
        ValueError: its name is taken, it lacks something, its chart is full, or there is no `before`.
    """
    names = [metric.name for metric in METRICS]
    if added.name in names or added.name in _OF_LINES:
        raise ValueError(f"register_metric: metrics.jsonl has {added.name!r} already")
    what = f"register_metric: the metric {added.name!r}"
    if lacking := [field for field in ("name", "meaning") if not getattr(added, field)]:
        raise ValueError(f"{what} has no {lacking[0]}")
    check_fields(what, added)
    if before is not None and before not in names:
        raise ValueError(f"register_metric: there is no metric {before!r} to come before; known: {', '.join(names)}")
    if (
        added.chart
        and sum(metric.chart is not None and metric.chart.title == added.chart.title for metric in METRICS) > 1
    ):
        raise ValueError(f"register_metric: the chart {added.chart.title!r} has two lines already")
    METRICS.insert(len(METRICS) if before is None else names.index(before), added)


def told_of(line: Record, verbose: bool = False) -> list[str]:
    """What the console says of the metrics in a line, but for those that are columns of its table.

    Args:
        verbose: whether it also says what few need.
    """
    told = []
    for metric in metrics_of(line):
        if metric.console and line.get(metric.name) is not None and (verbose or not metric.verbose):
            with telling() as failed:
                told.append(metric.console(line))
            told += [f"{metric.name}: {words}" for words in failed]
    return told
