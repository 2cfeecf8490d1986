"""The settings of a run, by the groups in which `--help` prints them, and what must be so within each.

A flag's name is its field's, and its group that of its class; what goes beyond a group is in
`training.config.train_config`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from ...moe.dispatch.dispatcher_entries import DISPATCHERS, dispatchers_of, help_of_dispatch
from ...moe.hf_model.rope import RopeScaling, read_rope_scaling
from ...moe.kernels.kernel_entries import BESIDE_FP8, Precision, check_kernel_name, help_of_kernels, is_beside_fp8
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of, unknown_name
from ...moe.util.sizes import parse_size
from ...sharding.parallelize.choices import Checkpointing, DispatchSums
from ...sharding.pipeline.schedule import ScheduleName, schedule_without_queue
from ...sharding.topology import DenseShard
from ..data.chat import TrainOn
from ..data.data_files import SampleBy, StoppingStrategy
from ..data.templates import BUILT_IN
from ..data.truncation import WRAPPED, Packing, Truncation
from .moves import Moves
from .optimizers import ADAMW_FUSED, OPTIMIZERS, OptimizerEntry, optimizers_in_words
from .other_tools import Others
from .tasks import SFT, TASKS, tasks_in_words

CrossEntropy = Literal["auto", "chunked", "full"]
LossAverage = Literal["token", "sample"]
PreferenceLoss = Literal["sigmoid", "ipo", "apo_zero_unpaired"]
Adapter = Literal["none", "lora"]
QuantizedBase = Literal["fp8", "nf4", "mxfp4"]
BaseDtype = Literal["auto", "float32", "bfloat16", QuantizedBase]
MergeDtype = Literal["base", "float32", "bfloat16", "float16"]
AdapterFormat = Literal["auto", "per-expert", "packed"]
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
)  # fmt: skip
"""The values of `transformers.SchedulerType`."""
OnSaveError = Literal["stop", "continue"]
ExportEncoding = Literal["plain", "source"]
BestMetric = Literal["loss", "score"]
OnNonfinite = Literal["stop", "skip"]
MOST_PROFILED = 32
"""Steps that --profile takes at most: a step of a large model is some hundred thousand events of its trace."""


def _flag(default: Any, help: str | Callable[[], str], *needs: "Needs", **metadata: Any) -> Any:
    """A setting, with all that is known of it.

    Args:
        needs: without which it has no effect, beside what its part of a run needs.
        metadata: `excludes` and `requires`, a `Condition` or a list of them: with what it does not go together, given
            with another value than its default, and without what it is refused; `of_task`, of what a task has to read
            (`TaskEntry.reads`), what is said where it does not; `of`, a `Part`; `is_firm`, of what says which kind of
            run it is: in a file, it does not give way to a flag that it excludes;
            `is_said_at_default`, of a flag that asks for something with its default, too; `device`, the only type on
            which it has an effect; `in_plans`, whether a forecast depends on it, where its part says otherwise; `also`,
            further types of a keyword argument; `moves`, see `Moves`; `is_later`, of a setting that came after files
            were kept by keys (see `start.fingerprints`): at its default it is no part of one; `tables`, of a list
            whose entries may be tables in a file: each is then one as JSON; and see `FlagParser`.
    """
    return field(default=default, metadata={"help": help, "needs": needs, **metadata})


def _list(help: str, *needs: "Needs", default: Sequence[str] = (), **metadata: Any) -> Any:
    return field(default_factory=lambda: list(default), metadata={"help": help, "needs": needs, **metadata})


def _switched(text: str, on: str, off: str) -> str:
    """What a switch's value stands for; any other is itself."""
    of_words = {**dict.fromkeys(("true", "yes", "on"), on), **dict.fromkeys(("false", "no", "off"), off)}
    return of_words.get(text.lower(), text)


def _checkpointing(text: str) -> str:
    """In transformers it is a switch: its values mean something here too."""
    return _switched(text, "full", "none")


def _resume(text: str) -> str:
    """In YAML it may be a switch too."""
    return _switched(text, "auto", "")


def _optimizer(text: str) -> str:
    """transformers has the same under several names."""
    return next((entry.name for entry in OPTIMIZERS.entries() if text.lower() in entry.aliases), text)


def _metric(text: str) -> str:
    """transformers puts what it evaluates before it."""
    return text.removeprefix("eval_")


Condition = tuple[str | Callable[..., Any], str]
"""Settings that have other values than their defaults, by their names, between spaces: each of them excludes, any is
what is required; or whether settings have some values, a function whose parameters have their names. And what is said,
and what to do instead, with {names} of settings for their values, {given} for the flag that the condition is of."""

_READ_BY_TASK = "{given}: --task {task} does not read it; leave it out"
_READ_OF_RECORDS = "{given}: is not for {records}, which --task {task} reads; leave it out"


