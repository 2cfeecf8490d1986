"""One of each thing that can be added, added from outside: by one call of a public function, and nothing else."""

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import expertmesh
from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.files.codes import CODES, Codes, register_codes
from expertmesh.checkpoints.files.encodings import encode
from expertmesh.checkpoints.files.tensors import Encoding
from expertmesh.moe.dispatch.dedup import OnceDispatcher
from expertmesh.moe.dispatch.dispatcher_entries import (
    DISPATCHERS,
    PLAIN_ENTRY,
    DispatcherEntry,
    resolve_dispatch,
)
from expertmesh.moe.dispatch.dispatcher_registry import register_dispatcher
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model, use_kernel
from expertmesh.moe.kernels.expert_kernels import choose_kernel
from expertmesh.moe.kernels.kernel_entries import KERNELS, KernelEntry
from expertmesh.moe.kernels.kernel_registry import AutoPlace, ExpertKernel, KernelNeeds, register_expert_kernel
from expertmesh.moe.kernels.loop import LOOP
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.registry import loaded
from expertmesh.sharding.parallelize.recompute import keep_products
from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.by_sample import BySample, apply_packing
from expertmesh.training.attention.complete_sequences import CompleteSequences
from expertmesh.training.attention.context_parallel_attention import apply_context_parallel
from expertmesh.training.attention.layer_kinds import LAYER_KINDS, register_layer_kind
from expertmesh.training.attention.packed_attention import OWN, choose_attention
from expertmesh.training.cluster.commands import main as plan_or_rehearse
from expertmesh.training.config.optimizers import OPTIMIZERS, OUR_OPTIMIZERS
from expertmesh.training.config.tasks import TASKS
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.data import formats
from expertmesh.training.data.batch import collate
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.formats import FORMATS, Format, conversation, register_format
from expertmesh.training.data.pairs import PAIRS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Pairs, Sample, Samples
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.engine.assembly import kernel_of
from expertmesh.training.metrics import METRICS, Chart, Metric, register_metric
from expertmesh.training.monitoring import meter
from expertmesh.training.optim.optimizer import register_optimizer
from expertmesh.training.planning import imbalance
from expertmesh.training.planning.planner import forecasts, kept
from expertmesh.training.report.page import write_report
from expertmesh.training.start.resume import changed_state
from expertmesh.training.tasks.registry import register_task
from tests import tables
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours, reference, sharded_model
from tests.distributed.whole_runs import Runs, assert_equal_weights, tell
from tests.encoded import change_config
from tests.families.configs import tiny_model as tiny_family
from tests.families.test_context_parallel import all_ranks, losses_and_grads
from tests.flags import last_of_each
from tests.moe.test_experts import KINDS, check, random
from tests.parity.case import Case, Figures, hf_model, random_samples
from tests.rounding import AFTER_ADAMW, OF_ADDED, OTHER_ORDER, error_beyond, gradient_errors, near, norm_of
from tests.tiers import tiered
from tests.tiny import save_tokenizer, tiny_config, tiny_mixtral
from tests.untrained import assert_same_bits, read

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "format": "register_format",
    "metric": "register_metric",
    "kernel": "register_expert_kernel(",
    "codes": "register_codes",
    "attention": "AttentionInterface",
    "layer kind": "register_layer_kind",
    "optimizer": "register_optimizer(",
    "task": "register_task(",
    "dispatcher": "register_dispatcher(",
}
"""By what they add: what the script in docs/how-to/extend.md calls."""
TABLES: tuple[Any, ...] = (
    FORMATS, formats._added, METRICS, CODES, LAYER_KINDS,
    ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
)  # fmt: skip
REGISTRIES: tuple[Any, ...] = (KERNELS, OPTIMIZERS, DISPATCHERS, TASKS)
"""With the tables, all that can be added to."""


def add(kind: str) -> dict[str, Any]:
    """Run the script of one's own that the page shows; its names."""
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if SCRIPTS[kind] in block]
    names: dict[str, Any] = {"__name__": "a_script_of_ones_own"}
    exec(code, names)
    return names


def registered() -> list[Any]:
    return [*map(copy, TABLES), *(registry.entries() for registry in REGISTRIES)]


@contextmanager
def restored() -> Iterator[None]:
    """What is registered within is forgotten afterwards."""
    before = [*map(copy, TABLES)]
    with contextlib.ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(registry.restored())
        try:
            yield
        finally:
            for table, content in zip(TABLES, before, strict=True):
                table.clear()
                (table.extend if isinstance(table, list) else table.update)(content)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with restored():
        yield


# Of each of them: what a page lists, what cannot be registered.


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("docs/reference/data-formats.md", tables.table_of_formats),
        ("docs/reference/data-formats.md", tables.table_of_traces),
        ("docs/reference/metrics.md", tables.table_of_metrics),
        ("docs/reference/data-formats.md", tables.table_of_pair_formats),
        ("docs/reference/data-formats.md", tables.table_of_label_formats),
        ("docs/explanation/kernels.md", tables.table_of_kernels),
        ("docs/explanation/checkpoints.md", tables.table_of_codes),
        ("docs/explanation/attention.md", tables.table_of_layer_kinds),
        ("moe/dispatch/README.md", tables.table_of_dispatchers),
    ],
)
def test_pages_list_what_there_is(page: str, table: Callable[[], str]) -> None:
    assert table() in (ROOT / page).read_text(encoding="utf-8")


def test_page_lists_all_optimizers() -> None:
    page = (ROOT / "docs" / "reference" / "optimizers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.split("| `--optim` |")[1].split("\n\n")[0], re.MULTILINE)
    assert rows == [entry.name for entry in OUR_OPTIMIZERS]


def test_what_entries_name_is_there() -> None:
    """It is imported where it is needed, and would be missed late."""
    entries = [entry for registry in REGISTRIES for entry in registry.entries()]
    for entry in entries:
        texts = [value for field in fields(entry) if isinstance(value := getattr(entry, field.name), str)]
        found: list[Any] = [loaded(text) for text in texts if re.fullmatch(r"[\w.]+:\w+", text)]
        assert found, entry.name
        assert all(callable(each) or isinstance(each, ExpertKernel) for each in found)


@pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if kind != "attention"])
def test_nothing_is_added_twice(kind: str) -> None:
    add(kind)
    added = registered()
    with pytest.raises(ValueError, match=r"already|another format is called 'ask/say'"):
        add(kind)
    assert registered() == added


