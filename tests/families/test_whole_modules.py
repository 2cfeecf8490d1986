"""Modules that are trained whole beside adapters: against PEFT's modules_to_save in one process, and through files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.training_state.state_table import StateReader
from expertmesh.moe.experts.lora import first_values
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from tests.distributed.pool import RankPool
from tests.distributed.reference import attention_mask, in_our_layout, ours, train_config, unshifted_labels
from tests.families.configs import TEXT_IDS
from tests.families.test_adapter_files import Runs, logits_by_peft, logits_of
from tests.parity.case import MAX_GRAD_NORM, Case, Figures, hf_model, random_samples
from tests.parity.reference import loss_of
from tests.rounding import OTHER_ORDER, gradient_errors, near
from tests.tiny import relative_error, save_tokenizer

peft = pytest.importorskip("peft")

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TIED = {"tie_word_embeddings": True}
HEADS: dict[str, dict[str, Any]] = {"mixtral": {"num_key_value_heads": 4}, "qwen3_moe": TIED}
LAYOUTS = {
    "1": Topology(1, 1),
    "ep 2": Topology(2, 2),
    "ep 2 tp 2": Topology(4, 2, tp_size=2),
    "pp 2 ep 2": Topology(4, 2, pp_size=2),
    "cp 2": Topology(2, 2, cp_size=2),
}


@pytest.fixture
def runs(ranks: RankPool, tiny_data: Path) -> Runs:
    return Runs(ranks, tiny_data)


def case_of(family: str, **settings: Any) -> Case:
    lora: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lora_targets": ["attention"], **settings}
    return Case(SAMPLES, family=family, settings=lora, changes=HEADS[family])


def started_by_peft(case: Case, base: Any = None, **config: Any) -> Any:
    """PEFT's model, whose adapters begin as ours do; of the case's own, or another base."""
    settings = train_config(**case.settings)
    lora = dict(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=ATTENTION, **config)
    model = peft.get_peft_model(base or hf_model(case, seed=1), peft.LoraConfig(**lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                rows = range(parameter.shape[0])
                parameter.copy_(first_values(our_name(name), rows, parameter.shape[1], len(rows), settings.seed))
    return model


def our_name(name: str) -> str:
    """Of a trained parameter of PEFT's model."""
    for theirs, own in (
        ("base_model.model.", ""),
        ("modules_to_save.default.", ""),
        (".default.weight", ""),
        ("token_adapter.trainable_tokens_delta.default", "token_rows"),
    ):
        name = name.replace(theirs, own)
    return name


