"""What a run is told: a YAML file gives defaults, flags win. Names are those of `transformers.TrainingArguments`."""

import difflib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from moe import KERNEL_NAMES, ExpertMeshError, Precision, RopeScaling, check_kernel_name, read_rope_scaling
from moe.sizes import parse_size
from moe.whole import whole
from sharding import Checkpointing, DenseShard, Strategy
from training.data import TEMPLATES, SampleBy, TrainOn
from training.flags import FlagParser

Optimizer = Literal["adamw_torch_fused", "adamw_torch_8bit", "adamw_bf16", "muon"]
CrossEntropy = Literal["auto", "chunked", "full", "liger"]
CpuMatmul = Literal["auto", "blas", "onednn"]
Adapter = Literal["none", "lora"]
Scope = Literal["input", "output", "node"]
"""Of a setting that may be another on each node: a place that is read, one that is written, or anything."""
BaseDtype = Literal["auto", "float32", "bfloat16", "fp8", "nf4"]
AdapterFormat = Literal["auto", "per-expert", "packed"]
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
)  # fmt: skip
"""The values of `transformers.SchedulerType`."""
OnSaveError = Literal["stop", "continue"]
OnNonfinite = Literal["stop", "skip"]
MOST_PROFILED = 32
"""Steps that --profile takes at most: a step of a large model is some hundred thousand events of its trace."""


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _list(help: str, **metadata: Any) -> Any:
    return field(default_factory=list, metadata={"help": help, **metadata})


def _checkpointing(text: str) -> str:
    """In transformers it is a switch: its values mean something here too."""
    return {"true": "full", "false": "none"}.get(text.lower(), text)


def _resume(text: str) -> str:
    """In YAML it may be a switch too."""
    return {"true": "auto", "false": ""}.get(text.lower(), text)


