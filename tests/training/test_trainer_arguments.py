"""What becomes of every training argument of transformers and trl on an engine."""

import sys
import types
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
import transformers
from huggingface_hub import HfApi
from torch import Tensor
from transformers import AutoTokenizer, TrainingArguments

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.api.trainer_arguments import (
    BY_VALUE,
    FOR_SCRIPTS,
    HEEDED,
    REFUSED,
    WITHOUT_EFFECT,
    heeded_arguments,
    known_fields,
    overruled_settings,
    unknown_fields,
)
from expertmesh.training.config.train_config import TrainConfig, read_by
from expertmesh.training.loss.balance import correction_biases
from tests.families.configs import tiny_model as model_of_family
from tests.rounding import near
from tests.tiny import save_tokenizer

trl = pytest.importorskip("trl")

pytestmark = pytest.mark.usefixtures("leaving_group")
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [TrainingArguments, trl.SFTConfig, trl.DPOConfig])
def test_every_field_has_a_fate(kind: Any) -> None:
    """A release that adds a field fails here, until it is known what becomes of it."""
    assert unknown_fields(kind) == []
    listed = [
        *(name for names in HEEDED.values() for name in names),
        *REFUSED,
        *BY_VALUE,
        *WITHOUT_EFFECT,
        *FOR_SCRIPTS,
    ]
    theirs = {field.name for field in fields(TrainingArguments)}
    assert read_by("load") - read_by("Trainer") - theirs <= {"warmup_ratio"}, "theirs is warmup_steps below 1"
    assert len(listed) == len(set(listed)) == len(known_fields()), "an argument has two fates"
    assert known_fields().keys() >= {field.name for field in fields(kind)}


def test_page_names_what_is_not_simply_heeded() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "use-trainer-or-trl.md").read_text()
    kwargs = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    named = [*BY_VALUE, *REFUSED, *WITHOUT_EFFECT, *FOR_SCRIPTS]
    assert [name for name in named if f"`{name}`" not in page and name not in kwargs] == []


def test_field_of_a_later_release() -> None:
    """It is warned of by name where it is set; a field of a user's own class is the user's."""
    module = types.ModuleType("transformers.later")
    with patch.dict(sys.modules, {module.__name__: module}):

        @dataclass
        class Later(TrainingArguments):
            invented: int = 0

        Later.__module__ = module.__name__

        @dataclass
        class Mine(Later):
            my_own: int = 0

    assert unknown_fields(Mine) == ["invented"]
    assert told(Mine("out", use_cpu=True, my_own=3)) == []
    (said,) = told(Mine("out", use_cpu=True, invented=3))
    assert said.startswith("invented of the training arguments is unknown")


def told(args: Any, **settings: Any) -> list[str]:
    """What `heeded_arguments` warns of beside an engine with these settings."""
    said: list[str] = []
    heeded_arguments(args, TrainConfig(model="m", **settings), CPU, said.append)
    return said


def sft(**settings: Any) -> Any:
    return trl.SFTConfig("out", use_cpu=True, report_to=[], **settings)


@pytest.mark.parametrize("make", [sft, lambda: TrainingArguments("out", use_cpu=True)], ids=["trl", "transformers"])
def test_defaults_are_no_wishes(make: Any) -> None:
    """Nobody is warned of what nobody has asked for, however the engine was loaded."""
    assert told(make()) == []
    assert told(make(), bf16=True, gradient_checkpointing="full", packing=True, optim="muon", ddp_timeout=7) == []


SET = {
    "fp16": True, "bf16_full_eval": True, "fp16_full_eval": True, "torch_compile": True,
    "torch_compile_backend": "inductor", "torch_compile_mode": "default", "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True}, "optim_args": "rank=2", "optim_target_modules": "all-linear",
    "neftune_noise_alpha": 5.0, "use_transformers_continuous_batching": True,
    "cast_lm_head_to_fp32": True,
    "auto_find_batch_size": True, "torch_empty_cache_steps": 2, "fsdp": True, "fsdp_config": {"version": 2},
    "deepspeed": {"zero_stage": 3}, "parallelism_config": object(), "debug": ["underflow_overflow"],
    "save_on_each_node": True, "enable_jit_checkpoint": True, "model_init_kwargs": {"dtype": "bfloat16"},
    "pad_to_multiple_of": 8, "sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 2,
}  # fmt: skip
"""Of each argument that is refused a value, as transformers and trl have it after their own checks."""


