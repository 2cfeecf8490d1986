"""Flags and keys of other training tools, and what to give here instead: those of transformers' TrainingArguments,
trl's configs, axolotl, LLaMA-Factory, ms-swift, Megatron-LM, accelerate and DeepSpeed; and those that are gone here.

A name may be a pattern with *. A value in which another tool asks for what a run here does in any case is no error.
"""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice

from ...moe.dispatch.dispatcher_entries import DISPATCHER_ENTRIES
from ...moe.util.parser import truth_of
from .optimizers import OPTIMIZERS

_SHARDED = (
    "FSDP2 always shards parameters, gradients and optimizer state; leave it out (see "
    "--dense-shard, --reshard-after-forward and --offload)"
)
_NEVER = "has no equivalent here; leave it out"
_ADAPTER = "give --adapter lora (leave it out for full fine-tuning)"
_QLORA = "give --adapter lora --base-dtype nf4 (fp8 for 8 bits)"
_EVALUATION = (
    "evaluation runs if --eval-dataset or --eval-ratio is given, every --eval-steps N, or "
    "after every epoch; leave it out"
)
_LOADING = "batches are made without a data loader's workers; leave it out"
_HUB = "upload OUTPUT_DIR/hf yourself (`hf upload`); leave it out"
_SFT = "runs here are supervised fine-tuning; leave it out"
TORCHRUN = "set the number of processes and nodes with torchrun's --nproc-per-node and --nnodes"
_DEFAULT_TOKENS = "change special tokens in the tokenizer and give its directory as --tokenizer"
_TRACKERS = "give --report-to and --run-name; set everything else with the tracker's environment variables"

