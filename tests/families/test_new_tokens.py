"""New tokens: as transformers' model whose embeddings were resized, for every parallel layout and through files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.ep_shards.manifest import open_checkpoint
from expertmesh.checkpoints.hf.names import Names
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.new_rows import initial_rows
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours
from tests.distributed.whole_runs import read
from tests.families.test_adapter_files import Runs, logits_of
from tests.families.test_whole_modules import (
    HEADS,
    LAYOUTS,
    assert_same,
    started_by_peft,
    trained_by_peft,
)
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.kept import expected
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error, save_tokenizer

peft = pytest.importorskip("peft")

KNOWN, OLD, NEW = 282, 284, 294
"""Tokens of the tokenizer, rows of the model, and tokens with the new ones, of which two have a row already."""
TOKENS = [f"<new{number}>" for number in range(NEW - KNOWN)]
SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=NEW)


@pytest.fixture
def runs(ranks: RankPool, tiny_data: Path) -> Runs:
    return Runs(ranks, tiny_data)


def case_of(family: str, **settings: Any) -> Case:
    given: dict[str, Any] = {"add_tokens": [*TOKENS[:5], ",".join(TOKENS[5:])], **settings}
    return Case(SAMPLES, family=family, settings=given, changes=HEADS[family] | {"vocab_size": OLD})


def save_base(path: Path, family: str) -> None:
    hf_model(case_of(family), seed=1).save_pretrained(path)
    save_tokenizer(path)
    assert len(AutoTokenizer.from_pretrained(path)) == KNOWN


def begun(path: Path, seed: int = 42) -> dict[str, Tensor]:
    """What new rows of the model in a directory begin as."""
    source = replace(open_source(path), vocab_size=NEW)
    checkpoint = open_checkpoint(source, Names(source.build()))
    names = [name for name, rows in checkpoint.rows_in_files.items() if rows == OLD]
    return {name: initial_rows(checkpoint, name, range(OLD, NEW), seed).float() for name in names}


def resized(path: Path) -> Any:
    """transformers' own, with more rows, which begin as ours do."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.resize_token_embeddings(NEW)
    with torch.no_grad():
        for name, rows in begun(path).items():
            model.get_parameter(name)[OLD:] = rows
    return model


def test_rows_begin_as_transformers_draws_them(tmp_path: Path) -> None:
    """By their mean, and how far they are from it, in each direction; another seed gives others."""
    save_base(tmp_path, "mixtral")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    old = model.lm_head.weight.detach().double()
    torch.manual_seed(0)
    model.resize_token_embeddings(OLD + 4000)
    source = replace(open_source(tmp_path), vocab_size=OLD + 4000)
    checkpoint = open_checkpoint(source, Names(source.build()))
    ours, other = (initial_rows(checkpoint, "lm_head.weight", range(OLD, OLD + 4000), seed) for seed in (0, 1))
    theirs = model.lm_head.weight.detach()[OLD:].double()
    axes = torch.linalg.svd(old - old.mean(0), full_matrices=False).Vh
    spreads = [((rows - old.mean(0)) @ axes.T).std(0) for rows in (ours, theirs)]
    assert ours.mean(0) == pytest.approx(theirs.mean(0), abs=1e-5)
    assert spreads[0] == pytest.approx(spreads[1], rel=0.1)
    assert not torch.equal(ours, other)


CASES = [(family, layout) for family in HEADS for layout in LAYOUTS]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_all_weights_equal_one_process(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    save_base(tmp_path, family)
    case, topology = case_of(family), LAYOUTS[layout]
    want = expected(case, resized(tmp_path))
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert found.weights["model.embed_tokens.weight"].shape[0] == NEW
    assert_same(found, want, {}, moved=5e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "layout"), [("mixtral", "ep 2 tp 2"), ("qwen3_moe", "pp 2 ep 2"), ("mixtral", "1")])
