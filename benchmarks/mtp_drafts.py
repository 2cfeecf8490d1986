"""How often a layer for multi-token prediction drafts what the model then says, after fine-tuning: with the layer
trained along (--train-mtp), and with the layer carried over unchanged.

A tiny model learns sums written out as steps, its layer too. Then it is fine-tuned on differences, which are written
otherwise. Drafts and answers are greedy: at each position of a held-out answer the draft for the token after the next
is compared with the model's own choice there. What it says of large models is the direction, not the size.

    python -m benchmarks.mtp_drafts --model DIR --repetitions 3
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import runs
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_lines

TRAIN, HELD_OUT = 600, 20


def sentences(kind: str, number: int, seed: int) -> list[dict[str, str]]:
    """Questions with answers in steps, after GSM8K's form: work in words, then #### and the number."""
    draw, records = random.Random(seed), []
    for _ in range(number):
        a, b = draw.randint(10, 49), draw.randint(10, 49)
        if kind == "sum":
            answer = f"First {a} and {b}. <<{a}+{b}={a + b}>> So #### {a + b}"
        else:
            a, b = max(a, b), min(a, b)
            answer = f"Take {b} from {a}: <<{a}-{b}={a - b}>> leaves #### {a - b}"
        records.append({"prompt": f"{kind} {a} {b}", "response": answer})
    return records


def train(model: Path, data: Path, out: Path, steps: int, seed: int, *flags: str) -> Path:
    """A run of train_ep.py; the exported model."""
    own = ["--model", str(model.absolute()), "--dataset", str(data), "--output-dir", str(out), "--use-cpu"]
    own += ["--max-steps", str(steps), "--seed", str(seed), "--learning-rate", "3e-3", "--save-steps", "0"]
    runs.trained(1, [*own, "--per-device-train-batch-size", "16", "--prompt-template", "{prompt}\n", *flags])
    return out / "hf"


@torch.no_grad()
def accepted(path: Path, records: list[dict[str, str]]) -> float:
    """The share of drafts, over all answers, that are what the model says after the text and its own next token."""
    import expertmesh
    from expertmesh.moe.experts.forward import Ahead, Forward, Targets, current_forward
    from expertmesh.moe.experts.model_layers import decoder_layers
    from expertmesh.training.steps.evaluate import inference

    engine: Any = expertmesh.load(str(path), use_cpu=True, train_mtp=True)
    tokenizer, model, agreed = engine.tokenizer, engine.model, []
    drafts: list[torch.Tensor] = []
    current: Any = current_forward
    # its drafts leave the layer by the current forward, and go through the head as the model's own states do
    layer = decoder_layers(model)[-1]
    layer.register_forward_hook(lambda *_: drafts.append(current().drafts_BSD))
    with inference(model):
        for record in records:
            text = tokenizer(record["prompt"] + "\n", add_special_tokens=True)["input_ids"]
            tokens = text + tokenizer(record["response"], add_special_tokens=False)["input_ids"]
            tokens_1S = torch.tensor([tokens])
            following_1S = torch.nn.functional.pad(tokens_1S[:, 1:], (0, 1))
            nothing = Targets(torch.full_like(tokens_1S, -100), torch.empty(0, dtype=torch.long))
            with Forward(ahead=Ahead(following_1S, nothing)):
                said_S = model(input_ids=tokens_1S, use_cache=False).logits[0].argmax(-1)
            drafted_S = model.get_output_embeddings()(drafts.pop())[0].argmax(-1)
            agreed.append((drafted_S[:-1] == said_S[1:])[len(text) - 1 :].float())
    torch.distributed.destroy_process_group()
    return float(torch.cat(agreed).mean())


def one_repetition(model: Path, work: Path, steps: int, seed: int) -> dict[str, float]:
    """The share before fine-tuning on the first kind, and after it on the second."""
    for kind in ("sum", "difference"):
        write_lines(sentences(kind, TRAIN, seed), work / f"{kind}.jsonl")
    held_out = {kind: sentences(kind, HELD_OUT, seed + 1000) for kind in ("sum", "difference")}
    whole = ("--train-mtp", "1", "--no-mtp-detach")
    first = train(model, work / "sum.jsonl", work / "first", steps, seed, *whole)
    found = {"before, on sums": accepted(first, held_out["sum"])}
    for name, flags in (("layer carried over", ()), ("--train-mtp", ("--train-mtp",))):
        tuned = train(first, work / "difference.jsonl", work / name.strip("-"), steps, seed, *flags)
        found[f"after, {name}"] = accepted(tuned, held_out["difference"])
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a small model whose checkpoint brings such a layer")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="of each of the three runs")
    asked = parser.parse_args(argv)
    found = []
    for seed in range(asked.repetitions):
        with tempfile.TemporaryDirectory() as work:
            found.append(one_repetition(asked.model, Path(work), asked.steps, seed))
    print(settings_line(asked, f"{HELD_OUT} held-out answers"))
    rows = []
    for name in found[0]:
        shares = [each[name] for each in found]
        figures = {"median": statistics.median(shares), "lowest": min(shares), "highest": max(shares)}
        rows.append({"": name} | {of: f"{share:.1%}" for of, share in figures.items()})
    print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
