"""RoPE scaling, to positions beyond those that a model was trained with: what is asked for, and the config it leads to.

transformers has `rope_parameters` for it: a table, or a table for each kind of layers where kinds differ. Keys that
change how positions are scaled are set anew; all others (`rope_theta`, `partial_rotary_factor`, ...) stay.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..util.errors import ExpertMeshError
from .config import tie_text_as_whole

_ORIGINAL, _POSITIONS = "original_max_position_embeddings", "max_position_embeddings"


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


# what a key's value must be, in words; whether it is
_FACTOR = ("a number of at least 1", lambda value: _is_above_0(value) and value >= 1)
_NUMBER = ("a positive number", _is_above_0)
_NUMBERS = (
    "a list of positive numbers",
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_above_0, value)),
)
_COUNT = ("an integer of at least 1", lambda value: type(value) is int and 1 <= value < 2**31)
_SWITCH = ("true or false", lambda value: isinstance(value, bool))

_Keys = dict[str, tuple[str, Callable[[Any], bool]]]
# by type
_NEEDED: dict[str, _Keys] = {
    "linear": {"factor": _FACTOR},
    "dynamic": {"factor": _FACTOR},
    "yarn": {"factor": _FACTOR},
    "proportional": {"factor": _FACTOR},
    "llama3": {"factor": _FACTOR, "low_freq_factor": _NUMBER, "high_freq_factor": _NUMBER},
    "longrope": {"factor": _FACTOR, "short_factor": _NUMBERS, "long_factor": _NUMBERS},
}
_OF_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_POSSIBLE: dict[str, _Keys] = {
    "yarn": {_ORIGINAL: _COUNT, **dict.fromkeys(_OF_YARN, _NUMBER), "truncate": _SWITCH},
    "llama3": {_ORIGINAL: _COUNT},
    "longrope": {_ORIGINAL: _COUNT, "attention_factor": _NUMBER},
}
# what a family may read besides, whatever the type
_ANYWHERE: _Keys = dict.fromkeys(("rope_theta", "partial_rotary_factor", "short_mscale", "long_mscale"), _NUMBER)
_STRETCHING = {
    *("rope_type", "type", "short_mscale", "long_mscale"),
    *(key for keys in (*_NEEDED.values(), *_POSSIBLE.values()) for key in keys),
}
"""Keys that say how positions are scaled."""
_OF_FACTOR = {"rope_type", "type", "factor", "attention_factor"}
"""Those of them that belong to a particular factor."""


@dataclass(frozen=True)
class RopeScaling:
    """The RoPE scaling that is asked for.

    Attributes:
        tables: keys of transformers' `rope_parameters` by kind of layers; under None, those of all layers that see all
            positions.
    """

    tables: Mapping[str | None, Mapping[str, Any]]

    def as_json(self) -> Any:
        """The JSON that `read_rope_scaling` reads as this."""
        return self.tables.get(None, self.tables)


def read_rope_scaling(text: str, where: str = "--rope-scaling") -> RopeScaling:
    """Parse TYPE:FACTOR (`yarn:4`), or a JSON object of transformers' own keys, or of such objects by kind of layers.

    Args:
        where: where the text came from, for errors.

    Raises:
        ExpertMeshError: it is none of these, or has a type or key that transformers lacks, or an impossible value.
    """
    if not text.lstrip().startswith("{"):
        rope_type, _, factor = text.partition(":")
        if rope_type in _NEEDED and len(_NEEDED[rope_type]) > 1:
            keys = ", ".join(_NEEDED[rope_type])
            raise ExpertMeshError(f"{where} {text:.80}: {rope_type} takes more than a factor: give JSON with {keys}")
        if rope_type in _NEEDED and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", factor):
            raise ExpertMeshError(f"{where} {text:.80}: the factor must be a number of at least 1, as in {rope_type}:4")
        table = {"rope_type": rope_type, "factor": float(factor) if rope_type in _NEEDED else None}
        return RopeScaling({None: _checked(table, f"{where} {text:.80}")})
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExpertMeshError(f"{where}: is not a JSON object: {error}") from error
    if content and all(isinstance(table, dict) for table in content.values()):
        return RopeScaling({kind: _checked(table, f"{where}: {kind}") for kind, table in content.items()})
    return RopeScaling({None: _checked(content, where)})


def _checked(table: dict[str, Any], where: str) -> dict[str, Any]:
    rope_type = table.get("rope_type", table.get("type"))
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise ExpertMeshError(
            f"{where}: rope_type is {rope_type!r:.80}; it must be one of {', '.join(_NEEDED)}, as in yarn:4"
        )
    needed = _NEEDED[rope_type]
    known = needed | _POSSIBLE.get(rope_type, {}) | _ANYWHERE
    if missing := [key for key in needed if key not in table]:
        raise ExpertMeshError(f"{where}: {rope_type} needs {', '.join(missing)}")
    for key, value in table.items():
        if key in ("rope_type", "type"):
            continue
        if key not in known:
            raise ExpertMeshError(f"{where}: {rope_type} has no {key:.80}; it has {', '.join(known)}")
        said, fits = known[key]
        # null is transformers' own way to say that something optional is not given
        if not fits(value) and (value is not None or key in needed):
            raise ExpertMeshError(f"{where}: {key} is {value!r:.80}; it must be {said}")
    return {"rope_type": rope_type, **{key: value for key, value in table.items() if key not in ("rope_type", "type")}}


@dataclass(frozen=True)
class RopeChange:
    """What RoPE scaling changes in a model's config.

    Attributes:
        part: which part of the config describes the language model; None if it is no config of parts.
        settings: the new ones of that part: `rope_parameters`, complete; `max_position_embeddings`, under the family's
            name for it; the positions before scaling, where the family has them as a setting; and `head_dim`, where the
            config leaves it open.
        lines: what was replaced by what, in words.
    """

    part: str | None
    settings: Mapping[str, Any]
    lines: tuple[str, ...]

    @property
    def parameters(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.settings["rope_parameters"]
        return found

    def apply(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with the change. A file that has `rope_scaling`, as before transformers 5, keeps it, for
        readers that know no other name."""
        own = dict(raw.get(self.part) or {}) if self.part else dict(raw)
        is_old = "rope_parameters" not in own and "rope_theta" in own and "rope_type" in self.parameters
        own.pop("rope_scaling", None)
        own |= self.settings
        if is_old:
            own["rope_scaling"] = own.pop("rope_parameters")
        return {**raw, self.part: own} if self.part else own


