"""What a run is told: a YAML file gives defaults, flags win. Names are those of `transformers.TrainingArguments`."""

import json
import math
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import Field, asdict, dataclass, fields, replace
from datetime import date
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import yaml

from ...moe.util.atomic_write import whole
from ...moe.util.entry_checks import fits, in_words
from ...moe.util.errors import ExpertMeshError, SeveralMistakes, problems_of
from ...moe.util.parser import flag_of, unknown_name
from ...sharding.parallelize.choices import Strategy
from ...sharding.topology import Topology
from .flags import LIMITS, FlagParser, default_of, found_out, is_switch, of_class, value_type
from .moves import Moves
from .settings import (
    ENGINE,
    AdapterSettings,
    CheckpointSettings,
    DataSettings,
    DebugSettings,
    DistillationSettings,
    EvaluationSettings,
    LogSettings,
    MemorySettings,
    ModelSettings,
    MTPSettings,
    Needs,
    OptimizerSettings,
    ParallelSettings,
    Part,
    PrecisionSettings,
    PreferenceSettings,
    QuantizedBase,
    RoutingSettings,
    ScheduleSettings,
)
from .tasks import TASKS, TaskEntry


@dataclass
class TrainConfig(
    DebugSettings,
    LogSettings,
    CheckpointSettings,
    EvaluationSettings,
    AdapterSettings,
    MTPSettings,
    RoutingSettings,
    OptimizerSettings,
    ScheduleSettings,
    PrecisionSettings,
    MemorySettings,
    ParallelSettings,
    DistillationSettings,
    PreferenceSettings,
    DataSettings,
    ModelSettings,
):
    """Every setting of a run. Each is a flag (`--ep-size`, also `--ep_size`), a key of the YAML file, and an argument
    here; `train_ep.py --help` says what it does.

    Example:
        settings = expertmesh.TrainConfig(model="DIR", ep_size=1, learning_rate=1e-5)
        engine = expertmesh.load(settings)

    Raises:
        ExpertMeshError: a value is none that a setting may have, or settings do not go together.
    """

    # --help prints fields by groups, in the order that those of a dataclass have: that of the last base first

    overridden: ClassVar[Sequence[str]] = ()
    """What flags have taken the place of in the YAML file, in words, to be told."""
    asked: ClassVar[frozenset[str]] = frozenset()
    """Settings that were given as flags, at their defaults as well."""

    def __post_init__(self) -> None:
        if mistyped := [*self._mistyped()]:
            raise SeveralMistakes(mistyped)
        malformed = list(self._malformed())
        problems = [*self.out_of_range(), *malformed]
        if not malformed:
            problems += self.broken_rules()
        if not (problems or self.model):
            problems = ["--model is missing: the directory of a Hugging Face checkpoint"]
        if problems:
            raise SeveralMistakes(problems)

    def broken_rules(self) -> list[str]:
        """What does not go together, in words."""
        return [rule.words(self) for rule in RULES if rule.is_broken(self)]

    def _mistyped(self) -> Iterator[str]:
        """What is of another type than its setting, in words: flags are read as theirs, arguments are not."""
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if value is not SETTINGS[name].default and not fits(value, hint):
                yield f"{flag_of(name)}: is {value!r:.80}, not {in_words(hint)}"

    def _malformed(self) -> Iterator[str]:
        """What is wrong with single values, in words; those that are lists of names are put in order."""
        for check in (
            *(self.check_model, self.check_data, self.check_parallelism, self.check_precision, self.check_batch),
            *(self.check_optimizer, self.check_adapter, self.check_evaluation, self.check_checkpoints),
            self.check_profile,
        ):
            try:
                check()
            except ExpertMeshError as error:
                yield str(error)

    def _unmet(self) -> Iterator[tuple[Field[Any], Needs]]:
        """The settings that were asked for and have no effect beside the others, and what it would take."""
        for setting in fields(self):
            unmet = next((needs for needs in NEEDS[setting.name] if not needs.met(self)), None)
            if unmet is not None and self._asks_for(setting.name):
                yield setting, unmet

    def _asks_for(self, name: str) -> bool:
        """Whether a setting has another value than its default, or was given a value that turns something on."""
        value = getattr(self, name)
        return bool(value != DEFAULTS[name] or (name in self.asked and value))

    @property
    def without_effect(self) -> list[str]:
        """What was asked for and changes nothing beside the other settings, in words, to be told."""
        flags: dict[str, list[str]] = {}
        for setting, needs in self._unmet():
            flags.setdefault(needs.because or f"without {needs.in_words}", []).append(setting.name)
        return [*self.overridden, *(self._without_effect(names, why) for why, names in flags.items())]

    def without_effect_on(self, device_type: str) -> list[str]:
        """Likewise of what is for devices of another type alone."""
        names = [
            name
            for name, setting in SETTINGS.items()
            if setting.metadata.get("device", device_type) != device_type and self._asks_for(name)
        ]
        return [self._without_effect(names, f"on a {'GPU' if device_type == 'cuda' else 'CPU'}")] if names else []

    def _without_effect(self, names: Sequence[str], why: str) -> str:
        flags = ", ".join(as_flag(name, getattr(self, name)) for name in names)
        return f"{flags} ha{'ve' if len(names) > 1 else 's'} no effect {why}"

    def settled(self) -> "TrainConfig":
        """The same for what computes: settings of the layout that have no effect in it are at their defaults, so that
        nothing else need ask whether they have."""
        unmet = {setting.name: default_of(setting) for setting, needs in self._unmet() if needs.resets}
        return replace(self, **unmet) if unmet else self

    def on_one_rank(self) -> tuple["TrainConfig", list[str]]:
        """The same for a process alone, and the flags of the layout that it goes without, as given."""
        sizes = ("ep_size", "cp_size", "tp_size", "pp_size")
        given = [f"{flag_of(name)} {getattr(self, name)}" for name in sizes if getattr(self, name) > 1]
        alone: dict[str, Any] = dict.fromkeys((*sizes, "pipeline_chunks"), 1)
        return replace(self, **alone, async_tp=False, pipeline_layers=None, pipeline_schedule=None), given

    def out_of_range(self) -> Iterator[str]:
        for name, limits in _LIMITED.items():
            value = getattr(self, name)
            if value is None:
                continue
            # NaN is within none
            if value == math.inf or not all(LIMITS[limit][0](value, bound) for limit, bound in limits.items()):
                allowed = [LIMITS[limit][1].format(bound) for limit, bound in limits.items()]
                finite = ["finite"] if value == math.inf else []
                yield f"{flag_of(name)} {value}: must be {', and '.join(allowed + finite)}"
            elif isinstance(value, int) and value >= 2**63:
                yield f"{flag_of(name)} {value}: must be below 2^63"

    @property
    def sequences_per_row(self) -> int:
        """Sequences of --max-seq-length that one entry of a batch takes at most: two of a preference pair."""
        return self.task_entry.records.sequences

    @property
    def estimates_divergence(self) -> bool:
        """Whether the loss needs an estimate of it."""
        return self.preference_loss in self.task_entry.with_divergence

    @property
    def task_entry(self) -> TaskEntry:
        """What is said of the task."""
        return TASKS.get(self.task)

    @property
    def in_fp8(self) -> bool:
        """Whether some matmuls run in fp8."""
        return "fp8" in (self.expert_precision, self.dense_precision)

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the run's tokenizer is another than the model's."""
        return bool(self.tokenizer or self.add_tokens)

    @property
    def strategy(self) -> Strategy:
        """How a step trades memory for time."""
        return Strategy(
            self.gradient_checkpointing,
            self.keep_expert_products,
            self.offload,
            self.reshard_after_forward,
            self.overlap_chunks,
            self.offload_activations,
            self.dispatch,
            self.ranks_per_node,
            self.dispatch_sums == "float32",
            self.offload_experts,
            self.keep_expert_copies,
        )

    @property
    def holds_base_in_bf16(self) -> bool:
        """Whether weights beside adapters are: what is computed with in bf16 needs no more digits."""
        if self.adapter == "none" or self.base_dtype == "float32":
            return False
        return self.bf16 or self.base_dtype in ("bfloat16", "mxfp4")

    @property
    def quantizes_linear(self) -> bool:
        """Whether frozen linear layers are quantized."""
        return self.quantized_base not in (None, "mxfp4")

    @property
    def quantized_base(self) -> QuantizedBase | None:
        """How frozen matrices are quantized, if they are: of mxfp4 those of experts alone."""
        kinds: tuple[QuantizedBase, ...] = get_args(QuantizedBase)
        return next((kind for kind in kinds if kind == self.base_dtype), None)

    @property
    def ranks_per_sequence(self) -> int:
        """The ranks of a stage that share sequences."""
        return self.cp_size * self.tp_size

    def topology(self, world_size: int) -> Topology:
        """The parallel layout of so many ranks."""
        return Topology(world_size, self.ep_size, self.dense_shard, self.cp_size, self.pp_size, self.tp_size)

    def sequences_per_micro_batch(self, world_size: int) -> int:
        """Sequences that all ranks together take in one micro-batch."""
        return world_size // (self.ranks_per_sequence * self.pp_size) * self.per_device_train_batch_size

    def sequences_per_step(self, world_size: int) -> int:
        """The global batch, in sequences."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.sequences_per_micro_batch(world_size) * (self.gradient_accumulation_steps or 1)

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches per rank and step."""
        return math.ceil(self.sequences_per_step(world_size) / self.sequences_per_micro_batch(world_size))

    def save(self, path: Path) -> None:
        """Write what `--config` reads."""
        with whole(path) as partial:
            partial.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


SETTINGS = {setting.name: setting for setting in fields(TrainConfig)}


def _hint(setting: Field[Any]) -> Any:
    """The type of a field's values; of a choice any text, as a run of another release may have recorded others."""
    kind: Any = setting.type if is_switch(setting) else value_type(setting)
    kind = str if get_origin(kind) is Literal else kind
    return kind | None if setting.default is None else kind


