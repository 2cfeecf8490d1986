"""The settings that `expertmesh.load` takes, by name and type, for editors and type checkers.

Written by `python -m tests.training.load_settings_file > training/config/load_settings.py`.
"""

from pathlib import Path
from typing import Any, TypedDict

from ...moe.kernels.kernel_entries import Precision
from ...sharding.parallelize.choices import Checkpointing, DispatchSums
from ...sharding.pipeline.schedule import ScheduleName
from ...sharding.topology import DenseShard
from ..data.chat import TrainOn
from ..data.data_files import SampleBy, StoppingStrategy
from ..data.truncation import Truncation
from .settings import (
    Adapter,
    AdapterFormat,
    BaseDtype,
    CrossEntropy,
    ExportEncoding,
    LossAverage,
    MergeDtype,
    OnNonfinite,
    OnSaveError,
    PreferenceLoss,
)


class LoadSettings(TypedDict, total=False):
    """The flags of `train_ep.py`, by their names with underscores, but for `model`, and `config`, a YAML file with more
    of them.

    `train_ep.py --help` says what each does.

    Example:
        settings: expertmesh.LoadSettings = {"ep_size": 1, "learning_rate": 1e-5}
        engine = expertmesh.load("DIR", **settings)
    """

    config: str | Path

    # What is trained.
    tokenizer: str | Path
    add_tokens: list[str] | str
    resize_vocab: bool
    rope_scaling: str | dict[str, Any]
    images: bool

    # What the model is trained on, and what a batch looks like.
    dataset: list[str] | str | Path
    stopping_strategy: StoppingStrategy
    dataset_config: str
    dataset_split: str
    dataset_num_proc: int | None
    messages_column: str
    prompt_column: str
    response_column: str
    system_column: str
    text_column: str
    weight_column: str
    sample_by: SampleBy
    chat_template: str | Path
    template_date: str
    prompt_template: str
    train_on: TrainOn
    split_turns: bool
    max_seq_length: int
    truncation: Truncation
    skip_bad_records: int
    packing: bool
    group_by_length: bool
    streaming: bool
    shuffle_buffer: int
    preview: bool
    prepare_only: bool

    # What is learned from the data.
    task: str
    preference_loss: PreferenceLoss
    preference_beta: float
    preference_sft_weight: float
    desirable_weight: float
    undesirable_weight: float

    # What is learned from a teacher.
    teacher: str | Path
    teacher_top_k: int
    teacher_weight: float

    # The parallel layout.
    ep_size: int
    cp_size: int
    tp_size: int
    async_tp: bool
    loss_parallel: bool
    pp_size: int
    pipeline_schedule: ScheduleName | None
    pipeline_chunks: int
    pipeline_layers: str | None
    dense_shard: DenseShard
    overlap_chunks: int
    dispatch: str
    dispatch_sums: DispatchSums
    ranks_per_node: int | None
    ddp_timeout: int

    # What is kept, freed, recomputed and offloaded.
    gradient_checkpointing: Checkpointing | bool
    keep_expert_products: int
    offload_activations: bool
    offload: bool
    offload_experts: bool
    reshard_after_forward: bool
    keep_expert_copies: bool
    force: bool

    # What computes, and in which dtype.
    bf16: bool
    tf32: bool
    expert_precision: Precision
    dense_precision: Precision
    expert_kernel: str
    attn_implementation: str
    cross_entropy: CrossEntropy
    compile: bool
    use_cpu: bool

    # How much data makes a step, how many steps there are, and the learning rate over them.
    per_device_train_batch_size: int
    gradient_accumulation_steps: int | None
    global_batch_size: int | None
    loss_average: LossAverage
    loss_by_dataset: bool
    num_train_epochs: float
    max_steps: int
    lr_scheduler_type: str
    lr_scheduler_kwargs: str | dict[str, Any]
    warmup_steps: float
    warmup_ratio: float
    seed: int

    # What is made of gradients.
    optim: str
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    shampoo_frequency: int
    shampoo_start: int | None
    shampoo_block_size: int
    max_grad_norm: float

    # How the experts' load is kept even, and when it is warned of.
    router_aux_loss_coef: float | None
    router_aux_loss_per_layer: bool
    router_z_loss_coef: float
    router_bias_update_rate: float
    router_warn_steps: int
    router_warn_load: float | None

    # Layers for multi-token prediction, which draft tokens for speculative decoding.
    train_mtp: float | bool
    mtp_detach: bool

    # What of the model is trained, and what the rest is held in.
    adapter: Adapter
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: list[str] | str
    use_rslora: bool
    modules_to_save: list[str] | str
    train_new_tokens: bool
    base_dtype: BaseDtype
    init_adapter: str | Path
    adapter_format: AdapterFormat
    merge: bool
    merge_dtype: MergeDtype
    freeze: list[str] | str
    train_vision: list[str] | str

    # Losses and sample generations in between steps.
    eval_dataset: list[str] | str | Path
    eval_dataset_split: str
    eval_ratio: float
    eval_steps: int
    eval_on_start: bool
    per_device_eval_batch_size: int
    early_stopping_patience: int
    early_stopping_threshold: float
    load_best_model_at_end: bool
    generate_steps: int
    generate_prompts: list[str] | str
    generate_max_new_tokens: int

    # What is written, and what is resumed.
    output_dir: str | Path
    overwrite_output_dir: bool
    save_steps: int
    save_total_limit: int | None
    async_save: bool
    on_save_error: OnSaveError
    resume: str | Path | bool
    allow_changed: list[str] | str
    elastic: bool
    export: bool
    max_shard_size: str
    export_encoding: ExportEncoding
    drop_untrained: bool

    # What is told of a run.
    logging_steps: int
    verbose: bool
    report_to: list[str] | str
    run_name: str
    profile: list[str] | str
    profile_ranks: list[str] | str

    # What helps when something is wrong.
    on_nonfinite: OnNonfinite
    detect_anomaly: bool
    check_replicas: int
    deterministic: bool
    debug_ranks: list[int]
