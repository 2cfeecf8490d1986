"""`upcycle`: what is made of a dense model computes what that does, or differs from it as was asked; what does not fit
is refused by name, and what a killed command left is finished."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from expertmesh.checkpoints import convert
from expertmesh.checkpoints.hf.source import ModelSource
from expertmesh.checkpoints.upcycle import DenseModel, Recipe, moe_config, origins_of
from expertmesh.moe.hf_model.family_exceptions import UPCYCLED_AS
from expertmesh.moe.util.errors import ExpertMeshError
from tests.checkpoints.commands import run
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error, save_tokenizer

LAYERS = 2
PAIRS = {
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen3": "qwen3_moe",
    "qwen2": "qwen2_moe",
    "olmo2": "flex_olmo",
    "granite": "granitemoe",
    "ernie4_5": "ernie4_5_moe",
}
IDS_BS = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(1))


def dense_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Tiny, with weights and norms that are all unlike."""
    torch.manual_seed(seed)
    kind = CONFIG_MAPPING[family]
    sizes: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=family == "qwen2",
    )
    if "head_dim" in kind().to_dict():
        sizes["head_dim"] = 16  # which is not the width by the heads
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.normal_(mean=mean, std=0.15)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS_BS).logits
    return found


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


def made(tmp_path: Path, family: str, *flags: object, code: int = 0, **changes: Any) -> tuple[Any, Path, str]:
    """(dense model, directory of the upcycled one, what was printed)"""
    model = dense_model(family, **changes)
    model.save_pretrained(tmp_path / "dense")
    said = run("upcycle", tmp_path / "dense", tmp_path / "moe", *flags, code=code)
    return model, tmp_path / "moe", said


@pytest.mark.parametrize("granularity", [1, 2])
@pytest.mark.parametrize("family", PAIRS)
def test_an_upcycled_model_computes_what_the_dense_one_does(family: str, granularity: int, tmp_path: Path) -> None:
    sizes = ("--experts", 4 * granularity, "--top-k", 2 * granularity, "--granularity", granularity)
    dense, path, _ = made(tmp_path, family, *sizes)
    moe = loaded(path)
    assert moe.config.model_type == PAIRS[family]
    assert relative_error(logits(moe), logits(dense)) < OTHER_ORDER
    # with a router that tells its tokens apart, into all layers
    routers = [p for name, p in moe.named_parameters() if p.shape == (4 * granularity, 32)]
    assert len(routers) == LAYERS
    assert all(router.std() > 0 for router in routers)


def test_only_families_that_are_called_otherwise_are_listed() -> None:
    assert {dense: moe for dense, moe in PAIRS.items() if moe != f"{dense}_moe"} == UPCYCLED_AS


def test_drawn_neurons_are_the_same_of_all_three_matrices(tmp_path: Path) -> None:
    dense, path, _ = made(tmp_path, "llama", "--experts", 2, "--top-k", 1, "--drop", 0.25, "--noise", 0)
    theirs, moe = dense.state_dict(), load_file(path / "model.safetensors")
    drawn = []
    for expert in range(2):
        at = f"model.layers.1.block_sparse_moe.experts.{expert}"
        parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        changed = []
        for name, part in parts.items():
            new, old = moe[f"{at}.{name}.weight"], theirs[f"model.layers.1.mlp.{part}.weight"]
            new, old = (new.T, old.T) if name == "w2" else (new, old)
            changed.append((new != old).any(1))
            rows = changed[-1]
            assert (new[rows] != old[rows]).all()
            assert 0.7 < float(new[rows].std() / old[rows].std()) < 1.4
        assert int(changed[0].sum()) == 12  # a quarter of 48
        assert torch.equal(changed[0], changed[1])
        assert torch.equal(changed[0], changed[2])
        drawn.append(changed[0])
    assert not torch.equal(*drawn)


