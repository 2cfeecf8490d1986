"""What holds on a real model: `python -m benchmarks.real`.

Trains SmolLM2-135M-Instruct, upcycled into a Mixtral (benchmarks/real_model.py), for four steps on some layouts of
ranks on this CPU, and prints for each

    loss, norm   by how much the worst step's loss and gradient norm differ, relatively, from those of a loop of
                 transformers (with adapters: of PEFT) in one process
    GiB          memory of a rank at its peak, and by the forecast; what is freed goes back to the system at once
                 (benchmarks.arms.GIVEN_BACK), but with --default-malloc
    s/step       seconds of the last step

then 20 steps of DPO, KTO and distillation, with the loss and the figure by which each is judged, at the first step and
at the last; and the perplexity of held-out answers by base (--base-dtype), before any training. The data are problems
in the form of GSM8K that are made here, or those of --dataset.
"""

import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import runs
from benchmarks.arms import GIVEN_BACK
from benchmarks.commands import command, parser_of, print_rows, read_lines, settings_line, write_lines
from benchmarks.llama_cpp import prompt
from benchmarks.practice import make_records
from benchmarks.real_model import dense_model, moe_model
from expertmesh.moe.util.user_cache import cache_directory

STEPS, LEARNING_RATE, MAX_GRAD_NORM, RECORDS = 4, 5e-6, 1.0, 4
SETTINGS = f"--learning-rate {LEARNING_RATE} --lr-scheduler-type constant --max-grad-norm {MAX_GRAD_NORM}"
EXPERTS, ATTENTION = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Row:
    """A run whose steps each have all records. begins_with_adapter: from one of PEFT's, which is trained."""

    ranks: int
    flags: str
    begins_with_adapter: bool = False


_EP = "--ep-size 2 --per-device-train-batch-size 2"
ROWS = {
    "ep 2": Row(2, _EP),
    "cp 3": Row(3, "--cp-size 3 --per-device-train-batch-size 4"),
    "pp 2": Row(2, "--pp-size 2 --per-device-train-batch-size 2 --gradient-accumulation-steps 2"),
    "packed, ep 2": Row(2, "--ep-size 2 --packing --max-seq-length {packed} --per-device-train-batch-size 1"),
    "LoRA, ep 2": Row(2, f"{_EP} --adapter lora", begins_with_adapter=True),
    "bf16, ep 2": Row(2, f"{_EP} --bf16"),
}
BASES = ("float32", "bfloat16", "fp8", "nf4")


@dataclass(frozen=True)
class Method:
    """How a model is trained for 20 steps, of the same records in each.

    flags: of train_ep.py. records: makes its records of problems with their solutions. judged_by: the figure of
    metrics.jsonl that tells whether it learns. rises: whether that is to rise, or to fall.
    """

    flags: str
    records: Callable[[Sequence[dict[str, str]]], list[dict[str, Any]]]
    judged_by: str
    rises: bool