_ROWS: tuple[tuple[str, str, str], ...] = (
    # names, what to do, values that ask for nothing else than what is done anyway
    # ---- the model ----
    ("base_model model_name model_path pretrained_model_name_or_path model_id load", "give --model", ""),
    ("tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer_path", "give --tokenizer", ""),
    (
        "model_revision revision revision_of_model",
        "download that revision (`hf download --revision`) and give its directory as --model",
        "main",
    ),
    ("trust_remote_code", "expertmesh never runs a checkpoint's code; leave it out", "false"),
    (
        "dtype torch_dtype model_dtype mixed_precision",
        "give --bf16 to compute in bfloat16; without it, in float32 (see --base-dtype for frozen weights)",
        "",
    ),
    ("fp16 float16 half", "float16 is not supported; give --bf16", "false no"),
    ("fp32 float32", "runs compute so without --bf16; leave both out", ""),
    ("bfloat16", "give --bf16", "false"),
    ("fp8 fp8_format fp8_recipe", "give --bf16 --expert-precision fp8 --dense-precision fp8", "false"),
    ("bf16_full_eval fp16_full_eval", "evaluation uses the precision of training (--bf16); leave it out", "false"),
    ("model_type base_model_config config_name processor_type tokenizer_type *_derived_model", _NEVER, "null auto"),
    ("model_init_kwargs model_kwargs overrides_of_model_config config_overrides config_kwargs", _NEVER, "{}"),
    ("use_cache low_cpu_mem_usage", "has no effect in training; leave it out", "true false"),
    ("use_fast_tokenizer tokenizer_use_fast", "runs use the checkpoint's fast tokenizer; leave it out", "true"),
    (
        "resize_token_embeddings_to_32x added_tokens_overrides",
        _NEVER,
        "false",
    ),
    ("tokens", "give --add-tokens", "[]"),
    ("new_special_tokens add_special_tokens", f"{_DEFAULT_TOKENS} with --resize-vocab", "[] false"),
    ("special_tokens eos_token pad_token bos_token split_special_tokens", _DEFAULT_TOKENS, "{} [] false"),
    ("token hf_token hf_hub_token hub_token use_auth_token", "log in with `hf auth login` or set HF_TOKEN", ""),
    ("cache_dir hf_cache_dir", "set HF_HOME", ""),
    ("yarn rope_theta rope_factor", "give --rope-scaling yarn:4", ""),
    # ---- attention and kernels ----
    (
        "flash_attention flash_attn flash_attention_2 use_flash_attn use_flash_attention_2 attn_impl "
        "attention_backend sdp_attention sdpa_attention eager_attention flex_attention xformers_attention",
        ("give --attn-implementation, or leave it out: auto uses a flash-attention kernel if one fits"),
        "false auto",
    ),
    (
        "use_liger_kernel use_liger enable_liger_kernel liger_kernel_config liger_* cut_cross_entropy "
        "cross_entropy_loss_fusion cross_entropy_fusion_impl",
        "leave it out: on a GPU, runs use liger-kernel's loss, norms and rotary positions if it "
        "is installed (pip install 'expertmesh[gpu]') and computes the same; --cross-entropy "
        "chooses the loss",
        "",
    ),
    ("use_unsloth use_unsloth_gc unsloth_* lora_mlp_kernel lora_qkv_kernel lora_o_kernel shift_attn", _NEVER, "false"),
    (
        "torch_compile_backend torch_compile_mode torchdynamo",
        "--compile has no other settings; leave it out",
        "inductor",
    ),
    ("plugins", _NEVER, "[]"),
    ("neftune_noise_alpha noisy_embedding_alpha", _NEVER, "0 0.0"),
    ("moe_grouped_gemm use_grouped_mm experts_implementation", "give --expert-kernel, or leave it out", "true"),
    # ---- data ----
    (
        "dataset_name datasets data data_path data_files train_file train_files train_data dataset_dir "
        "dataset_prepared_path dataset_path data_dir pretraining_dataset",
        "give --dataset with the files, directories or hub ids; NAME:WEIGHT mixes",
        "",
    ),
    ("test_datasets validation_file eval_data eval_file val_dataset", "give --eval-dataset", ""),
    ("val_set_size val_size split_dataset_ratio validation_split_percentage", "give --eval-ratio", "0 0.0"),
    ("dataset_train_split train_split", "give --dataset-split", "train"),
    ("dataset_test_split eval_split", "give --eval-dataset-split", "test"),
    (
        "dataset_processes preprocessing_num_workers dataset_map_num_proc",
        "give --dataset-num-proc, or leave it out: the default follows the size of the data",
        "",
    ),
    (
        "max_length sequence_len cutoff_len model_max_length max_seq_len seq_length seq_len block_size context_length",
        "give --max-seq-length",
        "",
    ),
    (
        "truncation_mode truncation_strategy",
        "samples keep their first --max-seq-length tokens; leave it out",
        "keep_start",
    ),
    ("excess_length_strategy", "samples are cut to --max-seq-length tokens; leave it out", "truncate"),
    (
        "sample_packing neat_packing packing_strategy padding_free group_sequences",
        "give --packing; packed samples never attend to each other",
        "false",
    ),
    ("eval_packing eval_sample_packing", "--packing also packs evaluation data; leave it out", ""),
    (
        "pad_to_sequence_len pad_to_multiple_of pad_to_max_length padding",
        "expertmesh pads as its kernels need; leave it out",
        "false auto",
    ),
    (
        "train_sampling_strategy",
        "--seed shuffles the samples; give --group-by-length to batch by length",
        "random",
    ),
    ("length_column_name dataset_batch_size num_of_sequences chars_per_token", _NEVER, "length"),
    (
        "shuffle_dataset shuffle_merged_datasets dataset_shuffle",
        "--seed shuffles the samples every epoch; leave it out",
        "true",
    ),
    ("data_seed sampling_seed dataset_seed", "give --seed, which also orders the data", ""),
    ("dataset_text_field", "give --text-column", ""),
    ("dataset_streaming streaming_*", "give --streaming to read data while training", "false"),
    ("buffer_size", "give --shuffle-buffer with --streaming", ""),
    ("max_samples max_train_samples max_eval_samples", "give --max-steps, or a --dataset with fewer samples", ""),
    ("mix_strategy interleave_probs interleave_prob", "give --dataset NAME:WEIGHT", "concat"),
    ("tokenized_path overwrite_cache load_from_cache_file dataset_kwargs remove_unused_columns", _NEVER, ""),
    ("chat_template_path chat_template_jinja custom_chat_template", "give --chat-template with a file", ""),
    ("template", "give --chat-template, or leave it out: the tokenizer's own is used", ""),
    (
        "default_system_message system_prompt default_system system",
        "give --system-column, or write it into the data",
        "",
    ),
    (
        "completion_only_loss assistant_only_loss roles_to_train train_on_eos train_on_inputs train_on_prompt "
        "loss_scale",
        "give --train-on: all, assistant (the default), last or final",
        "",
    ),
    ("mask_history", "give --train-on last", "false"),
    ("ignore_pad_token_for_loss", "padding has no loss; leave it out", "true"),
    ("dataloader_* num_workers", _LOADING, "true 0"),
    # ---- layout ----
    (
        "expert_model_parallel_size expert_parallel_size expert_parallel_degree expert_parallelism ep",
        "give --ep-size",
        "",
    ),
    ("expert_tensor_parallel_size", "--tp-size does not divide experts; leave it out", "1"),
    ("tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp", "give --tp-size", ""),
    ("pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp", "give --pp-size", ""),
    (
        "context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size "
        "ulysses_sequence_parallel_size cp",
        "give --cp-size",
        "",
    ),
    ("sequence_parallel", "--tp-size 2 or more always splits sequences between layers; leave it out", "true"),
    (
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
        "give --pipeline-chunks, the stages per pipeline rank",
        "",
    ),
    (
        "data_parallel_size dp_shard_size dp_replicate_size data_parallel_shard_degree data_parallel_replicate_degree "
        "parallelism_config ddp",
        "the data-parallel size follows from the number of ranks and the other sizes; "
        "--dense-shard hybrid replicates non-expert parameters over it",
        "",
    ),
    ("moe_token_dispatcher_type moe_enable_deepep", "give --dispatch, or leave it out", "alltoall"),
    ("moe_shared_expert_overlap overlap_*", "give --overlap-chunks to overlap experts with the all-to-all", "false"),
    ("moe_expert_capacity_factor moe_capacity_factor capacity_factor", "no token is ever dropped; leave it out", ""),
    ("moe_permute_fusion use_distributed_optimizer gradient_accumulation_fusion", "always on; leave it out", "true"),
    ("fsdp fsdp_* use_fsdp deepspeed deepspeed_* use_deepspeed zero_stage zero3_* zero_*", _SHARDED, "false []"),
    ("offload_optimizer_device offload_param_device cpu_offload optimizer_cpu_offload", "give --offload", "none false"),
    ("ddp_backend", "GPUs use NCCL, CPUs gloo; leave it out", ""),
    ("ddp_*", "parameters are sharded, not in DDP; leave it out", "false"),
    (
        "num_processes num_machines machine_rank main_process_* multi_gpu nproc_per_node num_gpus gpus gpu gpu_ids "
        "devices device local_rank node_rank nnodes master_addr master_port num_nodes",
        TORCHRUN,
        "-1",
    ),
    ("config_file", "give --config with a YAML file of these flags; leave accelerate's out", ""),
    ("accelerator_config split_batches dispatch_batches", _NEVER, ""),
    ("no_cuda use_mps_device", "give --use-cpu", "false"),
    # ---- memory ----
    (
        "activation_checkpointing use_gradient_checkpointing recompute_granularity recompute_method "
        "recompute_num_layers recompute_modules",
        "give --gradient-checkpointing: none, full or selective",
        "",
    ),
    (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc",
        "recomputation is always non-reentrant; leave it out",
        '{"use_reentrant":false} false',
    ),
    ("disable_gradient_checkpointing", "give --gradient-checkpointing none", ""),
    (
        "activation_offloading activation_cpu_offload",
        "give --gradient-checkpointing full --offload-activations",
        "false",
    ),
    ("auto_find_batch_size", "give --per-device-train-batch-size; `plan` says what fits", "false"),
    ("torch_empty_cache_steps gpu_memory_limit skip_memory_metrics upcast_layernorm upcast_lmhead_output", _NEVER, ""),
    # ---- batch and schedule ----
    (
        "micro_batch_size batch_size train_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size",
        "give --per-device-train-batch-size, or --global-batch-size",
        "",
    ),
    ("eval_batch_size per_gpu_eval_batch_size", "give --per-device-eval-batch-size", ""),
    ("grad_accum_steps accumulate_grad_batches gradient_accumulation", "give --gradient-accumulation-steps", ""),
    ("num_epochs epochs max_epochs n_epochs num_train_epoch", "give --num-train-epochs", ""),
    ("train_iters total_steps num_steps max_train_steps num_training_steps", "give --max-steps", ""),
    ("lr", "give --learning-rate", ""),
    ("lr_scheduler lr_decay_style scheduler scheduler_type", "give --lr-scheduler-type", ""),
    (
        "min_lr min_lr_ratio cosine_min_lr_ratio cosine_constant_lr_ratio",
        """give --lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs '{"min_lr_rate": 0.1}'""",
        "",
    ),
    ("lr_warmup_fraction warmup_fraction warmup_proportion", "give --warmup-ratio", ""),
    ("lr_warmup_iters lr_warmup_steps num_warmup_steps", "give --warmup-steps", ""),
    ("average_tokens_across_devices", "the loss is a mean over all ranks' tokens; leave it out", "true"),
    ("label_smoothing_factor label_smoothing", "the loss is the cross-entropy of the tokens; leave it out", "0 0.0"),
    ("loss_type", "the loss is the cross-entropy of the tokens; leave it out", "nll chunked_nll"),
    # ---- optimizer ----
    ("optimizer optim_type optimizer_type", "give --optim", ""),
    (
        "optim_args optim_kwargs optim_target_modules",
        "give --adam-beta1, --adam-beta2, --adam-epsilon or --weight-decay",
        "",
    ),
    ("beta1", "give --adam-beta1", ""),
    ("beta2", "give --adam-beta2", ""),
    ("adam_eps epsilon", "give --adam-epsilon", ""),
    ("gradient_clipping clip_grad grad_clip max_norm gradient_clip_val", "give --max-grad-norm", ""),
    (
        "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini loraplus_* embedding_lr lr_groups "
        "relora_* muon_momentum",
        _NEVER,
        "false",
    ),
    # ---- experts ----
    ("moe_aux_loss_coef moe_aux_loss_coeff aux_loss_coef aux_loss_alpha", "give --router-aux-loss-coef", ""),
    ("output_router_logits", "give --router-aux-loss-coef", ""),
    ("moe_z_loss_coeff moe_z_loss_coef z_loss_coef", "give --router-z-loss-coef", ""),
    ("moe_router_bias_update_rate", "give --router-bias-update-rate", ""),
    ("moe_router_load_balancing_type", "give --router-aux-loss-coef or --router-bias-update-rate", ""),
    ("moe_router_*", "the model's config sets the router; leave it out", ""),
    ("ignore_bias_buffers", _NEVER, "false"),
    # ---- adapters ----
    (
        "use_peft use_lora finetuning_type train_type tuner_type tuner_backend peft_type peft peft_config",
        _ADAPTER,
        "full false",
    ),
    (
        "lora_target_modules lora_target lora_target_linear target_modules",
        "give --lora-targets: attention, experts, router, shared-experts, dense-mlp, or regular expressions",
        "",
    ),
    ("lora_target_parameters target_parameters", "give --lora-targets experts", ""),
    (
        "lora_modules_to_save additional_target",
        "give --modules-to-save: embed_tokens, lm_head, norms, router, or regular expressions",
        "[]",
    ),
    ("lora_task_type task_type", _SFT, "causal_lm"),
    ("lora_model_dir adapter_name_or_path adapter_path", "give --init-adapter", ""),
    ("peft_use_rslora lora_use_rslora", "give --use-rslora", "false"),
    ("use_dora peft_use_dora lora_use_dora", "DoRA is not supported; leave it out", "false"),
    (
        "load_in_4bit load_in_8bit quantization_bit quantization quantize qlora use_qlora quant_bits quant_method "
        "quantization_method quantization_config bnb_config_kwargs",
        _QLORA,
        "false",
    ),
    ("bnb_4bit_quant_type", "give --base-dtype nf4", "nf4"),
    (
        "use_bnb_nested_quant bnb_4bit_* bnb_* double_quantization llm_int8_*",
        "--base-dtype nf4 has no other settings; leave it out",
        "",
    ),
    (
        "lora_fan_in_fan_out lora_on_cpu lora_bias pissa_* init_lora_weights create_new_adapter peft_*",
        _NEVER,
        "false none",
    ),
    (
        "unfrozen_parameters freeze_* trainable_parameters unfreeze_* freeze_trainable_layers",
        "give --freeze with the parameters that are not trained",
        "[] false",
    ),
    ("merge_lora merge_adapter merge_and_unload", "give --merge", "false"),
    # ---- evaluation ----
    ("do_train", "the command always trains (--max-steps 0: does not); leave it out", "true"),
    (
        "do_eval do_predict eval_strategy evaluation_strategy evals_per_epoch eval_delay eval_on_start eval_interval "
        "eval_iters",
        _EVALUATION,
        "",
    ),
    (
        "metric_for_best_model",
        "the best checkpoint has the lowest evaluation loss; leave it out",
        "loss eval_loss",
    ),
    ("greater_is_better", "the best checkpoint has the lowest evaluation loss; leave it out", "false"),
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics "
        "batch_eval_metrics label_names include_inputs_for_metrics compute_accuracy do_bench_eval",
        "an evaluation computes only the loss; leave it out",
        "false",
    ),
    (
        "predict_with_generate do_causal_lm_eval eval_table_size",
        "give --generate-steps for sample generations",
        "false 0",
    ),
    ("eval_max_new_tokens eval_table_max_new_tokens max_new_tokens", "give --generate-max-new-tokens", ""),
    # ---- checkpoints ----
    ("output output_path save save_dir export_dir", "give --output-dir; the trained model is in OUTPUT_DIR/hf", ""),
    (
        "save_strategy saves_per_epoch save_interval",
        "checkpoints are saved every --save-steps N (0: never); leave it out",
        "steps",
    ),
    (
        "save_only_model",
        "the export at the end has only the model; give --save-steps 0 to save no checkpoints",
        "false",
    ),
    ("save_safetensors", "exports are always safetensors; leave it out", "true"),
    ("save_on_each_node", "all ranks write to one --output-dir; leave it out", "false"),
    ("enable_jit_checkpoint", "a signal always saves a checkpoint; leave it out", "true"),
    ("async_checkpointing", "give --async-save", ""),
    (
        "auto_resume_from_checkpoints resume_checkpoint load_checkpoint ckpt_path",
        "give --resume auto, or a checkpoint's directory",
        "false",
    ),
    ("trust_checkpoint_owner", "was removed: any checkpoint can be read, and none can run code; leave it out", "false"),
    ("ignore_data_skip", "a resumed run continues with the next batch; leave it out", "false"),
    ("restore_callback_states_from_checkpoint", "a resumed run keeps its count of evaluations; leave it out", "true"),
    ("push_to_hub* hub_*", _HUB, "false"),
    # ---- logging ----
    ("logging_strategy", "give --logging-steps", "steps"),
    ("log_interval log_steps log_every_n_steps", "give --logging-steps", ""),
    ("logging_first_step", "--logging-steps 1, the default, logs every step", "false"),
    ("logging_dir", "metrics are in OUTPUT_DIR (--output-dir); leave it out", ""),
    ("use_tensorboard", "give --report-to tensorboard", "false"),
    ("use_wandb", "give --report-to wandb", "false"),
    ("wandb_* mlflow_* comet_* use_swanlab swanlab_* trackio_* use_mlflow use_comet project", _TRACKERS, "false"),
    ("plot_loss", "OUTPUT_DIR/report.html shows the losses; leave it out", "true"),
    (
        "include_num_input_tokens_seen include_tokens_per_second include_effective_tokens_per_second",
        "OUTPUT_DIR/metrics.jsonl counts tokens; leave it out",
        "true all",
    ),
    (
        "log_on_each_node log_level log_level_replica disable_tqdm logging_nan_inf_filter",
        "--logging-steps and --verbose set what the log shows; leave it out",
        "",
    ),
    # ---- debugging ----
    ("full_determinism", "give --deterministic", "false"),
    ("debug", "give --detect-anomaly or --debug-ranks", "false"),
    ("use_torch_profiler profile_steps profiler_steps", "give --profile with steps, as in 5-7", "false"),
    # ---- other kinds of training ----
    ("stage rl rlhf_type trl", _SFT, "sft"),
    ("reward_model ref_model pref_beta pref_loss beta num_generations reward_funcs", _SFT, ""),
    ("ray_* use_ray infer_backend vllm_* strict", _NEVER, "false"),
)

