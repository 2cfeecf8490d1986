"""`python -m tests.fuzz --seed N` tries one seed again, `--minutes N` as many as there is time for."""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, ".package")

from tests.distributed.pool import RankPool
from tests.fuzz.fuzz import Outcome, run_seeds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="try these, and print all of them")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no other seed after so long")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--number", type=int, help="how many seeds at most")
    parser.add_argument("--all", action="store_true", help="print all of each seed, and not only of those that differ")
    parser.add_argument("--stop", action="store_true", help="stop at the first difference")
    args = parser.parse_args(argv)
    seeds: Iterable[int] = itertools.count(args.first)
    if args.seed is not None:
        seeds = args.seed
    elif args.number is not None:
        seeds = range(args.first, args.first + args.number)
    elif args.minutes == math.inf:
        parser.error("give --seed, --minutes or --number")
    found = []

    def tell(outcome: Outcome) -> None:
        lines = list(outcome.lines())
        if outcome.unlike is not None:
            found.append(outcome.seed)
        print("\n".join(lines if args.all or args.seed is not None or outcome.unlike else lines[:1]), flush=True)
        if outcome.unlike is not None and args.stop:
            raise KeyboardInterrupt

    pool = RankPool()
    with tempfile.TemporaryDirectory() as cache:
        # what was seen of models that another version of the code has built
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            tally = run_seeds(seeds, pool, time.monotonic() + 60 * args.minutes, tell)
            print("\n".join(tally.lines()))
        except KeyboardInterrupt:
            pass
        finally:
            pool.close()
    print(f"{len(found)} differ: {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
