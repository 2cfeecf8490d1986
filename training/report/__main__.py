"""Make a run's report.html again: `python -m training.report OUTPUT_DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe import ExpertMeshError
from moe.command import run_command
from moe.terminal import ends_with_reader
from training.report.page import write_report


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where there is no run to report on."""
    parser = argparse.ArgumentParser(prog="python -m training.report", description=__doc__, allow_abbrev=False)
    parser.add_argument("output_dir", type=Path, help="--output-dir of the run: where its metrics.jsonl is")
    arguments = parser.parse_args(argv)
    try:
        print(write_report(arguments.output_dir))
    except ExpertMeshError as error:
        print(f"training.report: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
