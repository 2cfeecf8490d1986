"""What other training tools call the settings, and what to give here instead: those of transformers, trl, axolotl,
LLaMA-Factory, ms-swift and Megatron-LM.

What a setting is called elsewhere stands beside it, in the OTHERS of its class (see `OtherTools`). Here is how that is
read, and the keys that have no equivalent, or ask for what is done anyway.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

from ...moe.util.parser import Switch, flag_of, truth_of

Others = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""What stands beside settings (see `OtherTools`); a function where it depends on what is registered."""

LEAVE_OUT = "leave it out"
"""What to do with a value that asks for what is done anyway."""
TORCHRUN = "give torchrun the number of processes and nodes: --nproc-per-node and --nnodes"
_NEVER = "has no equivalent here"
_PAIRS = "the loss of pairs is DPO's or IPO's as published"
_REFERENCE = "the reference is the model as it is before training"
_SHARDED = "FSDP2 always shards parameters, gradients and optimizer state (see --dense-shard, --offload)"
_EVALUATES = "evaluation runs if --eval-dataset or --eval-ratio is given, every --eval-steps N or epoch"
_TOKENS = "change special tokens in the tokenizer and give its directory as --tokenizer, with --resize-vocab"
_FREEZE = "give --freeze with the parameters that are not trained"
_TRACKERS = "give --report-to and --run-name, and everything else by the tracker's environment variables"