def rope_change(config: Any, scaling: RopeScaling) -> RopeChange:
    """The change that a scaling makes to a config of transformers; the config itself is not modified.

    A scaling that the model already has is replaced: the factor applies to the original number of positions, and the
    type's other keys (`beta_fast`, `mscale`, ...) stay if the type does.

    Raises:
        ExpertMeshError: the family has no rotary embedding, or none that can be scaled so; or kinds of layers differ
            and it is not clear which are meant; or the model would have fewer positions than before.
    """
    text = config.get_text_config()
    parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
    current = getattr(text, "rope_parameters", None)
    if not current:
        raise ExpertMeshError(f"--rope-scaling: {config.model_type} has no rotary embedding to scale; leave it out")
    had = getattr(text, _POSITIONS, None)
    kinds = _kinds_of_layers(text, current)
    by_kind: dict[str | None, Any] = {kind: current[kind] for kind in kinds} if kinds else {None: current}
    tables = _by_kind(scaling, by_kind)
    changed = {kind: _scaled(by_kind[kind], table, had, kind) for kind, table in tables.items()}
    positions = max(ends for _, _, ends in changed.values())
    if had and all(round(original * table["factor"]) < had for table, original, _ in changed.values()):
        (kind, (table, original, _)), *_ = changed.items()
        raise ExpertMeshError(
            f"--rope-scaling: {_said(table, original)} would leave "
            f"{round(original * table['factor']):,} of the {had:,} positions that this model has by "
            f"{_said(by_kind[kind])}: the factor multiplies the positions before any scaling; give "
            f"{math.floor(had / original) + 1} or more"
        )
    lines = tuple(
        (f"rope{'' if kind is None else f' of {kind}'}: {_said(table, original)} instead of {_said(by_kind[kind])}")
        for kind, (table, original, _) in changed.items()
    )
    length = f"stays {had:,}" if had == positions else f"becomes {positions:,}" + (f", of {had:,}" if had else "")
    new = {kind: table for kind, (table, _, _) in changed.items()}
    first = next(original for _, original, _ in changed.values())
    return RopeChange(
        part=parts[0] if parts else None,
        settings={
            "rope_parameters": {**current, **new} if kinds else new[None],
            text.attribute_map.get(_POSITIONS, _POSITIONS): positions,
            **({_ORIGINAL: first} if getattr(text, _ORIGINAL, None) is not None else {}),
            **_head_dim(text),
        },
        lines=(*lines[:-1], f"{lines[-1]}; {_POSITIONS} {length}"),
    )


def _kinds_of_layers(text: Any, tables: Mapping[str, Any]) -> list[str]:
    """The kinds of layers with a table of their own; none if all layers have the same. As transformers'
    `RotaryEmbeddingConfigMixin.nested_rope_parameter_keys`, which 5.17 lacks."""
    labels = getattr(text, "_rope_type_labels", None) or getattr(text, "layer_types", None) or ()
    return [kind for kind in tables if kind in labels]


def advised_scaling(config: Any, length: int) -> str | None:
    """The value of --rope-scaling by which a model supports `length` positions, its factor relative to the original
    number of positions. None if no type with a factor alone is enough."""
    text = config.get_text_config()
    had = getattr(text, _POSITIONS, None)
    for rope_type in ("yarn", "proportional", "linear"):
        try:
            # any factor shows the number of positions that it is relative to
            asked = RopeScaling({None: {"rope_type": rope_type, "factor": float(2**20)}})
            change = rope_change(config, asked)
        except ExpertMeshError:
            continue
        original = change.settings[text.attribute_map.get(_POSITIONS, _POSITIONS)] / 2**20
        return f"{rope_type}:{max(math.ceil(length / original), math.ceil((had or 0) / original))}"
    return None


