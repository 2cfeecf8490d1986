"""A tiny model, and word problems in the form of GSM8K, to practise on a CPU.

    python -m benchmarks.practice --output-dir practice

writes `practice/model`, a random model of a given family with a tokenizer and a
chat template, and `practice/train.jsonl` and `practice/test.jsonl`, which have
no question in common.
"""

import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.commands import command, parser_of, write_lines
from benchmarks.small_models import save_byte_pairs, save_model
from expertmesh.training.data.templates import built_in_template

NAMES = ("Ana", "Ben", "Chloe", "David", "Emma", "Finn", "Grace", "Hugo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
VOCABULARY = 600
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--output-dir", type=Path, default=Path("practice"), help="files in it are replaced")
    parser.add_argument("--family", default="qwen3_moe", help="model_type of the model, as in its config.json")
    parser.add_argument("--records", type=int, default=4000, help="in train.jsonl; a tenth as many in test.jsonl")
    arguments = parser.parse_args(argv)
    out: Path = arguments.output_dir
    train, test = make_records(arguments.records, arguments.seed)
    for name, records in (("train", train), ("test", test)):
        write_lines(records, out / f"{name}.jsonl")
    save_tokenizer(out / "model", (f"{record['question']}\n{record['answer']}" for record in train))
    parameters = save_model(out / "model", arguments.family, arguments.seed, SIZES)
    print(f"{out / 'model'}: {arguments.family}, {parameters:,} parameters")
    print(f"{out / 'train.jsonl'}: {len(train):,} records; {out / 'test.jsonl'}: {len(test):,} records")
    return 0


def make_records(number: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Distinct problems: so many for training, and a tenth as many held out."""
    rng = random.Random(seed)
    held_out = max(1, number // 10)
    distinct: dict[str, str] = {}
    while len(distinct) < number + held_out:
        question, answer = problem(rng)
        distinct[question] = answer
    records = [{"question": question, "answer": answer} for question, answer in distinct.items()]
    return records[held_out:], records[:held_out]


def problem(rng: random.Random) -> tuple[str, str]:
    """A problem of two steps, and its solution as GSM8K writes one: calculations in << >>, the result behind ####."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    first, more = rng.randint(2, 9), rng.randint(2, 9)
    both = first + more
    gone = rng.randint(1, min(9, both - 1))
    question = (
        f"{name} has {first} {thing} and gets {more} more. Then {name} gives {gone} away. "
        f"How many {thing} does {name} have now?"
    )
    answer = (
        f"{name} had {first}+{more} = <<{first}+{more}={both}>>{both} {thing}.\n"
        f"Now {name} has {both}-{gone} = <<{both}-{gone}={both - gone}>>{both - gone} {thing}.\n"
        f"#### {both - gone}"
    )
    return question, answer


def save_tokenizer(path: Path, texts: Iterable[str]) -> None:
    """A byte-level BPE tokenizer, whose numbers are one token a digit, with the chat template `chatml`."""
    end, _, end_of_turn = SPECIAL
    save_byte_pairs(
        path,
        texts,
        VOCABULARY,
        SPECIAL,
        splits_digits=True,
        eos_token=end_of_turn,
        pad_token=end,
        additional_special_tokens=list(SPECIAL),
        chat_template=built_in_template("chatml"),
    )


if __name__ == "__main__":
    sys.exit(main())
