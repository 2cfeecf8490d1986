"""One rank of trl's GRPOTrainer on an engine at ep 2, for which vLLM generates: before each generation, its answers.

torchrun ... -m tests.servers.grpo PACKAGES PORT URL MODEL OUT
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from datasets import Dataset

import expertmesh
from tests.servers.loop import STEPS, Answers, communicator, greedy_answers


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]


def main(packages: str, port: str, url: str, model: str, out: str) -> None:
    sys.path.append(packages)
    import trl
    from trl.generation import vllm_client

    from tests.servers.gloo_transfer import sent

    class GRPOTrainer(expertmesh.TrainerMixin, trl.GRPOTrainer):
        pass

    engine = expertmesh.load(model, use_cpu=True, ep_size=2)
    engine.tokenizer.pad_token = engine.tokenizer.eos_token
    arguments = trl.GRPOConfig(
        out, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=STEPS,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=8, learning_rate=3e-2,
        use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": text} for text in ("say", "hear", "see", "do")] * STEPS)
    vllm_client.packed_nccl_broadcast_producer = sent
    with patch.object(vllm_client.VLLMClient, "init_communicator", communicator(int(port))):
        trainer = GRPOTrainer(
            model=engine, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=engine.tokenizer
        )
    said: list[Answers] = []
    generation = trainer.vllm_generation
    generate = generation.generate

    def generate_and_compare(*args: Any, **kwargs: Any) -> Any:
        """As it does, with the weights that it was sent."""
        engine.export(f"{out}/step-{len(said)}")
        said.append(greedy_answers(url) if engine.ranks.rank == 0 else [])
        return generate(*args, **kwargs)

    generation.generate = generate_and_compare  # type: ignore[method-assign]
    trainer.train()
    if engine.ranks.rank == 0:
        Path(out, "answers.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
