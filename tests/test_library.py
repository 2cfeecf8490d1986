"""`import expertmesh`: its manners in somebody else's process, its names and their examples."""

import ast
import importlib.metadata
import inspect
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import expertmesh
from expertmesh import train_ep
from expertmesh.training.config.train_config import TrainConfig, make_config, parse_config
from expertmesh.training.data.batch import Batch
from expertmesh.training.steps import evaluate as evaluation
from expertmesh.training.steps.evaluate import Best
from tests.families.configs import is_older
from tests.rounding import near

IN_A_PROCESS = """
import breakpointhook_of_theirs
import json, os, resource, signal, sys

def state():
    hooks = [sys.breakpointhook, sys.unraisablehook, sys.displayhook]
    limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)]
    return [hooks, sys.stdout, sys.stderr, limits, signals, sys.path[:], os.getcwd(), sys.getrecursionlimit()]

before, hook, names = state(), sys.excepthook, set(sys.modules)
import expertmesh
assert state() == before and sys.excepthook is hook, "importing changed the process"
ours = {name for name in set(sys.modules) - names if not name.startswith("expertmesh")}
assert not ours & {"torch", "transformers", "accelerate", "numpy"}, ours
environment = dict(os.environ)
model = sys.argv[1]
first = expertmesh.load(model, use_cpu=True)
second = expertmesh.load(model, use_cpu=True, adapter="lora", lora_rank=2, packing=True)
assert state() == before, "loading changed the process"
# with a process group, torch has tracebacks begin with the rank
assert sys.excepthook is hook or sys.excepthook.__module__.startswith("torch.distributed")
changed = {name for name in os.environ if os.environ[name] != environment.get(name)}
assert changed <= {"TORCH_FR_BUFFER_SIZE"} | {name for name in changed if "KMP" in name}, changed
import torch
ids = torch.arange(3, 15).view(2, 6)
batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
losses = [first.step(batch).loss, second.step([batch, batch]).loss, first.step(batch).loss]
assert state() == before, "training changed the process"
assert breakpointhook_of_theirs.mine
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_manners(tiny_model: Path, tmp_path: Path) -> None:
    """In one process, as a notebook's: nothing of it changes, two models live side by side, errors are exceptions, and
    its end is a clean one."""
    (tmp_path / "breakpointhook_of_theirs.py").write_text("mine = True\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, str(tiny_model)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout.splitlines()[-1])
    assert first == near(second), "adapters begin at nothing"
    assert third < first


@pytest.fixture
def engine(tiny_model: Path) -> Any:
    yield load(tiny_model, learning_rate=1e-3)
    dist.destroy_process_group()


def load(model: Path, **settings: Any) -> Any:
    return expertmesh.load(str(model), use_cpu=True, **settings)


def batch_of_text() -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 27).view(2, 12)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def rows_of_text() -> list[dict[str, torch.Tensor]]:
    return [{name: tensor[0] for name, tensor in batch_of_text().items()}] * 4


def without_targets(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": torch.full_like(labels, -100)}


def trainer_arguments(path: Path, **settings: Any) -> transformers.TrainingArguments:
    own: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "remove_unused_columns": False}
    return transformers.TrainingArguments(str(path), **own, **settings)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.to_local().clone() for name, parameter in engine.model.named_parameters()}


def assert_stays(engine: Any, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())


@pytest.mark.parametrize("name", [name for name in expertmesh.__all__ if not (is_older() and "register" in name)])
def test_names_are_told_and_their_examples_run(
    name: str, engine: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = inspect.getdoc(getattr(expertmesh, name))
    assert said is not None
    assert "Example:" in said
    code = re.split(r"\n\n[A-Z][a-z]+:\n", said.partition("Example:\n")[2])[0]
    code = textwrap.dedent(code.replace('"DIR"', repr(str(tiny_model))))
    names = dict(
        expertmesh=expertmesh, transformers=transformers, engine=engine, batch=batch_of_text(),
        arguments=trainer_arguments(tmp_path, max_steps=1), batches=[batch_of_text()] * 2, dataset=rows_of_text(),
        collator=transformers.default_data_collator,
    )  # fmt: skip
    exec(compile(code, f"example of {name}", "exec"), names)


def test_every_flag_is_taken_by_its_name(engine: Any) -> None:
    """`load` has none of its own, and what the command refuses it refuses, with the same words."""
    for setting in fields(TrainConfig):
        assert make_config({"model": "m", setting.name: getattr(engine.config, setting.name)}), setting.name
    wrong: dict[str, Any] = {"ep_size": 0, "init_adapter": "d", "learning_rate": "fast", "adapter": "lorra"}
    for name, value in wrong.items():
        with pytest.raises(expertmesh.ExpertMeshError) as of_load:
            make_config({"model": "m", name: value})
        with pytest.raises(expertmesh.ExpertMeshError) as of_command:
            parse_config(["--model=m", f"--{name.replace('_', '-')}={value}"])
        assert str(of_load.value) == str(of_command.value)


def test_a_config_is_taken_as_its_settings_are(tiny_model: Path) -> None:
    """What editors complete, and type checkers know the types of; a wrong type is told by name where it is given."""
    config = expertmesh.TrainConfig(str(tiny_model), use_cpu=True, lora_rank=4, learning_rate=1, save_steps=3)
    with pytest.warns(
        UserWarning, match="^save_steps: only train_ep.py reads this|^--lora-rank 4 has no effect"
    ) as told:
        engine = expertmesh.load(config)
    assert len(told) == 2
    assert engine.config == make_config(
        {"model": str(tiny_model), "use_cpu": True, "lora_rank": 4, "learning_rate": 1, "save_steps": 3}
    )
    dist.destroy_process_group()
    with pytest.raises(expertmesh.ExpertMeshError, match="ep_size: set what the TrainConfig"):
        expertmesh.load(config, ep_size=2)
    with pytest.raises(expertmesh.ExpertMeshError, match="--adapter: invalid choice: 'lorra'"):
        expertmesh.load(replace(config, adapter="lorra"))  # type: ignore[arg-type]
    wrong: list[tuple[str, Any, str]] = [
        ("ep_size", "2", "is '2', not a whole number"),
        ("ep_size", True, "is True, not a whole number"),
        ("bf16", "true", "is 'true', not True or False"),
        ("learning_rate", None, "is None, not a number"),
        ("global_batch_size", 8.0, "is 8.0, not a whole number or None"),
        ("dataset", "d.jsonl", "is 'd.jsonl', not a list"),
        ("adapter", True, "is True, not a text"),
        ("rope_scaling", {}, "is {}, not a text"),
    ]
    for name, value, said in wrong:
        with pytest.raises(expertmesh.ExpertMeshError, match=f"^--{name.replace('_', '-')}: {said}$"):
            replace(config, **{name: value})
    names = list(inspect.signature(expertmesh.load).parameters)
    assert names == ["model", "config", *(setting.name for setting in fields(TrainConfig) if setting.name != "model")]


def _wrong_types() -> None:
    """For mypy, which complains of an ignored error that is none."""
    expertmesh.load(expertmesh.TrainConfig("DIR", ep_siz=2))  # type: ignore[call-arg]
    expertmesh.load(expertmesh.TrainConfig("DIR", ep_size="two"))  # type: ignore[arg-type]
    expertmesh.load(expertmesh.TrainConfig("DIR", cross_entropy="focal"))  # type: ignore[arg-type]
    expertmesh.load(Path("DIR"), ep_size=2, lora_targets="all-linear", rope_scaling={"rope_type": "yarn"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_targets", "attention"), ("dataset", Path("here")), ("resume", True), ("gradient_checkpointing", True),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}), ("lr_scheduler_kwargs", {"num_cycles": 1}),
    ],
)  # fmt: skip
def test_types_beyond_the_flags(name: str, value: Any) -> None:
    adapter = {"adapter": "lora"} if name == "lora_targets" else {}
    found = getattr(make_config({"model": "m", name: value, **adapter}), name)
    assert found not in (None, "", [], "none", "{}")


def test_what_the_package_tells_of_itself() -> None:
    assert {*expertmesh.__all__, "__version__", "__doc__"} <= set(dir(expertmesh))
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(expertmesh))
    tree = ast.parse(Path(expertmesh.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert seen == expertmesh._MODULES, "what editors see is what is imported"
    for name in expertmesh.__all__:
        assert getattr(expertmesh, name) is not None
    assert expertmesh.__version__ == importlib.metadata.version("expertmesh")
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        expertmesh.lod  # type: ignore[attr-defined]  # noqa: B018


def test_help_has_every_setting_in_its_group(engine: Any) -> None:
    text = expertmesh.load.__doc__ or ""
    assert all(f"\n    {setting.name}: " in text for setting in fields(TrainConfig) if setting.name != "model")
    assert text.index("\nParallelism:") < text.index("\n    ep_size: Expert-parallel ranks") < text.index("\nMemory:")
    assert max(map(len, text.splitlines())) <= 120
    assert re.fullmatch(r"Engine\(mixtral, \d+\.\d M parameters, 1 ranks \(.*\), step \d+\)", repr(engine))


def test_figures_of_a_step(engine: Any) -> None:
    """Short, and without what is not public."""
    figures = engine.step(batch_of_text())
    assert re.fullmatch(r"StepResult\(loss=5\.\d+, grad_norm=\d+\.\d+, tokens=24, targets=22\)", repr(figures))
    said = repr(replace(figures, balance_loss=2.0, z_loss=1.23456789))
    assert "balance_loss=2, z_loss=1.23457, grad_norm" in said
    documented = inspect.getdoc(expertmesh.StepResult) or ""
    public = {field.name for field in fields(figures)} - {"pairs", "routing"}
    assert all(f"{name}:" in documented or f"{name}," in documented for name in public | {"is_finite"})


@pytest.mark.filterwarnings("error")  # what is refused is not also said to have no effect
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ep_siz": 2}, "unknown key ep_siz; did you mean ep_size"),
        ({"ep_size": 3}, "--ep-size 3 does not divide the 8 experts"),
        ({"task": "kto"}, "task=.kto.: only train_ep.py trains on it"),
        ({"packing": "wrapped"}, "packing=.wrapped.: only train_ep.py cuts texts"),
        ({"teacher": "T"}, "teacher=.T.: only train_ep.py learns from a teacher"),
        ({"resume": "/nowhere"}, "--resume /nowhere: no such directory"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml: no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_settings_that_will_not_do(engine: Any, tiny_model: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(expertmesh.ExpertMeshError, match=said):
        load(tiny_model, **settings)


def test_a_recipes_schedule_waits_for_the_number_of_steps(tiny_model: Path, engine: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("warmup_ratio: 0.5\nlr_scheduler_type: cosine\n")
    said = "lr_scheduler_type='cosine', warmup_ratio=0.5: the learning rate stays constant until engine.schedule, or"
    with pytest.warns(UserWarning, match=f"^{said}"):
        engine = load(tiny_model, config=recipe)
    assert engine.scheduler is None
    engine.schedule(4)
    assert engine.optimizer.param_groups[0]["lr"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tiny_model, config=recipe, max_steps=4).scheduler is not None


def test_tokenizer_of_the_settings(tiny_model: Path, engine: Any, tmp_path: Path) -> None:
    """It is saved with the model; one that is not there is told of before anything is trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "other")
    engine = load(tiny_model, tokenizer=tmp_path / "other", adapter="lora", lora_rank=2)
    saved = engine.save(tmp_path / "saved")
    engine.export(tmp_path / "adapter")
    engine.merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    for made in (saved / "model", tmp_path / "adapter", tmp_path / "merged"):
        assert transformers.AutoTokenizer.from_pretrained(made).chat_template == tokenizer.chat_template
    with pytest.raises(expertmesh.ExpertMeshError, match="--tokenizer /nowhere: no such directory"):
        load(tiny_model, tokenizer="/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(expertmesh.ExpertMeshError, match=r"--tokenizer .*empty: has no tokenizer"):
        load(tiny_model, tokenizer=tmp_path / "empty")


def test_what_is_said_of_an_adapter(tiny_model: Path, engine: Any, tmp_path: Path) -> None:
    """Where it is exported, what servers must be given; where a run begins with it, that its base is another."""
    for form, told in (
        ("per-expert", "needs --max-lora-rank 8"),
        ("packed", "does not serve packed adapters of experts"),
    ):
        adapter, settings = tmp_path / form, {"adapter": "lora", "lora_rank": 2}
        said = load(tiny_model, adapter_format=form, **settings).export(adapter)
        assert any(line.startswith(f"adapter: vLLM {told}") for line in said)
        assert any(f"names the directory {tiny_model} as its base" in line for line in said)
    ranks = {
        x.shape[0] // 8
        for name, x in load_file(adapter / "adapter_model.safetensors").items()
        if "experts" in name and "lora_A" in name
    }
    assert ranks == {4, 2}
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    peft = pytest.importorskip("peft")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    by_peft = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).peft_config["default"]
    assert config["base_model_name_or_path"] == by_peft.base_model_name_or_path == str(tiny_model)
    for name, is_told in ((str(tiny_model), False), ("org/Other", True)):
        file.write_text(json.dumps(config | {"base_model_name_or_path": name}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(tiny_model, init_adapter=adapter, **settings)
        assert any(f"names {name} as the adapter's base" in str(each.message) for each in caught) is is_told


def test_arguments_that_will_not_do(engine: Any) -> None:
    for call, said in (
        (lambda: engine.generate("say hello"), r"a list of texts, as in generate\(\['Say hello'\]\)"),
        (lambda: engine.generate([3]), "a list of texts"),
        (lambda: engine.generate(["say"], 0), "max_new_tokens is 0; it must be an integer, 1 or more"),
        (lambda: engine.generate(["say"], "3"), "max_new_tokens is '3'"),
        (lambda: engine.evaluate(batch_of_text()), "batches is a dict; give a list of batches"),
        (lambda: engine.clip(-1.0), "max_norm is -1.0; it must be a number, 0 or more"),
        (lambda: engine.clip(math.nan), "max_norm is nan"),
        (lambda: engine.schedule(-1), "num_steps is -1; it must be an integer, 0 or more"),
        (lambda: engine.schedule("3"), "num_steps is '3'"),
    ):
        with pytest.raises(expertmesh.ExpertMeshError, match=said):
            call()


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_an_update_of_what_is_not_finite(engine: Any, what: str) -> None:
    """There is none in three pieces either."""
    engine.step(batch_of_text())
    before = weights_of(engine)
    figures = engine.forward_backward(batch_of_text())
    if what == "loss":
        figures = replace(figures, loss=math.nan)
    else:
        next(engine.model.parameters()).grad.to_local().fill_(math.inf)
        assert not math.isfinite(engine.clip())
    engine.update(figures)
    assert_stays(engine, before)
    engine.update(engine.forward_backward(batch_of_text()))
    assert not torch.equal(weights_of(engine)["model.norm.weight"], before["model.norm.weight"])


def test_a_step_in_three_pieces_follows_the_schedule(engine: Any) -> None:
    engine.schedule(4)
    rates = []
    for _ in range(4):
        rates.append(engine.scheduler.get_last_lr()[0])
        found = engine.forward_backward(batch_of_text())
        engine.clip()
        engine.update(found)
    assert engine.step_number == 4
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4


def test_a_schedule_goes_on_where_a_checkpoint_stands(tiny_model: Path, tmp_path: Path) -> None:
    """Also where it is asked for after the resume; one that is asked for after further steps begins then."""
    warming = {"learning_rate": 1e-3, "warmup_steps": 3, "seed": 1}

    def rates(engine: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(engine.scheduler.get_last_lr()[0])
            engine.step(batch_of_text())
        return found

    first = load(tiny_model, **warming, max_steps=8)
    rates(first, 4)
    saved = first.save(tmp_path)
    wanted = rates(first, 4)
    assert wanted[0] == pytest.approx(8e-4)
    for resumed in (load(tiny_model, **warming, resume=str(saved)), load(tiny_model, **warming)):
        if resumed.step_number == 0:
            resumed.resume(saved)
        resumed.schedule(8)
        assert rates(resumed, 4) == wanted
    resumed.schedule(8)
    assert rates(resumed, 1) == [0.0]


def test_a_step_beyond_the_schedule_is_warned_of_once(engine: Any, recwarn: pytest.WarningsRecorder) -> None:
    """With its rate of 0 nothing would be learned. The warning is at the line that makes the step."""
    warnings.simplefilter("always")
    engine.schedule(2)
    told = []
    for _ in range(4):
        engine.step(batch_of_text())
        told.append([str(each.message) for each in recwarn])
    assert told[1] == []
    assert told[2] == told[3]
    (warning,) = recwarn
    assert str(warning.message).startswith("the learning rate of a step is 0, as the schedule is over after 2 steps")
    assert "engine.step(batch_of_text())" in Path(warning.filename).read_text().splitlines()[warning.lineno - 1]
    engine.schedule(0)
    with pytest.warns(UserWarning, match="over after 0 steps"):
        engine.update(engine.forward_backward(batch_of_text()))


def test_a_step_of_no_batch_is_refused(engine: Any) -> None:
    """It would count a token, and warn of labels that there are not; beside another one, None is nothing."""
    tokens, steps = engine.tokens, engine.step_number
    for given in (None, [None, None]):
        for call in (engine.step, engine.forward_backward):
            with pytest.raises(expertmesh.ExpertMeshError, match="every batch of a step is None on all ranks"):
                call(given)
    assert (engine.tokens, engine.step_number) == (tokens, steps)
    assert engine.step([batch_of_text(), None]).tokens == 24


def test_a_checkpoint_of_another_run_is_not_resumed(engine: Any, tiny_model: Path, tmp_path: Path) -> None:
    saved = engine.save(tmp_path)
    same, other = load(tiny_model), load(tiny_model, optim="adamw_bf16")
    assert same.resume(saved) == saved
    with pytest.raises(expertmesh.ExpertMeshError, match="that run had --optim"):
        other.resume(saved)


def test_a_directory_of_checkpoints_is_its_newest_at_every_door(
    engine: Any, tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that holds none is refused alike."""
    engine.save(tmp_path / "saved")
    engine.step(batch_of_text())
    newest = engine.save(tmp_path / "saved")
    directory, empty = newest.parent, tmp_path / "empty"
    empty.mkdir()
    assert len(list(directory.glob("step-*"))) == 2
    assert load(tiny_model).resume(directory) == newest
    assert load(tiny_model, resume=str(directory)).step_number == engine.step_number
    said = f"--resume {empty}: has no checkpoint.json: not a complete training checkpoint"
    for resume in (lambda: engine.resume(empty), lambda: load(tiny_model, resume=str(empty))):
        with pytest.raises(expertmesh.ExpertMeshError) as caught:
            resume()
        assert said in str(caught.value).replace(f"{empty}: {empty}: ", f"{empty}: ")
    assert train_ep.main(["--model", str(tiny_model), "--dataset", str(tiny_data), "--resume", str(empty)]) == 2
    assert said in capsys.readouterr().err


def test_what_trainers_heed_is_not_said_to_be_without_effect(engine: Any, tiny_model: Path) -> None:
    said = "detect_anomaly: only train_ep.py and Trainer read this; it has no effect in"
    with pytest.warns(UserWarning, match=said):
        load(tiny_model, detect_anomaly=True)


def test_what_a_forward_gathers_is_let_go_of(engine: Any, tmp_path: Path) -> None:
    """A forward of one's own, without a backward, leaves nothing that an export or an update would trip over."""
    before = engine.evaluate([batch_of_text()]).loss
    engine.model(**batch_of_text())
    engine.export(tmp_path / "model")
    engine.model(**batch_of_text())
    assert engine.step(batch_of_text()).loss == near(before)
    assert engine.evaluate([batch_of_text()]).loss < before
    with pytest.raises(expertmesh.ExpertMeshError, match="already contains files"):
        engine.export(tmp_path / "model")


def test_trainers_that_cannot_be_heeded(engine: Any, tmp_path: Path) -> None:
    class Own(expertmesh.TrainerMixin, transformers.Trainer):
        pass

    def arguments(**settings: Any) -> transformers.TrainingArguments:
        return trainer_arguments(tmp_path, **settings)

    for make, said in (
        (lambda: Own(model=engine.model), "give the engine that expertmesh.load returns"),
        (lambda: Own(model=engine, args=arguments(optim="adafactor")), "give optim to expertmesh.load"),
        (lambda: Own(model=engine, args=arguments(neftune_noise_alpha=5)), "neftune_noise_alpha"),
    ):
        with pytest.raises(expertmesh.ExpertMeshError, match=said):
            make()


def test_a_trainer_that_counts_other_processes(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs without use_cpu, where each process of several takes itself for the only one."""
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(expertmesh.ExpertMeshError, match="count 2 processes and the engine 1 ranks: give use_cpu=True"):
        expertmesh.Trainer(engine, trainer_arguments(tmp_path), train_dataset=rows_of_text())


def test_a_prompt_does_not_end_before_its_answer(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers put EOS behind every text; a model that reads it has nothing to go on with."""
    from tokenizers.processors import TemplateProcessing

    generate = Mock(return_value=[])
    monkeypatch.setattr("expertmesh.training.engine.engine.generate", generate)
    tokenizer = engine.tokenizer
    ends = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    for template in ("<s> $A </s>", "<s> $A", "$A"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ends)
        engine.generate(["say hello"])
        expected = tokenizer.encode("say hello", add_special_tokens=False)
        assert generate.call_args.args[1] == [[tokenizer.bos_token_id] * ("<s>" in template) + expected]


def test_a_mean_over_no_target_is_not_a_number(engine: Any) -> None:
    """A step without a target updates nothing, and an evaluation of none is better than no other."""
    batch = batch_of_text()
    engine.step(batch)  # so that the optimizer has momentum by which weights would move
    nothing = batch | without_targets(batch["labels"])
    before = weights_of(engine)
    with pytest.warns(UserWarning, match="every label is -100") as warned:
        result = engine.step(nothing)
    assert {warning.filename for warning in warned} == {__file__}, "the user's line, not one of ours"
    assert math.isnan(result.loss)
    assert result.targets == 0
    assert not result.is_finite
    with pytest.warns(UserWarning, match="every label is -100"):
        result = engine.forward_backward(nothing)
    engine.update(result)
    assert_stays(engine, before)
    with pytest.warns(UserWarning, match="the loss of an evaluation is NaN"):
        found = engine.evaluate([nothing])
    assert math.isnan(found.loss)
    assert math.isnan(found.perplexity)
    assert str(found).startswith("eval loss nan, perplexity nan, 0 target tokens in ")
    assert str(replace(found, loss=5.8325)).startswith("eval loss 5.8325, perplexity 341.21, ")
    assert str(replace(found, loss=250.3996)).startswith("eval loss 250.3996, perplexity 5.59e+108, ")
    assert found.targets == 0
    best = Best()
    assert not best.update(found.loss, 1, threshold=0.0)
    assert best.update(9.0, 2, threshold=0.0)
    assert engine.step([batch, nothing]).loss == pytest.approx(engine.evaluate([batch]).loss, rel=0.2)


def test_a_best_model_by_a_figure_that_there_is_not(engine: Any, tmp_path: Path) -> None:
    """It is refused before anything is trained, but for what may add figures of its own."""

    class OwnCallback(transformers.TrainerCallback):
        pass

    def made(metric: str, **more: Any) -> Any:
        arguments = trainer_arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model=metric)
        stopping = transformers.EarlyStoppingCallback()
        given = {"train_dataset": rows_of_text(), "eval_dataset": rows_of_text(), "callbacks": [stopping], **more}
        return expertmesh.Trainer(engine, arguments, transformers.default_data_collator, **given)

    with pytest.raises(
        expertmesh.ExpertMeshError, match=r"metric_for_best_model='eval_mean_token_accuracy': .* eval_loss"
    ):
        made("eval_mean_token_accuracy")
    several = {"a": rows_of_text(), "b": rows_of_text()}
    with pytest.raises(expertmesh.ExpertMeshError, match=r"='loss': .*give eval_a_loss or eval_b_loss, or compute"):
        made("loss", eval_dataset=several)
    made("b_loss", eval_dataset=several)
    made("eval_loss")
    made("accuracy", compute_metrics=lambda found: {"accuracy": 1.0})
    made("accuracy", callbacks=[OwnCallback])


def test_a_trainers_best_is_no_evaluation_of_nothing(engine: Any, tmp_path: Path) -> None:
    rows = rows_of_text()
    nothing = [row | without_targets(row["labels"]) for row in rows]
    arguments = trainer_arguments(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", logging_steps=1
    )
    trainer = expertmesh.Trainer(
        engine, arguments, transformers.default_data_collator, train_dataset=rows, eval_dataset=nothing
    )
    with pytest.warns(UserWarning, match="the loss of an evaluation is NaN"):
        trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(losses) == 2
    assert all(map(math.isnan, losses))
    assert trainer.state.best_global_step in (None, 0)


def test_an_evaluation_comes_to_the_device_batch_by_batch(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    forward, to = evaluation.token_loss_sum, Batch.to

    def to_device(batch: Batch, device: torch.device) -> Batch:
        order.append("to the device")
        return to(batch, device)

    def loss_sum(*arguments: Any) -> Any:
        order.append("forward")
        return forward(*arguments)

    monkeypatch.setattr(Batch, "to", to_device)
    monkeypatch.setattr(evaluation, "token_loss_sum", loss_sum)
    engine.evaluate(batch_of_text() for _ in range(3))
    assert order == ["to the device", "forward"] * 3
