"""`Engine`: an assembled model with its optimizer, and what is done with it: steps, evaluations, checkpoints, exports.

It is for a training loop: ours in `training.run.loop`, a user's own, or that of `transformers.Trainer`.
"""

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoints.adapters.export import Form, adapter_shards, export_adapter, plan_adapter
from ...checkpoints.adapters.merge import merge_adapter, merged_tensors, planned_merge
from ...checkpoints.convert import HowToWrite, encoded_as_source
from ...checkpoints.files.directories import write_errors
from ...checkpoints.files.dtype_names import DTYPE_CODES
from ...checkpoints.hf.checkpoint import Checkpoint
from ...checkpoints.hf.export import export_model
from ...checkpoints.hf.export_plan import plan_export
from ...checkpoints.hf.requantized import hf_outputs
from ...checkpoints.hf.side_files import side_files
from ...checkpoints.hf.source import ModelSource
from ...checkpoints.hf.stream import Begun, TensorStream, sharded_tensors
from ...checkpoints.hf.tokenizer_files import has_tokenizer
from ...checkpoints.model_card import model_card
from ...checkpoints.training_state.marker import check_carried
from ...checkpoints.training_state.resuming import ResumableOptimizer, load_training_state
from ...checkpoints.training_state.saving import Progress, Saver, checkpoint_name
from ...moe.experts.lora import Lora
from ...moe.experts.model_layers import moe_shape
from ...moe.experts.router_stats import Routing, over_ranks
from ...moe.hf_model.build import count_parameters
from ...moe.hf_model.counts import ParameterCounts
from ...moe.hf_model.image_costs import image_flops
from ...moe.kernels.c_compiler import check_c_compiler
from ...moe.transformers_private import missing_kernels
from ...moe.util.errors import ExpertMeshError, warn_user
from ...moe.util.telling import telling
from ...moe.util.versions import without_kernels
from ...sharding.clipping import clip_grad_norm
from ...sharding.collectives.node_groups import check_tp_groups
from ...sharding.mesh import Mesh, build_mesh
from ...sharding.parallelize.parallelize import free_gathered, without_copies
from ...sharding.parallelize.unreached import agree_on_gradients
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.runtime.watchdog import collectives_limit
from ...sharding.state import sharded_parameters
from ...sharding.topology import check_divides, check_sizes
from ..attention.flash_kernels import use_flash_kernels
from ..attention.padded_lengths import batch_maker_of
from ..config.train_config import TrainConfig
from ..data.batch import IGNORED, Batch, LossBatch, LossInputs, batch_of, collate
from ..data.chat import answer_ends
from ..data.tokenizing import prompt_tokens
from ..loss.balance import Balance, BiasUpdate, choose_balance, correction_biases
from ..loss.objective import CROSS_ENTROPY, LossFunction, Objective
from ..metrics import REPLAY_CHANGED
from ..model_setup.lora_targets import lora_of
from ..optim.optimizer import build_optimizer, saved_bytes
from ..optim.schedule import Schedule, build_scheduler, resume_scheduler, step_scheduler
from ..start.consistency import compare_models
from ..start.elastic import fit_to_ranks
from ..start.inputs import load_tokenizer, open_model
from ..start.resume import Resumed, Tell, check_resume, find_resume, read_resumed
from ..steps.evaluate import Evaluation, label_logprobs, mean_loss
from ..steps.generate import generate
from ..steps.step import NO_TARGETS, StepResult, after_update, compute_gradients, outdate_working_weights, train_step
from .assembly import Opened, assemble, compute_dtype, open_weights, place
from .model_card import tell_loss, training_of

MicroBatch = Batch | Mapping[str, Any] | None
"""What a step takes: a `Batch`, what a data collator of transformers or trl makes, or None for a rank that has nothing
to do where others have."""