_HINTS = {name: _hint(setting) for name, setting in SETTINGS.items()}
_LIMITED = {
    name: {limit: setting.metadata[limit] for limit in LIMITS if limit in setting.metadata}
    for name, setting in SETTINGS.items()
    if LIMITS.keys() & setting.metadata.keys()
}


class Rule(NamedTuple):
    """With what a setting does not go together, or what it is refused without (see `settings.Condition`).

    Attributes:
        asks: the other settings, or those of which `is_so` takes the values; None: each whether it is given.
        is_needed: whether it is refused without.
    """

    setting: str
    asks: tuple[str, ...]
    is_so: Callable[..., Any] | None
    said: str
    is_needed: bool

    @property
    def touches(self) -> set[str]:
        """All settings that decide whether it is broken."""
        return {self.setting, *self.asks}

    def is_broken(self, settings: Any) -> bool:
        if not _is_given(settings, self.setting):
            return False
        if self.is_so is not None:
            return bool(self.is_so(*(getattr(settings, name) for name in self.asks))) != self.is_needed
        if self.is_needed:
            return not any(_differs(settings, name) for name in self.asks)
        # two that ask for nothing agree
        (other,) = self.asks
        return _is_given(settings, other) and (_differs(settings, self.setting) or _differs(settings, other))

    def words(self, config: TrainConfig) -> str:
        """What is said of a configuration that breaks it."""
        records = TASKS.get(config.task).records
        given = as_flag(self.setting, getattr(config, self.setting))
        return self.said.format_map(vars(config) | {"given": given, "records": records.in_words or records.name})