class Needs(NamedTuple):
    """Without which a flag, given with another value than its default, has no effect; the run then says so.

    what: in words, after "has no effect without"; a function where they depend on what is registered; empty: no page
    says it of each setting. met: whether a configuration has it. resets: whether what computes sees the default
    otherwise (see `TrainConfig.settled`). because: said instead of "without ...", where that is easier to understand.
    """

    what: str | Callable[[], str]
    met: Callable[[Any], bool]
    resets: bool = False
    because: str = ""

    @property
    def in_words(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


class Part(NamedTuple):
    """A part of a run, with settings of its own.

    readers: who has it: "train_ep" alone, "load" and "Trainer", which have an engine, a "teacher", whose other settings
    are at the defaults, and a "plan" or dry run. needs: when a run has it.
    """

    readers: frozenset[str]
    needs: tuple[Needs, ...] = ()


_TRAINS = Needs(
    "",
    lambda config: config.max_steps != 0 and not config.ends_after_data,
    because="because nothing is trained (--max-steps 0, --preview or --prepare-only)",
)
_WRITES = Needs(
    "", lambda config: not config.ends_after_data, because="because nothing is written (--preview or --prepare-only)"
)
_BUILDS = Needs("", lambda config: not config.prepare_only, because="because only the data are read (--prepare-only)")
_DATA = Part(frozenset({"train_ep"}))
_LOOP = _DATA._replace(needs=(_TRAINS,))
_OUTPUT = _DATA._replace(needs=(_WRITES,))
_MODEL = Part(frozenset({"train_ep", "load", "Trainer", "plan"}))
_PROCESS = _MODEL._replace(readers=_MODEL.readers | {"teacher"})
ENGINE = _MODEL._replace(needs=(_BUILDS,))
"""That of settings for which neither they nor their class, as OF, say otherwise."""
_LAYOUT = _PROCESS._replace(needs=(_BUILDS,))
_STEPS = Part(frozenset({"train_ep", "load", "Trainer"}), (_TRAINS,))
_ARGUED = _STEPS._replace(readers=frozenset({"train_ep", "load"}))
"""What a Trainer has arguments of its own for."""
_FILES = _STEPS._replace(needs=(_WRITES,))
_EP = Needs("--ep-size 2 or more", lambda config: config.ep_size > 1, resets=True)
_TP = Needs("--tp-size 2 or more", lambda config: config.tp_size > 1)
_PP = Needs("--pp-size 2 or more", lambda config: config.pp_size > 1, resets=True)
_SELECTIVE = Needs(
    "--gradient-checkpointing selective", lambda config: config.gradient_checkpointing != "none", resets=True
)
_LORA = Needs("--adapter lora", lambda config: config.adapter != "none")
_EVALUATES = Needs("--eval-dataset, --eval-ratio or --eval-generate", lambda config: config.evaluates)
_COMPUTES_LOSSES = Needs(
    "--eval-dataset, --eval-ratio, --eval-generate, --teacher, or --task dpo or kto",
    lambda config: config.evaluates or config.teacher or config.task_entry.has_reference,
)
_STREAMS = Needs("--streaming", lambda config: config.streaming)
_GENERATES = Needs("--generate-steps", lambda config: config.generate_steps > 0)
_SCORES = Needs("--eval-generate", lambda config: bool(config.eval_generate))
_SAVES = Needs("--save-steps 1 or more", lambda config: config.save_steps > 0)
_READS_EVALUATION = Needs(
    "",
    lambda config: config.max_steps != 0 or config.ends_after_data,
    because="because nothing is trained (--max-steps 0)",
)
_EXPORTS = Needs("--export", lambda config: config.export)
_MERGES = Needs("--merge", lambda config: config.merge)
_RESUMES = Needs("--resume", lambda config: bool(config.resume))
_EXPORTS_MODEL = Needs(
    "an exported model (--export; of adapters, --merge)",
    lambda config: config.export and (config.adapter == "none" or config.merge),
)
_TEACHER = Needs("--teacher", lambda config: bool(config.teacher))
_NODES = Needs(
    lambda: (
        f"--tp-size 2 or more, or --ep-size 2 or more with --dispatch {_dispatchers_that('by_nodes', 'or', 'auto')}"
    ),
    lambda config: config.tp_size > 1 or (config.ep_size > 1 and _may_dispatch(config, "by_nodes")),
    resets=True,
)
_SUMS = Needs(
    lambda: f"--ep-size 2 or more with --dispatch {_dispatchers_that('sums', 'or', 'auto')}",
    lambda config: config.ep_size > 1 and _may_dispatch(config, "sums"),
    resets=True,
)


def _heeded_as(name: str) -> Needs:
    """An optimizer that reads this setting."""
    heeding = [entry.name for entry in OPTIMIZERS.entries() if name in entry.heeds]
    return Needs(f"--optim {' or '.join(heeding)}", lambda config: name in config.optimizer_entry.heeds)


def _heeded_by_task(name: str) -> Needs:
    """A task that reads this setting."""
    heeding = [entry.name for entry in TASKS.entries() if name in entry.heeds]
    return Needs(f"--task {' or '.join(heeding)}", lambda config: name in config.task_entry.heeds)


def _of_tasks(loss: str) -> Condition:
    """A value of --preference-loss that some tasks know."""
    knowing = [entry.name for entry in TASKS.entries() if loss in entry.losses]

    def is_of_others(preference_loss: str, task: str) -> bool:
        losses = TASKS.get(task).losses  # none: it reads no --preference-loss
        return preference_loss == loss and bool(losses) and loss not in losses

    return (
        is_of_others,
        f"--preference-loss {loss}: is a loss of --task {' or '.join(knowing)}; leave it out",
    )


def _dispatchers_that(can: str, conjunction: str, *before: str) -> str:
    """In words, the names of those whose entries say so of this."""
    *names, last = [*before, *(entry.name for entry in DISPATCHERS.entries() if getattr(entry, can))]
    return f"{', '.join(names)} {conjunction} {last}"


def _may_dispatch(config: Any, can: str) -> bool:
    """Whether `--dispatch` may come to one of these."""
    return any(getattr(entry, can) for entry in dispatchers_of(config.dispatch))


def _of_a_stream(name: str, why: str, value: str = "") -> Condition:
    return name, f"{flag_of(name)}{value}: does not work with --streaming: {why}; leave it out"


_OF_NEXT_TOKENS: dict[str, Any] = {
    "of_task": _READ_BY_TASK,
    "excludes": [
        ("teacher", "{given}: does not work with --teacher; leave out one of them"),
        ("train_mtp", "{given}: does not work with --train-mtp; leave out one of them"),
    ],
}
"""Of what needs the log-probability of each target token, and counts them by itself."""


def _evaluations_for(flag: str) -> Condition:
    needed = f"{flag}: needs evaluation data; give --eval-dataset, --eval-ratio or --eval-generate"
    return "eval_dataset eval_ratio eval_generate", needed


def _beside_mtp(name: str, why: str, value: str = "") -> Condition:
    return name, f"--train-mtp: does not work with {flag_of(name)}{value}: {why}; leave out one of them"


def _beside_images(name: str, why: str, value: str = "") -> Condition:
    return name, f"--images: does not work with {flag_of(name)}{value}: {why}; leave out one of them"


IMAGE_PARTS = ("tower", "projector")
"""Of what images pass, in the order that they pass them."""
_MAY_CHANGE = ("model", "data", "objective")


def split_names(entries: list[str]) -> list[str]:
    """Entries that commas separate; a comma within braces belongs to a regular expression, as in `{1,2}`."""
    return [part for entry in entries for part in re.split(r",(?![^{]*\})", entry) if part]


@dataclass
class ModelSettings:
    """What is trained."""

    GROUP = "Model"
    OF = _MODEL
    MOVES = Moves.MODEL
    OTHERS: ClassVar[Others] = {
        "model": "base_model model_id pretrained_model_name_or_path",
        "tokenizer": "tokenizer_name_or_path tokenizer_config",
        "add_tokens": "tokens",
    }

    model: str = _flag(
        "",
        "Directory of a Hugging Face checkpoint, or a hub id",
        aliases=["model_name_or_path"],
        scope="input",
        metavar="DIR",
    )
    tokenizer: str = _flag(
        "",
        "Directory or hub id of the tokenizer, if not the model's own",
        scope="input",
        metavar="DIR",
        moves=Moves.MODEL | Moves.SAMPLES | Moves.EXPORT,
        in_plans=False,
    )
    add_tokens: list[str] = _list(
        "Tokens to add, separated by commas or spaces, or files with one on each line; embedding and head grow if "
        "they have no rows left",
        metavar="TOKEN",
        moves=Moves.MODEL | Moves.SAMPLES | Moves.STATE | Moves.EXPORT,
    )
    resize_vocab: bool = _flag(False, "Grow embedding and head to the size of a larger --tokenizer")
    rope_scaling: str = _flag(
        "",
        "RoPE scaling for longer sequences: linear:2, dynamic:2, yarn:4, or JSON with keys of transformers' "
        "rope_parameters; exported in the config",
        also=("dict[str, Any]",),
        metavar="TYPE:X",
        moves=Moves.MODEL | Moves.STATE,
    )

    images: bool = _flag(
        False,
        "Train on the images in the data, too: load the vision tower with the model",
        of_task=_READ_OF_RECORDS,
        excludes=[
            _beside_images("teacher", "it predicts text alone"),
            _beside_images("prompt_template", "it has no place for images; a chat template has"),
            _beside_images("train_mtp", "drafts know no positions of images"),
            _beside_images("rope_scaling", "positions of images have frequencies of their own"),
            _beside_images("dense_precision", "it is for the language model alone", " {dense_precision}"),
            _beside_images("compile", "image features are added between the layers that it compiles"),
        ],
        requires=(
            lambda generate_steps, generate_prompts: not generate_steps or generate_prompts,
            "--images: samples are generated from texts alone; give --generate-prompts, or leave out --generate-steps",
        ),
        is_later=True,
        moves=Moves.MODEL | Moves.STATE,
    )

    def check_model(self) -> None:
        if self.rope_scaling:
            read_rope_scaling(self.rope_scaling)

    @property
    def rope(self) -> RopeScaling | None:
        """RoPE scaling; None: as the model has it."""
        return read_rope_scaling(self.rope_scaling) if self.rope_scaling else None


@dataclass
class DataSettings:
    """What the model is trained on, and what a batch looks like."""

    GROUP = "Data"
    MOVES = Moves.SAMPLES
    OF = _DATA
    OTHERS: ClassVar[Others] = {
        "dataset": "datasets dataset_name dataset_path data_files train_file",
        "dataset_split": "dataset_train_split",
        "dataset_num_proc": "dataset_processes preprocessing_num_workers",
        "text_column": "dataset_text_field",
        "chat_template": "chat_template_path chat_template_jinja",
        "train_on": "loss_scale roles_to_train",
        "--train-on all": "train_on_inputs train_on_prompt completion_only_loss=false assistant_only_loss=false",
        "": "chat_template=tokenizer_default train_on=default train_on=turn completion_only_loss=true "
        "assistant_only_loss=true packing_strategy=bfd packing_strategy=binpack",
        "--train-on assistant": "train_on=completion",
        "--train-on last": "train_on=last_round mask_history",
        "max_seq_length": "max_length sequence_len cutoff_len model_max_length max_seq_len seq_length seq_len",
        "truncation": "truncation_mode truncation_strategy excess_length_strategy",
        "--truncation right": "truncation=keep_start truncation=truncate",
        "--truncation left": "truncation=keep_end",
        "--truncation drop": "truncation=delete",
        "--truncation error": "truncation=raise",
        "--truncation split --packing": "packing_strategy=bfd_split",
        "--packing wrapped": "packing_strategy=wrapped",
        "packing": "sample_packing neat_packing padding_free",
        "streaming": "dataset_streaming",
        "shuffle_buffer": "buffer_size shuffle_buffer_size",
    }

    dataset: list[str] = _list(
        "JSON, JSONL, Parquet, CSV or TXT files, directories of them, or hub ids; NAME:WEIGHT mixes; in YAML also "
        "tables with path, weight, split, chat_template and system",
        scope="input",
        metavar="FILE",
        tables=True,
    )
    stopping_strategy: StoppingStrategy = _flag(
        "first_exhausted",
        "Where a mixture by weights ends: when the first data set is used up, or when all are, which repeats others",
        excludes=(
            "eval_ratio",
            "--stopping-strategy all_exhausted: repeats records, of which --eval-ratio would hold out some; give "
            "--eval-dataset",
        ),
        is_later=True,
    )
    dataset_config: str = _flag(
        "",
        "Configuration of a hub dataset, or of a directory with a dataset card",
        aliases=["dataset_config_name"],
        metavar="NAME",
    )
    dataset_split: str = _flag("train", "Split of --dataset, if it has splits", metavar="NAME")
    dataset_num_proc: int | None = _flag(
        None, "Processes that tokenize (default: by the size of the data)", scope="node", least=1, moves=Moves.SPEED
    )
    messages_column: str = _flag(
        "",
        "Column with the conversation (default: found by its name)",
        metavar="NAME",
        of_task=_READ_OF_RECORDS,
        excludes=(
            "prompt_column response_column text_column",
            "--messages-column: leave out prompt, response and text columns",
        ),
    )
    prompt_column: str = _flag("", "Column with the prompt", metavar="NAME", of_task=_READ_OF_RECORDS)
    response_column: str = _flag("", "Column with the response", metavar="NAME", of_task=_READ_OF_RECORDS)
    system_column: str = _flag("", "Column with the system prompt", metavar="NAME")
    text_column: str = _flag(
        "",
        "Column with plain text, trained on in full",
        metavar="NAME",
        of_task=_READ_OF_RECORDS,
        excludes=(
            "prompt_column response_column system_column",
            "--text-column: leave out prompt, response and system columns",
        ),
    )
    weight_column: str = _flag(
        "",
        "Column with the weight of a record's loss, 0 or more",
        metavar="NAME",
        of_task=_READ_BY_TASK,
    )
    sample_by: SampleBy = _flag("line", "Record of a .txt file; paragraphs end at blank lines")
    chat_template: str = _flag(
        "",
        f"Chat template: {', '.join(BUILT_IN)}, or a Jinja file (default: the tokenizer's)",
        scope="input",
        metavar="NAME",
        moves=Moves.SAMPLES | Moves.EXPORT,
    )
    template_date: str = _flag(
        "",
        "Date, YYYY-MM-DD, for chat templates that write today's (default: that of the run's beginning)",
        metavar="DATE",
    )
    prompt_template: str = _flag(
        "",
        "Instead of a chat template: the text before the response, containing {prompt}",
        of_task=_READ_OF_RECORDS.replace("{given}", "--prompt-template"),
        excludes=[
            ("chat_template", "--prompt-template and --chat-template: give one of them"),
            ("template_date", "--template-date: --prompt-template writes no date; leave out one of them"),
        ],
    )
    train_on: TrainOn = _flag(
        "assistant",
        "Trained tokens: all; every assistant turn; last turn; of every assistant turn all but the reasoning (final), "
        "or one part: its reasoning, text or tool calls",
        of_task=_READ_OF_RECORDS,
    )
    split_turns: bool = _flag(
        False,
        "Make a sample of each trained answer, which ends with it: keeps reasoning that templates leave out of "
        "earlier turns",
        requires=(
            lambda train_on: train_on not in ("all", "last"),
            "--split-turns: samples have one answer; give --train-on assistant, final or a part, not {train_on}",
        ),
        of_task=_READ_OF_RECORDS,
        excludes=("prompt_template", "--split-turns: --prompt-template takes single answers; leave out one of them"),
    )
    max_seq_length: int = _flag(
        1024,
        "Most tokens of a sample, see --truncation; length of packed sequences",
        least=2,
        of=_DATA._replace(readers=_DATA.readers | {"teacher"}),
        in_plans=True,
    )
    truncation: Truncation = _flag(
        "right",
        "Longer samples: cut off their right or left end, drop them, split plain text into several, or stop with an "
        "error",
        excludes=[
            (
                lambda truncation, split_turns: truncation == "split" and split_turns,
                "--truncation split: is for plain text, and --split-turns for conversations; leave out one of them",
            ),
            (
                lambda truncation, task: truncation == "split" and not TASKS.get(task).records.in_pieces,
                "--truncation split: is for plain text, which --task {task} does not train on; give another",
            ),
            (
                lambda truncation, images: truncation == "left" and images,
                "--truncation left: does not work with --images; give right, drop or error",
            ),
            (
                lambda truncation, task, preference_loss: (
                    truncation == "left" and preference_loss in TASKS.get(task).with_divergence
                ),
                "--truncation left: does not work with --task {task}, which joins a prompt and another answer; give "
                "right, drop or error",
            ),
        ],
        is_later=True,
    )
    skip_bad_records: int = _flag(
        0,
        "Leave out up to so many records that cannot be used, of each data set, instead of stopping",
        least=0,
        moves=Moves.NOTHING,
        excludes=("images", "--skip-bad-records: does not work with --images; mend the records, or leave them out"),
        is_later=True,
    )
    packing: Packing = _flag(
        False,
        "Pack several samples into one sequence, each with its own positions and attention; wrapped: plain text alone, "
        "which goes on in the next sequence where one is full",
        of=_PROCESS,
        moves=Moves.BATCHES,
        excludes=[
            (
                lambda packing, truncation: packing == WRAPPED and truncation != "right",
                "--packing wrapped: cuts texts; leave --truncation out",
            ),
            (
                lambda packing, split_turns: packing == WRAPPED and split_turns,
                "--packing wrapped: cuts plain text; leave --split-turns out",
            ),
            (
                lambda packing, task: packing == WRAPPED and not TASKS.get(task).records.in_pieces,
                "--packing wrapped: cuts plain text, which --task {task} does not train on; give --packing",
            ),
            (
                lambda packing, images: packing == WRAPPED and images,
                "--packing wrapped: cuts plain text; give --packing with --images",
            ),
            (
                lambda packing, teacher: packing == WRAPPED and teacher,
                "--packing wrapped: cuts samples; give --packing with --teacher",
            ),
            (
                lambda packing, loss_average: packing == WRAPPED and loss_average == "sample",
                "--packing wrapped: cuts samples; give --packing with --loss-average sample",
            ),
        ],
    )
    group_by_length: bool = _flag(
        False,
        "Batch samples of similar length, without --packing",
        excludes=("packing", "--packing and --group-by-length: packed sequences have one length already; choose one"),
        moves=Moves.BATCHES,
    )
    streaming: bool = _flag(
        False,
        "Read, tokenize and pack while training, without a cache; needs --max-steps",
        is_firm=True,
        requires=[
            (
                lambda max_steps: max_steps >= 0,
                "--streaming: the number of steps of an epoch is not known; give --max-steps",
            ),
            (
                lambda eval_dataset, eval_ratio, eval_steps: not (eval_dataset or eval_ratio) or eval_steps,
                "--streaming: evaluations follow no epochs; give --eval-steps",
            ),
        ],
        of_task="{given}: --task {task} needs a fixed set of data; leave it out",
        excludes=[
            _of_a_stream("teacher", "what it predicts is computed once, of a fixed set"),
            _of_a_stream("stopping_strategy", "mixes nothing, and repeats all"),
            _of_a_stream("eval_ratio", "nothing can be held out of a stream; give --eval-dataset"),
            _of_a_stream("group_by_length", "lengths are not known; give --packing"),
            _of_a_stream("prepare_only", "nothing is kept in the cache"),
            _of_a_stream("dataset_num_proc", "each rank tokenizes by itself"),
            _of_a_stream("loss_by_dataset", "its data sets are read one after the other"),
        ],
        moves=Moves.BATCHES,
    )
    shuffle_buffer: int = _flag(
        10_000,
        "Records per window in which samples are shuffled and packed",
        _STREAMS,
        least=1,
        moves=Moves.BATCHES,
    )
    preview: bool = _flag(
        False,
        "Print the first sequences as the model sees them, and what the data contain, then exit",
        moves=Moves.NOTHING,
        in_plans=True,
    )
    prepare_only: bool = _flag(
        False,
        "Tokenize the data into the cache, then exit; needs no weights and no GPU",
        excludes=("preview", "--preview and --prepare-only: give one of them; --preview fills the cache, too"),
        moves=Moves.NOTHING,
        in_plans=True,
    )

    @property
    def splits_texts(self) -> bool:
        """Whether plain text that is too long becomes several samples."""
        return self.truncation == "split" or self.packing == WRAPPED

    @property
    def ends_after_data(self) -> bool:
        """Whether a run ends once its data are read."""
        return self.preview or self.prepare_only

    def check_data(self) -> None:
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            raise ExpertMeshError(f"--prompt-template {self.prompt_template!r} must contain {{prompt}}")
        if self.template_date and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.template_date):
            raise ExpertMeshError(f"--template-date {self.template_date}: must be YYYY-MM-DD")
        try:
            date.fromisoformat(self.template_date or "2000-01-01")
        except ValueError as error:
            raise ExpertMeshError(f"--template-date {self.template_date}: {error}") from error


