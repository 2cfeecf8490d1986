"""Fine-tune a Hugging Face mixture-of-experts model with expert parallelism.

    torchrun --nproc-per-node 8 train_ep.py --model DIR --dataset data.jsonl --ep-size 8
    python train_ep.py --model DIR --dataset data.jsonl            # one process
    python train_ep.py migrate theirs.yaml > ours.yaml             # another tool's settings, for --config

`--help` lists the flags. What is wrong with them is told before torch is imported; the run itself is
`training/run/run.py`.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from expertmesh.moe.util.command import run_command
from expertmesh.moe.util.errors import ExpertMeshError, as_printed
from expertmesh.moe.util.process_place import process_place
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.runtime.preemption import StopRequest, end_before_start
from expertmesh.sharding.torchrun import tell_mistake

if TYPE_CHECKING:
    from expertmesh.training.config.train_config import TrainConfig


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code is 0, 2 after a mistake of the user's (reported once per node), or 75 after a signal stopped
    the run, with a checkpoint saved if it had begun to train."""
    # before all else, imports too: a cluster starts a run again after 75 alone
    with StopRequest(end_before_start):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["migrate"]:
        from expertmesh.training.config.migrate import main as migrate

        return migrate(words[1:])
    from expertmesh.sharding.runtime.allocator import let_segments_grow

    let_segments_grow(os.environ)
    # before torch is imported: idle threads sleep instead of spinning, which on busy cores made steps 100 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not os.isatty(2):
        os.environ.setdefault("TQDM_MININTERVAL", "15")  # of bars in a log, which tqdm reads when it is imported
    try:
        config = read_flags(argv)
        from expertmesh.training.run.run import run

        return run(config)
    except ExpertMeshError as error:
        return tell_mistake(f"train_ep.py: error: {as_printed(error)}")


def read_flags(argv: Sequence[str] | None) -> "TrainConfig":
    """The configuration, and what it asks of the process before torch computes anything.

    Raises:
        ExpertMeshError: a flag does not work here; ranks on other nodes, where it may work, are told.
    """
    from expertmesh.training.config.train_config import parse_config
    from expertmesh.training.start.process import check_output_dir, prepare_process

    try:
        config = parse_config(argv)
        check_output_dir(config)
        prepare_process(config, reads_data=True)
        from expertmesh.sharding.runtime.process import device_type, settle_malloc

        if device_type(config.use_cpu) == "cpu":
            settle_malloc()
        return config
    except ExpertMeshError as error:
        if process_place().spans_nodes:
            from expertmesh.sharding.runtime.process import refuse_at_start

            refuse_at_start(str(error))
        raise


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
