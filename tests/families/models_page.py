"""The page of models in docs/reference: `python -m tests.families.models_page` writes it.

Each family is tried with the tiny config that shows every kind of its layers, as default configs do not.
"""

import json
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from expertmesh.moe.hf_model.build import NOT_MARKED, build_model
from expertmesh.moe.hf_model.families import _type_by_class, causal_families, family_source
from expertmesh.moe.hf_model.family_exceptions import UNDIVIDED, UNSUPPORTED
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.cluster.support import METHODS, support_of
from tests.families.configs import tiny_config
from tests.images import FAMILIES, image_config
from tests.published.models import CONFIGS, MODELS
from tests.tiers import REPRESENTATIVES

ROOT = Path(__file__).parents[2]
EXPERTS = re.compile(r"^class \w*(?:Expert\w*|MoE)\(nn\.Module\)", re.MULTILINE)
"""A class that computes experts, in a family's module."""
PAGE = ROOT / "docs" / "reference" / "models.md"
INTRODUCTION = """\
# Models

All causal MoE families of transformers {version}, also those that take images or sound. For your own transformers, or
for one model (a directory, a config.json or a hub id), run

```sh
python -m expertmesh.moe families --table [NAME ...]
```

A family supports training of all weights, [LoRA](../how-to/train-adapters.md), also with a base in fp8 or nf4,
`--packing`, [CP](../explanation/parallel-layout.md#context-parallelism) and
[TP](../explanation/parallel-layout.md#tensor-parallelism), except what its row names under "refused".

- **models**: published models whose config.json is tested: parameters, active parameters and routing are as published.
  Their weights were never loaded here.
{tested}
- Multimodal families (`..._vl...`, `..._omni...` and others) are trained on text, some on [images](#images) too. The
  export has their towers.
- Kimi K2: write `"model_type": "deepseek_v3"` in a copy of its config.json. The error message says so.
- FP8 and MXFP4 checkpoints are read as published, and exported in bf16 or
  [as read](../how-to/convert-and-verify.md#export-as-published).
- `python -m tests.families.models_page` makes this page.

"""

TESTED = (
    "All are tested against the family's own class in transformers, with tiny random models on CPUs: loss and every "
    "gradient. Updated weights over several steps, too: TRAINED."
)


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
    trained = ", ".join(f"`{family}`" for family in sorted(REPRESENTATIVES))
    told = textwrap.fill(f"- {TESTED.replace('TRAINED', trained)}", 120, subsequent_indent="  ", break_on_hyphens=False)
    return INTRODUCTION.format(version=version, tested=told)


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


def families_passed_over() -> list[str]:
    """The model types of classes that predict next tokens, and have experts by the names of their parts, of which
    transformers marks none."""
    classes: dict[str, Any] = {
        **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    known = {classes[model_type] for model_type in causal_families()}
    others = {
        name: kind
        for name, kind in classes.items()
        if kind not in known and EXPERTS.search(family_source("modeling", name))
    }
    return sorted(_type_by_class(others).values())


def row_of(family: str) -> str:
    """A family's line of the page, if there is something to say."""
    refused = [method for method, error in support(family).items() if error]
    if not refused and not published_in(family):
        return ""
    told = "all" if len(refused) == len(METHODS) else ", ".join(refused) or "-"
    return row(f"`{family}`", ", ".join(published_in(family)) or "-", told)


IMAGES = "## Images"


@cache
def refused_images(family: str) -> str | None:
    """Why a family of several media is not trained on images, or nothing; None for one of text alone."""
    config = tiny_config(family)
    if config.get_text_config() is config:
        return None
    if getattr(config, "vision_config", config) is None:
        config = image_config(family)
    try:
        build_model(config, images=True)
    except ExpertMeshError as error:
        return str(error).removeprefix("--images: ").partition(": its images")[0].partition(", not pixel_values")[0]
    return ""


def images_part() -> str:
    """What the page says of images: of each family of several media whether they are trained on, or why not."""
    found = {family: refused_images(family) for family in causal_families() if family not in UNSUPPORTED}
    trained = [family for family, why in found.items() if why == ""]
    tested, others = (
        [f"`{name}`" for name in trained if (name in FAMILIES) == is_tested] for is_tested in (True, False)
    )
    told = f"[Trained on images](../how-to/train-on-images.md): {', '.join(tested)}."
    if others:
        told += f" Built with their towers, too, but never tested: {', '.join(others)}."
    refused = "".join(f"- `{family}`: {why}.\n" for family, why in found.items() if why)
    taken = "taken are `pixel_values` with `image_grid_thw` or `image_position_ids`"
    return f"\n{IMAGES}\n\n{textwrap.fill(told, 120)}\n\nRefused with `--images` ({taken}):\n\n{refused}"


OTHERS = "Families without a row are supported with every method: "


def page() -> str:
    """What docs/reference/models.md holds."""
    families = causal_families()
    header = row("family", "models", "refused") + f"|{' --- |' * 3}\n"
    others = textwrap.fill(f"{OTHERS}{', '.join(f'`{name}`' for name in families if not row_of(name))}.", 120)
    parts = (header, *map(row_of, families), f"\n{others}\n", *map(refusals, families), reasons(), images_part())
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
