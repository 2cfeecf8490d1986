"""A teacher's predictions of the data's target tokens, for distillation.

They are computed once, before the student is loaded, so that the two are never in memory together, and kept in the
output directory: the K most likely tokens at each target, and their log-probabilities, 8 bytes each. A resumed run, and
every further epoch, reads them there.

Shape suffixes: N target tokens, K of the teacher's most likely tokens at each of them.
"""

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...checkpoints.files.directories import write_errors
from ...checkpoints.hf.hub import resolve_model
from ...checkpoints.hf.source import ModelSource, open_source
from ...moe.hf_model.build import has_experts
from ...moe.util.atomic_write import PARTIAL
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ..config.train_config import TrainConfig, read_by
from ..data.batch import CANDIDATES, Batch, LossInputs, collate_rows
from ..data.sequences import Rows
from ..engine.engine import Engine
from ..start.fingerprints import teacher_key
from ..start.inputs import load_tokenizer
from ..steps.evaluate import by_length, head_outputs, inference
from .dense_teacher import DenseTeacher
from .kept import KeptPass
from .task import InputsOf, Preparation, TaskInputs

DIRECTORY = "teacher"
TEACHER = "teacher"
"""Input by target, (N, K) fp32: the teacher's log-probabilities of the candidates."""
_FACTS = "facts.json"
_LINE = "line"
"""Among what is known of a target: its number in the data, which is that of its line in the file."""


@dataclass(frozen=True)
class TeacherInputs:
    """What the loss of a student needs of each target.

    lines: (targets,) of fields token and logprob, K each; of a file, of which only what is asked for is read.
    firsts: the number of each sample's first target; one more, of all.
    """

    lines: NDArray[Any]
    firsts: Tensor

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        """What makes the inputs of a batch from the numbers of its entries of `rows`."""

        def inputs(numbers: list[int]) -> LossInputs:
            found = self.lines[_lines_of(rows, self.firsts, numbers).numpy()]
            tokens_NK, logprobs_NK = (torch.from_numpy(found[name].copy()) for name in ("token", "logprob"))
            return LossInputs(by_target={CANDIDATES: tokens_NK.long(), TEACHER: logprobs_NK})

        return inputs


def _firsts(rows: Rows) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), rows.samples.targets.cumsum(0)])


def _lines_of(rows: Rows, firsts: Tensor, numbers: Sequence[int]) -> Tensor:
    """Numbers of the targets of entries, in the order in which a batch has them."""
    samples = [sample for number in numbers for sample in rows.numbers(number)]
    runs = [torch.arange(int(firsts[sample]), int(firsts[sample + 1])) for sample in samples]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)


def open_teacher(config: TrainConfig, tokenizer: Any, student: ModelSource) -> ModelSource:
    """
    Raises:
        ExpertMeshError: there is no such model, or its tokens are others than the student's.
    """
    source = open_source(resolve_model(config.teacher, "--teacher"))
    own, vocabulary = load_tokenizer(str(source.path), source).get_vocab(), tokenizer.get_vocab()
    if own != vocabulary:
        names = sorted({*own.items()} ^ {*vocabulary.items()}, key=lambda entry: entry[1])
        raise ExpertMeshError(
            f"--teacher {config.teacher}: {len(names):,} tokens differ in its tokenizer and the student's, such as "
            f"{names[0][0]!r} ({names[0][1]}); give a teacher with the same tokenizer"
        )
    sizes = [model.text_config.vocab_size for model in (source, student)]
    if sizes[0] > sizes[1]:
        raise ExpertMeshError(
            f"--teacher {config.teacher}: its vocabulary has {sizes[0]:,} entries, the student's {sizes[1]:,}; it may "
            "predict tokens that the student has not"
        )
    if config.teacher_top_k > sizes[0]:
        raise ExpertMeshError(
            f"--teacher-top-k {config.teacher_top_k}: --teacher {config.teacher} has only {sizes[0]:,} tokens"
        )
    return source


def be_taught(run: Preparation, source: ModelSource) -> TaskInputs:
    """The teacher's predictions for all data, of an earlier start of the run or computed now. All ranks call it
    together.

    Args:
        source: from `open_teacher`.

    Raises:
        ExpertMeshError: on all ranks, where the teacher cannot be loaded, or its predictions cannot be written.
    """
    config, rows, ranks = run.config, run.rows, run.ranks
    directory, what = run.output_dir / DIRECTORY, "the teacher's predictions"
    files = [directory / f"{name}.npy" for name in rows]
    key = teacher_key(config, run.engine.facts)
    may_replace = run.resume_from is None or bool(config.allow_changed)

    def refuse(wrong: str, is_other: bool) -> None:
        if is_other and not may_replace:
            raise ExpertMeshError(
                f"--teacher {config.teacher}: {directory} has the predictions of another teacher, with another "
                "--teacher-top-k or dtype, or for other data; resume with what the run began with, or begin anew"
            )

    def make() -> None:
        _compute(config, source, rows, ranks, directory)
        # the teacher's modules refer to one another
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    was_kept = KeptPass(directory / _FACTS, files, key, what, ranks, run.engine.tell).get(make, refuse)
    with raise_together():
        found = {name: TeacherInputs(_read(directory, name), _firsts(part)) for name, part in rows.items()}
    how = "read from" if was_kept else "computed, and kept in"
    run.note(f"{what} of {len(found['training'].lines):,} target tokens: {how} teacher/")
    return TaskInputs.of(found)