def _rules(setting: Field[Any]) -> Iterator[Rule]:
    name = setting.name
    for which in ("requires", "excludes"):
        conditions, is_needed = setting.metadata.get(which, []), which == "requires"
        for asked, said in conditions if isinstance(conditions, list) else [conditions]:
            if callable(asked):
                yield Rule(name, tuple(signature(asked).parameters), asked, said, is_needed)
            elif is_needed:
                yield Rule(name, tuple(asked.split()), None, said, is_needed)
            else:
                yield from (Rule(name, (other,), None, said, is_needed) for other in asked.split())
    if said := setting.metadata.get("of_task"):
        yield Rule(name, ("task",), lambda task: TASKS.get(task).reads(name), said, True)


RULES = [rule for setting in SETTINGS.values() for rule in _rules(setting)]


def _differs(settings: Any, name: str) -> bool:
    """Whether a setting has another value than its default."""
    return bool(getattr(settings, name) != default_of(SETTINGS[name]))


def _is_given(settings: Any, name: str) -> bool:
    """Likewise, or is a flag that asks for something with its default, too."""
    return _differs(settings, name) or (name in settings.asked and "is_said_at_default" in SETTINGS[name].metadata)


PARTS: dict[str, Part] = {
    name: setting.metadata.get("of") or of_class(TrainConfig, name, "OF", ENGINE) for name, setting in SETTINGS.items()
}
NEEDS: dict[str, tuple[Needs, ...]] = {
    name: (*setting.metadata["needs"], *PARTS[name].needs) for name, setting in SETTINGS.items()
}
MOVES: dict[str, Moves] = {
    name: setting.metadata.get("moves", of_class(TrainConfig, name, "MOVES")) for name, setting in SETTINGS.items()
}


