"""In bf16: every family chooses the experts that its own class, from `from_pretrained(dtype=torch.bfloat16)`, chooses;
what it keeps in fp32 beside the rest is held and computed with in fp32."""

import inspect
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from expertmesh.moe.experts.layout import expert_modules
from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model, fp32_parameters
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import attention_mask, ours, sharded_model
from tests.families.configs import load_model
from tests.families.test_families import FAMILIES
from tests.parity.case import Case, hf_model, random_samples
from tests.tiny import relative_error

SAMPLES = random_samples([40] * 4, vocabulary=290)
NOISE = 0.05
"""Share of the choices in later layers that bf16's rounding of sums in another order may change: it depends on how the
CPU's kernels add up, and was 0.025 at most."""
FAILING = ["minimax"]
"""Its attention multiplies decays, which are buffers of checkpoints and so never rounded, with activations in bf16."""
HOW: dict[str, dict[str, Any]] = {
    "fp32 masters": {},
    "pure bf16": {"optim": "adamw_bf16"},
    "LoRA": {"adapter": "lora", "lora_targets": ["experts"], "base_dtype": "bfloat16"},
    "LoRA beside nf4": {"adapter": "lora", "lora_targets": ["experts"], "base_dtype": "nf4"},
}


def may_keep(family: str) -> bool:
    """Whether the source of its classes says that some parameter stays in fp32."""
    config = CONFIG_MAPPING[family]()
    folders = {Path(inspect.getfile(type(part))).parent for part in (config, config.get_text_config())}
    sources = [file.read_text() for folder in folders for file in folder.glob("modeling_*.py")]
    return any(re.search(r"_keep_in_fp32_modules_strict = [^N]|nn\.Parameter\(.*float32", text) for text in sources)


def choices(experts: list[Any], forward: Callable[[], Any]) -> list[Tensor]:
    """Each layer's choices of experts in one forward, (T, K), sorted."""
    found: list[Tensor] = []
    for module in experts:
        module.register_forward_pre_hook(lambda module, args: found.append(args[1].sort(dim=1).values))
    with torch.no_grad():
        forward()
    return found


Dtypes = dict[str, tuple[torch.dtype, torch.dtype]]


def our_choices(path: Path, case: Case) -> tuple[list[Tensor], Dtypes, set[str]]:
    """And of what the family keeps in fp32 the dtypes in which it is held, and computed with; the names of all
    parameters."""
    model, _, _ = sharded_model(path, Topology(1, 1), case)
    held = {name: parameter.dtype for name, parameter in fp32_parameters(model).items()}
    computed: dict[str, torch.dtype] = {}

    def remember(*_: Any) -> None:
        computed.update({name: parameter.dtype for name, parameter in fp32_parameters(model).items()})

    model.get_output_embeddings().register_forward_hook(remember)
    batch = collate([[sample] for sample in SAMPLES])
    found = choices(moe_layers(model), lambda: token_loss_sum(model.train(), batch))
    names = {name for name, _ in model.named_parameters()}
    return found, {name: (held[name], computed[name]) for name in held}, names


def kept(path: Path) -> set[str]:
    """Names of the parameters that transformers loads in fp32 where it is told bf16."""
    model: Any = load_model(path, dtype=torch.bfloat16)
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


def their_choices(path: Path) -> list[Tensor]:
    model: Any = load_model(path, dtype=torch.bfloat16, attn_implementation="eager")
    exact: Any = load_model(path, dtype=torch.float32)
    for name, buffer in exact.named_buffers():
        # some releases of transformers round it
        if name.endswith("correction_bias"):
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner)._buffers[own_name] = buffer
    batch, experts = collate([[sample] for sample in SAMPLES]), [module for _, module in expert_modules(model)]
    arguments = dict(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), use_cache=False)
    return choices(experts, lambda: model.train()(**arguments))


KEEPING = [family for family in FAMILIES if may_keep(family) and family not in FAILING]
OTHERS = [family for family in FAMILIES if family not in (*KEEPING, *FAILING)]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("family", "how"),
    [
        *((family, "fp32 masters") for family in OTHERS),
        *zip(KEEPING, cycle(["pure bf16", "LoRA", "fp32 masters"]), strict=False),
    ],
)
def test_choices(ranks: RankPool, tmp_path: Path, family: str, how: str) -> None:
    """In the first layer with experts, whose input no sum of rows in another order precedes, all of them."""
    case = Case(SAMPLES, family=family, compute_dtype=torch.bfloat16, settings=HOW[how])
    hf_model(case, seed=1).save_pretrained(tmp_path)
    ((found, dtypes, names),) = ranks.run(our_choices, 1, tmp_path, case)
    expected = kept(tmp_path) & names  # towers and correction biases, which are buffers here, are no parameters
    if expected and not dtypes:
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            their_choices(tmp_path)
        return  # the class in this transformers does not run with them
    assert dtypes.keys() == expected
    assert set(dtypes.values()) <= {(torch.float32, torch.float32)}
    different = [
        1 - float((ours_TK[:, :, None] == theirs_TK[:, None]).any(2).float().mean())
        for ours_TK, theirs_TK in zip(found, their_choices(tmp_path), strict=True)
    ]
    assert different[0] == 0
    assert max(different) <= NOISE, different


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "is_divided", "how"),
    # the last one's sinks are divided, and kept in fp32
    [
        ("deepseek_v4", False, "fp32 masters"),
        ("ernie4_5_moe", False, "LoRA"),
        ("hy_v4", False, "LoRA beside nf4"),
        ("hy_v4", True, "pure bf16"),
    ],
)
def test_two_ranks_as_one(ranks: RankPool, tmp_path: Path, family: str, is_divided: bool, how: str) -> None:
    """Loss, gradients and updates, as near as bf16 has digits; gradients of what is kept in fp32 are fp32."""
    case = Case(SAMPLES, family=family, compute_dtype=torch.bfloat16, settings=HOW[how], steps=2)
    model = hf_model(case, seed=1)
    kept = set(facts_of(build_model(model.config, "eager")).fp32_names)
    if not kept:
        pytest.skip("the class in this transformers does not run with them")
    model.save_pretrained(tmp_path)
    alone = ranks.run(ours, 1, tmp_path, Topology(1, 1), case)[0]
    pair = ranks.run(ours, 2, tmp_path, Topology(2, 2, tp_size=2 if is_divided else 1), case)[0]
    kept &= alone.weights.keys()
    assert pair.losses[0] == pytest.approx(alone.losses[0], rel=2e-3)
    assert pair.losses == pytest.approx(alone.losses, rel=1e-2)
    assert pair.losses[0] != pair.losses[1]
    assert pair.grads.keys() == alone.grads.keys()
    floor = 0.02 * alone.grad_norms[0]
    errors = {name: relative_error(pair.grads[name], grad, floor) for name, grad in alone.grads.items()}
    # where ranks divide attention more sums are rounded, and more tokens go to another expert, one of few
    assert max(errors.values()) < (0.4 if is_divided else 0.1), errors
    assert all(torch.isfinite(pair.weights[name]).all() for name in pair.grads)
    assert all(alone.weights[name].dtype == torch.float32 for name in kept)
    if "LoRA" not in how:
        kept &= alone.grads.keys()
        assert all(alone.grads[name].dtype == torch.float32 for name in kept)
        before = dict(model.named_parameters())
        assert any((alone.weights[name] != before[name]).any() for name in kept)