def test_arguments_that_are_refused() -> None:
    assert SET.keys() == REFUSED.keys()
    for name, value in SET.items():
        args = sft()
        setattr(args, name, value)
        with pytest.raises(ExpertMeshError, match=f"an engine cannot use: {name}=") as error:
            told(args)
        assert REFUSED[name] in str(error.value)
    args = sft(fp16=True)
    args.save_on_each_node = True
    with pytest.raises(ExpertMeshError, match=r"fp16=True: give bf16=True .*; save_on_each_node=True: checkpoints"):
        told(args)


CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("bf16", True, {"bf16": True}, {}),
    ("gradient_checkpointing", True, {"gradient_checkpointing": "selective"}, {}),
    ("tf32", False, {}, {"tf32": True}),
    ("optim", "adamw_torch_8bit", {"optim": "adamw_torch_8bit"}, {}),
    ("optim", "adamw_torch", {}, {"optim": "muon"}),
    ("activation_offloading", True, {"offload_activations": True, "gradient_checkpointing": "full"}, {}),
    ("full_determinism", True, {"deterministic": True}, {}),
    ("ddp_timeout", 77, {"ddp_timeout": 77}, {"ddp_timeout": 78}),
    ("packing", True, {"packing": True}, {}),
    ("eval_packing", True, {"packing": True}, {}),
    ("padding_free", True, {"packing": True}, {}),
    ("disable_dropout", True, {"adapter": "lora"}, {"adapter": "lora", "lora_dropout": 0.1}),
]
"""(argument, value, settings of an engine beside which it is heeded, settings beside which it is refused)"""
VALUES: list[tuple[str, Any, Any]] = [
    ("gradient_checkpointing_kwargs", {"use_reentrant": False}, {"use_reentrant": True}),
    ("accelerator_config", {"split_batches": True}, {"even_batches": False}),
    ("accelerator_config", {"dispatch_batches": False}, {"dispatch_batches": True}),
    ("accelerator_config", None, {"gradient_accumulation_kwargs": {"sync_each_batch": True}}),
    ("label_names", ["labels"], ["answers"]),
    ("chat_template_path", __file__.replace(".py", ".jinja"), "a-tokenizer"),
]
"""(argument, a value that is heeded, one that is refused)"""


def made(name: str, value: Any, **more: Any) -> Any:
    """Of the class whose default is not this value."""
    if name == "disable_dropout":
        return trl.DPOConfig("out", use_cpu=True, report_to=[], **{name: value})
    kind = sft if name in {field.name for field in fields(trl.SFTConfig)} - {"bf16", "gradient_checkpointing"} else None
    return (kind or (lambda **given: TrainingArguments("out", use_cpu=True, **given)))(**{name: value}, **more)


def test_vllm_generates_as_a_server() -> None:
    for mode, is_heeded in (("server", True), ("colocate", False)):
        args = trl.GRPOConfig("out", use_cpu=True, bf16=False, report_to=[], use_vllm=True, vllm_mode=mode)
        with nullcontext() if is_heeded else pytest.raises(ExpertMeshError, match="vllm_mode='colocate': "):
            heeded_arguments(args, TrainConfig(model="m"), CPU, pytest.fail, has_own_loss=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arguments_that_depend_on_their_value(tmp_path: Path) -> None:
    """Heeded beside an engine that has the same, refused by name beside another; and likewise by value."""
    for name, value, same, other in CASES:
        assert told(made(name, value), **same) == [], name
        with pytest.raises(ExpertMeshError, match=f"{name}={value!r}"):
            told(made(name, value), **other)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    for name, heeded, refused in VALUES:
        assert told(made(name, str(template) if name == "chat_template_path" else heeded)) == [], name
        with pytest.raises(ExpertMeshError, match=f"{name}="):
            told(made(name, refused))
    assert told(sft(packing=True, packing_strategy="wrapped")) == [], "one sample, as far as anyone can tell"
    evaluated = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 10}
    assert told(sft(save_only_model=True)) == told(sft(**evaluated)) == []
    with pytest.raises(ExpertMeshError, match="save_only_model=True: leaves no checkpoint for load_best_model_at_end"):
        told(sft(save_only_model=True, **evaluated))
    connected = sft()
    for connected.ddp_backend in ("gloo", None):
        assert told(connected) == []
    connected.ddp_backend = "nccl"
    with pytest.raises(ExpertMeshError, match=r"ddp_backend='nccl': .* joins the process group, with gloo"):
        told(connected)
    elsewhere = sft()
    vars(elsewhere)["_setup_devices"] = torch.device("meta")
    with pytest.raises(ExpertMeshError, match="use_cpu=True: the engine computes on cpu and Trainer on meta"):
        told(elsewhere)
    tested = {str(name) for name, *_ in (*CASES, *VALUES)} | {"use_cpu", "ddp_backend", "save_only_model", "vllm_mode"}
    # names that transformers keeps equal
    tested |= {name.replace("gradient_ch", "activation_ch") for name in tested}
    assert tested == BY_VALUE.keys()


