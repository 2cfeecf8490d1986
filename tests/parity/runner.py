"""Runs rows of the table on ranks."""

from pathlib import Path

from tests.distributed.pool import RankPool
from tests.distributed.reference import assembled, config_of, ours
from tests.encoded import save_mxfp4
from tests.parity.case import Case, Figures, hf_model
from tests.parity.compare import assert_same
from tests.parity.kept import expected
from tests.parity.rows import Row


class Runner:
    """A model is saved once, and a run that several rows are compared with is made once."""

    def __init__(self, ranks: RankPool, directory: Path):
        self.ranks, self.directory = ranks, directory
        self.paths: dict[str, Path] = {}
        self.others: dict[str, Figures] = {}

    def compare(self, row: Row) -> Figures:
        found = self.run(row)
        if row.against is None:
            wanted = expected(row.case)
        else:
            key = str(row.against)
            wanted = self.others[key] if key in self.others else self.others.setdefault(key, self.run(row.against))
        assert_same(found, wanted, row.allowed, row.bits)
        return found

    def run(self, row: Row) -> Figures:
        topology, checks_replicas = row.topology, row.topology.pp_size > 1
        path = self.saved(row.case)
        if topology.world_size > 1:
            assembled(path, config_of(row.case, topology), row.case.kernel)
        results = self.ranks.run(ours, topology.world_size, path, topology, row.case, row.within, checks_replicas)
        found: Figures = results[0]
        return found

    def saved(self, case: Case) -> Path:
        key = f"{case.family} {case.changes} {case.zeroed} {case.mxfp4}"
        if key not in self.paths:
            self.paths[key] = self.directory / str(len(self.paths))
            if case.mxfp4:
                save_mxfp4(hf_model(case), self.paths[key])
            else:
                hf_model(case).save_pretrained(self.paths[key])
        return self.paths[key]
