"""Plan a run: `python -m expertmesh.sharding plan`, whose flags are in `plan_flags.py`.

From config.json alone: memory, traffic and speed of every parallel layout, best first, and the line that starts the
first. Every flag of train_ep.py, and its `--config`, is a constraint: what is given is kept, and the rest is searched.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rich.text import Text

from ...checkpoints.files.encodings import quantization_of
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of
from ...moe.util.terminal import folded
from ...sharding.topology import DenseShard, Topology, check_chunks, check_sizes, check_tp_nodes, nodes_of_equal_size
from ..config.optimizers import OPTIMIZERS
from ..config.train_config import TrainConfig
from .columns import open_console
from .coverage import assumed_code, not_modelled
from .imbalance import GivenRouting, imbalance_of, read_image_tokens, read_imbalance
from .plan_flags import PlanFlags
from .planner.costs import Cluster
from .planner.facts import ModelFacts
from .planner.forecasts import Forecasts
from .planner.hardware import chosen_hardware, products_in
from .planner.model_config import find_config
from .planner.search import Plan, Search, estimate_lasting, forecast, layouts, sequences_per_step
from .progress import DryRuns
from .tables import launch_line, print_plans, summary, to_be_set

MOST_MORE_GPUS = 64
"""Where nothing fits, up to so many times the GPUs are tried."""


def plan(asked: PlanFlags) -> int:
    """Print a plan; exit code 0, or 1 where nothing fits.

    Raises:
        ExpertMeshError: the settings do not go together, or the model cannot be trained so.
    """
    arguments = asked.arguments
    config = asked.config((asked.tp_sizes or [1])[0])
    hardware = products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)
    cluster = Cluster(hardware, asked.gpus_per_node, hardware.device.memory)
    begun = time.perf_counter()
    with _naming(config.model), DryRuns() as progress:
        forecasts = _forecasts(asked, config, progress)
        search = _search(asked, config, forecasts, cluster)
        try:
            plans = search.run()
        except ExpertMeshError:
            if asked.tp_sizes is not None or 1 in search.refused:
                raise
            # the sizes that fill micro-batches best are none that the model can have
            search = _search(asked, config, forecasts, cluster, tp_sizes=[1])
            plans = search.run()
        balanced = None
        if arguments.imbalance is None:
            balanced = _balanced(search, plans[0])
    seconds = time.perf_counter() - begun
    best, facts = plans[0], search.facts
    planned = {each.config.tp_size for each in plans}
    for size in asked.tp_sizes or ():
        if size in search.refused and size not in planned:
            why = str(search.refused[size])
            print(folded(f"left out: {why if '--tp-size' in why else f'--tp-size {size}: {why}'}"), file=sys.stderr)

    def launch(plan: Plan) -> str:
        given = asked.given
        return launch_line(plan.config, plan.world_size, cluster.gpus_per_node, given.file, given.config)

    notes = [*_notes(best), *_fixed_by_file(asked), *assumed_code(facts.looped, facts.by_liger)]
    if arguments.json:
        for line in notes:
            print(folded(line), file=sys.stderr)
        if to_set := to_be_set(launch(best)):
            print(folded(f"note: in `launch`, {to_set}"), file=sys.stderr)
        print(json.dumps([plan.as_json() | {"launch": launch(plan)} for plan in plans], indent=1))
        return 0 if best.fits else 1
    console = open_console()
    batch = _batch_in_words(asked, config)
    print_plans(console, plans, len(search.layouts), batch, seconds, balanced, arguments.top, arguments.verbose)
    for line in notes:
        console.print(Text(folded(line)))
    if asked.tried().pp_size == 1 and "pp_size" not in asked.given.all and asked.world_size > cluster.gpus_per_node:
        console.print(Text(folded("to try pipelines, give --global-batch-size or --pp-size")))
    if not arguments.verbose:
        console.print(Text(folded("--verbose shows the parts of memory and time, what is sent, and the assumptions")))
    if best.fits:
        line = launch(best)
        console.print(Text("\nrecommended", "bold green"))
        if to_set := to_be_set(line):
            console.print(Text(folded(to_set)))
        # in one piece, to be copied
        console.print(Text(line))
        return 0
    console.print(Text("\nnothing fits", "bold red"))
    for line in _what_would_fit(asked, best):
        console.print(Text(folded(line)))
    return 1


def _forecasts(asked: PlanFlags, config: TrainConfig, progress: DryRuns) -> Forecasts:
    """
    Raises:
        ExpertMeshError: there is no such model.
    """
    file = find_config(config.model)
    return Forecasts(file.content, file.load, is_kept=not asked.arguments.no_cache, tell=progress)


def _search(asked: PlanFlags, config: TrainConfig, forecasts: Forecasts, cluster: Cluster, **tried: Any) -> Search:
    """The search among all that was left open.

    Raises:
        ExpertMeshError: the model has no such layout.
    """
    facts, open_ones = forecasts.facts(config), replace(asked.tried(), **tried)
    _check_layout(asked, config, facts)
    found = layouts(facts, config, open_ones, asked.world_size, cluster.gpus_per_node)
    if not found:
        kept = {name: value for name, value in asked.given.all.items() if name in _LAYOUT}
        said = _flags(kept)
        raise ExpertMeshError(f"no layout of {asked.world_size} GPUs has {said or 'this model'}; leave some flags out")
    # as a run's own forecast: one sample a row is the most that attention computes
    image_tokens = read_image_tokens(asked.arguments.image_tokens, config)
    routing = GivenRouting(samples=1, busiest=read_imbalance(asked.arguments.imbalance), image_tokens=image_tokens)
    may_keep = "keep_expert_products" not in asked.given.all
    return Search(forecasts, facts, found, asked.world_size, cluster, routing, asked.tp_sizes or (), may_keep)


def _check_layout(asked: PlanFlags, config: TrainConfig, facts: ModelFacts) -> None:
    """
    Raises:
        ExpertMeshError: what was given of the layout does not go together, or with the model.
    """
    given, world_size = asked.given.all, asked.world_size
    ep_size = given.get("ep_size", 1)
    dense_shard: DenseShard = given.get("dense_shard", "full") if "ep_size" in given else "full"
    topology = Topology(world_size, ep_size, dense_shard, config.cp_size, config.pp_size, config.tp_size)
    check_sizes(topology, facts.num_experts)
    check_tp_nodes(topology, nodes_of_equal_size(world_size, config.ranks_per_node or asked.gpus_per_node))
    if ep_size > 1:
        check_chunks(config.overlap_chunks, ep_size, facts.num_experts)
    imbalance_of(read_imbalance(asked.arguments.imbalance), facts.num_experts)


def _balanced(search: Search, best: Plan) -> Plan | None:
    """The plan with balanced routing."""
    asked = replace(search.asked(best.config), routing=replace(search.routing, busiest=1.0))
    evenly = forecast(search.forecasts, [asked])[0]
    if isinstance(evenly, ExpertMeshError):
        return None
    return evenly if best.pipeline is None else evenly.if_longer(best.pipeline.longer)


def _fixed_by_file(asked: PlanFlags) -> list[str]:
    """Which of the settings that are searched where nobody gives them the YAML file has fixed; a line, if any."""
    names = (*_LAYOUT, "pipeline_layers", "gradient_checkpointing", "per_device_train_batch_size")
    by_flags = {*asked.given.flags, "cp_size", *(["tp_size"] if asked.arguments.tp_size is not None else [])}
    file = {name: asked.given.file[name] for name in names if name in asked.given.file and name not in by_flags}
    said = _flags(file)
    if not said:
        return []
    return [
        f"note: {asked.given.config} fixes {said}: only the rest was searched; other values may be faster: give them "
        "as flags, which win over the file, or plan with a copy without these lines"
    ]


_LAYOUT = ("ep_size", "dense_shard", "cp_size", "tp_size", "pp_size", "pipeline_chunks", "pipeline_schedule")


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """
    Raises:
        ExpertMeshError: one inside; it names the model, as errors of its file do already.
    """
    try:
        yield
    except ExpertMeshError as error:
        raise ExpertMeshError(str(error) if model in str(error) else f"{model}: {error}") from error


def _batch_in_words(asked: PlanFlags, config: TrainConfig) -> str:
    if config.global_batch_size is None:
        return f"{config.gradient_accumulation_steps} micro-batches"
    by_default = "" if asked.has_batch else " (by default; --global-batch-size sets another number)"
    return f"{config.global_batch_size:,} {_entries(config)}{by_default}"


def _entries(config: TrainConfig) -> str:
    return "sequences" if config.sequences_per_row == 1 else "pairs"


def _notes(plan: Plan) -> list[str]:
    """What to know of a run beside its figures."""
    run = plan.config
    notes = [*run.without_effect, *run.without_effect_on("cuda"), *not_modelled(run)]
    if run.sequences_per_row > 1:
        pairs = run.per_device_train_batch_size
        sequences = pairs * run.sequences_per_row
        notes.append(f"a micro-batch of {sequences} sequences has {pairs} pair{'' if pairs == 1 else 's'}")
    if run.global_batch_size not in (None, complete := sequences_per_step(run, plan.world_size)):
        notes.append(
            f"{run.global_batch_size} {_entries(run)} per step do not fill the micro-batches: figures are of steps of "
            f"{complete}"
        )
    return [f"note: {line}" for line in notes]


def _fewer_bytes(model: str) -> list[dict[str, Any]]:
    """What is tried where nothing fits: state in fewer bits, and adapters, beside what is in MXFP4 already or nf4."""
    smaller = [{"optim": entry.name} for entry in OPTIMIZERS.entries() if entry.is_tried_where_nothing_fits]
    said = quantization_of(find_config(model).content)
    base = "mxfp4" if isinstance(said, dict) and said.get("quant_method") == "mxfp4" else "nf4"
    return [*smaller, {"adapter": "lora"}, {"adapter": "lora", "base_dtype": base}]


def _what_would_fit(asked: PlanFlags, smallest: Plan) -> Iterator[str]:
    """Try what shrinks a run of which no layout fits, each by itself: what fits, with its figures."""
    config, cluster, gpus = asked.config(smallest.config.tp_size), smallest.cluster, asked.world_size
    bytes_alone = [each for each in _fewer_bytes(config.model) if any(getattr(config, n) != v for n, v in each.items())]
    families: list[list[dict[str, Any]]] = [[each] for each in bytes_alone]
    if smallest.memory.lasting < cluster.memory:
        # what is computed is too large, not what lasts
        families += [[{"cp_size": size} for size in (2, 4, 8) if size > config.cp_size]]
        halves = (config.max_seq_length >> n for n in range(1, 32))
        families += [[{"max_seq_length": length} for length in halves if length >= 512]]
    families += [[{"gpus": 2**n * gpus} for n in range(1, MOST_MORE_GPUS.bit_length())]]
    with DryRuns() as progress:
        fit = partial(_fitting, asked, smallest, progress)
        found = [_first(family, fit) for family in families]
    if fitting := [f"  {_flags(each)}: {summary(plan)}" for each, plan in filter(None, found)]:
        yield "changes that make it fit, tried one at a time in the smallest layout or on more GPUs:"
        yield from fitting
    else:
        yield f"none of these makes it fit: {', '.join(_flags(each) for family in families for each in family)}"


def _flags(changes: dict[str, Any]) -> str:
    return " ".join(f"{flag_of(name)} {value}" for name, value in changes.items())


def _first(
    family: Sequence[dict[str, Any]], fit: Callable[[dict[str, Any]], Plan | None]
) -> tuple[dict[str, Any], Plan] | None:
    """The first that fits of changes each of which shrinks a run more than the one before. Where the first does not
    fit, the last that is not refused is tried next: if that does not, none does."""
    places = range(len(family))
    for most in (*places[:1], *places[:0:-1]):
        with suppress(ExpertMeshError):
            if (plan := fit(family[most])) is not None:
                break
            if most > 0:
                return None
    else:
        return None
    for each in family[1:most]:
        with suppress(ExpertMeshError):
            if (lesser := fit(each)) is not None:
                return each, lesser
    return family[most], plan


def _fitting(asked: PlanFlags, smallest: Plan, progress: DryRuns, changes: dict[str, Any]) -> Plan | None:
    """What fits with these changes in the smallest layout, or on more GPUs in that which holds the least, with the
    smallest micro-batch and, where it is open, all recomputed; None if nothing does.

    Raises:
        ExpertMeshError: these changes do not go together with the model, or what else was asked for.
    """
    gpus = changes.get("gpus", asked.world_size)
    larger = replace(asked, arguments=Namespace(**{**vars(asked.arguments), "gpus": gpus}))
    open_ones = larger.tried()
    tried: dict[str, Any] = {
        "micro_batches": (min(open_ones.micro_batches),),
        "checkpointing": open_ones.checkpointing or "full",
        "tp_sizes": (smallest.config.tp_size,),
    }
    if gpus == asked.world_size:
        layout = smallest.config
        tried |= {"ep_size": layout.ep_size, "dense_shard": layout.dense_shard, "pp_size": layout.pp_size}
    cluster = replace(smallest.cluster, gpus_per_node=larger.gpus_per_node)
    of_run = {name: value for name, value in changes.items() if name != "gpus"}
    config = larger.config(smallest.config.tp_size, **of_run)
    search = _search(larger, config, _forecasts(larger, config, progress), cluster, **tried)
    if estimate_lasting(search.facts, search.smallest(), search.world_size) > cluster.memory:
        return None
    (plan,) = forecast(search.forecasts, [search.asked(search.smallest())])
    if isinstance(plan, ExpertMeshError):
        raise plan
    return plan if plan.fits else None