def test_arguments_without_effect() -> None:
    values = {"use_cache": True, "ddp_bucket_cap_mb": 25}
    for name, why in WITHOUT_EFFECT.items():
        (said,) = told(sft(**{name: values.get(name, False)}))
        assert said == f"{name} of the training arguments has no effect: {why}"
    assert told(sft(do_train=True, resume_from_checkpoint="here")) == [], "for scripts"


# ---- what is heeded, seen in a run ----


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (24,), generator=drawn).tolist()
    tokens = [torch.randint(3, 300, (length,), generator=drawn).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def collated(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    padded = {name: [row[name] + [value] * (length - len(row[name])) for row in rows] for name, value in fill.items()}
    mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    return {name: torch.tensor(value) for name, value in (padded | {"attention_mask": mask}).items()}


def load(model: Path, **settings: Any) -> expertmesh.Engine:
    return expertmesh.load(str(model), use_cpu=True, **settings)


BASE: dict[str, Any] = dict(
    use_cpu=True, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
    save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
)  # fmt: skip


@dataclass
class Run:
    trainer: Any
    logs: list[dict[str, Any]]

    def column(self, name: str) -> list[Any]:
        return [line[name] for line in self.logs if name in line]


def trainer_of(engine: expertmesh.Engine, out: Path, rows: Any, settings: Any = None, **more: Any) -> Any:
    given = {name: value for name, value in (BASE | (settings or {})).items() if value is not None}
    data = datasets.Dataset.from_list(rows)
    return expertmesh.Trainer(engine, TrainingArguments(str(out), **given), collated, data, **more)


def train(model: Path, rows: Any, out: Path, settings: dict[str, Any] | None = None, **loaded: Any) -> Run:
    trainer = trainer_of(load(model, **loaded), out, rows, settings, eval_dataset=datasets.Dataset.from_list(rows[:5]))
    trainer.train()
    return Run(trainer, trainer.state.log_history)


def test_heeded_arguments_of_the_optimizer(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """Several at once; the schedule is that of transformers with the same arguments."""
    kind, bound = "cosine_with_min_lr", {"min_lr": 5e-4}
    schedule = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": bound, "warmup_steps": 1}
    adam = {"weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.25, "adam_epsilon": 1e-2}
    run = train(tiny_model, rows, tmp_path, {"learning_rate": 1e-3, **schedule, **adam})
    groups = run.trainer.engine.optimizer.param_groups
    assert {(group["weight_decay"], *group["betas"], group["eps"]) for group in groups} == {
        (decay, 0.5, 0.25, 1e-2) for decay in (0.0, 0.5)
    }
    theirs: Any = transformers.get_scheduler(kind, torch.optim.SGD([torch.zeros(1)], lr=1e-3), 1, 3, bound)
    expected = []
    for _ in range(3):
        expected += theirs.get_last_lr()
        theirs.optimizer.step()
        theirs.step()
    assert run.column("learning_rate") == pytest.approx(expected)


def test_heeded_arguments_of_steps(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """Several at once again: how many steps there are, and which of them are logged and evaluated after."""
    logs = {"logging_steps": 2, "logging_first_step": True, "include_num_input_tokens_seen": "non_padding"}
    epoch = {"max_steps": None, "num_train_epochs": 0.75, "per_device_train_batch_size": 5}
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3, "eval_on_start": True}
    for settings, column, expected in (
        ({"max_steps": 4, **logs}, "loss", [1, 2, 4]),
        ({"max_steps": 2, **logs}, "num_input_tokens_seen", [1, 2, 2]),
        (epoch, "loss", [1, 2, 3, 4]),
        (epoch | {"dataloader_drop_last": True}, "loss", [1, 2, 3]),
        ({"max_steps": 6, **evaluates}, "eval_loss", [0, 4, 6]),
    ):
        run = train(tiny_model, rows, tmp_path, settings)
        assert [line["step"] for line in run.logs if column in line] == expected, settings


@pytest.fixture(scope="module")
def base(tiny_model: Path, rows: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny_model, rows, tmp_path_factory.mktemp("base"))


def test_a_batch_in_parts_is_the_same_step(base: Run, tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    assert train(tiny_model, rows, tmp_path, parts).column("loss") == near(base.column("loss"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 1e-3, "adam_epsilon": 1e-2, "max_steps": 2},
        {"seed": 7, "max_steps": 1},
        {"data_seed": 7, "max_steps": 1},
        {"train_sampling_strategy": "sequential", "max_steps": 1},
        {"train_sampling_strategy": "group_by_length", "max_steps": 1},
    ],
    ids="-".join,
)
def test_heeded_arguments_change_a_run(
    base: Run, tiny_model: Path, rows: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    changed = train(tiny_model, rows, tmp_path, settings).column("loss")
    assert changed != base.column("loss")[: len(changed)]


def test_checkpoints_as_asked_for(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    train(tiny_model, rows, tmp_path / "b", saving | {"save_only_model": True})
    assert sorted(path.parent.name for path in (tmp_path / "b").rglob("model.safetensors")) == [
        *("checkpoint-2", "checkpoint-3")
    ]
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    run = train(tiny_model, rows, tmp_path / "d", saving | best)
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert not list((tmp_path / "d").rglob("model*.safetensors"))
    assert min(run.column("eval_loss")) == run.column("eval_loss")[-1]
    assert Path(run.trainer.state.best_model_checkpoint).name == "checkpoint-3", "the one that was being written"
    run = train(tiny_model, rows, tmp_path / "c", saving | best | {"greater_is_better": True})
    assert run.trainer.state.best_metric == max(run.column("eval_loss"))
    assert run.trainer.evaluate()["eval_loss"] == near(max(run.column("eval_loss")))


def test_what_is_pushed_to_the_hub(
    tiny_model: Path, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each push has the model: a checkpoint of ours has none of itself."""
    pushed: list[tuple[str, bool]] = []

    def upload(self: Any, folder_path: str, commit_message: str, **_: Any) -> Any:
        pushed.append((commit_message, (Path(folder_path) / "model.safetensors").is_file()))
        return types.SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: types.SimpleNamespace(repo_id="us/ours"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    for strategy, meanwhile in (("end", []), ("every_save", [("Training in progress, step 1", True)])):
        pushed.clear()
        settings = {"push_to_hub": True, "hub_strategy": strategy, "save_strategy": "steps", "max_steps": 1}
        run = train(tiny_model, rows, tmp_path / strategy, settings | {"save_steps": 1})
        assert pushed == meanwhile
        with patch("transformers.Trainer.create_model_card"):
            run.trainer.push_to_hub()
        assert pushed[-1] == ("End of training", True)


def test_resuming_is_asked_for_in_train(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    with pytest.raises(ExpertMeshError, match=r"call train\(resume_from_checkpoint='there'\)"):
        train(tiny_model, rows, tmp_path, {"resume_from_checkpoint": "there"})


# ---- trl's ----


class SFT(expertmesh.TrainerMixin, trl.SFTTrainer):  # type: ignore[name-defined]
    pass


TEXTS = [{"text": f"say hello {i} {'x' * (i % 5)}"} for i in range(12)]


def test_an_engine_that_was_resumed(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """Its optimizer's state is not dropped for that of a Trainer; a Trainer counts the engine's steps."""
    engine = load(tiny_model)
    for _ in range(2):
        engine.step(collated(rows[:2]))
    saved = engine.save(tmp_path / "saved")
    with pytest.raises(ExpertMeshError, match="was resumed at step 2, and Trainer begins at step 0"):
        train(tiny_model, rows, tmp_path, resume=str(saved))
    assert train(tiny_model, rows, tmp_path / "a").trainer.engine.step_number == 3


@pytest.mark.slow
def test_a_resumed_schedule(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """It is the checkpoint's, which is told; one that is damaged is named."""
    train(tiny_model, rows, tmp_path, {"max_steps": 2, "save_strategy": "steps", "save_steps": 1})
    checkpoint = tmp_path / "checkpoint-1"

    def resume(**settings: Any) -> float:
        trainer = trainer_of(load(tiny_model), tmp_path, rows, {"max_steps": 2} | settings)
        trainer.train(str(checkpoint))
        return trainer.state.log_history[-2]["learning_rate"]

    same = resume()
    with pytest.warns(UserWarning, match=r"learning_rate=0.5 of the training .* has no effect: .* started at 0.01"):
        assert resume(learning_rate=0.5) == same
    (checkpoint / "scheduler.pt").write_bytes(b"nothing")
    with pytest.raises(ExpertMeshError, match=r"scheduler.pt: cannot be read .*; resume from an earlier checkpoint"):
        resume()


def test_a_checkpoint_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    """It is told of before data are read by a Trainer, and before `load` opens the model."""
    named = tmp_path / "checkpoint-1"
    trainer = expertmesh.Trainer(load(tiny_model), TrainingArguments(str(tmp_path), **BASE), collated, Unread())
    with pytest.raises(ExpertMeshError, match=r"^resume_from_checkpoint='.*checkpoint-1': no such directory"):
        trainer.train(str(named))
    state = named / "expertmesh" / "step-1"
    incomplete = "^resume_from_checkpoint='.*checkpoint-1': .*/step-1: has no checkpoint.json: not a complete"
    for made, said in ((named, "has no expertmesh/"), (state, incomplete)):
        made.mkdir(parents=True)
        with pytest.raises(ExpertMeshError, match=said):
            trainer.train(str(named))
    with patch("expertmesh.checkpoints.hf.source.open_source", side_effect=AssertionError("it is opened")):
        with pytest.raises(ExpertMeshError, match=r"^--resume .*/nothing: no such directory"):
            load(tiny_model, resume=str(tmp_path / "nothing"))
        with pytest.raises(ExpertMeshError, match=r"^--resume .*/checkpoint-1: has no checkpoint.json: not a complete"):
            load(tiny_model, resume=str(named))


class Unread(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it is read")


def test_tokenizer_of_a_trainer_is_in_its_checkpoints(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """So that what is made of them has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages }}"
    saving = {"max_steps": 1, "save_strategy": "steps"}
    trainer_of(load(tiny_model), tmp_path, rows, saving, processing_class=tokenizer).train()
    (saved,) = (tmp_path / "checkpoint-1" / "expertmesh").glob("step-*")
    assert transformers.AutoTokenizer.from_pretrained(saved / "model").chat_template == tokenizer.chat_template


def shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = batch.pop("labels")
    return batch | {"shift_labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


def test_losses_of_steps_without_targets(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """They are no part of the means that are logged."""
    given = [row | {"labels": [-100] * len(row["labels"])} if 2 <= i < 4 else row for i, row in enumerate(rows)]
    order = {"train_sampling_strategy": "sequential"}
    with pytest.warns(UserWarning, match="step 2 is skipped"):
        single, both = (train(tiny_model, given, tmp_path, order | {"logging_steps": n}) for n in (1, 3))
    first, none, third = single.column("loss")
    assert none != none
    expected = near((first + third) / 2)
    assert both.column("loss") == [expected]
    assert single.column("train_loss") == both.column("train_loss") == [expected]


COLLATORS: dict[str, Any] = {
    "without padding": lambda batch: {name: value[:, :4] for name, value in batch.items()},
    "padded on the left": lambda batch: {name: value.flip(1) for name, value in batch.items()},
    "labels of padding": lambda batch: batch | {"labels": batch["input_ids"]},
    "shifted": shifted,
    "more": lambda batch: batch | {"token_type_ids": torch.ones_like(batch["labels"])},
    "no mask of padding": lambda batch: batch | {"attention_mask": 2 * batch["attention_mask"]},
}


def test_an_evaluation_with_metrics_takes_what_others_take(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """The same targets, and refuses the same."""
    engine = load(tiny_model)

    def evaluate(collator: Any, metrics: Any) -> Any:
        trainer = expertmesh.Trainer(
            engine, TrainingArguments(str(tmp_path), **BASE), lambda rows: collator(collated(rows)),
            eval_dataset=datasets.Dataset.from_list(rows[:5]), compute_metrics=metrics,
        )  # fmt: skip
        try:
            return trainer.evaluate()["eval_loss"]
        except ExpertMeshError as error:
            return str(error)

    for what, collator in COLLATORS.items():
        found, expected = evaluate(collator, lambda _: {}), evaluate(collator, None)
        assert found == (expected if isinstance(expected, str) else near(expected)), what


def train_sft(model: Path, out: Path, engine: expertmesh.Engine, rows: Any = TEXTS, **settings: Any) -> Any:
    trainer = SFT(
        model=engine, args=trl.SFTConfig(str(out), **(BASE | {"max_steps": 2} | settings)),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.slow
def test_balancing_as_trl_has_it(tiny_model: Path, tmp_path: Path) -> None:
    """By its argument, else by the model's config: to the last bit what the same coefficient given to `load` does."""

    def logs(asked: float | None, loaded: float | None) -> list[Any]:
        engine = load(tiny_model, router_aux_loss_coef=loaded)
        trainer = train_sft(tiny_model, tmp_path, engine, router_aux_loss_coef=asked)
        assert engine.model.config.router_aux_loss_coef == 0.02, "trl's own loss is not ours"
        return [(line["grad_norm"], line.get("balance_loss")) for line in trainer.state.log_history if "loss" in line]

    by_load = {value: logs(None, value) for value in (0.0, 0.02, 0.5)}
    assert len({str(found) for found in by_load.values()}) == 3
    for value, expected in by_load.items():
        assert logs(value, None) == expected
    assert logs(None, None) == by_load[0.02], "config.json's"
    with pytest.raises(ExpertMeshError, match=r"router_aux_loss_coef: expertmesh.load was given 0.02 .* arguments 0.5"):
        logs(0.5, 0.02)
    engine = load(tiny_model)
    for value in (0.5, 0.0):
        trained = train_sft(tiny_model, tmp_path, engine, router_aux_loss_coef=value)
        assert trained.engine.balance.weights.balance == value, "one Trainer after another"


def test_what_a_trainer_weighed_is_no_other_objective(
    tiny_model: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Where nothing was asked for: `load` goes on as trl's Trainer did, and 0 is what train_ep.py has by default."""
    saving: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for value, weighed in ((None, 0.02), (0.0, 0.0)):
        out = tmp_path / str(value)
        train_sft(tiny_model, out, load(tiny_model), router_aux_loss_coef=value, **saving)
        saved = str(next((out / "checkpoint-1" / "expertmesh").glob("step-*")))
        recwarn.clear()
        engine = load(tiny_model, resume=saved)
        assert (engine.step_number, engine.balance.weights.balance) == (1, weighed)
        told = [str(each.message) for each in recwarn if "router_aux_loss_coef" in str(each.message)]
        assert told == ([f"router_aux_loss_coef: {weighed}, as {saved} had it"] if weighed else [])
        with pytest.raises(ExpertMeshError, match=rf"had --router-aux-loss-coef {weighed:g}, this one has .* 0\.5"):
            load(tiny_model, resume=saved, router_aux_loss_coef=0.5)
        plain = load(tiny_model)
        if weighed:
            with pytest.raises(ExpertMeshError, match=r"had --router-aux-loss-coef 0\.02, this one has .*-coef 0[,;]"):
                plain.resume(saved)
        else:
            assert plain.resume(saved)


def test_family_without_a_balancing_loss(tmp_path: Path) -> None:
    model_of_family("deepseek_v3", seed=1).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    with pytest.raises(ExpertMeshError, match=r"--router-aux-loss-coef 0.5: transformers' .* has no balancing loss"):
        train_sft(tmp_path / "model", tmp_path, load(tmp_path / "model"), router_aux_loss_coef=0.5)
    assert train_sft(tmp_path / "model", tmp_path, load(tmp_path / "model")).engine.balance.weights.balance == 0


def test_a_balancing_loss_by_a_nested_config(tmp_path: Path) -> None:
    """Of a class that has no attribute of that name."""
    model: Any = model_of_family("qwen3_vl_moe", seed=1)
    model.config.text_config.router_aux_loss_coef = 0.03
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    assert train_sft(tmp_path / "model", tmp_path, load(tmp_path / "model")).engine.balance.weights.balance == 0.03


def test_defaults_of_trl_warn_of_nothing(tiny_model: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """And its count of tokens is logged."""
    trainer = train_sft(tiny_model, tmp_path, load(tiny_model))
    assert not [str(each.message) for each in recwarn if "training arguments" in str(each.message)]
    counted = [line["num_tokens"] for line in trainer.state.log_history if "loss" in line]
    assert counted[0] < counted[1] == trainer.engine.tokens


@pytest.mark.filterwarnings("ignore")
def test_a_best_model_by_trls_accuracy(tiny_model: Path, tmp_path: Path) -> None:
    """Of sequences in batches that do not come out even, as trl has it by itself."""
    texts = datasets.Dataset.from_list(TEXTS[:7])
    best = {"eval_strategy": "steps", "eval_steps": 10, "metric_for_best_model": "mean_token_accuracy"}

    def trainer_of(kind: Any, model: Any) -> Any:
        args = trl.SFTConfig(str(tmp_path), **(BASE | best | {"max_steps": 20, "per_device_eval_batch_size": 3}))
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        return kind(model=model, args=args, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer)

    ours = trainer_of(SFT, load(tiny_model))
    ours.train()
    ours.save_model(str(tmp_path / "model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = trainer_of(trl.SFTTrainer, model).evaluate()["eval_mean_token_accuracy"]
    assert 0.1 < expected < 1
    found = [line["eval_mean_token_accuracy"] for line in ours.state.log_history if "eval_loss" in line]
    assert found[-1] == near(expected)
    assert ours.state.best_metric == max(found)


class DPO(expertmesh.TrainerMixin, trl.DPOTrainer):  # type: ignore[name-defined]
    pass


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_between_two_logs_takes_none_of_their_figures(tiny_model: Path, tmp_path: Path) -> None:
    """Those of steps are means over the same steps, whether there is an evaluation among them or not."""
    pairs = datasets.Dataset.from_list(
        [{"prompt": f"say {i}", "chosen": " hello", "rejected": " no"} for i in range(4)]
    )

    def logged(**evaluates: Any) -> list[dict[str, Any]]:
        args = trl.DPOConfig(str(tmp_path), **(BASE | {"max_steps": 2, "logging_steps": 2} | evaluates))
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        given = {"train_dataset": pairs, "eval_dataset": pairs, "processing_class": tokenizer}
        trainer = DPO(model=load(tiny_model), args=args, **given)
        trainer.train()
        return trainer.state.log_history

    first, *others = logged(eval_strategy="steps", eval_steps=1)
    assert all(name.startswith("eval_") or name in ("epoch", "step") for name in first)
    assert [line for line in others if "loss" in line] == [line for line in logged() if "loss" in line]


def test_token_that_ends_answers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument reaches the data; without arguments the class's own are made for the engine's device."""
    monkeypatch.chdir(tmp_path)  # where trl writes what has no other place
    for args in (trl.SFTConfig(str(tmp_path), **BASE, eos_token="~"), None):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        expected = tokenizer.eos_token_id if args is None else tokenizer.convert_tokens_to_ids("~")
        data = datasets.Dataset.from_list(TEXTS)
        trainer = SFT(model=load(tiny_model), train_dataset=data, processing_class=tokenizer, args=args)
        found: Any = trainer.train_dataset
        assert {row["input_ids"][-1] for row in found} == {expected}
        assert trainer.args.use_cpu


def test_what_classes_take_besides(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """Whether it is given by name or by place."""
    engine = load(tiny_model)
    args, data = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), datasets.Dataset.from_list(rows)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    for given, said in (
        (lambda: expertmesh.Trainer(engine, {"output_dir": "out"}), "args is a dict: give transformers'"),
        (
            lambda: expertmesh.Trainer(engine, args, collated, data, None, None, len),
            "model_init: not possible for a model",
        ),
        (lambda: expertmesh.Trainer(engine, args, optimizers=(other, None)), "optimizers has a SGD: give optim"),
        (lambda: expertmesh.Trainer(engine, args, optimizers=(None, schedule)), "a scheduler without its optimizer"),
        (lambda: SFT(engine, sft(), quantization_config=1), "quantization_config: .* base_dtype='nf4'"),
        (lambda: SFT(engine, sft(), peft_config=1), "peft_config: .* give adapter='lora' to expertmesh.load"),
    ):
        with pytest.raises(ExpertMeshError, match=said):
            given()
    trainer = trainer_of(engine, tmp_path, rows, optimizers=(engine.optimizer, schedule))
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(5e-5 / 3), "its own scheduler's"


def test_accelerates_environment(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accelerate launch` asks for by variables is refused as the training arguments are."""
    engine = load(tiny_model)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for kind in (expertmesh.Trainer, lambda *given: SFT(*given, train_dataset=datasets.Dataset.from_list(TEXTS))):
        with pytest.raises(ExpertMeshError, match="environment asks for mixed precision bf16"):
            kind(engine, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    expertmesh.Trainer(load(tiny_model, bf16=True), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_settings_that_trainers_arguments_overrule(tiny_model: Path, rows: Any, tmp_path: Path) -> None:
    """They are named once, where they say otherwise."""
    given = {"learning_rate": 3e-3, "max_grad_norm": 1.0, "weight_decay": 0.1, "report_to": ["tensorboard"]}
    with pytest.warns(UserWarning, match="Trainer uses its own arguments instead of these settings") as said:
        run = train(tiny_model, rows, tmp_path, {"weight_decay": 0.1}, **given)
    (line,) = [str(each.message) for each in said if "instead" in str(each.message)]
    assert line.endswith("of expertmesh.load: learning_rate=0.003 (there 0.01), report_to=['tensorboard'] (there [])")
    assert run.column("learning_rate")[0] == 1e-2
    again = TrainingArguments(str(tmp_path), **(BASE | {"learning_rate": 3e-3, "weight_decay": 0.1}))
    with pytest.warns(UserWarning, match=r"of expertmesh.load: report_to=\['tensorboard'\] \(there \[\]\)$"):
        expertmesh.Trainer(run.trainer.engine, again)  # what the first one has set is no wish


def test_a_schedule_that_no_argument_has_is_overruled(tmp_path: Path) -> None:
    """Trainer's is by its own arguments alone."""
    config = TrainConfig(model="m", warmup_ratio=0.1, max_steps=9, shampoo_start=3, optim="shampoo")
    args = TrainingArguments(str(tmp_path), **BASE)
    assert overruled_settings(args, config) == [
        f"max_steps=9 (there {args.max_steps})",
        "warmup_ratio=0.1 (there None)",
    ]


def test_data_that_trl_cannot_use(tiny_model: Path, tmp_path: Path) -> None:
    engine = load(tiny_model)
    without = [{"input_ids": [3, 4, 5], "labels": [-100] * 3}] * 3
    with pytest.raises(ExpertMeshError, match="train_dataset has no example with a target within max_length=1024"):
        train_sft(tiny_model, tmp_path, engine, without)
    with pytest.warns(UserWarning, match="3 of 15 examples of train_dataset are left out: no target"):
        train_sft(tiny_model, tmp_path, engine, [*without, *[{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 12])
    with pytest.raises(ExpertMeshError, match=r"dataset_text_field='body': .* no such column; it has text. Name the"):
        train_sft(tiny_model, tmp_path, engine, dataset_text_field="body")
    with pytest.raises(ExpertMeshError, match="input_ids of a batch has 320; the model's vocabulary is 0 to 319"):
        train_sft(tiny_model, tmp_path, engine, [{"input_ids": [5, 320, 7]}] * 4)


# ---- steps that are skipped ----


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_skipped_step_leaves_all_as_it_was(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Weights, the optimizer's state and the routers' biases, as with train_ep.py; its tokens are read, and counted."""
    model_of_family("deepseek_v3", seed=1).save_pretrained(tmp_path / "model")
    from expertmesh.training.api import hf_trainer

    add_gradients = hf_trainer.add_gradients
    states: list[list[Tensor]] = []

    def poisoned(model: Any, *args: Any) -> Any:
        losses, routing = add_gradients(model, *args)
        if len(states) == 1:
            if what == "loss":
                losses = losses * torch.inf
            else:
                next(p for p in model.parameters() if p.grad is not None).grad.mul_(torch.nan)
        return losses, routing

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            optimizer = [v for each in engine.optimizer.state.values() for v in each.values()]
            biases = [model.get_buffer(name) for name in sorted(correction_biases(model))]
            states.append([torch.as_tensor(t).clone() for t in (*model.parameters(), *biases, *optimizer)])

    monkeypatch.setattr(hf_trainer, "add_gradients", poisoned)
    engine = load(tmp_path / "model", on_nonfinite="skip", router_bias_update_rate=0.1)
    with pytest.warns(UserWarning, match="step 2 is skipped: the loss is"):
        trainer_of(engine, tmp_path / "out", rows, callbacks=[Watch()]).train()
    first, second, third = states
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, second[: len(list(engine.model.parameters()))], third))
    engine = load(tmp_path / "model", on_nonfinite="stop")
    states.clear()
    with pytest.raises(ExpertMeshError, match=r"step 2: the loss is .* training has diverged"):
        trainer_of(engine, tmp_path / "out", rows, callbacks=[Watch()]).train()


def test_a_loop_of_ones_own_after_trainer(rows: Any, tmp_path: Path) -> None:
    """A step of the loop is no step of Trainer's: tokens are counted once, and biases move once."""
    model_of_family("deepseek_v3", seed=1).save_pretrained(tmp_path / "model")
    trainer = train(tmp_path / "model", rows, tmp_path / "out", router_bias_update_rate=0.1, max_steps=9).trainer
    engine: expertmesh.Engine = trainer.engine
    biases = [engine.model.get_buffer(name) for name in sorted(correction_biases(engine.model))]
    read, before = engine.tokens, [bias.clone() for bias in biases]
    figures = engine.step(collated(rows[:2]))
    assert engine.tokens == read + figures.tokens
    assert [(now - then).abs().max().item() for now, then in zip(biases, before, strict=True)] == pytest.approx(
        [0.1] * len(biases)
    )
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.0), "as Trainer has left it"
