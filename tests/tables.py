"""The tables of pages that list what is registered."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from expertmesh.checkpoints.files.codes import CODES
from expertmesh.moe.dispatch.dispatcher_entries import DISPATCHERS
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.training.attention.layer_kinds import ATTENDING, LAYER_KINDS
from expertmesh.training.data import formats
from expertmesh.training.data.chat import TrainOn, render
from expertmesh.training.data.formats import Columns, Conversation, find_format, read_row
from expertmesh.training.data.labels import LABEL_FORMATS
from expertmesh.training.data.pairs import PAIR_FORMATS
from expertmesh.training.metrics import LOSS_OF, metrics_of
from tests.training.traces import FORMS, WRITTEN, tokenizer_of


def table_of_dispatchers() -> str:
    yes_or_no = {True: "yes", False: "no"}
    return "\n".join(
        f"| `{entry.name}` | {entry.how} | {yes_or_no[entry.sums]} | {yes_or_no[entry.by_nodes]} |"
        for entry in DISPATCHERS.entries()
    )


def table_of_kernels() -> str:
    return "\n".join(f"| `{entry.name}` | {entry.how} | {entry.where} |" for entry in KERNELS.entries())


def table_of_codes() -> str:
    rows = [("codes", "`quant_method`", "tensors", "exported again as by"), ("---",) * 4]
    for kind in CODES.values():
        rows.append((kind.label, ", ".join(kind.quant_methods), kind.stored_as, kind.encoder or "(not)"))
    return _table(rows)


def table_of_layer_kinds() -> str:
    rows = [("a token sees", "kinds of layers", "packed", "with `--cp-size`", "our attention"), ("---",) * 5]
    for sees, how in ATTENDING.items():
        kinds = ", ".join(f"`{kind.name}`" for kind in LAYER_KINDS.values() if kind.sees == sees) or "all others"
        by_what = "in segments" if how.by_ours else "under a mask"
        packed, cp = (by_what, "by heads") if how.by_attention else ("sample by sample", "complete sequences")
        if sees == "itself":
            packed = cp = "unchanged"
        ours = {True: "yes", False: "no", None: "-"}[how.by_ours]
        rows.append((how.words, kinds, packed, cp, ours))
    return _table(rows)


def table_of_formats() -> str:
    return _formats([(each.written, each.known_from) for each in formats.FORMATS])


def table_of_pair_formats() -> str:
    return _formats([(each.written, each.known_from) for each in PAIR_FORMATS])


def table_of_label_formats() -> str:
    return _formats([(each.written, each.known_from) for each in LABEL_FORMATS])


def table_of_metrics() -> str:
    """The list in docs/reference/metrics.md, which says once what `eval_` before another one's name means."""
    known = metrics_of([LOSS_OF + "NAME"])
    names = {f"eval_{metric.name}" for metric in known}
    told = [metric for metric in known if metric.name not in names]
    return "".join(f"- `{each.name}`{f' ({each.unit})' if each.unit else ''}: {each.meaning}\n" for each in told)


def _formats(formats: Sequence[tuple[str, ...]]) -> str:
    return _table([("columns", "known from"), ("---", "---"), *formats])


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table_of_traces() -> str:
    """What Qwen3's template writes of the first answer in each of `traces.FORMS`, reasoning, text and calls marked."""
    rows = [("form", "reasoning, text, calls, results, tools", "trained on"), ("---",) * 3]
    with TemporaryDirectory() as directory:
        tokenizer = tokenizer_of(Path(directory), "Qwen3")
        for name, (row, _) in FORMS.items():
            rows.append((name, WRITTEN[name], f"`{_marked(tokenizer, row)}`"))
    return _table(rows)


def _marked(tokenizer: Any, row: dict[str, Any]) -> str:
    """The first answer with marks around its parts: calls without arguments, and all without tags and its end."""
    conversation = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(conversation, Conversation)
    marked = ""
    parts: tuple[tuple[TrainOn, str], ...] = (("reasoning", "{}"), ("text", "«»"), ("calls", "[]"))
    for part, marks in parts:
        found = render(tokenizer, conversation, part)
        begin = found.text.index("<|im_start|>assistant")
        end = found.text.index("<|im_end|>", begin)
        words = [found.text[max(b, begin) : min(e, end)] for b, e in found.trained if begin <= b < end]
        words = [re.sub(r"\{[^{]*\"name\": \"(\w+)\".*?\}\}", r"\1(…)", each) for each in words]
        told = " ".join(re.sub(r"</?\w+>", "", " ".join(words)).split())
        marked += f"{marks[0]}{told}{marks[1]}" if told else ""
    return marked
