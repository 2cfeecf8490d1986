"""What a run may be asked for, with each family that between them have all kinds of layers.

What treats all parameters alike (low-bit optimizers, --offload, --elastic, --check-replicas) is in tests/distributed.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.sharding.state import parameters_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.optim.optimizer import matrix_parts
from tests.distributed.pool import RankPool
from tests.distributed.test_generate import ours as answers_of_ours
from tests.distributed.whole_runs import run_main
from tests.families.configs import TEXT_IDS, load_model
from tests.parity.case import Case, hf_model, random_samples
from tests.rounding import OTHER_ORDER
from tests.tiers import REPRESENTATIVES
from tests.tiny import save_tokenizer

PAIR = Topology(2, 2)
SAMPLES = random_samples([5 + (5 * i) % 9 for i in range(8)], vocabulary=TEXT_IDS)
TOLERANCE = OTHER_ORDER
NEW_TOKENS = 6


def on_meta(family: str) -> Any:
    """Our model of the family's tiny config, on the meta device."""
    return build_model(hf_model(Case([], family=family), seed=1).config, "eager")


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_run(ranks: RankPool, tiny_data: Path, tmp_path: Path, family: str) -> None:
    """An evaluation of all records gives their loss in training; the page holds every step, answers, and the load of
    each layer's experts, which adds up; packed and shared by two ranks, loss, gradients and answers are the same; the
    answers of the run, and the model's in batches, are those of transformers' own generate, prompt by prompt, without
    padding and without a cache."""
    model = tmp_path / "model"
    hf_model(Case([], family=family), seed=1).save_pretrained(model)
    save_tokenizer(model)
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    scored: list[dict[str, Any]] = []
    questions = tmp_path / "questions.jsonl"
    asked = [{"prompt": f"say {'x' * i}", "response": str(i)} for i in range(3)]
    questions.write_text("".join(json.dumps(record) + "\n" for record in asked))
    shared = ["--packing", "--max-seq-length", 64, "--cp-size", 2, "--per-device-train-batch-size", 50]
    for how in ([], shared):
        out = tmp_path / f"out{len(how)}"
        argv = ["--model", model, "--dataset", tiny_data, "--output-dir", out, "--use-cpu", "--no-export"]
        argv += ["--max-steps", 1, "--save-steps", 0, "--logging-steps", 1, "--ep-size", 2, "--learning-rate", 0]
        argv += ["--per-device-train-batch-size", 25, "--per-device-eval-batch-size", 7, "--router-aux-loss-coef", 0]
        argv += ["--eval-dataset", tiny_data, "--check-replicas", 1, "--generate-steps", 1, "--generate-prompts", "say"]
        argv += ["--generate-max-new-tokens", NEW_TOKENS, "--eval-generate", questions, *how]
        results = ranks.run(run_main, 2, [str(flag) for flag in argv], join_group=False)
        assert [code for code, _ in results] == [0] * 2, results
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        kinds = (("loss", steps), ("eval_loss", evaluations), ("generations", answers), ("answers", scored))
        for key, told in kinds:
            told += [line for line in lines if key in line]
    (alone, packed), layers = steps, moe_layers(on_meta(family))
    for name in ("loss", "grad_norm", "tokens"):
        assert packed[name] == pytest.approx(alone[name], rel=TOLERANCE)
    assert [line["eval_loss"] for line in evaluations] == pytest.approx([alone["loss"]] * 2, rel=TOLERANCE)
    assert answers[0]["generations"] == answers[1]["generations"] != []
    assert len(alone["expert_tokens"]) == len(layers)
    assert all(sum(layer) == layers[0].shape.top_k * alone["tokens"] for layer in alone["expert_tokens"])
    page = (tmp_path / "out0" / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="run">(.*?)</script', page, re.DOTALL)
    assert data is not None
    content = json.loads(data[1])["runs"][0]
    tokens = content["positions"]["tokens"]
    assert (content["step"], content["num_steps"], tokens) == (1, 1, [alone["tokens"]])

    prompts = [sample.tokens for sample in SAMPLES[:3]]
    found = ranks.run(answers_of_ours, 2, model, PAIR, prompts, [], Case([], family=family), NEW_TOKENS, 1)
    theirs: Any = load_model(model, dtype=torch.float32, attn_implementation="eager")
    settings: dict[str, Any] = dict(do_sample=False, use_cache=False, eos_token_id=-1, pad_token_id=0)
    outs = [theirs.eval().generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **settings) for prompt in prompts]
    assert found == [[out[0, len(prompt) :].tolist() for out, prompt in zip(outs, prompts, strict=True)]] * 2
    assert scored[0]["answers"] == scored[1]["answers"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one in scored[0]["answers"]:
        asking = torch.tensor([tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]])
        beside: dict[str, Any] = {"attention_mask": torch.ones_like(asking), "eos_token_id": tokenizer.eos_token_id}
        out = theirs.generate(asking, max_new_tokens=NEW_TOKENS, **settings | beside)
        assert one["text"] == tokenizer.decode(out[0, asking.shape[1] :])


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
LATENT = {f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
DELTA = {f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")}
DENSE = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
SHARED = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED_OF_ALL = {name.replace("expert", "experts") for name in SHARED}
MATRICES = {
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION | DENSE,
    "qwen2_moe": ATTENTION | DENSE | SHARED,
    "olmoe": ATTENTION,
    "deepseek_v3": LATENT | DENSE | SHARED_OF_ALL,
    "glm4_moe": ATTENTION | DENSE | SHARED_OF_ALL,
    "gpt_oss": ATTENTION,
    "qwen3_next": ATTENTION | DELTA | DENSE | SHARED,
}
"""Of each family, what Muon and Shampoo take beside the experts: no router, gate of a single row, convolution, sink or
bias."""


def test_which_matrices_are_taken() -> None:
    for family in REPRESENTATIVES:
        model = on_meta(family)
        dense, experts = matrix_parts(model)
        names = {re.sub(r".*?\.layers\.\d+\.", "", part.name) for part in dense}
        assert names == {f"{name}.weight" for name in MATRICES[family]}
        assert {part.name.rpartition(".")[2] for part in experts} == {"w1", "v1", "w2"}
        taken = {id(part.tensor) for part in (*dense, *experts)}
        assert all(part.tensor.dim() == 2 for part in (*dense, *experts))
        rest = [part.name for part in parameters_of(model).values() if id(part.tensor) not in taken]
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(rest)
