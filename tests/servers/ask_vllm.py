"""What vLLM makes of adapters, on a CPU: run by the Python of its own environment, with a table of JSON as argument.

vLLM's own classes load the model, refuse or load each adapter, and put it into the tensors that their kernels read,
which are written here. With LoRA enabled, vLLM computes experts by a kernel in Triton, which its build for CPUs lacks:
without `as_released` it takes the kernel for CPUs, and believes that this adds adapters. So tokens are right where no
expert has an adapter.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel


def compute_experts_without_triton() -> None:
    FusedMoEConfig.is_lora_enabled = property(lambda self: False, lambda self, value: None)
    FusedMoEKernel.supports_lora = lambda self: True
    FusedMoEWithLoRA.set_mapping = BaseLayerWithLoRA.set_mapping


def deltas_of(manager: Any) -> dict[str, torch.Tensor]:
    """B · A, scaled, of every matrix, by the name that vLLM looks for in an adapter: what is not zero."""
    found: dict[str, torch.Tensor] = {}
    for path, module in manager.modules.items():
        names = manager.packed_modules.get(path, [path])
        if isinstance(module, FusedMoE3DWithLoRA):
            made = [
                (f"{path}.gate_up_proj", module.w13_lora_a_stacked[0][0], module.w13_lora_b_stacked[0][0]),
                (f"{path}.down_proj", module.w2_lora_a_stacked[0][0], module.w2_lora_b_stacked[0][0]),
            ]
        elif isinstance(module, FusedMoEWithLoRA):
            made = list(zip(names, module.lora_a_stacked, module.lora_b_stacked, strict=True))
        elif isinstance(module.lora_a_stacked, torch.Tensor):
            continue  # embedding and head, of which we have no adapters
        else:
            pairs = zip(names, module.lora_a_stacked, module.lora_b_stacked, strict=True)
            made = [(name, a[0, 0], b[0, 0]) for name, a, b in pairs]
        found |= {name: (b.float() @ a.float()).contiguous() for name, a, b in made if b.any()}
    return found


def allows(adapter: str, rank: int) -> bool:
    try:
        PEFTHelper.from_local_dir(adapter, None).validate_legal(LoRAConfig(max_lora_rank=rank))
    except ValueError:
        return False
    return True


def main() -> None:
    asked = json.loads(sys.argv[1])
    if not asked.get("as_released"):
        compute_experts_without_triton()
    llm = LLM(
        asked["base"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        enable_lora=True,
        **asked["options"],
    )
    manager = llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)

    def tokens(adapter: LoRARequest | None) -> list[int]:
        prompt = {"prompt_token_ids": asked["prompt"]}
        (answer,) = llm.generate([prompt], sampling, lora_request=adapter, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    ranks = get_args(MaxLoRARanks)
    answers: dict[str, Any] = {"": tokens(None), "ranks": ranks}
    for number, path in enumerate(asked["adapters"], start=1):
        name = Path(path).name
        answers[f"rank of {name}"] = next((rank for rank in ranks if allows(path, rank)), None)
        adapter = LoRARequest(name, number, path, is_3d_lora_weight=asked.get("is_3d", False))
        try:
            llm.llm_engine.add_lora(adapter)  # by itself: a request for one that is refused would never end
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
            continue
        answers[name] = tokens(adapter)
        save_file(deltas_of(manager), f"{asked['out']}/{name}.safetensors")
    Path(asked["out"], "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
