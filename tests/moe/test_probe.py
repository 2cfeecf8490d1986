"""What one forward on the meta device tells of a model, and that it leaves the model as it was."""

import re
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteMoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, MixtralTopKRouter

from expertmesh.moe.experts.model_facts import SeenExperts
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import UNKNOWN, RouterKind
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.probe import answering_host, probe
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import tiny_config as config_of
from tests.rounding import OTHER_ORDER
from tests.tiny import loaded, relative_error, tiny_config, tiny_mixtral


def on_meta(config: Any, attention: str = "sdpa") -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_what_is_seen() -> None:
    seen = probe(on_meta(tiny_config(num_experts_per_tok=3)))
    assert seen.head_is_last
    assert seen.experts == {
        f"model.layers.{n}.mlp.experts": SeenExperts(
            3, f"model.layers.{n}.mlp.gate", 8, RouterKind("softmax"), num_choices=8
        )
        for n in range(2)
    }


def test_nothing_of_the_meta_device_stays_behind() -> None:
    """Rotary positions of this kind keep the frequencies of long rows where they first computed them."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 3.5, 4.0, 4.5], "factor": 4.0}
    rotary = factors | {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    theirs = tiny_mixtral(rope_parameters=rotary, head_dim=8)
    tokens_BS = torch.arange(3, 19).unsqueeze(0)
    with torch.no_grad():
        found = loaded(build_model(theirs.config, "eager"), theirs).eval()(tokens_BS).logits
        assert relative_error(found, theirs.eval()(tokens_BS).logits) < OTHER_ORDER


def test_what_an_operator_gives_again_lies_where_it_did() -> None:
    """In the storage of its argument, or in one of its own; and what is written to is the argument."""
    with answering_host():
        for _ in range(2):
            x = torch.empty(4, 6, device="meta")
            column, added = x[:, 1], x + 1
            assert (column.untyped_storage()._cdata, column.stride()) == (x.untyped_storage()._cdata, (6,))
            assert added.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert (added.shape, added.dtype) == (x.shape, x.dtype)
            assert x.add_(added) is x
            assert [part.shape for part in x.split(3)] == [(3, 6), (1, 6)]
            assert (x.to(torch.bfloat16) + 1).dtype == torch.bfloat16


def test_a_model_is_left_as_it_was() -> None:
    for training in (False, True):
        model = on_meta(tiny_config()).train(training)
        probe(model)
        assert model.training == training
        for module in model.modules():
            assert not module._forward_hooks
            assert "forward" not in vars(module)
        assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_logits_that_are_worked_on_after_the_head() -> None:
    changes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert not probe(on_meta(GraniteMoeConfig(**changes, num_hidden_layers=1, vocab_size=8))).head_is_last


class _RouterOfScores(MixtralTopKRouter):
    """Gives no logits: weights come first."""

    def forward(self, x: Tensor) -> Any:
        _, weights_TK, experts_TK = super().forward(x)
        return weights_TK, experts_TK


class _BlockOfScores(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        weights_TK, experts_TK = self.gate(x_BSD)
        out: Tensor = self.experts(x_BSD.flatten(0, 1), experts_TK, weights_TK).view(x_BSD.shape)
        return out


class _BlockThatChangesTheChoice(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        _, weights_TK, experts_TK = self.gate(x_BSD)
        out: Tensor = self.experts(x_BSD.flatten(0, 1), experts_TK + 0, weights_TK).view(x_BSD.shape)
        return out


class _BlockThatAsksTheDevice(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        assert bool((x_BSD == 0).any())
        assert int(x_BSD.sum()) == 1
        out: Tensor = super().forward(x_BSD)
        return out


class _BlockWithNames(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        _, weights_TK, experts_TK = self.gate(x_BSD)
        out: Tensor = self.experts(x_BSD.flatten(0, 1), top_k_index=experts_TK, top_k_weights=weights_TK)
        return out.view(x_BSD.shape)


class _BlockOfRows(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        _, weights_TK, experts_TK = self.gate(x_BSD)
        out: Tensor = self.experts(x_BSD, experts_TK, weights_TK)
        return out


class _BlockThatFails(MixtralSparseMoeBlock):
    def forward(self, x_BSD: Tensor) -> Tensor:
        raise KeyError("no such thing")


def with_blocks(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock", block)


def test_weights_in_the_place_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are not as many as experts, and so no logits: such a model has no auxiliary losses, and trains."""
    with_blocks(_BlockOfScores, monkeypatch)
    monkeypatch.setattr("transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter", _RouterOfScores)
    path = "model.layers.0.mlp.experts"
    assert probe(on_meta(tiny_config())).experts[path] == SeenExperts(
        2, "model.layers.0.mlp.gate", 2, UNKNOWN, num_choices=8
    )
    assert [layer.router for layer in moe_layers(build_model(tiny_config()))] == [None, None]


