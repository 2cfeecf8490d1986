"""torchrun, but for how it ends: `python -m expertmesh.launch --nproc-per-node 8 train_ep.py ...`.

It takes torchrun's flags, which torch itself reads. It ends with the exit code of the rank that failed first, and adds
nothing to what that rank has told in one line.
"""

import gc
import logging
import signal
import sys
from collections.abc import Sequence
from subprocess import Popen
from typing import NoReturn

from expertmesh.moe.util.command import INTERRUPTED, run_command
from expertmesh.sharding.runtime.preemption import SIGNALS, StopRequest, end_before_start
from expertmesh.sharding.torchrun import MISTAKE, STOPPED

TOLD = (MISTAKE, STOPPED, INTERRUPTED)
"""Exit codes of ranks that have said why they end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; the exit code is 0, that of the first rank that failed (128 + n after signal n), or 75 or 128 + n
    where signal n ended torchrun itself: 75 if its ranks have saved a checkpoint."""
    # until there are ranks, which torch's own handlers then tell
    with StopRequest(end_before_start):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from expertmesh.moe.torch_private import before_torchrun_ends

    # torch logs "failed (exitcode: 2) local_rank: 0 (pid: 1) of binary: ..." before it raises
    logged = tuple(f"failed (exitcode: {code})" for code in TOLD)
    logging.getLogger(SignalException.__module__).addFilter(lambda line: not line.getMessage().startswith(logged))
    try:
        arguments = run.parse_args(argv)
        if arguments.signals_to_handle == run.get_args_parser().get_default("signals_to_handle"):
            arguments.signals_to_handle += ",SIGUSR1"  # which else would end torchrun alone
        with before_torchrun_ends(_pass_over_repeated_signals):
            run.run(arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in TOLD:
            print(error, file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        # torch keeps its ranks' processes in the frames of this error, and their exit codes nowhere else
        ranks = [found for found in gc.get_objects() if type(found) is Popen]
        return STOPPED if any(rank.returncode == STOPPED for rank in ranks) else 128 + error.sigval
    except ValueError as error:  # of torch's reading of a flag
        print(f"launch: error: {error}", file=sys.stderr)
        return MISTAKE
    return 0


def _pass_over_repeated_signals() -> None:
    """What clusters repeat would cut torchrun's wait for ranks that save, and a third signal end it, and them. Ctrl-C
    still does."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
