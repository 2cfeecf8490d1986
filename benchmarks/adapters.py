"""Cost of training adapters, against full fine-tuning and PEFT: `python -m benchmarks.adapters`.

    full          the whole model, our experts
    lora          LoRA on attention and every expert; the base as it is
    lora-fp8      the base's matrices in fp8, one scale per row
    lora-nf4      the same in nf4
    peft          PEFT's LoraConfig(target_modules=..., target_parameters=...) on transformers' own model; on several
                  ranks on its expert parallelism, DistributedConfig(ep_size=...)

Steps of the same random Mixtral and batch; a variant's error is shown if it fails. Tokens a CPU-second are summed over
ranks; resident is the peak of a rank's memory above what it held before its model was made; sent is what a rank sends
in its first step. Tensors is the peak of what storages held at once, counted in a step after those that are timed. Of
it, weights are those that are not trained; trained is what is, with gradients and optimizer state; activations are what
autograd keeps for backward, with fp32 logits. over: tensors beyond the weights, over trained and activations together.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import arms
from benchmarks.arms import MB, Arm, Benchmark, Figures, Made, Rounds, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line
from benchmarks.small_models import random_mixtral
from benchmarks.traffic import CountTraffic
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.sharding.runtime.process import settle_malloc, start_process_group
from expertmesh.sharding.state import local_tensor

VARIANTS = ("full", "lora", "lora-fp8", "lora-nf4", "peft")
LEARNING_RATE = 1e-4
ALPHA = 32.0


@command
def main(argv: Sequence[str] | None = None) -> int:
    sizes = dict(hidden_size=512, intermediate_size=1792, layers=4, vocabulary=8192, experts=8, seq_length=512)
    parser = parser_of(__doc__, ranks=1, ep_size=1, steps=3, rounds=3, json=None, **sizes)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    return Benchmark("benchmarks.adapters", arms_of, save_model, measure, report).main(parser.parse_args(argv), argv)


def arms_of(arguments: argparse.Namespace) -> list[Arm]:
    return [arm_of(name, arguments) for name in arguments.variants]


def save_model(arguments: argparse.Namespace, path: Path) -> None:
    random_mixtral(arguments, num_key_value_heads=2, num_local_experts=arguments.experts).save_pretrained(path)


def arm_of(name: str, arguments: argparse.Namespace) -> Arm:
    if name == "peft":
        return Arm(name, arguments.ranks, {"ep_size": arguments.ep_size, "rank": arguments.rank}, make_peft)
    settings: dict[str, Any] = dict(ep_size=arguments.ep_size, learning_rate=LEARNING_RATE)
    if name != "full":
        kind = name.partition("-")[2] or "auto"
        settings |= dict(adapter="lora", lora_rank=arguments.rank, lora_alpha=ALPHA, base_dtype=kind)
    return Arm(name, arguments.ranks, settings, arms.load_ours)


def make_peft(model: Path, ep_size: int, rank: int) -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world_size = dist.get_world_size()
    spread = {} if world_size == 1 else {"distributed_config": DistributedConfig(fsdp_size=world_size, ep_size=ep_size)}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **spread)
    config = LoraConfig(
        r=rank,
        lora_alpha=int(ALPHA),
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    adapted: Any = get_peft_model(base, config).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(batches: Sequence[Any]) -> float:
        (batch,) = batches
        optimizer.zero_grad()
        loss = adapted(input_ids=batch.tokens_BS, labels=batch.tokens_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return Made(adapted, optimizer, step)


def measure(arguments: argparse.Namespace, arm: Arm, path: Path) -> Figures:
    """On each rank of a variant."""
    if arm.make is arms.load_ours:
        settle_malloc()  # as train_ep.py does
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    batches = [arms.batch_of(*arms.random_sequences(1, arguments.seq_length, arguments.vocabulary, seed=ranks.rank))]
    # what is imported for a model is no part of it
    open_source(path).build()
    start = arms.begin_peak(ranks.device)
    made = arm.made(path)
    kept, traffic = _Kept(made.model), CountTraffic()
    figures = arms.steps_of(lambda: made.step(batches), arguments.steps, ranks.device, first_within=(traffic, kept))
    resident = arms.most_held(ranks.device) - start
    tensors = arms.peak_of(made, lambda: made.step(batches))
    logits = 4 * arguments.seq_length * arguments.vocabulary
    figures.more = {
        "resident": max(arms.gathered(resident)),
        "tensors": max(arms.gathered(tensors)),
        "weights": _bytes(made.model, trained=False),
        "trained": 4 * _bytes(made.model, trained=True),
        # our head keeps no logits, which are there all the same for a moment, unless another keeps them
        "activ.": sum(kept.storages.values()) + (0 if logits in kept.storages.values() else logits),
        "sent": sum(traffic.sent.values()),
        "reduced": traffic.sent["reduce-scatter"] + traffic.sent["all-reduce"],
    }
    return figures


class _Kept(saved_tensors_hooks):
    """Within it, `storages` has the bytes of all that autograd keeps for backward, but for the model's own weights."""

    def __init__(self, model: Any):
        own = {_local(p).untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in own:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach())


def _bytes(model: Any, trained: bool) -> int:
    """Bytes of this rank's parameters that are trained, or of those that are not."""
    return sum(_local(p).numel() * p.element_size() for p in model.parameters() if p.requires_grad == trained)


def report(arguments: argparse.Namespace, rounds: Rounds) -> None:
    """Medians over rounds."""
    print(settings_line(arguments, "fp32", "medians"))
    tokens = arguments.ranks * arguments.seq_length * arguments.steps
    rates = {name: [tokens / sum(one.cpu_seconds) for one in figures] for name, figures in rounds.items()}
    rows = []
    for name, figures in rounds.items():
        middle = {what: statistics.median(one.more[what] for one in figures) for what in figures[0].more}
        over = (middle["tensors"] - middle["weights"]) / (middle["trained"] + middle["activ."])
        mine = rates[name]
        rows.append(
            {
                "variant": name,
                "tokens/CPU-s": f"{statistics.median(mine):.1f}",
                "range": f"{min(mine):.1f}-{max(mine):.1f}",
                **{f"{what} MB": f"{value / MB:,.1f}" for what, value in middle.items()},
                "over": f"{over:.2f}",
                "loss": f"{figures[0].losses[0]:.4f}",
                **{f"x {other}": f"{ratio(mine, rates[other]):.2f}" for other in ("full", "peft") if other in rates},
            }
        )
    print_rows(rows)


if __name__ == "__main__":
    sys.exit(main())
