"""Models whose rotary positions are stretched, against transformers' own with the same parameters: logits at positions
beyond those the model had, as built here and as exported; and runs, whose files all say what was stretched."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from expertmesh import train_ep
from expertmesh.checkpoints.adapters.merge import merge_adapter
from expertmesh.checkpoints.convert import HowToWrite
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.load import shard_and_load
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.rope import read_rope_scaling
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.parallelize.choices import Strategy
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.families.configs import POSITIONS, tiny_config, tiny_model
from tests.rounding import OTHER_ORDER
from tests.tiny import loaded, relative_error, save_tokenizer

TOLERANCE = OTHER_ORDER
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0}
LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": POSITIONS},
    **{"short_factor": [1.0 + 0.1 * i for i in range(4)], "long_factor": [2.0 + 0.5 * i for i in range(4)]},
}
MELLUM = tiny_config("mellum").rope_parameters
GEMMA = tiny_config("gemma4_text").rope_parameters
GPT_OSS = tiny_config("gpt_oss").rope_parameters

MIXTRAL = {"rope_theta": 1e6}
CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    # a head's width left open, as Mixtral's own config has it
    "mixtral yarn, head_dim open": ("mixtral", "yarn:4", YARN | MIXTRAL, 1024),
    "mixtral dynamic": ("mixtral", "dynamic:4", {"rope_type": "dynamic", "factor": 4.0, **MIXTRAL}, POSITIONS),
    "qwen3_moe longrope": ("qwen3_moe", json.dumps(LONGROPE), LONGROPE | {"rope_theta": 1e4}, 1024),
    # where mscale_all_dim enters the scale of attention's scores
    "deepseek_v3 yarn": ("deepseek_v3", json.dumps(YARN | MSCALE), YARN | MSCALE | {"rope_theta": 1e4}, 1024),
    "gpt_oss yarn again": ("gpt_oss", "yarn:8", GPT_OSS | {"factor": 8.0}, 32768),
    "glm4_moe, in part": ("glm4_moe", "yarn:4", YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 1024),
    "mellum, by kind": ("mellum", "yarn:4", MELLUM | {"full_attention": YARN | {"rope_theta": 5e5}}, 1024),
    "gemma4, in parts": (
        *("gemma4", "proportional:4"),
        GEMMA | {"full_attention": GEMMA["full_attention"] | {"factor": 4.0}},
        1024,
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_beyond_the_old_positions(ranks: RankPool, tmp_path: Path, case: str) -> None:
    family, text, parameters, positions = CASES[case]
    is_open = case.endswith("open")
    tiny_model(family, seed=1, **({"head_dim": None} if is_open else {})).save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    plain = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager"))
    # what a user of transformers would write
    config.get_text_config().rope_parameters = parameters
    config.get_text_config().max_position_embeddings = positions
    if is_open:
        config.head_dim = config.hidden_size // config.num_attention_heads
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config, attn_implementation="eager")
    expected = logits_of(theirs)
    assert relative_error(plain, expected) > 100 * TOLERANCE, "stretched positions change nothing"

    source = open_source(tmp_path / "model", read_rope_scaling(text))
    ours = loaded(source.build("eager"), theirs)
    assert ours.config.get_text_config().rope_parameters == parameters
    assert ours.config.get_text_config().max_position_embeddings == positions
    assert relative_error(logits_of(ours), expected) <= TOLERANCE
    ranks.run(_export, 1, tmp_path / "model", text, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert exported.config.get_text_config().max_position_embeddings == positions
    assert torch.equal(logits_of(exported), expected)


def logits_of(model: Any) -> Tensor:
    """Logits of a sequence that runs from the old positions to those beyond."""
    tokens_BS = torch.arange(3, 35).unsqueeze(0)
    positions_BS = torch.arange(POSITIONS - 8, POSITIONS + 24).unsqueeze(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # not where the file has it: products of numbers that lie elsewhere may be summed in another order
            parameter.data = parameter.data.clone()
        logits: Tensor = model.eval()(input_ids=tokens_BS, position_ids=positions_BS, use_cache=False).logits
    return logits


def _export(path: Path, text: str, out: Path) -> None:
    source, topology = open_source(path, read_rope_scaling(text)), Topology(1, 1)
    model = source.build("eager")
    mesh = build_mesh("cpu", topology)
    checkpoint = shard_and_load(model, source, mesh, torch.device("cpu"), torch.float32, Strategy())
    export_model(model, checkpoint, topology, out)


def test_dynamic_ones_forget_earlier_rows() -> None:
    """What a forward gives does not turn on the rows before it."""
    theirs: Any = tiny_model("mixtral", seed=1, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    ours = loaded(build_model(theirs.config, "eager"), theirs)
    longer, shorter = (torch.arange(length).unsqueeze(0) % 290 + 3 for length in (POSITIONS + 60, POSITIONS + 20))
    with torch.no_grad():
        before = ours.eval()(input_ids=shorter, use_cache=False).logits
        ours(input_ids=longer, use_cache=False)
        assert torch.equal(ours(input_ids=shorter, use_cache=False).logits, before)
        assert relative_error(before, theirs.eval()(input_ids=shorter, use_cache=False).logits) <= TOLERANCE


def test_a_model_without_rotary_embedding_is_told(tmp_path: Path) -> None:
    """A family without rotary embedding whose config has its parameters all the same."""
    tiny_config("granitemoehybrid").save_pretrained(tmp_path)
    source = open_source(tmp_path, read_rope_scaling("yarn:4"))
    with pytest.raises(ExpertMeshError, match=r"config.json: .*GraniteMoeHybridForCausalLM has no rotary embedding"):
        source.build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rope") / "model"
    tiny_model("qwen3_moe", seed=1, max_position_embeddings=32).save_pretrained(path)
    save_tokenizer(path)
    return path


def train(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: object) -> tuple[int, str]:
    """(exit code, standard error) of rank 0."""
    argv = ["--model", model, "--dataset", data, "--output-dir", out, "--use-cpu", "--max-steps", 2, "--ep-size", 2]
    argv += ["--per-device-train-batch-size", 4, "--learning-rate", "1e-3", *flags]
    found: tuple[int, str] = ranks.run(run_main, world_size, [str(flag) for flag in argv], join_group=False)[0]
    return found


def stretched(path: Path) -> tuple[Any, Any, int]:
    config = json.loads((path / "config.json").read_text())
    parameters = config["rope_parameters"]
    return parameters["rope_type"], parameters.get("factor"), config["max_position_embeddings"]


@pytest.mark.slow
def test_what_runs_write(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Exports, training checkpoints, adapters and merges have it, and what goes on from them asks for the same."""

    def run(out: str, *flags: object) -> tuple[int, str]:
        return train(ranks, 2, model, tiny_data, tmp_path / out, *flags)

    assert run("run", "--save-steps", 1, "--rope-scaling", "yarn:4") == (0, "")
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    for path in (tmp_path / "run" / "hf", saved / "model"):
        assert stretched(path) == ("yarn", 4.0, 128)
    shutil.copytree(saved, tmp_path / "again" / "checkpoints" / saved.name)
    code, said = run("again", "--resume", "auto", "--rope-scaling", "yarn:2")
    assert code == 2
    assert "that run had --rope-scaling yarn:4, this one has --rope-scaling yarn:2; take the same" in said
    assert run("again", "--resume", "auto", "--rope-scaling", "yarn:4")[0] == 0
    assert stretched(tmp_path / "again" / "hf") == ("yarn", 4.0, 128)

    lora = ["--adapter", "lora", "--lora-rank", 4, "--save-steps", 0]
    assert run("lora", *lora, "--merge", "--rope-scaling", "linear:2")[0] == 0
    adapter = tmp_path / "lora" / "adapter"
    assert json.loads((adapter / "rope_scaling.json").read_text()) == {"rope_type": "linear", "factor": 2.0}
    merge_adapter(model, adapter, tmp_path / "merged", HowToWrite(10**9, workers=1))
    for path in (tmp_path / "lora" / "hf", tmp_path / "merged"):
        assert stretched(path) == ("linear", 2.0, 64)
    code, said = run("other", *lora, "--init-adapter", adapter)
    assert code == 2
    assert "was trained with --rope-scaling '{" in said
    assert "this run has no --rope-scaling" in said
    assert run("same", *lora, "--init-adapter", adapter, "--rope-scaling", "linear:2")[0] == 0


def first_lines(argv: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_ep.main(argv) == 0
    return " ".join(said.getvalue().split())


@pytest.mark.slow
def test_the_first_lines_tell(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "say", "response": "x" * 60}))
    flags = ["--model", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]

    def told(*more: str) -> str:
        found: str = ranks.run(first_lines, 1, [*flags, "--preview", *more], join_group=False)[0]
        return found

    assert "tokens, but the model has 32 positions; --rope-scaling yarn:3 extends them" in told()
    assert (
        "but the model has 64 positions; --rope-scaling yarn:3 extends them, --max-seq-length 64 truncates it"
        in told("--rope-scaling", "linear:2")
    )
    stretched = told("--rope-scaling", "yarn:4", "--adapter", "lora")
    assert "rope: yarn by 4 of 32 positions instead of default; max_position_embeddings becomes 128, of 32" in stretched
    assert '"max_position_embeddings": 128' in stretched
    for quiet in (stretched, told("--rope-scaling", "dynamic:2")):
        assert "warning" not in quiet
    # which truncates the sample, and says so
    assert "but the model has" not in told("--max-seq-length", "32")
