"""A tokenizer's files beside weights: those that it was read from, with what is new in it as the only difference.

`save_pretrained` writes a file of its own release instead, with another class and other keys, and not what it has not
read: transformers 4, and what builds on it, may not load that.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...moe.util.errors import ExpertMeshError
from ..files.paths import check_regular
from .hub import resolve_model
from .json_files import read_json

# every name under which transformers' tokenizers save themselves or their chat template, or others theirs
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "additional_chat_templates/*",
)
Files = dict[str, Path | bytes]
"""By name, a file that is copied, or what is written."""

_PIECE_BYTES = 4 * 2**20
_CONFIG, _FAST, _ADDED, _SPECIAL = (
    *("tokenizer_config.json", "tokenizer.json"),
    *("added_tokens.json", "special_tokens_map.json"),
)
_TEMPLATE, _TEMPLATE_OF_PROCESSOR = "chat_template.jinja", "chat_template.json"
_SETTINGS = ("model_max_length", "padding_side", "truncation_side")
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
"""What transformers 4 calls further special tokens, and what 5 does, which reads both. In 4, the second is a table."""
_OF_5_ALONE = ("backend", "is_local", "local_files_only")


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has any file of a tokenizer's."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def is_of_tokenizer(name: str) -> bool:
    """Whether a tokenizer has a file of this name."""
    return any(fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def tokenizer_files(tokenizer: Any, model_config: Path, answer_end: int | None = None) -> Files:
    """The files from which transformers reads this tokenizer.

    They are those of the directory that it came from, with another chat template, new tokens, other special tokens,
    lengths and sides as the only difference. What differs in more, or came from no directory, has the files that
    transformers writes.

    Args:
        model_config: the config.json beside which they will lie.
        answer_end: the token that they are to name as EOS, unless texts would become other tokens then.

    Raises:
        ExpertMeshError: a file of that directory is damaged.
        OSError: a file cannot be read or written.
    """
    made_of = _State(tokenizer).told, model_config, answer_end
    known = _MADE.get(tokenizer)
    if known is None or known[0] != made_of:
        known = _MADE[tokenizer] = (made_of, _made(_ending_in(answer_end, tokenizer), model_config))
    return dict(known[1])


def _made(tokenizer: Any, model_config: Path) -> Files:
    """
    Raises:
        ExpertMeshError, OSError: see `tokenizer_files`.
    """
    state = _State(tokenizer)
    edited = _edited(tokenizer, state)
    if edited is not None and state.is_as(_read(edited, model_config)):
        return edited
    saved = _saved(tokenizer)
    # what is asked for may be more than files can say
    lasting = _read(saved, model_config)
    for files in (edited, _in_words_of_4(saved)):
        if files is not None and lasting is not None and lasting.is_as(_read(files, model_config)):
            return files
    return {**saved}


_MADE: WeakKeyDictionary[Any, tuple[Any, Files]] = WeakKeyDictionary()
"""What was made of each tokenizer as it was then: a run saves the same one with each checkpoint."""


def read_tokenizer(directory: Path, base: Path, config: Any) -> Any:
    """The tokenizer in a directory, such as an adapter's, as one that came from its base's; None: there is none.

    Args:
        config: transformers' own, of the model.
    """
    if not has_tokenizer(directory) or (tokenizer := _loaded(directory, config=config)) is None:
        return None
    tokenizer.name_or_path = str(base)
    return tokenizer


def _ending_in(answer_end: int | None, tokenizer: Any) -> Any:
    """A tokenizer with this EOS, for programs that end generation at that alone, such as llama.cpp; as it is, where
    texts or conversations would become other tokens then."""
    token = tokenizer.added_tokens_decoder.get(answer_end)
    writes_eos = getattr(tokenizer, "add_eos_token", False) or "eos_token" in json.dumps(tokenizer.chat_template)
    if token is None or not token.special or str(token) == tokenizer.eos_token or writes_eos:
        return tokenizer
    tokenizer = deepcopy(tokenizer)
    tokenizer.eos_token = str(token)
    return tokenizer


class _State:
    """What a tokenizer is.

    Attributes:
        template: chat template. added: tokens beside the vocabulary, by id. named: special tokens by their role.
        special: further ones. settings: lengths and sides.
        rest: everything else by which texts become tokens.
        told: a digest of all but `rest`, which does not change unless somebody reaches into a tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.template = tokenizer.chat_template
        self.added = {int(number): _as_json(token) for number, token in tokenizer.added_tokens_decoder.items()}
        names = tokenizer.SPECIAL_TOKENS_ATTRIBUTES
        self.named = {name: None if (said := getattr(tokenizer, name)) is None else str(said) for name in names}
        self.special = list(map(str, tokenizer.extra_special_tokens))
        self.settings = {name: getattr(tokenizer, name) for name in _SETTINGS}
        self.told = repr((self.template, self.added, self.named, self.special, self.settings, self._scalars))

    @property
    def _scalars(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self.tokenizer).items()
            if isinstance(value, bool | int | float | str)
            and not name.startswith("_")
            and not name.endswith("_file")
            and name not in ("name_or_path", "chat_template", *_SETTINGS)
        }

    @property
    def rest(self) -> Any:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            added = {token["content"] for token in self.added.values()}
            vocabulary: Any = {name: n for name, n in self.tokenizer.get_vocab().items() if name not in added}
        else:
            vocabulary = json.loads(backend.to_str())
            for name in ("added_tokens", "padding", "truncation"):  # the last two are of the latest call
                del vocabulary[name]
        return type(self.tokenizer), self._scalars, vocabulary

    def is_as(self, other: "_State | None") -> bool:
        return other is not None and self.told == other.told and self.rest == other.rest


