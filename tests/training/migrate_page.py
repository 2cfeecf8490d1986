"""The page of other tools' keys; `python -m tests.pages` writes it."""

import re
from dataclasses import fields
from typing import Any

import transformers
import trl

from expertmesh.training.config.train_config import make_parser
from tests.training.flags_page import in_line

HEAD = """# Migrate from another tool

Train with a config of transformers, trl, axolotl, LLaMA-Factory, ms-swift or Megatron:

```sh
torchrun --nproc-per-node 8 train_ep.py --config theirs.yaml
```

1. One error names every key that is not [a flag here](../reference/flags.md), each in a line, with what to give
   instead, or why it has no counterpart; and what LLaMA-Factory, ms-swift and axolotl have by default that is
   something else here, such as LoRA. Flags and arguments of `expertmesh.load` are answered in the same way.
2. `python train_ep.py migrate theirs.yaml > ours.yaml` writes what it can: each setting with the key that it is from,
   those defaults that are something else here, and at the end, in comments, what is left to you. Defaults of
   transformers, trl and Megatron are not compared.
3. Look at the data with [`--preview`](prepare-data.md#look-at-what-the-model-sees). A list of tables, such as axolotl's
   `datasets`, becomes a list of files; their columns are found by name.

You can also [keep your Trainer](use-trainer-or-trl.md).

## What means something else here

- **Batch**: `--per-device-train-batch-size` is per rank or CP group; `--global-batch-size` sets [that of a
  step](choose-a-layout.md#the-batch-of-a-step).
- **Epoch**: no sequence is dropped or repeated. With `--packing`, a step counts packed sequences.
- **Length**: a sample keeps its first `--max-seq-length` tokens (1024), and is left out if no answer is left. ms-swift
  and axolotl leave out every longer sample.
- **Loss**: one mean over the target tokens of the global batch: of answers alone, unless you give `--train-on all`.
- **Packing**: packed samples never attend to each other. In LLaMA-Factory that is `neat_packing`.
- **Precision**: with `--bf16`, trained weights and optimizer state stay in fp32; `--optim adamw_bf16` holds both in
  bf16.
- **LoRA**: off without `--adapter lora`. Rank 16, alpha 32, no dropout, on attention and experts.
- **Learning rate**: 5e-5, falling linearly to 0, without warm-up.

## Keys

The commonest keys that have another name here. `python -m tests.pages` makes the list.

"""
GIVES = re.compile(r"`--[^`]*`($|[:,;]| and| or| with| `)")
"""An answer that says what to give, not why there is nothing to give."""
FLAG = re.compile(r"--[a-z][a-z0-9-]*( (\d+|NAME:WEIGHT|N|all|nf4|[a-z]+(_[a-z]+)+|'.*?'))?")
KEYS: dict[str, str] = {
    "axolotl": """
        base_model output_dir sequence_len micro_batch_size learning_rate optimizer=adamw_bnb_8bit,adamw_torch_fused
        optimizer=paged_adamw_8bit,paged_adamw_32bit bf16=auto,true datasets gradient_accumulation_steps lr_scheduler
        logging_steps num_epochs tf32 sample_packing warmup_ratio saves_per_epoch val_set_size attn_implementation
        gradient_checkpointing=true,offload weight_decay wandb_project wandb_entity evals_per_epoch adapter=lora,qlora
        lora_r lora_alpha dataset_prepared_path lora_dropout special_tokens resume_from_checkpoint load_in_4bit
        load_in_8bit lora_model_dir lora_target_modules plugins lora_target_linear model_type chat_template
        tokenizer_type gradient_checkpointing_kwargs fsdp_config fsdp_version pad_to_sequence_len eval_sample_packing
        strict trust_remote_code fp16 liger_rms_norm remove_unused_columns eot_tokens processor_type
        skip_prepare_dataset fsdp max_steps lora_mlp_kernel warmup_steps save_steps rl=dpo,ipo,kto rl_beta dpo_loss_type
        rpo_alpha kto_desirable_weight kto_undesirable_weight loss_watchdog_threshold quantize_moe_experts use_kernels
        seed activation_offloading deepspeed lora_modules_to_save flash_attention unfrozen_parameters
        lora_target_parameters train_on_inputs max_grad_norm group_by_length save_total_limit dp_shard_size
        expert_parallel_size context_parallel_size excess_length_strategy pretraining_dataset test_datasets
        eval_batch_size kd_alpha merge_lora
    """,
    "LLaMA-Factory": """
        model_name_or_path stage=sft,pt,dpo,kto finetuning_type=lora,full,freeze cutoff_len preprocessing_num_workers
        output_dir do_train dataset template logging_steps overwrite_output_dir per_device_train_batch_size
        gradient_accumulation_steps learning_rate lr_scheduler_type trust_remote_code save_steps report_to
        dataloader_num_workers plot_loss warmup_ratio bf16 ddp_timeout max_samples save_only_model num_train_epochs
        overwrite_cache lora_rank lora_target=all resume_from_checkpoint image_max_pixels flash_attn max_steps deepspeed
        disable_gradient_checkpointing quantization_bit=4,8 quantization_method double_quantization packing seed
        pure_bf16 tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size sequence_parallel
        freeze_vision_tower pref_beta pref_loss=sigmoid,ipo pref_ftx kto_chosen_weight kto_rejected_weight ref_model
        dpo_label_smoothing lora_alpha lora_dropout use_rslora use_dora additional_target adapter_name_or_path
        freeze_trainable_layers fp8 fsdp use_galore run_name eval_dataset val_size eval_strategy neat_packing
        train_on_prompt mask_history dataset_dir mix_strategy interleave_probs streaming buffer_size tokenized_path
        enable_liger_kernel moe_aux_loss_coef resize_vocab add_tokens add_special_tokens rope_scaling
    """,
    "ms-swift": """
        model dataset gradient_accumulation_steps tuner_type=lora,full train_type=lora,full per_device_train_batch_size
        learning_rate save_steps eval_steps save_total_limit logging_steps num_train_epochs per_device_eval_batch_size
        torch_dtype=bfloat16,float32 max_length output_dir warmup_ratio dataloader_num_workers split_dataset_ratio
        load_from_cache_file lora_rank lora_alpha dataset_num_proc target_modules=all-linear deepspeed attn_impl
        model_author model_name save_only_model freeze_vit freeze_aligner rlhf_type=dpo,kto,gkd packing padding_free
        system task_type use_liger_kernel loss_type=sigmoid,ipo,kto gradient_checkpointing eval_strategy rpo_alpha beta
        desirable_weight undesirable_weight label_smoothing teacher_model gkd_logits_topk sft_alpha lmbda temperature
        loss_scale=default,last_round,all adapters router_aux_loss_coef max_steps experts_impl sequence_parallel_size
        streaming shuffle_buffer_size truncation_strategy=right,delete,split val_dataset quant_method quant_bits=4,8
        init_weights optimizer use_hf modules_to_save metric_for_best_model report_to max_pixels new_special_tokens
    """,
    "Megatron-SWIFT and Megatron-LM": """
        global_batch_size micro_batch_size lr lr_warmup_fraction lr_warmup_iters min_lr lr_decay_style train_iters
        clip_grad finetune no_save_optim no_save_rng recompute_granularity=full,selective recompute_method
        recompute_num_layers attention_backend cross_entropy_loss_fusion sequence_parallel tensor_model_parallel_size
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
        context_parallel_size moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap moe_aux_loss_coeff
        moe_z_loss_coeff moe_router_bias_update_rate moe_router_load_balancing_type moe_expert_capacity_factor
        moe_token_dispatcher_type=alltoall,deepep use_distributed_optimizer optimizer_cpu_offload mtp_num_layers
        mtp_loss_scaling_factor merge_lora save_safetensors
    """,
}
"""By tool, its commonest keys, as counted in its own examples in 2026, with the keys of preference training and
distillation; and the values of those whose values are names."""


