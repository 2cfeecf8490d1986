"""One rank of a loop of one's own that trains at ep 2, and after each update has vLLM answer with the new weights.

torchrun ... -m tests.servers.loop PACKAGES PORT URL MODEL OUT BY SETTINGS
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import requests
import torch
from accelerate import Accelerator

import expertmesh
from expertmesh.training.api.server_weights import send_weights_of

STEPS, TOKENS = 3, 16
PROMPTS = [[5, 6, 7, 8], [40, 41, 42], [100, 9, 77, 3, 21], [7, 6, 5]]

Answers = list[list[int]]


def by_vllm(engine: Any, url: str, port: int) -> Callable[[], Answers]:
    """With its own trainer's engine, and requests of one's own."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from tests.servers.gloo_transfer import Trainer

    info = NCCLTrainerInitInfo("127.0.0.1", port, 2, packed=False, rank=engine.ranks.rank)
    source = engine.tensors(merge=engine.config.adapter != "none")
    trainer = Trainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)

    def answers() -> Answers:
        trainer.send_weights()
        if engine.ranks.rank != 0:
            return []
        requests.post(f"{url}/reset_prefix_cache", timeout=300).raise_for_status()
        return greedy_answers(url)

    return answers


def greedy_answers(url: str) -> Answers:
    wanted: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    response = requests.post(f"{url}/v1/completions", json=wanted | {"return_token_ids": True}, timeout=300)
    response.raise_for_status()
    return [choice["token_ids"] for choice in response.json()["choices"]]


def communicator(port: int) -> Callable[[Any, Any], None]:
    """In place of `VLLMClient.init_communicator`, which needs NCCL."""
    from trl.generation import vllm_client

    from tests.servers.gloo_transfer import Gloo

    def init_communicator(self: Any, device: Any) -> None:
        told = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with vllm_client.ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": told})
            self.communicator = Gloo("127.0.0.1", port, 0, 2)
            done.result()

    return init_communicator


def by_trl(engine: Any, url: str, port: int) -> Callable[[], Answers]:
    """With what its Trainers generate with, but for what carries the bytes; each rank has its own prompts."""
    from trl.generation import vllm_client
    from trl.generation.vllm_generation import VLLMGeneration

    from tests.servers.gloo_transfer import sent

    vllm_client.packed_nccl_broadcast_producer = sent
    with patch.object(vllm_client.VLLMClient, "init_communicator", communicator(port)):
        generation = VLLMGeneration(
            engine.model, Accelerator(cpu=True), engine.tokenizer, mode="server", server_base_url=url,
            max_completion_length=TOKENS, generation_kwargs={"temperature": 0.0, "ignore_eos": True},
        )  # fmt: skip
    send_weights_of(engine, generation)
    mine = PROMPTS[engine.ranks.rank :: 2]

    def answers() -> Answers:
        generation.sync_weights()
        _, own, _, _ = generation.generate(mine, None, num_generations=1)
        both: list[Any] = [None, None]
        torch.distributed.all_gather_object(both, own)
        return [each for pair in zip(*both, strict=True) for each in pair]

    return answers


def main(packages: str, port: str, url: str, model: str, directory: str, by: str, settings: str) -> None:
    sys.path.append(packages)  # vLLM, behind all that is our own
    from tests.servers.gloo_transfer import register

    register()
    engine, out = expertmesh.load(model, use_cpu=True, learning_rate=2e-2, **json.loads(settings)), Path(directory)
    answers = {"vllm": by_vllm, "trl": by_trl}[by](engine, url, int(port))
    said = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + engine.data_rank)
        ids_BS = torch.randint(3, 120, (4, 16), generator=generator)
        engine.step({"input_ids": ids_BS, "labels": ids_BS})
        said.append(answers())
        engine.export(out / f"step-{step}")
        if engine.config.adapter != "none":
            engine.merge(out / f"step-{step}", out / f"merged-{step}")
    if engine.ranks.rank == 0:
        (out / "answers.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