def test_a_choice_that_no_module_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(_BlockThatChangesTheChoice, monkeypatch)
    assert probe(on_meta(tiny_config())).experts["model.layers.0.mlp.experts"] == SeenExperts(
        2, None, 0, UNKNOWN, num_choices=8
    )


def test_code_that_asks_the_device_for_a_number_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(_BlockThatAsksTheDevice, monkeypatch)
    assert len(probe(on_meta(tiny_config())).experts) == 2


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (_BlockWithNames, "MixtralForCausalLM calls its experts in a way that is not supported"),
        (_BlockOfRows, "MixtralForCausalLM calls its experts in a way that is not supported"),
        (_BlockThatFails, "MixtralForCausalLM does not run: KeyError: 'no such thing'"),
    ],
)
def test_models_that_cannot_be_swapped(block: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(block, monkeypatch)
    with pytest.raises(ExpertMeshError, match=said):
        build_model(tiny_config())


def test_experts_that_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = cycle([False, True])

    class OneThatRests(MixtralSparseMoeBlock):
        def __init__(self, config: Any):
            super().__init__(config)
            self.rests = next(rests)

        def forward(self, x_BSD: Tensor) -> Tensor:
            return x_BSD if self.rests else super().forward(x_BSD)

    with_blocks(OneThatRests, monkeypatch)
    with pytest.raises(ExpertMeshError, match=r"did not call its experts model\.layers\.1\.mlp\.experts"):
        build_model(tiny_config())


def test_layers_with_other_experts_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = cycle([8, 4])

    class OfSeveralSizes(MixtralExperts):
        def __init__(self, config: Any):
            config = type(config)(**{**config.to_dict(), "num_local_experts": next(counts)})
            super().__init__(config)

    monkeypatch.setattr("transformers.models.mixtral.modeling_mixtral.MixtralExperts", OfSeveralSizes)
    with pytest.raises(
        ExpertMeshError, match="one model has layers with 4 experts, top-2 routing and 8 experts, top-2 routing"
    ):
        build_model(tiny_config())


def test_masks_that_are_made_of_positions() -> None:
    """transformers hands positions to what makes the masks of most families; not to that of GPT-OSS."""
    assert probe(on_meta(tiny_config())).masks_by_position
    assert not probe(on_meta(config_of("gpt_oss"), "eager")).masks_by_position


@pytest.mark.parametrize(
    ("family", "read", "handed", "uncalled"),
    [
        ("mixtral", set(), set(), set()),
        # its dtype is
        ("glm_moe_dsa", {"self_attn.indexer.weights_proj"}, set(), set()),
        # multiplied by the code around it
        ("jamba", {"mamba.dt_proj"}, set(), {"mamba.dt_proj"}),
        # handed to a kernel, in training alone
        ("nemotron_h", set(), {"mixer.out_proj"}, set()),
        ("granitemoehybrid", set(), {"mamba.out_proj"}, set()),
    ],
)
def test_weights_that_others_read(family: str, read: set[str], handed: set[str], uncalled: set[str]) -> None:
    model = on_meta(config_of(family), "eager")
    classes = {module: type(module) for module in model.modules()}
    seen = probe(model)
    for paths, names in ((seen.read_weights, read), (seen.handed, handed), (seen.uncalled, uncalled)):
        assert {re.sub(r"model\.layers\.\d+\.", "", path) for path in paths} == names
    assert all(type(module) is own for module, own in classes.items())
