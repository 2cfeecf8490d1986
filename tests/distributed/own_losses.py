"""Classes of trl's and a user's own, each run on an engine and, with transformers' model, under DistributedDataParallel
or in one process; what `test_own_losses` compares."""

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import expertmesh

STEPS = 2
QUIET: dict[str, Any] = dict(
    use_cpu=True, bf16=False, max_steps=STEPS, lr_scheduler_type="constant", learning_rate=1e-3, weight_decay=0.0,
    max_grad_norm=0.0, adam_epsilon=1e-4, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    dataloader_pin_memory=False, gradient_checkpointing=False, per_device_train_batch_size=2,
)  # fmt: skip
Case = tuple[str, str, dict[str, Any], Callable[[], list[dict[str, Any]]], dict[str, Any]]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": f"say {i}" + " and" * (i % 3)} for i in range(16)]


def texts() -> list[dict[str, Any]]:
    return [{"prompt": f"say {i}:", "completion": " hello" * (1 + i % 5) + f" {i}"} for i in range(16)]


def pairs() -> list[dict[str, Any]]:
    return [
        {"prompt": f"say {i}:", "chosen": " hello" * (1 + i % 3) + f" {i}", "rejected": " world" * (1 + i % 4)}
        for i in range(16)
    ]


def judged() -> list[dict[str, Any]]:
    return [{**row, "label": i % 3 != 1} for i, row in enumerate(texts())]


def tokens() -> list[dict[str, Any]]:
    return [{"input_ids": [*range(3, 9 + i % 5)], "labels": [-100, *range(4, 9 + i % 5)]} for i in range(16)]


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Of no meaning, and another for most completions."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = F.cross_entropy(outputs.logits[:, :-1].mT.float(), labels[:, 1:], reduction="none")
    sums = (losses * (1 - (-losses).exp()) ** 2).sum()
    return sums / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class Smoothed(transformers.Trainer):
    """A loss of a user's own: that of each sequence, its mean over tokens, by `compute_loss`."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        losses = F.cross_entropy(outputs.logits[:, :-1].mT.float(), labels[:, 1:], reduction="none")
        loss = (losses.sum(dim=1) / (labels[:, 1:] != -100).sum(dim=1)).mean()
        return (loss, outputs) if return_outputs else loss


class Twice(transformers.Trainer):
    """Another one: `training_step`, two forwards and two backwards of a micro-batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.zeros(())
        for part in range(2):
            rows = {name: value[part : part + 1] for name, value in inputs.items()}
            loss = model(**rows, use_cache=False).loss / 2
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    full = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {n: torch.tensor([row[n] + [v] * (length - len(row[n])) for row in full]) for n, v in fill.items()}


PLAIN: dict[str, Any] = dict(remove_unused_columns=False)
ONLINE: dict[str, Any] = dict(num_generations=4, max_completion_length=8, temperature=1.0, beta=0.0)
ONLINE_LOSSES: dict[str, dict[str, Any]] = {
    "dapo": dict(loss_type="dapo"),
    "gspo": dict(importance_sampling_level="sequence", loss_type="grpo"),
    "cispo": dict(loss_type="cispo"),
    "reference": dict(beta=0.1),
    "twice": dict(num_iterations=2),
}
CASES: dict[str, Case] = {
    **{f"sft {name}": ("trl.SFTTrainer", "trl.SFTConfig", dict(loss_type=name), texts, {}) for name in ("nll", "dft")},
    "sft label_smoothing": ("trl.SFTTrainer", "trl.SFTConfig", dict(label_smoothing_factor=0.1), texts, {}),
    "sft compute_loss_func": ("trl.SFTTrainer", "trl.SFTConfig", {}, texts, dict(compute_loss_func=focal)),
    **{
        f"dpo {name}": ("trl.DPOTrainer", "trl.DPOConfig", dict(loss_type=name.split("+"), beta=0.5), pairs, {})
        for name in (
            "sigmoid", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "sigmoid+sft",
        )
    },
    "dpo exo_pair": (
        *("trl.DPOTrainer", "trl.DPOConfig"), dict(loss_type=["exo_pair"], label_smoothing=0.1), pairs, {},
    ),
    **{
        f"kto {name}": ("trl.KTOTrainer", "trl.KTOConfig", dict(loss_type=name, beta=0.5), judged, {})
        for name in ("kto", "apo_zero_unpaired")
    },
    "orpo": ("trl.experimental.orpo.ORPOTrainer", "trl.experimental.orpo.ORPOConfig", {}, pairs, {}),
    **{
        f"cpo {name}": (
            *("trl.experimental.cpo.CPOTrainer", "trl.experimental.cpo.CPOConfig"), dict(loss_type=name), pairs, {},
        )
        for name in ("sigmoid", "simpo")
    },
    **{
        f"grpo {name}": (
            *("trl.GRPOTrainer", "trl.GRPOConfig"), ONLINE | settings, prompts, dict(reward_funcs=reward),
        )
        for name, settings in ONLINE_LOSSES.items()
    },
    "rloo": ("trl.RLOOTrainer", "trl.RLOOConfig", ONLINE | dict(beta=0.05), prompts, dict(reward_funcs=reward)),
    "distillation": (
        *("trl.DistillationTrainer", "trl.DistillationConfig"), dict(max_completion_length=8), prompts,
        dict(teacher_model=None),
    ),
    "compute_loss": ("tests.distributed.own_losses.Smoothed", "transformers.TrainingArguments", PLAIN, tokens, {}),
    "training_step": ("tests.distributed.own_losses.Twice", "transformers.TrainingArguments", PLAIN, tokens, {}),
    "compute_loss_func": (
        *("transformers.Trainer", "transformers.TrainingArguments"), PLAIN, tokens, dict(compute_loss_func=focal),
    ),
}  # fmt: skip


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def make(case: str, model: Any, path: Path, teacher: Any, out: Path, **changes: Any) -> Any:
    """A Trainer of a case, behind the mix-in where the model is an engine."""
    kind, config, settings, rows, given = CASES[case]
    of_kind = named(kind)
    if isinstance(model, expertmesh.Engine):
        of_kind = type("Ours", (expertmesh.TrainerMixin, of_kind), {})
    balance = {"router_aux_loss_coef": 0.0} if "router_aux_loss_coef" in vars(named(config)) else {}
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    given = {name: teacher if name == "teacher_model" else value for name, value in given.items()}
    if config.startswith("transformers"):
        given = {**given, "data_collator": collate}
    return of_kind(
        model=model, args=named(config)(str(out), **QUIET | balance | settings | changes),
        train_dataset=datasets.Dataset.from_list(rows()), processing_class=tokenizer, **given,
    )  # fmt: skip