def _as_json(token: Any) -> dict[str, Any]:
    """A token as tokenizer.json has it, but for its id."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": token.content, **{name: getattr(token, name) for name in flags}}


def _edited(tokenizer: Any, state: _State) -> Files | None:
    """The files of the directory that a tokenizer came from, with what is new; None where that is not all.

    Raises:
        ExpertMeshError: one of them is damaged.
    """
    if (origin := _origin(tokenizer)) is None:
        return None
    loaded = _loaded(origin)
    if loaded is None or (was := _State(loaded)).rest != state.rest:
        return None
    files: Files = {}
    for path in sorted({path for pattern in TOKENIZER_FILES for path in origin.glob(pattern)}):
        check_regular(path)
        files[path.relative_to(origin).as_posix()] = path
    if state.told == was.told:
        return files
    if was.added.keys() - state.added.keys() or (isinstance(state.template, dict) and state.template != was.template):
        return None
    tables: dict[str, dict[str, Any]] = {
        name: read_json(path)
        for name, path in files.items()
        if name in (_CONFIG, _FAST, _ADDED, _SPECIAL, _TEMPLATE_OF_PROCESSOR) and isinstance(path, Path)
    }
    before = json.dumps(tables)
    tables.setdefault(_CONFIG, {})
    if state.template != was.template:
        _set_template(state.template, files, tables)
    if new := [number for number, token in sorted(state.added.items()) if token != was.added.get(number)]:
        _add_tokens(new, state.added, tables)
    _set_special(state, was, tables)
    tables[_CONFIG] |= {name: value for name, value in state.settings.items() if value != was.settings[name]}
    unchanged = json.loads(before)
    return files | {name: _written(table) for name, table in tables.items() if table != unchanged.get(name, {})}


def _origin(tokenizer: Any) -> Path | None:
    """The directory that a tokenizer came from; None: there is none, or it has no tokenizer any more."""
    try:
        directory = resolve_model(str(tokenizer.name_or_path), weights=False) if tokenizer.name_or_path else None
    except ExpertMeshError:
        return None
    return directory if directory is not None and has_tokenizer(directory) else None


def _loaded(directory: Path, **given: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, **given)
    except Exception:  # whatever it is, these files are not what a tokenizer can be read from
        return None


def _set_template(template: str | None, files: Files, tables: Mapping[str, dict[str, Any]]) -> None:
    """One template in the place of all: in a file of its own, and wherever else there was one."""
    for name in [name for name in files if name.startswith("additional_chat_templates/")]:
        del files[name]
    files.pop(_TEMPLATE, None)
    if template is not None:
        files[_TEMPLATE] = template.encode()
    for name in (_CONFIG, _TEMPLATE_OF_PROCESSOR):
        if "chat_template" in tables.get(name, {}):
            tables[name]["chat_template"] = template


def _add_tokens(new: Iterable[int], added: Mapping[int, dict[str, Any]], tables: dict[str, dict[str, Any]]) -> None:
    """
    Args:
        new: ids of those that are new, or have other flags, among all that are added to the vocabulary.
    """
    if _FAST not in tables and _ADDED not in tables:
        # else transformers would give the ids behind the vocabulary to the new ones first
        tables[_ADDED] = {token["content"]: number for number, token in sorted(added.items())}
    for number in new:
        if _FAST in tables:
            known = tables[_FAST]["added_tokens"]
            place = next((i for i, token in enumerate(known) if token["id"] == number), len(known))
            known[place : place + 1] = [{"id": number, **added[number]}]
        if "added_tokens_decoder" in tables[_CONFIG]:
            tables[_CONFIG]["added_tokens_decoder"][str(number)] = added[number]
        if _ADDED in tables:
            tables[_ADDED][added[number]["content"]] = number


def _set_special(state: _State, was: _State, tables: Mapping[str, dict[str, Any]]) -> None:
    """Special tokens in the places that had them: as texts, which the added tokens say more of."""
    changed: dict[str, Any] = {name: token for name, token in state.named.items() if token != was.named[name]}
    for table in (tables[_CONFIG], tables.get(_SPECIAL)):
        if table is None:
            continue
        if state.special != was.special:
            there = (name for name in _MORE_SPECIAL if isinstance(table.get(name), list))
            table[next(there, _MORE_SPECIAL[0])] = state.special
        for name, token in changed.items():
            if token is None:
                table.pop(name, None)
            else:
                table[name] = token


def _written(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def _read(files: Mapping[str, Path | bytes], model_config: Path) -> _State | None:
    """What transformers reads from files; None: no tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        write_beside({**files, model_config.name: model_config}, Path(directory))
        loaded = _loaded(Path(directory))
        return None if loaded is None else _State(loaded)


