"""Tracks what this rank is doing, and ends a run that hangs.

A rank that hangs cannot say so itself. A thread of each rank checks whether its main thread has made progress in
--ddp-timeout seconds; if not, it writes down step, layer, collectives and the stacks of all threads, and ends the
process. It acts just before the collective's own time limit, which over NCCL would end the process without a word.

Of collectives it knows what torch's flight recorder does. That keeps the latest ones, over gloo as over NCCL, once
TORCH_FR_BUFFER_SIZE is set: `start_process_group` sets it.
"""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from _thread import interrupt_main
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ...moe.experts.model_layers import decoder_layers
from ...moe.torch_private import FLIGHT_RECORDERS, _current_graph_task_id, _distributed_c10d
from ...moe.util.change_order import begin_change
from ...moe.util.command import INTERRUPTED, end_at_once
from ...moe.util.errors import ExpertMeshError
from ..collectives.groups import group_name
from ..stages import stages_of
from ..torchrun import STOPPED, started_by_torchrun
from .failures import (
    STORE_SECONDS,
    Notice,
    Notices,
    end_as_cause,
    end_as_consequence,
    is_broken_collective,
    is_timeout,
    show,
)
from .preemption import Stopped, is_leaving
from .process import Ranks

STUCK = "stuck"
"""Folder of the output directory in which each rank writes where it was."""

NOTICE_SECONDS = 2.0
"""How often a rank checks whether another has failed."""

SILENT_SECONDS = 60.0
"""How long a rank may go without a heartbeat. Its threads send them whatever it computes or waits for."""

OVER = "over"
"""The last heartbeat of a rank, which has come to the end of training."""

FAREWELL_SECONDS = 5.0
"""How long a rank that hangs lets the others write where they are, and one that learns of a failure lets its
main thread end by itself, before it ends the process."""

NO_LIMIT_SECONDS = 24 * 3600

SAVERS = "the saver's ranks"
"""Name of the process group that writes checkpoints in the background, apart from the main thread's work."""

_COLLECTIVES_TOLD = 20
_ROOT = Path(__file__).parents[2]


def collectives_limit(limit_seconds: int | None) -> int:
    """The time limit of a collective, in seconds, where a rank may hang for `limit_seconds` (None: for ever): a
    little more, so that the watchdog can tell what the collective's end would hide."""
    return NO_LIMIT_SECONDS if limit_seconds is None else limit_seconds + math.ceil(FAREWELL_SECONDS)


