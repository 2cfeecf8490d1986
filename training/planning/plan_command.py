"""Plan a run: `python -m expertmesh.sharding plan`, whose flags are in `plan_flags.py`.

From config.json alone: memory, traffic and speed of every parallel layout, best first, and the line that starts the
first. Every flag of train_ep.py, and its `--config`, is a constraint: what is given is kept, and the rest is searched.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from .imbalance import imbalance_of, read_imbalance
from .plan_flags import Asked
from .planner.hardware import chosen_hardware, products_in
from .planner.model_config import find_config
from .planner.search import Cluster, Plan, best_first, forecast, reckon, search, sequences_per_step
from .planner.setting import Setting
from .planner.tried import Tried
from .rehearsal.cached import CachedMeasure
from .rehearsal.run_setting import config_of, setting_of
from .tables import Searched, launch_line, print_plans, summary, to_be_set

TP_SIZES = (2, 4, 8)
"""Ranks of a tensor-parallel group that are tried beside none."""
MOST_MORE_GPUS = 64
"""Where nothing fits, up to so many times the GPUs are tried."""


def plan(asked: Asked) -> int:
    """Print a plan; exit code 0, or 1 where nothing fits.

    Raises:
        ExpertMeshError: the settings do not go together, or the model cannot be trained so.
    """
    arguments = asked.arguments
    config = asked.config((asked.tp_sizes or [1])[0])
    hardware = products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)
    cluster = Cluster(hardware, asked.gpus_per_node, hardware.device.memory)
    begun = time.perf_counter()
    found = _search(asked, cluster)
    plans = best_first(plan for each in found for plan in each.plans)
    seconds = time.perf_counter() - begun
    best = plans[0]

    def launch(plan: Plan) -> str:
        (own,) = (each.config for each in found if each.config.tp_size == plan.setting.tp_size)
        run = config_of(plan.setting, own)
        given = asked.given
        return launch_line(run, plan.setting.world_size, cluster.gpus_per_node, given.file, given.config)

    notes = [*_notes(config_of(best.setting, config), best.setting), *_fixed_by_file(asked)]
    model = found[0].measure.parameters
    if arguments.json:
        for line in [*notes, *assumed_code(model.looped, by_liger=False)]:
            print(folded(line), file=sys.stderr)
        reckon(plans)
        if to_set := to_be_set(launch(best)):
            print(folded(f"note: in `launch`, {to_set}"), file=sys.stderr)
        print(json.dumps([plan.as_json() | {"launch": launch(plan)} for plan in plans], indent=1))
        return 0 if best.fits else 1
    console = open_console()
    balanced = _balanced(found, best, cluster) if arguments.imbalance is None else None
    batch = _batch_in_words(asked, config)
    searched = Searched(model, config, plans, cluster, batch, seconds, balanced)
    print_plans(console, searched, arguments.top, arguments.verbose)
    for line in [*notes, *assumed_code(model.looped, model.by_liger)]:
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
    for line in _what_would_fit(asked, best, cluster):
        console.print(Text(folded(line)))
    return 1


def _balanced(found: "Sequence[_Found]", best: Plan, cluster: Cluster) -> Plan:
    """The plan with balanced routing."""
    (measure,) = (each.measure for each in found if best.setting.tp_size == each.config.tp_size)
    plan = forecast(measure, replace(best.setting, imbalance=1.0), cluster)
    measure.save()
    return plan


@dataclass(frozen=True)
class _Found:
    """The plans of a size of tensor parallelism; config: of the run, but for what is searched."""

    config: TrainConfig
    measure: CachedMeasure
    plans: list[Plan]


def _search(asked: Asked, cluster: Cluster) -> list[_Found]:
    """Search with each size of tensor parallelism that was asked for and can be measured; says of the others why not.
    If none was asked for, with those that may pay.

    Raises:
        ExpertMeshError: none can be; says why not the first.
    """
    found: list[_Found] = []
    errors: list[tuple[int, ExpertMeshError]] = []
    tried = asked.tried()
    sizes = asked.tp_sizes
    if sizes is None:
        # with two sequences or more half as many ranks per group, or none, compute as many tokens each with fewer
        # exchanges
        sizes = [1, *(TP_SIZES if 1 in tried.micro_batches else ())]
    for size in sizes:
        is_own_choice = asked.tp_sizes is None and size > 1
        if is_own_choice and found and not _larger_groups_may_pay(found, tried, cluster):
            break
        try:
            config = asked.config(size)
            measure = _measure(asked, config)
        except ExpertMeshError as error:
            if is_own_choice:
                # what a size does not divide, its multiples do not either
                break
            errors.append((size, error))
            continue
        try:
            own = replace(tried, micro_batches=(1,)) if is_own_choice else tried
            found.append(_Found(config, measure, _plans(asked, config, measure, own, cluster)))
        except ExpertMeshError as error:
            errors.append((size, error))
        measure.save()
    if not found:
        raise errors[0][1]
    for size, why in errors:
        said = str(why) if "--tp-size" in str(why) else f"--tp-size {size}: {why}"
        print(folded(f"left out: {said}"), file=sys.stderr)
    return found


def _larger_groups_may_pay(found: Sequence[_Found], tried: Tried, cluster: Cluster) -> bool:
    """Whether a larger tensor-parallel group could be better than what was found. It divides what is computed for a
    sequence, which spares recomputation, and sends more; what lasts is divided by all ranks in any case."""
    best, newest = best_first(plan for each in found for plan in each.plans)[0], best_first(found[-1].plans)[0]
    if not best.fits:
        return any(plan.memory.lasting <= cluster.memory for plan in found[-1].plans)
    if best is not newest:
        return False
    batch = found[-1].config.global_batch_size
    if batch is not None and sequences_per_step(best.setting) > batch:
        return True
    return tried.checkpointing is None and best.setting.checkpointing != "none"


def _measure(asked: Asked, config: TrainConfig) -> CachedMeasure:
    """What measures the model.

    Raises:
        ExpertMeshError: there is no such model, or it cannot be trained so, on so many ranks.
    """
    given, world_size = asked.given.all, asked.world_size
    ep_size = given.get("ep_size", 1)
    sizes = (config.cp_size, config.pp_size, config.tp_size)
    dense_shard: DenseShard = given.get("dense_shard", "full") if "ep_size" in given else "full"
    topology = Topology(world_size, ep_size, dense_shard, *sizes)
    # the model's experts are not known yet
    check_sizes(replace(topology, ep_size=1, dense_shard="full"), num_experts=1)
    check_tp_nodes(topology, nodes_of_equal_size(world_size, config.ranks_per_node or asked.gpus_per_node))
    file = find_config(config.model)
    with _naming(config.model):
        measure = CachedMeasure(config, file.content, file.load, "cuda", not asked.arguments.no_cache)
    num_experts = measure.parameters.num_experts
    check_sizes(topology, num_experts)
    if ep_size > 1:
        check_chunks(config.overlap_chunks, ep_size, num_experts)
    return measure


def _plans(asked: Asked, config: TrainConfig, measure: CachedMeasure, tried: Tried, cluster: Cluster) -> list[Plan]:
    """
    Raises:
        ExpertMeshError: the model cannot be trained in any of the settings that are tried.
    """
    layers = config.layers_of_stages
    base = setting_of(
        config,
        asked.world_size,
        ep_size=1,
        imbalance=imbalance_of(read_imbalance(asked.arguments.imbalance), measure.parameters.num_experts),
        ranks_per_node=config.ranks_per_node or asked.gpus_per_node,
        accumulation=config.gradient_accumulation_steps or 1,
        pp_size=1,
        chunks=1,
        schedule="1f1b",
        stage_layers=None if layers is None else tuple(layers),
    )
    # what was asked for counts pairs, a setting their sequences
    each = config.sequences_per_row
    batch = None if config.global_batch_size is None else config.global_batch_size * each
    tried = replace(tried, micro_batches=[number * each for number in tried.micro_batches], global_batch=batch)
    with _naming(config.model):
        plans = search(measure, base, tried, cluster)
    if not plans:
        kept = {name: value for name, value in asked.given.all.items() if name in _LAYOUT}
        said = " ".join(f"{flag_of(name)} {value}" for name, value in kept.items())
        raise ExpertMeshError(f"no layout of {base.world_size} GPUs has {said or 'this model'}; leave some flags out")
    return plans


def _fixed_by_file(asked: Asked) -> list[str]:
    """Which of the settings that are searched where nobody gives them the YAML file has fixed; a line, if any."""
    names = (*_LAYOUT, "pipeline_layers", "gradient_checkpointing", "per_device_train_batch_size")
    by_flags = {*asked.given.flags, "cp_size", *(["tp_size"] if asked.arguments.tp_size is not None else [])}
    file = {name: asked.given.file[name] for name in names if name in asked.given.file and name not in by_flags}
    said = " ".join(f"{flag_of(name)} {value}" for name, value in file.items())
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


def _batch_in_words(asked: Asked, config: TrainConfig) -> str:
    if config.global_batch_size is None:
        return f"{config.gradient_accumulation_steps} micro-batches"
    by_default = "" if asked.has_batch else " (by default; --global-batch-size sets another number)"
    return f"{config.global_batch_size:,} {_entries(config)}{by_default}"


def _entries(config: TrainConfig) -> str:
    return "sequences" if config.sequences_per_row == 1 else "pairs"


def _notes(run: TrainConfig, setting: Setting) -> list[str]:
    """What to know of a run beside its figures."""
    notes = [*run.without_effect, *run.without_effect_on("cuda"), *not_modelled(run, rehearsed=False)]
    if run.sequences_per_row > 1:
        pairs = setting.micro_batch // run.sequences_per_row
        notes.append(f"a micro-batch of {setting.micro_batch} sequences has {pairs} pair{'' if pairs == 1 else 's'}")
    if run.global_batch_size not in (None, complete := sequences_per_step(setting) // run.sequences_per_row):
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


def _what_would_fit(asked: Asked, smallest: Plan, cluster: Cluster) -> Iterator[str]:
    """Try what shrinks a run of which no layout fits, each by itself: what fits, with its figures."""
    config = asked.config(smallest.setting.tp_size)
    tries: list[tuple[str, dict[str, Any], int]] = []
    for changes in _fewer_bytes(config.model):
        if any(getattr(config, name) != value for name, value in changes.items()):
            tries.append((" ".join(f"{flag_of(name)} {value}" for name, value in changes.items()), changes, 1))
    if smallest.memory.lasting < cluster.memory:
        # what is computed is too large, not what lasts
        tries += [(f"--cp-size {size}", {"cp_size": size}, 1) for size in (2, 4, 8) if size > config.cp_size]
        shorter = config.max_seq_length // 2
        while shorter >= 512:
            tries.append((f"--max-seq-length {shorter}", {"max_seq_length": shorter}, 1))
            shorter //= 2
    more = 2
    while more <= MOST_MORE_GPUS:
        tries.append((f"--gpus {more * asked.world_size}", {}, more))
        more *= 2
    fitting: list[str] = []
    done: set[str] = set()
    for flags, changes, times in tries:
        kind = flags.split()[0]
        if kind in done and kind in ("--cp-size", "--max-seq-length", "--gpus"):
            # the least of these is enough
            continue
        plan = _fitting(asked, changes, times, smallest.setting, cluster)
        if plan is not None:
            done.add(kind)
            fitting.append(f"  {flags}: {summary(plan, cluster.hardware)}")
    if fitting:
        yield "changes that make it fit, tried one at a time in the smallest layout or on more GPUs:"
        yield from fitting
    else:
        yield f"none of these makes it fit: {', '.join((flags for flags, _, _ in tries))}"


def _fitting(asked: Asked, changes: dict[str, Any], times: int, smallest: Setting, cluster: Cluster) -> Plan | None:
    """The fastest plan that fits with these changes in the smallest layout, or in any on so many times the GPUs, of
    those with the smallest micro-batch and all that is searched of checkpointing; None if there is none."""
    larger = replace(asked, arguments=Namespace(**{**vars(asked.arguments), "gpus": times * asked.world_size}))
    tried = larger.tried()
    tried = replace(tried, micro_batches=(min(tried.micro_batches),), checkpointing=tried.checkpointing or "full")
    tried = replace(tried, only_fitting=True)
    if times == 1:
        tried = replace(tried, ep_size=smallest.ep_size, dense_shard=smallest.dense_shard, pp_size=smallest.pp_size)
    try:
        cluster = replace(cluster, gpus_per_node=larger.gpus_per_node)
        config = larger.config(smallest.tp_size, **changes)
        measure = _measure(larger, config)
        plans = _plans(larger, config, measure, tried, cluster)
    except ExpertMeshError:
        return None
    measure.save()
    return plans[0] if plans[0].fits else None