WITHOUT_EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    # names or patterns of them, what to give instead or why to leave it out, values that ask for what is done anyway
    # ---- the model ----
    ("model_revision", "download that revision and give its directory as --model", "main"),
    ("trust_remote_code", "expertmesh never runs a checkpoint's code", "false"),
    ("fp16 float16", "float16 is not supported; give --bf16", "false"),
    ("bf16_full_eval fp16_full_eval", "evaluation uses the precision of training (--bf16)", "false"),
    ("model_init_kwargs model_kwargs model_type tokenizer_type processor_type model_name model_author", _NEVER, "{}"),
    ("use_cache low_cpu_mem_usage", "has no effect in training", "true false"),
    ("special_tokens eot_tokens eos_token pad_token new_special_tokens add_special_tokens", _TOKENS, "{} []"),
    ("use_hf cache_dir", "models come from the Hugging Face hub or a directory (HF_HOME)", "true"),
    ("hf_hub_token hub_token token", "log in with `hf auth login` or set HF_TOKEN", ""),
    ("flash_attention sdp_attention flex_attention eager_attention attention_backend",
     "give --attn-implementation, or leave it out: auto uses a flash-attention kernel if one fits", "false auto"),
    ("use_liger_kernel enable_liger_kernel liger_* cross_entropy_loss_fusion",
     "on a GPU, runs use liger-kernel if it is installed (pip install 'expertmesh[gpu]') and computes the same", ""),
    ("plugins use_kernels lora_*_kernel *_fusion", "kernels are chosen by themselves", "[] false"),
    ("fp8_*", "fp8 has a scale for each row of a matrix (see --expert-precision)", "false"),
    ("torch_compile_backend torch_compile_mode", "--compile has no other settings", "inductor"),
    ("experts_implementation experts_impl", "give --expert-kernel, or leave it out", "grouped_mm"),
    # of our own releases until November 2026, and in their config.yaml
    ("cpu_matmul", "a CPU's matmuls are torch's own", "auto blas"),
    # ---- data ----
    ("dataset_prepared_path tokenized_path", "tokenized data are cached by themselves", ""),
    ("overwrite_cache load_from_cache_file", "the cache follows the data and their settings", "true"),
    ("pretraining_dataset", "give --dataset, --text-column, --packing, --truncation split and --streaming", ""),
    ("train_on_eos", "what ends an answer is trained with it", "turn"),
    ("dataset_dir custom_dataset_info", "give --dataset with the files, directories or hub ids themselves", ""),
    ("eval_packing eval_sample_packing", "evaluation data are never packed, and their loss is the same", "false"),
    ("pad_to_sequence_len pad_to_multiple_of", "the engine pads as its kernels need", "false auto"),
    ("train_sampling_strategy", "--seed shuffles the samples; give --group-by-length to batch by length", "random"),
    ("shuffle_dataset shuffle_merged_datasets dataset_shuffle", "--seed shuffles the samples every epoch", "true"),
    ("max_samples", "give --max-steps, or a --dataset with fewer samples", ""),
    ("interleave_probs interleave_prob mix_strategy", "give --dataset NAME:WEIGHT", "concat"),
    ("template", "give --chat-template, or leave it out: the tokenizer's own is used", ""),
    ("default_system_message system", "give --system-column, or write it into the data", ""),
    ("dataset_kwargs remove_unused_columns length_column_name strict", _NEVER, "length true false"),
    ("skip_prepare_dataset", _NEVER, "false"),
    ("image_* min_pixels max_pixels crop_to_patches",
     "sizes of images are those of preprocessor_config.json in the model's directory", "false"),
    ("video_* audio_*", "--images trains on images; videos and sounds are not read", "false"),
    ("dataloader_drop_last", "no sequence is dropped: the last step of an epoch may be short", "false"),
    ("dataloader_*", "batches are made without a data loader's workers", "true 0"),
    # ---- ranks and memory ----
    ("expert_tensor_parallel_size", "--tp-size does not split experts", "1"),
    ("sequence_parallel", "--tp-size 2 or more always splits sequences between layers", "true"),
    ("data_parallel_size dp_shard_size dp_replicate_size parallelism_config",
     "the data-parallel size follows from the number of ranks and the other sizes", ""),
    ("fsdp fsdp_* deepspeed deepspeed_* zero_*", _SHARDED, "false []"),
    ("ddp_backend", "GPUs use NCCL, CPUs gloo", ""),
    ("ddp_*", "parameters are sharded, not in DDP", "false"),
    ("num_processes num_machines nproc_per_node num_gpus gpus gpu nnodes num_nodes local_rank", TORCHRUN, "-1"),
    ("accelerator_config", _NEVER, "{}"),
    ("gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc",
     "recomputation is always non-reentrant", '{"use_reentrant":false} false'),
    ("recompute_method recompute_num_layers", "--gradient-checkpointing is of every layer", "uniform 1"),
    ("auto_find_batch_size", "give --per-device-train-batch-size; `plan` says what fits", "false"),
    ("torch_empty_cache_steps skip_memory_metrics", "memory is not emptied between steps", "true"),
    # ---- the loss ----
    ("average_tokens_across_devices", "the loss is a mean over all ranks' target tokens", "true"),
    ("label_smoothing_factor", "the loss is the cross-entropy of the labels", "0 0.0"),
    ("neftune_noise_alpha", "embeddings get no noise", "0 0.0"),
    ("label_smoothing dpo_label_smoothing", _PAIRS, "0 0.0"),
    ("loss_weights dpo_loss_weights ld_alpha use_weighting discopop_tau", _PAIRS, "false"),
    ("f_divergence_type f_alpha_divergence_coef", _PAIRS, "reverse_kl"),
    ("precompute_ref_log_probs", "the reference is always read before training", "true"),
    ("precompute_ref_batch_size", "the reference is read in the batches of training", ""),
    ("ref_model ref_adapters ref_model_mixup_alpha ref_model_sync_steps sync_ref_model", _REFERENCE, "false"),
    ("disable_dropout", "only --lora-dropout, 0 by default, and a model's own config drop", ""),
    ("sft_alpha kd_ce_alpha", "give --teacher-weight, which leaves the rest to the data's own tokens", "0 0.0"),
    ("lmbda seq_kd max_completion_length teacher_* kd_*",
     "the --teacher predicts the data's own tokens, once", "0 0.0 false"),
    ("temperature", "probabilities are taken as they are", "1 1.0"),
    ("trl", "give --task dpo or kto, and its flags", "{}"),
    ("reward_model reward_funcs num_generations use_vllm vllm_*", "there is only --task sft, dpo and kto", "false"),
    # ---- schedule and optimizer ----
    ("min_lr min_lr_ratio cosine_min_lr_ratio",
     """give --lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs '{"min_lr_rate": 0.1}'""", ""),
    ("optim_args optim_target_modules", "give --adam-beta1, --adam-beta2, --adam-epsilon or --weight-decay", ""),
    ("use_galore galore_* use_apollo apollo_* use_badam badam_* loraplus_*", _NEVER, "false"),
    # ---- experts ----
    ("output_router_logits", "give --router-aux-loss-coef", ""),
    ("moe_expert_capacity_factor", "no token is ever dropped", ""),
    ("moe_shared_expert_overlap", "give --overlap-chunks to overlap experts with the all-to-all", "false"),
    ("moe_permute_fusion moe_grouped_gemm use_distributed_optimizer", "always on", "true"),
    ("moe_router_load_balancing_type", "give --router-aux-loss-coef or --router-bias-update-rate", "none"),
    ("ignore_bias_buffers", _NEVER, "false"),
    # ---- adapters ----
    ("lora_task_type task_type", "a causal language model is trained", "causal_lm"),
    ("tuner_backend", "adapters are of expertmesh's own, and written for PEFT", "peft"),
    ("use_dora peft_use_dora", "DoRA is not supported", "false"),
    ("use_bnb_nested_quant bnb_* double_quantization quant_method quantization_method quantization_type",
     "--base-dtype nf4 has no other settings", "nf4 bnb"),
    ("quantize_moe_experts", "--base-dtype quantizes experts, too", "true"),
    ("pissa_* lora_bias lora_dtype create_new_adapter peft_*", _NEVER, "false none"),
    ("init_weights", _NEVER, "true"),
    ("unfrozen_parameters trainable_parameters freeze_llm freeze_trainable_layers", _FREEZE, "[] false"),
    # ---- evaluations, checkpoints and logs ----
    ("do_train", "the command always trains (--max-steps 0: does not)", "true"),
    ("do_eval do_predict eval_strategy evals_per_epoch eval_delay", _EVALUATES, ""),
    ("greater_is_better", "the best evaluation has the lowest loss, or the highest score", "false"),
    ("prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics",
     "an evaluation computes only the loss", "false"),
    ("batch_eval_metrics label_names", "an evaluation computes only the loss", "false"),
    ("predict_with_generate", "give --eval-generate FILE for scored answers, or --generate-steps for samples", "false"),
    ("save_strategy saves_per_epoch", "give --save-steps N: every how many steps, or 0 for never", "steps"),
    ("save_only_model no_save_optim no_save_rng",
     "checkpoints are for resuming, the export is the model; give --save-steps 0 for no checkpoints", "false"),
    ("finetune", "a run begins at step 0 without --resume", "true"),
    ("save_safetensors", "exports are always safetensors", "true"),
    ("save_on_each_node", "checkpoints go to one directory that all nodes share", "false"),
    ("enable_jit_checkpoint", "a signal always saves a checkpoint", "true"),
    ("ignore_data_skip", "a resumed run continues with the next batch", "false"),
    ("restore_callback_states_from_checkpoint", "a resumed run keeps its count of evaluations", "true"),
    ("push_to_hub* hub_*", "upload OUTPUT_DIR/hf yourself (`hf upload`)", "false"),
    ("logging_strategy", "give --logging-steps", "steps"),
    ("logging_first_step", "--logging-steps 1, the default, logs every step", "false"),
    ("logging_dir", "metrics are in OUTPUT_DIR (--output-dir)", ""),
    ("wandb_* mlflow_* comet_* swanlab_* trackio_* project", _TRACKERS, "false"),
    ("plot_loss", "OUTPUT_DIR/report.html shows the losses", "true"),
    ("include_num_input_tokens_seen include_tokens_per_second", "OUTPUT_DIR/metrics.jsonl counts tokens", "true all"),
    ("log_on_each_node log_level log_level_replica disable_tqdm logging_nan_inf_filter",
     "--logging-steps and --verbose set what the log shows", ""),
    ("loss_watchdog_threshold loss_watchdog_patience", "--on-nonfinite says what a NaN does", ""),
    ("debug", "give --detect-anomaly or --debug-ranks", "false"),
)  # fmt: skip
"""Keys without a setting of the same meaning: for `expertmesh.Trainer` too, where it refuses them (see
`training.api.trainer_arguments`)."""


