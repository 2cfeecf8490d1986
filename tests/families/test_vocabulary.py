"""Embeddings of every family, divided by vocabulary."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.hf_model.build import build_model, without_computing
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.parallelize.vocabulary import divide_embedding, divided_vocabulary
from tests.families.configs import VOCABULARY, tiny_config
from tests.families.test_families import FAMILIES


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_an_embedding(family: str) -> None:
    """Whatever the family's class does with what it looks up, the sum of the parts is that, to the last bit; and no
    other code reads the weight."""
    model = build_model(tiny_config(family))
    embedding = model.get_input_embeddings()
    read_elsewhere = _reads_of(model, embedding)
    is_tied = embedding.weight is model.get_output_embeddings().weight
    found = divided_vocabulary(model, 2, "auto")
    assert found.embedding != is_tied
    facts = facts_of(model)
    # HY-V4's class reads its head's dtype
    heads = {path for path, module in model.named_modules() if module is model.get_output_embeddings()}
    assert found.head == (not is_tied and facts.head_is_last and heads.isdisjoint(facts.read_weights))
    if found.embedding:
        assert not read_elsewhere

    torch.manual_seed(0)
    for module in embedding.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.randn(parameter.shape)))
    tokens_BS = torch.randint(0, VOCABULARY, (2, 50))
    expected_BSD = embedding(tokens_BS)
    parts = []
    for index, rows in enumerate(embedding.weight.detach().chunk(2)):
        part = deepcopy(embedding)
        divide_embedding(part, TPGroup(2, index, None))
        part.weight = nn.Parameter(rows)
        with torch.no_grad():
            parts.append(part(tokens_BS))
    assert all(part.any() for part in parts)
    assert torch.equal(parts[0] + parts[1], expected_BSD)


def _reads_of(model: Any, embedding: Any) -> list[str]:
    """Where a forward reads an embedding's weight but in the embedding's own."""
    own, inside, found = type(embedding), [False], []

    def weight(module: Any) -> Tensor:
        if not inside[0]:
            found.append(type(module).__name__)
        parameter: Tensor = module._parameters["weight"]
        return parameter

    def forward(module: Any, tokens: Tensor) -> Tensor:
        inside[0] = True
        out: Tensor = own.forward(module, tokens)
        inside[0] = False
        return out

    embedding.__class__ = type(own.__name__, (own,), {"weight": property(weight), "forward": forward})
    try:
        with without_computing(model):
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="meta"), use_cache=False)
    finally:
        embedding.__class__ = own
    return found