def test_noise_is_relative_to_each_weight_and_unlike_from_expert_to_expert(tmp_path: Path) -> None:
    dense, path, _ = made(tmp_path, "llama", "--experts", 2, "--top-k", 1, "--noise", 0.01)
    old, moe = dense.state_dict()["model.layers.0.mlp.up_proj.weight"], load_file(path / "model.safetensors")
    news = [moe[f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"] for expert in range(2)]
    noise = [new / old - 1 for new in news]
    assert all(0.009 < float(each.std()) < 0.011 for each in noise)
    assert abs(float(torch.corrcoef(torch.stack([each.flatten() for each in noise]))[0, 1])) < 0.1


def test_a_seed_repeats_what_is_drawn_whatever_the_files_and_workers(tmp_path: Path) -> None:
    flags = ("--experts", 4, "--top-k", 2, "--drop", 0.5, "--noise", 0.1)
    made(tmp_path, "llama", *flags)
    for name, more in dict(files=("--max-shard-size", "40KB", "--workers", 3), seed=("--seed", 1)).items():
        run("upcycle", tmp_path / "dense", tmp_path / name, *flags, *more)
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 3
    run("verify", tmp_path / "moe", tmp_path / "files")
    run("verify", tmp_path / "moe", tmp_path / "seed", code=1)


def test_what_was_begun_with_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    flags = ("--experts", 4, "--top-k", 2, "--noise", 0.1, "--max-shard-size", "40KB")
    made(tmp_path, "llama", *flags, "--seed", 1)
    out = tmp_path / "moe"
    # as a process that was killed before the index leaves it, with notes of what it has finished
    begun = tmp_path / "begun"
    interrupted(tmp_path / "dense", begun, flags)
    assert not (begun / "model.safetensors.index.json").exists()
    run("upcycle", tmp_path / "dense", begun, *flags, "--seed", 1)
    run("verify", out, begun)


def interrupted(dense: Path, out: Path, flags: Any) -> None:
    """As with seed 0, ended by an error once half of the files are there."""
    real = convert._write_file
    written: list[Any] = []

    def write(file: Any, *args: Any) -> Any:
        if len(written) >= 4:
            raise KeyboardInterrupt
        written.append(file)
        return real(file, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_write_file", write)
        with pytest.raises(KeyboardInterrupt):
            run("upcycle", dense, out, *flags, "--workers", 1)
    assert len(list(out.glob("*.safetensors"))) == 4


def test_several_dense_models_are_experts_in_turn_and_the_rest_may_be_their_mean(tmp_path: Path) -> None:
    states = []
    for seed in (1, 2):
        dense_model("llama", seed).save_pretrained(tmp_path / f"d{seed}")
        states.append(load_file(tmp_path / f"d{seed}" / "model.safetensors"))
    experts = ("--expert", tmp_path / "d1", tmp_path / "d2")
    dense, path, _ = made(tmp_path, "llama", "--experts", 4, "--top-k", 2, *experts)
    moe = load_file(path / "model.safetensors")
    for expert in range(4):
        own = moe[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        assert torch.equal(own, states[expert % 2]["model.layers.1.mlp.down_proj.weight"])
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(moe[attention], dense.state_dict()[attention])
    run("upcycle", tmp_path / "dense", tmp_path / "mean", "--experts", 4, "--top-k", 2, *experts, "--average")
    mean = load_file(tmp_path / "mean" / "model.safetensors")[attention]
    torch.testing.assert_close(mean, (states[0][attention] + states[1][attention]) / 2)


def test_routers_of_prompts_choose_their_experts(tmp_path: Path) -> None:
    dense = dense_model("llama", vocab_size=320)
    dense.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    texts = [["abc abc", "cab"], ["xyz", "zyx zz"]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompts": each}) + "\n" for each in texts))
    flags = ("--experts", 4, "--top-k", 2, "--granularity", 2, "--router-prompts", tmp_path / "p.jsonl")
    run("upcycle", tmp_path / "dense", tmp_path / "moe", *flags)
    moe = load_file(tmp_path / "moe" / "model.safetensors")
    got: dict[int, Tensor] = {}
    layer = dense.model.layers[1].mlp
    for number, some in enumerate(texts):
        seen: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].mean((0, 1))))
        with torch.no_grad():
            for text in some:
                dense(tokenizer(text, return_tensors="pt").input_ids)
        hook.remove()
        got[number] = torch.nn.functional.normalize(torch.stack(seen).sum(0), dim=0)
    router = moe["model.layers.1.block_sparse_moe.gate.weight"]
    torch.testing.assert_close(router, torch.stack([got[0], got[0], got[1], got[1]]))


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("llama", ("--experts", 4, "--top-k", 5), "--top-k 5: must be from 1 to --experts 4"),
        ("llama", ("--experts", 6, "--top-k", 2, "--granularity", 4), "--granularity 4: must divide"),
        ("llama", ("--experts", 10, "--top-k", 5, "--granularity", 5), "must divide the MLP's width 48"),
        ("llama", ("--experts", 4, "--top-k", 2, "--drop", 1.5), "--drop 1.5"),
        ("llama", ("--experts", 4, "--top-k", 2, "--average"), "--average: the mean is that of the --expert models"),
        ("llama", ("--experts", 4, "--top-k", 2, "--like", "nonesuch"), "no MoE family nonesuch"),
        ("llama", ("--experts", 4, "--top-k", 2, "--like", "qwen3_moe"), "q_norm.weight, which a qwen3_moe needs"),
        ("llama", ("--experts", 4, "--top-k", 2, "--like", "llama"), "no mixture-of-experts layer"),
        ("qwen3", ("--experts", 4, "--top-k", 2, "--like", "mixtral"), "a mixtral has no place for model.layers.0"),
        ("gemma2", ("--experts", 4, "--top-k", 2), "no MoE family gemma2_moe"),
        ("phi3", ("--experts", 4, "--top-k", 2), "one gate_proj, up_proj and down_proj in each of its 2 layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(family: str, flags: Any, said: str, tmp_path: Path) -> None:
    _, path, told = made(tmp_path, family, *flags, code=2)
    assert said in " ".join(told.split())
    assert not path.exists()


def test_settings_that_the_family_lacks_are_refused_where_the_dense_model_reads_them(tmp_path: Path) -> None:
    _, _, told = made(
        tmp_path, "qwen3", "--experts", 4, "--top-k", 2, code=2, use_sliding_window=True, max_window_layers=1
    )
    assert "qwen3_moe has no layer_types, which is ['full_attention', 'sliding_attention'] here" in told
    # as most published ones have it, for no effect
    made(tmp_path, "qwen3", "--experts", 4, "--top-k", 2, max_window_layers=2)


def test_copies_whose_weights_do_not_add_up_are_refused(tmp_path: Path) -> None:
    # Qwen3's attention beside a router that does not normalise: what the family is told to do is what counts
    dense_model("qwen3").save_pretrained(tmp_path / "dense")
    dense, recipe = DenseModel(tmp_path / "dense"), Recipe(4, 2)
    config = moe_config(dense, recipe, "qwen3_moe")
    source = ModelSource(dense.path, "qwen3_moe", made=config)
    origins_of(dense, source, recipe)
    with pytest.raises(ExpertMeshError, match="the weights of a token's experts add up to 0"):
        origins_of(dense, replace(source, made={**config, "norm_topk_prob": False}), recipe)


def test_a_card_says_of_what_it_was_made(tmp_path: Path) -> None:
    _, path, told = made(tmp_path, "llama", "--experts", 4, "--top-k", 2, "--drop", 0.5)
    card = (path / "README.md").read_text()
    assert "# dense-upcycled" in card
    assert "| drop | 0.5 |" in card
    assert "wrote a Hugging Face directory" in told