@dataclass
class TrainConfig:
    """Every setting of a run. Each is a flag (`--ep-size` or `--ep_size`) and a key of the YAML file."""

    model: str = _flag(
        "", "Directory of a Hugging Face checkpoint, or a hub id.", aliases=["model_name_or_path"], scope="input"
    )
    dataset: list[str] = _list(
        "JSON, JSONL, Parquet, CSV or TXT files, directories of them, or hub ids; NAME:WEIGHT mixes.", scope="input"
    )
    tokenizer: str = _flag("", "Directory or hub id of the tokenizer, if not the model's own.", scope="input")
    output_dir: str = _flag(
        "output", "Where metrics.jsonl, config.yaml, report.html and the exported model (hf/) go.", scope="output"
    )
    overwrite_output_dir: bool = _flag(False, "Replace the results of an earlier run in --output-dir.")
    max_seq_length: int = _flag(1024, "Longer samples are cut off at this many tokens; packed rows hold as many.")
    rope_scaling: str = _flag(
        "",
        "Stretch rotary positions for rows longer than the model was trained with: linear:2, dynamic:2, yarn:4, or "
        "JSON with keys of transformers' rope_parameters. In place of what the model has; exported in its config.",
    )
    packing: bool = _flag(False, "Put several samples into a row, each with positions and attention of its own.")
    group_by_length: bool = _flag(False, "Put samples of like length into a batch, where they are not packed.")
    preview: bool = _flag(False, "Print the first rows as the model sees them and what the data hold, and exit.")
    chat_template: str = _flag(
        "", f"Chat template: {', '.join(TEMPLATES)}, or a Jinja file. Default: the tokenizer's.", scope="input"
    )
    prompt_template: str = _flag("", "Instead of a chat template: the text before the response, with {prompt} in it.")
    train_on: TrainOn = _flag(
        "assistant", "What has a loss: all, every assistant turn, the last one, or final: every one without reasoning."
    )
    dataset_config: str = _flag(
        "", "Configuration of a directory with a dataset card, or of a hub data set.", aliases=["dataset_config_name"]
    )
    dataset_split: str = _flag("train", "Split of --dataset, where that is a directory with splits or a hub data set.")
    messages_column: str = _flag("", "Column with the conversation, where it is not found by itself.")
    prompt_column: str = _flag("", "Column with the prompt.")
    response_column: str = _flag("", "Column with the response.")
    system_column: str = _flag("", "Column with the system prompt.")
    text_column: str = _flag("", "Column with plain text, all of which is trained on.")
    sample_by: SampleBy = _flag("line", "A row of a .txt file: a line, a paragraph (up to a blank line) or all of it.")
    dataset_num_proc: int | None = _flag(
        None, "Processes that tokenise. Default: by the size of the data.", scope="node"
    )

    ep_size: int = _flag(1, "Ranks that share out the experts; must divide the experts and the ranks.")
    cp_size: int = _flag(
        1,
        "Ranks that share each row, for rows too long for one (context parallelism); must divide the ranks and the "
        "attention heads.",
    )
    dense_shard: DenseShard = _flag(
        "full", "Shard what is no expert over all ranks, or over the ep ranks with a replica in each dp group."
    )
    expert_kernel: str = _flag("auto", f"How experts are computed: auto, {', '.join(KERNEL_NAMES)}.")
    expert_precision: Precision = _flag(
        "same",
        "What experts' products are computed in: as everything else, or in fp8 with a scale a row, for GPUs of compute "
        "capability 9 (H100, H200); emulated on a CPU.",
    )
    attn_implementation: str = _flag(
        "auto",
        "Attention of the Hugging Face model. auto: sdpa, or where that would need a mask of row length squared or "
        "knows no sinks, our own; eager where neither will do.",
    )
    cross_entropy: CrossEntropy = _flag(
        "auto",
        "Logits of a part of the sequence at a time (chunked, or liger: liger-kernel's, for GPUs) or of all of it "
        "(full). auto: liger on a GPU where it is installed, else chunked.",
    )
    cpu_matmul: CpuMatmul = _flag(
        "auto", "Library of matrix products on a CPU in fp32. auto: by a probe at the start, kept when the run goes on."
    )
    gradient_checkpointing: Checkpointing = _flag(
        "none",
        "To save memory, compute each layer again in backward: all of it (full, also where no value is given), or all "
        "but routing, all-to-alls and attention (selective).",
        type=_checkpointing,
        choices=get_args(Checkpointing),
        nargs="?",
        const="full",
    )
    reshard_after_forward: bool = _flag(
        True, "Free each layer's gathered parameters after its forward; false keeps them until its backward."
    )
    overlap_chunks: int = _flag(
        1,
        "Parts in which a layer's rows travel to their experts, each beside another's products; of whole experts, so "
        "at most as many as a rank has.",
    )
    keep_expert_products: int = _flag(
        0,
        "Of so many layers selective checkpointing keeps experts' first products too: less computed again in backward, "
        "for more memory.",
    )
    offload_activations: bool = _flag(
        False,
        "With --gradient-checkpointing: keep each layer's input in host memory from forward to backward. Copied beside "
        "computing on a GPU.",
    )
    compile: bool = _flag(False, "Compile attention and norms by torch.compile.", aliases=["torch_compile"])
    bf16: bool = _flag(False, "Compute in bfloat16; parameters, gradients and optimizer state stay fp32.")
    tf32: bool = _flag(
        False, "Multiply fp32 matrices in TF32: faster, with 10 bits of mantissa; for GPUs from Ampere on."
    )
    use_cpu: bool = _flag(False, "Stay on the CPU even where there is a GPU.")
    force: bool = _flag(False, "Start even where the memory forecast says that it cannot fit.")
    ddp_timeout: int = _flag(
        1800, "Seconds after which a rank that gets no further, or a collective that does not finish, ends the run."
    )
    debug_ranks: list[int] = field(
        default_factory=list,
        metadata={"help": "Ranks on which breakpoint() and errors open a debugger; the others wait without limit."},
    )

    per_device_train_batch_size: int = _flag(8, "Rows a rank, or those that share rows, take in one forward.")
    gradient_accumulation_steps: int = _flag(1, "Forwards and backwards a step.")
    global_batch_size: int | None = _flag(
        None, "Rows a step over all ranks, in as many forwards as it takes, in place of --gradient-accumulation-steps."
    )
    num_train_epochs: float = _flag(1.0, "Passes over the data, where --max-steps is not given.")
    max_steps: int = _flag(-1, "Steps; 0 only loads and exports.")
    learning_rate: float = _flag(5e-5, "Peak learning rate.")
    lr_scheduler_type: str = _flag("linear", f"Learning rate schedule: {', '.join(SCHEDULES)}.")
    lr_scheduler_kwargs: str = _flag("", """More arguments of the schedule, as JSON: '{"min_lr": 1e-6}'.""")
    warmup_steps: float = _flag(0, "Steps of warm-up; below 1, a share of all steps.")
    warmup_ratio: float = _flag(0.0, "Warm-up as a share of all steps, in place of --warmup-steps.")
    optim: Optimizer = _flag(
        "adamw_torch_fused",
        "AdamW; with 8-bit state; with parameters, gradients and state in bf16, rounded stochastically; or Muon for "
        "attention's and the experts' matrices, with AdamW for the rest.",
    )
    offload: bool = _flag(False, "Keep parameters, gradients and optimizer state in host memory; compute on the GPU.")
    weight_decay: float = _flag(0.0, "Weight decay; norms and biases are exempt.")
    adam_beta1: float = _flag(0.9, "AdamW's beta1.")
    adam_beta2: float = _flag(0.999, "AdamW's beta2.")
    adam_epsilon: float = _flag(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _flag(1.0, "Clip the global gradient norm to this; 0 turns clipping off.")
    router_aux_loss_coef: float | None = _flag(
        None, "Weight of the load-balancing loss. Default: the model config's, if it sets output_router_logits, else 0."
    )
    router_aux_loss_per_layer: bool = _flag(
        False,
        "Balance every layer by itself. false, as in transformers: their sum, where one layer's surplus at an expert "
        "makes up for another's lack.",
    )
    router_z_loss_coef: float = _flag(0.0, "Weight of the router z-loss.")
    router_bias_update_rate: float = _flag(
        0.0,
        "Balance without a loss: after each update, move the routers' correction biases by so much towards even load; "
        "for families that have them.",
    )
    adapter: Adapter = _flag("none", "Train low-rank updates beside frozen weights (LoRA) in place of the weights.")
    lora_rank: int = _flag(16, "Rank of the updates.", aliases=["lora_r"])
    lora_alpha: float = _flag(32.0, "Updates are multiplied by alpha / rank.")
    lora_dropout: float = _flag(0.0, "Chance that a number of the input is left out of an update.")
    lora_targets: list[str] = field(
        default_factory=lambda: ["attention", "experts"],
        metadata={
            "help": "What has adapters: attention, experts, router, shared-experts, dense-mlp, or regular expressions "
            "that are found in names of linear layers."
        },
    )
    use_rslora: bool = _flag(False, "Multiply updates by alpha / sqrt(rank).")
    base_dtype: BaseDtype = _flag(
        "auto",
        "How the frozen weights beside adapters are held: as plain numbers; or the layers' matrices in fp8, with a "
        "scale a row, or nf4, with one for 64 numbers, the rest as by auto. auto: bfloat16 with --bf16, else float32.",
    )
    init_adapter: str = _flag(
        "", "Begin with the adapter in a directory, which PEFT or an earlier run wrote.", scope="input"
    )
    adapter_format: AdapterFormat = _flag(
        "auto",
        "How experts' adapters are exported: a pair of tensors an expert, or PEFT's packed form. auto: as the model's "
        "own checkpoint has its experts.",
    )
    merge: bool = _flag(False, "At the end, also export the model with the adapter's updates added to its weights.")
    freeze: list[str] = _list(
        "What is not trained: experts, router, shared-experts, attention, embeddings, norms, or regular expressions "
        "that are found in parameters' names."
    )
    on_nonfinite: OnNonfinite = _flag(
        "stop", "At a loss or gradient norm that is not finite: stop, or skip the update."
    )
    detect_anomaly: bool = _flag(False, "Name the first tensor that is not finite. Tests every module's output.")
    check_replicas: int = _flag(
        0,
        "Every so many steps, and before each save, compare what several ranks hold copies of; 0: never. With "
        "--dense-shard full that is only buffers.",
    )
    router_warn_steps: int = _flag(100, "Warn of experts that got no, or most, tokens in so many steps; 0: never.")
    router_warn_load: float | None = _flag(
        None,
        "Load of the fullest expert over the mean that is warned of. Default: halfway from 1, even, to the greatest "
        "there can be, experts / experts a token.",
    )
    profile: list[str] = _list(
        "Steps to profile, counted from 1: 5, 5-7 or 5,9. Traces, and what each part of a step took, go to "
        "OUTPUT_DIR/profile, and into the report."
    )
    profile_ranks: list[str] = field(
        default_factory=lambda: ["0"], metadata={"help": "Ranks that --profile looks at: numbers, or all."}
    )
    deterministic: bool = _flag(False, "The same bits on each run of one arrangement, by slower algorithms on a GPU.")
    seed: int = _flag(42, "Seed of the data order and of dropout and jitter.")

    eval_dataset: list[str] = _list("Data to evaluate on, named as in --dataset.", scope="input")
    eval_dataset_split: str = _flag("test", "Split of --eval-dataset, likewise.")
    eval_ratio: float = _flag(0.0, "Share of --dataset to hold out and evaluate on, where --eval-dataset is not given.")
    eval_steps: int = _flag(0, "Evaluate every so many steps; 0: after every epoch. Always at the end.")
    per_device_eval_batch_size: int = _flag(
        8, "Rows a rank, or those that share rows, take in one forward of an evaluation."
    )
    early_stopping_patience: int = _flag(0, "Stop after so many evaluations without a better loss; 0: never.")
    early_stopping_threshold: float = _flag(0.0, "By how much a loss must be lower to count as better.")
    load_best_model_at_end: bool = _flag(False, "Export the weights of the best evaluation, not the last ones.")
    generate_steps: int = _flag(0, "Have the model answer a few prompts every so many steps; 0: never.")
    generate_prompts: list[str] = _list("What it is asked. Default: questions from the data to evaluate (or train) on.")
    generate_max_new_tokens: int = _flag(64, "Longest answer, in tokens.")

    save_steps: int = _flag(500, "Save a training checkpoint every so many steps; 0 saves none.")
    save_total_limit: int | None = _flag(None, "How many training checkpoints to keep. Default: all.")
    async_save: bool = _flag(True, "Whether training goes on while a checkpoint is written.")
    on_save_error: OnSaveError = _flag("stop", "What a checkpoint that cannot be written does to the run.")
    resume: str = _flag(
        "",
        "Go on from a training checkpoint: its path, or auto for the newest whole one in --output-dir, if any.",
        aliases=["resume_from_checkpoint"],
        type=_resume,
        scope="input",
    )
    allow_changed: list[str] = _list(
        "With --resume: go on though the model, or the data, are not those that the run began with: model, data."
    )
    elastic: bool = _flag(
        False, "With --resume: take as large an --ep-size as the ranks allow, and keep the run's global batch."
    )
    trust_checkpoint_owner: bool = _flag(False, "Resume from another user's checkpoint; reading it can run their code.")

    logging_steps: int = _flag(1, "Log every so many steps.")
    report_to: list[str] = _list("Trackers of accelerate: tensorboard, wandb, mlflow, ..., or none.")
    run_name: str = _flag("expertmesh", "Name of the run in the trackers.")
    export: bool = _flag(True, "Whether, at the end, to write the model in Hugging Face form to OUTPUT_DIR/hf.")
    max_shard_size: str = _flag("5GB", "Size of an exported safetensors file.")
    drop_untrained: bool = _flag(
        False,
        "Leave tensors that are not trained (vision tower, multi-token prediction) out of the export, and what "
        "config.json says of them. Default: carry them over as they are.",
    )

    def __post_init__(self) -> None:
        # as PEFT's users write them: attention,experts; a comma within braces is a pattern's own
        parts = [part for entry in self.lora_targets for part in re.split(r",(?![^{]*\})", entry)]
        self.lora_targets = [part for part in parts if part]
        self.profile = [part for entry in self.profile for part in entry.split(",") if part]
        self.profile_ranks = [part for entry in self.profile_ranks for part in entry.split(",") if part]
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:  # not true of NaN
                raise ExpertMeshError(f"{_as_flag(name)} {value}: must be {low} or more")
            if isinstance(value, int) and value >= 2**63:
                raise ExpertMeshError(f"{_as_flag(name)} {value}: must be below 2^63")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ExpertMeshError(f"{_as_flag(name)} {getattr(self, name)}: must be in [0, 1)")
        if self.lr_scheduler_type not in SCHEDULES:
            raise ExpertMeshError(
                "--lr-scheduler-type: " + _unknown("schedule", self.lr_scheduler_type, list(SCHEDULES))
            )
        if self.warmup_ratio > 1:
            raise ExpertMeshError(f"--warmup-ratio {self.warmup_ratio}: is a share of all steps: 1 or less")
        if self.warmup_ratio and self.warmup_steps:
            raise ExpertMeshError(
                f"--warmup-ratio {self.warmup_ratio} and --warmup-steps {self.warmup_steps:g} are both given; "
                "leave one out"
            )
        check_kernel_name(self.expert_kernel)
        if self.rope_scaling:
            read_rope_scaling(self.rope_scaling)
        if self.seed >= 2**62:
            raise ExpertMeshError(f"--seed {self.seed}: must be below 2^62")
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            raise ExpertMeshError(f"--prompt-template {self.prompt_template!r} has no {{prompt}} in it")
        if self.keep_expert_products and self.gradient_checkpointing != "selective":
            raise ExpertMeshError(
                f"--keep-expert-products {self.keep_expert_products}: is for --gradient-checkpointing selective, not "
                f"{self.gradient_checkpointing}"
            )
        if self.offload_activations and self.gradient_checkpointing == "none":
            raise ExpertMeshError(
                "--offload-activations: without checkpointing a layer keeps far more than its input; add "
                "--gradient-checkpointing full or selective"
            )
        if self.overlap_chunks > 1 and self.ep_size == 1:
            raise ExpertMeshError(
                f"--overlap-chunks {self.overlap_chunks}: at --ep-size 1 no row travels; leave it out"
            )
        if not self.model:
            raise ExpertMeshError("--model is missing: the directory of a Hugging Face checkpoint")
        if not self.dataset and (self.max_steps != 0 or self.preview):
            raise ExpertMeshError(
                "--dataset is missing: files, directories or hub ids (only --max-steps 0 goes without)"
            )
        self._check_combinations()
        parse_size("--max-shard-size", self.max_shard_size)

    def _check_combinations(self) -> None:
        if self.prompt_template and self.chat_template:
            raise ExpertMeshError("--prompt-template and --chat-template: a row is written in one or the other")
        if self.packing and self.group_by_length:
            raise ExpertMeshError("--packing and --group-by-length: packed rows have one length already; choose one")
        if self.messages_column and (self.prompt_column or self.response_column or self.text_column):
            raise ExpertMeshError("--messages-column: give no prompt, response or text column beside it")
        if not 0 <= self.eval_ratio < 1:
            raise ExpertMeshError(f"--eval-ratio {self.eval_ratio}: must be in [0, 1)")
        if self.eval_dataset and self.eval_ratio > 0:
            raise ExpertMeshError("--eval-dataset and --eval-ratio: give one of them")
        for name in ("early_stopping_patience", "load_best_model_at_end", "eval_steps"):
            if getattr(self, name) and not self.evaluates:
                raise ExpertMeshError(
                    f"{_as_flag(name)}: there is nothing to evaluate on; give --eval-dataset or --eval-ratio"
                )
        if self.generate_prompts and self.generate_steps == 0:
            raise ExpertMeshError("--generate-prompts: when is it to answer them? Give --generate-steps")
        if self.early_stopping_threshold and self.early_stopping_patience == 0:
            raise ExpertMeshError("--early-stopping-threshold: nothing stops early without --early-stopping-patience")
        if self.global_batch_size is not None and self.gradient_accumulation_steps > 1:
            raise ExpertMeshError("--global-batch-size and --gradient-accumulation-steps: give one of them")
        if self.adapter != "none" and self.freeze:
            raise ExpertMeshError("--adapter lora freezes everything but the adapters; leave out --freeze")
        if self.adapter != "none" and self.optim == "muon":
            raise ExpertMeshError(
                "--optim muon: orthogonalises weights, and a low-rank update is no weight; with --adapter lora take "
                "another"
            )
        if self.adapter != "none" and self.router_bias_update_rate > 0:
            raise ExpertMeshError(
                f"--router-bias-update-rate {self.router_bias_update_rate:g}: an adapter's files hold no router bias; "
                "leave it out with --adapter lora"
            )
        if not self.lora_targets:
            raise ExpertMeshError("--lora-targets: what is to have adapters?")
        for name in ("init_adapter", "merge"):
            if getattr(self, name) and self.adapter == "none":
                raise ExpertMeshError(f"{_as_flag(name)}: there is no adapter; give --adapter lora")
        if self.base_dtype != "auto" and self.adapter == "none":
            raise ExpertMeshError(f"--base-dtype {self.base_dtype}: everything is trained; give --adapter lora")
        if self.expert_precision == "fp8":
            self._check_fp8()
        if not 0 <= self.lora_dropout < 1:
            raise ExpertMeshError(f"--lora-dropout {self.lora_dropout}: must be in [0, 1)")
        for name in self.allow_changed:
            if name not in _MAY_CHANGE:
                raise ExpertMeshError(f"--allow-changed {name}: give {' or '.join(_MAY_CHANGE)}")
        if self.allow_changed and not self.resume:
            raise ExpertMeshError("--allow-changed: nothing is gone on from; give --resume, or leave it out")
        if self.elastic and not self.resume:
            raise ExpertMeshError("--elastic: what is it to go on from? Give --resume auto")
        if self.detect_anomaly and self.compile:
            raise ExpertMeshError("--detect-anomaly: does not see into what --compile compiles; leave out one of them")
        if self.profile and self.compile:
            raise ExpertMeshError("--profile: does not see into what --compile compiles; leave out one of them")
        if self.profile_ranks != ["0"] and not self.profile:
            raise ExpertMeshError(f"--profile-ranks {' '.join(self.profile_ranks)}: of which steps? Give --profile")
        self._check_profile()
        if self.router_warn_load is not None and self.router_warn_steps == 0:
            raise ExpertMeshError("--router-warn-load: --router-warn-steps 0 watches no router; give a number of steps")
        if self.load_best_model_at_end and self.save_steps == 0:
            raise ExpertMeshError("--load-best-model-at-end: --save-steps 0 saves no checkpoint to load it from")

    def _check_fp8(self) -> None:
        if not self.bf16:
            raise ExpertMeshError("--expert-precision fp8: everything else is computed in bf16; add --bf16")
        if self.expert_kernel not in ("auto", "torch-grouped"):
            raise ExpertMeshError(
                f"--expert-precision fp8: has products of its own; leave out --expert-kernel {self.expert_kernel}"
            )
        if self.base_dtype in ("fp8", "nf4"):
            raise ExpertMeshError(
                f"--expert-precision fp8: would round twice what --base-dtype {self.base_dtype} holds in few bits; "
                "leave out one of them"
            )

    def _check_profile(self) -> None:
        flag = f"--profile {','.join(self.profile)}"
        if not all(re.fullmatch(r"[1-9][0-9]{0,17}(-[1-9][0-9]{0,17})?", entry) for entry in self.profile):
            raise ExpertMeshError(f"{flag}: give steps, counted from 1, and ranges of them: 5, 5-7 or 5,9")
        for entry in self.profile:
            first, _, last = entry.partition("-")
            if last and int(last) < int(first):
                raise ExpertMeshError(f"{flag}: {entry} ends before it begins")
        if (number := sum(map(len, self.profiled_steps))) > MOST_PROFILED:
            raise ExpertMeshError(
                f"{flag}: are {number:,} steps; more than {MOST_PROFILED} make traces that nothing can show; give fewer"
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

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_dataset) or self.eval_ratio > 0

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
        )

    @property
    def rope(self) -> RopeScaling | None:
        """How positions are stretched; None: as the model has them."""
        return read_rope_scaling(self.rope_scaling) if self.rope_scaling else None

    @property
    def holds_base_in_bf16(self) -> bool:
        """Whether weights beside adapters are: what is computed with in bf16 needs no more digits."""
        if self.adapter == "none" or self.base_dtype == "float32":
            return False
        return self.bf16 or self.base_dtype == "bfloat16"

    def rows_a_forward(self, world_size: int) -> int:
        """Rows that all ranks together take in one forward."""
        return world_size // self.cp_size * self.per_device_train_batch_size

    def rows_a_step(self, world_size: int) -> int:
        """The global batch, in rows."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.rows_a_forward(world_size) * self.gradient_accumulation_steps

    def forwards(self, world_size: int) -> int:
        """Forwards a rank makes in a step."""
        return math.ceil(self.rows_a_step(world_size) / self.rows_a_forward(world_size))

    @property
    def shard_bytes(self) -> int:
        return parse_size("--max-shard-size", self.max_shard_size)

    def save(self, path: Path) -> None:
        with whole(path) as partial:
            partial.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


_MAY_CHANGE = ("model", "data")

_AT_LEAST = {
    "overlap_chunks": 1,
    "keep_expert_products": 0,
    "max_seq_length": 2,
    "ep_size": 1,
    "cp_size": 1,
    "ddp_timeout": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 1,
    "num_train_epochs": 0,
    "max_steps": -1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "weight_decay": 0,
    "adam_epsilon": 0,
    "max_grad_norm": 0,
    "router_aux_loss_coef": 0,
    "router_z_loss_coef": 0,
    "router_bias_update_rate": 0,
    "lora_rank": 1,
    "lora_alpha": 0,
    "check_replicas": 0,
    "router_warn_steps": 0,
    "router_warn_load": 1,
    "seed": 0,
    "logging_steps": 1,
    "save_steps": 0,
    "save_total_limit": 1,
    "eval_steps": 0,
    "per_device_eval_batch_size": 1,
    "early_stopping_patience": 0,
    "early_stopping_threshold": 0,
    "generate_steps": 0,
    "generate_max_new_tokens": 1,
    "dataset_num_proc": 1,
}


# more than a hundred times what all settings take
_MOST_YAML_BYTES = 2**20


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """The configuration from flags (default: sys.argv), and the YAML file that `--config` names.

    Raises:
        ExpertMeshError: an unknown flag or key (the nearest known one is named), or a value that will not do.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = FlagParser(TrainConfig, allow_abbrev=False, prog="train_ep.py")
    parser.add_argument("--config", default=None, help="YAML file with defaults for the flags.")
    parser.check_names(arguments)
    config_file = parser.parse_known_args(arguments)[0].config
    defaults = [] if config_file is None else _yaml_arguments(parser, Path(config_file))
    parsed, unknown = parser.parse_known_args(defaults + arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ExpertMeshError(_unknown("flag", unknown[0].partition("=")[0], known))
    settings = vars(parsed)
    del settings["config"]
    return TrainConfig(**settings)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(problem=f"{name} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _yaml_arguments(parser: FlagParser, file: Path) -> list[str]:
    """The file's entries as flags, so that both go through the same checks."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_YAML_BYTES:
            raise ExpertMeshError(f"--config {file}: is no file of at most {_MOST_YAML_BYTES:,} bytes")
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}
    except ExpertMeshError:
        raise
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ExpertMeshError(f"--config {file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"--config {file}: holds a {type(content).__name__}, not a table of settings")
    given: dict[str, str] = {}
    arguments: list[str] = []
    for key, value in content.items():
        name = parser.names.get(str(key).replace("-", "_"))
        if name is None:
            raise ExpertMeshError(f"--config {file}: " + _unknown("key", str(key), list(parser.names)))
        if name in given:
            raise ExpertMeshError(f"--config {file}: {given[name]} and {key} are one setting; give one of them")
        given[name] = str(key)
        if not _is_setting(value):
            raise ExpertMeshError(f"--config {file}: {name} is no text, number, list of these, or table of these")
        if isinstance(value, list) and not parser.takes_list(name):
            raise ExpertMeshError(f"--config {file}: {key} is a list; give one value")
        if isinstance(value, list) and any(str(item).startswith("-") for item in value):
            raise ExpertMeshError(f"--config {file}: {name} has an entry that begins with a dash, as flags do")
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            arguments.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"--{name}={value}")
    try:
        parser.parse_known_args(arguments)
    except ExpertMeshError as error:
        raise ExpertMeshError(f"--config {file}: {error}") from error
    return arguments


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


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown {kind} {name}; " + (f"did you mean {near[0]}?" if near else "--help lists what there is")


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")
