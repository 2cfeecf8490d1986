"""The benchmark of expert kernels: what it counts, that its variants agree, and that it notices when they do not."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import experts
from benchmarks.experts import BOTH, EXPERTS, FORWARD, LAYER, ROUTINGS, TARGET_SETTING, Model, Result, Setting
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.kernels.kernel_registry import FusedSwiGLU
from tests.moe.test_kernels import fused
from tests.rounding import OTHER_ORDER

CPU = torch.device("cpu")
TINY = {
    "mixtral": Model(MoEShape(64, 32, 8, 2), True, "mixtral", "Mixtral"),
    "qwen3_moe": Model(MoEShape(64, 32, 16, 4), True, "qwen3_moe", "Qwen3Moe"),
    "olmoe": Model(MoEShape(64, 32, 16, 4), False, "olmoe", "Olmoe"),
}
SHAPE = TINY["mixtral"].shape


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MODELS", TINY)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(routing: str) -> None:
    """The pattern is what it is called, and the router chooses just so, whatever the dtype."""
    experts_TK = experts.routed_experts(routing, 64, SHAPE, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == SHAPE.top_k for row in experts_TK.tolist())
    counts = experts_TK.flatten().bincount(minlength=SHAPE.num_experts).tolist()
    if routing == "balanced":
        assert counts == [16] * 8
    elif routing == "natural":
        assert 16 < max(counts) < 64
    else:
        assert counts == [64, 64, 0, 0, 0, 0, 0, 0]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = experts.make_inputs(Setting("mixtral", 64, routing), CPU, dtype)
        _, _, chosen_TK = experts.build_layer(TINY["mixtral"], CPU, dtype).gate(inputs.x_TD)
        assert torch.equal(chosen_TK.sort(dim=1).values, experts_TK.sort(dim=1).values)
        assert inputs.counts_E.tolist() == counts
        assert inputs.rows_RD.shape == (128, 64)


@pytest.mark.parametrize("family", TINY)
def test_variants_agree(family: str) -> None:
    variants, missing = experts.build_variants(TINY[family], experts.VARIANTS, CPU, torch.float32)
    checked = experts.check(variants, experts.make_inputs(Setting(family, 40, "natural"), CPU, torch.float32))
    errors, failed = checked.errors, checked.failed
    assert not checked.differing
    found = {(LAYER, "HF grouped_mm"), (LAYER, "HF eager")}
    found |= {(part, name) for part in (LAYER, EXPERTS) for name in ("loop", "torch-grouped")}
    assert found <= set(errors)
    assert max(errors.values()) < OTHER_ORDER
    # every variant is either measured or said not to be
    said = {line.split(":")[0].split(",")[0] for line in missing + failed}
    assert {name for _, name in errors} | said == set(experts.VARIANTS)


def test_flops_are_those_of_the_matrix_products() -> None:
    inputs = experts.make_inputs(Setting("mixtral", 24, "natural"), CPU, torch.float32)
    (_, alone), _ = experts.build_variants(TINY["mixtral"], ["loop"], CPU, torch.float32)
    forward, both = experts.dense_chain(inputs.rows_RD, SHAPE.expert_width)
    flops = experts.expert_flops(48, SHAPE)
    assert flops == 6 * 48 * 64 * 32
    for run, expected in ((lambda: alone.forward(inputs), flops), (forward, flops), (both, 3 * flops)):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == expected


def test_writes_figures_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--dtype", "bfloat16", "--model", "mixtral", "--tokens", "32", "--rounds", "2"]
    command += ["--routing", "balanced", "skewed", "--repetitions", "3", "--variants", "torch-grouped", "HF eager"]
    command += ["original dMoE", "--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "figures.svg")]
    assert experts.main(command) == 0
    printed = capsys.readouterr().out
    assert "not measured: mixtral, original dMoE: its kernels need a GPU" in printed
    assert "target: auto loses to no variant by more than 3%:" in printed
    assert printed.count("not measured in this run") == 2

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["auto"] == {"mixtral": "loop"}
    variants = {(r["part"], r["variant"], r["passes"]) for r in figures["results"]}
    names = {(LAYER, "loop"), (LAYER, "torch-grouped"), (LAYER, "HF eager"), (EXPERTS, "loop")}
    names |= {(EXPERTS, "torch-grouped"), (EXPERTS, "ceiling")}
    assert variants == {(*name, passes) for name in names for passes in (FORWARD, BOTH)}
    assert len(figures["results"]) == 2 * len(variants)
    for r in figures["results"]:
        assert [len(ms) for ms in r["wall_ms"]] == [3, 3]
        assert r["tflops"] == pytest.approx(r["flops"] / r["median_ms"] / 1e9)

    picture = ET.parse(tmp_path / "figures.svg").getroot()
    bars = [bar for bar in picture.iter("{http://www.w3.org/2000/svg}rect") if bar.get("fill") != "white"]
    assert len(bars) == 2 * (len(names) - 1)


def with_fused(monkeypatch: pytest.MonkeyPatch, fused: FusedSwiGLU) -> None:
    """Have torch-grouped compute complete experts so."""
    kernel = KERNELS.get("torch-grouped")
    other = replace(kernel, implementation=replace(kernel.code, fused=fused))
    monkeypatch.setitem(KERNELS._entries, kernel.name, other)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def forgets_v1(
        rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
    ) -> Tensor:
        out_RD = fused("loop")(rows_RD, experts, w1, v1.detach(), w2)
        return out_RD + 0 * v1.sum()

    with_fused(monkeypatch, forgets_v1)
    command = ["--device", "cpu", "--dtype", "float32", "--model", "mixtral", "--tokens", "32", "--rounds", "1"]
    assert experts.main(command) == 1
    told = capsys.readouterr()
    assert "torch-grouped, layer: v1 differs from loop by 1.0e+00" in told.err
    assert "loop" in told.out, "the others go on"


def test_a_variant_that_fails_while_it_is_timed_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = 0

    def fails_late(
        rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
    ) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RuntimeError("an illegal instruction")
        return fused("loop")(rows_RD, experts, w1, v1, w2)

    with_fused(monkeypatch, fails_late)
    command = ["--device", "cpu", "--model", "mixtral", "--tokens", "32", "--rounds", "1", "--routing", "balanced"]
    assert experts.main([*command, "--json", str(tmp_path / "figures.json")]) == 0
    assert "torch-grouped, experts, forward: RuntimeError: an illegal instruction" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"loop", "HF eager"} <= {each["variant"] for each in figures["results"]}


def result(part: str, variant: str, *ms: float) -> Result:
    return Result(TARGET_SETTING, part, variant, BOTH, 1e9, "wall", wall_ms=[[one] for one in ms])


def test_targets() -> None:
    ceiling = result(EXPERTS, "ceiling", 8, 80)
    mine = [result(EXPERTS, "loop", 10, 100), result(LAYER, "loop", 12, 120)]
    hf = result(LAYER, "HF eager", 18, 180)
    auto = {TARGET_SETTING.model: "loop"}
    assert experts.speed_ratio(mine[0], ceiling) == pytest.approx(0.8)
    loss, share, gain = experts.judge([ceiling, *mine, hf], auto)
    assert "3%: met" in loss
    assert share.endswith("met (0.80)")
    assert gain.endswith("met (1.50)")
    better = [result(LAYER, "HF grouped_mm", 9, 90), result(EXPERTS, "torch-grouped", 9.9, 99)]
    loss, share, gain = experts.judge([result(EXPERTS, "ceiling", 6, 60), *mine, hf, *better], auto)
    assert "missed by 0.3 (at most +33.3% time, against HF grouped_mm, layer" in loss
    assert share.endswith("missed by 0.2 (0.60)")
    assert gain.endswith("missed by 0.75 (0.75)")
