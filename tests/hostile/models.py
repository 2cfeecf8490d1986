"""Small models of every form, and what the product loads from a directory."""

from pathlib import Path
from typing import Any

import torch

from expertmesh.checkpoints.files.dtypes import as_tensor
from expertmesh.checkpoints.load import load_model
from expertmesh.checkpoints.opening import open_readable
from expertmesh.checkpoints.training_state.marker import MARKER
from expertmesh.sharding.parallelize.parallelize import materialize
from expertmesh.sharding.topology import Topology

SMALL: dict[str, Any] = dict(
    hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=2, vocab_size=10,
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


def loaded_model(path: Path) -> Any:
    """The model in a directory of Hugging Face form or EP shards, loaded as for training on one rank."""
    readable = open_readable(path)
    model = readable.checkpoint.source.build()
    materialize(model, torch.device("cpu"))
    load_model(model, readable.checkpoint, Topology(1, 1))
    return model


def loaded(path: Path) -> Tensors:
    """Its parameters; those of a training checkpoint as an export reads them."""
    if not (path / MARKER).exists():
        return {name: parameter.detach() for name, parameter in loaded_model(path).named_parameters()}
    readable = open_readable(path)
    reader = readable.make_reader()
    found = {}
    for name, shape in readable.names.parameters.items():
        found[name] = torch.cat(
            [as_tensor(piece.data, piece.dtype).clone() for piece in reader.pieces(name, range(shape[0]))]
        )
        assert found[name].shape == shape
    reader.close()
    return found


def same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name in a
    )