def no_arguments() -> None:
    """What no entry's function is."""


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "format": [
        ({"before": "txet"}, "there is no format 'txet' to come before; known: messages, sharegpt, "),
        ({"name": "alpaca"}, "another format is called 'alpaca'"),
        ({"columns": ("output", "instruction")}, r"another format has the columns \('instruction', 'output'\)"),
        ({"columns": ("question", "answer", "why")}, "'mine' would never be found after 'question/answer'"),
        ({"written": ""}, "the format 'mine' has no written"),
        ({"columns": ()}, "the format 'mine' has no columns"),
        ({"columns": "ask"}, "the format 'mine': columns is 'ask', not a tuple, each a text"),
        ({"read": no_arguments}, "the format 'mine': read is .*, not a function of 2 arguments"),
        ({"unread": None}, "the format 'mine': unread is None, not a tuple, each a text"),
        ({"version": "1"}, "the format 'mine': version is '1', not a whole number"),
    ],
    "metric": [
        ({"name": "loss"}, "has 'loss' already"),
        ({"name": "step"}, "has 'step' already"),
        ({"meaning": ""}, "the metric 'mine' has no meaning"),
        ({"chart": Chart("Loss")}, "the chart 'Loss' has two lines already"),
        ({"before": "last"}, "no metric 'last' to come before; known: epoch, steps, "),
        ({"of": "step"}, "the metric 'mine': of is 'step', not one of steps, evaluation"),
        ({"over_ranks": "min"}, "the metric 'mine': over_ranks is 'min', not one of alike, sum, mean, max"),
        ({"value": no_arguments}, "the metric 'mine': value is .*, not a function of 1 argument"),
        ({"chart": "Mine"}, "the metric 'mine': chart is 'Mine', not of type Chart or None"),
    ],
    "kernel": [
        ({"name": "loop"}, "--expert-kernel loop is already registered"),
        ({"name": "auto"}, "--expert-kernel auto is already registered"),
        ({"name": "a b"}, "--expert-kernel 'a b': a name may have letters"),
        ({"how": ""}, "--expert-kernel mine: has no how"),
        ({"implementation": print}, "mine: implementation is .*, not of type ExpertKernel"),
        ({"product": None}, "mine: has neither product nor fused"),
        ({"joined": print}, "mine: has joined, which is beside fused"),
        ({"product": None, "fused": print, "beside_fp8": True}, "mine: has no product"),
        ({"recorded_as": "lop"}, "mine: is recorded_as lop; known are loop, torch-grouped"),
        ({"product": lambda x, weight: x}, "mine: product is .*, not a function of 3 arguments"),
        ({"fused": lambda x, counts, w1, v1, w2: x}, "mine: fused is .*, not a function of 5 arguments and needs_out"),
        ({"check": None}, "--expert-kernel mine: check is None, not a function of 1 argument"),
        ({"auto": no_arguments}, "--expert-kernel mine: auto is .*, not a function of 1 argument"),
        ({"where": None}, "--expert-kernel mine: where is None, not a text"),
        ({"beside_fp8": "no"}, "--expert-kernel mine: beside_fp8 is 'no', not True or False"),
    ],
    "codes": [
        ({"stored_dtype": "I16"}, "the codes 'mine' are 1 a byte of I16; what can be read is 1 or 2, of F8_E4M3"),
        ({"quant_methods": "mine"}, "the codes 'mine': quant_methods is 'mine', not a tuple, each a text"),
    ],
    "layer kind": [
        ({"sees": "all"}, "layers 'mine': sees is 'all', not one of itself, past, window, mask, state"),
        ({"mask": 7}, "layers 'mine': mask is 7, not a function or None"),
        ({"name": ""}, "the layer kind has no name"),
    ],
    "optimizer": [
        ({"help": ""}, "--optim mine: has no help"),
        ({"help": None}, "--optim mine: help is None, not a text"),
        ({"name": 7}, "--optim 7: name is 7, not a text"),
        ({"heeds": "weight_decay"}, "--optim mine: heeds is 'weight_decay', not a tuple, each a text"),
        ({"heeds": ("wd",)}, "--optim mine: there is no setting wd"),
        ({"dry_run": {"shampoo_strat": 1}}, "--optim mine: there is no setting shampoo_strat"),
        ({"parameters_in_bf16": 1}, "--optim mine: parameters_in_bf16 is 1, not True or False"),
        ({"state_bytes": no_arguments}, "--optim mine: state_bytes is .*, not a function of 2 arguments"),
        ({"takes_matrices": "all"}, "--optim mine: takes_matrices is 'all', not True or False"),
        ({"name": "adamw_torch"}, "--optim adamw_torch: adamw_torch_fused already has one of its names"),
        ({"aliases": ("muon",)}, "--optim mine: muon already has one of its names"),
        ({"build": None}, "--optim mine: build is None, not a text or a function of 3 arguments"),
        ({"occasional": no_arguments}, "--optim mine: occasional is .*, not a text or a function of 1 argument"),
    ],
    "task": [
        ({"name": "dpo"}, "--task dpo is already registered"),
        ({"help": ""}, "--task mine: has no help"),
        ({"records": "texts"}, "--task mine: records is 'texts', not of type RecordKind"),
        ({"heeds": ("preference_gamma",)}, "--task mine: there is no setting preference_gamma"),
        ({"has_reference": None}, "--task mine: has_reference is None, not True or False"),
        ({"task": no_arguments}, "--task mine: .* is no class made of Task"),
    ],
    "dispatcher": [
        ({"name": "plain", "without_nodes": "plain"}, "--dispatch plain is already registered"),
        ({"name": "auto", "without_nodes": "auto"}, "--dispatch auto is already registered"),
        ({"how": ""}, "--dispatch mine: has no how"),
        ({"by_nodes": True}, "mine: is by_nodes, and mine without_nodes is none that is not"),
        ({"by_nodes": True, "without_nodes": "node"}, "mine: is by_nodes, and node without_nodes is none"),
        ({"without_nodes": "rank"}, "mine: is not by_nodes, and rank without_nodes"),
        ({"sums": None}, "--dispatch mine: sums is None, not True or False"),
        ({"auto": no_arguments}, "--dispatch mine: auto is .*, not a function of 1 argument"),
        ({"elsewhere": "single"}, "--dispatch mine: elsewhere is 'single', not a tuple, each a text"),
        ({"make": no_arguments}, "--dispatch mine: make is .*, not a text or a function of 1 argument"),
        ({"elsewhere": ("deepep",)}, "--dispatch mine: node already has one of its names"),
        ({"name": "deepep", "without_nodes": "deepep"}, "--dispatch deepep: node already has one of its names"),
    ],
}  # fmt: skip
"""By what is added, changes of the page's entry, or of what is given beside it, and what is said of them."""


