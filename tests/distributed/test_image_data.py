"""Data files with images through train_ep.py: the losses of three steps are those of a loop of transformers' own class,
with the family's own processor, whatever form the records have."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

import expertmesh
from expertmesh.sharding.torchrun import STOPPED
from expertmesh.training.data.pictures import ImageProcessor
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, assert_same_bits, tell_signalled
from tests.pictures import Plain, asked, save_seeing, theirs, write_lines, written
from tests.rounding import near
from tests.tiers import tiered
from tests.tiny import save_tokenizer

STEPS = 3
RATE = 1e-3
FLAGS = (
    f"--images --train-vision tower projector --max-steps {STEPS} --learning-rate {RATE} --weight-decay 0 "
    "--max-grad-norm 0 --lr-scheduler-type constant --router-aux-loss-coef 0 --save-steps 0 --logging-steps 1"
)
ROWS = 8


def losses_of_transformers(model: Any, processor: Any, records: Sequence[Plain]) -> list[float]:
    """One sample after the other, each step all of them."""

    def inputs(messages: list[dict[str, Any]], images: list[Image.Image], asks: bool) -> Any:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return processor(text=[text], images=images or None, return_tensors="pt")

    samples = []
    for messages, images in records:
        whole, prompt = inputs(messages, images, False), inputs(messages[:1], images, True)
        labels = whole["input_ids"].clone()
        labels[:, : prompt["input_ids"].shape[1]] = -100
        samples.append((whole, labels))
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for whole, labels in samples:
            logits = model(**whole, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits.float(), labels[0, 1:], ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


LAYOUTS = {
    "1": (1, f"--global-batch-size {ROWS} --per-device-train-batch-size 2"),
    "2 ep 2": (2, "--ep-size 2 --per-device-train-batch-size 4"),
    "2 ep 2 packed": (2, "--ep-size 2 --packing --per-device-train-batch-size 8 --max-seq-length 64"),
    "4 ep 2 pp 2": (4, "--ep-size 2 --pp-size 2 --per-device-train-batch-size 2 --gradient-accumulation-steps 2"),
    "2 ep 2 streamed": (2, "--ep-size 2 --per-device-train-batch-size 4 --streaming"),
    "2 cp 2": (2, "--cp-size 2 --per-device-train-batch-size 8"),
}


@pytest.mark.parametrize("layout", tiered(["2 ep 2 packed"], [each for each in LAYOUTS if each != "2 ep 2 packed"]))
def test_losses_are_those_of_transformers(layout: str, runs: Runs, tmp_path: Path) -> None:
    model = save_seeing(tmp_path / "model")
    data, records = written(tmp_path / "data")
    wanted = losses_of_transformers(model, theirs(tmp_path / "model"), records)
    world_size, flags = LAYOUTS[layout]
    ended = Runs(runs.ranks, tmp_path / "model", data, tmp_path)(world_size, f"{FLAGS} {flags}")
    assert ended.values("loss") == [near(loss) for loss in wanted]
    # what a server loads reads the same from the export as from the model
    own, exported = (
        ImageProcessor(str(path), AutoConfig.from_pretrained(path)) for path in (tmp_path / "model", ended.out / "hf")
    )
    assert exported.facts == own.facts
    assert exported.processor.chat_template == own.processor.chat_template is not None
    image = str(tmp_path / "data" / "photos" / "0.png")
    assert exported.tokens(image) == own.tokens(image)


def test_what_is_refused_before_there_is_a_model(runs: Runs, tmp_path: Path) -> None:
    """Data without any image, images that are all cut off, and a tokenizer without their tokens."""
    save_seeing(tmp_path / "model")
    save_tokenizer(tmp_path / "plain")
    data, records = written(tmp_path / "data")
    runs = Runs(runs.ranks, tmp_path / "model", data, tmp_path)
    prepared = runs(1, "--images --prepare-only --max-seq-length 64")
    assert f", {sum(len(images) for _, images in records)} images" in prepared.printed
    runs.refuses(
        1,
        "--images --prepare-only --train-on all --max-seq-length 3",
        "--images: no image ends within --max-seq-length",
    )
    runs.refuses(1, f"--images --prepare-only --tokenizer {tmp_path / 'plain'}", "plain: its token 300 is none, and ")
    text = write_lines(tmp_path / "text.jsonl", [asked("say hello", file_name="main.py")])
    said = ("--images: no record has an image (", "leave --images out to train on text")
    runs.refuses(1, f"--images --prepare-only --dataset {text}", *said)


@pytest.mark.slow
def test_resumed_with_another_image_processor(runs: Runs, tmp_path: Path) -> None:
    """It is refused, or told where that is allowed."""
    save_seeing(tmp_path / "model")
    data, _ = written(tmp_path / "data")
    runs = Runs(runs.ranks, tmp_path / "model", data, tmp_path)
    flags = "--images --max-seq-length 64 --save-steps 1 --resume auto --no-export"
    runs(1, f"{flags} --max-steps 1")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.0, 0.0, 0.0]}))
    said = "is of another image processor (it began with"
    ended = runs.refuses(1, f"{flags} --max-steps 2", said, "image_processor.image_mean: [0.0, 0.0, 0.0]")
    assert "--allow-changed data" in ended.errors
    allowed = runs(1, f"{flags} --max-steps 2 --allow-changed data")
    assert "warning: resuming with a different image processor" in allowed.errors


PARTS = {
    "tower": "--train-vision tower projector",
    "LoRA": "--adapter lora --lora-rank 2 --lora-targets all-linear",
}
SAVING = "--images --max-steps 6 --save-steps 2 --learning-rate 1e-2 --logging-steps 1 --max-seq-length 64"


@pytest.mark.parametrize(
    ("parts", "layout"),
    tiered(
        slow=[("tower", "2 ep 2 packed")],
        release=[("tower", "4 ep 2 pp 2"), ("LoRA", "2 cp 2"), ("LoRA", "2 ep 2")],
    ),
)
def test_resumed_it_is_the_run_that_was_never_stopped(parts: str, layout: str, runs: Runs, tmp_path: Path) -> None:
    """To the last bit: after a signal, and from the checkpoint that a kill leaves; elsewhere, within rounding."""
    save_seeing(tmp_path / "model")
    data, _ = written(tmp_path / "data")
    runs = Runs(runs.ranks, tmp_path / "model", data, tmp_path)
    world_size, of_layout = LAYOUTS[layout]
    flags = f"{SAVING} {PARTS[parts]} {of_layout}"
    whole = runs(world_size, flags, "whole")
    assert len(set(whole.values("loss"))) == 6
    assert sum(whole.values("images")) > 0

    stopped = runs(
        world_size, flags, code=STOPPED, call=tell_signalled, given=[tmp_path / "run/metrics.jsonl", signal.SIGTERM]
    )
    assert 2 <= max(stopped.saved) < 6
    resumed = runs(world_size, f"{flags} --resume auto")
    killed = runs(world_size, f"{flags} --resume {whole.checkpoint(2)}", "killed")
    assert resumed.values("loss") == whole.values("loss")
    assert killed.values("loss") == whole.values("loss")[2:]
    for ended in (resumed, killed):
        assert any("visual" in name for name in ended.weights)
        assert_same_bits(ended.weights, whole.weights)

    elsewhere = f"{SAVING} {PARTS[parts]} --global-batch-size {ROWS} --per-device-train-batch-size 2 --elastic"
    if "packing" not in flags:
        other = runs(1, f"{elsewhere} --resume {whole.checkpoint(2)}", "other")
        assert other.values("loss") == [near(loss) for loss in whole.values("loss")[2:]]


def losses_of_trl(path: Path, records: Sequence[Plain], out: Path, size: int, ours: bool) -> list[float]:
    """By trl's own way from messages and a column of images to a loss with its balancing loss; image tokens are no
    targets."""
    trl: Any = pytest.importorskip("trl")

    def row(messages: list[dict[str, Any]], images: list[Image.Image]) -> dict[str, Any]:
        texts = [x if isinstance(x["content"], list) else {**x, "content": text_part(x["content"])} for x in messages]
        return {"messages": texts, "images": images}

    def text_part(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    data = datasets.Dataset.from_list([row(*each) for each in records])
    data = data.cast_column("images", datasets.List(datasets.Image()))
    args = trl.SFTConfig(
        str(out), per_device_train_batch_size=size, max_steps=3, learning_rate=1e-3, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", max_length=None, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="constant",
    )  # fmt: skip

    class InOrder:
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    class Ours(InOrder, expertmesh.TrainerMixin, trl.SFTTrainer):
        pass

    class Theirs(InOrder, trl.SFTTrainer):
        pass

    vision = ["tower", "projector"]
    model: Any = (
        expertmesh.load(str(path), images=True, train_vision=vision, use_cpu=True, ep_size=2)
        if ours
        else AutoModelForImageTextToText.from_pretrained(path)
    )
    kind: Any = Ours if ours else Theirs
    trainer = kind(model=model, args=args, train_dataset=data, processing_class=theirs(path))
    if not ours:
        collate, token = trainer.data_collator, model.config.image_token_id

        def without_image_targets(rows: Any) -> Any:
            batch = collate(rows)
            return {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == token, -100)}

        trainer.data_collator = without_image_targets
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    if not ours:
        assert all(line["aux_loss"] > 0 for line in logged)
        return [line["loss"] for line in logged]
    # which trl adds to the loss
    weight = model.balance.weights.balance
    return [line["loss"] + weight * line["balance_loss"] for line in logged]


@pytest.mark.slow
def test_trls_trainer(ranks: RankPool, tmp_path: Path) -> None:
    """With its own collator of images, which `TrainerMixin` leaves as it is."""
    save_seeing(tmp_path / "model")
    _, records = written(tmp_path / "data")
    arguments = tmp_path / "model", records, tmp_path / "out"
    wanted = losses_of_trl(*arguments, ROWS, False)
    for found in ranks.run(losses_of_trl, 2, *arguments, ROWS // 2, True):
        assert found == near(wanted)
