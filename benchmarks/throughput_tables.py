"""Tables of `benchmarks.throughput`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.arms import MB, Figures, Rounds, print_rows, ratio
from benchmarks.traffic import KINDS
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.training.monitoring.meter import peak_tflops


@dataclass(frozen=True)
class Case:
    """What all variants have in common. tokens: per step of all ranks. flops: needed. parameters: of the model.
    bytes_a_number: of an activation on its way. peak_flops: per second of CPU time, of matmuls."""

    shape: MoEShape
    layers: int
    tokens: int
    world_size: int
    flops: float
    parameters: int
    bytes_a_number: int
    peak_flops: float | None = None

    def all_to_all_theory(self, ep_size: int) -> float:
        """Bytes that a rank sends in one step by expert-parallel layers under even routing: each token to K experts and
        back, and so its gradients."""
        rows = self.shape.top_k * self.tokens / self.world_size
        return self.layers * 4 * rows * self.shape.model_width * self.bytes_a_number * (ep_size - 1) / ep_size

    def rates(self, figures: Sequence[Figures], clock: str) -> list[float]:
        """Tokens per second of each round's median step, by the "seconds" or the "cpu_seconds"."""
        return [self.tokens / statistics.median(getattr(one, clock)) for one in figures]

    def mfu(self, figures: Sequence[Figures]) -> float | None:
        peak = peak_tflops(figures[0].more["device"])
        # the peak is that of bf16
        if peak is None or self.bytes_a_number != 2:
            return None
        rate = statistics.median(self.rates(figures, "seconds"))
        return self.flops / self.tokens * rate / self.world_size / (peak * 1e12)


def clock_of(rounds: Rounds) -> str:
    """What variants are compared by: on a GPU seconds; on a CPU those it computed, which others on the machine change
    less."""
    return "cpu_seconds" if next(iter(rounds.values()))[0].more["device"] == "cpu" else "seconds"


def peak_mb(figures: Sequence[Figures]) -> float:
    return statistics.median(one.more["peak"] / MB for one in figures)


def print_tables(case: Case, rounds: Rounds) -> None:
    """Speed, memory and traffic of the variants of one case; on a CPU also where its time goes."""
    by = clock_of(rounds)
    print(f"\ntimes: of {'tokens/s' if by == 'seconds' else 'tokens/CPU-s'}, and in parentheses of memory")
    print_rows([speed(case, name, rounds, by) for name in rounds])
    if by == "cpu_seconds":
        print("\nCPU time and page faults of all ranks per step; floor: that of its FLOPs at the peak of matmuls")
        print_rows([of_cpu(case, name, figures) for name, figures in rounds.items()])
    print("\nsent per rank in the first step, MB (calls); theory: tokens alone, routed evenly")
    print_rows(traffic(case, rounds))


def speed(case: Case, name: str, rounds: Rounds, by: str) -> Mapping[str, str]:
    mine = rounds[name]
    row = {"": name}
    for title, clock in (("tokens/s", "seconds"), ("tokens/CPU-s", "cpu_seconds")):
        rates = case.rates(mine, clock)
        row |= {title: f"{statistics.median(rates):,.1f}", f"of {title}": f"{min(rates):,.1f}-{max(rates):,.1f}"}
    row["peak MB"] = f"{peak_mb(mine):,.0f}"
    for title, other in (("hf-fsdp", "hf-fsdp"), ("ours-ep=1", "ours-ep=1"), ("hf at this ep", f"hf-ep={ep_of(name)}")):
        row[f"times\n{title}"] = ""
        if other in rounds and other != name:
            gain = ratio(case.rates(mine, by), case.rates(rounds[other], by))
            row[f"times\n{title}"] = f"{gain:.2f} ({peak_mb(mine) / peak_mb(rounds[other]):.2f})"
    if (mfu := case.mfu(mine)) is not None:
        row["MFU"] = f"{mfu:.1%}"
    return row


def ep_of(variant: str) -> int:
    return int(variant.partition("=")[2] or 1)


def of_cpu(case: Case, name: str, figures: Sequence[Figures]) -> Mapping[str, str]:
    """Medians over all steps of all rounds."""
    cpu, system, faults = (
        statistics.median(sum(step) for one in figures for step in getattr(one, kind))
        for kind in ("cpu", "system", "faults")
    )
    floor = "" if case.peak_flops is None else f"{case.flops / case.peak_flops / cpu:.0%}"
    of_system = f"{system:.2f} ({system / cpu:.0%})"
    return {
        "": name,
        "CPU-s": f"{cpu:.2f}",
        "in the OS kernel": of_system,
        "page faults": f"{faults:,.0f}",
        "floor": floor,
    }


def traffic(case: Case, rounds: Rounds) -> list[Mapping[str, str]]:
    last = {name: figures[-1].more for name, figures in rounds.items()}
    kinds = [kind for kind in KINDS if any(more["calls"][kind] for more in last.values())]
    rows: list[Mapping[str, str]] = []
    for name, more in last.items():
        sent, calls, theory = more["sent"], more["calls"], case.all_to_all_theory(ep_of(name))
        rows.append(
            {
                "": name,
                **{kind: f"{sent[kind] / MB:,.1f} ({calls[kind]:.0f})" for kind in kinds},
                "all": f"{sum(sent.values()) / MB:,.1f}",
                "all-to-all / theory": f"{sent['all-to-all'] / theory:.4f}" if theory else "",
            }
        )
    return rows
