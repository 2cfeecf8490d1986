"""Which library computes matmuls on a CPU (--cpu-matmul): chosen once per run, the same on all ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from ...moe.cpu.matmul import Library, Product, faster_libraries, has_onednn, probe_libraries, use_libraries
from ...sharding.runtime.process import Ranks
from ..config.train_config import TrainConfig
from ..environment import FILE, cpu_model


@dataclass(frozen=True)
class MatmulLibraries:
    """why: in words, for the log."""

    by_product: dict[Product, Library]
    why: str

    def __str__(self) -> str:
        used = list(self.by_product.values())
        if len(set(used)) == 1:
            return used[0]
        return ", ".join(f"{product} {library}" for product, library in self.by_product.items())

    @property
    def line(self) -> str:
        """For the first lines of the log."""
        return f"CPU matmuls: {self} ({self.why})"


def choose_matmul_libraries(config: TrainConfig, ranks: Ranks) -> MatmulLibraries | None:
    """Have this process compute by the libraries that --cpu-matmul means; None on a GPU, where there is no choice.

    A probe on rank 0 decides for all. It may tip from one start to the next where the two are about as fast, and the
    last bits of the weights with it; so a resumed run keeps the libraries it began with, as long as it is on the same
    kind of CPU, and --deterministic does not probe. All ranks call it together.
    """
    if ranks.device.type != "cpu":
        return None
    found = [_choose(config) if ranks.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    chosen = found[0]
    assert chosen is not None
    use_libraries(chosen.by_product)
    return chosen


def _choose(config: TrainConfig) -> MatmulLibraries:
    if not has_onednn():
        return MatmulLibraries(_all("blas"), "this torch has no oneDNN, or it is turned off")
    if config.cpu_matmul != "auto":
        return MatmulLibraries(_all(config.cpu_matmul), "asked for")
    if config.deterministic:
        return MatmulLibraries(_all("onednn"), "auto: no probe with --deterministic")
    earlier = _earlier(config)
    if earlier is not None:
        return MatmulLibraries(earlier, "auto: as in the resumed run")
    ratios = probe_libraries()
    said = ", ".join(f"{product} {ratio:.2f}" for product, ratio in ratios.items())
    return MatmulLibraries(faster_libraries(ratios), f"auto: onednn's speed over blas's in a probe: {said}")


def _all(library: Library) -> dict[Product, Library]:
    return dict.fromkeys(get_args(Product), library)


def _earlier(config: TrainConfig) -> dict[Product, Library] | None:
    """What the run that --resume continues took; None where that is not known, or was on another CPU."""
    if not config.resume:
        return None
    directories = [Path(config.output_dir)]
    if config.resume != "auto":
        directories.insert(0, Path(config.resume).parent.parent)  # of OUTPUT_DIR/checkpoints/step-N
    for directory in directories:
        try:
            facts = json.loads((directory / FILE).read_text(encoding="utf-8"))
            said, cpu = facts["cpu_matmul"], facts.get("cpu")
        except (OSError, ValueError, KeyError, TypeError):
            continue
        by_product = _parse(said) if cpu == cpu_model() else None
        if by_product is not None:
            return by_product
    return None


def _parse(said: object) -> dict[Product, Library] | None:
    """What `str(MatmulLibraries)` said; None of anything else."""
    libraries: tuple[Library, ...] = get_args(Library)
    products: tuple[Product, ...] = get_args(Product)
    for library in libraries:
        if said == library:
            return _all(library)
    words = dict(part.split(" ", 1) for part in said.split(", ") if " " in part) if isinstance(said, str) else {}
    if set(words) != set(products) or not set(words.values()) <= set(libraries):
        return None
    return {product: library for product in products for library in libraries if words[product] == library}
