"""Small Mixtral models, MoE layers and tokenizers for tests."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from expertmesh.moe.experts.layer import DMoE
from expertmesh.moe.experts.layout import ExpertParameter
from expertmesh.moe.hf_model.build import dmoe_from, take_logits
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.sharding.parallelize.parallelize import materialize
from expertmesh.sharding.state import state_of


def tiny_config(**changes: Any) -> MixtralConfig:
    settings: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        router_aux_loss_coef=0.02,
    )
    return MixtralConfig(**{**settings, **changes})


def tiny_mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(tiny_config(**changes))


def our_experts(experts: Any, top_k: int, kernel: str = "loop") -> DMoE:
    """What takes the place of an experts module of transformers, which stays as it is, with the same weights."""
    ours = dmoe_from(deepcopy(experts), top_k, "here")
    ours.mlp.kernel = KERNELS.get(kernel)
    copy_experts(ours, experts)
    return ours


def copy_experts(ours: DMoE, experts: Any) -> None:
    """Give ours the weights of an experts module of transformers."""
    for parameter in ours.mlp.layout.parameters:
        theirs = getattr(experts, parameter.place.tensor)
        getattr(ours.mlp, parameter.name).data.copy_(our_rows(parameter, theirs.detach()))


def our_rows(parameter: ExpertParameter, theirs: torch.Tensor) -> torch.Tensor:
    """The content of a parameter, from the tensor of transformers in which it stands, or that one's gradient."""
    place = parameter.place
    index = torch.arange(parameter.rows_an_expert) * place.step + place.first
    return theirs.index_select(place.dim, index).movedim(place.dim, 1).reshape(-1, *parameter.row)


def in_memory(model: Any) -> Any:
    """`model`, from `build_model`, with uninitialised parameters on the CPU."""
    materialize(model, torch.device("cpu"))
    return model


def loaded(model: Any, theirs: Any) -> Any:
    """`model`, from `build_model`, in memory, with the weights of transformers' own."""
    in_memory(model)
    transposed = {name for name, part in state_of(model).items() if part.transposed}
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in expected:
                tensor.copy_(expected[name].t() if name in transposed else expected[name])
    for path, module in model.named_modules():
        if isinstance(module, DMoE):
            copy_experts(module, theirs.get_submodule(path))
    return model


def our_block(block: Any, kernel: str = "loop") -> Any:
    """A copy of a block of transformers with our experts in it: its router is `gate`."""
    ours = deepcopy(block)
    ours.experts = our_experts(block.experts, block.gate.top_k, kernel)
    take_logits(ours.gate, ours.experts)
    return ours


def tiny_block(kernel: str = "loop", std: float = 0.2, **changes: Any) -> Any:
    """Mixtral's MoE layer by itself, random, with our experts in it."""
    block = MixtralSparseMoeBlock(tiny_config(**changes))
    # a seed that no test draws its input from: a router's rows must not be tokens
    generator = torch.Generator().manual_seed(0x5EED)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return our_block(block, kernel)


def save_model(path: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any) -> None:
    """Save a random model as transformers does; `save_original_format=False` among the changes gives fused names."""
    original = changes.pop("save_original_format", True)
    model: Any = tiny_mixtral(**changes)
    model.to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=original)


def save_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer trained on a few words, with <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["say hello to the world of experts"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """2-norm of the difference over that of what is expected, or over `floor` if that is larger; of two zeros, 0. Where
    anything is no number, infinite."""
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=max(floor, 1e-30))
    return float(error.nan_to_num(nan=torch.inf))