_VALUES = {
    ("bf16", "auto"): "give --bf16 true, or leave it out",
    ("tf32", "auto"): "give --tf32 true, or leave it out",
    ("adapter", "qlora"): _QLORA,
    ("adapter", "full"): "runs do so without --adapter",
    ("gradient_checkpointing", "unsloth"): "give --gradient-checkpointing full --offload-activations",
    ("gradient_checkpointing", "offload"): "give --gradient-checkpointing full --offload-activations",
    ("gradient_checkpointing", "offload_disk"): "give --gradient-checkpointing full --offload-activations",
    ("base_dtype", "int8"): "give --base-dtype fp8",
    ("base_dtype", "int4"): "give --base-dtype nf4",
    ("base_dtype", "4bit"): "give --base-dtype nf4",
    ("base_dtype", "8bit"): "give --base-dtype fp8",
    ("base_dtype", "bf16"): "give --base-dtype bfloat16",
    ("base_dtype", "fp32"): "give --base-dtype float32",
    ("train_on", "completion"): "give --train-on assistant",
    ("train_on", "inputs"): "give --train-on all",
    ("pipeline_schedule", "gpipe"): "give --pipeline-schedule 1f1b, which stores fewer micro-batches",
}
"""Values that other tools have for a setting, by its name."""


