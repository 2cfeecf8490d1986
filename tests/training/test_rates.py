"""The table of attained rates: what is taken from it, and that it is whole."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.rates import (
    AT_BEST,
    Attained,
    Exchange,
    Operator,
    Rates,
    Work,
    busiest_of,
    experts_apart,
    natural_imbalance,
    published,
    rank_imbalance,
    rates_from,
)
from expertmesh.training.planning.planner.costs import kernel_seconds, seconds_among
from expertmesh.training.planning.planner.hardware import DEVICES, load_measured, preset, save_measured


@pytest.mark.parametrize("gpu", DEVICES)
def test_every_class_has_a_rate_and_every_rate_a_source(gpu: str) -> None:
    rates = published(gpu)
    assert {each.operator for each in rates.attained} >= {*get_args(Operator), *get_args(Exchange)}
    constants = {"compute beside", "collective beside", "launch", "call", "wait", "experts apart"}
    assert {each.name for each in rates.constants} == constants
    for each in rates.attained:
        assert 0 < each.share <= 1, each
    for source in [*(each.source for each in rates.attained), *(each.source for each in rates.constants)]:
        assert source
        assert source.startswith("assumed") or not source.startswith(("none", "no "))


def test_few_experts_are_multiplied_apart_by_a_figure_and_not_by_name() -> None:
    """Of what torch calls a GPU; of one that nobody has measured, and of a CPU, none are."""
    assert experts_apart("NVIDIA H100 80GB HBM3") == published("H100").experts_apart == 4
    assert experts_apart("NVIDIA B200") == 4, "as the card that it is like"
    assert experts_apart("NVIDIA GeForce RTX 4090") == experts_apart("") == AT_BEST.experts_apart == 1


def test_between_sizes_by_their_logarithm() -> None:
    rates = Rates((Attained("matmul", 1e6, 0.2, ""), Attained("matmul", 1e10, 0.6, "")))
    shares = [rates.share("matmul", size) for size in (1.0, 1e6, 1e8, 1e10, 1e12)]
    assert shares == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
    assert rates.share("memory", 1.0) == 1.0


def test_a_rate_replaced_changes_what_it_is_of() -> None:
    hardware = preset("H100", "infiniband-ndr")
    works = [Work("matmul", 1e12), Work("grouped matmul", 1e12), Work("attention", 4096.0), Work("memory", 1.0)]

    def seconds(rates: Rates) -> list[float]:
        own = replace(hardware, rates=rates)
        kernels = [kernel_seconds(0.0 if w.operator == "memory" else 1e12, 1e6, w, own) - rates.launch for w in works]
        return [*kernels, seconds_among("all-gather", 1e9, range(8), own, 8)]

    before = seconds(hardware.rates)
    for place, name in enumerate(("matmul", "grouped matmul", "attention", "memory")):
        halved = [replace(e, share=e.share / 2) if e.operator == name else e for e in hardware.rates.attained]
        after = seconds(replace(hardware.rates, attained=tuple(halved)))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        assert ratios == pytest.approx([2.0 if n == place else 1.0 for n in range(5)])


@pytest.mark.parametrize(("gpu", "version", "between"), [("H100", 3, (0.35, 0.5)), ("B200", 4, (0.2, 0.45))])
@pytest.mark.parametrize("of", ["packed attention", "packed attention backward"])
def test_a_newer_flash_attention_takes_the_place_of_2(
    gpu: str, version: int, between: tuple[float, float], of: Operator
) -> None:
    rates = published(gpu)
    newer = rates.with_flash_attention(version)
    assert rates.share(of, 4096) < between[0] < between[1] < newer.share(of, 4096)
    assert newer.share("matmul", 1e12) == rates.share("matmul", 1e12)
    # a card without figures of it keeps those of 2
    assert Rates().with_flash_attention(version) == Rates()


def test_a_file_of_rates_is_read_as_it_was_written(tmp_path: Path) -> None:
    hardware = preset("B200", "ethernet-100")
    save_measured(hardware, tmp_path / "rates.json")
    assert load_measured(tmp_path / "rates.json") == hardware
    assert rates_from(json.loads(json.dumps(asdict(hardware.rates)))) == hardware.rates


@pytest.mark.parametrize(
    ("part", "wrong", "said"),
    [
        ("attained", {"operator": "sorting", "size": 1, "share": 0.5, "source": ""}, "no class of operators 'sorting'"),
        ("attained", {"operator": "matmul", "size": 1, "share": 0.0, "source": ""}, "matmul is not a positive number"),
        ("constants", {"name": "speed", "value": 1, "source": ""}, "no constant 'speed'"),
        ("constants", {"name": "call", "value": "1", "source": ""}, "call is not a positive number"),
    ],
)
def test_a_file_of_rates_that_will_not_do(tmp_path: Path, part: str, wrong: dict[str, object], said: str) -> None:
    file = tmp_path / "rates.json"
    save_measured(preset("H100", "infiniband-ndr"), file)
    content = json.loads(file.read_text())
    content["rates"][part].append(wrong)
    file.write_text(json.dumps(content))
    with pytest.raises(ExpertMeshError, match=said):
        load_measured(file)


def test_imbalance_of_ranks() -> None:
    """One expert on each rank: its own. More experts even out, and fewer ranks have a smaller maximum."""
    assert rank_imbalance(2.0, 64, 64) == pytest.approx(2.0)
    assert rank_imbalance(2.0, 64, 1) == 1.0
    ranks = [rank_imbalance(2.0, 64, ep_size) for ep_size in (2, 8, 32, 64)]
    assert ranks == sorted(ranks)
    assert rank_imbalance(2.0, 64, 8) == pytest.approx(1 + busiest_of(8) / busiest_of(64) / 8**0.5)
    # expected maxima of 8 and 128 normal quantities: 1.42 and 2.6
    assert (busiest_of(8), busiest_of(128)) == pytest.approx((1.42, 2.6), rel=0.02)


def test_natural_imbalance_grows_with_experts() -> None:
    by_number = [natural_imbalance(number) for number in (4, 8, 64, 128, 256)]
    assert by_number == sorted(by_number)
    assert by_number[1] == pytest.approx(1.083)
    assert by_number[3] == pytest.approx(1.9, abs=0.05)
