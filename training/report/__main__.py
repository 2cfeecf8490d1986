"""Make a run's report.html again: `python -m expertmesh.training.report OUTPUT_DIR`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from expertmesh.moe.util.command import run_command
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import Parser
from expertmesh.moe.util.terminal import ends_with_reader


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where there is no run to report on."""
    parser = Parser(
        prog="python -m expertmesh.training.report",
        description="Write a run's report.html again, from its metrics.jsonl.",
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="--output-dir of the run")
    try:
        output_dir = parser.parse_args(argv).output_dir
        from expertmesh.training.report.page import write_report  # imports numpy, which --help does without

        print(write_report(output_dir))
    except ExpertMeshError as error:
        print(f"training.report: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
