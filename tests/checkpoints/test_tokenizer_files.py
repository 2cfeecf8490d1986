"""A tokenizer's files beside an export: the base's, with what is new in it as the only difference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from expertmesh.checkpoints.hf import tokenizer_files as files_of
from expertmesh.checkpoints.hf.tokenizer_files import tokenizer_files, write_beside
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import tiny_config
from tests.tiny import save_tokenizer

OLD, NEW = "{{ messages }}", "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tokenizer as transformers 4 wrote it, in more files than transformers 5 reads."""
    path = tmp_path / "base"
    tiny_config("mixtral").save_pretrained(path)
    save_tokenizer(path)
    found = json.loads((path / "tokenizer_config.json").read_text())
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    old = {name: found[name] for name in ("bos_token", "eos_token")}
    old |= {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder, "model_max_length": 512}
    old |= {"clean_up_tokenization_spaces": False, "added_by_its_authors": "kept", "extra_special_tokens": {}}
    (path / "tokenizer_config.json").write_text(json.dumps(old))
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (path / "tokenizer.model").write_bytes(b"of sentencepiece")
    (path / "chat_template.json").write_text(json.dumps({"chat_template": OLD}))
    return path


def own(path: Path) -> dict[str, Any]:
    """What a directory has of its tokenizer: tables as such."""
    found: dict[str, Any] = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name not in ("config.json", "generation_config.json"):
            name = file.relative_to(path).as_posix()
            found[name] = json.loads(file.read_text()) if name.endswith(".json") else file.read_bytes()
    return found


def written(tokenizer: Any, base: Path, out: Path) -> dict[str, Any]:
    out.mkdir()
    write_beside(tokenizer_files(tokenizer, base / "config.json"), out)
    return own(out)


def nothing(_: Any) -> None:
    pass


def template(tokenizer: Any) -> None:
    tokenizer.chat_template = NEW


def tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<a>", "b c"])


def special(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<x>"]})
    tokenizer.eos_token = "<s>"


def sides(tokenizer: Any) -> None:
    tokenizer.padding_side, tokenizer.model_max_length = "left", 64
    tokenizer("say hello", truncation=True, max_length=4)  # which the fast tokenizer remembers


CHANGES: dict[Callable[[Any], None], dict[str, Any]] = {
    nothing: {},
    template: {"chat_template.jinja": NEW.encode(), "chat_template.json": {"chat_template": NEW}},
    tokens: {},
    special: {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<pad>",
                                          "additional_special_tokens": ["<x>"]}},
    sides: {},
}  # fmt: skip
"""What is done to a tokenizer, and the files that are new or others then, but for the two that are compared below."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_every_file_and_key_is_kept(base: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    number = len(tokenizer)
    change(tokenizer)
    there, made = own(base), written(tokenizer, base, tmp_path / "out")
    config, fast = "tokenizer_config.json", "tokenizer.json"
    new = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if number > 1}
    assert {name for name in made if made[name] != there.get(name)} - {config, fast} == CHANGES[change].keys()
    assert {name: made[name] for name in CHANGES[change]} == CHANGES[change]
    assert there.keys() <= made.keys()
    # what is new in the tables stands behind what was there
    assert made[fast]["added_tokens"][: len(there[fast]["added_tokens"])] == there[fast]["added_tokens"]
    assert {token["content"]: token["id"] for token in made[fast]["added_tokens"][2:]} == new
    assert {**made[fast], "added_tokens": 0} == {**there[fast], "added_tokens": 0}
    decoder = made[config]["added_tokens_decoder"]
    assert {token["content"]: int(number) for number, token in decoder.items()} == {"<s>": 0, "</s>": 1, **new}
    asked: dict[Any, set[str]] = {
        special: {"eos_token", "pad_token", "additional_special_tokens"},
        sides: {"padding_side"},
    }
    assert made[config].keys() == there[config].keys() | asked.get(change, set())
    others = there[config].keys() - {"added_tokens_decoder", "eos_token", "model_max_length"}
    assert {name: made[config][name] for name in others} == {name: there[config][name] for name in others}
    # and transformers reads the same tokenizer
    (tmp_path / "out" / "config.json").write_bytes((base / "config.json").read_bytes())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(loaded) == number + len(new) == len(tokenizer)
    for text in ("say hello <a> to the b c world<x></s>", ""):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    for name in ("chat_template", "eos_token_id", "pad_token_id", "padding_side", "model_max_length"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name


def test_a_template_stands_where_there_were_several(base: Path, tmp_path: Path) -> None:
    """And in the config, if there was one: whoever reads the one place finds the same as who reads the other."""
    (base / "chat_template.json").unlink()
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": OLD}))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(OLD)
    (base / "chat_template.jinja").write_text(OLD)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template == {"default": OLD, "tool_use": OLD}
    tokenizer.chat_template = NEW
    made = written(tokenizer, base, tmp_path / "out")
    assert made["tokenizer_config.json"]["chat_template"] == made["chat_template.jinja"].decode() == NEW
    assert made.keys() == own(base).keys() - {"additional_chat_templates/tool_use.jinja"}


def test_templates_stay_several(base: Path, tmp_path: Path) -> None:
    """Where tokens alone are new."""
    (base / "chat_template.json").unlink()
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(OLD)
    (base / "chat_template.jinja").write_text(NEW)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens(tokenizer)
    made, there = written(tokenizer, base, tmp_path / "out"), own(base)
    assert {name for name in made if made[name] != there[name]} == {"tokenizer.json", "tokenizer_config.json"}
    assert made["tokenizer_config.json"]["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_token_that_becomes_special(base: Path, tmp_path: Path) -> None:
    """Its entry is replaced, and stands where it stood."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens(tokenizer)
    there = written(tokenizer, base, grown := tmp_path / "grown")
    tiny_config("mixtral").save_pretrained(grown)
    tokenizer = AutoTokenizer.from_pretrained(grown)
    tokenizer.add_special_tokens({"pad_token": "<a>", "sep_token": "hello"})
    made = written(tokenizer, grown, tmp_path / "out")
    was, now = ({t["content"]: t for t in files["tokenizer.json"]["added_tokens"]} for files in (there, made))
    assert list(now) == [*was, "hello"]
    assert {name for name in was if now[name] != was[name]} == {"<a>"}
    assert now["<a>"]["special"]
    assert not was["<a>"]["special"]
    changed = {name for name in made if made[name] != there[name]}
    assert changed == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


