"""Adapters of whole runs: what a run writes is what PEFT computes with, and a run begins from what PEFT writes, is
resumed, and refuses what does not belong together. checkpoints/test_peft_format.py has the format itself."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import expertmesh
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.adapters.initial import load_adapter, read_adapter
from expertmesh.checkpoints.files.dtypes import Array
from expertmesh.checkpoints.files.open_files import OpenFiles
from expertmesh.checkpoints.files.tensors import StoredTensor
from expertmesh.checkpoints.training_state.state_table import StateReader
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.engine import assembly
from expertmesh.training.model_setup.lora_targets import lora_of
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.distributed.whole_runs import read, run_main
from tests.families.configs import tiny_config
from tests.parity.case import Case, hf_model
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error, save_tokenizer

peft = pytest.importorskip("peft")
LoraLayer = peft.tuners.lora.LoraLayer

RANK, ALPHA = 4, 6.0
TOKENS_BS = torch.arange(3, 27).view(2, 12)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "F < D, 6 experts": {"changes": {"intermediate_size": 16, "num_local_experts": 6}},
    "gpt_oss": {"family": "gpt_oss"},
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def case_of(name: str, **settings: Any) -> Case:
    lora = {"adapter": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, **settings}
    return Case([], settings=lora, **MODELS[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("base") / name for name in MODELS}
    for name, path in paths.items():
        hf_model(case_of(name), seed=1).save_pretrained(path)
        save_tokenizer(path)
        (path / "chat_template.jinja").write_text(TEMPLATE)
    return paths


class Runs:
    """Runs of train_ep.py with adapters."""

    def __init__(self, ranks: RankPool, data: Path):
        self.ranks, self.data = ranks, data

    def start(self, world_size: int, model: Path, out: Path, *flags: object) -> list[tuple[int, str]]:
        """(exit code, standard error) of each rank."""
        argv = ["--model", model, "--dataset", self.data, "--output-dir", out, "--use-cpu", "--adapter", "lora"]
        argv += ["--lora-rank", RANK, "--lora-alpha", ALPHA, "--learning-rate", "1e-2", "--save-steps", 0]
        argv += ["--per-device-train-batch-size", 8 // world_size, *flags]
        results: list[tuple[int, str]] = self.ranks.run(run_main, world_size, [*map(str, argv)], join_group=False)
        return results

    def train(self, world_size: int, model: Path, out: Path, *flags: object) -> Path:
        """The adapter of a run that comes through."""
        results = self.start(world_size, model, out, *flags)
        assert [code for code, _ in results] == [0] * world_size, results
        return out / "adapter"

    def refused(self, model: Path, out: Path, *flags: object) -> str:
        ((code, said),) = self.start(1, model, out, "--overwrite-output-dir", *flags)
        assert code == 2
        return said


@pytest.fixture
def runs(ranks: RankPool, tiny_data: Path) -> Runs:
    return Runs(ranks, tiny_data)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Of a model, or the one in a directory."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    logits: Tensor = model.eval()(input_ids=TOKENS_BS, use_cache=False).logits
    return logits


def logits_by_peft(model: Path, adapter: Path) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return logits_of(peft.PeftModel.from_pretrained(base, adapter))


@torch.no_grad()
def _our_logits(model: Path, adapter: Path, topology: Topology, case: Case) -> Tensor:
    ours, _, checkpoint = sharded_model(model, topology, case)
    lora = lora_of(TrainConfig(model="m", dataset=["d"], **case.settings))
    load_adapter(ours, read_adapter(ours, adapter, lora, model_config=checkpoint.source.config), lora, topology)
    return logits_of(ours)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("mixtral", "per-expert", marks=pytest.mark.slow),
        pytest.param("F < D, 6 experts", "packed", marks=pytest.mark.release),
        pytest.param("gpt_oss", "packed", marks=pytest.mark.slow),
    ],
)
def test_peft_computes_what_was_trained(
    runs: Runs, models: dict[str, Path], tmp_path: Path, name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The logits of PEFT's model, of the sharded one, and of the merged export, are the same; of the merged tensors,
    those of experts and attention by themselves, the bits; with the base's tokenizer and chat template beside it."""
    flags = ("--max-steps", 2, "--ep-size", 2, "--adapter-format", form, "--merge")
    adapter = runs.train(4, base := models[name], tmp_path, *flags)
    theirs = logits_by_peft(base, adapter)
    assert relative_error(theirs, logits_of(base)) > 1e-3, "it has learned something"
    ours = runs.ranks.run(_our_logits, 4, base, adapter, Topology(4, 2), case_of(name))[0]
    assert relative_error(ours, theirs) < OTHER_ORDER
    assert relative_error(logits_of(tmp_path / "hf"), theirs) < OTHER_ORDER
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (base, adapter)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[1].chat_template == TEMPLATE
    assert not (adapter / "config.json").exists()
    assert Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]) == base
    assert checkpoints_main(["inspect", str(adapter), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "PEFT adapter, LORA" in said
    assert f"rank        {RANK}, alpha {ALPHA}" in said
    if form == "per-expert":
        assert "experts.7.w3.lora_B.weight" in said
        assert checkpoints_main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
        tensors = load_file(adapter / "adapter_model.safetensors")
        for merged in (tmp_path / "merged", tmp_path / "hf"):
            assert differing(read(base), read(merged), tensors) == []


def differing(base: dict[str, Tensor], merged: dict[str, Tensor], adapter: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not base + s · B · A, bit for bit."""
    assert base.keys() == merged.keys()
    changed = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter}
    assert changed <= {name.removesuffix(".weight") for name in base}
    wrong = []
    for name, want in base.items():
        # attention goes by transformers' name, which is that of these checkpoints too
        if (own := name.removesuffix(".weight")) in changed:
            a, b = (adapter[f"base_model.model.{own}.lora_{which}.weight"].double() for which in "AB")
            want = (want.double() + ALPHA / RANK * (b @ a)).float()
        if not torch.equal(merged[name], want):
            wrong.append(name)
    return wrong


@pytest.mark.release
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("name", ["qwen4_exp", "gemma4", "qwen3_vl_moe"])
def test_peft_loads_it_onto_the_named_class(runs: Runs, tmp_path: Path, name: str) -> None:
    """The class that config.json names has a vision tower, which text does not reach, and which gets no adapter."""
    config: Any = tiny_config(name)
    config.vision_config = config.vision_config or tiny_config(f"{name}_vision")
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")

    def whole(path: Path) -> Any:
        found: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        assert [type(found).__name__] == json.loads((path / "config.json").read_text())["architectures"]
        return found

    adapter = runs.train(2, tmp_path / "base", tmp_path / "first", "--max-steps", 2, "--ep-size", 2)
    base = whole(tmp_path / "base")
    before = logits_of(base)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    adapted = {path for path, module in theirs.base_model.model.named_modules() if isinstance(module, LoraLayer)}
    decoder = next(path for path, module in base.named_modules() if module is base.get_decoder())
    assert adapted
    assert all(path.startswith(f"{decoder}.") for path in adapted)
    sets = (peft.get_peft_model_state_dict(theirs), load_file(adapter / "adapter_model.safetensors"))
    used, written = (sum(map(torch.count_nonzero, tensors.values())) for tensors in sets)
    assert used == written
    want = logits_of(theirs)
    assert relative_error(want, before) > 1e-4, "it has learned something"
    ours = runs.ranks.run(_our_logits, 1, tmp_path / "base", adapter, Topology(1, 1), case_of("mixtral"))[0]
    assert relative_error(ours, want) < OTHER_ORDER
    again = runs.train(1, tmp_path / "base", tmp_path / "again", "--max-steps", 0, "--init-adapter", adapter)
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    assert checkpoints_main(["merge", str(tmp_path / "base"), str(adapter), str(tmp_path / "merged")]) == 0
    assert relative_error(logits_of(whole(tmp_path / "merged")), want) < OTHER_ORDER


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral"])
def test_goes_on_from_what_peft_made(runs: Runs, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """An adapter by PEFT's own target_parameters goes in, comes out unchanged, and trained a step further."""
    base = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    modules, parameters = ["q_proj", "k_proj", "v_proj", "o_proj"], ["experts.gate_up_proj", "experts.down_proj"]
    targets: Any = dict(target_modules=modules, target_parameters=parameters)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, **targets)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    want = logits_by_peft(models[name], tmp_path / "theirs")
    begun = ("--ep-size", 2, "--init-adapter")
    same = runs.train(2, models[name], tmp_path / "same", "--max-steps", 0, *begun, tmp_path / "theirs")
    assert relative_error(logits_by_peft(models[name], same), want) < OTHER_ORDER
    further = runs.train(4, models[name], tmp_path / "further", "--max-steps", 1, *begun, same)
    assert 1e-4 < relative_error(logits_by_peft(models[name], further), want) < 1


@pytest.mark.slow
def test_an_adapter_begins_a_pipeline(
    runs: Runs, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage takes its layers' part: what is exported again is what went in."""
    adapter = runs.train(1, models["mixtral"], tmp_path / "first", "--max-steps", 1)
    stages = ("--pp-size", 2, "--max-steps", 0)
    again = runs.train(2, models["mixtral"], tmp_path / "again", *stages, "--init-adapter", adapter)
    new = runs.train(2, models["mixtral"], tmp_path / "new", *stages)
    assert checkpoints_main(["verify", str(adapter), str(again)]) == 0
    assert "bitwise equal" in capsys.readouterr().out
    assert checkpoints_main(["verify", str(adapter), str(new), "--rtol", "1e-4"]) == 1
    assert "values differ, by at most" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_adapter_says_what_is_adapted(runs: Runs, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Routers that are linear layers and that are none, experts, and attention: with no flag what went in comes out."""
    targets = ("--lora-targets", "attention", "experts", "router", "--use-rslora")
    first = runs.train(1, models[name], tmp_path / "first", "--max-steps", 1, *targets)
    argv = ["--model", models[name], "--dataset", runs.data, "--output-dir", tmp_path / "again", "--use-cpu"]
    argv += ["--adapter", "lora", "--max-steps", 0, "--init-adapter", first]
    assert runs.ranks.run(run_main, 1, list(map(str, argv)), join_group=False) == [(0, "")]
    assert checkpoints_main(["verify", str(first), str(tmp_path / "again" / "adapter")]) == 0


def _refused(model: Path, adapter: Path, case: Case) -> str:
    with pytest.raises(ExpertMeshError) as error:
        _our_logits(model, adapter, Topology(1, 1), case)
    return str(error.value)


def test_broken_adapters_are_named(runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    good = runs.train(1, models["mixtral"], tmp_path, "--max-steps", 0)
    tensors = load_file(good / "adapter_model.safetensors")
    config = json.loads((good / "adapter_config.json").read_text())
    expert = next(name for name in tensors if ".experts.3." in name and name.endswith("lora_A.weight"))
    twin = expert.replace("lora_A", "lora_B")
    stem = expert.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

    def without(*names: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not any(other in name for other in names)}

    def half(name: str, part: Tensor) -> Tensor:
        return part[: len(part) // 2] if ".lora_A." in name else part[:, : part.shape[1] // 2].contiguous()

    beyond = {name.replace("experts.3", "experts.99"): tensors[name].clone() for name in (expert, twin)}
    halved: dict[str, Any] = {"r": RANK // 2, "rank_pattern": {k: v // 2 for k, v in config["rank_pattern"].items()}}
    given = f"--lora-rank {RANK} --lora-alpha {ALPHA:g}; give "
    table: list[tuple[str, dict[str, Tensor], dict[str, Any]]] = [
        (f"tensor {twin} is missing", without(twin), {}),
        ("expert 3 of model.layers.0.mlp.experts.mlp", without(twin, expert), {}),
        ("has no place in this model", tensors | beyond, {}),
        ("has no place in this model", tensors | {"x": tensors[expert].clone()}, {}),
        (stem, tensors | {twin: tensors[twin][:-1].contiguous()}, {}),
        ("not finite", tensors | {twin: torch.full_like(tensors[twin], torch.nan)}, {}),
        ("peft_type is 'IA3'", tensors, {"peft_type": "IA3"}),
        ("r is 0", tensors, {"r": 0}),
        ("modules_to_save", tensors, {"modules_to_save": ["lm_head"]}),
        (
            f"was trained with --lora-rank {RANK} --lora-alpha {2 * RANK}; this run has {given}",
            *(tensors, {"lora_alpha": 2 * RANK, "alpha_pattern": {}}),
        ),
        (
            f"was trained with --lora-rank 2 --lora-alpha {ALPHA:g}; this run has {given}",
            *({name: half(name, part) for name, part in tensors.items()}, halved),
        ),
        (
            "has no tensor for model.layers.0.mlp.experts.gate_up_proj, a target",
            without(".experts."),
            {},
        ),
        ("has no adapter there; leave out --lora-targets", without(".experts."), {"target_parameters": []}),
    ]
    for number, (words, changed, settings) in enumerate(table):
        bad = tmp_path / str(number)
        bad.mkdir()
        save_file(changed, bad / "adapter_model.safetensors")
        (bad / "adapter_config.json").write_text(json.dumps(config | settings))
        (said,) = runs.ranks.run(_refused, 1, models["mixtral"], bad, case_of("mixtral"))
        assert words in said
        assert ".mlp.w" not in said or "expert 3" in said, "names of ours"


def _begins(by_command: bool, model: Path, data: Path, out: Path, more: dict[str, Any]) -> str:
    """What is said of a run that may read no weight of the base."""
    settings: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": ALPHA, "init_adapter": str(out / "adapter"), **more}
    with mock.patch.object(assembly, "load_model", side_effect=AssertionError("weights are read")):
        if by_command:
            argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out / "more"), "--use-cpu"]
            argv += ["--adapter", "lora", "--max-steps", "1"]
            for name, value in settings.items():
                argv += [f"--{name}"]
                argv += [] if value is True else map(str, value if isinstance(value, list) else [value])
            code, told = run_main(argv)
            assert code == 2
            return told
        with pytest.raises(ExpertMeshError) as error:
            expertmesh.load(str(model), use_cpu=True, adapter="lora", **settings)
        return str(error.value)


def test_another_adapter_is_refused_before_weights_are_read(
    runs: Runs, models: dict[str, Path], tmp_path: Path
) -> None:
    weights = runs.train(1, models["mixtral"], tmp_path, "--max-steps", 0) / "adapter_model.safetensors"
    theirs = f"was trained with --lora-rank {RANK} --lora-alpha {ALPHA:g}; this run has "
    refused: dict[str, dict[str, Any]] = {
        f"{theirs}--lora-rank 2 --lora-alpha {ALPHA:g}; give ": {"lora_rank": 2},
        f"{theirs}--lora-rank {RANK} --lora-alpha 8; give": {"lora_alpha": 8},
        f"--use-rslora; give --lora-rank {RANK} --lora-alpha {ALPHA:g}, without --use-rslora": {"use_rslora": True},
        "has one there; leave out --lora-targets": {"lora_targets": ["attention"]},
    }
    for number, (words, more) in enumerate(refused.items()):
        by_command = number % 2 == 0
        arguments = (by_command, models["mixtral"], runs.data, tmp_path, more)
        (said,) = runs.ranks.run(_begins, 1, *arguments, join_group=not by_command)
        assert f"--init-adapter {tmp_path / 'adapter'}: " in said, said
        assert words in said, said
    name, tensor = next(iter((good := load_file(weights)).items()))
    save_file(good | {name: torch.full_like(tensor, torch.nan)}, weights)
    (said,) = runs.ranks.run(_begins, 1, False, models["mixtral"], runs.data, tmp_path, {})
    assert said == f"{weights}: tensor {name} has values that are not finite"


@pytest.mark.parametrize("form", ["per-expert", "packed"])
def test_each_row_of_an_adapter_is_read_once(runs: Runs, models: dict[str, Path], tmp_path: Path, form: str) -> None:
    """By the rank that has it; of packed experts, which alternate in a tensor, all rows by each rank."""
    runs.train(1, models["mixtral"], tmp_path, "--max-steps", 0, "--adapter-format", form)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    reads = runs.ranks.run(_rows_of_adapter_read, 2, models["mixtral"], tmp_path / "adapter")
    for name, tensor in tensors.items():
        readers = 2 if form == "packed" and ".experts." in name else 1
        assert sorted(row for rows in reads for row in rows[name]) == sorted([*range(len(tensor))] * readers), name
    if form == "packed":
        # gate and up that share an A of twice the rank, which only their values tell
        b = next(key for key in tensors if key.endswith("experts.base_layer.lora_B.weight"))
        save_file(tensors | {b: torch.ones_like(tensors[b])}, weights)
        (said,) = runs.ranks.run(_begins, 1, False, models["mixtral"], runs.data, tmp_path, {})
        assert f"give --lora-rank {2 * RANK} --lora-alpha {2 * ALPHA:g}" in said
        assert f"experts.gate_up_proj has rank {2 * RANK}, the largest" in said


def _rows_of_adapter_read(model: Path, adapter: Path) -> dict[str, list[int]]:
    """By tensor, the rows that this rank reads to begin as an adapter, as often as it reads them."""
    found: dict[str, list[int]] = defaultdict(list)
    array = OpenFiles.array

    def counted(files: OpenFiles, stored: StoredTensor, rows: range | None = None) -> Array:
        found[stored.name] += range(stored.shape[0]) if rows is None else rows
        return array(files, stored, rows)

    begun: dict[str, Any] = {"adapter": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "init_adapter": str(adapter)}
    with mock.patch.object(OpenFiles, "array", counted):
        expertmesh.load(str(model), use_cpu=True, **begun)
    return found


def as_one(adapter: Path) -> Tensor:
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_resumed_runs_end_alike(runs: Runs, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """On the same ranks bit for bit (of one family), on others but for rounding; a checkpoint holds no weights of the
    base; another base, and other adapters, are refused."""
    flags = ("--max-steps", 3, "--ep-size", 2)
    whole = as_one(runs.train(4, models[name], tmp_path / "whole", *flags, "--save-steps", 2))
    saved = tmp_path / "whole" / "checkpoints" / "step-00000002"
    marker = json.loads((saved / "checkpoint.json").read_text())
    assert marker["base"] == {"path": str(models[name])}
    assert "samples" in marker["facts"]["model"]["model.safetensors:"]
    for world_size in (4, 2) if name == "mixtral" else (2,):
        out = tmp_path / f"on-{world_size}"
        shutil.copytree(saved, out / "checkpoints" / saved.name)
        resumed = as_one(runs.train(world_size, models[name], out, *flags, "--resume", "auto"))
        assert relative_error(resumed, whole) <= (0 if world_size == 4 else 1e-4)
    saved_names = StateReader(saved / "state").read_metadata().state_dict_metadata
    of_model = [name for name in saved_names if name.startswith("model.")]
    assert of_model
    assert all("lora_" in name for name in of_model)
    if name == "gpt_oss":
        return

    def refused(*more: object, model: Path = models[name]) -> str:
        return runs.refused(model, tmp_path / "other", "--resume", saved, *more)

    other = tmp_path / "another base"
    hf_model(Case([]), seed=2).save_pretrained(other)
    save_tokenizer(other)
    said = refused(model=other)
    assert "is of another model" in said
    assert "--allow-changed model" in said
    assert str(models[name]) in said
    assert f"had --lora-rank {RANK}, this one has --lora-rank 8" in refused("--lora-rank", 8)
    assert "--lora-targets" in refused("--lora-targets", "experts")
    assert "this one has --adapter none" in refused("--adapter", "none")


@pytest.mark.slow
def test_flags_that_do_not_belong_together(runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    said: list[tuple[str, str, tuple[object, ...]]] = [
        ("mixtral", "--lora-targets shared-experts: this model has none", ("--lora-targets", "shared-experts")),
        ("mixtral", "did you mean q_proj", ("--lora-targets", "q_prj")),
        ("mixtral", "leave out --freeze", ("--freeze", "router")),
        ("mixtral", "--optim muon", ("--optim", "muon")),
        ("mixtral", "have no router bias", ("--router-bias-update-rate", "0.001")),
        ("gpt_oss", "--adapter-format per-expert", ("--adapter-format", "per-expert")),
    ]
    for name, words, flags in said:
        assert words in runs.refused(models[name], tmp_path / "out", *flags)