class Watchdog:
    """The watchdog of one rank.

    Args:
        ranks: this one among all.
        limit_seconds: how long it may make no progress while it trains; None for ever.
    """

    def __init__(self, ranks: Ranks, limit_seconds: int | None):
        self.rank = ranks.rank
        self.limit = limit_seconds
        self.notices = Notices(ranks.store, ranks.rank, ranks.world_size)
        # for the report of a rank that hangs; set once the run has an output directory
        self.directory: Path | None = None
        # what becomes of a run that ends before its end, in words
        self.goes_on: Callable[[], str] = lambda: "the same command begins anew"
        self.step: int | None = None
        self.doing = "start-up"
        # in which layer, beside what is done; of a pipeline alone, whose stages tell what they do
        self.place: str | None = None
        self.is_cut = False
        self.since = time.monotonic()
        # reading a large model or data set may take longer than any step
        self.is_limited = False
        self.ending = threading.Lock()
        self.is_over = threading.Event()
        self.judged: ExpertMeshError | None = None
        # a rank that torchrun started is not to outlive it: another run may be at work in its place
        self.parent = os.getppid() if started_by_torchrun() else None

    def at(self, doing: str, step: int | None = None, limited: bool = True) -> None:
        """Called by the main thread: tells where it is, and that it has made progress.

        Args:
            doing: such as "the optimizer's update".
            step: the current one, counted from 1; None: the same as before.
            limited: whether hanging here for too long means that something is wrong.
        """
        self.doing, self.place, self.since, self.is_limited = doing, None, time.monotonic(), limited
        if step is not None:
            self.step = step

    def where(self) -> str:
        """Where the main thread is, such as "step 7, forward of layer 3" or, in a pipeline, "step 7, stage 2 of 4,
        forward of micro-batch 1, forward of layer 3"."""
        place = self.doing if self.place is None else f"{self.doing}, {self.place}"
        return place if self.step is None else f"step {self.step}, {place}"

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Within it, the layers of a sharded Hugging Face model tell where they are."""
        begin_change(model, "watching")
        hooks, layers, stages = [], decoder_layers(model), stages_of(model)
        self.is_cut = stages is not None
        for index in range(len(layers)) if stages is None else stages.layers_here():
            layer = layers[index]
            # first of all hooks: FSDP's own gathers parameters, which is where a rank may come to wait
            hooks.append(layer.register_forward_pre_hook(partial(self._enters, index), prepend=True))
            hooks.append(layer.register_forward_hook(partial(self._leaves, index), prepend=True))
        self.at("the start of training")
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the whole run, from the process group's start on: threads watch over this rank and listen to the others,
        and an error ends it as `ending_clearly` says."""
        # already here: a rank that stops at once must be missed too
        self.notices.give_sign("begun")
        threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._listen)]
        for thread in threads:
            thread.start()
        try:
            with self.ending_clearly():
                yield
        finally:
            self.is_over.set()
            # the end of Python aborts a process of which a thread comes back from the store
            for thread in threads:
                thread.join(2 * STORE_SECONDS)

    @contextmanager
    def ending_clearly(self) -> Iterator[None]:
        """For work whose errors are to be told before anything outside is closed, which may take its time.

        An exception reaches the caller only if it is an ExpertMeshError that all ranks have met, as of a bad flag, or
        `Stopped`, of which the others are told. Any other error ends the process here.
        """
        try:
            yield
        except Stopped:
            self.notices.post(Notice(self.rank, "stopped", self.where()))
            raise
        except ExpertMeshError as error:
            if error is not self.judged and not self.notices.all_stopped():
                self._end(error)
            self.judged = error
            raise
        except KeyboardInterrupt:
            show(f"rank {self.rank} was interrupted in {self.where()}; {self.goes_on()}")
            end_at_once(INTERRUPTED)
        except BdbQuit:  # `quit`, or the end of what is typed
            show(f"rank {self.rank}: the run was ended from the debugger")
            self.notices.post(Notice(self.rank, "error", "ended from the debugger"))
            end_at_once(1)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> NoReturn:
        notice = self.notices.read()
        if is_leaving() or (notice is not None and notice.kind == "stopped"):
            # a library made an error of its own of it, or a collective broke that another rank has left
            raise Stopped from error
        if is_timeout(error) or (notice is not None and notice.kind == "stuck"):
            self.end_as_stuck(error)
        if notice is not None or is_broken_collective(error):
            end_as_consequence(error, self.where(), self.notices)
        end_as_cause(error, self.where(), self.notices)

    def _enters(self, index: int, layer: Any, inputs: Any) -> None:
        again = ", recomputed for its backward" if _current_graph_task_id() >= 0 else ""
        self._at_layer(f"forward of layer {index}{again}")

    def _leaves(self, index: int, layer: Any, inputs: Any, output: Any) -> None:
        out_BSD: Tensor = output[0] if isinstance(output, tuple) else output
        if out_BSD.requires_grad:
            out_BSD.register_hook(lambda grad: self._at_layer(f"backward of layer {index}"))
        self._at_layer(f"after the forward of layer {index}")

    def _at_layer(self, place: str) -> None:
        if self.is_cut:
            self.place, self.since = place, time.monotonic()
        else:
            self.at(place)

    def _watch(self) -> None:
        """In a thread: end the process once the main thread has made no progress for too long."""
        while self.limit is not None and not self.is_over.wait(min(1.0, self.limit / 10)):
            # should the main thread hang with Python's lock in its hands, no thread of Python's can end it
            faulthandler.dump_traceback_later(self.limit + SILENT_SECONDS, exit=True, file=2)
            if self.is_limited and time.monotonic() - self.since > self.limit:
                self.end_as_stuck()
        faulthandler.cancel_dump_traceback_later()

    def _listen(self) -> None:
        """In a thread: end the process soon after another rank has failed, if the main thread does not, which may wait
        for that rank in a collective.

        A failure is known by a notice; that of a rank that can leave none, as its machine has stopped, by its missing
        heartbeat: every rank checks the next one's. Over gloo, collectives mostly break by themselves then; over NCCL
        they wait for their time limit. Without the store no notice comes, and the others miss this rank: that ends it
        too. The end of torchrun is known by the process having another parent.
        """
        next_rank = (self.rank + 1) % self.notices.world_size
        sign, came = None, time.monotonic()
        answered = came
        while not self.is_over.wait(NOTICE_SECONDS):
            if self.parent not in (None, os.getppid()):
                show(f"rank {self.rank}, in {self.where()}: the torchrun that started it has ended, so it ends too")
                end_at_once(1)
            notice = self.notices.read()
            if notice is not None and notice.kind == "stopped" and notice.rank != self.rank:
                interrupt_main(signal.SIGTERM)  # it ends by itself where it is in no collective
            is_told = notice is not None and notice.rank != self.rank
            if (is_told or is_leaving()) and not self.is_over.wait(FAREWELL_SECONDS):
                if is_leaving() or notice is None or notice.kind == "stopped":
                    self._end_as_stopped()
                if notice.kind == "stuck":
                    self.end_as_stuck()
                end_at_once(1)
            arrived = self.notices.give_sign(str(time.monotonic()))
            latest = self.notices.sign_of(next_rank)
            if arrived or self.limit is None:
                answered = time.monotonic()
            elif time.monotonic() - answered > SILENT_SECONDS:
                self._miss(0, "no answer from its node's store", ", or the link to it is down")
            # where the store is out of reach, that says nothing of the next rank
            if not arrived or latest is None or latest != sign or self.limit is None:
                sign, came = latest, time.monotonic()
            elif sign != OVER and time.monotonic() - came > SILENT_SECONDS:
                self._miss(next_rank, "no heartbeat")
        self.notices.give_sign(OVER)

    def _miss(self, rank: int, sign: str, or_else: str = "") -> NoReturn:
        what = f"{sign} for {SILENT_SECONDS:.0f} s: its process or machine has stopped{or_else}"
        show(f"rank {self.rank}, in {self.where()}, lost rank {rank}: {what}")
        self.notices.post(Notice(rank, "error", what))
        time.sleep(FAREWELL_SECONDS)
        end_at_once(1)

    def stopped(self) -> str:
        """To be called as this rank is about to end after `Stopped`; what to say of it."""
        if self.parent is None:  # else torchrun has the store
            self.notices.leave(FAREWELL_SECONDS + NOTICE_SECONDS)
        return f"stopped by a signal in {self.where()}; {self.goes_on()} (exit code {STOPPED})"

    def _end_as_stopped(self) -> NoReturn:
        """End the process after a signal to this rank or another, where the main thread does not."""
        self.notices.post(Notice(self.rank, "stopped", self.where()))
        text = self.stopped()
        if self.rank == 0:
            show(text)
        end_at_once(STOPPED)

    def end_as_stuck(self, error: Exception | None = None) -> NoReturn:
        """Print and write down where this rank is, leave the others time to do the same, and end the process.

        Of the main thread and the watching ones, the first to come here does it; the others wait for the end here.

        Args:
            error: that of the collective that timed out, where the main thread is no longer in it.
        """
        self.ending.acquire()
        still = time.monotonic() - self.since
        try:
            show(self._standing(still, error) + self._written())
            self.notices.post(Notice(self.rank, "stuck", f"no progress for {still:.0f} s in {self.where()}"))
            time.sleep(FAREWELL_SECONDS)
        except Exception:
            show(f"rank {self.rank} hangs in {self.where()}, and cannot report more:\n{traceback.format_exc()}")
        finally:
            end_at_once(1)

    def _standing(self, still: float, error: Exception | None) -> str:
        own = [str(collective) for collective in recorded_collectives() if collective.group != SAVERS]
        return (
            f"rank {self.rank} has made no progress for {still:.0f} s (--ddp-timeout {self.limit}): {self.where()}, in "
            f"{_innermost_line(error)}" + (f"; its latest collective is {own[-1]}" if own else "")
        )

    def _written(self) -> str:
        """Write everything to a file; returns the end of the line on standard error, which says so."""
        if self.directory is None:
            faulthandler.dump_traceback(2)
            return ""
        file = self.directory / f"rank-{self.rank:05d}.txt"
        try:
            self.directory.mkdir(exist_ok=True)
            with file.open("w", encoding="utf-8") as stream:
                stream.write(f"rank {self.rank}: {self.where()}, for {time.monotonic() - self.since:.1f} s\n")
                stream.write("\nthe latest collectives, oldest first:\n")
                stream.writelines(f"  {collective}\n" for collective in recorded_collectives()[-_COLLECTIVES_TOLD:])
                stream.write("\nstacks:\n")
                stream.flush()
                faulthandler.dump_traceback(stream)
        except OSError as error:
            faulthandler.dump_traceback(2)
            return f" ({file} cannot be written: {error})"
        return f"; its stacks and latest collectives are in {file}"


