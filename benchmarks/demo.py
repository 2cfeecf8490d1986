"""The main job from end to end, on a CPU and without a network: `make demo`.

    python -m benchmarks.demo --output-dir demo-run

Makes a small random Mixtral in Hugging Face form, a tokenizer, and an instruction set with checkable answers; trains
with `torchrun --nproc-per-node 4 train_ep.py --ep-size 4`; reloads the export with plain `transformers`; and prints
the share of held-out tasks answered exactly, before and after.
"""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import command, parser_of, print_rows, read_lines, write_lines
from benchmarks.runs import ROOT, environment, words_of
from benchmarks.small_models import save_model
from expertmesh.moe.util.errors import ExpertMeshError

TRAIN_ROWS = 40_000
HELD_OUT_ROWS = 100  # a task
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,  # the default, 0.02, is for wider models
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LETTERS = "abcdefghijklmnop"
SOUND = 0.85
"""Share of every task's held-out rows that a sound run answers exactly; with less, the demo fails."""


def _sum(rng: random.Random) -> tuple[str, str]:
    """Two digits each, so that the digits to be added always stand at the same distances."""
    a, b = rng.randint(0, 49), rng.randint(0, 49)
    return f"{a:02}+{b:02}", f"{a + b:02}"


def _on_letters(name: str, answer: Callable[[str], str]) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 5)))
        return f"{name} {word}", answer(word)

    return make


# easiest first
TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _on_letters("copy", lambda word: word),
    "reverse": _on_letters("reverse", lambda word: word[::-1]),
    "sort": _on_letters("sort", lambda word: "".join(sorted(word))),
    "sum": _sum,
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--output-dir", type=Path, default=Path("demo-run"), help="an earlier demo in it is replaced")
    parser.add_argument("--max-steps", type=int, default=None, help="other than in configs/tiny.yaml")
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    out: Path = arguments.output_dir
    marker = out / "made-by-the-demo"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ExpertMeshError(f"--output-dir {out}: contains other files; choose another")
    shutil.rmtree(out, ignore_errors=True)
    model, data, run = out / "model", out / "train.jsonl", out / "run"
    out.mkdir(parents=True)
    marker.touch()

    held_out = make_inputs(model, data, arguments.seed)
    print(f"made {model} and {data} ({TRAIN_ROWS:,} rows)", flush=True)
    before = accuracy(model, held_out)
    train(model, data, run, arguments.max_steps, arguments.seed)
    after = accuracy(run / "hf", held_out)
    print_accuracy(before, after, held_out)
    print(f"demo finished in {time.perf_counter() - begin:.0f} s; the trained model: {run / 'hf'}")
    print(f"its report, for a browser: {run / 'report.html'}")
    failed = [f"{share:.0%} of {name!r}" for name, (share, _) in after.items() if share < SOUND]
    if failed:
        print(f"demo: error: right after training: {', '.join(failed)}; {SOUND:.0%} is sound", file=sys.stderr)
        return 1
    return 0


def make_inputs(model: Path, data: Path, seed: int = 0, num_rows: int = TRAIN_ROWS) -> dict[str, list[tuple[str, str]]]:
    """Write the training rows, and a random model with a tokenizer made for them; the rows held out, by task."""
    held_out = write_tasks(data, seed, num_rows)
    save_tokenizer(model, data)
    save_model(model, "mixtral", seed, SIZES)
    return held_out


def write_tasks(file: Path, seed: int, num_rows: int = TRAIN_ROWS) -> dict[str, list[tuple[str, str]]]:
    """Write the training rows; the held-out tasks, none of which is among them."""
    rng = random.Random(seed)
    held_out: dict[str, list[tuple[str, str]]] = {}
    for name, make in TASKS.items():
        distinct: dict[str, str] = {}
        while len(distinct) < HELD_OUT_ROWS:
            prompt, answer = make(rng)
            distinct[prompt] = answer
        held_out[name] = list(distinct.items())
    drawn = [*TASKS, "sum"]  # twice as often: it is the hardest
    forbidden = {prompt for rows in held_out.values() for prompt, _ in rows}
    rows: list[dict[str, str]] = []
    while len(rows) < num_rows:
        prompt, answer = TASKS[rng.choice(drawn)](rng)
        if prompt not in forbidden:
            rows.append({"prompt": prompt, "response": answer})
    write_lines(rows, file)
    return held_out


def save_tokenizer(path: Path, data: Path) -> None:
    """A tokenizer of characters and of whole names of tasks, trained on the data."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"^({'|'.join(TASKS)}) |[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    texts = (f"{row['prompt']}\n{row['response']}" for row in read_lines(data))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    fast.save_pretrained(path)


def train(model: Path, data: Path, run: Path, max_steps: int | None, seed: int) -> None:
    flags = ["--config", "configs/tiny.yaml", "--ep-size", "4", "--model", str(model.resolve())]
    flags += ["--dataset", str(data.resolve()), "--output-dir", str(run.resolve()), "--seed", str(seed)]
    words = words_of(4, flags if max_steps is None else [*flags, "--max-steps", str(max_steps)])
    print("$ torchrun " + " ".join(words[3:]), flush=True)
    subprocess.run(words, cwd=ROOT, check=True, timeout=900, env=environment())


Scores = dict[str, tuple[float, str]]


def accuracy(path: Path, held_out: dict[str, list[tuple[str, str]]]) -> Scores:
    """Per task the share answered exactly, and the first answer; greedy, by `transformers` alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    scores: Scores = {}
    for name, rows in held_out.items():
        inputs = tokenizer([prompt + "\n" for prompt, _ in rows], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = sum(answer == expected for answer, (_, expected) in zip(answers, rows, strict=True))
        scores[name] = (right / len(rows), answers[0])
    return scores


def print_accuracy(before: Scores, after: Scores, held_out: dict[str, list[tuple[str, str]]]) -> None:
    print(f"\nheld-out accuracy, {HELD_OUT_ROWS} rows a task, reloaded with transformers")
    rows = []
    for name, of_task in held_out.items():
        example = f"{of_task[0][0]!r} -> {after[name][1]!r}"
        shares = {"before": f"{before[name][0]:.0%}", "after": f"{after[name][0]:.0%}"}
        rows.append({"task": name, **shares, "an example, and the answer after": example})
    print_rows(rows, text=["an example, and the answer after"])


if __name__ == "__main__":
    sys.exit(main())
