"""What has to be known of a family by its name, each with the reason: all else is read from transformers' modules."""

_SHARED_BY_TURNS = "its checkpoints interleave gate and up of the shared experts within a row"
_BY_TURNS = "its checkpoints interleave gate and up of the experts, which its model concatenates"
_IN_CODES = "its checkpoints quantize the experts in a format that only transformers reads, gate and up interleaved"
UNSUPPORTED = {
    "diffusion_gemma": "it fills blocks of tokens step by step, and predicts no next token",
    "inkling2": _BY_TURNS,
    "inkling2_text": _BY_TURNS,
    "inkling2_loop": _IN_CODES,
    "inkling2_loop_text": _IN_CODES,
    "inkling_mm_model": _SHARED_BY_TURNS,
}
"""Families whose results tests/families finds to differ from those of transformers' own class, and why."""

_CHOOSES_BY_HEAD = "each head chooses which blocks of keys a token sees, and a rank would have some heads only"
UNDIVIDED = {"minimax_m3_vl": _CHOOSES_BY_HEAD, "minimax_m3_vl_text": _CHOOSES_BY_HEAD}
"""Families whose attention is not divided by tensor parallelism though transformers has a plan of it, and why."""

SHARING_OUT = ("ErnieFuseAndSplitTextVisionExperts",)
"""Operations of transformers that stack the experts of a layer, gate beside up, and give each of several modules as
many of them as the others."""

LLAMA_CPP_NORMALISES = {"olmoe": False, "qwen2_moe": False, "qwen3_moe": True}
"""Families whose norm_topk_prob llama.cpp does not read, and what it is there: norm_w of `build_moe_ffn` in its
src/models/ (as of llama-cpp-python 0.3.36)."""

UPCYCLED_AS = {"llama": "mixtral", "mistral": "mixtral", "olmo2": "flex_olmo", "granite": "granitemoe"}
"""The MoE family with the attention, norms and settings of a dense one, where it is not called by that one's name and
`_moe` (see `checkpoints.upcycle`)."""

HANDS_ON, TAKES = "store_full_length_kv", "is_kv_shared_layer"
"""Attributes of Gemma 4's attention: whether later layers may have its keys and values, which transformers says of the
last layer of each type also in models without such layers; and whether it takes them."""