def _pairs(records: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Each problem with its own solution, and with that of the next as the worse one."""
    others = [*records[1:], records[0]]
    return [
        {"prompt": own["question"], "chosen": own["answer"], "rejected": other["answer"]}
        for own, other in zip(records, others, strict=True)
    ]


def _labelled(records: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    return [
        {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
        for pair in _pairs(records)
        for which in ("chosen", "rejected")
    ]


LEARNED_IN = 20
_WITH_ADAPTERS = "--adapter lora --learning-rate 2e-4 --lr-scheduler-type constant"
METHODS = {
    "DPO": Method(f"--task dpo {_WITH_ADAPTERS}", _pairs, "rewards/margins", rises=True),
    "KTO": Method(f"--task kto {_WITH_ADAPTERS}", _labelled, "rewards/margins", rises=True),
    "distillation": Method(
        "--teacher {dense} --learning-rate 2e-5 --lr-scheduler-type constant", list, "teacher_kl", rises=False
    ),
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--bases", nargs="*", choices=BASES, default=list(BASES))
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--dataset", type=Path, default=None, metavar="FILE", help="JSON lines: question, answer")
    parser.add_argument("--answers", type=int, default=50, help="of which the perplexity is")
    parser.add_argument("--default-malloc", action="store_true", help="leave malloc as train_ep.py has it")
    arguments = parser.parse_args(argv)
    os.environ.update({} if arguments.default_malloc else GIVEN_BACK)
    kept = cache_directory("real")
    model = moe_model(kept, arguments.experts)
    number = RECORDS + arguments.answers
    records = made_up(number) if arguments.dataset is None else read_lines(arguments.dataset)[:number]
    print(settings_line(arguments, str(model), f"{RECORDS} records a step, {STEPS} steps, one repetition"))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        batch = Batch(model, records[:RECORDS])
        rows = []
        for row in arguments.rows:
            expected = Trained.by(model, batch, ROWS[row], directory)
            rows.append(compared(row, expected, run(ROWS[row], model, batch, directory / row)))
        print_rows(rows)
        print_rows([judged(name, kept, arguments.experts, batch, directory / name) for name in arguments.methods])
        for base in arguments.bases:
            # minutes each: what is known is told at once
            value = perplexity(model, records[RECORDS:], base, directory / base)
            print(f"perplexity of {arguments.answers} answers, {base}: {value:.3f}", flush=True)
    return 0


def made_up(number: int) -> list[dict[str, str]]:
    """Problems of arithmetic with their solutions."""
    return make_records(number, seed=0)[0]


class Batch:
    """Records by the model's chat template, padded on the right. Labels are the answer's tokens, and the one that ends
    it."""

    def __init__(self, model: Path, records: Sequence[dict[str, str]]):
        self.records = records
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = []
        for record in records:
            roles = {"user": record["question"], "assistant": record["answer"]}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
            tokens = tokenizer(text.rstrip("\n"), add_special_tokens=False).input_ids
            start = len(tokenizer(prompt(tokenizer, record["question"]), add_special_tokens=False).input_ids)
            rows.append((tokens, [-100] * start + tokens[start:]))
        self.length = length = max(len(tokens) for tokens, _ in rows)
        self.ids_BS = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in rows])
        self.mask_BS = torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens, _ in rows])
        self.labels_BS = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows])

    def loss(self, model: Any) -> Tensor:
        """Mean cross-entropy in float32, as it is defined: of each label by the position before it."""
        logits_BSV = model(input_ids=self.ids_BS, attention_mask=self.mask_BS, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), self.labels_BS[:, 1:].flatten())


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own class."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


@dataclass(frozen=True)
class Trained:
    """Of each step."""

    losses: list[float]
    norms: list[float]

    @staticmethod
    def by(path: Path, batch: Batch, row: Row, directory: Path, save: Path | None = None) -> "Trained":
        """What a loop of transformers gives, without our code.

        Args:
            directory: where an adapter is kept with which a row begins.
            save: where the trained model is written.
        """
        model = loaded(path)
        if row.begins_with_adapter:
            import peft

            torch.manual_seed(1)
            lora = peft.LoraConfig(
                r=4, lora_alpha=6, init_lora_weights=False, target_modules=ATTENTION, target_parameters=EXPERTS
            )
            model = peft.get_peft_model(model, lora)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if ".lora_B." in name:
                        parameter.mul_(0.02)  # as after a few steps: the model still knows what it knew
            model.save_pretrained(str(directory / "adapter"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        found = Trained([], [])
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = batch.loss(model)
            loss.backward()
            # torch adds up the squares of 28 million numbers in float32 with an error of 3e-5
            norm = torch.stack([parameter.grad.double().norm() for parameter in trained]).norm()
            torch.nn.utils.clip_grads_with_norm_(trained, MAX_GRAD_NORM, norm)
            found.norms.append(norm.item())
            optimizer.step()
            found.losses.append(loss.item())
        if save is not None:
            model.save_pretrained(save)
        return found


@dataclass(frozen=True)
class Ran:
    """A run of train_ep.py. out: its --output-dir. printed: its log. lines: of metrics.jsonl, those of steps."""

    out: Path
    printed: str
    lines: list[dict[str, Any]]

    def values(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines if key in line]


def run(row: Row, model: Path, batch: Batch, out: Path, *flags: str, steps: int = STEPS) -> Ran:
    """A row's run as a user starts it, with an adapter beside `out` where it begins with one."""
    # two records to a sequence, however they are paired
    of_row = row.flags.format(packed=2 * batch.length)
    words = shlex.split(f"--max-steps {steps} {SETTINGS} {of_row}")
    if row.begins_with_adapter:
        words += ["--init-adapter", str(out.parent / "adapter")]
    return by_command(row.ranks, model, batch.records, out, *words, *flags)


def learned(method: str, kept: Path, experts: int, records: Sequence[dict[str, str]], out: Path) -> Ran:
    """Twenty steps by a method, of all records each. What distils has half of its experts' neurons drawn anew.

    Args:
        kept: the directory of `moe_model`.
    """
    how = METHODS[method]
    flags = how.flags.format(dense=dense_model(kept))
    model = moe_model(kept, experts, *["--drop", "0.5"] * ("--teacher" in flags))
    words = f"--max-steps {LEARNED_IN} --ep-size 2 --per-device-train-batch-size {len(records) // 2} {flags}"
    return by_command(2, model, how.records(records), out, *shlex.split(words))


def by_command(ranks: int, model: Path, records: Sequence[dict[str, Any]], out: Path, *flags: str) -> Ran:
    """A run of train_ep.py on this CPU.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    data = write_lines(records, out.parent / f"{out.name}.jsonl")
    command = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--use-cpu", "--verbose"]
    command += ["--no-export"] * ("--export" not in flags) + ["--save-steps", "0"] * ("--save-steps" not in flags)
    return Ran(out, runs.trained(ranks, [*command, *flags]), runs.lines_of(out))


def compared(name: str, expected: Trained, ran: Ran) -> dict[str, str]:
    """A line of the first table."""
    of_each = {"loss": (ran.values("loss"), expected.losses), "norm": (ran.values("grad_norm"), expected.norms)}
    off = {what: max(abs(one / other - 1) for one, other in zip(*both, strict=True)) for what, both in of_each.items()}
    measured, forecast = memory_of(ran)
    memory = {"GiB": str(measured), "GiB forecast": str(forecast)}
    seconds = {"s/step": f"{ran.values('step_seconds')[-1]:.1f}"}
    return {"": name} | {what: f"{error:.1e}" for what, error in off.items()} | memory | seconds


def judged(name: str, kept: Path, experts: int, batch: Batch, out: Path) -> dict[str, str]:
    """A line of the second."""
    figure = METHODS[name].judged_by
    ran = learned(name, kept, experts, batch.records, out)
    loss, by = (f"{values[0]:.4f} to {values[-1]:.4f}" for values in (ran.values("loss"), ran.values(figure)))
    measured, forecast = memory_of(ran)
    return {"": name, "loss": loss, "judged by": by, " ": figure, "GiB (forecast)": f"{measured} ({forecast})"}


def memory_of(ran: Ran) -> tuple[float, float]:
    """GiB of a rank, measured and forecast."""
    found = re.search(r"peak ([\d.]+) GiB measured, ([\d.]+) GiB forecast", " ".join(ran.printed.split()))
    assert found is not None, ran.printed
    return float(found[1]), float(found[2])


def perplexity(model: Path, records: Sequence[dict[str, str]], base: str, out: Path) -> float:
    """Of the answers, by the model as it is given, with its weights in one dtype or quantized."""
    batch = Batch(model, made_up(2))
    flags = ["--bf16"] if base == "bfloat16" else []
    flags += ["--adapter", "lora", "--base-dtype", base, "--eval-on-start"]
    flags += [
        "--eval-dataset",
        str(write_lines(records, out.parent / "held-out.jsonl")),
        "--eval-dataset-split",
        "train",
    ]
    found = run(Row(1, "--per-device-train-batch-size 2"), model, batch, out, *flags, steps=1)
    return math.exp(found.values("eval_loss")[0])


if __name__ == "__main__":
    sys.exit(main())
