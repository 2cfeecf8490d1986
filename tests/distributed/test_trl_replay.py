"""Routing replay in trl's GRPOTrainer and RLOOTrainer on an engine: gradients as of trl under DistributedDataParallel,
with transformers' own model, whose routers are given the same experts by the tokens of each sequence.

Shape suffixes: B sequences, S positions, T tokens, L MoE layers, K experts per token.
"""

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import expertmesh
from expertmesh.moe.experts.replay import route_reader
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, in_our_layout
from tests.families.configs import tiny_model
from tests.families.test_replay import choosing
from tests.rounding import AFTER_ADAMW
from tests.tiny import save_tokenizer

trl = pytest.importorskip("trl")
_Base: Any = object

FAMILY = "qwen2_moe"
"""Whose first layer has no experts."""
MOST = 5e-6
"""Of the norm of all gradients."""
SETTINGS: dict[str, Any] = dict(
    use_cpu=True, bf16=False, max_steps=4, lr_scheduler_type="constant", learning_rate=3e-2, weight_decay=0.0,
    max_grad_norm=0.0, adam_epsilon=1e-2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    dataloader_pin_memory=False, per_device_train_batch_size=4, num_generations=2,
    gradient_accumulation_steps=2, num_iterations=2, max_completion_length=8, beta=0.0, router_aux_loss_coef=0.0,
)  # fmt: skip


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Made-up completions, of lengths that differ."""
    seed = 100 * trainer.state.global_step + trainer.accelerator.process_index
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (len(prompts),), generator=generator).tolist()
    completions = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * n for n in lengths]}


def rollout_with_experts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Also the experts of all layers, as vLLM gives them: none for the last token, 0 in the layer that has none."""
    found = rollout(prompts, trainer)
    rows = [
        prompt + completion for prompt, completion in zip(found["prompt_ids"], found["completion_ids"], strict=True)
    ]
    return {**found, "routed_experts": [experts_of(row)[:-1].to(torch.uint8).numpy() for row in rows]}


def experts_of(tokens: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(tokens))
    experts = torch.rand(len(tokens), 3, 8, generator=generator).argsort(dim=-1)[..., :2]
    return experts * torch.tensor([0, 1, 1]).view(1, 3, 1)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float((sum(ids) + 3 * number) % 7) for number, ids in enumerate(completion_ids)]


class Keyed(_Base):
    """Before a Trainer's class, on transformers' model: experts are found again by the tokens of a sequence, wherever
    trl has put it."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, mask: Tensor, *a: Any, **kw: Any
    ) -> Any:
        self.known: dict[tuple[int, ...], Tensor] = vars(self).get("known", {})
        reader = route_reader(build_model(self.accelerator.unwrap_model(model).config))
        keys = [tuple(row[is_token == 1].tolist()) for row, is_token in zip(input_ids, mask, strict=True)]
        if getattr(self, "rollout_func", None) is rollout_with_experts:
            self.known = {key: experts_of(list(key))[:, 1:] for key in keys}
            for routes_TLK in self.known.values():
                routes_TLK[-1] = -1
        elif not torch.is_grad_enabled():
            with choosing(reader, None) as chosen:
                found = super()._get_per_token_logps_and_entropies(model, input_ids, mask, *a, **kw)
            some = [torch.stack(chosen[first : first + 2], dim=1) for first in range(0, len(chosen), 2)]
            routes_BSLK = torch.cat(some).unflatten(0, input_ids.shape)
            self.known |= {key: routes_BSLK[row][mask[row] == 1] for row, key in enumerate(keys)}
            return found
        routes_BSLK = torch.full((*input_ids.shape, 2, 2), -1)
        for row, key in enumerate(keys):
            routes_BSLK[row, mask[row] == 1] = self.known[key]
        with choosing(reader, routes_BSLK):
            return super()._get_per_token_logps_and_entropies(model, input_ids, mask, *a, **kw)


class Watch(TrainerCallback):
    """Keeps the gradients of each update, and how many ranks' gradients they are the sum of, not the mean."""

    def __init__(self, model: Any):
        self.model = model
        self.found: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            named = self.model.named_parameters()
            self.found.append(in_full({name: p.grad for name, p in named if p.grad is not None}))
        else:
            self.found.append(in_our_layout(self.model, "grad"))


