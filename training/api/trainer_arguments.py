"""What becomes of each training argument of transformers and trl when their Trainers run on an engine.

An argument is heeded, or refused by name, or listed as without effect and warned of where it is set. `heeded_arguments`
sees to it. A field that a later release adds is in none of these tables: a test over the fields of the installed
classes then fails, and a user who sets it is warned.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ...moe.util.errors import ExpertMeshError
from ..config.other_tools import advice_for
from ..config.train_config import SETTINGS, TrainConfig, read_by


def _of_load(flag: re.Match[str]) -> str:
    """A flag as the argument that it is of `expertmesh.load`."""
    return flag[0][2:].replace("-", "_")


HEEDED: dict[str, tuple[str, ...]] = {
    "what `expertmesh.load` reads where there is no Trainer": (*(read_by("load") - read_by("Trainer")),),
    "Trainer's loop": (
        *("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("seed", "data_seed", "ignore_data_skip"),
    ),
    "the data loaders": (
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "train_sampling_strategy", "length_column_name"),
    ),
    "the logs and trackers": (
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
        *("include_num_input_tokens_seen", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "skip_memory_metrics",
    ),
    "evaluations, those with metrics by transformers' own loop": (
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "eval_accumulation_steps"),
        *("eval_do_concat_batches", "eval_use_gather_object"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "checkpoints": (*("save_strategy", "save_steps", "restore_callback_states_from_checkpoint"),),
    "uploads to the hub": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        "hub_revision",
    ),
    "trl's preparation of data": (
        *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "shuffle_dataset", "max_length"),
        *("truncation_mode", "packing_strategy", "completion_only_loss", "assistant_only_loss", "eos_token"),
        *("pad_token", "trust_remote_code"),
    ),
    "the engine's balance of experts": ("router_aux_loss_coef",),
    "what computes the loss": (
        *("loss_type", "label_smoothing_factor", "average_tokens_across_devices", "loss_weights", "ld_alpha"),
        *("label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "beta"),
        *("precompute_ref_log_probs", "precompute_ref_batch_size"),
    ),
}
"""By what -> the arguments that it heeds, whatever their value."""

_OF_ANY_RUN = (
    *("use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha", "torch_empty_cache_steps", "fsdp"),
    *("fsdp_config", "deepspeed", "save_on_each_node", "sync_ref_model", "ref_model_mixup_alpha"),
    *("ref_model_sync_steps", "pad_to_multiple_of"),
)
"""Arguments that `train_ep.py` refuses, too."""

REFUSED: dict[str, str] = {
    "fp16": "give bf16=True to expertmesh.load",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "evaluations compute as training does; give bf16=True to expertmesh.load",
    ),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), "give compile=True to expertmesh.load"
    ),
    "optim_args": "give the optimizer's settings to expertmesh.load",
    "optim_target_modules": "give adapter='lora' or an optim of matrices to expertmesh.load, or leave it out",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "parallelism_config": "give ep_size to expertmesh.load",
    "debug": "give detect_anomaly=True to expertmesh.load",
    "enable_jit_checkpoint": "ranks get a signal at different steps, but save together; give save_steps, or use "
    "train_ep.py, which saves at a scheduler's signal",
    "model_init_kwargs": "the model is loaded already; give its settings to expertmesh.load",
    "use_transformers_continuous_batching": "the engine generates, with all its ranks, or vLLM with use_vllm",
    "cast_lm_head_to_fp32": "the head computes in the engine's dtype; leave out its bf16 for fp32",
    **{name: re.sub(r"--[a-z-]+", _of_load, advice_for(name)) for name in _OF_ANY_RUN},
}
"""Arguments that are refused unless they are left out, and what to do instead."""

BY_VALUE: dict[str, str] = {
    "bf16": "has the engine's value, or the class's default",
    "tf32": "has the engine's value",
    "optim": "is the engine's, or the default",
    "activation_checkpointing": "has the engine's value, or the class's default",
    "activation_checkpointing_kwargs": "is {'use_reentrant': False}",
    "gradient_checkpointing": "has the engine's value, or the class's default",
    "gradient_checkpointing_kwargs": "is {'use_reentrant': False}",
    "activation_offloading": "the engine has offload_activations",
    "full_determinism": "the engine is deterministic",
    "use_cpu": "chooses the engine's device",
    "ddp_backend": "is the backend of the engine's device",
    "ddp_timeout": "has the engine's value, or the class's default",
    "packing": "the engine has packing, or packing_strategy is 'wrapped'",
    "eval_packing": "the engine has packing, or packing_strategy is 'wrapped'",
    "padding_free": "the engine has packing",
    "save_only_model": "load_best_model_at_end is off",
    "accelerator_config": "is about data loading, and has neither dispatch_batches nor even_batches=False",
    "label_names": "is ['labels']",
    "disable_dropout": "the engine has no lora_dropout",
    "chat_template_path": "is a .jinja file",
    "vllm_mode": "is 'server', with use_vllm",
}
"""Arguments that are heeded where this is so, and refused where it is not."""

WITHOUT_EFFECT: dict[str, str] = {
    "use_cache": "no forward of training or evaluation keeps a cache of keys and values",
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "gradients are not reduced by DistributedDataParallel",
    ),
}
"""Arguments without effect, and why; who sets one is warned."""

FOR_SCRIPTS = ("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank")
"""Arguments that no Trainer reads: scripts of transformers do (`trainer.train(arguments.resume_from_checkpoint)`)."""

_WRAPPED = "wrapped"
_TEMPLATES = (".jinja", ".j2")


def heeded_arguments(
    args: Any, config: TrainConfig, device: torch.device, tell: Callable[[str], object], has_own_loss: bool = False
) -> Any:
    """A copy of the training arguments, without what the engine has decided.

    Args:
        args: `TrainingArguments`, or those of a class built on them.
        config: the engine's settings.
        device: the engine's.
        tell: is told of each argument that is set and has no effect.
        has_own_loss: whether the Trainer's class computes the loss, and so reads the arguments that it adds.

    Raises:
        ExpertMeshError: they are no training arguments, or some cannot be heeded: each is named, with what to do.
    """
    if not isinstance(args, transformers.TrainingArguments):
        raise ExpertMeshError(
            f"args is a {type(args).__name__}: give transformers' TrainingArguments, or those of the Trainer's class"
        )
    problems: dict[str, list[str]] = {}
    for name, value, instead in (*_refused(args), *_by_value(args, config, device)):
        problems.setdefault(instead, []).append(f"{name}={_shown(value)}")
    if problems:
        said = "; ".join(f"{', '.join(names)}: {instead}" for instead, names in problems.items())
        raise ExpertMeshError(f"training arguments that an engine cannot use: {said}")
    for name, why in WITHOUT_EFFECT.items():
        if getattr(args, name, None) != _default(args, name):
            tell(f"{name} of the training arguments has no effect: {why}")
    for name in unknown_fields(type(args), ("transformers",) if has_own_loss else ("transformers", "trl")):
        if getattr(args, name) != _default(args, name):
            tell(
                f"{name} of the training arguments is unknown to this release of expertmesh and may have "
                f"no effect; transformers {transformers.__version__} or trl is newer"
            )
    args = copy.copy(args)
    # the engine's own was chosen when the model was loaded, and theirs would take its place
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)
            setattr(args, f"{name}_kwargs", None)
    # of data without a length, accelerate would have one rank read the batches of all, which must then be equally long
    args.accelerator_config = replace(args.accelerator_config, dispatch_batches=False)
    args._n_gpu = min(args.n_gpu, 1)
    if has_own_loss:  # no autocast: modules compute in the engine's dtype
        args.bf16, args.mixed_precision = False, "no"
    return args


def overruled_settings(args: Any, config: TrainConfig) -> list[str]:
    """Settings that `expertmesh.load` was given and that Trainer takes from its arguments, where these say otherwise.

    Args:
        config: the engine's settings as it was loaded.
    """
    said = []
    # of what only train_ep.py reads, `expertmesh.load` has told
    warned_of = SETTINGS.keys() - read_by("load") - vars(args).keys()
    for name in (name for name in SETTINGS if name not in read_by("Trainer") | warned_of):
        given, asked = getattr(config, name), getattr(args, name, None)
        if given not in (_default(config, name), asked, json.dumps(asked)):
            said.append(f"{name}={_shown(given)} (there {_shown(asked)})")
    return said


def known_fields() -> dict[str, str]:
    """The fate of every argument in these tables: heeded, by value, refused, without effect, for scripts."""
    heeded = [name for names in HEEDED.values() for name in names]
    fates = {
        "heeded": heeded, "by value": BY_VALUE, "refused": REFUSED,
        "without effect": WITHOUT_EFFECT, "for scripts": FOR_SCRIPTS,
    }  # fmt: skip
    return {name: fate for fate, names in fates.items() for name in names}


def unknown_fields(kind: type, packages: Collection[str] = ("transformers", "trl")) -> list[str]:
    """Fields that a class of training arguments has from these packages, and that are in no table."""
    known = known_fields()
    theirs = [each for each in kind.__mro__ if each.__module__.partition(".")[0] in packages]
    declared = {name for each in theirs for name in vars(each).get("__annotations__", {})}
    return [field.name for field in fields(kind) if field.name in declared and field.name not in known]


def _refused(args: Any) -> Iterator[tuple[str, Any, str]]:
    """(name, value, what to do) of arguments that were set and never are heeded."""
    for name, instead in REFUSED.items():
        value, default = getattr(args, name, None), _default(args, name)
        if (value or default) and value != default:
            yield name, value, instead


def _by_value(args: Any, config: TrainConfig, device: torch.device) -> Iterator[tuple[str, Any, str]]:
    """Likewise of those that are heeded with some values."""
    for name, has in (("bf16", config.bf16), ("gradient_checkpointing", config.gradient_checkpointing != "none")):
        value = bool(getattr(args, name))
        # a class's default, of which nobody need know, says nothing
        if value not in (has, _default(args, name)):
            asked = "'full' or 'selective'" if name == "gradient_checkpointing" else "True"
            loaded = f"the engine was loaded with {name}; leave one of them out"
            yield name, value, f"give {name}={asked} to expertmesh.load" if value else loaded
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    if others := {name: value for name, value in kwargs.items() if (name, value) != ("use_reentrant", False)}:
        instead = "give gradient_checkpointing='full' or 'selective' to expertmesh.load, and offload_activations=True"
        yield "gradient_checkpointing_kwargs", others, instead
    if args.tf32 not in (None, config.tf32):
        loaded = "the engine was loaded with tf32=True; leave one of them out"
        yield "tf32", args.tf32, "give tf32=True to expertmesh.load" if args.tf32 else loaded
    optim = getattr(args.optim, "value", args.optim)
    if optim not in (_default(args, "optim"), config.optim, *config.optimizer_entry.aliases):
        yield "optim", optim, "give optim to expertmesh.load"
    if getattr(args, "activation_offloading", False) and not config.offload_activations:
        instead = "give offload_activations=True and gradient_checkpointing='full' to expertmesh.load"
        yield "activation_offloading", True, instead
    if args.full_determinism and not config.deterministic:
        yield "full_determinism", True, "give deterministic=True to expertmesh.load, before a kernel is chosen"
    if args.device.type != device.type:
        instead = (
            f"the engine computes on {device.type} and Trainer on {args.device.type}; give use_cpu to both or none"
        )
        yield "use_cpu", args.use_cpu, instead
    backends = ("nccl", "cpu:gloo,cuda:nccl") if device.type == "cuda" else ("gloo",)
    if args.ddp_backend not in (None, *backends):
        yield "ddp_backend", args.ddp_backend, f"expertmesh.load joins the process group, with {backends[-1]}"
    if args.ddp_timeout not in (_default(args, "ddp_timeout"), config.ddp_timeout):
        yield "ddp_timeout", args.ddp_timeout, "give ddp_timeout to expertmesh.load"
    for name in ("packing", "eval_packing", "padding_free"):
        packs = name == "padding_free" or getattr(args, "packing_strategy", _WRAPPED) != _WRAPPED
        if getattr(args, name, False) and packs and not config.packing:
            yield name, True, "give packing=True to expertmesh.load, so that samples of one sequence stay apart"
    loading = args.accelerator_config
    if not loading.even_batches:
        yield "accelerator_config", {"even_batches": False}, "every rank takes part in every step; leave it out"
    if loading.dispatch_batches:
        yield "accelerator_config", {"dispatch_batches": True}, "each rank reads its own batches; leave it out"
    if set(loading.gradient_accumulation_kwargs or ()) - {"num_steps"}:
        found = {"gradient_accumulation_kwargs": loading.gradient_accumulation_kwargs}
        yield "accelerator_config", found, "give gradient_accumulation_steps"
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model", True, "leaves no checkpoint for load_best_model_at_end; leave one of them out"
    if args.label_names not in (None, [], ["labels"]):
        yield "label_names", args.label_names, "the column of labels is called labels; leave it out"
    if getattr(args, "disable_dropout", False) and config.lora_dropout and config.adapter != "none":
        yield "disable_dropout", True, "the engine was loaded with lora_dropout; leave one of them out"
    if getattr(args, "use_vllm", False) and args.vllm_mode != "server":
        yield "vllm_mode", args.vllm_mode, "vLLM in the ranks' own processes was never tried; give 'server'"
    template = getattr(args, "chat_template_path", None)
    if template is not None and not (str(template).endswith(_TEMPLATES) and Path(template).is_file()):
        instead = "is not a .jinja file; write the tokenizer's template to one"
        yield "chat_template_path", template, instead


def _default(args: Any, name: str) -> Any:
    """What an argument is where it is left out."""
    field = next((field for field in fields(args) if field.name == name), None)
    if field is None:
        return None
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if name == "bf16" and default is None:
        return not args.fp16  # of trl's classes
    if name == "gradient_checkpointing":
        return bool(default)
    # trl's "auto" has become a number for one kind of device, and None elsewhere
    return None if name == "pad_to_multiple_of" else default


def _shown(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    shown = ", ".join(repr(getattr(each, "value", each)) for each in values)
    return f"[{shown}]" if isinstance(value, list) else shown
