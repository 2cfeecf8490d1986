"""The table of features and families: what a run may be asked for, with each family that between them have all kinds
of layers. `pytest -v tests/families/test_features.py` prints it, a line a cell.

A column is a function of FEATURES: it runs the feature on two ranks, ep 2, and compares with what should come out.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.sharding.state import parameters_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.optim.optimizer import matrix_parts
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, ours, random_samples, reference
from tests.distributed.test_generate import ours as answers_of_ours
from tests.distributed.test_replicas import find
from tests.distributed.whole_runs import FIXED_PRODUCTS, assert_equal_weights, read, run_main
from tests.families.configs import TEXT_IDS, load_model
from tests.tiers import REPRESENTATIVES, two_diagonals
from tests.tiny import relative_error, save_tokenizer

PAIR = Topology(2, 2)
SAMPLES = random_samples([5 + (5 * i) % 9 for i in range(8)], vocabulary=TEXT_IDS)
TOLERANCE = 1e-5
WEIGHT_TOLERANCES = {"adamw_torch_8bit": 5e-5, "adamw_bf16": 5e-4, "muon": 5e-5, "shampoo": 5e-5}
"""After two steps, as in tests/distributed/test_optimizers.py: low-bit state is rounded to another value here and
there, and AdamW's first steps follow the signs of gradients."""
NEW_TOKENS = 6


