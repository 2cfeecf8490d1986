"""Write a run's report.html again, or a page that compares runs: `python -m expertmesh.report OUTPUT_DIR...`."""

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
        prog="python -m expertmesh.report",
        description="Write a run's report.html again, or a page that compares several runs.",
    )
    parser.add_argument("output_dirs", metavar="OUTPUT_DIR", type=Path, nargs="+", help="--output-dir of a run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="page of several runs (default: comparison.html in this directory)"
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write the page of several runs every minute until all have ended, or Ctrl-C",
    )
    try:
        arguments = parser.parse_args(argv)
        from expertmesh.training.report.page import (
            COMPARISON,
            watch,
            write_comparison,
            write_report,
        )  # numpy, not for --help

        output_dirs, output = arguments.output_dirs, arguments.output
        if len(output_dirs) > 1:
            page = output or Path(COMPARISON)
            print(write_comparison(output_dirs, page), flush=True)
            if arguments.watch:
                watch(output_dirs, page)
        elif output is not None:
            raise ExpertMeshError("--output is for several runs; the report of one run is report.html in its directory")
        elif arguments.watch:
            raise ExpertMeshError("--watch is for several runs; a run writes its own report.html again as it goes")
        else:
            print(write_report(output_dirs[0]))
    except ExpertMeshError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