def test_beside_adapters_as_peft(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    save_base(tmp_path, family)
    whole = ["embed_tokens", "lm_head"]
    lora: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lora_targets": ["attention"], "modules_to_save": whole}
    case, topology = case_of(family, **lora), LAYOUTS[layout]
    is_tied = family == "qwen3_moe"
    model = started_by_peft(case, resized(tmp_path), modules_to_save=whole, ensure_weight_tying=is_tied)
    want = trained_by_peft(case, model)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert_same(found, want, {})


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", HEADS)
def test_exported_and_resumed(runs: Runs, ranks: RankPool, tmp_path: Path, family: str) -> None:
    """The export has the tokens in tokenizer and config, and the rows; a resumed run ends as one without a break; what
    it began with is that of every layout."""
    save_base(base := tmp_path / "base", family)
    (tmp_path / "tokens.txt").write_text("\n".join(TOKENS))
    full = ("--adapter", "none", "--lora-rank", 16, "--lora-alpha", 32)
    flags = (*full, "--add-tokens", tmp_path / "tokens.txt", "--ep-size", 2, "--save-steps", 1)
    runs.train(2, base, tmp_path / "run", *flags, "--max-steps", 2)
    hf = tmp_path / "run" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == list(range(KNOWN, NEW))
    assert json.loads((hf / "config.json").read_text())["vocab_size"] == NEW
    loaded: Any = AutoModelForCausalLM.from_pretrained(hf)
    assert loaded.model.embed_tokens.weight.shape[0] == loaded.lm_head.weight.shape[0] == NEW
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    runs.train(2, base, tmp_path / "resumed", *flags, "--max-steps", 2, "--resume", step)
    assert checkpoints_main(["verify", str(hf), str(tmp_path / "resumed" / "hf")]) == 0
    assert checkpoints_main(["export", str(step), str(tmp_path / "step")]) == 0
    assert checkpoints_main(["convert", str(base), str(tmp_path / "shards"), "--ep-size", "2"]) == 0
    runs.train(1, tmp_path / "shards", tmp_path / "zero", *flags, "--ep-size", 1, "--max-steps", 0)
    for name, rows in begun(base).items():
        assert torch.equal(read(tmp_path / "zero" / "hf")[name][OLD:], rows)
        assert torch.equal(read(tmp_path / "zero" / "hf")[name][:OLD], read(base)[name])
    # a longer tokenizer of one's own
    longer = (*full, "--tokenizer", hf, "--max-steps", 0)
    assert "--resize-vocab gives the model rows for them" in runs.refused(base, tmp_path / "other", *longer)
    runs.train(1, base, tmp_path / "longer", *longer, "--resize-vocab")
    assert checkpoints_main(["verify", str(tmp_path / "zero" / "hf"), str(tmp_path / "longer" / "hf")]) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", HEADS)
def test_adapters_and_peft(runs: Runs, tmp_path: Path, family: str) -> None:
    """PEFT loads the adapter onto a model with as many rows, and both merges are that model."""
    save_base(base := tmp_path / "base", family)
    flags = ("--add-tokens", *TOKENS, "--modules-to-save", "embed_tokens,lm_head", "--lora-targets", "attention")
    adapter = runs.train(2, base, tmp_path / "run", *flags, "--max-steps", 2, "--ep-size", 2, "--merge")
    model = resized(base)
    theirs = logits_of(peft.PeftModel.from_pretrained(model, adapter))
    assert theirs.shape[-1] == len(AutoTokenizer.from_pretrained(adapter)) == NEW
    assert relative_error(theirs, logits_of(resized(base))) > 1e-3
    assert checkpoints_main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    for merged in (tmp_path / "merged", tmp_path / "run" / "hf"):
        assert relative_error(logits_of(merged), theirs) < OTHER_ORDER
        assert AutoTokenizer.from_pretrained(merged).convert_tokens_to_ids(TOKENS) == list(range(KNOWN, NEW))
    again = runs.train(1, base, tmp_path / "again", *flags, "--max-steps", 0, "--init-adapter", adapter)
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    said = runs.refused(base, tmp_path / "out", "--add-tokens", *TOKENS, "--max-steps", 0)
    assert "the rows of new tokens would stay as they begin" in said


OF_ROWS = [("mixtral", layout) for layout in LAYOUTS] + [
    ("qwen3_moe", layout) for layout in ("1", "ep 2 tp 2", "pp 2 ep 2")
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "layout"), OF_ROWS)
def test_rows_alone_as_peft(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    """Of new tokens that have a row already, and of others; tied, the same rows are in the head."""
    save_base(tmp_path, family)
    lora: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lora_targets": ["attention"], "train_new_tokens": True}
    case, topology, ids = case_of(family, **lora), LAYOUTS[layout], list(range(KNOWN, NEW))
    names = ["embed_tokens"] if family == "qwen3_moe" else ["embed_tokens", "lm_head"]
    model = started_by_peft(case, resized(tmp_path), trainable_token_indices=dict.fromkeys(names, ids))
    want = trained_by_peft(case, model)
    assert sum("token_rows" in name for name in want.weights) == len(names)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert_same(found, want, {})
    old = resized(tmp_path).get_input_embeddings().weight
    assert torch.equal(found.weights["model.embed_tokens.weight"], old)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("family", HEADS)
def test_peft_loads_rows(runs: Runs, tmp_path: Path, family: str) -> None:
    """Its logits are those of both merges; a run begins from the adapter, and a resumed one ends alike."""
    save_base(base := tmp_path / "base", family)
    flags = ("--add-tokens", *TOKENS, "--train-new-tokens", "--lora-targets", "attention", "--ep-size", 2)
    adapter = runs.train(2, base, tmp_path / "run", *flags, "--max-steps", 2, "--merge", "--save-steps", 1)
    said = json.loads((adapter / "adapter_config.json").read_text())["trainable_token_indices"]
    assert set(said) == {"model.embed_tokens"} | ({"lm_head"} if family == "mixtral" else set())
    assert said["model.embed_tokens"] == list(range(KNOWN, NEW))
    theirs = logits_of(peft.PeftModel.from_pretrained(resized(base), adapter))
    assert relative_error(theirs, logits_of(resized(base))) > 1e-3
    assert checkpoints_main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    for merged in (tmp_path / "merged", tmp_path / "run" / "hf"):
        assert relative_error(logits_of(merged), theirs) < OTHER_ORDER
        tied = json.loads((merged / "config.json").read_text()).get("tie_word_embeddings", False)
        assert tied == (family == "qwen3_moe")
    again = runs.train(2, base, tmp_path / "again", *flags, "--max-steps", 0, "--init-adapter", adapter)
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    resumed = runs.train(2, base, tmp_path / "resumed", *flags, "--max-steps", 2, "--resume", step)
    assert checkpoints_main(["verify", str(adapter), str(resumed)]) == 0

    def refused(*more: object) -> str:
        return runs.refused(base, tmp_path / "out", "--lora-targets", "attention", "--max-steps", 0, *more)

    assert "there are none; give --add-tokens" in refused("--train-new-tokens")
    both = ("--add-tokens", *TOKENS, "--train-new-tokens", "--modules-to-save", "lm_head")
    assert "give one of the two" in refused(*both)
    assert "has all tokens; leave it out" in refused("--add-tokens", "<s>", "--train-new-tokens")
    more = ("--add-tokens", *TOKENS, "<more>", "--train-new-tokens", "--init-adapter", adapter)
    assert "has rows of 12 new tokens, this run trains 13" in refused(*more)


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["bfloat16", "nf4"])
def test_rows_are_kept_in_fp32(ranks: RankPool, tmp_path: Path, base_dtype: str) -> None:
    save_base(tmp_path, "mixtral")
    settings: dict[str, Any] = {"adapter": "lora", "train_new_tokens": True, "base_dtype": base_dtype, "bf16": True}
    found = ranks.run(ours, 2, tmp_path, LAYOUTS["ep 2"], case_of("mixtral", **settings))[0]
    assert found.weights["lm_head.token_rows"].dtype == torch.float32
    assert found.weights["lm_head.weight"].dtype == torch.bfloat16
    assert found.losses[-1] < found.losses[0]