@dataclass(frozen=True)
class Cell:
    """One family's part of a feature's test: its saved model, data, a directory of its own, and the ranks."""

    family: str
    model: Path
    data: Path
    out: Path
    ranks: RankPool

    def train(self, world_size: int, out: Path, *flags: object) -> list[dict[str, Any]]:
        """Run train_ep.py; the lines of its metrics."""
        argv = ["--model", self.model, "--dataset", self.data, "--output-dir", out, "--use-cpu", "--no-export"]
        argv += ["--per-device-train-batch-size", 8 // world_size, "--learning-rate", "1e-3", "--logging-steps", 1]
        argv += ["--ep-size", 2, *FIXED_PRODUCTS, *flags]
        results = self.ranks.run(run_main, world_size, [str(flag) for flag in argv], join_group=False)
        assert [code for code, _ in results] == [0] * world_size, results
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def pair(self, case: Case) -> Any:
        """Figures of two ranks that shard the experts."""
        return self.ranks.run(ours, 2, self.model, PAIR, case)[0]


def on_meta(family: str) -> Any:
    """Our model of the family's tiny config, on the meta device."""
    return build_model(hf_model(Case([], family=family), seed=1).config, "eager")


def generation(cell: Cell) -> None:
    """The tokens that transformers' own generate gives, prompt by prompt, without padding and without a cache."""
    prompts = [sample.tokens for sample in SAMPLES[:3]]
    case = Case([], family=cell.family)
    found = cell.ranks.run(answers_of_ours, 2, cell.model, PAIR, prompts, [], case, NEW_TOKENS)
    theirs: Any = load_model(cell.model, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for prompt in prompts:
        settings: dict[str, Any] = dict(do_sample=False, use_cache=False, eos_token_id=-1, pad_token_id=0)
        out = theirs.eval().generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **settings)
        expected.append(out[0, len(prompt) :].tolist())
    assert found == [expected] * 2


def evaluation(cell: Cell) -> None:
    """Evaluation of all records before anything was learned gives the loss of the same records in training."""
    run = cell.train(
        2, cell.out, "--eval-dataset", cell.data, "--max-steps", 1, "--save-steps", 0, "--learning-rate", 0,
        "--per-device-train-batch-size", 25, "--per-device-eval-batch-size", 7,
    )  # fmt: skip
    (trained,) = (line["loss"] for line in run if "loss" in line)
    (evaluated,) = (line["eval_loss"] for line in run if "eval_loss" in line)
    assert evaluated == pytest.approx(trained, rel=TOLERANCE)


def report(cell: Cell) -> None:
    """The page holds every step, the sample generations, and the load of each layer's experts, which adds up; of a run
    in which copies agree."""
    run = cell.train(
        2, cell.out, "--max-steps", 2, "--save-steps", 0, "--generate-steps", 2, "--eval-ratio", 0.1,
        "--generate-max-new-tokens", NEW_TOKENS, "--check-replicas", 1,
    )  # fmt: skip
    page = (cell.out / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="run">(.*?)</script', page, re.DOTALL)
    assert data is not None
    content = json.loads(data[1])
    assert (content["step"], content["num_steps"]) == (2, 2)
    layers = moe_layers(on_meta(cell.family))
    top_k = layers[0].shape.top_k
    steps = [line for line in run if "loss" in line]
    assert [len(step["expert_tokens"]) for step in steps] == [len(layers)] * 2
    assert all(sum(layer) == top_k * step["tokens"] for step in steps for layer in step["expert_tokens"])
    assert [len(line["generations"]) > 0 for line in run if "generations" in line] == [True]
    assert content["summary"]["tokens"] == sum(step["tokens"] for step in steps)


def packing(cell: Cell) -> None:
    """The loss and gradients of all rows are those of samples with a sequence each, and so are generations after the
    update."""
    common = ("--max-steps", 1, "--save-steps", 0, "--per-device-train-batch-size", 25, "--router-aux-loss-coef", 0)
    answering = ("--generate-steps", 1, "--generate-max-new-tokens", NEW_TOKENS, "--generate-prompts", "say 3")
    alone = cell.train(2, cell.out / "alone", *common, *answering)
    packed = cell.train(2, cell.out / "packed", *common, *answering, "--packing", "--max-seq-length", 64)
    steps, answers = (
        [next(line for line in run if key in line) for run in (packed, alone)] for key in ("loss", "generations")
    )
    assert steps[0]["tokens"] == steps[1]["tokens"]
    for name in ("loss", "grad_norm"):
        assert steps[0][name] == pytest.approx(steps[1][name], rel=TOLERANCE)
    assert answers[0]["generations"] == answers[1]["generations"]


def check_replicas(cell: Cell) -> None:
    """Copies that agree pass; one that does not is named: a correction bias, where there is one."""
    buffers = [name for name, _ in on_meta(cell.family).named_buffers()]
    name = next((name for name in buffers if name.endswith("e_score_correction_bias")), "model.rotary_emb.inv_freq")
    names, told = cell.ranks.run(find, 2, cell.model, PAIR, {name: [1]}, [1.0, 1.0])[0]
    assert f"1 of {len(names) + 1} tensors differ between the ranks" in told
    assert f"{name} (rank" in told


def low_bit(optim: str, cell: Cell) -> None:
    """Two steps on two ranks as on one. Rows of 256 values, as 8-bit moments want them."""
    case = Case(SAMPLES, family=cell.family, changes={"hidden_size": 256}, settings={"optim": optim}, steps=2)
    hf_model(case, seed=1).save_pretrained(cell.out)
    (alone,) = cell.ranks.run(ours, 1, cell.out, Topology(1, 1), case)
    found = cell.ranks.run(ours, 2, cell.out, PAIR, case)[0]
    _assert_near(found, alone, WEIGHT_TOLERANCES[optim])


def of_matrices(optim: str, cell: Cell) -> None:
    """As torch's own Muon, or Shampoo of whole matrices, of every projection and each expert's matrices."""
    settings = {"optim": optim, "shampoo_start": 2, "shampoo_block_size": 24}
    case = Case(SAMPLES, family=cell.family, settings=settings, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        # torch.optim.Muon goes to bf16 by itself
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        expected = reference(case, seed=1)
    _assert_near(cell.pair(case), expected, WEIGHT_TOLERANCES[optim])


def offload(cell: Cell) -> None:
    """Not a bit differs. On a CPU FSDP takes the same path through its offload policy; only the copies go nowhere."""
    plain, offloaded = (
        cell.pair(Case(SAMPLES, family=cell.family, settings={"offload": on}, steps=2)) for on in (False, True)
    )
    assert plain.grad_norms == offloaded.grad_norms
    assert all(torch.equal(offloaded.weights[name], weight) for name, weight in plain.weights.items())


def elastic(cell: Cell) -> None:
    """Begun on two ranks, and gone on with on one from the second step of three: the third step of the run that
    nothing stopped, and its weights."""
    common = ("--max-steps", 3, "--save-steps", 2, "--attn-implementation", "eager", "--export")
    whole = cell.train(2, cell.out / "whole", *common)
    shutil.copytree(cell.out / "whole" / "checkpoints", cell.out / "part" / "checkpoints")
    part = cell.train(1, cell.out / "part", *common, "--resume", "auto", "--elastic")
    (found,), (*_, expected) = ([line for line in run if "loss" in line] for run in (part, whole))
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE)
    assert_equal_weights(read(cell.out / "part" / "hf"), read(cell.out / "whole" / "hf"))


FEATURES: dict[str, Callable[[Cell], None]] = {
    "generation": generation,
    "evaluation": evaluation,
    "report": report,
    "packing": packing,
    "check-replicas": check_replicas,
    "adamw_torch_8bit": functools.partial(low_bit, "adamw_torch_8bit"),
    "adamw_bf16": functools.partial(low_bit, "adamw_bf16"),
    "muon": functools.partial(of_matrices, "muon"),
    "shampoo": functools.partial(of_matrices, "shampoo"),
    "offload": offload,
    "elastic": elastic,
}
OF_LAYERS = ("generation", "packing", "muon", "shampoo")
"""Features that do something of their own to layers or matrices of a kind, and so are tested with every family here;
the others treat all parameters alike, and are tested with two or more each."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved model of a family, with a tokenizer."""

    @functools.cache
    def saved(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        hf_model(Case([], family=family), seed=1).save_pretrained(path)
        save_tokenizer(path)
        return path

    return saved


@pytest.mark.sample(27)
@pytest.mark.parametrize(
    ("feature", "family"),
    [
        cell
        for cell in product(FEATURES, REPRESENTATIVES)
        if cell[0] in OF_LAYERS or cell in two_diagonals(list(FEATURES), REPRESENTATIVES)
    ],
)
def test_feature(
    ranks: RankPool, models: Callable[[str], Path], tiny_data: Path, tmp_path: Path, feature: str, family: str
) -> None:
    FEATURES[feature](Cell(family, models(family), tiny_data, tmp_path, ranks))


def _assert_near(found: Any, expected: Any, tolerance: float) -> None:
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=TOLERANCE)
    assert found.losses[1] == pytest.approx(expected.losses[1], rel=max(TOLERANCE, tolerance))
    assert found.losses[1] != found.losses[0]
    errors = {name: relative_error(found.weights[name], weight) for name, weight in expected.weights.items()}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong


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


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_which_matrices_are_taken(family: str) -> None:
    model = on_meta(family)
    dense, experts = matrix_parts(model)
    names = {re.sub(r".*?\.layers\.\d+\.", "", part.name) for part in dense}
    assert names == {f"{name}.weight" for name in MATRICES[family]}
    assert {part.name.rpartition(".")[2] for part in experts} == {"w1", "v1", "w2"}
    taken = {id(part.tensor) for part in (*dense, *experts)}
    assert all(part.tensor.dim() == 2 for part in (*dense, *experts))
    rest = [part.name for part in parameters_of(model).values() if id(part.tensor) not in taken]
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(rest)
