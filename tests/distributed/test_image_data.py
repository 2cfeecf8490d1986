"""Data files with images through train_ep.py: the losses of five steps are those of a loop of transformers' own class,
with the family's own processor, whatever form the records have."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig

from expertmesh.sharding.torchrun import STOPPED
from expertmesh.training.data.pictures import ImageProcessor
from tests.distributed.whole_runs import Runs, assert_same_bits, tell_signalled
from tests.pictures import Plain, save_seeing, theirs, written
from tests.rounding import near
from tests.tiers import tiered

STEPS = 5
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


PARTS = {
    "tower": "--train-vision tower projector",
    "LoRA": "--adapter lora --lora-rank 2 --lora-targets all-linear",
}
SAVING = "--images --max-steps 6 --save-steps 2 --learning-rate 1e-2 --logging-steps 1 --max-seq-length 64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "layout"),
    [("tower", "2 ep 2 packed"), ("tower", "4 ep 2 pp 2"), ("LoRA", "2 ep 2"), ("LoRA", "2 cp 2")],
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
