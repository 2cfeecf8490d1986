"""Built-in chat templates, for tokenizers that bring none: the .jinja files beside this one.

Each writes a format that models were trained on, with system prompts and, where the format has them, reasoning, tools,
their calls and results. Reasoning is left out of turns that a later question follows, as it is when the model is used.
"""

from datetime import datetime
from importlib.resources import files
from typing import Any

BUILT_IN = ("mistral", "chatml", "olmoe")
"""mistral: as Mixtral-8x7B-Instruct-v0.1 has it. chatml: as Qwen3 has it, to the letter where there are tools; where
<|im_end|> is not the token that ends generation, that one follows it. olmoe: as OLMoE-Instruct has it from Tülu, where
roles are plain text, and there are no tools and no reasoning."""

NO_LONGER = ("harmony", "deepseek", "glm")
"""Once built in; every model of these formats has the template itself."""

CHATML_TOKEN = "<|im_start|>"
"""Only vocabularies made for chatml have it. Mistral has no such token: it is for all others."""


def built_in_template(name: str) -> str:
    """One of BUILT_IN, in Jinja."""
    return files(__package__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")


_CLOCK = "strftime_now"
"""What transformers gives templates to read the clock with."""
_AT_DATE = (
    "{% macro strftime_now(format) %}{% for part in format.split('%%') %}{{ '' if loop.first else '%' }}"
    "{% set text = namespace(said=part) %}{% for mark, value in clock.items() %}"
    "{% set text.said = text.said.replace(mark, value) %}{% endfor %}{{ text.said }}{% endfor %}{% endmacro %}\n"
)
"""A macro in its place, as templates are given data alone; the line break is taken away with the block before it."""
_MARKS = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"]


def reads_clock(tokenizer: Any) -> bool:
    """Whether its chat template may write today's date."""
    return _CLOCK in str(tokenizer.chat_template)


def at_date(tokenizer: Any, date: str, tools: list[Any] | None = None) -> dict[str, Any]:
    """What `apply_chat_template` is told so that the template's clock shows the beginning of a day.

    Args:
        date: YYYY-MM-DD; empty: nothing is told, and it shows the time.
        tools: that it is told of.
    """
    if not date:
        return {}
    day = datetime.fromisoformat(date)
    template = _AT_DATE + tokenizer.get_chat_template(tools=tools)
    return {"chat_template": template, "clock": {mark: day.strftime(mark) for mark in _MARKS}}
