"""The flags of `python -m expertmesh.sharding plan`, and what they ask for. What computes a plan is not imported: that
would take `--help` longer than all else."""

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import Parser, flag_of, refuse_gone, tell_without_effect
from ...moe.util.terminal import folded
from ..config.train_config import GivenSettings, TrainConfig, given_settings, with_init_adapter
from .coverage import check_covered
from .imbalance import add_imbalance_flags, read_imbalance
from .planner.asked import MICRO_BATCHES, Tried
from .planner.hardware import MOST, add_hardware_flags, check_positive, gpus_per_node, tell_nodes

DATASET, OUTPUT_DIR = "$DATASET", "$OUTPUT_DIR"
"""Shell variables in a launch line, for what no plan depends on."""
DEFAULTS: Mapping[str, Any] = {"bf16": True, "max_seq_length": 4096, "dataset": [DATASET], "output_dir": OUTPUT_DIR}
"""What is planned where nothing was given, other than train_ep.py's own defaults."""
BATCH = {"none": 256, "lora": 64}
"""Sequences per step where none were asked for, of as many tokens as by default or fewer; by adapter."""
ALIASES = {
    "seq_length": "max_seq_length",
    "micro_batch": "per_device_train_batch_size",
    "optimizer": "optim",
    "fp32": "bf16",
}
"""Other names of train_ep.py's flags."""
GONE = {
    "--sweep": "give one number of GPUs, as in --gpus 64",
    "--plot": "draw what --json prints",
}
_EPILOG = """\
All options of train_ep.py are taken, with --config too. Those of the layout
and the batch are kept as given, and searched where they are not: --ep-size,
--dense-shard, --tp-size, --pp-size, --pipeline-chunks, --pipeline-schedule,
--gradient-checkpointing, --per-device-train-batch-size. Those that do
not affect a step are only copied to the launch line. Defaults other than
train_ep.py's: --bf16, --max-seq-length 4096, and a global batch of 256
sequences (64 with --adapter lora), fewer where they are longer.

examples:
  python -m expertmesh.sharding plan --model DIR --gpus 16 --adapter lora
  python -m expertmesh.sharding plan --config configs/mixtral_8x7b.yaml --gpus 8"""


def build_parser() -> Parser:
    """The parser of the flags that train_ep.py lacks, or that take more here."""
    parser = Parser(
        prog="python -m expertmesh.sharding plan",
        usage="%(prog)s --model DIR [options]",
        description="Memory, traffic and speed of every parallel layout, from\nconfig.json alone; needs no weights.",
        epilog=_EPILOG,
    )
    add_hardware_flags(parser)
    parser.add_argument(
        "--tp-size",
        metavar="N,N...",
        help="tensor-parallel ranks of a node: one number, several to compare, or auto (default): those of 1, 2, 4 and "
        "8 that may pay",
    )
    add_imbalance_flags(parser)
    parser.add_argument("--top", type=int, default=12, help="lines of the table")
    parser.add_argument("--verbose", action="store_true", help="show parts of memory and time, and assumptions")
    parser.add_argument("--json", action="store_true", help="print JSON, with every layout and its launch line")
    parser.add_argument("--no-cache", action="store_true", help="measure again, without the cache")
    parser.add_argument("--seq-length", metavar="N", help="another name of --max-seq-length")
    parser.add_argument("--micro-batch", metavar="N", help="another name of --per-device-train-batch-size")
    parser.add_argument("--optimizer", metavar="NAME", help="another name of --optim")
    parser.add_argument("--fp32", action="store_true", help="another name of --bf16 false")
    return parser


