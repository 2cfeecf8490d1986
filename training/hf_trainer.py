"""transformers' Trainer on an engine of ours: its data, accumulation, schedules, callbacks and evaluations; our loss,
gradients, clipping, update and files.

    class T(expertmesh.TrainerMixin, SFTTrainer): ...
    trainer = T(model=expertmesh.load(...), args=SFTConfig(...), train_dataset=...)
"""

import copy
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.trainer_utils import EvalLoopOutput

from expertmesh.checkpoints import write_errors
from expertmesh.moe import ExpertMeshError
from expertmesh.moe.base.whole import PARTIAL, whole
from expertmesh.moe.transformers_private import in_place_of_trainers
from expertmesh.sharding import raise_together
from expertmesh.training.data import IGNORED, Batch
from expertmesh.training.engine import Engine
from expertmesh.training.inference import inference
from expertmesh.training.micro_batch import StepCounts, count_step
from expertmesh.training.step import add_gradients
from expertmesh.training.watch.routing_figures import Routing

STATE = "expertmesh"
"""In a checkpoint of Trainer's, the directory of ours."""
_SCHEDULER, _ARGUMENTS = "scheduler.pt", "training_args.bin"

_INSTEAD: dict[str, str] = {
    "fsdp": "the model is sharded already",
    "deepspeed": "the model is sharded already",
    "fp16": "give bf16=True to expertmesh.load",
    "torch_compile": "give compile=True to expertmesh.load",
    "use_liger_kernel": "give cross_entropy='liger' to expertmesh.load",
    "label_smoothing_factor": "the loss is the cross-entropy of the labels; leave it out",
    "neftune_noise_alpha": "leave it out",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "torch_empty_cache_steps": "leave it out",
}
"""Training arguments that cannot be heeded, where they are set, and what to do."""
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_LOSSES = ("nll", "chunked_nll")
_LOSS_OWNERS = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Modules of classes whose `compute_loss` is the cross-entropy of the labels, which ours is too."""


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
    """To be put before a Trainer class whose loss is the cross-entropy of the labels, such as trl's SFTTrainer.

    The engine says what is trained and how it is computed (adapters, dtypes, balancing, checkpointing, the kind of
    optimizer), the training arguments what Trainer decides: data, batch sizes, learning rate, betas, weight decay,
    schedule, clipping, when to log, evaluate and save. `loss` in its logs is the cross-entropy alone. Its checkpoints
    hold a training checkpoint of ours, which any number of ranks resumes; `save_model` writes the model for
    `from_pretrained`, or adapters for PEFT.

    Example:
        class OurTrainer(expertmesh.TrainerMixin, transformers.Trainer):
            pass

        trainer = OurTrainer(engine, arguments, collator, train_dataset=dataset)
        trainer.train()
        trainer.save_model("model")

    Args:
        model: an `Engine`, from `expertmesh.load`.
        args: `TrainingArguments`, or those of the class.
        others: what the class takes besides.

    Raises:
        ExpertMeshError: the model is no engine, or something is asked for that cannot be heeded.
    """

    engine: Engine

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **more: Any):
        if not isinstance(model, Engine):
            raise ExpertMeshError(
                f"model is a {type(model).__name__}: give the engine that expertmesh.load returns, as in "
                "Trainer(model=expertmesh.load('DIR', ep_size=8), ...)"
            )
        self.engine = model
        self._check_class(others, more)
        if args is not None:
            args = self._heeded(args)
        held = {name: value for name, value in vars(model.model).items() if name == "forward"}
        router_logits = getattr(model.model.config.get_text_config(), "output_router_logits", None)
        super().__init__(model.model, args, *others, **more)
        # trl puts a forward of its own in the model's place, for a loss that ours takes the place of
        vars(model.model).pop("forward", None)
        vars(model.model).update(held)
        if router_logits is not None:
            model.model.config.get_text_config().output_router_logits = router_logits
        self._counts: StepCounts | None = None
        self._routing: Routing | None = None
        # of the steps since they were logged: the losses of `add_gradients`, added up
        self._losses = torch.zeros(3, dtype=torch.float64, device=model.ranks.device)
        self._steps = 0
        self._hooked: torch.optim.Optimizer | None = None

    # ---- what is asked for ----

    def _check_class(self, others: tuple[Any, ...], more: dict[str, Any]) -> None:
        for kind in type(self).__mro__:
            if "compute_loss" in vars(kind):
                if kind.__module__ not in _LOSS_OWNERS:
                    raise ExpertMeshError(
                        f"{kind.__name__} computes a loss of its own, which would not be heeded: TrainerMixin is for "
                        "classes whose loss is the cross-entropy of the labels, as transformers.Trainer's and trl's "
                        "SFTTrainer's; take the engine's forward_backward in a loop of your own"
                    )
                break
        for name in ("compute_loss_func", "model_init", "peft_config", "optimizer_cls_and_kwargs"):
            if more.get(name) is not None:
                remedy = "adapter='lora' to expertmesh.load" if name == "peft_config" else "a model that was loaded"
                raise ExpertMeshError(f"{name}: cannot be heeded for a model that is sharded already; give {remedy}")
        for name in ("cp_size", "tp_size"):
            if getattr(self.engine.config, name) > 1:
                raise ExpertMeshError(
                    f"{name}: Trainer gives every rank other sequences, and the ranks of a context-parallel or "
                    "tensor-parallel group need the same; take the engine's step in a loop of your own, or train_ep.py"
                )
        if self.engine.config.pp_size > 1:
            raise ExpertMeshError(
                "pp_size: Trainer gives every rank other sequences, and calls the model for each; the ranks of a "
                "pipeline need the same, and a step's micro-batches at once; take the engine's step in a loop of your "
                "own, or train_ep.py"
            )

    def _heeded(self, args: Any) -> Any:
        """The training arguments, without what the engine has decided."""
        for name, remedy in _INSTEAD.items():
            if getattr(args, name, None):
                raise ExpertMeshError(f"{name} of the training arguments cannot be heeded: {remedy}")
        if args.optim not in _OPTIMIZERS:
            raise ExpertMeshError(
                f"optim={args.optim.value} of the training arguments cannot be heeded: give optim to expertmesh.load, "
                "whose optimizers know parameters of several meshes"
            )
        if getattr(args, "loss_type", None) not in (None, *_LOSSES):
            raise ExpertMeshError(
                f"loss_type {args.loss_type}: the loss is the cross-entropy of the labels; leave it out"
            )
        if args.load_best_model_at_end and args.save_only_model:
            raise ExpertMeshError("save_only_model: leaves nothing for load_best_model_at_end to load; leave one out")
        config = self.engine.config
        if args.bf16 and not config.bf16:
            warnings.warn("bf16 of the training arguments is not heeded: give it to expertmesh.load", stacklevel=4)
        args = copy.copy(args)
        # our own was chosen when the model was loaded, and theirs would take its place
        asked = bool(args.gradient_checkpointing)
        args.gradient_checkpointing = False
        if hasattr(args, "activation_checkpointing"):
            args.activation_checkpointing = False
        if asked and config.gradient_checkpointing == "none":
            warnings.warn(
                "gradient_checkpointing of the training arguments is not heeded: give gradient_checkpointing='full' or "
                "'selective' to expertmesh.load",
                stacklevel=4,
            )
        args._n_gpu = min(args.n_gpu, 1)
        return args

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
            self.optimizer = engine.optimizer
        if self._hooked is not self.optimizer:
            self.optimizer.register_step_post_hook(self._updated)
            self._hooked = self.optimizer
        return self.optimizer

    def _updated(self, *_: Any) -> None:
        assert self._routing is not None
        assert self._counts is not None
        self.engine.updated(self._routing)
        self.engine.tokens += self._counts.tokens

    # ---- a step ----

    @in_place_of_trainers
    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and its target tokens over all ranks."""
        taken = list(islice(epoch_iterator, num_batches))
        batches = self.engine.batches(taken)
        self.engine.release()
        self._counts, self._routing = count_step(self.model, batches), None
        self._steps += 1
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
        self._losses += mine
        return mine[0] * self.engine.ranks.world_size

    @in_place_of_trainers
    def _clip_grad_norm(self, model: Any) -> float:
        return self._checked(self.engine.clip(self.args.max_grad_norm))

    @in_place_of_trainers
    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._checked(self.engine.clip(0)) if grad_norm is None else grad_norm

    def _checked(self, norm: float) -> float:
        """Raises, or leaves nothing to update by, where gradients are not finite; as --on-nonfinite has it."""
        if not math.isfinite(norm):
            said = f"step {self.state.global_step + 1}: the gradient norm is {norm}"
            if self.engine.config.on_nonfinite == "stop":
                raise ExpertMeshError(f"{said}; give on_nonfinite='skip' to expertmesh.load to leave such steps out")
            warnings.warn(f"{said}: the optimizer step is skipped", stacklevel=2)
            self.engine.model.zero_grad()
        return norm

    @in_place_of_trainers
    def log(self, logs: dict[str, float], *more: Any, **others: Any) -> None:
        """With the auxiliary losses, where there are any, unweighted."""
        weights = self.engine.balance.weights
        if "loss" in logs and (weights.balance > 0 or weights.z > 0):
            dist.all_reduce(self._losses)
            _, balance, z = (self._losses / max(self._steps, 1)).tolist()
            logs |= {"balance_loss": balance} if weights.balance > 0 else {}
            logs |= {"z_loss": z} if weights.z > 0 else {}
            self._losses.zero_()
            self._steps = 0
        super().log(logs, *more, **others)

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
        """The loss over exactly the target tokens, each once; with metrics, transformers' own loop over logits."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only:
            # else accelerate would move the model, and have it computed with in another dtype
            if not self.accelerator._models:
                self.accelerator._models.append(self.model)
            with inference(self.model):
                return super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        sampler: Any = getattr(dataloader, "batch_sampler", None)
        if getattr(sampler, "even_batches", False):
            sampler.even_batches = False  # no sequence twice
        self.callback_handler.eval_dataloader = dataloader
        batches = []
        for inputs in dataloader:
            batches.append(inputs)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        found = self.engine.evaluate(batches)
        number = torch.tensor(sum(len(inputs["input_ids"]) for inputs in batches), device=self.engine.ranks.device)
        dist.all_reduce(number)
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": found.loss}, int(number))  # type: ignore[arg-type]

    @in_place_of_trainers
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss (the mean of this rank's tokens), logits and labels of a batch."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        asked = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
        with torch.no_grad():
            logits = model(**asked, use_cache=False).logits
        loss = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    # ---- files ----

    @in_place_of_trainers
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, with tokenizer and training arguments. All ranks call it together.

        Into a checkpoint of Trainer's it is not written, unless with save_only_model: the training checkpoint there has
        it, from which `expertmesh-checkpoints convert` makes it.
        """
        if _internal_call and not self.args.save_only_model:
            return
        out = Path(output_dir or self.args.output_dir or "")
        partial = out / f".model{PARTIAL}"
        with raise_together(), write_errors(out):
            if self.args.should_save:
                out.mkdir(parents=True, exist_ok=True)
                rmtree(partial, ignore_errors=True)
        self.engine.export(partial, overwrite=True)
        with raise_together(), write_errors(out):
            if self.args.should_save:
                _move_into(partial, out)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(out)
                torch.save(self.args, out / _ARGUMENTS)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @in_place_of_trainers
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.step_number = self.state.global_step
        self.engine.save(Path(output_dir) / STATE)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            with whole(Path(output_dir) / _SCHEDULER) as partial:
                torch.save(self.lr_scheduler.state_dict(), partial)

    @in_place_of_trainers
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the optimizer's state, once there is an optimizer."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ExpertMeshError(
                f"{resume_from_checkpoint}: has no {STATE}/, the training checkpoint that expertmesh writes there "
                "(with save_only_model it writes none); it cannot be resumed"
            )

    @in_place_of_trainers
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.engine.resume(Path(checkpoint) / STATE)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
        # the rates of its next step; a training checkpoint of ours has the optimizer's tensors alone
        for group, rate in zip(self.engine.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    @in_place_of_trainers
    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.engine.resume(Path(self.state.best_model_checkpoint) / STATE)


def _move_into(made: Path, out: Path) -> None:
    """Let the files of an export take the place of an earlier one's; what else is in the directory stays."""
    for pattern in ("model*.safetensors", "model.safetensors.index.json", "adapter_model*"):
        for stale in out.glob(pattern):
            stale.unlink()
    for path in made.iterdir():
        if path.is_dir() and (out / path.name).is_dir():
            rmtree(out / path.name)
        os.replace(path, out / path.name)
    made.rmdir()


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on an engine: `Trainer(model=expertmesh.load(...), args=TrainingArguments(...), ...)`.

    Example:
        trainer = expertmesh.Trainer(model=engine, args=arguments, data_collator=collator, train_dataset=dataset)
        trainer.train()
    """
