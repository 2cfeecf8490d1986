"""A teacher without experts to distribute: transformers' own class under FSDP2, for forwards alone.

Shape suffixes: B sequences, S positions, V vocabulary, N target tokens, C of them at a time, K of the likeliest tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard

from ...checkpoints.hf.headers import read_headers
from ...checkpoints.hf.names import renamed
from ...checkpoints.hf.source import ModelSource
from ...moe.hf_model.build import build_reference
from ...moe.util.errors import ExpertMeshError
from ...sharding.mesh import build_mesh
from ...sharding.parallelize.parallelize import materialize
from ...sharding.runtime.preemption import boundary
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.topology import Topology
from ..config.train_config import TrainConfig
from ..data.batch import AS_LONG_AS_LONGEST, Batch
from ..data.sequences import Rows
from ..loss.head import most_likely

_TARGETS_AT_ONCE = 1024


class DenseTeacher:
    """The model on its ranks, each with sequences of its own. All ranks make it together.

    Attributes:
        mesh: of these ranks, with data parallelism alone, whatever the run has.

    Raises:
        ExpertMeshError: on all ranks, where it cannot be built or read.
    """

    def __init__(self, config: TrainConfig, source: ModelSource, ranks: Ranks):
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        with raise_together():
            check_plain(source)
            self.model: Any = build_reference(source.config, config.attn_implementation, dtype).eval()
            places = _places(self.model, source.path)
        self.ranks, self.maker = ranks, AS_LONG_AS_LONGEST
        self.mesh = build_mesh(ranks.device.type, Topology(ranks.world_size, ep_size=1))
        for layer in _layers(self.model):
            fully_shard(layer, mesh=self.mesh.all_ranks)
        fully_shard(self.model, mesh=self.mesh.all_ranks)
        materialize(self.model, ranks.device)
        state = self.model.state_dict()
        dcp.load({name: state[target] for name, target in places.items()}, HuggingFaceStorageReader(str(source.path)))

    @staticmethod
    def rows_of(rows: Rows) -> Rows:
        """The same data, a sample in each sequence: transformers' classes do not all keep packed ones apart."""
        return Rows(rows.samples)

    def outputs(self, batches: Iterable[Batch], top_k: int) -> Iterator[tuple[Sequence[Batch], Sequence[Tensor]]]:
        """As `steps.evaluate.head_outputs`: batches on the device, and (N, 2, K) of each."""
        for number, batch in enumerate(batches):
            if number > 0:
                boundary()
            here = batch.to(self.ranks.device)
            mask_BS = None if here.is_token_BS is None else here.is_token_BS.long()
            logits_BSV = self.model(input_ids=here.tokens_BS, attention_mask=mask_BS, use_cache=False).logits
            logits_TV = logits_BSV.flatten(0, 1)
            parts = [
                most_likely(logits_TV[at_C].float(), top_k) for at_C in here.target_index_N.split(_TARGETS_AT_ONCE)
            ]
            yield [here], [torch.cat(parts)]


def check_plain(source: ModelSource) -> None:
    """
    Raises:
        ExpertMeshError: the files of a dense teacher are quantized.
    """
    if source.quantization is not None:
        raise ExpertMeshError(f"{source.path} is quantized, which is read of models with experts alone")


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    """The decoder layers: the list of modules with most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[])


def _places(model: Any, path: Path) -> dict[str, str]:
    """The model's tensor that each tensor in the files is.

    Raises:
        ExpertMeshError: a tensor is missing, or is none of the model's; or it is stored in another form.
    """
    # tied ones are one tensor
    state, stored = model.state_dict(keep_vars=True), read_headers(path)
    tied = {name: [other for other in state if state[other] is state[name]] for name in state}
    places = {}
    for name, target, pattern in renamed(model, stored, dict.fromkeys(state, True)):
        if pattern is not None or (target in state and stored[name].shape != tuple(state[target].shape)):
            raise ExpertMeshError(f"{path}: tensor {name} is stored in another form than {type(model).__name__} has it")
        if target in state:
            places[name] = target
    there = {other for target in places.values() for other in tied[target]}
    if missing := sorted(state.keys() - there):
        raise ExpertMeshError(f"{path}: tensor {missing[0]} of {type(model).__name__} is missing")
    return places