@dataclass(frozen=True)
class PlanFlags:
    """What is to be planned.

    Attributes:
        arguments: of the flags that train_ep.py lacks.
        given: of train_ep.py's, with --tp-size where that is one number.
        tp_sizes: that are to be tried; None: those that may pay.
    """

    arguments: Namespace
    given: GivenSettings
    tp_sizes: list[int] | None

    @property
    def world_size(self) -> int:
        return int(self.arguments.gpus)

    @property
    def gpus_per_node(self) -> int:
        """
        Raises:
            ExpertMeshError: the GPUs do not fill as large nodes as were asked for.
        """
        return gpus_per_node(self.world_size, self.arguments.gpus_per_node)

    def config(self, tp_size: int = 1, **changes: Any) -> TrainConfig:
        """The run, with what is searched at any value that goes with the rest.

        Args:
            changes: settings that are other ones than those given.

        Raises:
            ExpertMeshError: what was given does not go together, or has no forecast.
        """
        settings = {**DEFAULTS, **self.given.all, "tp_size": tp_size, **changes}
        if not settings.get("model"):
            raise ExpertMeshError("--model is missing: a directory, a config.json, or a hub id")
        if settings.get("offload_activations") or settings.get("keep_expert_products"):
            settings.setdefault("gradient_checkpointing", "selective")
        if settings.get("tf32") and "bf16" not in self.given.all:
            raise ExpertMeshError("--tf32 is for fp32 matmuls, but this plan is for bf16; add --bf16 false")
        config = TrainConfig(**with_init_adapter(settings))
        check_covered(config)
        return config if self.has_batch else replace(config, global_batch_size=self._batch(config))

    @property
    def has_batch(self) -> bool:
        """Whether the size of a step was asked for."""
        return not {"global_batch_size", "gradient_accumulation_steps"}.isdisjoint(self.given.all)

    def _batch(self, config: TrainConfig) -> int:
        """Sequences per step where nobody said: at least one per rank that reads its own, and a number that several
        sizes of micro-batches divide."""
        longer = max(1, config.max_seq_length // int(DEFAULTS["max_seq_length"]))
        target = max(1, BATCH[config.adapter] // longer)
        readers = self.world_size // (config.cp_size * config.tp_size * config.pp_size) or 1
        unit = readers * max(MICRO_BATCHES)
        while unit > target and unit > readers:
            unit //= 2
        return -(-target // unit) * unit

    def tried(self) -> Tried:
        """What the search tries."""
        given = self.given.all
        size = given.get("per_device_train_batch_size")
        # a pipeline is a choice where the batch is known, or something of it was asked for
        is_open = self.has_batch or not {"pipeline_chunks", "pipeline_schedule"}.isdisjoint(given)
        return Tried(
            MICRO_BATCHES if size is None else (size,),
            given.get("pp_size", None if is_open else 1),
            given.get("pipeline_chunks"),
            given.get("pipeline_schedule"),
            given.get("ep_size"),
            self.tp_sizes,
            given.get("dense_shard"),
            given.get("gradient_checkpointing"),
        )


def read_flags(argv: Sequence[str]) -> PlanFlags:
    """What a command line asks for; what of it has no effect is told.

    Raises:
        ExpertMeshError: a mistake in the flags.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    asked = asked_by(arguments, rest, list(parser._option_string_actions))
    tell_nodes(arguments.gpus, arguments.gpus_per_node)
    for line in asked.given.overridden:
        print(folded(f"note: {line}"), file=sys.stderr)
    if arguments.json:
        tell_without_effect(parser, arguments, "with --json, which has every layout", "top", "verbose")
    tell_without_effect(parser, arguments, "on a plan; `rehearse --packing` heeds it", "flash_attention")
    return asked


def asked_by(arguments: Namespace, rest: Sequence[str], own: Sequence[str] = ()) -> PlanFlags:
    check_positive(arguments, "gpus", most=MOST)
    check_positive(arguments, "gpus_per_node", "top")
    gpus_per_node(arguments.gpus, arguments.gpus_per_node)
    refuse_gone(rest, GONE)
    given = given_settings(rest, own)
    flags = dict(given.flags)
    for alias, name in ALIASES.items():
        value = getattr(arguments, alias)
        if value is None or value is False:
            continue
        parsed = given_settings([flag_of(name), "false" if value is True else value]).flags
        if flags.setdefault(name, parsed[name]) != parsed[name]:
            written = flag_of(alias) if value is True else f"{flag_of(alias)} {value}"
            raise ExpertMeshError(
                f"{written} and {flag_of(name)} {flags[name]} are one setting with two values; give one of them"
            )
    read_imbalance(arguments.imbalance)
    sizes = arguments.tp_size
    if sizes is None:
        sizes = str(given.file.get("tp_size", "auto"))
    if sizes == "auto":
        return PlanFlags(arguments, replace(given, flags=flags), None)
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", sizes):
        raise ExpertMeshError(f"--tp-size {sizes}: must be a number, or several as in 1,2,4")
    return PlanFlags(arguments, replace(given, flags=flags), sorted({int(size) for size in sizes.split(",")}))
