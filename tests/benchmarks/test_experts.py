"""The benchmark of expert kernels: what it counts, that its variants agree, and that it notices when they do not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import experts
from benchmarks.experts import BOTH, EXPERTS, FORWARD, LAYER, ROUTINGS, Model, Result, Setting
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


def test_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--dtype", "bfloat16", "--model", "mixtral", "--tokens", "32", "--rounds", "2"]
    command += ["--routing", "balanced", "skewed", "--repetitions", "3", "--variants", "torch-grouped", "HF eager"]
    command += ["original dMoE", "--json", str(tmp_path / "figures.json")]
    assert experts.main(command) == 0
    printed = capsys.readouterr().out
    assert "not measured: mixtral, original dMoE: its kernels need a GPU" in printed
    assert "auto (loop), layer: forward " in printed

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["auto"] == {"mixtral": "loop"}
    variants = {(r["part"], r["variant"], r["passes"]) for r in figures["results"]}
    names = {(LAYER, "loop"), (LAYER, "torch-grouped"), (LAYER, "HF eager"), (EXPERTS, "loop")}
    names |= {(EXPERTS, "torch-grouped"), (EXPERTS, "ceiling")}
    assert variants == {(*name, passes) for name in names for passes in (FORWARD, BOTH)}
    assert len(figures["results"]) == 2 * len(variants)
    for r in figures["results"]:
        assert [len(ms) for ms in r["ms"]] == [3, 3]
        assert r["tflops"] == pytest.approx(r["flops"] / r["median_ms"] / 1e9)


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


def test_auto_beside_the_best_other(capsys: pytest.CaptureFixture[str]) -> None:
    """By the median over rounds of the ratio within one, however slow the machine was in it."""

    def result(part: str, variant: str, *ms: float) -> Result:
        return Result(Setting("mixtral", 8, "balanced"), part, variant, BOTH, 1e9, ms=[[one] for one in ms])

    ceiling, mine = result(EXPERTS, "ceiling", 8, 80, 8), result(EXPERTS, "loop", 10, 100, 40)
    assert experts.speed_ratio(mine, ceiling) == pytest.approx(0.8)
    layers = [result(LAYER, "loop", 12, 120), result(LAYER, "HF eager", 18, 180), result(LAYER, "torch-grouped", 9, 90)]
    experts.print_auto([ceiling, mine, *layers], "loop")
    of_experts, of_layer = capsys.readouterr().out.splitlines()
    assert of_experts == "auto (loop), experts: "
    said = f"{BOTH} 0.75 x best other (torch-grouped); {BOTH} 1.50 x best of HF (HF eager)"
    assert of_layer == f"auto (loop), layer: {said}"