def of_page(kind: str) -> tuple[Callable[..., None], Any, dict[str, Any]]:
    """(register, entry, what is given beside it) of a page's script, the entry called mine."""
    entry: Any
    with restored():
        names = add(kind)
        match kind:
            case "format":
                (entry,) = (known for known in FORMATS if known.name == "ask/say")
                return register_format, replace(entry, name="mine"), {"before": "text", "version": 1}
            case "metric":
                (entry,) = (known for known in METRICS if known.name == "bits_per_token")
                return register_metric, replace(entry, name="mine"), {"before": None}
            case "kernel":
                entry = replace(KERNELS.get("per-row"), name="mine", recorded_as="loop")
                return register_expert_kernel, entry, {}
            case "codes":
                return register_codes, type("Mine", (names["Int8"],), {"name": "mine"}), {}
            case "layer kind":
                return register_layer_kind, replace(LAYER_KINDS["capped_attention"], name="mine"), {}
            case "optimizer":
                return register_optimizer, replace(OPTIMIZERS.get("sgd"), name="mine"), {}
            case "task":
                return register_task, replace(TASKS.get("simpo"), name="mine"), {}
            case _:
                entry = replace(DISPATCHERS.get("last-first"), name="mine", without_nodes="mine")
                return register_dispatcher, entry, {}


@pytest.mark.parametrize(
    ("kind", "changes", "wrong"),
    [(kind, changes, wrong) for kind, cases in WRONG.items() for changes, wrong in cases],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_cannot_be_added(kind: str, changes: dict[str, Any], wrong: str) -> None:
    """What lacks something, is not of its type, or does not go together is refused where it is registered."""
    register, entry, given = of_page(kind)
    beside = {name: changes.get(name, value) for name, value in given.items()}
    own = {name: value for name, value in changes.items() if name not in given}
    if kind == "codes":
        entry = type("Mine", (entry,), own)()
    elif kind == "kernel":
        of_code = {name: own.pop(name) for name in {field.name for field in fields(ExpertKernel)} & own.keys()}
        entry = replace(entry, **{"implementation": replace(entry.code, **of_code), **own})
    else:
        entry = replace(entry, **own)
    before = registered()
    with pytest.raises(ValueError, match=wrong):
        register(entry, **beside)
    assert registered() == before


def test_what_are_no_codes() -> None:
    no_object: Any = Codes
    with pytest.raises(ValueError, match="no object of a class made of Codes"):
        register_codes(no_object)
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Codes,), {"name": "half"})()


# A data format.


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    return tokenizer


def read_data(tmp_path: Path, tokenizer: Any, **row: Any) -> Samples:
    file, content = tmp_path / "data.jsonl", json.dumps(row) + "\n"
    if not (file.exists() and file.read_text() == content):
        file.write_text(content)
    return load_samples("--dataset", [str(file)], tokenizer, DataOptions(max_seq_length=64), seed=0)


def trained_text(tokenizer: Any, sample: Sample) -> str:
    trained = [token for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True) if is_trained]
    return str(tokenizer.decode(trained)).strip()


def test_a_data_format(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ExpertMeshError, match=r"has the columns ask, say; it needs one of: .*; text;"):
        read_data(tmp_path, tokenizer, ask="hi", say="yo")
    add("format")

    samples = read_data(tmp_path, tokenizer, ask="hi", say="yo", system="Be brief.")
    assert samples.origins[0].format == "ask/say"
    (sample,) = samples
    as_messages = [("system", "Be brief."), ("user", "hi"), ("assistant", "yo")]
    messages = [{"role": role, "content": text} for role, text in as_messages]
    (expected,) = read_data(tmp_path, tokenizer, messages=messages)
    assert (sample.tokens, sample.is_trained) == (expected.tokens, expected.is_trained)
    assert trained_text(tokenizer, sample) == "yo</s>"

    with pytest.raises(ExpertMeshError, match=r"it needs one of: .*; ask \+ say; text;"):
        read_data(tmp_path, tokenizer, say="yo")
    with pytest.raises(ExpertMeshError, match="has images; give --images"):
        read_data(tmp_path, tokenizer, ask="hi", say="yo", images=["a.png"])


def test_what_is_cached_was_read_by_the_same_format(tmp_path: Path, tokenizer: Any) -> None:
    def answer(read: Any, version: int) -> str:
        with restored():
            added = Format("ask/say", ("ask", "say"), read, (), "`ask`, `say`", "us")
            register_format(added, before="text", version=version)
            (sample,) = read_data(tmp_path, tokenizer, ask="hi", say="yo")
        return trained_text(tokenizer, sample)

    def upside_down(row: Any, columns: Any) -> Any:
        turns = [{"role": "user", "content": row["say"]}, {"role": "assistant", "content": row["ask"]}]
        return conversation(row, columns, turns, [None, None])

    def upright(row: Any, columns: Any) -> Any:
        return upside_down({"ask": row["say"], "say": row["ask"]}, columns)

    assert answer(upside_down, version=1) == answer(lambda *_: pytest.fail("is cached"), version=1) == "hi</s>"
    assert answer(upright, version=2) == "yo</s>"


# A metric.


def metric(name: str, value: Callable[..., Any], over_ranks: Any = "alike", **more: Any) -> Metric:
    of: Any = more.pop("of", "steps")
    return Metric(name=name, unit="", meaning="of this test", of=of, value=value, over_ranks=over_ranks, **more)