def keys() -> dict[str, list[tuple[str, list[str]]]]:
    """By tool, its keys, each with values to ask about."""
    theirs: dict[str, list[tuple[str, list[str]]]] = {
        "transformers": [(name, []) for name in names_of(transformers.TrainingArguments)],
        "trl": [(name, TRL_VALUES.get(name, [])) for name in names_of(*TRL, without=[transformers.TrainingArguments])],
    }
    for tool, text in KEYS.items():
        words = [word.partition("=") for word in text.split()]
        theirs[tool] = [(name, values.split(",") if values else []) for name, _, values in words]
    return theirs


TRL: list[Any] = [trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.ModelConfig, trl.ScriptArguments]
TRL_VALUES = {"loss_type": ["nll", "sigmoid", "ipo", "kto", "apo_zero_unpaired"], "dtype": ["bfloat16", "float32"]}


def names_of(*kinds: Any, without: list[Any] | None = None) -> list[str]:
    """The fields of dataclasses, each once, but for those of others."""
    others = set(names_of(*without)) if without else set()
    return [
        name for name in dict.fromkeys(setting.name for kind in kinds for setting in fields(kind)) if name not in others
    ]


def page() -> str:
    """All keys that have another name here, by that name."""
    here: dict[str, list[str]] = {}
    parser = make_parser()
    for theirs in keys().values():
        for name, values in theirs:
            for value in values or [""]:
                if (value or name not in parser.names) and (cell := answer(name, value)):
                    key = f"`{name}: {value}`" if value else f"`{name}`"
                    if GIVES.match(cell) and key not in here.setdefault(cell, []):
                        here[cell].append(key)
    rows = sorted(f"- {', '.join(there)}: {cell}\n" for cell, there in here.items())
    return f"{HEAD}{''.join(rows)}"


def answer(name: str, value: str) -> str:
    """What to give here, in a cell; without a value, whatever it is. Empty: the same."""
    parser = make_parser()
    if name in parser.names:
        said = parser.others.answer_to_value(parser.names[name], value)
    else:
        said = parser.instead_of(name, [value or "unheard-of"]) or "done anyway"
    said = in_line(said.removeprefix("give ").removesuffix("; leave it out"))
    if said.startswith("--") and name in {*parser.others.same, *parser.others.asking} and ":" not in said:
        return f"`{said}`"
    # beside what is code already
    return "`".join(part if odd % 2 else FLAG.sub(r"`\g<0>`", part) for odd, part in enumerate(said.split("`")))