class Engine:
    """A model on its ranks, with its optimizer: what a training loop calls. All ranks call every method together.

    `expertmesh.load` returns one that is ready. It is assembled on the meta device when it is made, which takes no
    memory, and loaded by `place`.

    Example:
        for batch in batches:  # input_ids, labels and attention_mask, this rank's own
            figures = engine.step(batch)
        engine.save("checkpoints")
        engine.export("model")

    Attributes:
        config: the settings; with --elastic those that fit the ranks.
        changes: what is not as it was asked for then, in words.
        source, ranks: what the model is read from, and where it is.
        model: transformers' own class, with our experts in it.
        kernel: what computes the experts. trained: what is trained, in words, where it is not everything.
        batch_maker: makes batches of the model.
        images: takes the images out of batches; None: the model was loaded for text alone.
        flash_attention: whether a newer one than torch's own is used, in words; None where none is installed.
        balance: how the experts' load is kept even.
        counts: of its parameters. topology: of its ranks.
        facts: of what the run has read, to be recorded by checkpoints and compared on resume.
        step_number, tokens: optimizer steps so far, and the tokens in them. results: more rows of the model card.
        is_resumed: whether model and optimizer are as a training checkpoint had them, and no step was taken since.
        mesh, checkpoint, untrained: from `open` on; the last one says what becomes of tensors that are not trained.
        encoding: of the export, in words, from `open` on; None where --export-encoding asks for nothing.
        checkpoint_bytes: of a training checkpoint, from `open` on.

    Raises:
        ExpertMeshError: on all ranks, when the model cannot be built or trained with these settings.
    """

    mesh: Mesh
    checkpoint: Checkpoint
    checkpoint_bytes: int

    def __init__(self, config: TrainConfig, source: ModelSource, ranks: Ranks, tell: Tell = warn_user):
        self.source, self.ranks = source, ranks
        self.tell: Tell = tell if ranks.rank == 0 else lambda line: None
        config = config.settled()
        self.facts = compare_models(config, source, ranks)
        with raise_together():
            check_c_compiler(ranks.device.type)
            if config.cp_size > ranks.world_size:  # a trial takes sequences of at least so many positions
                check_divides("--cp-size", config.cp_size, ranks.world_size)
            assembled = assemble(config, source, ranks.device.type)
        num_experts = moe_shape(assembled.model).num_experts
        self.changes: list[str] = []
        self.resumed: Resumed | None = None
        """On rank 0: what `--resume` means, as its checkpoint.json tells it."""
        with raise_together():
            if ranks.rank == 0:
                self.resumed = read_resumed(config)
        if config.elastic:
            config, self.changes = fit_to_ranks(config, num_experts, ranks, self.resumed)
        self.config = config
        self.model, self.kernel, self.trained = assembled.model, assembled.kernel, assembled.trained
        self.batch_maker = batch_maker_of(self.model, config, ranks.device.type)
        self.images = self.batch_maker.images
        with raise_together():
            check_sizes(config.topology(ranks.world_size), num_experts)
            self.balance: Balance = choose_balance(config, self.model, source.config)
        check_tp_groups(config.topology(ranks.world_size), config.ranks_per_node)
        self.flash_attention = use_flash_kernels(self.model, config, ranks)
        self.counts: ParameterCounts = count_parameters(self.model)
        if self.images is not None:
            self.counts = replace(self.counts, images=image_flops(self.model))
        self.topology = config.topology(ranks.world_size)
        self.saver: Saver | None = None
        self.untrained: str | None = None
        self.encoding: str | None = None
        self.scheduler: Schedule | None = None
        self._end_of_schedule = math.inf
        self.step_number, self.tokens, self.is_resumed = 0, 0, False
        self._progress: Progress | None = None
        self._grad_norm = 0.0
        self._are_ends_given = False
        self._replays = False
        self.results: dict[str, str] = {}
        self._data: list[str] = []
        self._opened: Opened | None = None

    def __repr__(self) -> str:
        parameters, topology = f"{self.counts.total / 1e6:,.1f} M parameters", self.topology
        layout = f"{topology.world_size} ranks (pp {topology.pp_size}, dp {topology.dp_size}, ep {topology.ep_size})"
        return f"Engine({self.source.model_type}, {parameters}, {layout}, step {self.step_number})"

    def open(self, resume_from: Path | None = None, limit: int | None = None) -> None:
        """Say which rank holds what, and read names, shapes and dtypes of the weights: all that is to be known of them
        before they are read.

        Args:
            resume_from: the training checkpoint that `load_state` will be given.
            limit: seconds after which a collective fails; None: never.

        Raises:
            ExpertMeshError: on all ranks, where the model's files are damaged or do not fit, or the checkpoint is not
                of this run (see `check_resume`).
        """
        config, ranks = self.config, self.ranks
        if resume_from is not None:
            self._check_resume(resume_from)
        self.mesh = build_mesh(ranks.device.type, self.topology, collectives_limit(limit), config.overlap_chunks > 1)
        self.checkpoint_bytes = saved_bytes(self.model, config)
        self._opened = open_weights(config, self.model, self.source, self.mesh, resume_from, self.tell)
        checkpoint = self._opened.checkpoint
        if self.balance.bias_rate:
            checkpoint = checkpoint.exporting(correction_biases(self.model), "F32")
        if carried := checkpoint.carried_summary:
            self.untrained = _untrained(checkpoint, carried, config.drop_untrained)
        if config.drop_untrained:
            with raise_together():
                checkpoint = checkpoint.dropping_untrained()
        if self.source.vocab_size is not None:
            with raise_together():
                checkpoint.check_carried_tokens()
        if resume_from is not None and not config.drop_untrained:
            with raise_together():
                check_carried(resume_from, checkpoint)
        if config.export_encoding == "source":
            said = [f"exported with the quantization of {checkpoint.source.path}: {checkpoint.encodings}"]
            with raise_together():
                checkpoint = encoded_as_source(checkpoint, checkpoint, said.append)
            self.encoding = said[-1]
        self.checkpoint = checkpoint

    def place(self, resume_from: Path | None = None, limit: int | None = None) -> None:
        """Shard the model over the ranks and read its weights; seed torch's random numbers.

        Args:
            resume_from, limit: see `open`, which is called here if it was not called before.

        Raises:
            ExpertMeshError: on all ranks, where the model's files are damaged or do not fit, or see `open`.
        """
        config, ranks = self.config, self.ranks
        if self._opened is None:
            self.open(resume_from, limit)
        assert self._opened is not None
        where = self.mesh, ranks.device, resume_from, self.tell, self._opened
        place(config, self.model, self.source, *where)
        self._opened = None
        if config.keep_expert_copies and (why := without_copies(self.model, compute_dtype(config))):
            self.tell(f"note: --keep-expert-copies has no effect: {why}")
        torch.manual_seed(config.seed + ranks.rank)

    @cached_property
    def optimizer(self) -> ResumableOptimizer:
        """The optimizer that the settings name, made when it is first asked for."""
        return build_optimizer(self.model, self.config, self.mesh)

    def renew_optimizer(self) -> None:
        """Have the optimizer made anew when it is next asked for, by the settings as they are then."""
        vars(self).pop("optimizer", None)

    @cached_property
    def bias_update(self) -> BiasUpdate | None:
        """What moves the routers' correction biases after each update; None where they stay."""
        return BiasUpdate(self.model, self.balance.bias_rate) if self.balance.bias_rate else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the settings, or of the model's directory."""
        return load_tokenizer(self.config.tokenizer or str(self.source.path), self.source, self.config.add_tokens)

    def schedule(self, num_steps: int) -> Schedule:
        """Have the learning rate follow the settings' schedule over so many steps, of which a checkpoint that was just
        resumed has made its own.

        Raises:
            ExpertMeshError: it is no number of steps.
        """
        if not isinstance(num_steps, int) or num_steps < 0:
            raise ExpertMeshError(f"num_steps is {num_steps!r}; it must be an integer, 0 or more")
        self.scheduler = build_scheduler(self.optimizer, self.config, num_steps)
        self._end_of_schedule = num_steps
        if self.is_resumed and self._progress is not None:
            resume_scheduler(self.optimizer, self.scheduler, self.config, self._progress)
        return self.scheduler

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads, of `data_size`: the same on all ranks of a context-parallel group."""
        return self.topology.data_index(self.ranks.rank)

    @property
    def data_size(self) -> int:
        """How many parts the data are read in."""
        return self.topology.data_size

    # ---- a step, in one piece or in three ----

    def step(
        self,
        batches: MicroBatch | Sequence[MicroBatch],
        loss: LossFunction | None = None,
        count: Callable[[LossBatch], float] | None = None,
        figures: Sequence[str] = (),
    ) -> StepResult:
        """One optimizer step: gradients from zero, clipped to --max-grad-norm over all meshes, one update.

        Where the loss or the gradient norm is not finite there is no update; the loss is NaN where no token of any rank
        is a target. The learning rate follows the schedule, if there is one.

        A loss of your own is a function of the log-probabilities of this rank's target tokens, (N,) fp32, and of a
        `LossBatch`, which says which token and which sample each is, and has what the batch has as `loss_inputs`. It
        gives a sum: over tokens, or over samples by `LossBatch.sums`. The result is the same for every parallel layout.

        Example:
            def loss(logprobs_N, batch):  # REINFORCE: a sequence's advantage times its log-probability
                return -(batch["advantage"] * batch.sums(logprobs_N)).sum()

            batch = {**collated, "loss_inputs": {"advantage": advantages}}
            engine.step(batch, loss=loss, count=lambda batch: batch.num_samples)

        Args:
            batches: this rank's micro-batch, or its several ones.
            loss: the loss, in place of the cross-entropy.
            count: what a micro-batch counts for on this rank; the sum of the loss over all ranks and micro-batches is
                divided by the sum of it. By default the target tokens.
            figures: names of further numbers that `loss` gives behind the loss, in a tuple, for the result's `figures`.

        Raises:
            ExpertMeshError: on all ranks, when a batch is not what it should be, or ranks have unequally many.
        """
        objective = self._own(loss, count, figures)
        self.release()
        self.model.train()
        made = self.batches(batches, objective.by_token, objective.figures)
        result = self.train_step(made, objective=objective)
        self._advance()
        return self._told(result)

    def train_step(
        self,
        batches: Sequence[Batch],
        at: Callable[[str], object] = lambda doing: None,
        is_stopping: Callable[[], bool] = lambda: False,
        objective: Objective = CROSS_ENTROPY,
    ) -> StepResult:
        """As `step`, of batches on this rank's device, equally many on each; the learning rate stays.

        Args:
            at: is told what comes next, beside the layers.
            is_stopping: whether this rank was asked to stop, of which the result tells all.
            objective: what is minimised.
        """
        result = train_step(
            *(self.model, self.optimizer, batches, self.mesh, self.balance.weights),
            *(self.config.max_grad_norm, self.bias_update),
            at=at,
            before_update=self._wait_for_copies,
            is_stopping=is_stopping,
            objective=objective,
        )
        self._count(result)
        return result

    def forward_backward(
        self,
        batches: MicroBatch | Sequence[MicroBatch],
        loss: LossFunction | None = None,
        count: Callable[[LossBatch], float] | None = None,
        figures: Sequence[str] = (),
    ) -> StepResult:
        """Add to the gradients those of one or several micro-batches, whose mean loss is over all their target tokens.

        Args:
            batches, loss, count, figures: as `step`.

        Returns:
            The losses over all ranks, with a grad_norm of 0.

        Raises:
            ExpertMeshError: as `step`.
        """
        self.release()
        self.model.train()
        self._grad_norm = 0.0
        objective = self._own(loss, count, figures)
        made = self.batches(batches, objective.by_token, objective.figures)
        return self._told(compute_gradients(self.model, made, self.balance.weights, objective))

    def clip(self, max_norm: float | None = None) -> float:
        """Scale all gradients so that their norm over all meshes is at most `max_norm` (default: --max-grad-norm; 0
        leaves them alone).

        Returns:
            The norm before that.

        Raises:
            ExpertMeshError: `max_norm` is no number of 0 or more.
        """
        most = self.config.max_grad_norm if max_norm is None else max_norm
        if not isinstance(most, int | float) or not most >= 0:
            raise ExpertMeshError(f"max_norm is {most!r}; it must be a number, 0 or more")
        self.release()
        self._grad_norm = clip_grad_norm(self.model, self.mesh, most)
        return self._grad_norm

    def update(self, result: StepResult) -> None:
        """Take the optimizer's step and set the gradients to zero. As of `step`, there is no update where
        the loss, or the norm that `clip` has found, is not finite.

        Args:
            result: from `forward_backward`.
        """
        self.release()
        if replace(result, grad_norm=self._grad_norm).is_finite:
            self._wait_for_copies()
            agree_on_gradients(self.model, self.mesh)
            self.optimizer.step()
            self.updated(result.routing)
        self.optimizer.zero_grad()
        self._count(result)
        self._advance()

    def updated(self, routing: Routing) -> None:
        """To be called after each step of the optimizer that is not this class's own."""
        after_update(self.model, routing, self.bias_update)

    def release(self) -> None:
        """Let go of parameters that a forward has gathered, as one without a backward leaves some: they would outlive
        the next update of their shards, and be taken for what this rank holds."""
        free_gathered(self.model)

    def _own(self, loss: LossFunction | None, count: Any, figures: Sequence[str]) -> Objective:
        if loss is not None and self.config.train_mtp > 0:
            raise ExpertMeshError("train_mtp: goes with the cross-entropy alone, not with a loss of your own")
        return _objective(loss, count, figures)

    def _told(self, result: StepResult) -> StepResult:
        """The same, with what replay has changed; warned of where it has no target token, or counts nothing."""
        if self._replays:
            changed, number = over_ranks(result.routing).replayed_2.tolist()
            result = replace(result, figures={**result.figures, REPLAY_CHANGED: changed / max(number, 1)})
        if result.targets == 0 or not result.weight:
            why = "count gave 0 for all micro-batches of all ranks" if result.targets else NO_TARGETS
            self.tell(f"warning: the loss of a step is NaN, so it is skipped: {why}")
        return result

    def _count(self, result: StepResult) -> None:
        self.step_number += 1
        self.tokens += result.tokens
        self.is_resumed = False
        tell_loss(self, "loss", result.loss)

    def _wait_for_copies(self) -> None:
        """Before weights change: until those of a checkpoint under way have been copied."""
        if self.saver is not None:
            self.saver.wait_for_copies()

    def _advance(self) -> None:
        """The learning rate; warned of once where the schedule has left none."""
        if self.scheduler is None:
            return
        is_over = self.scheduler.last_epoch >= self._end_of_schedule and self.config.learning_rate > 0
        if is_over and not any(self.scheduler.get_last_lr()):
            self.tell(
                f"warning: the learning rate of a step is 0, as the schedule is over after {self._end_of_schedule} "
                "steps, and stays 0; give more max_steps, or call engine.schedule"
            )
            self._end_of_schedule = math.inf
        step_scheduler(self.scheduler, None)

    def batches(
        self, given: MicroBatch | Sequence[MicroBatch], for_loss: bool = False, figures: Sequence[str] = ()
    ) -> list[Batch]:
        """This rank's micro-batches of a step, on its device.

        Args:
            for_loss: whether the loss is a function of each target's log-probability. figures: those that it gives.

        Raises:
            ExpertMeshError: on all ranks, when a batch is not what it should be, or ranks have unequally many.
        """
        is_several = isinstance(given, Iterable) and not isinstance(given, Batch | Mapping)
        batches: list[Any] = list(given) if is_several else [given]  # type: ignore[arg-type]
        made, problem = [], None
        try:
            made = [self.batch(batch, for_loss) for batch in batches]
        except ExpertMeshError as error:
            problem = str(error)
        gathered: list[Any] = [None] * self.ranks.world_size
        has_any = any(batch is not None for batch in batches)
        replays = any(batch.routed_experts_BSLK is not None for batch in made)
        mine = (problem, len(batches), self._digests(batches), (for_loss, *figures), has_any, replays)
        dist.all_gather_object(gathered, mine)
        problems, numbers, digests, losses, have_any, replay = zip(*gathered, strict=True)
        if said := next(filter(None, problems), None):
            raise ExpertMeshError(said)
        _check_losses(losses)
        self._check_shared(digests)
        if len(set(numbers)) > 1 or numbers[0] == 0:
            raise ExpertMeshError(
                f"ranks have {min(numbers)} to {max(numbers)} micro-batches in one step; give every rank "
                "the same number, with None for batches that a rank lacks"
            )
        if not any(have_any):
            raise ExpertMeshError("every batch of a step is None on all ranks; leave the step out")
        self._replays = any(replay)
        return made

    def _digests(self, batches: Sequence[MicroBatch]) -> list[str]:
        """Of what a loop of one's own gives ranks that work on the same sequences."""
        config = self.config
        if config.pp_size * config.ranks_per_sequence == 1:
            return []
        return [_digest(batch) for batch in batches if not isinstance(batch, Batch)]

    def _check_shared(self, digests: Sequence[Sequence[str]]) -> None:
        """
        Args:
            digests: of each rank's batches.

        Raises:
            ExpertMeshError: ranks that work on the same sequences were given others.
        """
        first: dict[int, int] = {}
        for rank, found in enumerate(digests):
            other = first.setdefault(self.topology.data_index(rank), rank)
            if found != digests[other]:
                raise ExpertMeshError(
                    f"ranks {other} and {rank} get different batches, but share sequences with pp_size "
                    f"{self.config.pp_size}, cp_size {self.config.cp_size} and tp_size {self.config.tp_size}: "
                    "give each rank the part engine.data_rank of engine.data_size of the data (as rank and "
                    "num_replicas of a DistributedSampler)"
                )

    def batch(self, given: MicroBatch, for_loss: bool = False) -> Batch:
        """A micro-batch on this rank's device, which takes no collective.

        Args:
            for_loss: whether the loss is a function of each target's log-probability.

        Raises:
            ExpertMeshError: it is not what it should be (see `training.data.batch.batch_of`).
        """
        return self._made(given, for_loss).to(self.ranks.device)

    def _made(self, given: MicroBatch, for_loss: bool = False) -> Batch:
        """A micro-batch, where its tensors are."""
        if isinstance(given, Batch):
            return given
        if given is None:
            return collate([], self.mesh.cp_group, self.batch_maker, LossInputs() if for_loss else None)
        if not isinstance(given, Mapping):
            raise ExpertMeshError(
                f"a batch is a {type(given).__name__}; it must be a dict of input_ids, labels and attention_mask"
            )
        batch = batch_of(given, bool(self.config.packing), self.mesh.cp_group, self.batch_maker, for_loss)
        size = self.model.config.get_text_config().vocab_size
        targets = batch.targets_BS[batch.targets_BS != IGNORED]
        for name, ids in (("input_ids", batch.tokens_BS), ("labels", targets)):
            # a GPU would end in an assertion of some later kernel
            if (outside := ids[(ids < 0) | (ids >= size)]).numel():
                raise ExpertMeshError(f"{name} of a batch has {outside[0]}; the model's vocabulary is 0 to {size - 1}")
        return batch

    # ---- between steps ----

    def evaluate(
        self,
        batches: Iterable[MicroBatch],
        loss: LossFunction | None = None,
        count: Callable[[LossBatch], float] | None = None,
        figures: Sequence[str] = (),
    ) -> Evaluation:
        """The mean loss over exactly the target tokens of all ranks' batches; ranks may have unequally many. Batches
        come to the device one at a time (through a pipeline, a few).

        Args:
            batches: this rank's.
            loss, count, figures: as `step`.

        Raises:
            ExpertMeshError: on all ranks, when a batch is not what it should be.
        """
        return self._evaluated(batches, _objective(loss, count, figures))

    def _evaluated(self, batches: Iterable[MicroBatch], objective: Objective) -> Evaluation:
        """As `evaluate`, of an objective."""
        made, _ = self._all_made(batches, objective.by_token, objective.figures)
        evaluation = mean_loss(self.model, made, self.ranks.device, objective)
        if evaluation.targets == 0 or math.isnan(evaluation.loss):
            why = "it, or what count gave, is no number or 0" if evaluation.targets else NO_TARGETS
            self.tell(f"warning: the loss of an evaluation is NaN: {why}")
        tell_loss(self, "evaluation loss", evaluation.loss)
        return evaluation

    def logprobs(self, batches: Iterable[MicroBatch], return_routed_experts: bool = False) -> Any:
        """The log-probability of each label, without gradients: for each of this rank's batches (B, S) fp32, as its
        `labels`, with 0 where nothing is predicted. Ranks may have unequally many; None is given for None.

        Args:
            return_routed_experts: whether the experts that computed them are given too, alike on all ranks: in a list
                behind that of log-probabilities, (B, S, MoE layers, experts per token) int16, to be replayed as
                `routed_experts` of a batch; -1 for padding, and in layers that choose by a table.

        Raises:
            ExpertMeshError: on all ranks, when a batch is not what it should be, or the experts are asked for of a
                model that cannot replay them.
        """
        routes = self.batch_maker.routes if return_routed_experts else None
        if routes is not None:
            routes.check()
        made, given = self._all_made(batches, for_loss=True)
        shapes = [None if batch is None else torch.as_tensor(batch["input_ids"]).shape for batch in given]
        sizes = [1 if shape is None else shape.numel() for shape in shapes]
        sizes += [1] * (len(made) - len(given))
        logprobs, experts = label_logprobs(self.model, made, self.ranks.device, sizes, routes)
        found = [None if shape is None else x.view(shape) for shape, x in zip(shapes, logprobs, strict=False)]
        if routes is None:
            return found
        return found, [s if s is None else x.unflatten(0, s) for s, x in zip(shapes, experts, strict=False)]

    def _all_made(
        self, batches: Iterable[MicroBatch], for_loss: bool, figures: Sequence[str] = ()
    ) -> tuple[list[Batch], list[Any]]:
        """(micro-batches where their tensors are, equally many on all ranks; what was given for this rank's own)."""
        with raise_together():
            if isinstance(batches, Batch | Mapping) or not isinstance(batches, Iterable):
                raise ExpertMeshError(f"batches is a {type(batches).__name__}; give a list of batches")
            given: list[MicroBatch] = []
            made: list[Batch] = []
            for batch in batches:
                made.append(self._made(batch, for_loss))
                given.append(batch)
        gathered: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(gathered, (len(made), self._digests(given), (for_loss, *figures)))
        numbers, digests, losses = zip(*gathered, strict=True)
        _check_losses(losses)
        self._check_shared(digests)
        made += [self._made(None, for_loss) for _ in range(max(numbers) - len(made))]
        return made, given

    def generate(self, prompts: Sequence[str], max_new_tokens: int = 64) -> list[str]:
        """Greedy continuations of texts, the same on every rank.

        Args:
            prompts: the same on all ranks.
            max_new_tokens: of each continuation, at most.

        Raises:
            ExpertMeshError: on all ranks, when there is no tokenizer, or the prompts are no list of texts, or other
                ones on other ranks, or one has no token.
        """
        with raise_together():
            is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
            if not is_list or not all(isinstance(prompt, str) for prompt in prompts):
                raise ExpertMeshError("prompts must be a list of texts, as in generate(['Say hello'])")
            if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
                raise ExpertMeshError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer, 1 or more")
            tokens = [prompt_tokens(self.tokenizer, "{prompt}", prompt) for prompt in prompts]
            if self.images is not None and any(self.images.facts.token in each for each in tokens):
                raise ExpertMeshError(
                    "a prompt has an image's token, and generate takes texts alone; export the model, and generate "
                    "with transformers"
                )
        gathered: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(gathered, (tokens, max_new_tokens))
        if len({repr(each) for each in gathered}) > 1:
            raise ExpertMeshError("ranks get different prompts or max_new_tokens; give all ranks the same")
        answers = generate(self.model, tokens, max_new_tokens, self.end_tokens(self.tokenizer), self.ranks)
        return [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]

    def end_tokens(self, tokenizer: Any) -> list[int]:
        """Tokens that end a generated text: those of the model as it is exported, and the tokenizer's."""
        source = self.checkpoint.source
        return sorted({*source.generation_ends, *source.answer_ends, tokenizer.eos_token_id} - {None})

    def answers_end_in(self, tokens: Iterable[int], tokenizer: Any) -> list[str]:
        """Have these tokens, with which answers are trained to end, end generation in what is saved and exported.

        Without it, those of the tokenizer do.

        Returns:
            A line that says so, if the model's generation does not end with them already.
        """
        self._are_ends_given = True
        return self._end_in(tokens, tokenizer)

    def find_ends(self, tokenizer: Any) -> list[str]:
        """`answers_end_in` with the tokens that end answers by a tokenizer, or by the model's own, where it was not
        called before."""
        if self._are_ends_given:
            return []
        try:
            tokenizer = tokenizer or self.tokenizer
        except ExpertMeshError:  # a model without one
            return []
        return self._end_in(sorted(answer_ends(tokenizer)), tokenizer)

    def _end_in(self, tokens: Iterable[int], tokenizer: Any) -> list[str]:
        self.checkpoint = self.checkpoint.ending_in(tokens)
        if self.saver is not None:
            self.saver.origin = self.checkpoint
        source = self.checkpoint.source
        if source.generation_config is None:
            return []
        eos = "" if source.answer_end is None else ", and config.json the first, as its EOS"
        return [
            f"answers end with {_named(source.new_ends, tokenizer)}, and generation with "
            f"{_named(source.generation_ends, tokenizer) or 'no token'}: the exported "
            f"generation_config.json has both{eos}"
        ]

    # ---- training checkpoints ----

    def saves_to(self, directory: Path, tokenizer: Any, facts: Mapping[str, dict[str, str]] | None = None) -> None:
        """Have `save` write into a directory, beside what earlier ones wrote.

        Args:
            tokenizer: saved with the model; None: that of the settings, or the source's own.
            facts: of the data, to be compared on resume.
        """
        self.find_ends(tokenizer)
        tokenizer = self._saved(tokenizer)
        base = None if self.config.adapter == "none" else {"path": str(self.source.path)}
        limit, all_facts = self.config.save_total_limit, {**self.facts, **(facts or {})}
        self.saver = Saver(directory, self.checkpoint, tokenizer, limit, base, all_facts, self._card)

    def save(
        self, directory: str | Path, order: Mapping[str, int] | None = None, best: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a training checkpoint into DIRECTORY/step-N: weights, optimizer, learning rate, random state.

        It can be resumed on any number of ranks, and converted to Hugging Face form (`checkpoints export`).

        Returns:
            Its path, once it is complete.

        Raises:
            ExpertMeshError: on all ranks, when it could not be written; nothing half-written has its name then.
        """
        directory = Path(directory)
        with raise_together(), write_errors(directory):
            if self.ranks.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
        if self.saver is None:
            self.saves_to(directory, None)
        assert self.saver is not None
        self.release()
        self.saver.directory = directory
        self.saver.save(self.model, self.optimizer, self.progress(order or {}, best or {}), copies=False)
        if problem := self.saver.wait():
            raise ExpertMeshError(problem)
        return directory / checkpoint_name(self.step_number)

    def progress(self, order: Mapping[str, int], best: Mapping[str, Any], owed: Sequence[str] = ()) -> Progress:
        """Where training stands, as a checkpoint records it."""
        schedule = {} if self.scheduler is None else self.scheduler.state_dict()
        settings = asdict(self.config)
        return Progress(self.step_number, self.tokens, schedule, dict(order), settings, dict(best), list(owed))

    def resume(self, checkpoint: str | Path) -> Path:
        """Resume from a training checkpoint, of any number of ranks.

        Args:
            checkpoint: its path, or that of a directory of checkpoints, of which the newest complete one is taken.

        Raises:
            ExpertMeshError: on all ranks, when it is damaged, or of another model or optimizer, or of an adapter beside
                other weights.
        """
        found = find_resume(str(checkpoint), Path(checkpoint), self.tell, self.ranks)
        if found is None:
            raise ExpertMeshError(f"{checkpoint}: no training checkpoint there")
        self._check_resume(found)
        with raise_together():
            check_carried(found, self.checkpoint)
        self.load_state(found)
        return found

    def _check_resume(self, path: Path) -> None:
        by_default = replace(self.config, router_aux_loss_coef=None)
        balance = choose_balance(by_default, self.model, self.source.config).weights.balance
        self.facts = check_resume(path, self.config, self.facts, self.ranks, self.tell, balance)

    def weigh_balance(self, coefficient: float, origin: str) -> None:
        """Weigh the balancing loss by what no setting has said.

        Args:
            origin: where it is from, in words.

        Raises:
            ExpertMeshError: the model has no such loss.
        """
        config = replace(self.config, router_aux_loss_coef=coefficient)
        self.balance = replace(choose_balance(config, self.model, self.source.config), origin=origin)
        self.config = config

    def load_state(self, path: Path) -> Progress:
        """Put model, optimizer and schedule where a checkpoint has them that `place` or `resume` has checked."""
        self.release()
        progress = load_training_state(path, self.model, self.optimizer)
        outdate_working_weights(self.model)
        self.step_number, self.tokens, self.is_resumed = progress.step, progress.tokens, True
        self._progress = progress
        self.results = {}
        if self.scheduler is not None:
            resume_scheduler(self.optimizer, self.scheduler, self.config, progress)
        return progress

    # ---- exports ----

    def plan_exports(self, tokenizer: Any = None, merges: bool = False) -> dict[str, int]:
        """Plan what `export` will write and, if it `merges`, `merge`, from names alone, without a weight: what they
        would refuse is refused now.

        Args:
            tokenizer: as theirs.

        Returns:
            On rank 0, the bytes of "hf" and "adapter", whichever will be written.

        Raises:
            ExpertMeshError: on all ranks, when an export is not possible, or a file beside the weights cannot be read.
        """
        config, tokenizer, planned = self.config, self._saved(tokenizer), dict[str, int]()
        with raise_together(patient=self.ranks), write_errors(Path(tempfile.gettempdir())):
            if self.ranks.rank == 0:
                _ = self.checkpoint.source.generation_ends, self._card()  # read again by the exports
                if config.adapter == "none":
                    planned["hf"] = plan_export(self.checkpoint, config.shard_bytes, tokenizer).num_bytes
                else:
                    plan = plan_adapter(self.model, self.checkpoint, *self._of_adapter, tokenizer)
                    planned["adapter"] = plan.num_bytes
                    if merges:
                        how = self._how_to_merge(tokenizer, lambda _: None)
                        planned["hf"] = planned_merge(self.source.path, plan, how, self._merge_dtype).num_bytes
        return planned

    @property
    def _of_adapter(self) -> tuple[Lora, str, Form]:
        return lora_of(self.config), self.config.model, self.config.adapter_format

    @property
    def _merge_dtype(self) -> str | None:
        return DTYPE_CODES.get(f"torch.{self.config.merge_dtype}")

    def _how_to_merge(self, tokenizer: Any, tell: Callable[[str], None]) -> HowToWrite:
        return HowToWrite(
            *(self.config.shard_bytes, 1),
            overwrite=True,
            show_progress=True,
            drop_untrained=self.config.drop_untrained,
            tokenizer=tokenizer,
            as_source=self.checkpoint.origin is not None,
            tell=tell,
            tell_errors=tell,
        )

    def export(self, directory: str | Path, tokenizer: Any = None, overwrite: bool = False) -> list[str]:
        """Write the model for `from_pretrained` or, of a model with adapters, these alone, for PEFT.

        Args:
            tokenizer: saved with it; None: that of the settings, or the source's own.
            overwrite: whether to replace what is in the directory, which is done atomically.

        Returns:
            On rank 0, in lines: which tokens end generation there, if others than in the model's own; what config.json
            no longer claims; which rank servers must allow an adapter; with --export-encoding source, what quantizing
            has changed.

        Raises:
            ExpertMeshError: on all ranks, when the directory is not empty, or cannot be written.
        """
        out = Path(directory)
        with raise_together():
            if self.ranks.rank == 0 and not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ExpertMeshError(f"{out}: already contains files; choose another, or give overwrite=True")
        self.release()
        config, lines = self.config, self.find_ends(tokenizer)
        tokenizer = self._saved(tokenizer)
        if config.adapter == "none":
            how = (config.shard_bytes, tokenizer, self.ranks, self._card())
            lines += export_model(self.model, self.checkpoint, self.topology, out, *how)
        else:
            written = *self._of_adapter, tokenizer, self._card()
            lines += export_adapter(self.model, self.checkpoint, self.topology, out, *written)
        return lines if self.ranks.rank == 0 else []

    def merge(self, adapter: str | Path, directory: str | Path, tokenizer: Any = None) -> list[str]:
        """Write the model with an adapter merged into its weights.

        Args:
            adapter: where `export` has written it.
            directory: is replaced.
            tokenizer: as `export`.

        Returns:
            As `export`, and how much of the base has changed, and is lost to rounding.

        Raises:
            ExpertMeshError: on all ranks, when there is no such adapter, or the directory cannot be written.
        """
        lines: list[str] = []
        how = self._how_to_merge(self._saved(tokenizer), lines.append)
        with raise_together(patient=self.ranks):
            if self.ranks.rank == 0:
                merge_adapter(self.source.path, Path(adapter), Path(directory), how, self._merge_dtype)
        return lines

    def tensors(self, merge: bool = False, all_ranks: bool = False) -> TensorStream:
        """What `export` would write, as tensors: for a server that takes weights from memory. All ranks iterate over
        them together, as often as weights have changed. No rank has more than one tensor at a time.

        Example:
            for name, tensor in engine.tensors():
                if engine.ranks.rank == 0:
                    send(name, tensor)

        Args:
            merge: whether of a model with adapters it is what `merge` would write, which rank 0 reads from the base's
                files anew each time, in place of these alone.
            all_ranks: whether all ranks get them, or rank 0 alone; the others then get tensors of the meta device.

        Returns:
            Pairs of name and tensor, which is on the rank's device; vLLM takes it as a source of weights.

        Raises:
            ExpertMeshError: on all ranks, when there is nothing to merge, or it cannot be.
        """
        if merge and self.config.adapter == "none":
            raise ExpertMeshError("merge: the model has no adapter to merge; leave it out")
        return TensorStream(partial(self._merged_tensors if merge else self._own_tensors, all_ranks))

    @contextmanager
    def _own_tensors(self, to_all: bool) -> Iterator[Begun]:
        """What `export` writes."""
        self.release()
        if self.config.adapter == "none":
            outputs, shards = [*hf_outputs(self.checkpoint)], sharded_parameters(self.model, self.topology)
        else:
            plan = plan_adapter(self.model, self.checkpoint, *self._of_adapter, is_writer=False)
            outputs, shards = plan.weights.tensors, adapter_shards(self.model, self.topology)
        yield [output.part for output in outputs], sharded_tensors(outputs, shards, self.ranks.device, to_all)

    @contextmanager
    def _merged_tensors(self, to_all: bool) -> Iterator[Begun]:
        """What `merge` writes of what `export` writes."""
        self.release()
        with ExitStack() as stack:
            with raise_together(), write_errors(Path(tempfile.gettempdir())):
                directory = stack.enter_context(tempfile.TemporaryDirectory()) if self.ranks.rank == 0 else ""
            adapter = Path(directory, "adapter")
            export_adapter(self.model, self.checkpoint, self.topology, adapter, *self._of_adapter)
            how = self._how_to_merge(None, lambda _: None), self._merge_dtype
            yield merged_tensors(self.source.path, adapter, *how, self.ranks.device, to_all)

    def _card(self) -> str:
        """The model card of what is exported; empty where none can be made."""
        with telling("no model card is written", self.tell):
            return model_card(training_of(self, self._data), self.source.path, self.config.adapter != "none")
        return ""

    def _saved(self, tokenizer: Any) -> Any:
        """What is saved with the model; None: the source's own, as it is."""
        ends = self.checkpoint.source.answer_end is not None and has_tokenizer(self.source.path)
        return self.tokenizer if tokenizer is None and (ends or self.config.has_own_tokenizer) else tokenizer


def start_engine(config: TrainConfig, ranks: Ranks, tell: Tell, data: Sequence[str] = ()) -> Engine:
    """Open the model and make the engine, whose weights `Engine.place` reads. All ranks call it together.

    Args:
        tell: takes lines for the user, on rank 0.
        data: what a run of train_ep.py trains on, which a model card names.

    Raises:
        ExpertMeshError: on all ranks, when the model cannot be read, or trained with these settings.
    """
    with raise_together(patient=ranks):
        source = open_model(config)
        side_files(source.path)  # what cannot go along is better told now than at the export
    engine = Engine(config, source, ranks, tell)
    engine._data = list(data)
    if engine.changes:
        engine.tell(f"elastic: {ranks.world_size} ranks: {'; '.join(engine.changes)}")
    if ranks.device.type == "cuda" and (missing := missing_kernels(engine.model.modules())):
        engine.tell(_slower(missing))
    return engine


def _slower(missing: Mapping[str, Sequence[str]]) -> str:
    """A warning that a GPU will run functions of transformers that loop in Python, which forecasts do not assume (see
    `training.planning.coverage.assumed_code`).

    Args:
        missing: by package, from `missing_kernels`.
    """
    packages, code = sorted(missing), without_kernels(name for names in missing.values() for name in names)
    are = "is" if len(packages) == 1 else "are"
    return f"warning: {' and '.join(packages)} {are} not installed: {code}; pip install {' '.join(packages)}"


def _objective(
    loss: LossFunction | None, count: Callable[[LossBatch], float] | None, figures: Sequence[str]
) -> Objective:
    """
    Raises:
        ExpertMeshError: what is for a loss of one's own is given without one, or is none.
    """
    if loss is None:
        if count is not None or figures:
            raise ExpertMeshError("count and figures are for a loss of your own; give it as loss")
        return CROSS_ENTROPY
    for name, function in (("loss", loss), ("count", count)):
        if function is not None and not callable(function):
            raise ExpertMeshError(f"{name} is a {type(function).__name__}; it must be a function")
    if isinstance(figures, str) or not all(isinstance(name, str) for name in figures):
        raise ExpertMeshError(f"figures is {figures!r}; it must be a list of names")
    return Objective(loss, count, tuple(figures))


def _check_losses(losses: Sequence[tuple[Any, ...]]) -> None:
    """
    Args:
        losses: of each rank, whether its loss is one's own, and the names of its figures.

    Raises:
        ExpertMeshError: they differ.
    """
    other = next((rank for rank, each in enumerate(losses) if each != losses[0]), None)
    if other is not None:
        said = ("a loss of its own with the figures " + str(list(each[1:])) if each[0] else "none" for each in losses)
        first, another = (words for rank, words in enumerate(said) if rank in (0, other))
        raise ExpertMeshError(f"rank 0 gives {first}, rank {other} {another}: give all ranks the same loss and figures")


def _untrained(checkpoint: Checkpoint, carried: str, dropped: bool) -> str:
    """What becomes of tensors that are not trained, in a line.

    Args:
        carried: the checkpoint's summary of them.
        dropped: whether the export will not have them.
    """
    if dropped:
        return f"not trained and left out of the export: {carried}"
    return f"not trained and copied unchanged to the export from {checkpoint.source.path}: {carried}"


def _named(tokens: Iterable[int], tokenizer: Any) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)


def _digest(batch: Mapping[str, Any] | None) -> str:
    """Of all that a batch holds; of None, no batch."""
    total = hashlib.sha256()
    for name, value in sorted((batch or {}).items()):
        total.update(name.encode())
        if isinstance(value, Mapping):
            total.update(_digest(value).encode())
        elif isinstance(value, torch.Tensor):
            total.update(str((value.dtype, value.shape)).encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()