def add_metrics() -> None:
    """The page's, some of the rank alone, and one of evaluations."""
    add("metric")
    for how in ("sum", "mean", "max"):
        register_metric(metric(f"rank_{how}", lambda _: dist.get_rank() + 1, how, in_trainer=how == "sum"))
    chart = Chart("Bits per token", label="evaluation")
    register_metric(metric("eval_bits", lambda found: found.loss / math.log(2), of="evaluation", chart=chart))


def train_with_metrics(argv: list[str]) -> tuple[int, str]:
    with restored(), contextlib.redirect_stdout(io.StringIO()) as out:
        add_metrics()
        return train_ep.main(argv), out.getvalue()


def read_report(page: Path) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="run">(.*?)</script', page.read_text(), re.DOTALL)
    assert data is not None
    found: dict[str, Any] = json.loads(data[1])
    return {**found["runs"][0], "charts": found["charts"]}


def test_a_metric(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    argv += ["--max-steps", "2", "--eval-ratio", "0.2", "--report-to", "tensorboard", "--no-export", "--ep-size", "2"]
    (code, console), _ = ranks.run(train_with_metrics, 2, argv, join_group=False)
    assert code == 0, console

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = [[line for line in lines if name in line] for name in ("loss", "eval_loss")]
    assert len(steps) == 2
    assert [line["bits_per_token"] for line in steps] == pytest.approx([line["loss"] / math.log(2) for line in steps])
    assert [(line["rank_sum"], line["rank_mean"], line["rank_max"]) for line in steps] == [(3, 1.5, 2)] * 2
    assert [line["eval_bits"] for line in evaluations] == [line["eval_loss"] / math.log(2) for line in evaluations]
    for line in steps:
        assert any(text.endswith(f"  {line['bits_per_token']:.3f} bits") for text in console.splitlines())

    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    events.Reload()
    scalars = [scalar.value for scalar in events.Scalars("bits_per_token")]
    assert scalars == pytest.approx([line["bits_per_token"] for line in steps])

    content = read_report(tmp_path / "report.html")
    assert content["curves"]["bits_per_token"]["mean"] == near(scalars)
    (chart,) = [chart for chart in content["charts"] if chart["title"] == "Bits per token"]
    assert [line["name"] for line in chart["series"]] == ["bits_per_token", "eval_bits"]
    # made again by who does not know these metrics, it still has their curves, each by itself
    again = read_report(write_report(tmp_path))
    assert again["curves"].items() > content["curves"].items()
    shown = {line["name"]: chart["title"] for chart in again["charts"] for line in chart["series"]}
    assert (shown["bits_per_token"], shown["rank_sum"]) == ("bits_per_token", "rank_sum")


def test_a_metric_of_a_trainer(tiny_model: Path, tmp_path: Path) -> None:
    add_metrics()
    engine = expertmesh.load(str(tiny_model), use_cpu=True, attn_implementation="eager")
    rows = Dataset.from_list([{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 8)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=0
    )
    trainer = expertmesh.Trainer(engine, arguments, default_data_collator, rows)
    trainer.train()
    dist.destroy_process_group()
    (line,) = [line for line in trainer.state.log_history if "loss" in line]
    assert line["bits_per_token"] == pytest.approx(line["loss"] / math.log(2), rel=1e-3)
    assert line["rank_sum"] == 1
    assert not {"rank_max", "tokens_per_second", "expert_tokens"} & line.keys()


def test_a_metric_of_imbalance(tmp_path: Path) -> None:
    """`plan --imbalance` asks the entry."""
    register_metric(metric("busiest", lambda interval: 25, imbalance=lambda percent: 1 + percent / 100))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "busiest": 25}))
    assert imbalance.read_imbalance(str(tmp_path / "metrics.jsonl")) == 1.25


@pytest.mark.parametrize(
    ("over_ranks", "value", "wrong"),
    [
        ("alike", "much", "'much', not a number, None, or a list of them"),
        ("alike", torch.tensor(1.0), r"tensor\(1.\), not a number, None, or a list of them"),
        ("alike", [1, "much"], r"\[1, 'much'\], not a number, None, or a list of them"),
        ("sum", "much", "'much', not a number or None"),
        ("max", [1, 2], r"\[1, 2\], not a number or None"),
    ],
)
def test_a_metric_whose_value_cannot_be_logged(over_ranks: Any, value: Any, wrong: str) -> None:
    METRICS.clear()
    register_metric(metric("mine", lambda interval: value, over_ranks))
    with pytest.raises(ValueError, match=f"the metric 'mine': its value is {wrong}"):
        meter.measured("steps", None, torch.device("cpu"))


# An expert kernel.


def computing(entry: KernelEntry, name: str, **changes: Any) -> KernelEntry:
    """Another entry, whose kernel is changed."""
    return replace(entry, name=name, implementation=replace(entry.code, **changes))


def per_row() -> KernelEntry:
    add("kernel")
    return KERNELS.get("per-row")