@dataclass
class PreferenceSettings:
    """What is learned from the data."""

    GROUP = "Preference training"
    MOVES = Moves.OBJECTIVE
    OF = _LOOP
    OTHERS: ClassVar[Others] = {
        "task": "stage rl rlhf_type",
        "preference_loss": "pref_loss loss_type dpo_loss_type",
        "--task dpo": "preference_loss=sigmoid",
        "--task dpo --preference-loss ipo": "task=ipo preference_loss=ipo",
        "--task kto": "preference_loss=kto",
        "--task kto --preference-loss apo_zero_unpaired": "preference_loss=apo_zero_unpaired",
        "--text-column text --truncation split --packing": "task=pt",
        "--teacher DIR": "task=gkd",
        "": "preference_loss=nll preference_loss=chunked_nll preference_sft_weight=0 preference_sft_weight=0.0",
        "preference_beta": "beta pref_beta rl_beta dpo_beta",
        "preference_sft_weight": "pref_ftx rpo_alpha",
        "desirable_weight": "kto_desirable_weight kto_chosen_weight",
        "undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    }

    task: str = _flag(
        SFT.name,
        tasks_in_words,
        choices=TASKS.names,
        is_firm=True,
        of=_MODEL,
        moves=Moves.SAMPLES | Moves.OBJECTIVE,
    )
    preference_loss: PreferenceLoss = _flag(
        "sigmoid",
        "sigmoid (DPO's or KTO's), ipo (DPO's alone) or apo_zero_unpaired (KTO's alone)",
        _heeded_by_task("preference_loss"),
        excludes=[_of_tasks("ipo"), _of_tasks("apo_zero_unpaired")],
        of=_DATA,
    )
    preference_beta: float = _flag(
        0.1, "Weight of the distance from the reference model", _heeded_by_task("preference_beta"), above=0
    )
    preference_sft_weight: float = _flag(
        0.0,
        "Weight of the chosen answers' mean cross-entropy, which is added",
        _heeded_by_task("preference_sft_weight"),
        least=0,
    )
    desirable_weight: float = _flag(1.0, "Weight of desirable answers", _heeded_by_task("desirable_weight"), least=0)
    undesirable_weight: float = _flag(
        1.0, "Weight of undesirable answers", _heeded_by_task("undesirable_weight"), least=0
    )


@dataclass
class DistillationSettings:
    """What is learned from a teacher."""

    GROUP = "Distillation"
    MOVES = Moves.OBJECTIVE
    OF = _LOOP
    OTHERS: ClassVar[Others] = {
        "teacher": "teacher_model teacher_model_name_or_path",
        "teacher_top_k": "gkd_logits_topk kd_online_topk",
        "teacher_weight": "kd_alpha",
    }

    teacher: str = _flag(
        "",
        "Directory or hub id of a model with the same tokenizer, whose predictions are learned",
        scope="input",
        metavar="DIR",
        is_firm=True,
        of_task=_READ_BY_TASK,
        of=ENGINE,
        moves=Moves.OBJECTIVE | Moves.TEACHER,
    )
    teacher_top_k: int = _flag(
        64,
        "Tokens per position with their own probability; the others count as one",
        _TEACHER,
        least=1,
        moves=Moves.OBJECTIVE | Moves.TEACHER,
    )
    teacher_weight: float = _flag(
        1.0,
        "Weight of the teacher's predictions, from 0 to 1; the data have the rest",
        _TEACHER,
        above=0,
        most=1,
    )


@dataclass
class ParallelSettings:
    """The parallel layout."""

    GROUP = "Parallelism"
    MOVES = Moves.SPEED
    OF = _LAYOUT
    OTHERS: ClassVar[Others] = lambda: {
        "ep_size": "expert_parallel_size expert_model_parallel_size expert_parallel_degree",
        "cp_size": "context_parallel_size sequence_parallel_size sequence_parallel_degree",
        "tp_size": "tensor_parallel_size tensor_model_parallel_size",
        "pp_size": "pipeline_parallel_size pipeline_model_parallel_size",
        "--pipeline-schedule 1f1b": "pipeline_schedule=gpipe",
        "pipeline_chunks": "virtual_pipeline_model_parallel_size",
        "dispatch": "moe_token_dispatcher_type",
        **{
            f"--dispatch {entry.name}": " ".join(f"dispatch={value}" for value in entry.elsewhere)
            for entry in DISPATCHERS.entries()
        },
    }

    ep_size: int = _flag(
        1,
        "Expert-parallel ranks: experts are sharded over them; must divide experts and ranks",
        least=1,
    )
    cp_size: int = _flag(
        1,
        "Context-parallel ranks: each sequence is split over them; must divide ranks and attention heads",
        least=1,
    )
    tp_size: int = _flag(
        1,
        "Tensor-parallel ranks of a node: heads, dense MLPs and vocabulary are sharded over them; must divide ranks "
        "and KV heads",
        least=1,
    )
    async_tp: bool = _flag(
        False,
        "Overlap exchanges of tensor parallelism with GEMMs, over NVLink",
        _TP._replace(resets=True),
    )
    loss_parallel: bool = _flag(True, "Tensor parallelism shards the vocabulary, too", _TP)
    pp_size: int = _flag(1, "Pipeline-parallel ranks: decoder layers are divided over them; must divide ranks", least=1)
    pipeline_schedule: ScheduleName | None = _flag(
        None,
        "Order of a stage's forwards and backwards (default: 1f1b; interleaved with --pipeline-chunks)",
        _PP,
        excludes=[
            (
                lambda pipeline_schedule, pipeline_chunks: pipeline_schedule == "1f1b" and (pipeline_chunks or 1) > 1,
                "--pipeline-schedule 1f1b takes one stage per rank, not --pipeline-chunks {pipeline_chunks}; use "
                "interleaved",
            ),
            (
                lambda pipeline_schedule, pipeline_chunks, pp_size: (
                    pipeline_schedule == "interleaved" and pipeline_chunks == 1 and pp_size > 1
                ),
                "--pipeline-schedule interleaved needs several stages per rank; give --pipeline-chunks 2",
            ),
        ],
    )
    pipeline_chunks: int = _flag(
        None,
        "Stages per pipeline rank; more shorten the bubble (default: 1; 2 with --pipeline-schedule interleaved)",
        _PP,
        least=1,
    )
    pipeline_layers: str | None = _flag(
        None,
        "Decoder layers of each stage, as in 10,12,12,11 (default: balanced by FLOPs)",
        metavar="N,N...",
        requires=(
            "pp_size",
            "--pipeline-layers {pipeline_layers}: --pp-size 1 has no pipeline; give --pp-size, or leave "
            "--pipeline-layers out",
        ),
    )
    dense_shard: DenseShard = _flag(
        "full", "Non-expert parameters: full FSDP, or sharded within EP and replicated over DP (hybrid)"
    )
    overlap_chunks: int = _flag(
        1, "Chunks overlapping all-to-all with expert GEMMs, at most the local experts; 1: off", _EP, least=1
    )
    dispatch: str = _flag("auto", help_of_dispatch, _EP, choices=DISPATCHERS.choices)
    dispatch_sums: DispatchSums = _flag(
        "same",
        lambda: (
            f"Dtype of the sums that --dispatch {_dispatchers_that('sums', 'and')} send back: the run's, or float32"
        ),
        _SUMS,
    )
    ranks_per_node: int | None = _flag(
        None,
        "Ranks that fast links connect (default: those of one host)",
        _NODES,
        least=1,
    )
    ddp_timeout: int = _flag(
        1800,
        "Seconds until a rank without progress, or an unfinished collective, ends the run",
        least=1,
        moves=Moves.NOTHING,
        of=_PROCESS,
        in_plans=False,
    )

    def check_parallelism(self) -> None:
        dispatchers_of(self.dispatch)
        if self.pipeline_chunks is None:
            self.pipeline_chunks = 2 if self.pipeline_schedule == "interleaved" and self.pp_size > 1 else 1
        if self.pipeline_layers is not None and not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", self.pipeline_layers):
            raise ExpertMeshError(
                f"--pipeline-layers {self.pipeline_layers}: give the number of layers of each stage, as in 10,12,12,11"
            )

    @property
    def layers_of_stages(self) -> list[int] | None:
        """Decoder layers of each stage; None where that is left open."""
        return None if self.pipeline_layers is None else [int(number) for number in self.pipeline_layers.split(",")]

    @property
    def schedule_name(self) -> ScheduleName:
        """The pipeline's schedule."""
        return self.pipeline_schedule or schedule_without_queue(self.pipeline_chunks)


@dataclass
class MemorySettings:
    """What is kept, freed, recomputed and offloaded."""

    GROUP = "Memory"
    MOVES = Moves.SPEED
    OTHERS: ClassVar[Others] = {
        "gradient_checkpointing": "activation_checkpointing recompute_granularity",
        "--offload": "optimizer_cpu_offload",
        "--gradient-checkpointing none": "disable_gradient_checkpointing",
        "--gradient-checkpointing full": "disable_gradient_checkpointing=false",
        "--gradient-checkpointing full --offload-activations": "gradient_checkpointing=unsloth "
        "gradient_checkpointing=offload* activation_offloading activation_cpu_offload",
    }

    gradient_checkpointing: Checkpointing = _flag(
        "none",
        "Recompute each layer in backward: completely (full, or no value), or except routing, all-to-alls and "
        "attention (selective)",
        also=("bool",),
        type=_checkpointing,
        choices=get_args(Checkpointing),
        nargs="?",
        const="full",
    )
    keep_expert_products: int = _flag(
        0,
        "Layers whose first expert GEMMs' outputs selective checkpointing keeps",
        _SELECTIVE,
        least=0,
        requires=(
            lambda gradient_checkpointing: gradient_checkpointing != "full",
            "--keep-expert-products {keep_expert_products}: --gradient-checkpointing full stores no outputs; give "
            "--gradient-checkpointing selective",
        ),
    )
    offload_activations: bool = _flag(
        False,
        "Offload layer inputs to host memory until backward; needs --gradient-checkpointing",
        device="cuda",
        requires=(
            "gradient_checkpointing",
            "--offload-activations: needs checkpointing, or a layer stores far more than its input; add "
            "--gradient-checkpointing full or selective",
        ),
    )
    offload: bool = _flag(
        False, "Keep parameters, gradients and optimizer state in host memory; compute on the GPU", device="cuda"
    )
    offload_experts: bool = _flag(
        False,
        "Keep frozen experts in host memory; copy each layer's to the GPU ahead of its use",
        device="cuda",
        requires=(
            "adapter freeze",
            "--offload-experts: keeps frozen experts in host memory, and this run trains them; give --adapter lora "
            "or --freeze experts, or --offload for what is trained, too",
        ),
        excludes=[
            ("offload", "--offload-experts: --offload keeps all parameters in host memory; leave out one"),
            (
                "reshard_after_forward",
                "--offload-experts: --no-reshard-after-forward would keep all layers' experts on the GPU; leave out "
                "one",
            ),
        ],
    )
    reshard_after_forward: bool = _flag(
        True, "Free a layer's gathered parameters after its forward; off: after its backward", of=_LAYOUT
    )
    keep_expert_copies: bool = _flag(
        False,
        "Round experts' weights to the compute dtype once per step; off: in each forward and recomputation",
    )
    force: bool = _flag(
        False, "Start even if the model does not fit by the memory forecast", of=_OUTPUT, moves=Moves.NOTHING
    )


@dataclass
class PrecisionSettings:
    """What computes, and in which dtype."""

    GROUP = "Precision and kernels"
    MOVES = Moves.SPEED
    OF = _LAYOUT
    OTHERS: ClassVar[Others] = {
        "bf16": "torch_dtype dtype mixed_precision bfloat16",
        "--bf16": "bf16=auto bf16=bf16 bf16=bfloat16",
        "": "bf16=float32 bf16=fp32 bf16=no",
        "--tf32": "tf32=auto",
        "--bf16 --expert-precision fp8 --dense-precision fp8": "fp8",
        "attn_implementation": "attn_impl flash_attn",
        "--attn-implementation flash_attention_2": "attn_implementation=fa2 attn_implementation=flash_attn",
        "--attn-implementation eager": "attn_implementation=disabled",
    }

    bf16: bool = _flag(
        False, "Compute in bfloat16; parameters, gradients and optimizer state stay fp32", moves=Moves.PRECISION
    )
    tf32: bool = _flag(
        False,
        "Compute fp32 matmuls in TF32 (Ampere and later): faster, 10-bit mantissa",
        moves=Moves.PRECISION,
        of=_PROCESS,
    )
    expert_precision: Precision = _flag(
        "same",
        "Expert GEMMs: in the run's dtype, or in fp8 (H100, H200; emulated on CPUs)",
        requires=("bf16", "--expert-precision fp8 needs bf16 for everything else; add --bf16"),
        excludes=[
            (lambda expert_kernel: not is_beside_fp8(expert_kernel), BESIDE_FP8),
            (
                lambda base_dtype: base_dtype in get_args(QuantizedBase),
                "--expert-precision fp8 would round weights twice, after --base-dtype {base_dtype}; leave out one of "
                "them",
            ),
        ],
        of=ENGINE,
        moves=Moves.PRECISION,
    )
    dense_precision: Precision = _flag(
        "same",
        "GEMMs of attention projections, dense MLPs and shared experts: in the run's dtype, or in fp8 (compute "
        "capability 9 and above; emulated on CPUs)",
        requires=("bf16", "--dense-precision fp8 needs bf16 for everything else; add --bf16"),
        excludes=[
            ("compile", "--dense-precision fp8: does not work with --compile; leave out one of them"),
            (
                lambda base_dtype: base_dtype in get_args(QuantizedBase) and base_dtype != "mxfp4",
                "--dense-precision fp8 would round weights twice, after --base-dtype {base_dtype}; leave out one of "
                "them",
            ),
            (
                "async_tp",
                "--dense-precision fp8: does not work with --async-tp, which overlaps only bf16 GEMMs; leave out one "
                "of them",
            ),
        ],
        of=ENGINE,
        moves=Moves.PRECISION,
    )
    expert_kernel: str = _flag("auto", help_of_kernels, metavar="NAME")
    attn_implementation: str = _flag(
        "auto",
        "Attention of the Hugging Face model. auto: sdpa; expertmesh's own where sdpa would need a full mask or lacks"
        " sinks; else eager",
        metavar="NAME",
    )
    cross_entropy: CrossEntropy = _flag(
        "auto",
        "Compute logits of part of the sequence at a time (chunked), or of all of it (full). auto: chunked",
        of=ENGINE,
    )
    compile: bool = _flag(False, "Compile attention and norms with torch.compile", aliases=["torch_compile"], of=ENGINE)
    use_cpu: bool = _flag(False, "Stay on the CPU even if there is a GPU", of=_PROCESS)

    def check_precision(self) -> None:
        check_kernel_name(self.expert_kernel)


@dataclass
class ScheduleSettings:
    """How much data makes a step, how many steps there are, and the learning rate over them."""

    GROUP = "Batch and schedule"
    MOVES = Moves.UPDATES
    OF = _ARGUED
    OTHERS: ClassVar[Others] = {
        "per_device_train_batch_size": "micro_batch_size train_micro_batch_size_per_gpu",
        "global_batch_size": "batch_size train_batch_size",
        "num_train_epochs": "num_epochs max_epochs epochs",
        "max_steps": "max_train_steps train_iters",
        "lr_scheduler_type": "lr_scheduler lr_decay_style",
        "warmup_steps": "num_warmup_steps lr_warmup_iters",
        "warmup_ratio": "lr_warmup_fraction",
        "seed": "data_seed",
    }

    per_device_train_batch_size: int = _flag(
        8, "Sequences per micro-batch, per rank (or CP group)", least=1, of=_DATA, moves=Moves.BATCHES, in_plans=True
    )
    gradient_accumulation_steps: int | None = _flag(
        None,
        "Micro-batches per optimizer step (default: 1, or what --global-batch-size takes)",
        least=1,
        of=_DATA,
        moves=Moves.BATCHES,
        in_plans=True,
    )
    global_batch_size: int | None = _flag(
        None,
        "Sequences per optimizer step; sets accumulation",
        least=1,
        excludes=(
            "gradient_accumulation_steps",
            "--global-batch-size and --gradient-accumulation-steps: give one of them",
        ),
        of=_DATA,
        moves=Moves.BATCHES,
        in_plans=True,
    )
    loss_average: LossAverage = _flag(
        "token",
        "What the loss is a mean of: target tokens, or samples' own means",
        **_OF_NEXT_TOKENS,
        of=_LOOP,
        moves=Moves.OBJECTIVE,
    )
    loss_by_dataset: bool = _flag(
        False,
        "Also log the loss of each data set",
        **_OF_NEXT_TOKENS,
        of=_LOOP,
        moves=Moves.SPEED,
    )
    num_train_epochs: float = _flag(
        1.0,
        "Passes over the data",
        Needs(
            "--max-steps -1",
            lambda config: config.max_steps < 0,
            because="because --max-steps sets the number of steps",
        ),
        least=0,
        of=_DATA,
    )
    max_steps: int = _flag(
        -1,
        "Optimizer steps; -1: use epochs; 0: only load and export",
        least=-1,
        in_plans=False,
        of=ENGINE._replace(readers=ENGINE.readers - {"Trainer"}),
    )
    lr_scheduler_type: str = _flag("linear", f"Learning rate schedule: {', '.join(SCHEDULES)}", metavar="NAME")
    lr_scheduler_kwargs: str = _flag(
        "", """Arguments of the schedule: '{"min_lr": 1e-6}'""", also=("dict[str, Any]",), metavar="JSON"
    )
    warmup_steps: float = _flag(
        0, "Warm-up steps; below 1: fraction of all steps", metavar="N", least=0, is_said_at_default=True
    )
    warmup_ratio: float = _flag(
        0.0,
        "Warm-up as a fraction of all steps",
        least=0,
        most=1,
        is_said_at_default=True,
        excludes=(
            "warmup_steps",
            "--warmup-ratio {warmup_ratio} and --warmup-steps {warmup_steps:g} are both given; leave one out",
        ),
    )
    seed: int = _flag(
        42,
        "Seed of data order, held-out samples, new weights, dropout and jitter",
        least=0,
        below=2**62,
        moves=Moves.MODEL | Moves.SAMPLES | Moves.BATCHES | Moves.UPDATES,
        of=_MODEL,
        in_plans=False,
    )

    def check_batch(self) -> None:
        if self.lr_scheduler_type not in SCHEDULES:
            raise ExpertMeshError(
                "--lr-scheduler-type: " + unknown_name("schedule", self.lr_scheduler_type, list(SCHEDULES))
            )


_OF_STATE: dict[str, Any] = {"moves": Moves.UPDATES | Moves.STATE, "of": _STEPS}


@dataclass
class OptimizerSettings:
    """What is made of gradients."""

    GROUP = "Optimizer"
    MOVES = Moves.UPDATES
    OF = _ARGUED
    OTHERS: ClassVar[Others] = lambda: {
        "optim": "optimizer",
        **{flags: names for entry in OPTIMIZERS.entries() for flags, names in entry.others.items()},
        "learning_rate": "lr",
        "max_grad_norm": "gradient_clipping clip_grad",
    }

    optim: str = _flag(
        ADAMW_FUSED.name,
        optimizers_in_words,
        type=_optimizer,
        choices=OPTIMIZERS.names,
        excludes=(
            lambda adapter, optim: adapter != "none" and OPTIMIZERS.get(optim).takes_matrices,
            "--optim {optim}: works on weight matrices, not on LoRA factors; choose another one for --adapter lora",
        ),
        of=ENGINE,
        moves=Moves.UPDATES | Moves.STATE | Moves.PRECISION,
    )
    learning_rate: float = _flag(5e-5, "Peak learning rate", least=0)
    weight_decay: float = _flag(0.0, "Weight decay; norms and biases are exempt", _heeded_as("weight_decay"), least=0)
    adam_beta1: float = _flag(0.9, "AdamW's beta1", _heeded_as("adam_beta1"), least=0, below=1)
    adam_beta2: float = _flag(0.999, "AdamW's beta2", _heeded_as("adam_beta2"), least=0, below=1)
    # at 0, an element whose gradient is 0 becomes NaN
    adam_epsilon: float = _flag(1e-8, "AdamW's epsilon", _heeded_as("adam_epsilon"), above=0)
    shampoo_frequency: int = _flag(
        10,
        "Steps between two preconditioners",
        _heeded_as("shampoo_frequency"),
        least=1,
        in_plans=True,
        **_OF_STATE,
    )
    shampoo_start: int | None = _flag(
        None,
        "First step with a preconditioner; AdamW's updates before it (default: the frequency)",
        _heeded_as("shampoo_start"),
        least=1,
        **_OF_STATE,
    )
    shampoo_block_size: int = _flag(
        1024,
        "Size of the blocks into which matrices are cut",
        _heeded_as("shampoo_block_size"),
        least=2,
        in_plans=True,
        **_OF_STATE,
    )
    max_grad_norm: float = _flag(1.0, "Clip the global gradient norm to this; 0: no clipping", least=0, in_plans=True)

    @property
    def optimizer_entry(self) -> OptimizerEntry:
        """What is known of the optimizer."""
        return OPTIMIZERS.get(self.optim)

    def check_optimizer(self) -> None:
        OPTIMIZERS.get(self.optim)


@dataclass
class RoutingSettings:
    """How the experts' load is kept even, and when it is warned of."""

    GROUP = "MoE routing"
    MOVES = Moves.OBJECTIVE
    OTHERS: ClassVar[Others] = {
        "router_aux_loss_coef": "moe_aux_loss_coef moe_aux_loss_coeff aux_loss_coef",
        "router_z_loss_coef": "moe_z_loss_coeff",
        "router_bias_update_rate": "moe_router_bias_update_rate",
    }

    router_aux_loss_coef: float | None = _flag(
        None,
        "Weight of the load-balancing loss (default: the model config's if it sets output_router_logits, else 0)",
        least=0,
    )
    router_aux_loss_per_layer: bool = _flag(
        False,
        "Balance each layer separately; off, as in transformers: the sum over layers",
        Needs("--router-aux-loss-coef above 0", lambda config: config.router_aux_loss_coef != 0),
    )
    router_z_loss_coef: float = _flag(0.0, "Weight of the router z-loss", least=0)
    router_bias_update_rate: float = _flag(
        0.0,
        "Auxiliary-loss-free balancing: change per step of the routers' correction biases, in families that have them",
        least=0,
        excludes=(
            "adapter",
            "--router-bias-update-rate {router_bias_update_rate:g}: adapters have no router bias; leave it out "
            "with --adapter lora",
        ),
        moves=Moves.UPDATES,
    )
    router_warn_steps: int = _flag(
        100,
        "Warn of experts that get no tokens, or most tokens, within N steps; 0: never",
        least=0,
        of=_LOOP,
        moves=Moves.NOTHING,
    )
    router_warn_load: float | None = _flag(
        None,
        "Warn when the busiest expert exceeds X times the mean load (default: halfway from 1 to experts / experts per"
        " token)",
        Needs("--router-warn-steps 1 or more", lambda config: config.router_warn_steps > 0),
        least=1,
        of=_LOOP,
        moves=Moves.NOTHING,
    )


MTP_WEIGHT = 0.1
"""Of the loss of multi-token prediction: that of the later part of DeepSeek-V3's training (arXiv 2412.19437, 4.2), and
Megatron-LM's default."""


def _mtp_weight(text: str) -> float:
    """In YAML it may be a switch too."""
    return float(_switched(text, str(MTP_WEIGHT), "0"))


@dataclass
class MTPSettings:
    """Layers for multi-token prediction, which draft tokens for speculative decoding."""

    GROUP = "Multi-token prediction"
    MOVES = Moves.OBJECTIVE
    OTHERS: ClassVar[Others] = {
        "train_mtp": "mtp_loss_scaling_factor",
        # Megatron's own weight, of any number of layers
        "--train-mtp 0.1": "mtp_num_layers mtp_num_layers=[2-9]",
        "": "train_mtp=0 train_mtp=0.0 mtp_num_layers=0.0",
    }

    train_mtp: float = _flag(
        0.0,
        f"Also train the layer for multi-token prediction, with this weight of its loss ({MTP_WEIGHT} if not given)",
        type=_mtp_weight,
        nargs="?",
        const=MTP_WEIGHT,
        also=("bool",),
        metavar="WEIGHT",
        least=0,
        is_firm=True,
        of_task=_READ_BY_TASK,
        excludes=[
            _beside_mtp("adapter", "PEFT has no module for an adapter of the layer", " lora"),
            _beside_mtp("teacher", "a student's loss is of its own kind"),
            _beside_mtp("compile", "the layer is not among what is compiled"),
        ],
        moves=Moves.OBJECTIVE | Moves.STATE,
    )
    mtp_detach: bool = _flag(
        True,
        "The loss of --train-mtp trains its layer alone; off: the whole model",
        Needs("--train-mtp", lambda config: config.train_mtp > 0),
        of=_STEPS,
        in_plans=True,
    )


@dataclass
class AdapterSettings:
    """What of the model is trained, and what the rest is held in."""

    GROUP = "LoRA and freezing"
    MOVES = Moves.STATE
    OTHERS: ClassVar[Others] = {
        "adapter": "finetuning_type tuner_type train_type peft_type",
        "--adapter lora": "use_peft use_lora",
        "--adapter lora --base-dtype nf4": "adapter=qlora load_in_4bit base_dtype=4 base_dtype=4bit base_dtype=int4",
        "--adapter lora --base-dtype fp8": "load_in_8bit base_dtype=8 base_dtype=8bit base_dtype=int8",
        "--freeze NAME": "adapter=freeze",
        "--images --train-vision tower": "freeze_vit=false freeze_vision_tower=false",
        "--images --train-vision projector": "freeze_aligner=false freeze_multi_modal_projector=false",
        "": "adapter=full",
        "lora_targets": "lora_target lora_target_modules lora_target_parameters target_modules target_parameters",
        "--lora-targets all-linear": "lora_targets=all lora_targets=all?linear lora_target_linear",
        "use_rslora": "peft_use_rslora",
        "modules_to_save": "lora_modules_to_save additional_target",
        "base_dtype": "quantization_bit quant_bits",
        "--base-dtype bfloat16": "base_dtype=bf16",
        "--base-dtype float32": "base_dtype=fp32",
        "init_adapter": "adapter_name_or_path lora_model_dir adapters",
        "merge": "merge_lora",
        "freeze": "freeze_parameters",
    }

    adapter: Adapter = _flag(
        "none", "lora: train low-rank adapters and freeze the weights", is_firm=True, moves=Moves.MODEL | Moves.STATE
    )
    lora_rank: int = _flag(
        16, "LoRA rank r", _LORA, aliases=["lora_r"], least=1, most=2**16, moves=Moves.MODEL | Moves.STATE
    )
    lora_alpha: float = _flag(
        32.0, "LoRA deltas are scaled by alpha / r", _LORA, above=0, moves=Moves.MODEL | Moves.STATE
    )
    lora_dropout: float = _flag(
        0.0, "Dropout on LoRA inputs", _LORA, least=0, below=1, of=_STEPS, moves=Moves.UPDATES, in_plans=True
    )
    lora_targets: list[str] = _list(
        "What gets adapters: attention, experts, router, shared-experts, dense-mlp, vision (with --images), all-linear "
        "(all of these), servable (what vLLM and SGLang load rightly), or regular expressions for linear layers; "
        "separated by commas or spaces",
        _LORA,
        default=("attention", "experts"),
        metavar="NAME",
    )
    use_rslora: bool = _flag(False, "Scale LoRA deltas by alpha / sqrt(r)", _LORA, moves=Moves.MODEL | Moves.STATE)
    modules_to_save: list[str] = _list(
        "Modules trained whole, with the adapters: embed_tokens, lm_head, norms, router, or regular expressions; "
        "separated by commas or spaces",
        _LORA,
        metavar="NAME",
    )
    train_new_tokens: bool = _flag(
        False,
        "Train the rows of new tokens (--add-tokens, --resize-vocab), with the adapters",
        _LORA,
        requires=(
            "add_tokens resize_vocab",
            "--train-new-tokens: there are none; give --add-tokens or --resize-vocab",
        ),
    )
    base_dtype: BaseDtype = _flag(
        "auto",
        "Dtype of frozen weights; nf4, fp8: QLoRA; mxfp4: experts as in the checkpoint, the rest in bf16. auto: bf16 "
        "with --bf16, else fp32",
        _LORA,
        requires=(
            lambda adapter, base_dtype: adapter != "none" or base_dtype == "float32",
            "--base-dtype {base_dtype}: needs frozen weights; give --adapter lora",
        ),
        moves=Moves.MODEL | Moves.STATE,
    )
    init_adapter: str = _flag(
        "",
        "Start from an adapter of PEFT or of an earlier run, with its rank, alpha and targets",
        scope="input",
        metavar="DIR",
        requires=("adapter", "--init-adapter needs --adapter lora"),
        moves=Moves.MODEL,
        in_plans=False,
    )
    adapter_format: AdapterFormat = _flag(
        "auto",
        "Exported adapters of experts: per expert, or PEFT's packed form. auto: as the checkpoint stores its experts",
        _LORA,
        _EXPORTS,
        of=_FILES,
        moves=Moves.EXPORT,
    )
    merge: bool = _flag(
        False,
        "Also export the model with the adapter merged",
        _LORA,
        _EXPORTS,
        of=_OUTPUT,
        moves=Moves.NOTHING,
    )
    merge_dtype: MergeDtype = _flag(
        "base",
        "Dtype of the merged model; base: as in --model. float32 keeps small LoRA deltas, which bfloat16 rounds away",
        _MERGES,
        _EXPORTS,
        of=_FILES,
        moves=Moves.EXPORT,
        excludes=(
            "export_encoding",
            "--merge-dtype: --export-encoding source quantizes as --model is quantized; leave out one of the two",
        ),
    )
    freeze: list[str] = _list(
        "What is not trained: experts, router, shared-experts, attention, embeddings, norms, or regular expressions "
        "for parameters; separated by commas or spaces",
        metavar="NAME",
        excludes=("adapter", "--adapter lora freezes everything but the adapters; leave out --freeze"),
    )
    train_vision: list[str] = _list(
        "What is trained of the parts that --images pass: tower, projector; separated by commas or spaces (default: "
        "nothing)",
        metavar="PART",
        requires=("images", "--train-vision: there is no vision tower without --images; add it"),
        excludes=("adapter", "--adapter lora freezes everything but the adapters; leave out --train-vision"),
    )

    def check_adapter(self) -> None:
        self.train_vision = split_names(self.train_vision)
        if unknown := [part for part in self.train_vision if part not in IMAGE_PARTS]:
            raise ExpertMeshError(f"--train-vision {unknown[0]}: give {' or '.join(IMAGE_PARTS)}, or both")
        self.lora_targets = split_names(self.lora_targets)
        self.modules_to_save = split_names(self.modules_to_save)
        if self.freeze and not split_names(self.freeze):
            raise ExpertMeshError("--freeze has no names; leave it out to train everything")
        self.freeze = split_names(self.freeze)
        if not self.lora_targets:
            raise ExpertMeshError("--lora-targets has no names; give at least one, such as attention")


@dataclass
class EvaluationSettings:
    """Losses and sample generations in between steps."""

    GROUP = "Evaluation"
    MOVES = Moves.UPDATES
    OF = _LOOP
    OTHERS: ClassVar[Others] = {
        "eval_dataset": "test_datasets val_dataset",
        "eval_dataset_split": "dataset_test_split",
        "eval_ratio": "val_set_size val_size split_dataset_ratio",
        "": "eval_ratio=0 eval_ratio=0.0",
        "per_device_eval_batch_size": "eval_batch_size",
        "generate_max_new_tokens": "max_new_tokens",
    }

    eval_dataset: list[str] = _list(
        "Data to evaluate on, named as in --dataset",
        _READS_EVALUATION,
        scope="input",
        metavar="FILE",
        tables=True,
        of=_DATA,
        moves=Moves.SAMPLES,
    )
    eval_dataset_split: str = _flag(
        "test",
        "Split of --eval-dataset and --eval-generate",
        Needs("--eval-dataset or --eval-generate", lambda config: config.eval_dataset or config.eval_generate),
        _READS_EVALUATION,
        metavar="NAME",
        of=_DATA,
        moves=Moves.SAMPLES,
    )
    eval_ratio: float = _flag(
        0.0,
        "Fraction of --dataset held out for evaluation",
        _READS_EVALUATION,
        least=0,
        below=1,
        excludes=("eval_dataset", "--eval-dataset and --eval-ratio: give one of them"),
        of=_DATA,
        moves=Moves.SAMPLES,
    )
    eval_steps: int = _flag(0, "Evaluate every N steps, and at the end; 0: after every epoch", _EVALUATES, least=0)
    eval_on_start: bool = _flag(
        False,
        "Also evaluate before the first step, and generate with --generate-steps",
        _EVALUATES,
        moves=Moves.NOTHING,
    )
    per_device_eval_batch_size: int = _flag(
        8,
        "Sequences per micro-batch of an evaluation, per rank (or CP group)",
        _COMPUTES_LOSSES,
        least=1,
        moves=Moves.SPEED,
    )
    early_stopping_patience: int = _flag(
        0,
        "Stop after N evaluations without a better loss, or score; 0: never",
        least=0,
        requires=_evaluations_for("--early-stopping-patience"),
    )
    early_stopping_threshold: float = _flag(
        0.0,
        "Decrease of the loss, or increase of the score, that counts as better",
        Needs("--early-stopping-patience", lambda config: config.early_stopping_patience > 0),
        least=0,
    )
    load_best_model_at_end: bool = _flag(
        False,
        "Export the weights of the best evaluation, not the last",
        _EXPORTS,
        requires=[
            _evaluations_for("--load-best-model-at-end"),
            (
                lambda save_steps: save_steps > 0,
                "--load-best-model-at-end: needs checkpoints, which --save-steps 0 does not save",
            ),
        ],
        moves=Moves.EXPORT,
    )
    metric_for_best_model: BestMetric = _flag(
        "loss",
        "What decides which evaluation is the best: loss, or the score of --eval-generate (without evaluation data, "
        "always the score)",
        type=_metric,
        choices=get_args(BestMetric),
        requires=("eval_generate", "--metric-for-best-model score: there is none; give --eval-generate"),
    )
    eval_generate: list[str] = _list(
        "Prompts with their answers, in the forms of --dataset: at each evaluation the model answers, and is scored",
        _READS_EVALUATION,
        scope="input",
        metavar="FILE",
        of=_DATA,
    )
    eval_score: str = _flag(
        "exact",
        "Score of an answer: exact (the expected one), calls (its tool calls, as JSON), or a function, module:name",
        _SCORES,
        metavar="NAME",
    )
    eval_extract: str = _flag(
        "",
        "Compare only what this regular expression finds last in both, such as '#### (-?\\d+)': its group, or all",
        _SCORES,
        metavar="REGEX",
        excludes=("eval_score", "--eval-extract and --eval-score {eval_score}: give one of them"),
    )
    eval_temperature: float = _flag(0.0, "Temperature at which the answers are sampled; 0: greedy", _SCORES, least=0)
    generate_steps: int = _flag(
        0, "Generate samples for a few prompts every N steps; 0: never", least=0, moves=Moves.NOTHING
    )
    generate_prompts: list[str] = _list(
        "Their prompts (default: from the evaluation data, else the training data)",
        _GENERATES,
        moves=Moves.NOTHING,
    )
    generate_max_new_tokens: int = _flag(
        64,
        "Longest sample generation, and answer of --eval-generate, in tokens",
        Needs("--generate-steps or --eval-generate", lambda config: config.generate_steps > 0 or config.eval_generate),
        least=1,
    )

    def check_evaluation(self) -> None:
        if self.eval_score not in ("exact", "calls") and not re.fullmatch(r"[\w.]+:\w+", self.eval_score):
            raise ExpertMeshError(f"--eval-score {self.eval_score}: give exact, calls, or a function, as module:name")
        try:
            re.compile(self.eval_extract)
        except re.error as error:
            raise ExpertMeshError(f"--eval-extract {self.eval_extract!r}: is no regular expression: {error}") from error

    @property
    def has_evaluation_data(self) -> bool:
        """Whether losses are evaluated."""
        return bool(self.eval_dataset) or self.eval_ratio > 0

    @property
    def evaluates(self) -> bool:
        return self.has_evaluation_data or bool(self.eval_generate)

    @property
    def best_by_score(self) -> bool:
        """Whether the best evaluation is that of the highest score, not of the lowest loss."""
        asked = self.metric_for_best_model == "score"
        return asked or (bool(self.eval_generate) and not self.has_evaluation_data)


@dataclass
class CheckpointSettings:
    """What is written, and what is resumed."""

    GROUP = "Checkpoints and export"
    MOVES = Moves.NOTHING
    OTHERS: ClassVar[Others] = {"output_dir": "export_dir", "--resume auto": "auto_resume_from_checkpoints"}

    output_dir: str = _flag(
        "output",
        "Directory for logs, report, checkpoints and the exported model",
        scope="output",
        metavar="DIR",
        of=_FILES._replace(readers=_FILES.readers - {"Trainer"}),
    )
    overwrite_output_dir: bool = _flag(False, "Replace the results of an earlier run in --output-dir", of=_OUTPUT)
    save_steps: int = _flag(500, "Save a training checkpoint every N steps; 0: never", least=0, of=_LOOP)
    save_total_limit: int | None = _flag(
        None, "Training checkpoints to keep (default: all)", _SAVES, least=1, of=_ARGUED
    )
    async_save: bool = _flag(
        True,
        "Train on while a checkpoint is written, from a copy in host memory",
        _SAVES,
        of=_LOOP,
        moves=Moves.SPEED,
    )
    on_save_error: OnSaveError = _flag("stop", "If saving fails: stop or continue", _SAVES, of=_LOOP)
    resume: str = _flag(
        "",
        "Resume from a training checkpoint, the newest of a directory, or auto: the newest of --output-dir, if it has"
        " any",
        aliases=["resume_from_checkpoint"],
        type=_resume,
        scope="input",
        also=("bool",),
        metavar="DIR",
    )
    allow_changed: list[str] = _list(
        "Resume although this has changed: model, data, objective",
        _RESUMES,
        metavar="NAME",
        in_plans=False,
    )
    elastic: bool = _flag(
        False,
        "Resume on any number of ranks: take the largest --ep-size that they allow, and keep the global batch size",
        requires=("resume", "--elastic needs --resume; give --resume auto"),
    )
    export: bool = _flag(True, "Write the model to OUTPUT_DIR/hf at the end", of=_OUTPUT)
    max_shard_size: str = _flag(
        "5GB", "Size of an exported safetensors file", _EXPORTS_MODEL, metavar="SIZE", of=_FILES, moves=Moves.EXPORT
    )
    export_encoding: ExportEncoding = _flag(
        "plain",
        "Tensors that are quantized in --model: write bfloat16 (plain), or quantize them again the same way (source)",
        _EXPORTS_MODEL,
        of=_FILES,
        moves=Moves.EXPORT,
    )
    drop_untrained: bool = _flag(
        False,
        "Leave untrained tensors (vision tower, multi-token prediction) out of the export, instead of copying them",
        _EXPORTS_MODEL,
        of=_FILES,
        moves=Moves.EXPORT,
    )

    def check_checkpoints(self) -> None:
        parse_size("--max-shard-size", self.max_shard_size)
        for name in self.allow_changed:
            if name not in _MAY_CHANGE:
                raise ExpertMeshError(f"--allow-changed {name}: give one of {', '.join(_MAY_CHANGE)}")

    @property
    def shard_bytes(self) -> int:
        return parse_size("--max-shard-size", self.max_shard_size)


@dataclass
class LogSettings:
    """What is told of a run."""

    GROUP = "Logging and profiling"
    MOVES = Moves.NOTHING
    OF = _LOOP
    OTHERS: ClassVar[Others] = {
        **{f"--report-to {name}": f"use_{name}" for name in ("tensorboard", "wandb", "mlflow", "swanlab")},
        "profile": "profiler_steps",
    }

    logging_steps: int = _flag(1, "Log every N steps", least=1)
    verbose: bool = _flag(False, "Also print the run's choices, and its experts' load", of=_DATA)
    report_to: list[str] = _list(
        "Trackers of accelerate: tensorboard, wandb, mlflow, ..., or none", metavar="NAME", of=_OUTPUT
    )
    run_name: str = _flag("expertmesh", "Name of the run, in its report and in trackers", metavar="NAME", of=_OUTPUT)
    profile: list[str] = _list(
        "Steps to profile, counted from 1: 5, 5-7 or 5,9; results go to OUTPUT_DIR/profile and the report",
        metavar="STEPS",
        excludes=("compile", "--profile cannot look inside layers that --compile compiles; leave out one of them"),
    )
    profile_ranks: list[str] = _list(
        "Ranks that --profile profiles: numbers, or all",
        Needs("--profile", lambda config: bool(config.profile)),
        default=["0"],
        metavar="RANK",
    )

    def check_profile(self) -> None:
        self.profile = [part for entry in self.profile for part in entry.split(",") if part]
        self.profile_ranks = [part for entry in self.profile_ranks for part in entry.split(",") if part]
        flag = f"--profile {','.join(self.profile)}"
        if not all(re.fullmatch(r"[1-9][0-9]{0,17}(-[1-9][0-9]{0,17})?", entry) for entry in self.profile):
            raise ExpertMeshError(f"{flag}: give steps counted from 1, as in 5, 5-7 or 5,9")
        for entry in self.profile:
            first, _, last = entry.partition("-")
            if last and int(last) < int(first):
                raise ExpertMeshError(f"{flag}: {entry} ends before it begins")
        if (number := sum(map(len, self.profiled_steps))) > MOST_PROFILED:
            raise ExpertMeshError(
                f"{flag}: names {number:,} steps; give at most {MOST_PROFILED}, or no program can show the trace"
            )
        is_list = all(re.fullmatch("[0-9]{1,9}", rank) for rank in self.profile_ranks)
        if self.profile_ranks != ["all"] and not (self.profile_ranks and is_list):
            raise ExpertMeshError(f"--profile-ranks {' '.join(self.profile_ranks)}: give numbers of ranks, or all")

    @property
    def profiled_steps(self) -> list[range]:
        """The stretches of steps that --profile names, counted from 1, in order; none overlaps or follows directly on
        the one before."""
        stretches: list[range] = []
        bounds = [[int(step) for step in entry.split("-")] for entry in self.profile]
        for first, last in sorted((steps[0], steps[-1]) for steps in bounds):
            if stretches and first <= stretches[-1].stop:
                stretches[-1] = range(stretches[-1].start, max(stretches[-1].stop, last + 1))
            else:
                stretches.append(range(first, last + 1))
        return stretches


@dataclass
class DebugSettings:
    """What helps when something is wrong."""

    GROUP = "Debugging"
    MOVES = Moves.NOTHING
    OF = _LOOP
    OTHERS: ClassVar[Others] = {"deterministic": "full_determinism"}

    on_nonfinite: OnNonfinite = _flag(
        "stop",
        "At a loss or gradient norm that is not finite: stop, or skip the optimizer step",
        of=_STEPS,
        moves=Moves.UPDATES,
    )
    detect_anomaly: bool = _flag(
        False,
        "Name the first tensor that is not finite, by checking every module's output",
        excludes=(
            "compile",
            "--detect-anomaly cannot look inside layers that --compile compiles; leave out one of them",
        ),
        of=_LOOP._replace(readers=_LOOP.readers | {"Trainer"}),
    )
    check_replicas: int = _flag(
        0,
        "Compare what several ranks hold copies of every N steps, and before each save; 0: never",
        least=0,
    )
    deterministic: bool = _flag(
        False, "Bitwise reproducible per layout; slower on GPUs", of=_PROCESS, moves=Moves.SPEED
    )
    debug_ranks: list[int] = _list(
        "Ranks on which breakpoint() and errors open a debugger; the others wait without limit", metavar="RANK"
    )
