"""The page of models in docs/reference: `python -m tests.families.models_page` writes it.

Each family is tried with the tiny config that shows every kind of its layers, as default configs do not.
"""

import json
import re
import textwrap
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
INTRODUCTION = """\
# Models

All causal MoE families of transformers {version}, also those that take images or sound. `python -m
tests.families.models_page` makes this page, and a test compares it with the code. For your installed transformers, or
for one model (a directory, a config.json or a hub id), run

```sh
python -m expertmesh.moe families --table [NAME ...]
```

A family supports all of these, except what its row names under "refused", which `train_ep.py` refuses with the reason:

| method | |
| --- | --- |
| full | all weights are trained |
| LoRA | [adapters](../how-to/train-adapters.md) on attention and every expert: `--adapter lora` |
| packing | several samples per [sequence](../glossary.md#data): `--packing` |
| CP | [context parallelism](../explanation/parallel-layout.md#context-parallelism): `--cp-size` |
| TP | [tensor parallelism](../explanation/parallel-layout.md#tensor-parallelism): `--tp-size`. Refused where \
transformers has no plan for the family's attention |
| quantized base | LoRA with frozen weights in fp8 or nf4: `--base-dtype` |

- **models**: published models whose config.json is tested: parameters, active parameters and routing are as published.
  Their weights were never loaded here.
- **tested**: against the family's own class in transformers, with tiny random models on CPUs. *gradients*: loss and
  every gradient; *training*: updated weights over several steps too.
- Multimodal families (`..._vl...`, `..._omni...` and others) are trained on text. Vision and audio towers hold no
  memory during training, and the export has them unchanged.
- Kimi K2: write `"model_type": "deepseek_v3"` in a copy of its config.json. The error message says so.
- FP8 and MXFP4 checkpoints are read as published, and exported in bf16 or
  [as read](../how-to/convert-and-verify.md#export-as-published).
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
    by_reason: dict[str, list[str]] = {}
    for family, reason in UNSUPPORTED.items():
        by_reason.setdefault(reason, []).append(f"`{family}`")
    without_row = ", ".join(f"`{family}`" for family in families_passed_over())
    return (
        "".join(f"\nNot supported: {', '.join(names)}: {reason}.\n" for reason, names in by_reason.items())
        + f"\nNot supported: {without_row}: they have mixture-of-experts layers, but {NOT_MARKED}.\n"
    )


def row_of(family: str) -> str:
    """A family's line of the page; nothing where all that it would say is that gradients were compared."""
    tested = "training" if family in REPRESENTATIVES else "none" if family in UNSUPPORTED else "gradients"
    refused = [method for method, error in support(family).items() if error]
    if not refused and not published_in(family) and tested == "gradients":
        return ""
    told = "all" if len(refused) == len(METHODS) else ", ".join(refused) or "-"
    return row(f"`{family}`", ", ".join(published_in(family)) or "-", told, tested)


OTHERS = "Families without a row are supported with every method, and tested by gradients: "


def page() -> str:
    """What docs/reference/models.md holds."""
    families = causal_families()
    header = row("family", "models", "refused", "tested") + f"|{' --- |' * 4}\n"
    others = textwrap.fill(f"{OTHERS}{', '.join(f'`{name}`' for name in families if not row_of(name))}.", 120)
    parts = (header, *map(row_of, families), f"\n{others}\n", *map(refusals, families), reasons())
    return introduction(transformers.__version__) + "".join(parts)


def rows_in(text: str) -> dict[str, tuple[str, ...]]:
    """The methods with which a page says that a family is refused, by family."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    every = {"all": METHODS, "-": ()}
    told = {line[0].strip("`"): every.get(line[2], tuple(line[2].split(", "))) for line in lines}
    others = " ".join(text.split()).split(OTHERS)[1].split(".")[0]
    return told | dict.fromkeys(re.findall(r"`(\w+)`", others), ())


def main() -> None:
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
