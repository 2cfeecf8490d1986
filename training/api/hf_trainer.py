"""transformers' Trainer on an engine of ours: its loss, data, accumulation, schedules, callbacks and evaluations; our
gradients, clipping, update and files.

    class T(expertmesh.TrainerMixin, SFTTrainer): ...
    trainer = T(model=expertmesh.load(...), args=SFTConfig(...), train_dataset=...)
"""

import inspect
import math
import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from ...checkpoints.files.directories import write_errors
from ...checkpoints.model_card import CARD, is_kept
from ...checkpoints.training_state.marker import check_resumable
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import moe_layers, moe_shape
from ...moe.experts.router_stats import Routing
from ...moe.transformers_private import in_place_of_trainers
from ...moe.util.atomic_write import PARTIAL, whole
from ...moe.util.errors import ExpertMeshError, warn_user
from ...sharding.runtime.process import raise_together
from ..config.train_config import TrainConfig
from ..data.batch import IGNORED, Batch
from ..data.chat import answer_ends
from ..engine.engine import Engine
from ..engine.model_card import tell_loss
from ..loss.objective import CROSS_ENTROPY
from ..monitoring.meter import Meter
from ..monitoring.nonfinite import NonFiniteGuard
from ..steps.evaluate import inference, token_accuracy
from ..steps.micro_batch import LossValues, StepCounts, count_step, no_losses
from ..steps.step import Gradients, add_gradients, step_result
from .own_loss import OwnLoss, frozen, keep_as_it_is, referring_to
from .server_weights import send_weights_of
from .trainer_arguments import heeded_arguments, overruled_settings
from .trainer_methods import replaced_methods, uncalled_methods

STATE = "expertmesh"
"""In a checkpoint of Trainer's, the directory of ours."""
_SCHEDULER, _ARGUMENTS = "scheduler.pt", "training_args.bin"

_OF_ANSWERS = "trl.trainer.sft_trainer"
_LOSS_OWNERS = ("transformers.trainer", _OF_ANSWERS)
"""Modules of classes whose loss is the cross-entropy of the labels, unless their arguments say otherwise."""
_CROSS_ENTROPY = {"loss_type": "nll", "label_smoothing_factor": 0.0, "average_tokens_across_devices": True}
"""What these arguments are where it is."""
_ACCURACY = "mean_token_accuracy"
"""A figure of SFTTrainer's evaluations. It takes a second forward, so that they have it only where it decides."""
_OF_ROUTING = ("output_router_logits", "router_aux_loss_coef")
"""Of a model's config, what trl sets for the balancing loss that ours takes the place of."""
_NOT_TAKEN = {
    "model_init": "give an engine from expertmesh.load",
    "peft_config": "give adapter='lora' to expertmesh.load",
    "quantization_config": "give adapter='lora' and base_dtype='nf4' to expertmesh.load",
    "optimizer_cls_and_kwargs": "give optim to expertmesh.load",
}
"""What Trainers take besides training arguments and is refused, and what to do instead."""
_COLUMNS = ("messages", "conversations", "prompt", "input_ids", "image", "images")
"""Columns of which trl's SFTTrainer needs one, where there is none with text."""
_GENERATED = ("_buffered_inputs", "_step")
"""In classes of trl's, what they have generated and for which micro-batches of several steps it is."""
_AS_LOADED: WeakKeyDictionary[Engine, TrainConfig] = WeakKeyDictionary()
"""The settings of engines before a Trainer has changed them."""


class _Inputs(dict[str, Any]):
    """A micro-batch as the data collator made it, and as the engine takes it. number: in its step."""

    def __init__(self, inputs: dict[str, Any], batch: Batch, number: int):
        super().__init__(inputs)
        self.batch = batch
        self.number = number


