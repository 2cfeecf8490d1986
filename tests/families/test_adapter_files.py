"""Adapters as files: what a run writes is what PEFT computes with, and a run resumes from what PEFT writes."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import expertmesh
from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.adapters import adapter_files
from expertmesh.checkpoints.adapters.adapter_files import load_adapter, read_adapter
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training import engine
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.model_setup.lora_targets import lora_of
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, sharded_model
from tests.distributed.whole_runs import FIXED_PRODUCTS, read, run_main
from tests.families.configs import tiny_config
from tests.tiny import relative_error, save_tokenizer

peft = pytest.importorskip("peft")
LoraLayer = peft.tuners.lora.LoraLayer

RANK, ALPHA = 4, 6.0
TOKENS_BS = torch.arange(3, 27).view(2, 12)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "F < D, 6 experts": {"changes": {"intermediate_size": 16, "num_local_experts": 6}},
    "qwen3_moe": {"family": "qwen3_moe"},
    "gpt_oss": {"family": "gpt_oss"},
}
PER_EXPERT = [name for name in MODELS if name != "gpt_oss"]


def case_of(name: str, **settings: Any) -> Case:
    lora = {"adapter": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, **settings}
    return Case([], settings=lora, **MODELS[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("base") / name for name in MODELS}
    for name, path in paths.items():
        hf_model(case_of(name), seed=1).save_pretrained(path)
        save_tokenizer(path)
    return paths


def train(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: object) -> None:
    argv = ["--model", model, "--dataset", data, "--output-dir", out, "--use-cpu", "--adapter", "lora"]
    argv += ["--lora-rank", RANK, "--lora-alpha", ALPHA, "--learning-rate", "1e-2", "--save-steps", 0]
    argv += ["--per-device-train-batch-size", 8 // world_size, *FIXED_PRODUCTS, *flags]
    results = ranks.run(run_main, world_size, [str(flag) for flag in argv], join_group=False)
    assert [code for code, _ in results] == [0] * world_size, results


def logits_of(model: Path) -> Tensor:
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = theirs.eval()(TOKENS_BS).logits
    return logits


def logits_by_peft(model: Path, adapter: Path) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = peft.PeftModel.from_pretrained(base, adapter).eval()(TOKENS_BS).logits
    return logits


@torch.no_grad()
def _our_logits(model: Path, adapter: Path, topology: Topology, case: Case) -> Tensor:
    ours, _, checkpoint = sharded_model(model, topology, case)
    lora = lora_of(TrainConfig(model="m", dataset=["d"], **case.settings))
    load_adapter(ours, read_adapter(ours, adapter, lora, model_config=checkpoint.source.config), lora, topology)
    logits: Tensor = ours.eval()(TOKENS_BS).logits
    return logits


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "form"), [*((name, "per-expert") for name in PER_EXPERT), *((name, "packed") for name in MODELS)]
)
def test_peft_computes_what_was_trained(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, name: str, form: str
) -> None:
    """The logits of PEFT's model, of the sharded one, and of the merged export."""
    train(
        ranks,
        4,
        models[name],
        tiny_data,
        tmp_path,
        "--max-steps",
        2,
        "--ep-size",
        2,
        "--adapter-format",
        form,
        "--merge",
    )
    adapter = tmp_path / "adapter"
    theirs = logits_by_peft(models[name], adapter)
    assert relative_error(theirs, logits_of(models[name])) > 1e-3, "it has learned something"
    ours = ranks.run(_our_logits, 4, models[name], adapter, Topology(4, 2), case_of(name))[0]
    assert relative_error(ours, theirs) < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert relative_error(merged(TOKENS_BS).logits, theirs) < 1e-5


WHOLE = ["qwen3_5_moe", "qwen4_exp", "gemma4", "qwen3_vl_moe", "glm4v_moe"]
"""Families whose checkpoints are of a class that holds the language model beside a vision tower."""


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("whole") / name for name in WHOLE}
    for name, path in paths.items():
        torch.manual_seed(0)
        config: Any = tiny_config(name)
        if config.vision_config is None:
            config.vision_config = tiny_config(f"{name}_vision")
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
        model.save_pretrained(path)
        save_tokenizer(path)
    return paths


