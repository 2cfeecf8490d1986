"""That a model which is met again is not run again, and that only what is alike counts as that."""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import pytest
import transformers
from torch import Tensor
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from expertmesh.moe.experts.model_facts import ProbedFacts, facts_of
from expertmesh.moe.hf_model import build, facts_cache
from expertmesh.moe.hf_model.build import build_model
from tests.families.configs import tiny_config as config_of
from tests.tiny import tiny_config

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    """As another process, which has only the files."""
    facts_cache._known.clear()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "expertmesh" / "facts").glob("*"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of models that were run on the meta device, by `probe` or for what is left out, or kept in fp32."""
    ran = []

    def noting(name: str) -> None:
        own = getattr(build, name)

        def run(model: Any) -> Any:
            ran.append(name)
            return own(model)

        monkeypatch.setattr(build, name, run)

    for name in ("probe", "unmet_by_text", "computes_as_held"):
        noting(name)
    return ran


def told_of(model: Any) -> tuple[Any, ...]:
    """All that a build may decide."""
    modules = [(path, type(module), module.training) for path, module in model.named_modules()]
    parameters = [(name, part.shape, part.dtype, part.requires_grad) for name, part in model.named_parameters()]
    buffers = [(name, part.nan_to_num(nan=0.5).tolist()) for name, part in model.named_buffers()]
    return facts_of(model), modules, parameters, buffers


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v4", "jamba", "qwen3_vl_moe"])
def test_a_model_is_run_once(family: str, runs: list[str], tmp_path: Path) -> None:
    first = told_of(build_model(config_of(family), "eager"))
    assert "probe" in runs
    runs.clear()
    assert told_of(build_model(config_of(family), "eager")) == first
    forget()
    assert told_of(build_model(config_of(family), "eager")) == first
    assert runs == []
    assert len(files(tmp_path)) == 1


def test_where_a_config_lies_does_not_matter(runs: list[str], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        tiny_config().save_pretrained(tmp_path / folder)
        build_model(transformers.AutoConfig.from_pretrained(tmp_path / folder))
    assert runs.count("probe") == 1


def test_what_is_unlike_is_run(runs: list[str], tmp_path: Path) -> None:
    build_model(tiny_config())
    build_model(tiny_config(), "eager")
    build_model(tiny_config(sliding_window=5))
    build_model(tiny_config(num_experts_per_tok=3))
    assert runs.count("probe") == 4
    assert len(files(tmp_path)) == 4


def _cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _one_bit(content: bytes) -> bytes:
    at = content.index(b'"draws": false')
    return content[:at] + content[at:].replace(b"false", b"falsf", 1)


def _other_facts(content: bytes) -> bytes:
    """Which JSON cannot tell from what was written."""
    return content.replace(b'"head_is_last": true', b'"head_is_last": false')


@pytest.mark.parametrize(
    "damage", [_cut_short, _one_bit, _other_facts, lambda content: b"", lambda content: b"\xff\n{}\n"]
)
def test_a_damaged_file_is_mended(damage: Callable[[bytes], bytes], runs: list[str], tmp_path: Path) -> None:
    expected = facts_of(build_model(tiny_config()))
    (file,) = files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    forget()
    assert facts_of(build_model(tiny_config())) == expected
    assert runs.count("probe") == 2
    assert file.read_bytes() == content


def test_without_a_place_to_write(monkeypatch: pytest.MonkeyPatch, runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build_model(tiny_config())
    build_model(tiny_config())
    assert runs.count("probe") == 1

    def homeless() -> NoReturn:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    forget()
    build_model(tiny_config())
    assert runs.count("probe") == 2


class _Block(MixtralSparseMoeBlock):
    """Chooses two experts that no module returned."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        _, weights_TK, experts_TK = self.gate(x_BSD)
        out: Tensor = self.experts(x_BSD.flatten(0, 1), experts_TK + 0, weights_TK).view(x_BSD.shape)
        return out


@wraps(MixtralForCausalLM.forward)
def _capped(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
    output = _FORWARD(self, *args, **kwargs)
    output.logits = output.logits.tanh()
    return output


_FORWARD = MixtralForCausalLM.forward


@pytest.mark.parametrize(
    ("what", "by", "fact"),
    [
        ("MixtralSparseMoeBlock", _Block, "experts"),
        # as other packages change a family in place
        ("MixtralForCausalLM.forward", _capped, "head_is_last"),
    ],
)
def test_exchanged_code_is_run(
    what: str, by: Any, fact: str, monkeypatch: pytest.MonkeyPatch, runs: list[str], tmp_path: Path
) -> None:
    """And its facts are this process's alone, as no release says what it is."""
    own = facts_of(build_model(tiny_config()))
    kept = {file: file.read_bytes() for file in files(tmp_path)}
    with monkeypatch.context() as exchanged:
        exchanged.setattr(f"{MIXTRAL}.{what}", by)
        changed = [facts_of(build_model(tiny_config())) for _ in range(2)]
        assert runs.count("probe") == 2
        assert changed[0] == changed[1]
        assert getattr(changed[0], fact) != getattr(own, fact)
    assert facts_of(build_model(tiny_config())) == own
    assert {file: file.read_bytes() for file in files(tmp_path)} == kept


def test_a_function_that_a_family_calls_is_part_of_its_code(
    monkeypatch: pytest.MonkeyPatch, runs: list[str], tmp_path: Path
) -> None:
    build_model(tiny_config())
    monkeypatch.setattr(f"{MIXTRAL}.apply_rotary_pos_emb", lambda q, k, *others: (q, k))
    build_model(tiny_config())
    assert runs.count("probe") == 2
    assert len(files(tmp_path)) == 1


def test_another_release_is_another_file(monkeypatch: pytest.MonkeyPatch, runs: list[str], tmp_path: Path) -> None:
    build_model(tiny_config())
    for change in ("installed", "edited", "ours"):
        forget()
        with monkeypatch.context() as other:
            if change == "installed":
                other.setattr(facts_cache, "_surroundings", lambda: ("mamba_ssm-2.3.0.dist-info",))
            elif change == "edited":
                other.setattr(facts_cache, "_file_digest", lambda module: "0")
            else:
                facts_cache._surroundings.cache_clear()
                other.setattr(facts_cache, "sources_digest", lambda folders: "0")
            build_model(tiny_config())
        facts_cache._surroundings.cache_clear()
    assert runs.count("probe") == 4
    assert len(files(tmp_path)) == 4
    forget()
    monkeypatch.setattr(transformers, "__version__", "6.0.0.dev0")
    build_model(tiny_config())
    assert runs.count("probe") == 5
    assert len(files(tmp_path)) == 4


def test_packages_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts_cache._surroundings.cache_clear()
    before = facts_cache._surroundings()
    (tmp_path / "causal_conv1d-1.6.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    facts_cache._surroundings.cache_clear()
    assert set(facts_cache._surroundings()) - set(before) == {"causal_conv1d-1.6.0.dist-info"}
    assert any(name.startswith("transformers-") for name in before)
    facts_cache._surroundings.cache_clear()


def test_files_hold_all_facts(tmp_path: Path) -> None:
    facts = facts_of(build_model(config_of("qwen3_vl_moe"), "eager"))
    assert facts.left_out
    (file,) = files(tmp_path)
    content = json.loads(file.read_text().splitlines()[1])
    assert content.keys() == ProbedFacts.__dataclass_fields__.keys()


def test_a_function_that_says_no_module_goes_by_its_file() -> None:
    """As some that are made at run time."""
    told: dict[str, Any] = {"__name__": "transformers.models.mixtral.modeling_mixtral"}
    exec("def made(): pass", told)
    told["made"].__module__ = None
    assert facts_cache._file(facts_cache.FactsKey("{}", frozenset({told["made"]})), "facts") is not None