def _innermost_line(error: Exception | None) -> str:
    """What the main thread executes, or where it met an error: function, file and line of the innermost frame of our
    own code, or else of any code."""
    if error is not None:
        steps = list(traceback.walk_tb(error.__traceback__))
    else:
        ident = threading.main_thread().ident
        assert ident is not None
        steps = list(traceback.walk_stack(sys._current_frames()[ident]))[::-1]
    own = [(frame, line) for frame, line in steps if _is_own(Path(frame.f_code.co_filename))]
    frame, line = (own or steps)[-1]
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"


def _is_own(file: Path) -> bool:
    return file.is_relative_to(_ROOT) and "site-packages" not in file.parts


@dataclass(frozen=True)
class Collective:
    """name: such as all_to_all. group: see `group_name`; or the group's number. sizes, dtypes: of the
    inputs. began: seconds ago. state: scheduled, started or completed; empty over gloo, which does not update it."""

    name: str
    group: str
    sizes: list[list[int]]
    dtypes: list[str]
    began: float
    state: str

    def __str__(self) -> str:
        what = ", ".join(f"{dtype} {size}" for size, dtype in zip(self.sizes, self.dtypes, strict=False))
        state = f", {self.state}" if self.state else ""
        return f"{self.name} over {self.group} of {what or 'nothing'}, called {self.began:.1f} s ago{state}"


def recorded_collectives() -> list[Collective]:
    """The latest collectives, oldest first; none where nothing is recorded."""
    now = time.time_ns()
    entries: list[dict[str, Any]] = []
    for dump in FLIGHT_RECORDERS:
        if hasattr(_distributed_c10d, dump):
            entries += json.loads(getattr(_distributed_c10d, dump)()).get("entries", [])
    return [_collective(entry, now) for entry in sorted(entries, key=lambda e: int(e["time_created_ns"]))]


def _collective(entry: dict[str, Any], now: int) -> Collective:
    number, description = entry["process_group"]
    backend, _, name = entry["profiling_name"].partition(":")
    return Collective(
        name,
        group_name(description) or f"group {number}",
        entry["input_sizes"],
        entry["input_dtypes"],
        (now - int(entry["time_created_ns"])) / 1e9,
        "" if backend == "gloo" else entry["state"],
    )
