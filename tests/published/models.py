"""What is published of the models whose config.json lies in `configs/`, each as it stands on the hub.

A figure is written with as many digits as its model's card, paper or name has. Cards count in several ways: what a
figure is `without` was left out by whoever counted, and `with_mtp` says that layers for multi-token prediction, which
are not trained here, were counted too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONFIGS = Path(__file__).parent / "configs"
"""A directory a model, each with a config.json alone."""

Part = Literal["embedding", "head"]


@dataclass(frozen=True)
class Figure:
    """Parameters, in billions. without: "embedding" and "head" are the matrices of input and output
    tokens."""

    billions: str
    without: tuple[Part, ...] = ()
    with_mtp: bool = False


@dataclass(frozen=True)
class Published:
    """total, active: parameters of the model and of those that a token meets. top_k, num_experts: routed experts a
    token, of how many. score: how a router's logits become weights, a key of `LOG_SCORES`. num_groups:
    of experts, of which a token is given some. has_table: whether some layers look a token's experts up by its id."""

    total: Figure
    active: Figure
    top_k: int
    num_experts: int
    score: str = "softmax"
    num_groups: int = 1
    has_table: bool = False


def figure(billions: str, *without: Part, with_mtp: bool = False) -> Figure:
    return Figure(billions, without, with_mtp)