if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class TrainerMixin(_Base):
    """To be put before a Trainer class, such as one of trl's or your own, whose loss is then computed as the class
    computes it: by its `compute_loss`, `training_step` or `compute_loss_func`.

    The engine says what is trained and how it is computed (adapters, dtypes, balancing, checkpointing, the kind of
    optimizer), the training arguments what Trainer decides: data, batch sizes, learning rate, betas, weight decay,
    schedule, clipping, when to log, evaluate and save. `loss` in its logs is without the router losses. A cross-entropy
    of the labels, as that of `transformers.Trainer` and trl's SFTTrainer, the engine computes itself, which is faster
    and takes less memory. Its checkpoints hold a training checkpoint of ours, which any number of ranks resumes;
    `save_model` writes the model for `from_pretrained`, or adapters for PEFT.

    Example:
        class OurTrainer(expertmesh.TrainerMixin, transformers.Trainer):
            pass

        trainer = OurTrainer(engine, arguments, collator, train_dataset=dataset)
        trainer.train()
        trainer.save_model("model")

    Args:
        model: an `Engine`, from `expertmesh.load`.
        others: what the class takes besides. A reference or a teacher may be another engine.

    Raises:
        ExpertMeshError: the model is no engine, or something is asked for that cannot be heeded.
    """

    engine: Engine
    _has_own_loss = True

    def __new__(cls, *others: Any, **more: Any) -> Self:
        """An object of the class, or of one derived from it in which the engine computes the cross-entropy."""
        kind: Any = _of_labels(cls)  # type: ignore[arg-type]
        return object.__new__(kind if _learns_labels(kind, _by_name(cls, others, more)) else cls)

    def __init__(self, model: Any = None, *others: Any, **more: Any):
        if not isinstance(model, Engine):
            raise ExpertMeshError(
                f"model is a {type(model).__name__}: give the engine that expertmesh.load returns, as in "
                "Trainer(model=expertmesh.load('DIR', ep_size=8), ...)"
            )
        self.engine = model
        given = _by_name(type(self), (model, *others), more)
        self._check_class(given)
        if _is_of_trl(type(self)) and model.config.tokenizer and given.get("processing_class") is None:
            given["processing_class"] = model.tokenizer
        args = given.get("args") or self._default_arguments()
        args = heeded_arguments(args, model.config, model.ranks.device, self._tell, self._has_own_loss)
        if args.world_size != (ranks := model.ranks.world_size):
            # each rank would read all of the data, and write each file
            raise ExpertMeshError(
                f"the training arguments count {args.world_size} processes and the engine {ranks} ranks: give "
                "use_cpu=True to both where there is no GPU, and start all processes by torchrun"
            )
        if overruled := overruled_settings(args, _AS_LOADED.setdefault(model, model.config)):
            self._tell(
                f"Trainer uses its own arguments instead of these settings of expertmesh.load: {', '.join(overruled)}"
            )
        self._check_columns(args, given)
        self._balance(args)
        given |= {"model": model.model, "args": args}
        given |= {name: frozen(value) for name, value in given.items() if isinstance(value, Engine)}
        text_config = model.model.config.get_text_config()
        routing = {name: getattr(text_config, name) for name in _OF_ROUTING if hasattr(text_config, name)}
        self._own_loss = OwnLoss(model)
        with self._beginning(given):
            super().__init__(**given)
        for name, value in routing.items():
            setattr(text_config, name, value)
        self._check_launcher()
        self._check_data(given.get("train_dataset"))
        if not hasattr(args, "router_aux_loss_coef"):
            self._balance(self.args)  # trl's, made of transformers'
        self._gradients: Gradients | None = None
        self._forget_losses()
        self._hooked: torch.optim.Optimizer | None = None
        self._guard = NonFiniteGuard(model.config, model.model, self._tell)
        self._is_skipped = False

    @contextmanager
    def _beginning(self, given: dict[str, Any]) -> Iterator[None]:
        """Around the class's own `__init__`.

        Args:
            given: its arguments.
        """
        if _is_of_trl(type(self)) and self.engine.model.get_output_embeddings().new_rows_of:
            raise ExpertMeshError(
                "train_new_tokens: of the head, only the new tokens' rows are trained, and trl's losses read its "
                "weight without them; give modules_to_save=['embed_tokens', 'lm_head'] instead"
            )
        with referring_to(self.engine, type(self)):
            yield
        self.accelerator.backward = self._own_loss.backward  # type: ignore[method-assign]
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            send_weights_of(self.engine, generation)
        self.aux_loss_enabled = False  # the engine's takes its place, over the tokens of all ranks
        keep_as_it_is(self.engine.model)

    def _forget_losses(self) -> None:
        # the losses of steps, added up: of those since they were logged, and of all before, which are counted, and so
        # are those that were skipped
        self._losses, self._all_losses = self._no_losses(), self._no_losses()
        self._steps, self._all_steps, self._skipped, self._all_skipped = 0, 0, 0, 0
        model, top_k = self.engine.model, moe_shape(self.engine.model).top_k
        config, device = model.config.get_text_config(), self.engine.ranks.device
        self._meter = Meter(self.engine.counts, config, top_k, device, self.engine.config.bf16)

    def _no_losses(self) -> Tensor:
        return no_losses((), self.engine.ranks.device)

    def _tell(self, *lines: str) -> None:
        """Warn, once for all ranks."""
        if self.engine.ranks.rank == 0:
            for line in lines:
                warn_user(line)

    # ---- what is asked for ----

    def _default_arguments(self) -> transformers.TrainingArguments:
        """What the class would make, on the engine's device."""
        use_cpu = self.engine.ranks.device.type == "cpu"
        if not _is_of_trl(type(self)):
            return transformers.TrainingArguments("tmp_trainer", use_cpu=use_cpu)
        import trl

        names = [base.__name__.removesuffix("Trainer") for base in type(self).__mro__ if _is_of_trl(base)]
        name = next(name for name in names if hasattr(trl, f"{name}Config"))
        kind = getattr(trl, f"{name}Config")
        made: transformers.TrainingArguments = kind(f"{self.engine.source.path.name}-{name}", use_cpu=use_cpu)
        return made

    def _check_class(self, given: dict[str, Any]) -> None:
        mixin = _LabelLoss if isinstance(self, _LabelLoss) else TrainerMixin
        for kind, name in uncalled_methods(type(self), mixin):
            if kind.__module__ in _LOSS_OWNERS:
                continue
            instead = "leave it out, or use the engine's step in your own loop"
            if name in replaced_methods(mixin):
                instead = (
                    f"put it in a class before TrainerMixin, where super().{name} is the engine's, or leave it out"
                )
            raise ExpertMeshError(
                f"{kind.__name__}.{name} would never be called, as the engine does what Trainer does there: {instead}"
            )
        for base in type(self).__mro__:
            if base.__module__ == "trl.trainer.reward_trainer":
                raise ExpertMeshError(f"{base.__name__} trains a classifier, and an engine has a language model")
        for name in ("ref_model", "teacher_model"):
            if given.get(name) is self.engine:
                raise ExpertMeshError(f"{name} is the engine that is trained: give another one, from expertmesh.load")
            if isinstance(given.get(name), str):
                raise ExpertMeshError(
                    f"{name}={given[name]!r} would be loaded complete on each rank: give expertmesh.load(...), or a "
                    "model of transformers to have that"
                )
        for name, instead in _NOT_TAKEN.items():
            if given.get(name) is not None:
                raise ExpertMeshError(f"{name}: not possible for a model that is already sharded; {instead}")
        optimizer, scheduler = given.get("optimizers") or (None, None)
        if optimizer is not None and optimizer is not self.engine.optimizer:
            raise ExpertMeshError(
                f"optimizers has a {type(optimizer).__name__}: give optim to expertmesh.load, and engine.optimizer here"
            )
        if scheduler is not None and optimizer is None:
            raise ExpertMeshError(
                "optimizers has a scheduler without its optimizer; give (engine.optimizer, scheduler)"
            )
        for name in ("cp_size", "tp_size"):
            if getattr(self.engine.config, name) > 1:
                raise ExpertMeshError(
                    f"{name}: Trainer gives each rank other sequences, but the ranks of a context-parallel or "
                    "tensor-parallel group need the same; use the engine's step in your own loop, or "
                    "train_ep.py"
                )
        if self.engine.config.train_mtp > 0:
            raise ExpertMeshError(
                "train_mtp: Trainer has no place for a second loss; use the engine's step in your own loop, or "
                "train_ep.py"
            )
        if self.engine.config.pp_size > 1:
            raise ExpertMeshError(
                "pp_size: Trainer gives each rank other sequences, one micro-batch at a time, but the "
                "ranks of a pipeline need all micro-batches of a step; use the engine's step in your own "
                "loop, or train_ep.py"
            )

    def _balance(self, args: Any) -> None:
        """Weigh the balancing loss as trl does: by its argument, else by the model's config, unless
        `expertmesh.load` was told.

        Raises:
            ExpertMeshError: both were told, and differ; or the model has no such loss.
        """
        engine, name = self.engine, "router_aux_loss_coef"
        if not hasattr(args, name):
            return  # not trl's: the engine's stays
        asked, loaded = args.router_aux_loss_coef, _AS_LOADED[engine].router_aux_loss_coef
        if loaded is not None:
            if asked not in (None, loaded):
                raise ExpertMeshError(
                    f"{name}: expertmesh.load was given {loaded:g} and the training arguments {asked:g}; give one"
                )
            return
        coefficient, origin = asked, f"{name} of the training arguments"
        if asked is None:
            in_config = facts_of(engine.model).balance
            if in_config is None or any(layer.router is None for layer in moe_layers(engine.model)):
                return
            coefficient, origin = in_config, "config.json, by which trl balances"
        engine.weigh_balance(coefficient, origin)

    def _check_columns(self, args: Any, given: dict[str, Any]) -> None:
        """
        Raises:
            ExpertMeshError: trl's preparation finds no column that it could read.
        """
        rows, text = given.get("train_dataset"), getattr(args, "dataset_text_field", None)
        columns = getattr(rows, "column_names", None)
        if text is None or not columns or given.get("formatting_func") is not None:
            return
        if not {text, *_COLUMNS} & set(columns):
            raise ExpertMeshError(
                f"dataset_text_field={text!r}: train_dataset has no such column; it has "
                f"{', '.join(columns)}. Name the column with the text, or add one of {', '.join(_COLUMNS)}"
            )

    def _check_data(self, given: Any) -> None:
        """Warn of examples that trl has left out.

        Raises:
            ExpertMeshError: none is left.
        """
        if not isinstance(self.train_dataset, Sized):
            return
        left, args = len(self.train_dataset), self.args
        length = getattr(args, "max_length", None)
        within = "" if length is None else f" within max_length={length}"
        if left == 0:
            raise ExpertMeshError(f"train_dataset has no example with a target{within}")
        if isinstance(given, Sized) and not getattr(args, "packing", False) and left < len(given):
            out = f"{len(given) - left:,} of {len(given):,} examples of train_dataset"
            self._tell(f"{out} are left out: no target{within}")

    def _check_launcher(self) -> None:
        """
        Raises:
            ExpertMeshError: `accelerate launch` asks for what the training arguments may not either.
        """
        # of the arguments' own bf16, which is trl's default, `heeded_arguments` knows
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        asked = {
            "FSDP": self.is_fsdp_enabled,
            "DeepSpeed": self.is_deepspeed_enabled,
            "a parallelism config": getattr(self.accelerator, "parallelism_config", None) is not None,
            f"mixed precision {precision}": precision != "no" and not (precision == "bf16" and self.engine.config.bf16),
        }
        if found := [what for what, is_asked in asked.items() if is_asked]:
            raise ExpertMeshError(
                f"accelerate's environment asks for {', '.join(found)}, which has no effect on the "
                "engine: give sharding and precision to expertmesh.load; start with torchrun, or with "
                "accelerate launch --multi_gpu --mixed_precision no"
            )

    @in_place_of_trainers
    def train(self, resume_from_checkpoint: Any = None, *more: Any, **others: Any) -> Any:
        """As transformers has it, whose Trainers do not read the training argument of that name."""
        asked = self.args.resume_from_checkpoint
        if asked is not None and resume_from_checkpoint is None:
            raise ExpertMeshError(
                f"resume_from_checkpoint={asked!r} of the training arguments does not resume; call "
                f"train(resume_from_checkpoint={asked!r}), or leave it out"
            )
        if self.engine.is_resumed and self.optimizer is None:
            raise ExpertMeshError(
                f"the engine was resumed at step {self.engine.step_number}, and Trainer begins at step 0 "
                "with another optimizer: to go on with a Trainer's checkpoint, give it to "
                "train(resume_from_checkpoint=...); to keep the engine's optimizer, give Trainer "
                "optimizers=(engine.optimizer, scheduler); to start from its weights only, load the "
                "model that `expertmesh-checkpoints export` makes"
            )
        self._forget_losses()
        result = super().train(resume_from_checkpoint, *more, **others)
        return result._replace(training_loss=result.metrics["train_loss"])

    # ---- the model stays where it is ----

    @in_place_of_trainers
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """It is there."""

    @in_place_of_trainers
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.engine.model
        self._end_answers()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    @in_place_of_trainers
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The engine's kind of optimizer, with the training arguments' rates."""
        args, engine = self.args, self.engine
        if self.optimizer is None:
            engine.config = replace(
                engine.config,
                learning_rate=args.learning_rate,
                weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1,
                adam_beta2=args.adam_beta2,
                adam_epsilon=args.adam_epsilon,
            )
            engine.renew_optimizer()
            engine.scheduler = None  # of the former one; Trainer has its own
            self.optimizer = engine.optimizer
        if self._hooked is not self.optimizer:
            self.optimizer.register_step_post_hook(self._updated)
            self._hooked = self.optimizer
        return self.optimizer

    def _updated(self, *_: Any) -> None:
        """After the optimizer's step, which Trainer takes in any case: of a skipped one there are no gradients."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return  # a step of a loop of one's own, or of another Trainer
        if not self._is_skipped:
            self.engine.updated(gradients.routing)
        self.engine.tokens += gradients.counts.tokens
        self.engine.step_number = self.state.global_step + 1

    # ---- a step ----

    @in_place_of_trainers
    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and its target tokens over all ranks."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.engine.release()
        self._own_loss.begin(len(samples))
        return samples, items

    @in_place_of_trainers
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Gradients of a micro-batch; its part of the step's loss, of which Trainer logs the mean over ranks."""
        with self._own_loss.micro_batch():
            return super().training_step(model, inputs, num_items_in_batch)

    def _step_gradients(self) -> Gradients:
        """What the micro-batches of the step have left. All ranks call it together."""
        return self._own_loss.gradients()

    @in_place_of_trainers
    def _clip_grad_norm(self, model: Any) -> float:
        return self._checked(self.engine.clip(self.args.max_grad_norm))

    @in_place_of_trainers
    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._checked(self.engine.clip(0)) if grad_norm is None else grad_norm

    def _checked(self, norm: float) -> float:
        """The gradient norm. Raises, or leaves nothing to update by, where it or the loss is not finite; as
        --on-nonfinite has it."""
        gradients = self._gradients = self._step_gradients()
        figures = replace(step_result(gradients), grad_norm=norm)
        self._guard.check(self.state.global_step + 1, figures)
        self._is_skipped = not figures.is_finite
        if self._is_skipped:
            self.engine.model.zero_grad()
            self._skipped += 1
        else:
            self._losses += gradients.losses  # of all ranks, now
            self._steps += 1
        self._meter.add(figures)
        return norm

    @in_place_of_trainers
    def log(self, logs: dict[str, float], *more: Any, **others: Any) -> None:
        """With those of METRICS that Trainer does not take itself."""
        if "loss" in logs:
            loss = float(LossValues.of(self._losses).loss) / max(self._steps, 1)
            tell_loss(self.engine, "loss", loss)
            if self._skipped and self.args.logging_nan_inf_filter:
                # the mean of the others; transformers makes up for a step by less than such a mean
                logs["loss"] = loss if self._steps else math.nan
            if not self._meter.is_empty:
                weights, rate = self.engine.balance.weights, logs.get("learning_rate", math.nan)
                found = self._meter.metrics(weights, self.state.epoch or 0.0, rate, lambda metric: metric.in_trainer)
                logs |= {name: math.nan if value is None else value for name, value in found.items()}
            self._all_losses += self._losses
            self._all_steps += self._steps
            self._all_skipped += self._skipped
            self._losses.zero_()
            self._steps, self._skipped = 0, 0
        if "train_loss" in logs and (self.args.logging_nan_inf_filter or not self._all_skipped + self._skipped):
            # transformers' has rank 0's part alone of what was not logged before
            steps = self._all_steps + self._steps
            total = LossValues.of(self._all_losses + self._losses).loss
            logs["train_loss"] = float(total) / steps if steps else math.nan
        model = self.engine.model
        was_training = model.training
        # by this trl tells whose figures go along; after an evaluation transformers' model is not
        model.training = was_training and not logs.keys().isdisjoint(("loss", "train_loss"))
        try:
            super().log(logs, *more, **others)
        finally:
            model.training = was_training

    # ---- evaluations ----

    @in_place_of_trainers
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As the class evaluates, with nothing kept for a backward."""
        # else accelerate would move the model, and have it computed with in another dtype
        if self.model not in self.accelerator._models:
            self.accelerator._models.append(self.model)
        with inference(self.model):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )

    # ---- files ----

    def _end_answers(self) -> None:
        """Have generation end, in what is saved, with what ends answers by the tokenizer, of which the training
        arguments may have changed EOS or the chat template."""
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        if tokenizer is not None:
            self._tell(*self.engine.answers_end_in(sorted(answer_ends(tokenizer)), tokenizer))

    @in_place_of_trainers
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, with tokenizer and training arguments. All ranks call it together.

        Into a checkpoint of Trainer's it is not written, unless with save_only_model, or to be pushed from there: the
        training checkpoint has it, from which `expertmesh-checkpoints export` makes it.
        """
        pushes = self.args.push_to_hub and self.args.hub_strategy != "end"
        is_checkpoint = _internal_call and output_dir is not None
        out = Path(output_dir or self.args.output_dir or "")
        partial = out / f".model{PARTIAL}"
        with raise_together(), write_errors(out):
            if self.args.should_save:
                # Trainer asks each rank next whether it is there, and whether it is the best
                out.mkdir(parents=True, exist_ok=True)
                rmtree(partial, ignore_errors=True)
        if is_checkpoint and not (self.args.save_only_model or pushes):
            return
        self._end_answers()
        is_tokenizer = isinstance(self.processing_class, transformers.PreTrainedTokenizerBase)
        self._tell(*self.engine.export(partial, self.processing_class if is_tokenizer else None, overwrite=True))
        with raise_together(), write_errors(out):
            if self.args.should_save:
                _move_into(partial, out)
                if self.processing_class is not None and not is_tokenizer:
                    self.processing_class.save_pretrained(out)
                torch.save(self.args, out / _ARGUMENTS)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @in_place_of_trainers
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.step_number = self.state.global_step
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        if isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            self.engine.saves_to(Path(output_dir) / STATE, tokenizer)
        self.engine.save(Path(output_dir) / STATE)
        if getattr(self, _GENERATED[0], None) is not None:
            with raise_together(), whole(self._generated_in(output_dir)) as partial:
                torch.save({name: getattr(self, name) for name in _GENERATED}, partial)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            with whole(Path(output_dir) / _SCHEDULER) as partial:
                torch.save(self.lr_scheduler.state_dict(), partial)

    def _generated_in(self, checkpoint: str) -> Path:
        ranks = self.engine.ranks
        return Path(checkpoint) / f"generated-{ranks.rank}-of-{ranks.world_size}.pt"

    @in_place_of_trainers
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the optimizer's state, once there is an optimizer; what is not there is told now."""
        check_resumable(_state_in(resume_from_checkpoint), f"resume_from_checkpoint={resume_from_checkpoint!r}: ")

    @in_place_of_trainers
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path, scheduler = Path(checkpoint) / _SCHEDULER, self.lr_scheduler
        assert scheduler is not None
        with raise_together():
            try:
                state = torch.load(path, weights_only=True)
            except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
                raise ExpertMeshError(
                    f"{path}: cannot be read ({type(error).__name__}); resume from an earlier checkpoint"
                ) from error
        self._resume(checkpoint)
        asked = getattr(scheduler, "base_lrs", None)
        scheduler.load_state_dict(state)
        if asked != getattr(scheduler, "base_lrs", None):
            self._tell(
                f"learning_rate={self.args.learning_rate!r} of the training arguments has no effect: the "
                f"schedule of {checkpoint} continues, which started at {scheduler.base_lrs[0]!r}"
            )
        # the rates of its next step; a training checkpoint of ours has the optimizer's tensors alone
        for group, rate in zip(self.engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        super()._load_optimizer_and_scheduler(checkpoint)  # of which a class may have more; Trainer finds none
        self._load_generated(checkpoint)

    def _load_generated(self, checkpoint: str) -> None:
        """What a class of trl's has generated for several steps, in the midst of them."""
        if not hasattr(self, _GENERATED[0]):
            return
        path = self._generated_in(checkpoint)
        with raise_together():
            if path.is_file():
                vars(self).update(torch.load(path, weights_only=False))
            elif any(Path(checkpoint).glob("generated-*")):
                self._tell(
                    f"{checkpoint} is of another number of ranks: what it generated for steps to come is generated anew"
                )

    @in_place_of_trainers
    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._resume(self.state.best_model_checkpoint)

    def _resume(self, checkpoint: str) -> None:
        self.engine.resume(_state_in(checkpoint))
        self.engine.is_resumed = False  # at a step that is of this Trainer, not of the next one on the engine


def _state_in(checkpoint: str) -> Path:
    """The training checkpoint of ours in one of Trainer's: of its last step, which the rest of it is of.

    Raises:
        ExpertMeshError: there is none.
    """
    if not Path(checkpoint).is_dir():
        raise ExpertMeshError(f"resume_from_checkpoint={checkpoint!r}: no such directory")
    found = sorted((Path(checkpoint) / STATE).glob("step-*"))
    if not found:
        raise ExpertMeshError(
            f"{checkpoint}: has no {STATE}/, the engine's training checkpoint, so it cannot be "
            "resumed (save_only_model writes none)"
        )
    return found[-1]


def _by_name(kind: type, others: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """What a class is given, by the names of the arguments of the Trainer that it is derived from."""
    for base in kind.__mro__[kind.__mro__.index(TrainerMixin) + 1 :]:
        signature = inspect.signature(vars(base).get("__init__", _by_name))
        if "optimizers" in signature.parameters:
            known = {name: value for name, value in more.items() if name in signature.parameters}
            bound = signature.bind_partial(None, *others, **known).arguments
            return {**more, **dict(islice(bound.items(), 1, None))}  # without self
    return more


def _is_of_trl(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__)


def _move_into(made: Path, out: Path) -> None:
    """Let the files of an export take the place of an earlier one's; what else is in the directory stays."""
    for pattern in ("model*.safetensors", "model.safetensors.index.json", "adapter_model*"):
        for stale in out.glob(pattern):
            stale.unlink()
    if is_kept(out):
        (made / CARD).unlink()
    for path in made.iterdir():
        if path.is_dir() and (out / path.name).is_dir():
            rmtree(out / path.name)
        os.replace(path, out / path.name)
    made.rmdir()


@cache
def _of_labels(kind: Any) -> Any:
    """A Trainer class whose cross-entropy an engine computes: `_LabelLoss` comes where TrainerMixin would."""
    if issubclass(kind, _LabelLoss):
        return kind
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, _LabelLoss), names)