def _read(directory: Path, name: str) -> NDArray[Any]:
    path = directory / f"{name}.npy"
    try:
        lines: NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ExpertMeshError(
            f"{path}: cannot be read: {error}; all nodes must see it; if it is damaged, delete {directory}"
        ) from error
    return lines


def _compute(config: TrainConfig, source: ModelSource, rows: dict[str, Rows], ranks: Ranks, directory: Path) -> None:
    try:
        with raise_together():
            kind = EngineTeacher if has_experts(source.config) else DenseTeacher
        teacher = kind(config, source, ranks)
    except ExpertMeshError as error:
        raise ExpertMeshError(f"--teacher {config.teacher}: {error}") from error
    with raise_together(), write_errors(directory):
        if ranks.rank == 0:
            directory.mkdir(exist_ok=True)
            (directory / _FACTS).unlink(missing_ok=True)
    for name, part in rows.items():
        _compute_part(teacher, config, teacher.rows_of(part), directory / f"{name}.npy")


class EngineTeacher:
    """A model with experts, on the layout of the run. All ranks make it together.

    Raises:
        ExpertMeshError: on all ranks, where it cannot be loaded.
    """

    def __init__(self, config: TrainConfig, source: ModelSource, ranks: Ranks):
        engine = Engine(_of_teacher(config), source, ranks)
        engine.place()
        self.model, self.mesh, self.maker, self.ranks = engine.model, engine.mesh, engine.batch_maker, ranks

    @staticmethod
    def rows_of(rows: Rows) -> Rows:
        """The data as sequences that it takes."""
        return rows

    def outputs(self, batches: Iterable[Batch], top_k: int) -> Iterator[tuple[Sequence[Batch], Sequence[Tensor]]]:
        """Batches on the device, some at a time, and (N, 2, K) of each: log-probabilities of the K likeliest tokens,
        and these; nothing where a pipeline's last stage is elsewhere."""
        return head_outputs(self.model, batches, self.ranks.device, by_token=False, top_k=top_k)


def _of_teacher(config: TrainConfig) -> TrainConfig:
    """The settings of a run that has the teacher as its model, on the same ranks."""
    own = {name: getattr(config, name) for name in read_by("teacher")}
    # no rank has only a part of a position's predictions
    own |= {"pipeline_layers": None, "loss_parallel": False}
    # whose weights are held in what it computes in
    optim = "adamw_bf16" if config.bf16 else "adamw_torch_fused"
    return TrainConfig(model=config.teacher, optim=optim, cross_entropy="chunked", **own)


def _compute_part(teacher: EngineTeacher | DenseTeacher, config: TrainConfig, rows: Rows, path: Path) -> None:
    """Every rank computes some micro-batches; rank 0 writes what all have found."""
    firsts, top_k, mesh = _firsts(rows), config.teacher_top_k, teacher.mesh
    mine = by_length(rows, config.per_device_eval_batch_size, mesh)
    maker = teacher.maker.within(int(rows.lengths.max()))

    def batch(numbers: list[int]) -> Any:
        lines = LossInputs(by_target={_LINE: _lines_of(rows, firsts, numbers)})
        return collate_rows(rows, numbers, mesh.cp_group, maker, lines)

    partial = path.with_name(path.name + PARTIAL)
    with raise_together(), write_errors(path.parent):
        lines = _new_lines(partial, int(firsts[-1]), top_k) if teacher.ranks.rank == 0 else None
    with inference(teacher.model):
        for batches, heads in teacher.outputs(map(batch, mine), top_k):
            # a pipeline's last stage has them alone
            found = [(_numbers(here), gave.cpu().numpy()) for here, gave in zip(batches, heads, strict=False)]
            of_ranks: list[Any] | None = None if lines is None else [None] * teacher.ranks.world_size
            dist.gather_object(found, of_ranks)
            if lines is not None:
                for numbers, figures in (entry for of_rank in of_ranks or () for entry in of_rank):
                    lines["logprob"][numbers], lines["token"][numbers] = figures[:, 0], figures[:, 1]
    with raise_together(), write_errors(path.parent):
        if lines is not None:
            lines.flush()
            partial.replace(path)


def _numbers(batch: Any) -> NDArray[Any]:
    lines: NDArray[Any] = batch.of_loss[_LINE].cpu().numpy().astype(np.int64)
    return lines


def _new_lines(path: Path, number: int, top_k: int) -> Any:
    """A file of so many lines, to be filled in memory that is mapped to it."""
    line = np.dtype([("token", np.int32, (top_k,)), ("logprob", np.float32, (top_k,))])
    lines = np.lib.format.open_memmap(path, "w+", line, (number,))
    # a disk that is full is told of now: a write to mapped memory would end the process by a signal
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return lines