_SWITCHED = {"1": "true", "0": "false", "true": "true", "false": "false"}
"""Values of a key that is switched on or off."""


class Default(NamedTuple):
    """What a setting is in another tool whose file leaves it out, where that is something else than here.

    Attributes:
        setting: by its name here. value: of its flag; "2 lora_rank" for twice that setting; empty: the model's own.
        beside: settings and keys that say it in its place.
        adapts: in runs of adapters alone, or in all others; None: in any.
    """

    setting: str
    value: str
    beside: str = ""
    adapts: bool | None = None

    def words(self, tool: str) -> str:
        """What to do where a file of the tool leaves it out."""
        has = self.value or "the model's own"
        return f"{tool} has {has} by default; give {' '.join(filter(None, (flag_of(self.setting), self.value)))}"


class OtherDefaults(NamedTuple):
    """A tool's. keys: that no other one has."""

    keys: str
    defaults: Sequence[Default]


OTHER_DEFAULTS: dict[str, OtherDefaults] = {
    "LLaMA-Factory": OtherDefaults(
        "stage finetuning_type cutoff_len dataset_dir overwrite_cache val_size neat_packing",
        (
            # transformers' TrainingArguments
            Default("num_train_epochs", "3", beside="max_steps"),
            # hparams/data_args.py
            Default("max_seq_length", "2048"),
            # model/patcher.py
            Default("bf16", "", beside="fp16"),
            # hparams/finetuning_args.py
            Default("adapter", "lora"),
            Default("lora_rank", "8", adapts=True),
            Default("lora_targets", "all-linear", adapts=True),
            Default("lora_alpha", "2 lora_rank", adapts=True),
        ),
    ),
    "ms-swift": OtherDefaults(
        "tuner_type train_type split_dataset_ratio freeze_vit freeze_aligner rlhf_type",
        (
            # trainers/arguments.py
            Default("num_train_epochs", "3", beside="max_steps"),
            Default("lr_scheduler_type", "cosine"),
            Default("weight_decay", "0.1"),
            Default("adam_beta2", "0.95"),
            Default("router_aux_loss_coef", "0.0"),
            Default("per_device_train_batch_size", "1"),
            Default("global_batch_size", "16", beside="gradient_accumulation_steps"),
            # arguments/base_args/template_args.py, arguments/base_args/model_args.py
            Default("truncation", "drop"),
            Default("max_seq_length", ""),
            Default("bf16", "", beside="fp16"),
            # arguments/sft_args.py
            Default("learning_rate", "0.0001", adapts=True),
            Default("learning_rate", "1e-05", adapts=False),
            # arguments/tuner_args.py
            Default("adapter", "lora"),
            Default("lora_rank", "8", adapts=True),
            Default("lora_targets", "all-linear", adapts=True),
            Default("lora_dropout", "0.05", adapts=True),
        ),
    ),
    "axolotl": OtherDefaults(
        "base_model sequence_len num_epochs sample_packing val_set_size lora_target_linear excess_length_strategy",
        (
            # utils/schemas/training.py
            Default("lr_scheduler_type", "cosine"),
            Default("per_device_train_batch_size", "1"),
            # core/builders/base.py
            Default("warmup_ratio", "0.03", beside="warmup_steps"),
            # utils/schemas/config.py
            Default("max_seq_length", "512"),
            Default("truncation", "drop", beside="pretraining_dataset"),
            Default("bf16", "true", beside="fp16 float16"),
        ),
    ),
}
"""Of the settings that decide what is trained: as LLaMA-Factory 0.9.5, ms-swift 4.6.0 and axolotl 0.19.0 have them, in
which a LoRA has no rank, alpha or targets by default."""


