"""A script for transformers 4, whose environment has nothing of this checkout: makes bases as that publishes them, and
reads exports of them."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

THEIRS: Any = transformers
"""Which has other types than release 5, by which our code is checked."""
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 512, "num_experts_per_tok": 2},
}
OLD = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_bases(out: Path, fast: Path) -> None:
    """A Qwen3-MoE with a file of everything and the chat template in the config, an OLMoE with tokenizer.json, and
    a Mixtral with no file but sentencepiece's.

    Args:
        fast: the tokenizer.json of the first two.
    """
    sentencepiece: Any = import_module("sentencepiece")
    table = json.loads(fast.read_text(encoding="utf-8"))
    (parts := out / "parts").mkdir()
    merges = [" ".join(pair) for pair in table["model"]["merges"]]
    (parts / "vocab.json").write_text(json.dumps(table["model"]["vocab"]))
    (parts / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    turns = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    qwen = THEIRS.Qwen2TokenizerFast(str(parts / "vocab.json"), str(parts / "merges.txt"), chat_template=OLD, **turns)
    qwen.save_pretrained(out / "qwen3_moe", save_jinja_files=False)
    end = "<|endoftext|>"
    THEIRS.GPTNeoXTokenizerFast(tokenizer_file=str(fast), pad_token="<|im_end|>", eos_token=end).save_pretrained(
        out / "olmoe"
    )
    text = ["say hello to the world of experts, as the router sends tokens to them"] * 30
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": iter(text), "model_prefix": str(parts / "sp"), "vocab_size": 318, "model_type": "bpe"},
        **{"byte_fallback": True, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, "minloglevel": 2},
    )
    THEIRS.LlamaTokenizer(str(parts / "sp.model"), legacy=False).save_pretrained(out / "mixtral")
    for family in ("qwen3_moe", "olmoe", "mixtral"):
        save_model(out / family, family)


def save_model(path: Path, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    own: dict[str, Any] = {
        "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
        "olmoe": {"num_experts": 8},
        "mixtral": {"num_local_experts": 8},
    }[family]
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = THEIRS.AutoConfig.for_model(
        family, **SIZES, **own, **ends, vocab_size=len(tokenizer) + 8, initializer_range=0.1
    )
    torch.manual_seed(0)
    THEIRS.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 reads of an export, and what it makes of the base with the same tokens added."""
    found, base = (AutoTokenizer.from_pretrained(asked[name]) for name in ("export", "base"))
    base.add_tokens(asked["tokens"])
    said: dict[str, Any] = {
        "classes": [type(tokenizer).__name__ for tokenizer in (found, base)],
        "ids": [[tokenizer(text)["input_ids"] for text in asked["texts"]] for tokenizer in (found, base)],
        "sizes": [len(tokenizer) for tokenizer in (found, base)],
        "eos": found.eos_token,
        "talk": found.apply_chat_template(asked["talk"], tokenize=False, add_generation_prompt=True),
    }
    if asked["model"]:
        model, info = THEIRS.AutoModelForCausalLM.from_pretrained(asked["export"], output_loading_info=True)
        with torch.no_grad():
            logits_SV = model(torch.tensor([said["ids"][0][0]])).logits[0]
        torch.save(logits_SV, asked["model"])
        said["unread"] = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))
    return said


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bases", out, fast]:
            make_bases(Path(out), Path(fast))
        case ["look", asked]:
            print(json.dumps(look(json.loads(asked))))