def answer(name: str, values: Sequence[str], *, exactly: bool) -> str | None:
    """What to do instead of giving another tool's flag, with underscores in its name.

    Args:
        values: as written; a switch without one has "true".
        exactly: whether the table must have the name itself, not a pattern for it.

    Returns: None: no tool known here has it; empty: its values ask for nothing but what is done anyway.
    """
    row = _row(name.lower(), exactly)
    if row is None:
        return None
    advice, accepted = row
    return "" if values and all(not value or _plain(value) in accepted for value in values) else advice


def answer_to_value(name: str, value: str) -> str:
    """What to give instead of another tool's value of a setting; empty: unknown."""
    if name == "optim":
        others = (other for entry in OPTIMIZERS.entries() for other in entry.other_tools)
        near = (other for other in others if any(fnmatchcase(value.lower(), name) for name in other.names.split()))
        return "".join(f"give {other.flags}" for other in islice(near, 1))
    if name.endswith("_steps") and re.fullmatch(r"0?\.\d+", value):
        return "give a number of steps, not a fraction of all"
    if name == "dispatch":
        same = (entry.name for entry in DISPATCHER_ENTRIES.entries() if value.lower() in entry.elsewhere)
        return "".join(f"give --dispatch {ours}" for ours in islice(same, 1))
    return _VALUES.get((name, value.lower()), "")


def rows() -> list[tuple[str, str, str]]:
    """The table, with what the optimizers' entries say of other tools' flags."""
    switches = (other for entry in OPTIMIZERS.entries() for other in entry.other_switches)
    return [*_ROWS, *((other.names, f"give {other.flags}", "false") for other in switches)]


def _row(name: str, exactly: bool) -> tuple[str, frozenset[str]] | None:
    """Advice and accepted values."""
    for names, advice, accepted in rows():
        if name in names.split() if exactly else any(fnmatchcase(name, pattern) for pattern in names.split()):
            return advice, frozenset(accepted.split())
    return None


def _plain(value: str) -> str:
    """A value as the table writes it."""
    if value not in ("0", "1"):
        with suppress(argparse.ArgumentTypeError):
            return str(truth_of(value)).lower()
    return "".join(value.split()).lower().replace("'", '"')
