"""What it gains to send a token once to each node: `python -m benchmarks.dispatch --megabits 200`, as root, on Linux.

Whole training steps (forward, backward, clipping, AdamW) of one random model with many small experts, on two nodes
of this machine whose link is slowed, two ranks of one thread on each, with each --dispatch in turn: one step each,
round after round, in one launch, on the same model and batch. Losses of a round must agree. Beside the times stand the
rows that left a node in a step, counted as they were sent. With --megabits 0 all ranks are on one node, by loopback.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.network import Network, can_make_networks
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.dispatch import exchange
from expertmesh.moe.dispatch.dispatcher_entries import DISPATCHERS
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.parallelize.choices import Strategy
from expertmesh.sharding.parallelize.dispatchers import choose_dispatcher
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.environment import cpu_model
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import train_step

RANKS_PER_NODE = 2
VARIANTS = DISPATCHERS.names()


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=200, help="of the link per second; 0: all ranks on one node")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=96, help="of an expert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=512, help="tokens per rank")
    parser.add_argument("--rounds", type=int, default=9, help="after one that is not measured")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return measure(arguments.worker, arguments)
    if arguments.megabits and not can_make_networks():
        parser.error("--megabits: two nodes need root and network namespaces; --megabits 0 needs neither")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory / "model", arguments)
        launch(directory, arguments)
        figures = json.loads((directory / "figures.json").read_text())
    print_table(figures, arguments)
    return 0


def save_model(path: Path, arguments: argparse.Namespace) -> None:
    """Save a random model with many small experts, of the kind of Qwen3-30B-A3B's."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        moe_intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def launch(directory: Path, arguments: argparse.Namespace) -> None:
    """Run `measure` on all ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    worker = ["-m", "benchmarks.dispatch", *sys.argv[1:], "--worker", str(directory)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not arguments.megabits:
        ranks = ["--standalone", "--nproc-per-node", str(2 * RANKS_PER_NODE)]
        subprocess.run([*torchrun, *ranks, *worker], check=True, timeout=1800, env=variables)
        return
    with ExitStack() as closing:
        network = closing.enter_context(Network())
        network.slow(arguments.megabits)
        nodes = []
        for number in range(2):
            ranks = ["--nnodes", "2", "--nproc-per-node", str(RANKS_PER_NODE), "--node-rank", str(number)]
            ranks += ["--master-addr", network.address, "--master-port", "29534"]
            command = network.inside(number, [*torchrun, *ranks, *worker])
            nodes.append(subprocess.Popen(command, env={**variables, "GLOO_SOCKET_IFNAME": network.interface(number)}))
        codes = [node.wait(timeout=1800) for node in nodes]
    if any(codes):
        raise RuntimeError(f"the nodes' runs ended with {codes}")


def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """On each rank: a step with each dispatch in turn."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    config = TrainConfig(
        model="-", dataset=["-"], cross_entropy="chunked", learning_rate=1e-5, ep_size=ranks.world_size
    )
    source = open_source(directory / "model")
    model = assemble(config, source, "cpu").model
    mesh = build_mesh("cpu", config.topology(ranks.world_size))
    place(config, model, source, mesh, ranks.device)
    makers = {
        name: choose_dispatcher(mesh, Strategy(dispatch=name, ranks_per_node=RANKS_PER_NODE), arguments.top_k)
        for name in VARIANTS
    }
    optimizer = build_optimizer(model.train(), config, mesh)
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(0, arguments.vocabulary, (1, arguments.seq_length), generator=generator).tolist()
    batches = [collate([[Sample(row, [True] * len(row))] for row in tokens])]
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "cpu": [], "rows": [], "loss": []} for name in VARIANTS
    }
    for number in range(-1, arguments.rounds):
        for name in VARIANTS:
            for layer in moe_layers(model):
                layer.dispatcher = makers[name](arguments.experts)
            with counting(arguments.hidden_size) as left:
                dist.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                loss = train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.0), 1.0).loss
                dist.barrier()
                seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
            sums = torch.tensor([cpu, left[0]], dtype=torch.float64)
            dist.all_reduce(sums)
            if number >= 0:
                for what, value in zip(found[name], (seconds, *sums.tolist(), loss), strict=True):
                    found[name][what].append(value)
    if ranks.rank == 0:
        (directory / "figures.json").write_text(json.dumps(found))
    end_process_group()
    return 0


class counting:
    """Within it, counts the rows of a token's width that leave this rank's node."""

    def __init__(self, width: int):
        self.width, self.left = width, [0]

    def __enter__(self) -> list[int]:
        original, node = exchange.UnderWay, dist.get_rank() // RANKS_PER_NODE

        def begin(out: Any, rows: Any, received: Any, sent: Any, group: Any) -> Any:
            if rows.shape[1] == self.width:
                to = dist.get_process_group_ranks(group)
                self.left[0] += sum(n for n, rank in zip(sent, to, strict=True) if rank // RANKS_PER_NODE != node)
            return original(out, rows, received, sent, group)

        self.patch = mock.patch.object(exchange, "UnderWay", begin)
        self.patch.start()
        return self.left

    def __exit__(self, *error: object) -> None:
        self.patch.stop()


def print_table(figures: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    for losses in zip(*(figures[name]["loss"] for name in VARIANTS), strict=True):
        # the model moves on between them, by a step at a rate of 1e-5
        if not all(abs(loss - losses[0]) <= 1e-2 * abs(losses[0]) for loss in losses):  # not true of NaN either
            raise RuntimeError(f"the losses of a round differ: {losses}")
    link = f"a link of {arguments.megabits:g} Mbit/s between two nodes" if arguments.megabits else "loopback"
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}; {2 * RANKS_PER_NODE} ranks of one thread, "
        f"{RANKS_PER_NODE} per node, {link}; {arguments.layers} layers of width {arguments.hidden_size}, "
        f"{arguments.experts} experts of width {arguments.intermediate_size}, top-{arguments.top_k}, "
        f"{arguments.seq_length} tokens per rank, fp32; medians of {arguments.rounds} rounds of a step each, in turn"
    )
    print(f"{'dispatch':<10}{'seconds/step':>14}{'CPU-s/step':>12}{'rows between nodes':>20}{'plain over it':>15}")
    for name in VARIANTS:
        of = figures[name]
        ratios = [plain / mine for plain, mine in zip(figures["plain"]["seconds"], of["seconds"], strict=True)]
        print(
            f"{name:<10}{statistics.median(of['seconds']):>14.3f}{statistics.median(of['cpu']):>12.3f}"
            f"{statistics.median(of['rows']):>20,.0f}{statistics.median(ratios):>14.2f}x"
            f"   ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    sys.exit(main())