@pytest.mark.parametrize("keeps", ["", "the template writes EOS", "it is no special token"])
def test_the_end_of_answers_is_eos(base: Path, tmp_path: Path, keeps: str) -> None:
    """As in published models that chat; unless conversations would become other tokens then."""
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens("<end>", special_tokens=keeps != "it is no special token")
    tokenizer.chat_template = NEW + "{{ eos_token }}" if keeps == "the template writes EOS" else NEW
    end = tokenizer.convert_tokens_to_ids("<end>")
    write_beside(tokenizer_files(tokenizer, base / "config.json", end), out := tmp_path)
    eos = tokenizer.eos_token if keeps else "<end>"
    assert own(out)["tokenizer_config.json"]["eos_token"] == own(out)["special_tokens_map.json"]["eos_token"] == eos
    assert tokenizer.eos_token == "</s>"
    talk = [{"role": "user", "content": "say"}]
    (out / "config.json").write_bytes((base / "config.json").read_bytes())
    loaded: Any = AutoTokenizer.from_pretrained(out)
    assert loaded.eos_token == eos
    assert loaded.apply_chat_template(talk)["input_ids"] == tokenizer.apply_chat_template(talk)["input_ids"]


def test_without_a_fast_tokenizers_file(base: Path, tmp_path: Path) -> None:
    """Files of vocabulary and merges, beside which new tokens have a file of their own."""
    old = AutoTokenizer.from_pretrained(base)
    model = json.loads(old.backend_tokenizer.to_str())["model"]
    tiny_config("qwen3_moe").save_pretrained(path := tmp_path / "old")
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}')
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens(tokenizer)
    made = written(tokenizer, path, tmp_path / "out")
    number = len(tokenizer)
    assert list(made.pop("added_tokens.json").items())[-2:] == [("<a>", number - 2), ("b c", number - 1)]
    assert made == own(path)


def test_what_differs_in_more_is_written_by_transformers(base: Path, tmp_path: Path) -> None:
    """Another vocabulary, or a tokenizer that came from no directory."""
    save_tokenizer(other := tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    expected = own(other)
    for number, name in enumerate((str(base), "", str(tmp_path / "gone"))):
        tokenizer.name_or_path = name
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        made = written(tokenizer, base, tmp_path / f"{number}")
        assert made.keys() == expected.keys()
        assert made["tokenizer.json"]["normalizer"] == {"type": "Lowercase"}
        # which transformers 4 loads, too
        assert made["tokenizer_config.json"]["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert made["tokenizer_config.json"]["additional_special_tokens"] == ["<x>"]
        assert made["tokenizer_config.json"].keys().isdisjoint({"extra_special_tokens", "is_local", "backend"})


def test_a_run_makes_them_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of its checkpoints, and again if the tokenizer has changed since."""
    calls = list[Path]()
    loads = files_of._loaded

    def counted(path: Path) -> Any:
        calls.append(path)
        return loads(path)

    monkeypatch.setattr(files_of, "_loaded", counted)
    tokenizer = AutoTokenizer.from_pretrained(base)
    template(tokenizer)
    first = tokenizer_files(tokenizer, base / "config.json")
    assert len(calls) == 2, "the base's, and what was made of it"
    assert tokenizer_files(tokenizer, base / "config.json") == first
    assert len(calls) == 2
    tokens(tokenizer)
    assert tokenizer_files(tokenizer, base / "config.json") != first
    assert len(calls) == 4


def test_a_file_that_cannot_be_read_is_named(base: Path, tmp_path: Path) -> None:
    (base / "vocab.txt").symlink_to("/proc/self/mem")  # a regular file, whose beginning cannot be read
    tokenizer = AutoTokenizer.from_pretrained(base)
    with pytest.raises(ExpertMeshError, match=r"vocab\.txt: cannot be read: Input/output error"):
        written(tokenizer, base, tmp_path / "out")
