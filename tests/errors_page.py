"""The index of errors, made of the tables of pages that say what goes wrong; `python -m tests.pages` writes it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Troubleshooting

| symptom | what to do |
| --- | --- |
| out of memory (OOM) | [Save memory](../how-to/save-memory.md) |
| it hangs | After `--ddp-timeout` seconds every rank prints where it is: [find a hang](../how-to/find-a-hang.md) |
| NaN, a loss that jumps, experts without tokens | [Fix a bad loss](../how-to/fix-a-bad-loss.md); `--detect-anomaly` \
names the tensor |
| a gated or private model (`GatedRepoError`, 401) | Accept its licence on the hub, then `hf auth login` on \
every node |
| no network | Give the path of a copied model directory, or download once and set `HF_HUB_OFFLINE=1` |
| it is slow, or slower than FSDP alone | [Measure speed](../how-to/measure-speed.md#slower-than-fsdp-alone), \
[profile a run](../how-to/profile-a-run.md) |
| torchrun prints 30 lines after an error | The run's own line stands before them; \
[`python -m expertmesh.launch`](output-directory.md#exit-codes) prints no others |

An error of expertmesh is one line that names the flag, file or tensor, and what would do. Exit codes are in
[output directory](output-directory.md#exit-codes).

## Messages

Each leads to what to do. `python -m tests.pages` makes this index.

"""
WRONG = re.compile(r"^## What goes wrong\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def page() -> str:
    rows = []
    for file in sorted(DOCS.rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        for section in WRONG.findall(text):
            told = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
            link = f"../{file.relative_to(DOCS)}#what-goes-wrong"
            rows += [f"- [{message}]({link})\n" for message in told if message != "---" and message not in HEADS]
    return HEAD + "".join(sorted(rows, key=lambda row: row.strip("-[` ").lower()))


HEADS = ("message", "symptom", "message or symptom", "case")
"""First cells of those tables."""