@pytest.fixture
def mixtral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config alone, and no figures kept of it."""
    tiny_config(num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(kept, "cache_directory", lambda name: tmp_path / name)
    return tmp_path


def figures_of(command: str, model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    common = ["--gpus", "2", "--ep-size", "2", "--tp-size", "1", "--max-seq-length", "32", "--imbalance", "1", "--json"]
    one_size = ["--per-device-train-batch-size", "1", "--gradient-checkpointing", "none", "--bf16"]
    assert plan_or_rehearse([command, "--model", str(model), *last_of_each([*common, *one_size, *flags])]) == 0
    figures = json.loads(capsys.readouterr().out)
    return [{name: figure for name, figure in each.items() if name != "launch"} for each in figures]


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    return " ".join(capsys.readouterr().out.split())


def test_an_expert_kernel_computes_as_transformers() -> None:
    per_row()
    for make, _, _ in KINDS.values():
        check(random(make()), "per-row")


def test_an_expert_kernel_is_chosen_and_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "m", "--dataset", "d", "--expert-kernel", "per-row"]
    with pytest.raises(ExpertMeshError, match="--expert-kernel per-row is unknown; use auto, loop, torch-grouped"):
        parse_config(flags)
    kernel = per_row()
    model = build_model(tiny_config())
    choice = kernel_of(parse_config(flags), model, "cpu")
    assert choice.kernel is kernel
    assert choice.why == "asked for"
    assert "Expert kernel: auto, loop, torch-grouped, megablocks-sparse, quack, per-row" in help_text(capsys)
    with pytest.raises(ExpertMeshError, match=r"use auto, loop, torch-grouped, megablocks-sparse, quack, per-row$"):
        parse_config([*flags[:-1], "per-rwo"])
    with pytest.raises(ExpertMeshError, match="brings its own GEMMs; leave out --expert-kernel per-row"):
        parse_config([*flags, "--bf16", "--expert-precision", "fp8"])
    use_kernel(model, kernel)
    with pytest.raises(ExpertMeshError, match="per-row recomputes them; use quack, torch-grouped or loop"):
        keep_products(model, 1)


def test_auto_takes_an_expert_kernel_for_what_it_can_compute() -> None:
    kernel = per_row()

    def check_is_narrow(needs: KernelNeeds) -> None:
        if any(width > 64 for _, width in needs.widths):
            raise ExpertMeshError("--expert-kernel narrow needs expert widths of at most 64")

    narrow = computing(
        kernel,
        "narrow",
        check=check_is_narrow,
        auto=lambda needs: AutoPlace(5, "experts are narrow") if needs.device_type == "cpu" else None,
    )
    register_expert_kernel(narrow)
    choice = choose_kernel("auto", KernelNeeds("cpu", torch.float32, ((64, 64),)))
    assert (choice.kernel, choice.why) == (narrow, "auto: experts are narrow")
    assert choose_kernel("auto", KernelNeeds("cpu", torch.float32, ((64, 128),))).name == "loop"
    assert choose_kernel("auto", KernelNeeds("cuda", torch.float32, ((64, 64),))).name == "loop"
    with pytest.raises(ExpertMeshError, match="narrow needs expert widths of at most 64"):
        choose_kernel("narrow", KernelNeeds("cpu", torch.float32, ((64, 128),)))
    register_expert_kernel(computing(narrow, "fused", product=None, fused=LOOP.fused))
    wrong = r"fused computes plain SwiGLU only.*; use narrow, per-row, quack, torch-grouped or loop"
    with pytest.raises(ExpertMeshError, match=wrong):
        choose_kernel("fused", KernelNeeds("cpu", torch.float32, ((64, 64),), is_swiglu=False))


def test_an_expert_kernel_is_forecast(mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {name: figures_of("plan", mixtral, capsys, "--expert-kernel", name) for name in ("loop", "torch-grouped")}
    (dry_loop,) = figures_of("rehearse", mixtral, capsys, "--expert-kernel", "loop")
    kept = set(mixtral.rglob("*.json"))
    kernel = per_row()
    # it keeps a copy in bf16 of each row's three matrices until backward: 32 tokens of two experts each
    copies = 32 * 2 * 3 * (32 * 48) * 2
    own = figures_of("plan", mixtral, capsys, "--expert-kernel", "per-row")
    (dry,) = figures_of("rehearse", mixtral, capsys, "--expert-kernel", "per-row")
    assert own[0]["memory"]["total"] - base["loop"][0]["memory"]["total"] > copies
    assert dry["memory"]["peak"] - dry_loop["memory"]["peak"] > copies
    # another kernel of the same name may compute otherwise
    assert set(mixtral.rglob("*.json")) == kept

    # one that no CPU has, and that need not be installed where a run is planned
    for command, same in (("plan", "bytes_a_step"), ("rehearse", "needed")):
        names = "torch-grouped", "quack"
        grouped, quack = (figures_of(command, mixtral, capsys, "--expert-kernel", name)[0] for name in names)
        assert quack[same] == grouped[same]
        assert quack != grouped
    fp32 = ["--gpus", "2", "--ep-size", "2", "--max-seq-length", "32", "--expert-kernel", "quack"]
    assert plan_or_rehearse(["rehearse", "--model", str(mixtral), *fp32]) == 2
    assert "quack multiplies in bf16" in capsys.readouterr().err

    # one that auto takes on a GPU, and that no CPU has
    for_gpus = computing(
        replace(kernel, recorded_as="loop"),
        "for-gpus",
        auto=lambda needs: AutoPlace(40, "for GPUs") if needs.device_type == "cuda" else None,
    )
    assert figures_of("plan", mixtral, capsys) == base["torch-grouped"]
    register_expert_kernel(for_gpus)
    assert figures_of("plan", mixtral, capsys) == base["loop"]


# An encoding of published checkpoints.


def save_int8(path: Path) -> dict[str, Tensor]:
    """A model whose experts are in int8 with a scale per row; what its tensors stand for, calculated here."""
    model: Any = tiny_family("qwen3_moe", seed=1)
    model.to(torch.bfloat16).save_pretrained(path)
    (file,) = path.glob("*.safetensors")
    stored, wide = {}, {}
    for name, tensor in load_file(file).items():
        stored[name] = wide[name] = tensor
        if ".mlp.experts." in name:
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
            stored[name], stored[f"{name}_row_scale"] = (tensor.float() / scale).round().to(torch.int8), scale
            wide[name] = (stored[name].float() * scale).bfloat16()
    save_file(stored, file, {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "int8_by_row"})
    return wide


def assert_equal_models(path: Path, expected: dict[str, Tensor]) -> None:
    found = read(path)
    assert found.keys() == expected.keys()
    assert_same_bits(found, expected)


def checkpoints_command(*arguments: object) -> int:
    return checkpoints_main([str(argument) for argument in arguments])


def test_an_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, shards = tmp_path / "source", tmp_path / "shards"
    wide = save_int8(source)
    assert checkpoints_command("export", source, tmp_path / "refused") == 2
    assert "quantized by 'int8_by_row'; what can be read is fp8 or mxfp4" in " ".join(capsys.readouterr().err.split())
    add("codes")

    assert checkpoints_command("export", source, tmp_path / "wide") == 0
    assert_equal_models(tmp_path / "wide", wide)
    assert checkpoints_command("inspect", source) == 0
    assert "as int8 with scales per block of 1 x " in capsys.readouterr().out
    # codes as they are in EP shards, and back
    assert checkpoints_command("convert", source, shards, "--ep-size", 2) == 0
    assert checkpoints_command("export", shards, tmp_path / "again", "--export-encoding", "source") == 0
    assert_equal_models(tmp_path / "again", read(source))
    assert checkpoints_command("verify", source, shards) == 0

    # values that it did not have are quantized anew
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = encode(values, Encoding("INT8", (1, 8), "F32"), None)
    expected = values.float().abs().amax(dim=1, keepdim=True) / 127
    assert torch.equal(torch.from_numpy(scales).view(torch.float32), expected)
    assert torch.equal(torch.from_numpy(codes).view(torch.int8), (values.float() / expected).round().to(torch.int8))

    broken = read(source)
    name = next(name for name in broken if name.endswith("_row_scale"))
    del broken[name]
    save_file(broken, next(source.glob("*.safetensors")), {"format": "pt"})
    assert checkpoints_command("export", source, tmp_path / "broken") == 2
    assert f"its scales {name} are missing" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_an_encoding_in_training(ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    """A run from codes gives what one from the values gives, to the bit, and its export has the codes again of what was
    not trained."""
    wide, source = tmp_path / "wide", tmp_path / "source"
    save_int8(source)
    save_tokenizer(source)
    add("codes")
    assert checkpoints_command("export", source, wide) == 0
    argv = ["--dataset", str(tiny_data), "--use-cpu", "--max-steps", "1", "--ep-size", "2"]
    argv += ["--freeze", "experts", "--export-encoding", "source"]
    for model, out in ((source, "codes"), (wide, "values")):
        own = ["--model", str(model), "--output-dir", str(tmp_path / out)]
        assert ranks.run(train_with_codes, 2, [*argv, *own], join_group=False) == [0, 0]
    codes, values, before = (read(path) for path in (tmp_path / "codes/hf", tmp_path / "values/hf", source))
    for name, tensor in codes.items():
        is_expert = ".mlp.experts." in name
        assert torch.equal(tensor, before[name] if is_expert else values[name]), name
    assert not torch.equal(codes["lm_head.weight"], before["lm_head.weight"]), "nothing was trained"


def train_with_codes(argv: list[str]) -> int:
    with restored():
        add("codes")
        return train_ep.main(argv)


# Attention: a function, which transformers' registry takes, and a kind of layer.

PACKED = [random_samples([9, 4, 6]), random_samples([11, 7])]
LossAndGrads = tuple[float, dict[str, Tensor]]


def build_with(attention: str, changes: dict[str, Any], packing: bool, cp_size: int = 1) -> Any:
    config = tiny_config(**changes)
    model = build_model(config, choose_attention(attention, packing, config))
    if packing:
        apply_packing(model)
    if cp_size > 1:
        apply_context_parallel(model, cp_size, packing)
    return model


def shared_by_ranks(attention: str, changes: dict[str, Any]) -> tuple[float, dict[str, Tensor], int]:
    """This rank's part of the loss and gradients of packed samples, and its modules with complete sequences."""
    with restored():
        add("attention")
        add("layer kind")
        model = build_with(attention, changes, packing=True, cp_size=dist.get_world_size())
        complete = [part for part in model.modules() if isinstance(part.forward, CompleteSequences)]
        ((loss, grads),) = losses_and_grads(model, tiny_mixtral(seed=1, **changes), [collate(PACKED, all_ranks())])
    return loss, grads, len(complete)


