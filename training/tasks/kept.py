"""What a model has given of a run's data before training, kept in the output directory for a resumed run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ...checkpoints.files.directories import write_errors
from ...checkpoints.files.kept import damage, record_kept, recorded_key
from ...sharding.runtime.process import Ranks, raise_together


@dataclass(frozen=True)
class KeptPass:
    """What one pass over the data gives.

    Attributes:
        record: the file that says what `files` are of, beside them.
        key: of what they depend on (see `start.fingerprints`), on rank 0.
        what: they are, in words.
        tell: is told of damaged ones, on rank 0.
    """

    record: Path
    files: list[Path]
    key: str
    what: str
    ranks: Ranks
    tell: Callable[[str], object]

    def get(self, make: Callable[[], object], refuse: Callable[[str, bool], object]) -> bool:
        """See to it that the files are there: as they were kept, or made anew. All ranks call it together.

        Args:
            make: writes them.
            refuse: is asked on rank 0 before, with what is wrong with those that are there, in words, and whether they
                are of something else; it may raise.

        Returns:
            Whether they were kept.
        """
        is_kept = [False]
        with raise_together(patient=self.ranks):
            if self.ranks.rank == 0:
                wrong, is_damaged, is_other = self._wrong()
                is_kept = [not wrong]
                if wrong:
                    refuse(wrong, is_other)
                if is_damaged:
                    self.tell(f"note: {wrong}; {self.what} are computed anew")
        dist.broadcast_object_list(is_kept, src=0)
        if not is_kept[0]:
            make()
            with raise_together(), write_errors(self.record.parent):
                if self.ranks.rank == 0:
                    record_kept(self.record, self.key, self.files)
        return is_kept[0]

    def _wrong(self) -> tuple[str, bool, bool]:
        """(what is wrong with the files, in words; whether they are damaged; whether they are of something else)."""
        first = self.files[0]
        if not any(file.exists() for file in self.files):
            return f"{first}: is not there", False, False
        recorded = recorded_key(self.record)
        if not recorded:
            return f"{self.record}: is damaged, or not there", True, False
        if recorded != self.key:
            return f"{first}: is of another model or other data", False, True
        found = damage(self.record, self.files)
        return found, bool(found), False
