"""Built-in chat templates, for tokenizers that bring none: the .jinja files beside this one.

Each writes a format that models were trained on, with system prompts and, where the format has them, reasoning, tools,
their calls and results. Reasoning is left out of turns that a later question follows, as it is when the model is used.
"""

from importlib.resources import files

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
