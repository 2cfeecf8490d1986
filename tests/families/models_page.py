"""The page of models in docs/reference and the root README's table: `python -m tests.families.models_page` writes them.

Each family is tried with the tiny config that shows every kind of its layers, as default configs do not.
"""

import json
import re
from functools import cache
from pathlib import Path

import transformers

from expertmesh.moe.hf_model.build import NOT_MARKED
from expertmesh.moe.hf_model.families import causal_families, families_passed_over
from expertmesh.moe.hf_model.family_exceptions import UNDIVIDED, UNSUPPORTED
from expertmesh.training.cluster.support import METHODS, support_of
from tests.families.configs import tiny_config
from tests.published.models import CONFIGS, MODELS
from tests.tiers import REPRESENTATIVES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
"""A table of Markdown."""
INTRODUCTION = """\
# Models

After this page you know whether your model is supported, and with which methods. The table has one row per causal MoE
family of transformers {version}. Families that also take images or sound are included. A command makes this page, and a
test compares it with the code:

```sh
python -m tests.families.models_page
```

For your installed transformers, or for one model (a directory, a config.json or a hub id), run

```sh
python -m expertmesh.moe families --table [NAME ...]
```

| column | meaning |
| --- | --- |
| models | Published models whose config.json is tested: parameters, active parameters and routing are as published. \
Their weights were never loaded here |
| full | All weights are trained |
| LoRA | [Adapters](../how-to/train-adapters.md) on attention and every expert: `--adapter lora` |
| packing | Several samples per [sequence](../glossary.md#data): `--packing` |
| CP | [Context parallelism](../explanation/parallel-layout.md#context-parallelism) over 2 ranks: `--cp-size` |
| TP | [Tensor parallelism](../explanation/parallel-layout.md#tensor-parallelism) over 2 ranks: `--tp-size` |
| quantized base | LoRA beside frozen weights in fp8 or nf4: `--base-dtype` |
| tested | Against the family's own class in transformers, with tiny random models on CPUs. \
*gradients*: loss and every gradient; *training*: updated weights over several steps too |

"no" means that `train_ep.py` refuses the flag and says why. For TP the reason is that transformers has no plan for the
family's attention, except where the page gives another one below the table.

- Multimodal families (`..._vl...`, `..._omni...` and others) are trained on text. Vision and audio towers hold no
  memory during training, and the export has them unchanged.
- Kimi K2: write `"model_type": "deepseek_v3"` in a copy of its config.json. The error message says so.
- Llama 4 is not supported: transformers does not mark its experts.
- A model is refused if its layers have different numbers of experts, or of experts per token. No tested model has them.

"""


@cache
def published_in(family: str) -> tuple[str, ...]:
    """Names of the published models of a family."""
    return tuple(name for name in MODELS if model_type_of(name) == family)


@cache
def model_type_of(name: str) -> str:
    content = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    return str(content["model_type"])


@cache
def support(family: str) -> dict[str, str]:
    """By method, why a family is refused, or nothing."""
    if family in UNSUPPORTED:
        return dict.fromkeys(METHODS, UNSUPPORTED[family])
    return support_of(tiny_config(family))


def cells(family: str) -> tuple[str, ...]:
    """What the table says of a family, one cell per method."""
    return tuple("no" if error else "yes" for error in support(family).values())


def refusals(family: str) -> str:
    """What the page says of each method with which a family that is supported is refused, but for TP without a plan."""
    if family in UNSUPPORTED:
        return ""
    told = [error for method, error in support(family).items() if error and (method != "TP" or family in UNDIVIDED)]
    return "".join(f"\n`{family}` is refused: {error}.\n" for error in told)


def row(*entries: str) -> str:
    return f"| {' | '.join(entries)} |\n"


def introduction(version: str) -> str:
    """What the page begins with."""
    return INTRODUCTION.format(version=version)


def reasons() -> str:
    """What the page ends with: why families are not supported, and why others have no row."""
    without_row = ", ".join(f"`{family}`" for family in families_passed_over())
    return (
        "".join(f"\n`{family}` is not supported: {reason}.\n" for family, reason in UNSUPPORTED.items())
        + f"\nWithout a row: {without_row}. They have mixture-of-experts layers,\nbut {NOT_MARKED}.\n"
    )


def row_of(family: str) -> str:
    """A family's line of the page."""
    tested = "training" if family in REPRESENTATIVES else "none" if family in UNSUPPORTED else "gradients"
    return row(f"`{family}`", ", ".join(published_in(family)) or "-", *cells(family), tested)


def page() -> str:
    """What docs/reference/models.md holds."""
    header = row("family", "models", *METHODS, "tested") + f"|{' --- |' * (len(METHODS) + 3)}\n"
    rows = "".join(map(row_of, causal_families()))
    refused = "".join(map(refusals, causal_families()))
    return introduction(transformers.__version__) + header + rows + refused + reasons()


def rows_in(text: str) -> dict[str, tuple[str, ...]]:
    """A page's cells, one per method, by family."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {line[0].strip("`"): tuple(line[2:-1]) for line in lines}


def short_table(text: str) -> str:
    """The root README's, of a page: published models alone, those alike in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for family, found in rows_in(text).items():
        if published_in(family):
            alike.setdefault(found, []).extend(published_in(family))
    rows = sorted(alike.items(), key=lambda entry: -len(entry[1]))
    lines = [row("models", *METHODS), f"|{' --- |' * (len(METHODS) + 1)}\n"]
    return "".join([*lines, *(row(", ".join(sorted(names)), *found) for found, names in rows)])


def with_table(readme: str, table: str) -> str:
    """A README with its table of models replaced."""

    def replaced(found: re.Match[str]) -> str:
        return table if found[0].splitlines()[0] == table.splitlines()[0] else found[0]

    return TABLE.sub(replaced, readme)


def main() -> None:
    transformers.logging.set_verbosity_error()
    readme = ROOT / "README.md"
    PAGE.write_text(page(), encoding="utf-8")
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), short_table(page())), encoding="utf-8")


if __name__ == "__main__":
    main()
