"""How full packed sequences are, and how fast they train: `python -m benchmarks.filling`.

One corpus, pages and code of this checkout, is packed in our ways and in those of trl, which must be installed, and one
model takes steps of each, in turn in every round:

    --packing                     texts cut at --max-seq-length, first-fit decreasing
    --packing, split              the same with --truncation split
    --packing wrapped             texts that go on in the next sequence
    trl bfd, bfd_split, wrapped   `trl.pack_dataset`, whose "wrapped" is trained on as one sample, as trl does

*filled*: positions that have a token. *lost*: tokens of the corpus that no sequence has; and targets, tokens behind
another one of their text that are predicted nowhere. Seconds are of the CPU, on one thread.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import expertmesh
from benchmarks.arms import take_turns, timed
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_lines
from benchmarks.runs import ROOT
from benchmarks.small_models import random_mixtral, save_byte_pairs
from expertmesh.training.data.batch import collate
from expertmesh.training.data.data_files import open_rows
from expertmesh.training.data.record_kinds import CONVERSATIONS, PIECES
from expertmesh.training.data.sample_cache import samples_in_memory
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import make_rows
from expertmesh.training.data.tokenizing import DataOptions, records_of
from expertmesh.training.data.truncation import Packing, Truncation

EOS = "</s>"
Sequences = list[list[Sample]]


@dataclass
class Packed:
    """A corpus in sequences. seconds: of the CPU. tokens, targets: of the corpus that are in them, each once."""

    sequences: Sequences
    seconds: float
    tokens: int
    targets: int


@command
def main(argv: Sequence[str] | None = None) -> int:
    sizes = dict(hidden_size=256, intermediate_size=256, layers=2, vocabulary=4096)
    arguments = parser_of(__doc__, max_seq_length=1024, sequences=2, rounds=3, **sizes).parse_args(argv)
    torch.set_num_threads(1)
    files = [path for folder in ("docs", "training") for path in sorted((ROOT / folder).rglob("*.[pm][yd]"))]
    texts = list(filter(str.strip, (path.read_text(encoding="utf-8") for path in files)))
    with tempfile.TemporaryDirectory() as directory:
        save_byte_pairs(Path(directory), texts, arguments.vocabulary, [EOS], eos_token=EOS)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    length = arguments.max_seq_length
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    packed = {
        "--packing": ours(texts, tokenizer, length, "right", True),
        "--packing, split": ours(texts, tokenizer, length, "split", True),
        "--packing wrapped": ours(texts, tokenizer, length, "split", "wrapped"),
        **{f"trl {strategy}": theirs(ids, length, strategy) for strategy in ("bfd", "bfd_split", "wrapped")},
    }
    speeds = trained(packed, arguments)
    tokens = sum(map(len, ids))
    print(settings_line(arguments, f"{len(texts):,} texts of {tokens:,} tokens", "medians"))
    rows = []
    for name, of in packed.items():
        filled = sum(sample.length for row in of.sequences for sample in row) / (len(of.sequences) * length)
        rows.append(
            {
                "variant": name,
                "sequences": f"{len(of.sequences):,}",
                "filled": f"{filled:.2%}",
                "tokens lost": f"{1 - of.tokens / tokens:.2%}",
                "targets lost": f"{1 - of.targets / (tokens - len(ids)):.2%}",
                "packed in": f"{of.seconds:.2f} s",
                "tokens/CPU-s": f"{speeds[name]:,.0f}",
            }
        )
    print_rows(rows)
    return 0


def ours(texts: Sequence[str], tokenizer: Any, length: int, truncation: Truncation, packing: Packing) -> Packed:
    kind = PIECES if truncation == "split" else CONVERSATIONS
    options = DataOptions(length, truncation=truncation, kind=kind)
    with tempfile.TemporaryDirectory() as directory:
        file = write_lines([{"text": text} for text in texts], Path(directory) / "texts.jsonl")
        records = list(records_of(open_rows("--dataset", str(file), "", "train"), "--dataset", options))
    samples, _ = samples_in_memory(records, "--dataset", tokenizer, options)
    assert samples is not None
    begin = time.process_time()
    rows = make_rows(samples, packing, length, seed=0)
    seconds = time.process_time() - begin
    (origin,) = samples.origins
    sequences = [rows[at] for at in range(len(rows))]
    return Packed(sequences, seconds, origin.tokens - origin.lost, int(samples.targets.sum()))


def theirs(ids: Sequence[list[int]], length: int, strategy: str) -> Packed:
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()
    is_first = [[1] + [0] * (len(tokens) - 1) for tokens in ids]
    table = datasets.Dataset.from_dict({"input_ids": ids, "is_first": is_first})
    # as trl advises for "wrapped", and does by itself
    table = table.shuffle(seed=0).flatten_indices()
    begin = time.process_time()
    found = pack_dataset(table, length, strategy, {"load_from_cache_file": False, "keep_in_memory": True})
    seconds = time.process_time() - begin
    sequences: Sequences = []
    targets = tokens = 0
    for row in found:
        lengths = row.get("seq_lengths") or [len(row["input_ids"])]
        parts = []
        for end, number in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
            inside = slice(end - number, end)
            parts.append(Sample(row["input_ids"][inside], [True] * number))
            targets += number - 1 - sum(row["is_first"][inside][1:])
            tokens += number
        sequences.append(parts)
    return Packed(sequences, seconds, tokens, targets)


def trained(packed: dict[str, Packed], arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens that steps of each take in a CPU-second, the median of the rounds."""
    longest = arguments.max_seq_length
    with tempfile.TemporaryDirectory() as directory:
        random_mixtral(
            arguments, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=longest
        ).save_pretrained(directory)
        engine = expertmesh.load(directory, packing=True, use_cpu=True, learning_rate=1e-5)

    def turn(of: Packed) -> Callable[[int], float]:
        def take(number: int) -> float:
            first = (number + 1) * arguments.sequences
            batch = collate(of.sequences[first : first + arguments.sequences])
            (took,) = timed(lambda: engine.step([batch]), torch.device("cpu"))
            return batch.num_tokens / took.cpu

        return take

    # the first round only warms up
    taken = take_turns({name: turn(of) for name, of in packed.items()}, arguments.rounds, warm_up=1)
    return {name: statistics.median(speeds) for name, speeds in taken.found.items()}


if __name__ == "__main__":
    sys.exit(main())