def with_rope_scaling(config: Any, scaling: RopeScaling | None) -> Any:
    """A config of transformers with a scaling in it.

    Raises:
        ExpertMeshError: see `rope_change`.
    """
    if scaling is None:
        return config
    return changed_config(json.loads(config.to_json_string(use_diff=False)), rope_change(config, scaling))


def changed_config(raw: Mapping[str, Any], change: RopeChange) -> Any:
    """The config that transformers reads from a changed config.json: from a file, as it will read that of an export.

    Raises:
        ExpertMeshError: it does not take the change.
    """
    from transformers import AutoConfig

    with TemporaryDirectory() as directory:
        changed = change.apply(raw)
        (Path(directory) / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            new = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        except Exception as error:
            raise ExpertMeshError(f"--rope-scaling: transformers refuses the config: {error}") from error
    tie_text_as_whole(new, changed)
    read = new.get_text_config().rope_parameters
    if any(read.get(key) != value for key, value in change.parameters.items()):
        raise ExpertMeshError(f"--rope-scaling: transformers reads {read} from {dict(change.parameters)}")
    return new


def check_rope(model: Any, scaling: RopeScaling) -> None:
    """
    Raises:
        ExpertMeshError: no module of a model that was built with a scaling embeds positions that way.
    """
    wanted = {table["rope_type"] for table in scaling.tables.values()}
    kinds = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    used = {each for kind in kinds for each in (kind.values() if isinstance(kind, dict) else [kind])}
    if not wanted <= used:
        raise ExpertMeshError(
            f"--rope-scaling: {type(model).__name__} has no rotary embedding with this config; leave it out"
        )


def _by_kind(scaling: RopeScaling, by_kind: Mapping[str | None, Any]) -> dict[str | None, Mapping[str, Any]]:
    """The requested tables, by the kinds of layers that the config has."""
    names = ", ".join(str(kind) for kind in by_kind)
    if None in by_kind:
        if None not in scaling.tables:
            raise ExpertMeshError("--rope-scaling: all layers of this model have one rotary embedding; give one table")
        return dict(scaling.tables)
    if None in scaling.tables:
        # what sees a few positions back never meets a distance that it was not trained with
        all_seeing = [kind for kind in by_kind if "sliding" not in str(kind)]
        if len(all_seeing) != 1 or len(by_kind) == 1:
            raise ExpertMeshError(
                f"--rope-scaling: this model has rotary embeddings of several kinds, {names}; give JSON "
                "with a table for each kind to scale"
            )
        tables: dict[str | None, Mapping[str, Any]] = {all_seeing[0]: scaling.tables[None]}
    else:
        tables = dict(scaling.tables)
    for kind in tables:
        if kind not in by_kind:
            raise ExpertMeshError(f"--rope-scaling: this model has no layers of kind {kind}; it has {names}")
        if by_kind[kind] is None:
            raise ExpertMeshError(f"--rope-scaling: layers of kind {kind} of this model have no rotary embedding")
    return tables


def _scaled(
    current: Mapping[str, Any], asked: Mapping[str, Any], positions: int | None, kind: str | None
) -> tuple[dict[str, Any], int, int]:
    """(the new table, the positions before scaling, those after)."""
    was, rope_type = current.get("rope_type", "default"), asked["rope_type"]
    where = "" if kind is None else f" of {kind}"
    if was not in ("default", *_NEEDED) or (was != rope_type and "proportional" in (was, rope_type)):
        raise ExpertMeshError(
            f"--rope-scaling: the rotary embedding{where} of this model is of type {was}, which "
            f"cannot become {rope_type}" + (f"; use {was}:N" if was in _NEEDED else "")
        )
    before = current.get(_ORIGINAL) or (
        positions
        and round(positions / (current.get("factor") or 1) if was in ("linear", "proportional") else positions)
    )
    original = asked.get(_ORIGINAL) or before
    if not original:
        raise ExpertMeshError(f"--rope-scaling: config.json has no {_POSITIONS}; give JSON with {_ORIGINAL}")
    dropped = _OF_FACTOR if was == rope_type else _STRETCHING
    table = {key: value for key, value in current.items() if key not in dropped} | dict(asked)
    if _ORIGINAL in _POSSIBLE.get(rope_type, {}):
        table[_ORIGINAL] = original
    # dynamic types take the positions that a config names for those before scaling
    return table, original, original if rope_type == "dynamic" else round(original * asked["factor"])


def _head_dim(text: Any) -> dict[str, int]:
    """The `head_dim` of a config that leaves it open: transformers 5.23 multiplies by it all the same for some
    types."""
    name = text.attribute_map.get("head_dim", "head_dim")
    is_open = text.to_dict().get(name, 0) is None
    return {name: text.hidden_size // text.num_attention_heads} if is_open else {}


def _said(table: Mapping[str, Any], original: int | None = None) -> str:
    rope_type, factor = table.get("rope_type", "default"), table.get("factor")
    over = original or table.get(_ORIGINAL)
    return str(rope_type) + (f" by {factor:g}" if factor else "") + (f" of {over:,} positions" if over else "")