def _saved(tokenizer: Any) -> dict[str, bytes]:
    """The files that transformers writes of a tokenizer.

    Raises:
        OSError: a file cannot be written.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            tokenizer.save_pretrained(directory)
        except Exception as error:
            if type(error) is not Exception:
                raise
            # what the tokenizers package makes of an OSError
            raise OSError(str(error)) from error
        written = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in written}


def _in_words_of_4(saved: Mapping[str, bytes]) -> Files:
    """What transformers 5 has written, with names that transformers 4 knows."""
    table = json.loads(saved[_CONFIG])
    if table.get("tokenizer_class") == "TokenizersBackend":
        table["tokenizer_class"] = "PreTrainedTokenizerFast"
    if special := table.pop(_MORE_SPECIAL[1], None):
        table[_MORE_SPECIAL[0]] = special
    return {**saved, _CONFIG: _written({name: said for name, said in table.items() if name not in _OF_5_ALONE})}


def write_beside(files: Mapping[str, Path | bytes], directory: Path) -> None:
    """Copy or write files into a directory.

    Raises:
        ExpertMeshError: one that is copied cannot be read.
        OSError: one cannot be written.
    """
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        with (directory / name).open("wb") as target:
            for piece in [content] if isinstance(content, bytes) else pieces(content):
                target.write(piece)


def pieces(file: Path) -> Iterator[bytes]:
    """What a file has, a few MiB at a time.

    Raises:
        ExpertMeshError: it cannot be read.
    """
    try:
        with file.open("rb") as source:
            while piece := source.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise ExpertMeshError(f"{file}: cannot be read: {error.strerror}") from error