DEFAULTS = vars(TrainConfig(model="-"))
"""What settings are where nothing is given, and what follows from it."""


def read_by(reader: str) -> frozenset[str]:
    """The settings that are read by one of a `Part`'s readers."""
    found = {name: reader in part.readers for name, part in PARTS.items()}
    if reader == "plan":
        found |= {name: s.metadata["in_plans"] for name, s in SETTINGS.items() if "in_plans" in s.metadata}
    return frozenset(name for name in found if found[name])


_FROM_CONFIG = {"lora_rank": ("r", int), "lora_alpha": ("lora_alpha", float), "use_rslora": ("use_rslora", bool)}
OF_ADAPTER = (*_FROM_CONFIG, "lora_targets")
"""Settings that are the adapter's where nobody gave them."""
_LORA_A = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)*\.lora_A\.weight")
_LAYER = re.compile(r"(?:.*?\.)?([^.]+)\.(\d+)\.(.+)")
"""The last name of the list of layers, the layer's number, and the module within it."""

# more than a hundred times what all settings take
_MOST_YAML_BYTES = 2**20


_EXAMPLE = """\
example:
  torchrun --nproc-per-node 8 -m expertmesh.train_ep --dataset data.jsonl \\
      --model mistralai/Mixtral-8x7B-v0.1 --ep-size 8 --bf16 --output-dir out

You can write underscores instead of dashes. A switch also takes true or false."""


def parse_config(argv: Sequence[str] | None = None, beside: Sequence[str] = ()) -> TrainConfig:
    """The configuration from flags (default: sys.argv), and the YAML file that `--config` names.

    Args:
        beside: flags of a command that takes these as well.

    Raises:
        ExpertMeshError: an unknown flag or key (says what to give instead, if another tool has it or one of ours is
            near), or an invalid value.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    config = _config(_given_flags(make_parser(beside), arguments))
    if not config.dataset and (config.max_steps != 0 or config.ends_after_data):
        raise ExpertMeshError("--dataset is missing: files, directories or hub ids (required unless --max-steps 0)")
    return config


def make_config(settings: Mapping[str, Any]) -> TrainConfig:
    """The configuration from flags by their names, as keyword arguments have them; `config` names a YAML file.

    Raises:
        ExpertMeshError: an unknown name (as in `parse_config`), or an invalid value.
    """
    parser = make_parser()
    given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    file = None if (config := given.pop("config", None)) is None else str(config)
    flags, refused = _settings(parser, given)
    if refused:
        raise SeveralMistakes(refused)
    return _config(_given(parser, flags, file))


def make_parser(beside: Sequence[str] = ()) -> FlagParser:
    """One of one's own; what parsers have in common is made again only once something has been registered."""
    now, (of, parser) = found_out(TrainConfig), _PARSERS.get(tuple(beside), (None, None))
    if parser is None or of != now:
        parser = _made_parser(tuple(beside))
        _PARSERS[tuple(beside)] = now, parser
    own = copy(parser)
    own.passed_over = []
    return own


_PARSERS: dict[tuple[str, ...], tuple[list[Any], FlagParser]] = {}
"""By the flags beside: a parser, which takes longer to make than all else of parsing, and what was found out for it."""