def trained_by_peft(case: Case, model: Any) -> Figures:
    """Steps of AdamW, clipped, on what PEFT trains."""
    trained = {our_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    config = train_config(**case.settings)
    groups = [
        {"params": [p for p in trained.values() if (p.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    losses, grad_norms, grads = [], [], {}
    for step in range(case.steps):
        optimizer.zero_grad()
        out = model(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), use_cache=False)
        loss = loss_of(model.base_model.model, out.logits, labels)
        loss.backward()
        if step == 0:
            grads = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), MAX_GRAD_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Figures(losses, grad_norms, grads=grads, weights={name: p.detach() for name, p in trained.items()})


def assert_same(found: Figures, want: Figures, frozen: dict[str, Tensor], moved: float = 1e-5) -> None:
    """Losses, gradients and norms; trained weights; and of all others nothing has changed."""
    assert found.losses == near(want.losses)
    assert found.grad_norms == near(want.grad_norms)
    assert found.grads.keys() == want.grads.keys() == want.weights.keys()
    errors = gradient_errors(found.grads, want.grads)
    assert max(errors.values()) <= OTHER_ORDER, errors
    errors = {name: relative_error(found.weights[name], weight) for name, weight in want.weights.items()}
    print("largest", max(errors.values()))
    assert max(errors.values()) <= 1e-4, errors
    whole = {name: error for name, error in errors.items() if "lora_" not in name}
    assert max(whole.values()) <= moved, whole
    assert all(torch.equal(found.weights[name], weight) for name, weight in frozen.items())


CASES = [
    ("mixtral", "1", ["embed_tokens", "lm_head"]),
    ("mixtral", "ep 2 tp 2", ["embed_tokens", "lm_head", "norms"]),
    ("mixtral", "pp 2 ep 2", ["embed_tokens", "lm_head"]),
    ("mixtral", "cp 2", ["lm_head", "router"]),
    ("qwen3_moe", "ep 2", ["embed_tokens"]),
    ("qwen3_moe", "ep 2 tp 2", ["lm_head"]),
    ("qwen3_moe", "pp 2 ep 2", ["embed_tokens", "norms"]),
]
OF_PEFT = {"norms": ["norm", "layernorm"], "router": ["mlp.gate"]}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "layout", "whole"), CASES, ids=lambda value: str(value))
def test_equals_peft_in_one_process(
    ranks: RankPool, tmp_path: Path, family: str, layout: str, whole: list[str]
) -> None:
    case, topology = case_of(family, modules_to_save=whole), LAYOUTS[layout]
    hf_model(case, seed=1).save_pretrained(tmp_path)
    theirs = [name for entry in whole for name in OF_PEFT.get(entry, [entry])]
    model = started_by_peft(case, modules_to_save=theirs, ensure_weight_tying=family == "qwen3_moe")
    trained = {our_name(name) for name, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p for n, p in in_our_layout(hf_model(case, seed=1), "data").items() if n not in trained}
    want = trained_by_peft(case, model)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert_same(found, want, frozen)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("family", HEADS)
def test_peft_loads_what_was_trained(runs: Runs, tmp_path: Path, family: str) -> None:
    """Its logits, those of the merged export and of the command's are the same; a run begins from it, and from what
    PEFT saves; and a resumed run ends as one that was not interrupted, bit for bit."""
    base = tmp_path / "base"
    hf_model(case_of(family), seed=1).save_pretrained(base)
    save_tokenizer(base)
    modules = "lm_head,model.norm" if family == "qwen3_moe" else "embed_tokens,lm_head,router"
    flags = ("--max-steps", 2, "--ep-size", 2, "--lora-targets", "attention", "--modules-to-save", modules)
    adapter = runs.train(2, base, tmp_path / "run", *flags, "--merge", "--save-steps", 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config.get("ensure_weight_tying", False) == (family == "qwen3_moe")
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} < tensors.keys()
    theirs = logits_by_peft(base, adapter)
    assert relative_error(theirs, logits_of(base)) > 1e-3
    assert checkpoints_main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    for merged in (tmp_path / "merged", tmp_path / "run" / "hf"):
        assert relative_error(logits_of(merged), theirs) < OTHER_ORDER
        tied = json.loads((merged / "config.json").read_text()).get("tie_word_embeddings", False)
        assert tied == (family == "qwen3_moe")
    begun = ("--max-steps", 0, "--ep-size", 2, "--init-adapter")
    again = runs.train(2, base, tmp_path / "again", *begun, adapter)
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    loaded = peft.PeftModel.from_pretrained(hf_model(case_of(family), seed=1), adapter)
    loaded.save_pretrained(tmp_path / "by peft")
    again = runs.train(2, base, tmp_path / "from peft", *begun, tmp_path / "by peft")
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    names = StateReader(saved / "state").read_metadata().state_dict_metadata
    assert "model.model.embed_tokens.weight" in names
    assert "model.model.layers.0.self_attn.q_proj.weight" not in names
    resumed = runs.train(2, base, tmp_path / "resumed", *flags, "--resume", saved)
    assert checkpoints_main(["verify", str(adapter), str(resumed)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["bfloat16", "nf4"])
def test_they_are_kept_in_fp32(ranks: RankPool, tmp_path: Path, base_dtype: str) -> None:
    case = case_of("mixtral", modules_to_save=["embed_tokens", "lm_head", "norms"], base_dtype=base_dtype, bf16=True)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    found = ranks.run(ours, 2, tmp_path, LAYOUTS["ep 2"], case)[0]
    assert found.weights["lm_head.weight"].dtype == found.weights["model.norm.weight"].dtype == torch.float32
    assert found.weights["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert found.losses[-1] < found.losses[0]


def test_what_cannot_be_trained_whole_is_refused(runs: Runs, tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf_model(case_of("qwen3_moe"), seed=1).save_pretrained(base)
    save_tokenizer(base)

    def said(*flags: object) -> str:
        return runs.refused(base, tmp_path / "out", "--max-steps", 0, *flags)

    assert "--modules-to-save q_proj: no module that can be matches it" in said("--modules-to-save", "q_proj")
    assert "has an adapter too" in said("--modules-to-save", "router", "--lora-targets", "attention,router")
    adapter = runs.train(1, base, tmp_path / "run", "--max-steps", 0, "--modules-to-save", "lm_head")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = "base_model.model.lm_head.weight"
    table: list[tuple[str, dict[str, Any], dict[str, Tensor]]] = [
        ("trained whole there; give the same --modules-to-save", config, {}),
        ("is not tied there", config | {"ensure_weight_tying": False}, {}),
        ("has shape [3, 2], the model's", config, {head: torch.zeros(3, 2)}),
        (
            "has values that are not finite",
            config,
            {head.replace("lm_head", "model.embed_tokens"): tensors[head] * torch.nan},
        ),
        ("has no tensor for model.norm.weight", config | {"modules_to_save": ["model.norm"]}, {}),
    ]
    for number, (words, changed, more) in enumerate(table):
        (bad := tmp_path / str(number)).mkdir()
        (bad / "adapter_config.json").write_text(json.dumps(changed))
        save_file(tensors | more, bad / "adapter_model.safetensors")
        flags = ("--modules-to-save", "norms") if number == 0 else ("--modules-to-save", "lm_head")
        assert words in said(*flags, "--init-adapter", bad), words