MODELS: dict[str, Published] = {
    # card: "236B total parameters, of which 21B are activated for each token"
    "deepseek-v2": Published(figure("236"), figure("21"), 6, 160, num_groups=8),
    # card: 15.7B and 2.4B
    "deepseek-v2-lite": Published(figure("15.7"), figure("2.4", "embedding"), 6, 64),
    # card: "671B total parameters with 37B activated", beside 14B of the multi-token prediction module
    "deepseek-v3": Published(figure("671"), figure("37"), 8, 256, "sigmoid", num_groups=8),
    # paper: as V3, beside it the indexer of its sparse attention
    "deepseek-v3.2": Published(figure("671"), figure("37", "embedding"), 8, 256, "sigmoid", num_groups=8),
    # card: 284B and 13B; the first three layers look experts up by the token
    "deepseek-v4-flash": Published(figure("284"), figure("13"), 6, 256, "sqrtsoftplus", has_table=True),
    # card: "14B activated and 142B total parameters"
    "dots.llm1": Published(figure("142"), figure("14"), 6, 128, "sigmoid"),
    # card: 21B and 3B
    "ernie-4.5-21b-a3b": Published(figure("21"), figure("3"), 6, 64),
    # card: 25.2B total, 3.8B active, beside a vision encoder of about 550M; its router returns scores, not logits
    "gemma-4-26b-a4b": Published(figure("25.2"), figure("3.8"), 8, 128, "given"),
    # paper, table 1, which counts no embedding and no head: 106B and 12B
    "glm-4.5-air": Published(figure("106", "embedding", "head"), figure("12", "embedding", "head"), 8, 128, "sigmoid"),
    # the same: 355B with the multi-token prediction layer, 32B
    "glm-4.5": Published(
        figure("355", "embedding", "head", with_mtp=True), figure("32", "embedding", "head"), 8, 160, "sigmoid"
    ),
    # its successor of the same sizes
    "glm-4.6": Published(
        figure("355", "embedding", "head", with_mtp=True), figure("32", "embedding", "head"), 8, 160, "sigmoid"
    ),
    # card: "30B-A3B"
    "glm-4.7-flash": Published(figure("30"), figure("3", "embedding", "head"), 4, 64, "sigmoid"),
    # card: "744B parameters (40B active)"
    "glm-5": Published(figure("744"), figure("40", "embedding", "head"), 8, 256, "sigmoid"),
    # model card, table 1: 116.83B and 5.13B, of which the embedding is no part
    "gpt-oss-120b": Published(figure("116.83"), figure("5.13", "embedding"), 4, 128),
    # the same: 20.91B and 3.61B
    "gpt-oss-20b": Published(figure("20.91"), figure("3.61", "embedding"), 4, 32),
    # card: 1.3B parameters, 400M active
    "granite-3.0-1b-a400m": Published(figure("1.3"), figure("0.4"), 8, 32),
    # card: 3.3B parameters, 800M active
    "granite-3.1-3b-a800m": Published(figure("3.3"), figure("0.8", "embedding"), 8, 40),
    # cards: 32B and 9B; 7B and 1B
    "granite-4.0-h-small": Published(figure("32"), figure("9"), 10, 72),
    "granite-4.0-h-tiny": Published(figure("7"), figure("1"), 6, 64),
    # card: 80B and 13B
    "hunyuan-a13b": Published(figure("80"), figure("13"), 8, 64),
    # card: "94B active/398B total"
    "jamba-1.5-large": Published(figure("398"), figure("94"), 2, 16),
    # card: "12B active parameters and a total of 52B parameters across all experts"
    "jamba-v0.1": Published(figure("52"), figure("12"), 2, 16),
    # card: 48B and 3B, which the paper counts without embeddings
    "kimi-linear-48b-a3b": Published(
        figure("48", "embedding", "head"), figure("3", "embedding", "head"), 8, 256, "sigmoid"
    ),
    # card: 8.3B total, 1.5B active
    "lfm2-8b-a1b": Published(figure("8.3"), figure("1.5"), 4, 32, "sigmoid"),
    # card: 309B and 15B
    "mimo-v2-flash": Published(figure("309"), figure("15"), 8, 256, "sigmoid"),
    # card: "230 billion total parameters with 10 billion active"
    "minimax-m2.5": Published(figure("2.3E+2"), figure("10", "embedding", "head"), 8, 256, "sigmoid"),
    # announcement: "39B active parameters out of 141B"
    "mixtral-8x22b": Published(figure("141"), figure("39"), 2, 8),
    # announcement: "46.7B total parameters but only uses 12.9B parameters per token"
    "mixtral-8x7b": Published(figure("46.7"), figure("12.9"), 2, 8),
    # paper: 15.29B and 2.24B, without embeddings
    "moonlight-16b-a3b": Published(
        figure("15.29", "embedding", "head"), figure("2.24", "embedding", "head"), 6, 64, "sigmoid"
    ),
    # paper: 31.6B and 3.6B, embeddings included
    "nemotron-3-nano": Published(figure("31.6"), figure("3.6"), 6, 128, "sigmoid"),
    # card: 550B and 55B
    "nemotron-3-ultra": Published(figure("5.5E+2"), figure("55", "embedding"), 22, 512, "sigmoid"),
    # paper: 6.9B total, 1.3B active
    "olmoe-1b-7b": Published(figure("6.9"), figure("1.3"), 8, 64),
    # card: "14.3B parameters in total and 2.7B activated parameters during runtime"
    "qwen1.5-moe-a2.7b": Published(figure("14.3"), figure("2.7"), 4, 60),
    # paper: 57.4B and 14.2B
    "qwen2-57b-a14b": Published(figure("57.4"), figure("14.2"), 8, 64),
    # cards: 235B and 22B; 30.5B and 3.3B; 480B and 35B; 80B and 3B
    "qwen3-235b-a22b": Published(figure("235"), figure("22"), 8, 128),
    "qwen3-30b-a3b": Published(figure("30.5"), figure("3.3"), 8, 128),
    "qwen3-30b-a3b-fp8": Published(figure("30.5"), figure("3.3"), 8, 128),
    "qwen3-coder-480b": Published(figure("480"), figure("35"), 8, 160),
    "qwen3-next-80b": Published(figure("80"), figure("3"), 10, 512),
    # 31.07B with the vision encoder of 0.54B; the language model has the sizes of Qwen3-30B-A3B. Its config.json was
    # written down from those that read it
    "qwen3-vl-30b-a3b": Published(figure("30.5"), figure("3.3"), 8, 128),
    # cards, of the language models: 122B and 10B; 35B and 3B
    "qwen3.5-122b-a10b": Published(figure("122"), figure("10"), 8, 256),
    "qwen3.5-35b-a3b": Published(figure("35"), figure("3"), 8, 256),
    # card: 26B and 3B
    "trinity-mini": Published(figure("26"), figure("3"), 8, 128, "sigmoid"),
}

REFUSED = ("kimi-k2", "llama-4-scout")
"""Of which transformers has no causal class, or one without experts that it marks."""