class Watch(TrainerCallback):
    """Keeps the gradients of each update."""

    def __init__(self, gradients: Callable[[], dict[str, Tensor]]):
        self.gradients = gradients
        self.found: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.found.append(self.gradients())


def gradients_of(parameters: Iterable[Tensor], write: Callable[[Path], Any], out: Path) -> dict[str, Tensor]:
    """By the names in files: written in the place of the weights."""
    trained = [p for p in parameters if p.requires_grad and p.grad is not None]
    here = [_local(p.detach()) for p in trained]
    kept = [t.clone() for t in here]
    for p, t in zip(trained, here, strict=True):
        assert p.grad is not None
        t.copy_(_local(p.grad))
    write(out)
    for t, own in zip(here, kept, strict=True):
        t.copy_(own)
    return load_file(next(out.glob("*.safetensors"))) if dist.get_rank() == 0 else {}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(
    cases: list[str],
    path: Path,
    out: Path,
    loaded: dict[str, Any] | None,
    changes: dict[str, Any],
    dtype: str = "float32",
    adapter: Path | None = None,
) -> dict[str, tuple[list[dict[str, Tensor]], list[dict[str, float]]]]:
    """Gradients of each update, and logs, of cases: on an engine with these settings; None: of transformers' model,
    with an adapter in PEFT."""
    found = {}
    for case in cases:
        if loaded is None:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            teacher: Any = AutoModelForCausalLM.from_pretrained(path.with_name("teacher"), dtype=dtype)
            write: Any = model.save_pretrained
            if adapter is not None:
                model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
                write = partial(model.save_pretrained, selected_adapters=["default"])
            where = out / f"rank {dist.get_rank()}"
        else:
            model = expertmesh.load(str(path), use_cpu=True, **loaded)
            teacher = expertmesh.load(str(path.with_name("teacher")), use_cpu=True, **loaded)
            write, where = partial(model.export, overwrite=True), out / "gradients"
        random.seed(0)
        trainer = make(case, model, path, teacher, out / "run", **changes)
        parameters = [*(model.model if loaded is not None else model).parameters()]
        trainer.add_callback(watch := Watch(partial(gradients_of, parameters, write, where)))
        trainer.train()
        found[case] = watch.found, trainer.state.log_history
    return found


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference by that of the gradient, of all tensors."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    off, total = (
        math.sqrt(sum(float(t.double().square().sum()) for t in some))
        for some in ([ours[name].double() - theirs[name].double() for name in theirs], theirs.values())
    )
    return off / total


def export(path: Path, out: Path, loaded: dict[str, Any]) -> None:
    """What an engine has before it is trained."""
    expertmesh.load(str(path), use_cpu=True, **loaded).export(out)


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    """Ends training without a word after a step."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def grpo_run(
    path: Path, out: Path, kill: int | None = None, resume: str | None = None, **loaded: Any
) -> list[dict[str, float]]:
    """GRPO on an engine, two updates of each generation in four steps, with checkpoints in the midst of them."""
    engine = expertmesh.load(str(path), use_cpu=True, ep_size=2, **loaded)
    changes: dict[str, Any] = dict(
        max_steps=6, steps_per_generation=4, save_strategy="steps", save_steps=3, shuffle_dataset=True
    )
    trainer = make("grpo reference", engine, path, None, out, **changes)
    trainer.add_callback(Kill(kill))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Killed:
        return list(trainer.state.log_history)
    trainer.save_model(str(out / "model"))
    return list(trainer.state.log_history)
