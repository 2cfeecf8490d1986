"""What an adapter's export says of servers: what they must be given, or that the adapter must be merged."""

from pathlib import Path
from typing import Any

import pytest

from expertmesh.checkpoints.adapters.servers import SGLANG, VLLM, serving_lines

ATTENTION = {f"layers.0.self_attn.{each}_proj": None for each in "qkvo"}
PLAIN: dict[str, Any] = dict(
    layers=ATTENTION, rank=16, is_packed=None, is_packed_elsewhere=False, use_rslora=False, whole=()
)
MERGE = "; merge to serve there"


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({}, "needs --max-lora-rank 16", None),
        ({"rank": 24}, "needs --max-lora-rank 32", None),
        ({"rank": 1024}, f"takes no rank above 512, and the largest is 1024{MERGE}", None),
        ({"is_packed": False, "rank": 32}, "needs --max-lora-rank 32", "needs --lora-target-modules all"),
        (
            {"is_packed": True},
            'needs --max-lora-rank 16, --enable-mixed-moe-lora-format, "is_3d_lora_weight": true',
            f"does not serve packed adapters of experts{MERGE}",
        ),
        (
            {"is_packed": True, "is_packed_elsewhere": True},
            f"does not serve packed adapters of experts{MERGE}",
            f"does not serve packed adapters of experts{MERGE}",
        ),
        ({"use_rslora": True}, "needs --max-lora-rank 16", f"scales by alpha / r in spite of --use-rslora{MERGE}"),
        ({"whole": ["norm"]}, *2 * (f"does not serve modules or tokens trained whole{MERGE}",)),
        (
            {"layers": {"a.kv_b_proj": None}},
            f"does not serve adapters of kv_b_proj{MERGE}",
            None,
        ),
        (
            {"layers": {"mlp.gate": "block.gate"}},
            *2 * (f"does not serve adapters of gate{MERGE}",),
        ),
        ({"layers": {"mlp.x_proj": "block.x_proj"}}, *2 * (f"does not serve adapters of x_proj{MERGE}",)),
        ({"layers": {"a.q_proj": None, "b.v_proj": None}}, "needs --max-lora-rank 16", f"q_proj, v_proj{MERGE}"),
    ],
)
def test_lines(changes: dict[str, Any], vllm: str, sglang: str | None) -> None:
    said = dict(line.removeprefix("adapter: ").split(" ", 1) for line in serving_lines(**{**PLAIN, **changes}))
    assert said[VLLM.name] == vllm
    assert said.get(SGLANG.name, "").endswith(sglang) if sglang else SGLANG.name not in said


PAGE = Path(__file__).parents[2] / "docs/how-to/serve-evaluate-publish.md"
ROWS: dict[str, dict[str, Any]] = {
    "attention": {},
    "experts, one by one": {"is_packed": False, "rank": 32},
    "experts, packed": {"is_packed": True, "rank": 32},
    "the same, of Mixtral": {"is_packed": True, "is_packed_elsewhere": True, "rank": 32},
    "`kv_b_proj`": {"layers": {"self_attn.kv_b_proj": None}},
    "routers": {"layers": {"mlp.gate": "mlp.gate"}},
    "attention, `--use-rslora`": {"use_rslora": True},
    "attention, `--modules-to-save`": {"whole": ["norm"]},
}


def test_the_page_has_the_table() -> None:
    rows = ["| adapter of rank 16, of | " + " | ".join(f"{each.name} {each.release}" for each in (VLLM, SGLANG)) + " |"]
    rows.append("| --- | --- | --- |")
    for name, changes in ROWS.items():
        said = dict(line.removeprefix("adapter: ").split(" ", 1) for line in serving_lines(**{**PLAIN, **changes}))
        cells = [
            "merge" if (words := said.get(each.name, "needs nothing")).endswith(MERGE) else words.removeprefix("needs ")
            for each in (VLLM, SGLANG)
        ]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    assert "\n".join(rows) in PAGE.read_text()