def on_two_ranks(ranks: RankPool, attention: str, changes: dict[str, Any]) -> LossAndGrads:
    (loss, grads, complete), (other_loss, other_grads, other) = ranks.run(shared_by_ranks, 2, attention, changes)
    assert complete == other == 0, "sequences are divided"
    return loss + other_loss, {name: grad + other_grads[name] for name, grad in grads.items()}


def alone(attention: str, changes: dict[str, Any]) -> LossAndGrads:
    """Loss and gradients of transformers' own model, by that attention: each sample by itself."""
    model = tiny_mixtral(seed=1, **changes).eval()
    model.set_attn_implementation(attention)
    losses = []
    for sample in (sample for row in PACKED for sample in row):
        tokens = torch.tensor([sample.tokens])
        targets = tokens[0, 1:].masked_fill(~torch.tensor(sample.is_trained)[1:], -100)
        losses.append(cross_entropy(model(input_ids=tokens).logits[0, :-1], targets, reduction="sum"))
    loss = torch.stack(losses).sum()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss.detach()), grads


def check_attention(found: LossAndGrads, want: LossAndGrads) -> None:
    """Loss and the gradients of what is no expert's: those have another layout here."""
    assert found[0] == near(want[0])
    # matrices that tensor parallelism would divide by columns are held transposed
    grads = {name: grad.T if "o_proj" in name else grad for name, grad in want[1].items() if ".experts." not in name}
    errors = gradient_errors({name: found[1][name] for name in grads}, grads)
    assert max(errors.values()) <= OTHER_ORDER, errors