def _learns_labels(kind: type, given: dict[str, Any]) -> bool:
    """Whether the loss of a class, one of `_of_labels`, is the cross-entropy of the labels: none of its methods is a
    loss of its own, and none of its arguments asks for another."""
    args = given.get("args")
    return (
        all(base.__module__ in _LOSS_OWNERS for base, _ in uncalled_methods(kind, _LabelLoss))
        and all(getattr(args, name, value) == value for name, value in _CROSS_ENTROPY.items())
        and given.get("compute_loss_func") is None
    )


class _LabelLoss(TrainerMixin):
    """The fast way of the cross-entropy: the engine computes it, without logits, over exactly the target tokens."""

    _has_own_loss = False

    @contextmanager
    def _beginning(self, given: dict[str, Any]) -> Iterator[None]:
        model = self.engine.model
        self._check_best(given["args"], given)
        held = {name: value for name, value in vars(model).items() if name == "forward"}
        yield
        # the engine moves batches, which it makes in host memory
        self.accelerator.device_placement = False
        # trl puts a forward of its own in the model's place, for a loss that ours takes the place of
        vars(model).pop("forward", None)
        vars(model).update(held)
        self._counts: StepCounts | None = None
        self._routing: Routing | None = None
        # of the sequences evaluated with metrics: the sum of their targets' losses, and how many these are
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.engine.ranks.device)

    def _check_best(self, args: Any, given: dict[str, Any]) -> None:
        """
        Raises:
            ExpertMeshError: the best model would be told by a figure that evaluations do not have, such as trl's
                accuracies; Trainer would end at the first one.
        """
        asked, data = args.metric_for_best_model, given.get("eval_dataset")
        modules = [kind.__module__ for kind in type(self).__mro__]
        self._tells_accuracy = asked is not None and asked.endswith(_ACCURACY) and _OF_ANSWERS in modules
        callbacks = [each if isinstance(each, type) else type(each) for each in given.get("callbacks") or ()]
        evaluate = next(kind for kind in type(self).__mro__ if "evaluate" in vars(kind))
        # these may add figures of their own
        own = [kind.__module__.partition(".")[0] not in ("transformers", "trl") for kind in (evaluate, *callbacks)]
        if asked is None or args.eval_strategy == "no" or given.get("compute_metrics") is not None or any(own):
            return
        figures = ["loss", *([_ACCURACY] if self._tells_accuracy else [])]
        prefixes = [f"{name}_" for name in data] if isinstance(data, dict) else [""]
        known = [f"eval_{prefix}{figure}" for prefix in prefixes for figure in figures]
        if f"eval_{asked.removeprefix('eval_')}" not in known:
            raise ExpertMeshError(
                f"metric_for_best_model={asked!r}: evaluations on an engine do not have it; give {' or '.join(known)}, "
                "or compute_metrics"
            )

    @in_place_of_trainers
    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and its target tokens over all ranks."""
        taken = list(islice(epoch_iterator, num_batches))
        batches = self.engine.batches(taken)
        self.engine.release()
        self._counts, self._routing = count_step(self.model, batches), None
        self._step_losses = self._no_losses()
        inputs = [_Inputs(dict(each), batch, i) for i, (each, batch) in enumerate(zip(taken, batches, strict=True))]
        return inputs, self._counts.targets

    @in_place_of_trainers
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Gradients of a micro-batch; its part of the step's loss, of which Trainer logs the mean over ranks."""
        assert isinstance(inputs, _Inputs)
        assert self._counts is not None
        model.train()
        weights = self.engine.balance.weights
        mine, routing = add_gradients(self.model, inputs.batch, inputs.number, self._counts, weights)
        self._routing = routing if self._routing is None else self._routing + routing
        self._step_losses += mine
        # the mean over no target is left out of what Trainer logs
        loss = LossValues.of(mine).loss
        return loss * (self.engine.ranks.world_size if self._counts.targets else math.nan)

    def _step_gradients(self) -> Gradients:
        assert self._counts is not None
        assert self._routing is not None
        return Gradients(self._step_losses, self._routing, self._counts)

    @in_place_of_trainers
    def log(self, logs: dict[str, float], *more: Any, **others: Any) -> None:
        """For trl's classes, with their count of tokens."""
        if "loss" in logs and _is_of_trl(type(self)):
            logs["num_tokens"] = self.engine.tokens
        super().log(logs, *more, **others)

    @in_place_of_trainers
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over exactly the target tokens, each once; with metrics, transformers' own loop over logits."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only:
            # else accelerate would move the model, and have it computed with in another dtype
            if not self.accelerator._models:
                self.accelerator._models.append(self.model)
            self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.engine.ranks.device)
            with inference(self.model):
                # that of no class between: it would be called here alone
                output = transformers.Trainer.evaluation_loop(
                    self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            loss_sum, targets = self._evaluated.tolist()
            if output.metrics is not None and f"{metric_key_prefix}_loss" in output.metrics:
                # theirs is the mean of batches' means, which depends on how many ranks there are
                output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / targets if targets else math.nan
            return output
        sampler: Any = getattr(dataloader, "batch_sampler", None)
        if getattr(sampler, "even_batches", False):
            sampler.even_batches = False  # no sequence twice
        self.callback_handler.eval_dataloader = dataloader
        batches = []
        for inputs in self._own_part(dataloader):
            batches.append(inputs)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        found = self.engine._evaluated(batches, CROSS_ENTROPY)
        number = torch.tensor(sum(len(inputs["input_ids"]) for inputs in batches), device=self.engine.ranks.device)
        dist.all_reduce(number)
        figures = {"loss": found.loss, **found.figures}
        if self._tells_accuracy:
            made, _ = self.engine._all_made(batches, for_loss=False)
            figures[_ACCURACY] = token_accuracy(self.model, made, self.engine.ranks.device)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        return EvalLoopOutput(None, None, metrics, int(number))  # type: ignore[arg-type]

    def _own_part(self, dataloader: Any) -> Iterable[Any]:
        """This rank's batches. Of data without a length, accelerate would fill up the last ones by repeating."""
        if not isinstance(dataloader.dataset, IterableDatasetShard):
            return dataloader
        complete: DataLoader[Any] = DataLoader(
            dataloader.dataset.dataset, dataloader.batch_size, collate_fn=dataloader.collate_fn
        )
        ranks = self.engine.ranks
        return islice(complete, ranks.rank, None, ranks.world_size)

    @in_place_of_trainers
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss (the mean of this rank's tokens), logits and labels of a batch."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        has_targets = labels is not None or inputs.get("shift_labels") is not None
        with raise_together():
            batch = self.engine.batch(inputs if has_targets else {**inputs, "labels": inputs.get("input_ids")})
        asked = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
        if self.engine.images is not None:
            asked |= self.engine.images.arguments(inputs)
        with torch.no_grad():
            logits = model(**asked, use_cache=False).logits
        loss = None
        if has_targets:
            # a training step's, at the places that the tokens have here
            targets_BS = torch.full_like(inputs["input_ids"], IGNORED, dtype=torch.int64)
            mask_BS = inputs.get("attention_mask")
            is_token_BS = torch.ones_like(targets_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
            kept = slice(None) if batch.is_token_BS is None else batch.is_token_BS
            targets_BS[is_token_BS] = batch.targets_BS[kept].flatten()
            losses_BS = F.cross_entropy(logits.float().mT, targets_BS, ignore_index=IGNORED, reduction="none")
            sums_B2 = torch.stack([losses_BS.double().sum(dim=1), (targets_BS != IGNORED).sum(dim=1)], dim=1)
            # of all ranks, and without the sequences by which accelerate makes the last batches equally long
            self._evaluated += self.accelerator.gather_for_metrics(sums_B2).sum(dim=0)
            loss = (sums_B2[:, 0].sum() / sums_B2[:, 1].sum().clamp(min=1)).float()
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on an engine: `Trainer(model=expertmesh.load(...), args=TrainingArguments(...), ...)`.

    Example:
        trainer = expertmesh.Trainer(model=engine, args=arguments, data_collator=collator, train_dataset=dataset)
        trainer.train()
    """