def whole_model(path: Path) -> Any:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert [type(model).__name__] == json.loads((path / "config.json").read_text())["architectures"]
    return model.eval()


@torch.no_grad()
def logits_of_class(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=TOKENS_BS, use_cache=False).logits
    return logits


@pytest.mark.release
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("name", WHOLE)
def test_peft_loads_it_onto_the_named_class(
    ranks: RankPool, wholes: dict[str, Path], tiny_data: Path, tmp_path: Path, name: str
) -> None:
    """The class that config.json names has a vision tower, which text does not reach, and which gets no adapter."""
    train(ranks, 2, wholes[name], tiny_data, tmp_path / "first", "--max-steps", 2, "--ep-size", 2)
    adapter = tmp_path / "first" / "adapter"
    base = whole_model(wholes[name])
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    adapted = {path for path, module in theirs.base_model.model.named_modules() if isinstance(module, LoraLayer)}
    decoder = next(path for path, module in base.named_modules() if module is base.get_decoder())
    assert adapted
    assert all(path.startswith(f"{decoder}.") for path in adapted)
    used = peft.get_peft_model_state_dict(theirs)
    assert sum(map(torch.count_nonzero, used.values())) == sum(
        map(torch.count_nonzero, load_file(adapter / "adapter_model.safetensors").values())
    )
    want = logits_of_class(theirs)
    assert relative_error(want, logits_of_class(whole_model(wholes[name]))) > 1e-4, "it has learned something"
    case = case_of("mixtral")
    ours = ranks.run(_our_logits, 1, wholes[name], adapter, Topology(1, 1), case)[0]
    assert relative_error(ours, want) < 1e-5
    again = tmp_path / "again"
    train(ranks, 1, wholes[name], tiny_data, again, "--max-steps", 0, "--init-adapter", adapter)
    assert checkpoints_main(["verify", str(adapter), str(again / "adapter")]) == 0
    assert checkpoints_main(["merge", str(wholes[name]), str(adapter), str(tmp_path / "merged")]) == 0
    assert relative_error(logits_of_class(whole_model(tmp_path / "merged")), want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_EXPERT)
def test_merged_bits(
    ranks: RankPool,
    models: dict[str, Path],
    tiny_data: Path,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Base + s · B · A, tensor by tensor, computed apart: equal bit for bit, and not if anything is mistaken."""
    train(ranks, 2, models[name], tiny_data, tmp_path, "--max-steps", 2, "--ep-size", 2)
    assert checkpoints_main(["merge", str(models[name]), str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    base, merged = read(models[name]), read(tmp_path / "merged")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert differing(base, merged, adapter) == []

    def mistaken(change: Any) -> bool:
        copy = dict(adapter)
        change(copy)
        return differing(base, merged, copy) != []

    # what no token reached is zero still
    experts = [name for name in sorted(adapter) if ".experts." in name and "lora_B" in name and adapter[name].any()]
    first = experts[0]
    stem, _, rest = first.partition(".experts.")
    other = next(name for name in experts[1:] if name.startswith(stem) and name.endswith(rest.partition(".")[2]))
    assert mistaken(lambda t: t.update({first: t[other], other: t[first]})), "two experts swapped"
    assert mistaken(lambda t: t.update({first: t[first].t().reshape(t[first].shape)})), f"{first} transposed"
    assert mistaken(lambda t: t.update({first: t[first].flip(1)})), "ranks permuted"


def differing(base: dict[str, Tensor], merged: dict[str, Tensor], adapter: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not base + s · B · A."""
    assert base.keys() == merged.keys()
    changed = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter}
    wrong = []
    for name, tensor in base.items():
        want = tensor
        # attention goes by transformers' name, which is that of these checkpoints too
        own = name.removesuffix(".weight")
        if own in changed:
            a, b = (adapter[f"base_model.model.{own}.lora_{which}.weight"].double() for which in "AB")
            want = (tensor.double() + ALPHA / RANK * (b @ a)).float()
        if not torch.equal(merged[name], want):
            wrong.append(name)
    assert changed <= {name.removesuffix(".weight") for name in base}
    return wrong