def _made_parser(beside: Sequence[str]) -> FlagParser:
    parser = FlagParser(
        TrainConfig,
        beside,
        prog="python -m expertmesh.train_ep",
        usage="%(prog)s --model DIR --dataset FILE... [options]",
        description="Fine-tune a Hugging Face Mixture-of-Experts model with expert parallelism.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with defaults for all options")
    return parser


def _config(given: "GivenSettings") -> TrainConfig:
    """
    Raises:
        ExpertMeshError: a value is invalid, or settings do not go together.
    """
    problems = list(given.refused)
    try:
        # what the file says in other words may be what is missing
        config = TrainConfig(**with_init_adapter({**({"model": "-"} if problems else {}), **given.all}))
        vars(config).update(overridden=given.overridden, asked=frozenset(given.flags))
        problems += config.broken_rules()
    except ExpertMeshError as error:
        problems += problems_of(error)
    if problems:
        raise SeveralMistakes(problems)
    return config


def with_init_adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given and, of rank, alpha, scale and targets, those of the adapter that the run begins
    with, where none were given. What was given is compared with the adapter once the model is built.

    Raises:
        ExpertMeshError: --init-adapter has no files of an adapter.
    """
    settings = dict(given)
    if not given.get("init_adapter") or given.get("adapter", "none") == "none" or set(OF_ADAPTER) <= set(given):
        return settings
    directory = Path(given["init_adapter"])
    if not directory.is_dir():
        if given.get("resume"):
            return settings  # a run that is resumed reads it no more
        raise ExpertMeshError(f"--init-adapter {directory}: no such directory")
    from ...checkpoints.adapters.initial import rank_and_alpha  # needs torch, which flags do without
    from ...checkpoints.hf.headers import read_header
    from ...checkpoints.hf.json_files import read_json

    config = read_json(directory / "adapter_config.json")
    for name, (key, kind) in _FROM_CONFIG.items():
        # what is no number is refused by whoever reads the adapter
        if isinstance(value := config.get(key), int | float) and name not in given:
            settings[name] = kind(value)
    if not {"lora_rank", "lora_alpha"} <= set(given):
        with suppress(ExpertMeshError, TypeError, ValueError, ArithmeticError, LookupError):  # so is a damaged file
            rank, alpha = rank_and_alpha(directory)
            settings.update(lora_rank=given.get("lora_rank", rank), lora_alpha=given.get("lora_alpha", alpha))
    if isinstance(saved := config.get("modules_to_save"), list) and "modules_to_save" not in given:
        settings["modules_to_save"] = list(map(str, saved))
    targets = _adapter_targets(read_header(directory / "adapter_model.safetensors"), config)
    if targets and "lora_targets" not in given:
        settings["lora_targets"] = targets
    return settings


def _adapter_targets(tensors: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """What --lora-targets would name: modules by what their names have in common in all layers or, where the config may
    leave out some layers, with the numbers of theirs."""
    adapted = [named[1] for name in tensors if (named := _LORA_A.fullmatch(name))]
    linear = [path for path in adapted if "experts" not in path.split(".")]
    experts = ["experts"] if len(linear) < len(adapted) else []
    modules = config.get("target_modules") or []
    is_narrowed = any(map(config.get, ("exclude_modules", "layers_to_transform"))) or not isinstance(modules, list)
    if not is_narrowed and not any(part.isdecimal() for module in modules for part in str(module).split(".")):
        tails = {re.split(r"\.\d+\.", path)[-1] for path in linear}
        return [*experts, *(rf"\b{re.escape(tail)}$" for tail in sorted(tails))]
    numbers: dict[tuple[str, str], list[str]] = {}
    for path in linear:
        layers, number, tail = named.groups() if (named := _LAYER.fullmatch(path)) else ("", "", path)
        numbers.setdefault((layers, tail), []).append(number)
    paths = [
        rf"{re.escape(layers)}\.(?:{'|'.join(of)})\.{re.escape(tail)}" if layers else re.escape(tail)
        for (layers, tail), of in sorted(numbers.items())
    ]
    return [*experts, *(rf"\b{path}$" for path in paths)]


def parse_words(parser: FlagParser, arguments: Sequence[str]) -> dict[str, Any]:
    """What the arguments say; nothing is at its default."""
    untouched = object()
    of_all = Namespace(**{action.dest: untouched for action in parser._actions})
    parsed, unknown = parser.parse_known_args(arguments, of_all)
    if unknown:
        known = [*parser._option_string_actions, *parser.beside]
        raise ExpertMeshError(unknown_name("flag", unknown[0].partition("=")[0], known))
    return {name: value for name, value in vars(parsed).items() if value is not untouched}


@dataclass(frozen=True)
class GivenSettings:
    """Settings that were asked for, by their fields' names: those that nobody gave are not in here.

    Attributes:
        flags: given on the command line. file: in the YAML file that `config` names, if one was given.
        refused: what is wrong with keys of the file, and with values, in words.
        passed_over: what flags have taken the place of that the file says in another tool's words.
    """

    flags: dict[str, Any]
    file: dict[str, Any]
    config: str | None
    refused: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    @property
    def all(self) -> dict[str, Any]:
        """Both; flags win, also over what of the file does not go together with them."""
        return self._merged[0]

    @property
    def overridden(self) -> list[str]:
        """What of the file is left out because of flags, in words."""
        return [*self._merged[1], *self.passed_over]

    @cached_property
    def _merged(self) -> tuple[dict[str, Any], list[str]]:
        file = {name: value for name, value in self.file.items() if name not in self.flags}
        because = {name: name for name in self.flags}
        unset = {name: default_of(setting) for name, setting in SETTINGS.items()}
        lines: list[str] = []

        def give_way(name: str, flag: str) -> None:
            because[name] = flag
            value = json.dumps(file.pop(name), ensure_ascii=False)
            lines.append(f"{as_flag(flag, self.flags[flag])} overrides {name}: {value} of {self.config}")

        while True:
            asked = SimpleNamespace(**unset | file | self.flags, asked=self.flags)
            for rule in RULES if file else ():
                if not rule.is_broken(asked):
                    continue
                touched = [name for name in SETTINGS if name in rule.touches]
                flags = [because[name] for name in touched if name in because]
                yields = [
                    name
                    for name in ([rule.setting] if rule.is_needed else touched)
                    if name in file and _is_given(asked, name) and not SETTINGS[name].metadata.get("is_firm")
                ]
                if flags and len(yields) == 1:
                    break
            else:
                return file | self.flags, lines
            give_way(yields[0], flags[0])


def given_settings(arguments: Sequence[str], beside: Sequence[str] = ()) -> GivenSettings:
    """What flags, and the YAML file that `--config` names, ask for; nothing is at its default.

    Args:
        beside: flags of a command that takes these as well.

    Raises:
        ExpertMeshError: as `parse_config`, but for settings that do not go together.
    """
    given = _given_flags(make_parser(beside), arguments)
    if given.refused:
        raise SeveralMistakes(given.refused)
    return given


def _given_flags(parser: FlagParser, arguments: Sequence[str]) -> GivenSettings:
    parser.check_names(arguments)
    flags = parse_words(parser, arguments)
    return _given(parser, flags, flags.pop("config", None))


def _given(parser: FlagParser, flags: dict[str, Any], config: str | None) -> GivenSettings:
    of_flags = len(parser.passed_over)
    content = {} if config is None else read_yaml(Path(config), f"--config {config}")
    file, refused = _settings(parser, content)
    given = GivenSettings(flags, file, config)
    of_run: list[str] = []
    if not parser.beside:
        of_run += unknown_template(given.file)
        if refused or of_run:  # else no GPU is to be asked yet
            of_run += _without_tf32(given)
    if refused:
        refused += [
            f"{default.setting} is left out: {default.words(tool)}"
            for tool, default in parser.others.other_defaults(written_by_name(content), given.all)
        ]
        refused += of_run
    elif len(of_run) > 1:  # a single one is told by what needs it
        refused = of_run
    said = [f"--config {config}: {refused[0]}", *refused[1:]] if refused else []
    overridden: list[str] = []
    for place, (key, values) in enumerate(parser.passed_over):
        for name in parser.others.contradicted(key.replace("-", "_"), given.all):
            flag, value = as_flag(name, given.all[name]), " ".join(values)
            theirs = f"--{key} {value}" if place < of_flags else f"{key}: {value} of {config}"
            if name in flags and place >= of_flags:
                overridden.append(f"{flag} overrides {theirs}")
            else:
                said.append(f"{theirs} is not what {flag} says; leave one of them out")
    return replace(given, refused=tuple(said), passed_over=tuple(overridden))


def as_flag(name: str, value: Any) -> str:
    """A setting as on a command line."""
    if isinstance(value, bool):
        if not value and not DEFAULTS[name]:  # only what is on by default has a --no- form
            return f"{flag_of(name)} false"
        return flag_of(name if value else f"no_{name}")
    said = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if isinstance(value, float):
        said = said.removesuffix(".0")
    return f"{flag_of(name)} {said}"


def flags_of_config(
    config: TrainConfig, always: Sequence[str] = (), file: Mapping[str, Any] | None = None, never: Collection[str] = ()
) -> list[str]:
    """The command line that asks for this configuration: what is not as by default.

    Args:
        always: settings that are written even at their defaults, first and in this order.
        file: those that a YAML file beside these flags gives, which are written only where they are others here.
        never: settings that are left out.
    """
    file = file or {}
    if config.init_adapter:
        always = (*always, *OF_ADAPTER)
    without = {**DEFAULTS, **file}
    words: list[str] = []
    for name in dict.fromkeys([*always, *(setting.name for setting in fields(config))]):
        value = getattr(config, name)
        is_said = name in file or name not in always
        if name in never or value is None or value == [] or (is_said and value == without[name]):
            continue
        if value is True:
            words.append(flag_of(name))
        elif value is False:
            words += [flag_of(name), "false"]
        elif isinstance(value, list):
            # a single value may begin with a dash
            is_one = len(value) == 1 and str(value[0]).startswith("-")
            words += [f"{flag_of(name)}={value[0]}"] if is_one else [flag_of(name), *map(str, value)]
        else:
            words += [f"{flag_of(name)}={value}"] if str(value).startswith("-") else [flag_of(name), str(value)]
    return words


class _Scalar(str):
    """Text that YAML reads as something else, which a setting may not: `no` may be a token, and 010 a name.

    Attributes:
        value: what YAML reads.
    """

    value: Any


class _Loader(yaml.SafeLoader):
    """Keeps what is written, and refuses a key that is given twice, of which YAML takes the last."""

    def as_written(self, node: yaml.ScalarNode) -> _Scalar:
        scalar = _Scalar(node.value)
        scalar.value = node.value
        with suppress(ValueError):  # of 2026-13-01
            scalar.value = yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        return scalar

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(problem=f"{name} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


for _kind in ("bool", "int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.as_written)


def as_read(value: Any) -> Any:
    """What YAML reads, within a table."""
    if isinstance(value, dict):
        return {as_read(key): as_read(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(as_read, value))
    return value.value if isinstance(value, _Scalar) else value


def read_yaml(file: Path, named: str) -> dict[Any, Any]:
    """A file's table of settings.

    Args:
        named: what an error calls it.

    Raises:
        ExpertMeshError: it cannot be read, or has no table.
    """
    try:
        if not file.exists():
            raise ExpertMeshError(f"{named}: no such file")
        if not file.is_file() or file.stat().st_size > _MOST_YAML_BYTES:
            raise ExpertMeshError(f"{named}: must be a file of at most {_MOST_YAML_BYTES:,} bytes")
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}
    except ExpertMeshError:
        raise
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ExpertMeshError(f"{named}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"{named}: contains a {type(content).__name__}, not a table of settings")
    return content


def _settings(parser: FlagParser, content: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """A table of settings as their flags would be read; and what is wrong with the rest, in words."""
    given: dict[str, str] = {}
    settings: dict[str, Any] = {}
    refused: list[str] = []
    for key, value in content.items():
        try:
            settings |= setting_of(parser, str(key), value, given)
        except ExpertMeshError as error:
            refused += problems_of(error)
    return settings, refused


def written_by_name(content: Mapping[Any, Any]) -> dict[str, str]:
    """The keys of a table of settings, as a flag would be called, with the word that is written there, if it is one."""
    # aliases make a few lines of YAML lists of any length
    words = {key: "" if isinstance(value, list | dict) else str(value) for key, value in content.items()}
    return {str(key).replace("-", "_").lower(): word for key, word in words.items()}


def unknown_template(file: Mapping[str, Any]) -> list[str]:
    """What is wrong with the chat template that a file of settings names, in words."""
    if not file.get("chat_template"):
        return []
    from ..data.chat import read_template

    try:
        read_template(file["chat_template"])
    except ExpertMeshError as error:
        return [str(error)]
    return []


def _without_tf32(given: GivenSettings) -> list[str]:
    """What is wrong with the TF32 that a file of settings asks for, in words."""
    if given.file.get("tf32") is not True:
        return []
    from ...sharding.runtime.process import check_tf32, device_type

    try:
        check_tf32(device_type(bool(given.all.get("use_cpu"))))
    except ExpertMeshError as error:
        return [str(error)]
    return []


def setting_of(parser: FlagParser, key: str, value: Any, given: dict[str, str]) -> dict[str, Any]:
    """The setting that a key of a table names, with its value; none where it asks for nothing but what is done anyway,
    or has no value.

    Args:
        given: names of settings that were given before, each with the key; it gets this one.

    Raises:
        ExpertMeshError: the key is unknown, or given before; the value is none that the setting may have.
    """
    name = parser.names.get(key.replace("-", "_"))
    if name is None:
        instead = parser.instead_of(key, as_words(value))
        if instead == "":
            return {}
        raise ExpertMeshError(
            unknown_name("key", key, parser.names) if instead is None else f"unknown key {key}: {instead}"
        )
    if name in given:
        raise ExpertMeshError(f"{given[name]} and {key} are one setting; give one of them")
    given[name] = key
    if parser.passes_over(name, value):
        return {}
    if isinstance(value, list) and SETTINGS[name].metadata.get("tables"):
        value = [
            json.dumps(as_read(each), default=str) if isinstance(each, dict) and _is_setting(each) else each
            for each in value
        ]
    if not _is_setting(value):
        raise ExpertMeshError(f"{name} must be a string, a number, or a list or table of these")
    if isinstance(value, list) and not parser.takes_list(name):
        raise ExpertMeshError(f"{key} is a list; give one value")
    if isinstance(value, list) and None in value:
        raise ExpertMeshError(f"{key} has an empty entry (null); leave it out, or write its text in quotes")
    takes_bool = is_switch(SETTINGS[name]) or "bool" in SETTINGS[name].metadata.get("also", ())
    if not takes_bool and any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value])):
        raise ExpertMeshError(f"{key} is {value}, as a switch is; give text or a number")
    if isinstance(value, dict):
        if not any(kind.startswith("dict") for kind in SETTINGS[name].metadata.get("also", ())):
            raise ExpertMeshError(f"{key} is a table; give one value")
        value = json.dumps(as_read(value), default=str)
    texts = [str(each) for each in (value if isinstance(value, list) else [value]) if each is not None]
    if len(texts) > 1 and any(parser._parse_optional(text) is not None for text in texts):
        raise ExpertMeshError(f"{name} has an entry that begins with a dash, as flags do")
    return {name: parser.value_of(name, texts)} if texts else {}


def as_words(value: Any) -> list[str]:
    """A value as it would be on a command line; nothing for one that is not flat: of aliases there may be no end."""
    if not _is_setting(value):
        return []
    if isinstance(value, list) and value:
        return [word for item in value for word in as_words(item)]
    if isinstance(value, dict | list):
        return [json.dumps(as_read(value), default=str)]
    return ["" if value is None else str(value)]


def _is_setting(value: Any) -> bool:
    """Whether it is as flat as settings are: of a few bytes, YAML's aliases make lists of lists without end."""
    if isinstance(value, dict):
        return all(map(_is_scalar, value)) and all(map(_is_scalar_or_list, value.values()))
    return _is_scalar_or_list(value)


def _is_scalar_or_list(value: Any) -> bool:
    return all(map(_is_scalar, value)) if isinstance(value, list) else _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    return value is None or isinstance(value, int | float | date)