def trained(
    path: Path, out: Path, loaded: dict[str, Any] | None, of_trl: str, generates: Any
) -> tuple[list[Any], list[Any]]:
    """The gradients of each update, on rank 0, and the log.

    Args:
        generates: a function that makes up completions; None: the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    if loaded is None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        before: tuple[Any, ...] = (Keyed,)
    else:
        model = expertmesh.load(str(path), use_cpu=True, **loaded)
        before = (expertmesh.RoutingReplay, expertmesh.TrainerMixin)
    kind: Any = type("Replaying", (*before, getattr(trl, f"{of_trl}Trainer")), {})
    # of complete sequences' ratios, all would be clipped
    epsilon = {"epsilon": 100.0} if of_trl == "RLOO" else {}
    args = getattr(trl, f"{of_trl}Config")(str(out), gradient_checkpointing=bool(loaded), **SETTINGS, **epsilon)
    trainer = kind(
        model=model, args=args, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list([{"prompt": f"say {i}" + " and" * (i % 3)} for i in range(16)]),
        **({"rollout_func": generates} if generates else {}),
    )  # fmt: skip
    trainer.add_callback(watch := Watch(model if loaded is None else model.model))
    trainer.train()
    return watch.found, trainer.state.log_history


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference by that of the gradient, of all tensors."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    off = math.sqrt(sum(float((ours[name].double() - x.double()).square().sum()) for name, x in theirs.items()))
    return off / math.sqrt(sum(float(x.double().square().sum()) for x in theirs.values()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(FAMILY, seed=1).save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_trl", "generates"),
    [("GRPO", rollout), ("GRPO", rollout_with_experts), ("RLOO", None)],
    ids=["R2", "R3", "RLOO"],
)
def test_updates_use_the_experts_of_the_generation(
    ranks: RankPool, model: Path, tmp_path: Path, of_trl: str, generates: Any
) -> None:
    """Recorded with the old log-probabilities (R2), or of the rollout (R3); layers recomputed in backward, ep 2."""
    loaded = {"ep_size": 2, "gradient_checkpointing": "full"}
    theirs, _ = ranks.run(trained, 2, model, tmp_path / "theirs", None, of_trl, generates)[0]
    ours, log = ranks.run(trained, 2, model, tmp_path / "ours", loaded, of_trl, generates)[0]
    assert len(ours) == len(theirs) == SETTINGS["max_steps"]
    errors = [difference(*pair) for pair in zip(ours, theirs, strict=True)]
    # the gradients of RLOO's samples nearly cancel, and later ones are of what AdamW made of that
    assert max(errors) <= (AFTER_ADAMW if of_trl == "RLOO" else MOST), errors
    changed = [line["router_replay_changed"] for line in log if "loss" in line]
    assert changed[-1] > 0.02, changed


def with_experts_of_others(prompts: list[str], trainer: Any) -> dict[str, Any]:
    found = rollout_with_experts(prompts, trainer)
    found["routed_experts"][1] = found["routed_experts"][1][:-1]
    return found


def refused(path: Path, out: Path) -> str:
    with pytest.raises(ExpertMeshError) as error:
        trained(path, out, {"gradient_checkpointing": "full"}, "GRPO", with_experts_of_others)
    return str(error.value)


@pytest.mark.slow
def test_experts_of_other_tokens_are_refused(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    said = ranks.run(refused, 1, model, tmp_path)[0]
    assert "routed_experts of the rollout's completion 1 has shape" in said