@pytest.mark.release
@pytest.mark.parametrize("name", MODELS)
def test_goes_on_from_what_peft_made(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, name: str
) -> None:
    """An adapter by PEFT's own target_parameters goes in, comes out unchanged, and trained a step further."""
    base = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    want = logits_by_peft(models[name], tmp_path / "theirs")
    same, further = tmp_path / "same", tmp_path / "further"
    train(
        ranks, 2, models[name], tiny_data, same, "--max-steps", 0, "--ep-size", 2, "--init-adapter", tmp_path / "theirs"
    )
    assert relative_error(logits_by_peft(models[name], same / "adapter"), want) < 1e-5
    train(
        ranks, 4, models[name], tiny_data, further, "--max-steps", 1, "--ep-size", 2, "--init-adapter", same / "adapter"
    )
    assert 1e-4 < relative_error(logits_by_peft(models[name], further / "adapter"), want) < 1


@pytest.mark.release
def test_inspect(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(ranks, 1, models["mixtral"], tiny_data, tmp_path, "--max-steps", 0)
    assert checkpoints_main(["inspect", str(tmp_path / "adapter"), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "PEFT adapter, LORA" in said
    assert f"rank        {RANK}, alpha {ALPHA}" in said
    assert "experts.7.w3.lora_B.weight" in said


@pytest.mark.slow
def test_verify(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run on other ranks is the same adapter to rounding; another step is another adapter."""
    runs = {"one": (1, 1, 1), "two": (2, 2, 1), "further": (1, 1, 2)}
    for name, (world_size, ep_size, steps) in runs.items():
        flags = ["--ep-size", ep_size, "--max-steps", steps, "--lr-scheduler-type", "constant"]
        train(ranks, world_size, models["mixtral"], tiny_data, tmp_path / name, *flags)

    def verify(a: str, b: str, *flags: str) -> int:
        return checkpoints_main(["verify", str(tmp_path / a / "adapter"), str(tmp_path / b / "adapter"), *flags])

    assert verify("one", "one") == 0
    assert "bitwise equal" in capsys.readouterr().out
    assert verify("one", "two", "--rtol", "1e-4") == 0
    assert verify("one", "further", "--rtol", "1e-4") == 1
    assert "lora_B.weight: values differ" in capsys.readouterr().out


def _refused(model: Path, adapter: Path, case: Case) -> str:
    with pytest.raises(ExpertMeshError) as error:
        _our_logits(model, adapter, Topology(1, 1), case)
    return str(error.value)


def test_broken_adapters_are_named(ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path) -> None:
    train(ranks, 1, models["mixtral"], tiny_data, tmp_path, "--max-steps", 0)
    good = tmp_path / "adapter"
    tensors = load_file(good / "adapter_model.safetensors")
    config = json.loads((good / "adapter_config.json").read_text())
    expert = next(name for name in tensors if ".experts.3." in name and name.endswith("lora_A.weight"))
    twin = expert.replace("lora_A", "lora_B")
    stem = expert.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

    def refused(changed: dict[str, Tensor] | None = None, **settings: Any) -> str:
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        save_file(tensors if changed is None else changed, bad / "adapter_model.safetensors")
        (bad / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        return ranks.run(_refused, 1, models["mixtral"], bad, case_of("mixtral"))[0]

    without = {name: tensor for name, tensor in tensors.items() if name != twin}
    assert f"tensor {twin} is missing" in refused(without)
    neither = {name: tensor for name, tensor in without.items() if name != expert}
    assert "expert 3 of model.layers.0.mlp.experts.mlp" in refused(neither)
    beyond = {name.replace("experts.3", "experts.99"): tensors[name].clone() for name in (expert, twin)}
    assert "has no place in this model" in refused({**tensors, **beyond})
    assert "has no place in this model" in refused({**tensors, "x": tensors[expert].clone()})
    assert stem in refused({**tensors, twin: tensors[twin][:-1].contiguous()})
    assert "not finite" in refused({**tensors, twin: torch.full_like(tensors[twin], torch.nan)})
    assert "peft_type is 'IA3'" in refused(peft_type="IA3")
    assert "r is 0" in refused(r=0)
    assert "modules_to_save" in refused(modules_to_save=["lm_head"])
    uneven = refused(lora_alpha=2 * RANK, alpha_pattern={})
    assert "model.layers.0.mlp.experts.gate_up_proj has rank 4 there, and its LoRA delta is scaled by 1" in uneven
    assert "one rank and one scale for all" in uneven
    halved = {
        name: part[: len(part) // 2] if ".lora_A." in name else part[:, : part.shape[1] // 2]
        for name, part in tensors.items()
    }
    halved = {name: part.contiguous() for name, part in halved.items()}
    smaller = refused(halved, r=RANK // 2, rank_pattern={k: v // 2 for k, v in config["rank_pattern"].items()})
    given = f"--lora-rank {RANK} --lora-alpha {ALPHA:g}: give the former"
    assert f"was trained with --lora-rank 2 --lora-alpha {ALPHA:g}, and this run has {given}" in smaller
    assert ".mlp.w" not in smaller + uneven, "names of ours"
    attention = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert "has nothing for model.layers.0.mlp.experts.gate_up_proj, which is among the targets" in refused(attention)
    assert "has no adapter there; --lora-targets must name the same" in refused(attention, target_parameters=[])


def test_an_adapter_begins_a_pipeline(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path
) -> None:
    """Each stage takes its layers' part: what is exported again is what went in."""
    train(ranks, 1, models["mixtral"], tiny_data, tmp_path / "first", "--max-steps", 1)
    adapter, stages = tmp_path / "first" / "adapter", ("--pp-size", 2, "--max-steps", 0)
    train(ranks, 2, models["mixtral"], tiny_data, tmp_path / "again", *stages, "--init-adapter", adapter)
    train(ranks, 2, models["mixtral"], tiny_data, tmp_path / "new", *stages)
    assert checkpoints_main(["verify", str(adapter), str(tmp_path / "again" / "adapter")]) == 0
    assert checkpoints_main(["verify", str(adapter), str(tmp_path / "new" / "adapter")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_adapter_says_what_is_adapted(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, name: str
) -> None:
    """Routers that are linear layers and that are none, experts, and attention: with no flag what went in comes out."""
    targets = ("--lora-targets", "attention", "experts", "router", "--use-rslora")
    train(ranks, 1, models[name], tiny_data, tmp_path / "first", "--max-steps", 1, *targets)
    argv = ["--model", models[name], "--dataset", tiny_data, "--output-dir", tmp_path / "again", "--use-cpu"]
    argv += ["--adapter", "lora", "--max-steps", 0, "--init-adapter", tmp_path / "first" / "adapter"]
    assert ranks.run(run_main, 1, list(map(str, argv)), join_group=False) == [(0, "")]
    assert checkpoints_main(["verify", *(str(tmp_path / out / "adapter") for out in ("first", "again"))]) == 0


def _begins(by_command: bool, model: Path, data: Path, out: Path, more: dict[str, Any]) -> str:
    """What is said of a run that may read no weight of the base."""
    settings: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": ALPHA, "init_adapter": str(out / "adapter"), **more}
    loads = mock.patch.object(engine, "load_model", side_effect=AssertionError("weights are read"))
    with loads, contextlib.redirect_stderr(io.StringIO()) as told:
        if by_command:
            argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out / "more"), "--use-cpu"]
            argv += ["--adapter", "lora", "--max-steps", "1"]
            for name, value in settings.items():
                argv += [f"--{name}"]
                argv += [] if value is True else map(str, value if isinstance(value, list) else [value])
            assert train_ep.main(argv) == 2
            return told.getvalue()
        with pytest.raises(ExpertMeshError) as error:
            expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn", adapter="lora", **settings)
        return str(error.value)


def test_another_adapter_is_refused_before_weights_are_read(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path
) -> None:
    train(ranks, 1, models["mixtral"], tiny_data, tmp_path, "--max-steps", 0)
    theirs = f"was trained with --lora-rank {RANK} --lora-alpha {ALPHA:g}, and this run has "
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(weights)
    nan = {next(iter(good)): torch.full_like(next(iter(good.values())), torch.nan)}
    refused: dict[str, dict[str, Any]] = {
        f"{theirs}--lora-rank 2 --lora-alpha {ALPHA:g}: give the former": {"lora_rank": 2},
        f"{theirs}--lora-rank {RANK} --lora-alpha 8: give the former": {"lora_alpha": 8},
        "--use-rslora: give the former, without --use-rslora": {"use_rslora": True},
        "has one there; --lora-targets must name the same": {"lora_targets": ["attention"]},
    }
    for words, more in refused.items():
        for by_command in (True, False):
            arguments = (by_command, models["mixtral"], tiny_data, tmp_path, more)
            (said,) = ranks.run(_begins, 1, *arguments, join_group=not by_command)
            assert f"--init-adapter {tmp_path / 'adapter'}: " in said, said
            assert words in said, said
    save_file(good | nan, weights)
    (said,) = ranks.run(_begins, 1, False, models["mixtral"], tiny_data, tmp_path, {})
    assert said == f"{weights}: tensor {next(iter(good))} has values that are not finite"


@pytest.mark.parametrize(("name", "form"), [("mixtral", "per-expert"), ("mixtral", "packed"), ("gpt_oss", "packed")])
def test_each_tensor_of_an_adapter_is_read_once(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, name: str, form: str
) -> None:
    train(ranks, 1, models[name], tiny_data, tmp_path, "--max-steps", 0, "--adapter-format", form)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    for reads in ranks.run(_reads_of_adapter, 2, models[name], tmp_path / "adapter"):
        assert reads == sorted(tensors)
    if (name, form) == ("mixtral", "packed"):
        # gate and up that share an A of twice the rank, which only their values tell
        b = next(key for key in tensors if key.endswith("experts.base_layer.lora_B.weight"))
        save_file(tensors | {b: torch.ones_like(tensors[b])}, weights)
        (said,) = ranks.run(_begins, 1, False, models[name], tiny_data, tmp_path, {})
        assert "experts.gate_up_proj has rank 8 there" in said
        assert "and not so" in said


def _reads_of_adapter(model: Path, adapter: Path) -> list[str]:
    """Names of the tensors that this rank reads to begin as an adapter, as often as it reads them."""
    names: list[str] = []

    class Counted:
        def __init__(self, path: Path, framework: str):
            self.path, self.file = path, safe_open(path, framework=framework)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            names.append(name)
            tensor: Tensor = self.file.get_tensor(name)
            return tensor

    begun: dict[str, Any] = {"adapter": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "init_adapter": str(adapter)}
    with mock.patch.object(adapter_files, "safe_open", Counted):
        expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn", **begun)
    return sorted(names)


@pytest.mark.filterwarnings("error:The following .*_pattern keys did not match")
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_a_directory_that_others_open(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path
) -> None:
    """With the base's tokenizer and chat template beside it, and a config that PEFT takes without a warning."""
    base = tmp_path / "base"
    shutil.copytree(models["mixtral"], base)
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    train(ranks, 1, base, tiny_data, tmp_path / "out", "--max-steps", 0)
    adapter = tmp_path / "out" / "adapter"
    theirs, ours = (AutoTokenizer.from_pretrained(path) for path in (base, adapter))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert not (adapter / "config.json").exists()
    assert relative_error(logits_by_peft(base, adapter), logits_of(base)) < 1e-6
    assert Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]) == base