def advice_for(name: str) -> str:
    """What to do instead of giving a key that is in the table above."""
    row = _row(name, exactly=False)
    assert row is not None, name
    return row[0]


def _row(name: str, exactly: bool) -> tuple[str, frozenset[str]] | None:
    """What to do instead of giving a key, and its values that ask for what is done anyway.

    Args:
        exactly: whether the table must have the name itself, not a pattern for it.
    """
    for names, answer, accepted in WITHOUT_EQUIVALENT:
        if name in names.split() if exactly else any(fnmatchcase(name, pattern) for pattern in names.split()):
            return answer if "give " in answer else f"{answer}; leave it out", frozenset(accepted.split())
    return None


class OtherTools:
    """What other tools call a parser's settings, and what to give instead of their keys and values.

    Args:
        settings: by their names.
        tables: what stands beside them: by a setting, the names, between spaces, that other tools have for it and its
            values; or by flags to give here, none for what is done anyway, the names that ask for it where they are
            switched on, and NAME=VALUE for those that do so by a value, which may be a pattern. NAME may be a
            setting's, for all its names.
    """

    def __init__(self, settings: Mapping[str, argparse.Action], tables: Iterable[Mapping[str, str]]):
        self.settings = settings
        self.same: dict[str, argparse.Action] = {}
        self.asking: dict[str, list[tuple[str, str]]] = {}
        for here, theirs in (row for table in tables for row in table.items()):
            for word in theirs.split():
                name, _, value = word.partition("=")
                if here in settings:
                    self.same[name] = settings[here]
                else:
                    self.asking.setdefault(name, []).append((value or "true", here))

    def answer(self, name: str, values: Sequence[str], *, exactly: bool) -> str | None:
        """What to do instead of giving another tool's flag, with underscores in its name.

        Args:
            values: as written; a switch without one has "true".
            exactly: whether the name itself must be known, not a pattern for it.

        Returns: None: no tool known here has it; empty: its values ask for nothing but what is done anyway.
        """
        name = name.lower()
        plain = [_plain(value) for value in values if value]
        if name in self.same or name in self.asking:
            said = [self._of_value(name, value) for value in plain or ["" if values else "true"] if value]
            return "; ".join(dict.fromkeys(filter(None, said)))
        row = _row(name, exactly)
        if row is None:
            return None
        advice, accepted = row
        return "" if values and accepted.issuperset(plain) else advice

    def contradicted(self, name: str, given: Mapping[str, Any]) -> list[str]:
        """Those of the settings given that another tool's flag contradicts, whose value asks for no other than their
        defaults."""
        name = name.lower()
        action = self.same.get(name)
        if action is not None:
            return [action.dest] if given.get(action.dest, action.default) != action.default else []
        asked = [flags for _, flags in self.asking.get(name, ()) if flags and _have(given, flags)]
        # the others are what the last one needs
        last = [[word for word in flags.split() if word.startswith("--")][-1] for flags in asked]
        return [flag[2:].replace("-", "_") for flag in last]

    def other_defaults(self, written: Mapping[str, str], given: Mapping[str, Any]) -> list[tuple[str, Default]]:
        """What a file of another tool's leaves out and is something else by default there, with the tool.

        Args:
            written: its keys and values.
            given: the settings that the file and flags give.
        """
        named = {self.same[name].dest if name in self.same else name: value for name, value in written.items()}
        adapts = str(given.get("adapter", named.get("adapter", "lora"))) in ("lora", "qlora")
        said = []
        for tool, (keys, defaults) in OTHER_DEFAULTS.items():
            if written.keys().isdisjoint(keys.split()):
                continue
            values: dict[str, Any] = {}
            for default in defaults:
                if default.adapts not in (None, adapts):
                    continue
                number, _, factor = default.value.partition(" ")
                value = f"{float(number) * float({**values, **given}[factor]):g}" if factor else default.value
                values[default.setting] = value
                here = str(self.settings[default.setting].default).removesuffix(".0").lower()
                is_left_out = {default.setting, *default.beside.split()}.isdisjoint({*named, *given})
                if is_left_out and value != here:
                    said.append((tool, default._replace(value=value)))
        return said

    def answer_to_value(self, name: str, value: str) -> str:
        """What to give instead of another tool's value of a setting; empty: unknown."""
        if (flags := self._asked(name, _plain(value))) is not None:
            return f"give {flags}" if flags else LEAVE_OUT
        if name.endswith("_steps") and re.fullmatch(r"0?\.\d+", value):
            return "give a number of steps, not a fraction of all"
        return ""

    def flags_for(self, name: str, values: Sequence[str]) -> list[str] | None:
        """The words of a command line that ask for what a name with these values asks for; none: it is done anyway.

        Args:
            name: another tool's, or a setting's own.

        Returns: None: no words do, or somebody has to choose, or to fill one in.
        """
        action = self.same.get(name) or self.settings.get(name)
        words: list[str] = []
        own: list[str] = []
        for value in values or ["true"]:
            flags = self._asked(action.dest if action else name, _plain(value))
            if flags is not None:
                words += flags.split()
            elif action is not None:
                own.append(value)
            elif _plain(value) not in _SWITCHED or name not in self.asking:
                return None
        if any(word.isupper() for word in words):
            return None
        return [*words, action.option_strings[0], *own] if action is not None and own else words

    def _asked(self, name: str, value: str) -> str | None:
        """The flags that a value of a name asks for."""
        if name not in self.settings:
            value = _SWITCHED.get(value, value)
        return next((flags for pattern, flags in self.asking.get(name, ()) if fnmatchcase(value, pattern)), None)

    def _of_value(self, name: str, value: str) -> str:
        """What to do instead of giving a name this value; empty: nothing."""
        action = self.same.get(name)
        flags = self._asked(action.dest if action else name, value)
        if flags is not None:
            return flags and f"give {flags}"
        if action is None:
            return "" if value in _SWITCHED else f"give {self.asking[name][0][1]}"
        flag = action.option_strings[0]
        if isinstance(action, Switch) and value in ("true", "false"):
            off = f"--no-{flag[2:]}"
            return "" if value == str(action.default).lower() else f"give {flag if value == 'true' else off}"
        choices = list(map(str, action.choices or ()))
        taken = action.type(value) if choices and callable(action.type) else value
        if taken in choices:
            return "" if taken == action.default else f"give {flag} {taken}"
        return f"give {flag}" + (f": {', '.join(choices[:-1])} or {choices[-1]}" if choices else "")


def _have(given: Mapping[str, Any], flags: str) -> bool:
    """Whether settings have what these flags would give, any value where one is in capitals."""
    for flag, value in pairwise([*flags.split(), "--"]):
        found = given.get(flag[2:].replace("-", "_"))
        has_it = value in ",".join(found).split(",") if isinstance(found, list) else str(found) == value
        if flag.startswith("--") and not (has_it or (found and (value.isupper() or value[:2] == "--"))):
            return False
    return True


def _plain(value: str) -> str:
    """A value as the tables write it."""
    if value not in ("0", "1"):
        with suppress(argparse.ArgumentTypeError):
            return str(truth_of(value)).lower()
    return "".join(value.split()).lower().replace("'", '"')