def test_an_attention_function(ranks: RankPool) -> None:
    """Packed, and packed with sequences on two ranks, as by transformers with each sample alone."""
    add("attention")
    want, other = alone("capped", {}), alone("eager", {})
    assert abs(want[0] - other[0]) > 1e-4 * other[0], "it is another attention"
    model = build_with("capped", {}, packing=True)
    (found,) = losses_and_grads(model, tiny_mixtral(seed=1), [collate(PACKED)])
    check_attention(found, want)
    check_attention(on_two_ranks(ranks, "capped", {}), want)

    # without a mask nothing keeps samples apart in it
    del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["capped"]
    AttentionInterface.register("capped", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    model = build_with("capped", {}, packing=True)
    assert sum(isinstance(part.forward, BySample) for part in model.modules()) == 2
    (found,) = losses_and_grads(model, tiny_mixtral(seed=1), [collate(PACKED)])
    check_attention(found, other)


def test_a_kind_of_attention(ranks: RankPool) -> None:
    """Before it is known, its layers run sample by sample, and with complete sequences; then as any other's."""
    changes = {"layers_block_type": ["capped_attention"] * 2}
    want = alone("eager", {})

    def check(by_sample: int, chosen: str) -> None:
        config = tiny_config(**changes)
        assert choose_attention("auto", True, config) == chosen
        model = build_with("auto", changes, packing=True)
        assert sum(isinstance(part.forward, BySample) for part in model.modules()) == by_sample
        split = build_with("auto", changes, packing=True, cp_size=2)
        assert sum(isinstance(part.forward, CompleteSequences) for part in split.modules()) == by_sample
        (found,) = losses_and_grads(model, tiny_mixtral(seed=1), [collate(PACKED)])
        check_attention(found, want)

    check(2, "sdpa")
    add("layer kind")
    check(0, OWN)
    check_attention(on_two_ranks(ranks, "auto", changes), want)


def test_figures_with_attention_from_outside_are_not_kept() -> None:
    """No digest of sources, by which kept figures are named, includes its code."""

    def is_kept(attention: str) -> bool:
        config = TrainConfig(model="any", dataset=["any"], attn_implementation=attention)
        return not forecasts.has_code_from_outside(config)

    assert set(forecasts.KNOWN_ATTENTION) <= {"auto", "eager", *ALL_ATTENTION_FUNCTIONS}
    assert all(is_kept(attention) for attention in forecasts.KNOWN_ATTENTION)
    assert not is_kept("capped")
    add("layer kind")
    assert not is_kept("auto")


# A task, whose loss and gradients are trl's.


def train_on_pairs(argv: list[str]) -> tuple[int, str, str]:
    """By SGD, whose first update is the gradient."""
    with restored():
        add("optimizer")
        add("task")
        return tell(argv)


def by_trl(model: Path, data: Path) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of trl's SimPO of all pairs on transformers' model, its gradients, and the weights."""
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    pairs = load_samples("--dataset", [str(data)], AutoTokenizer.from_pretrained(model), DataOptions(64, kind=PAIRS), 0)
    assert isinstance(pairs, Pairs)
    theirs, means = AutoModelForCausalLM.from_pretrained(model), []
    for side in range(2):
        for sample in (pairs.entry(number)[side] for number in range(len(pairs))):
            tokens, trained = torch.tensor([sample.tokens]), torch.tensor([sample.is_trained])
            logits, labels = theirs(input_ids=tokens).logits, tokens.masked_fill(~trained, -100)
            means.append(cpo.get_batch_logps(logits, labels, average_log_prob=True))
    settings = {"loss_type": "simpo", "simpo_gamma": 0.5, "beta": 2.0, "alpha": 0.0, "label_smoothing": 0.0}
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **settings)
    losses, *_ = cpo.cpo_loss(trainer, *torch.cat(means).chunk(2))
    losses.mean().backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    return float(losses.mean().detach()), grads, theirs.state_dict()


@pytest.mark.parametrize(
    "layout", tiered(["--ep-size 2 --packing"], slow=["--cp-size 2", "--pp-size 2", "--tp-size 2"])
)
def test_a_task(ranks: RankPool, tiny_model: Path, tmp_path: Path, layout: str) -> None:
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"say {i}:", "chosen": " hello" * (i + 1), "rejected": " no" * (5 - i)} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--task simpo --preference-beta 2 --optim sgd --learning-rate 1 --lr-scheduler-type constant --max-steps 1"
    batches = "--max-grad-norm 0 --global-batch-size 4 --save-steps 0 --max-seq-length 64"
    ended = Runs(ranks, tiny_model, data, tmp_path)(2, f"{flags} {batches} {layout}", call=train_on_pairs)
    loss, grads, before = by_trl(tiny_model, data)
    (line,) = ended.lines("loss")
    assert line["loss"] == near(loss)
    assert line["grad_norm"] == near(norm_of(grads))
    found = AutoModelForCausalLM.from_pretrained(ended.out / "hf").state_dict()
    for name, grad in grads.items():
        rounding = OF_ADDED * float(before[name].norm())
        assert error_beyond(rounding, before[name] - found[name], grad) < OTHER_ORDER, name


# An optimizer, whose updates are torch's own.


def train_with_sgd(model: Path, rows: Any, resume: bool, out: Path) -> None:
    """Three steps, saved before the last one; or that one alone."""
    with restored():
        add("optimizer")
        size = dist.get_world_size()
        settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.1, "max_grad_norm": 0.5}
        engine = expertmesh.load(str(model), ep_size=size, use_cpu=True, **settings)
        if resume:
            engine.resume(out.parent / "saved")
        for number, rows_BS in list(enumerate(rows))[2 if resume else 0 :]:
            if number == 2 and not resume:
                engine.save(out.parent / "saved")
            mine_BS = rows_BS[engine.data_rank :: size]
            engine.step({"input_ids": mine_BS, "labels": mine_BS, "attention_mask": torch.ones_like(mine_BS)})
        engine.export(out)


def with_torchs_sgd(model: Path, rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of transformers' own model before and after three steps of torch's own optimizer, in one process."""
    theirs = AutoModelForCausalLM.from_pretrained(model)
    before = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    for rows_BS in rows:
        optimizer.zero_grad()
        theirs(input_ids=rows_BS, labels=rows_BS).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    return before, theirs.state_dict()


def test_an_optimizer(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """Updates are those of torch on whole tensors, on two ranks and over a resume on one."""
    rows = torch.randint(3, 300, (3, 4, 12), generator=torch.Generator().manual_seed(0))
    ranks.run(train_with_sgd, 2, tiny_model, rows, False, tmp_path / "two")
    ranks.run(train_with_sgd, 1, tiny_model, rows, True, tmp_path / "one")
    before, expected = with_torchs_sgd(tiny_model, rows)
    for out in ("two", "one"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / out).state_dict()
        assert found.keys() == expected.keys()
        changes, wanted = ({n: weights[n] - before[n] for n in before} for weights in (found, expected))
        for name, change in wanted.items():
            # after three steps; and what is rounded of the weight that a change is added to
            rounding = OF_ADDED * (norm_of(wanted) + float(before[name].norm()))
            assert error_beyond(rounding, changes[name], change) < AFTER_ADAMW, (out, name)


def test_an_optimizer_is_known_everywhere(mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(mixtral), "--dataset", "d", "--optim", "sgd"]
    with pytest.raises(ExpertMeshError, match=r"--optim: invalid choice: 'sgd' \(choose from .*muon.*shampoo"):
        parse_config(flags)
    with pytest.raises(ExpertMeshError, match=r"--optim sgd is unknown; use adamw_torch_fused, .*, shampoo"):
        TrainConfig(model="m", optim="sgd")
    add("optimizer")
    assert OPTIMIZERS.names() == (*(entry.name for entry in OUR_OPTIMIZERS), "sgd")

    config = parse_config([*flags, "--adam-beta1", "0.8", "--weight-decay", "0.1"])
    (told,) = config.without_effect
    assert told.startswith("--adam-beta1 0.8 has no effect without --optim adamw_torch_fused or ")
    assert "sgd: SGD with momentum" in help_text(capsys)
    (said,) = changed_state(config, replace(config, optim="muon"))
    assert "that run had --optim sgd, this one has --optim muon" in said

    # 4 bytes of state for each parameter in fp32, where AdamW has 8
    asked = ["--gpus", "2", "--ep-size", "2", "--max-seq-length", "16", "--per-device-train-batch-size", "1"]
    asked += ["--gradient-checkpointing", "none", "--optim", "sgd", *flags[:2], "--json"]
    state = []
    for command, more, name in (("plan", ["--tp-size", "1"], "optimizer"), ("rehearse", [], "state")):
        assert plan_or_rehearse([command, *asked, *more]) == 0
        (found, *_) = json.loads(capsys.readouterr().out)
        state.append(found["memory"][name])
    memory = found["memory"]
    assert state == pytest.approx([memory["parameters"]] * 2, rel=1e-3)
    # what the first step makes of it counts once: parameters, gradients and state at the update, each as large
    at_update = max(size for phase, _, _, size in found["at"] if phase == "optimizer step")
    assert 3 <= at_update / memory["parameters"] < 3.5


# A dispatcher.


def entry_of(name: str, **changes: Any) -> DispatcherEntry:
    """As plain, never taken by auto."""
    own = {"name": name, "without_nodes": name, "auto": lambda group: None, "elsewhere": ()}
    return replace(PLAIN_ENTRY, **{**own, **changes})


def dispatched(path: Path, topology: Topology, case: Case) -> tuple[Figures | None, str]:
    with restored():
        add("dispatcher")
        model, _, _ = sharded_model(path, topology, case)
        return ours(path, topology, case), moe_layers(model)[0].dispatcher.in_words


def test_a_dispatcher(ranks: RankPool, tmp_path: Path) -> None:
    """Losses, gradients, routers' counts and, after two updates, weights: transformers' in one process."""
    how: dict[str, Any] = {"gradient_checkpointing": "selective", "kernel": "torch-grouped"}
    case = Case(random_samples([9, 20, 5, 14]), accumulation=1, steps=2, z=0.01, **how)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    own = replace(case, settings={"dispatch": "last-first", "overlap_chunks": 2})
    found, told = ranks.run(dispatched, 2, tmp_path, Topology(2, 2), own)[0]
    assert told == "a token's last choice is sent first"
    want = reference(case, seed=1)
    assert found.losses == near(want.losses)
    assert found.grad_norms == near(want.grad_norms)
    assert max(gradient_errors(found.grads, want.grads).values()) <= OTHER_ORDER
    assert_equal_weights(found.weights, want.weights)


def test_a_dispatcher_is_chosen_and_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "m", "--dataset", "d", "--ep-size", "2", "--dispatch"]
    with pytest.raises(ExpertMeshError, match="invalid choice: 'last-first'"):
        parse_config([*flags, "last-first"])
    add("dispatcher")
    register_dispatcher(entry_of("one-exchange", elsewhere=("single",)))
    config = parse_config([*flags, "last-first", "--dispatch-sums", "float32", "--ranks-per-node", "2"])
    assert config.dispatch == "last-first"
    assert config.without_effect == [
        "--dispatch-sums float32 has no effect without --ep-size 2 or more with --dispatch auto, rank or node",
        "--ranks-per-node 2 has no effect without --tp-size 2 or more, or --ep-size 2 or more with --dispatch auto "
        "or node",
    ]
    shown = help_text(capsys)
    assert "--dispatch {auto,plain,rank,node,last-first,one-exchange}" in shown
    assert "last-first: as plain, the last choice first" in shown
    with pytest.raises(ExpertMeshError, match=r"'lst-first' \(choose from .*'one-exchange'\); did you mean last-first"):
        parse_config([*flags, "lst-first"])
    with pytest.raises(ExpertMeshError, match="give --dispatch one-exchange"):
        parse_config([*flags, "single"])
    with pytest.raises(ExpertMeshError, match="--dispatch lst-first is unknown; use auto, plain, rank, node, "):
        replace(config, dispatch="lst-first")


def test_auto_takes_a_dispatcher() -> None:
    by_nodes = entry_of("by-nodes", by_nodes=True, without_nodes="rank", auto=lambda g: 30 if g.spans_nodes else None)
    register_dispatcher(by_nodes)
    assert resolve_dispatch("auto", 16, 8, 2) is by_nodes
    assert resolve_dispatch("auto", 8, 8, 2) is PLAIN_ENTRY
    assert resolve_dispatch("auto", 12, None, 2).name == resolve_dispatch("by-nodes", 8, 8, 2).name == "rank"


@pytest.mark.slow
def test_a_dispatcher_is_forecast(mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def both(name: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        own = ["--dispatch", name, *flags]
        return figures_of("plan", mixtral, capsys, *own)[0], figures_of("rehearse", mixtral, capsys, *own)[0]

    add("dispatcher")
    (plan, dry), (plain_plan, plain_dry) = both("last-first"), both("plain")
    assert plan["bytes_a_step"] == plain_plan["bytes_a_step"]
    assert dry["sent"] == plain_dry["sent"]
    # choices are turned around, by operators that are not ours
    assert dry["parts"] != plain_dry["parts"]
    assert not list((mixtral / "measured").rglob("*.json"))

    # by nodes: the groups are made, and counted
    def make(options: Any) -> OnceDispatcher:
        return OnceDispatcher(options.num_experts, options.group, 1, options.nodes, options.sum_dtype)

    register_dispatcher(entry_of("by-nodes", by_nodes=True, without_nodes="rank", sums=True, make=make))
    across = ["--gpus", "4", "--ep-size", "4", "--gpus-per-node", "2", "--dispatch-sums", "float32"]
    assert both("by-nodes", *across) == both("node", *across)

    register_dispatcher(entry_of("unseen", is_recorded=False))
    for command in ("plan", "rehearse"):
        with pytest.raises(AssertionError):
            figures_of(command, mixtral, capsys, "--dispatch", "unseen")
        assert "--dispatch unseen: cannot be recorded, so there is no forecast of it" in capsys.readouterr().err
