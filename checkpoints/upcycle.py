"""The command `upcycle`: a mixture-of-experts model made of dense ones, whose MLPs become its experts.

Sparse upcycling (arXiv 2212.05055): every expert begins as a copy of the dense MLP, and the router is drawn. Finer
experts (2410.07524) each have a part of the MLP's neurons; Drop-Upcycling (2502.19261) draws a share of each expert's
neurons anew; Branch-Train-MiX (2403.07816) takes experts from several dense models. Every tensor of the new model is
the dense model's of that name, an expert's, a router's or that of an expert for all tokens: so a pairing of families
needs no code here. Streamed, resumable, and complete or absent, as any conversion.

Shape suffixes: T tokens, K experts per token, D model width, C copies of the MLP in a layer.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..moe.experts.model_layers import moe_layers
from ..moe.hf_model.config import check_config, load_config
from ..moe.hf_model.families import family_source
from ..moe.hf_model.family_exceptions import UPCYCLED_AS
from ..moe.hf_model.trial import standing_in_for_weights
from ..moe.util.errors import ExpertMeshError
from ..moe.util.versions import installed_version
from ..sharding.topology import rows_of
from .convert import HowToWrite, write_hf
from .files.dtypes import Array, as_array, as_double, as_tensor, cast
from .files.encodings import decoded, quantization_of
from .files.paths import check_regular
from .files.tensors import DiskTensor, Region
from .hf.checkpoint import Checkpoint
from .hf.headers import read_headers
from .hf.json_files import read_json
from .hf.names import Names
from .hf.reader import SafetensorsReader
from .hf.source import ModelSource
from .model_card import Training, model_card

_PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
"""The matrices of a dense MLP, by those of our experts."""
# the settings of MoE families, by what they say; what was meant is checked on the model that they make
_SETTINGS = (
    (r"(moe_)?num_(local_)?experts|n_routed_experts", "experts"),
    (r"(moe_)?num_experts_per_tok(en)?|moe_(top)?k|top_k_experts", "top_k"),
    (r"shared_expert_intermediate_size", "dense_width"),
    (r"(moe_)?num_shared_experts|n_shared_experts|first_k_dense_replace|moe_layer_start_index", "none"),
    (r"norm_topk_prob", "yes"),
    (r"decoder_sparse_step", "one"),
    (r"mlp_only_layers", "empty"),
)


@dataclass(frozen=True)
class Recipe:
    """What is made of a dense MLP in each layer.

    Attributes:
        top_k: experts per token.
        granularity: experts into which each copy of the MLP is cut, which a token takes together.
        drop: share of each expert's neurons that is drawn anew, with the mean and deviation of the weights they had.
        noise: of every weight of the experts, relative to it.
        average: whether what is no expert's is the mean of all dense models that give experts.
    """

    experts: int
    top_k: int
    granularity: int = 1
    drop: float = 0.0
    noise: float = 0.0
    average: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ExpertMeshError(f"--top-k {self.top_k}: must be from 1 to --experts {self.experts}")
        if self.granularity < 1 or self.experts % self.granularity or self.top_k % self.granularity:
            raise ExpertMeshError(
                f"--granularity {self.granularity}: must divide --experts {self.experts} and --top-k {self.top_k}"
            )
        if not 0 <= self.seed < 2**63:
            raise ExpertMeshError(f"--seed {self.seed}: must be 0 or more, and below 2^63")
        if not (0 <= self.drop <= 1 and 0 <= self.noise < float("inf")):  # not true of NaN
            raise ExpertMeshError(f"--drop {self.drop}, --noise {self.noise}: must be 0 or more, --drop at most 1")

    @property
    def copies(self) -> int:
        """Complete MLPs in a layer."""
        return self.experts // self.granularity

    def random(self, row: int, *of: object) -> np.random.Generator:
        """Numbers for a row, the same whichever process, file and strip they are drawn for."""
        key = hashlib.sha256(repr((self.seed, *of)).encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big"), counter=row << 128))


class DenseModel:
    """A dense model's directory. config: of transformers. tensors: by name. mlps: the prefix of each layer's MLP.

    Raises:
        ExpertMeshError: it is damaged, or is no causal language model of decoder layers with gated MLPs.
    """

    def __init__(self, path: Path):
        raw = read_json(path / "config.json")
        where = str(path / "config.json")
        check_config(raw, where)
        self.path, self.config = path, load_config(path, raw, where)
        found = decoded(read_headers(path), quantization_of(raw), False)
        if found.problems:
            raise ExpertMeshError(f"{path}: {next(iter(found.problems.values()))}")
        self.tensors = found.tensors
        gates = (re.fullmatch(r"(.*\.(\d+)\..*)gate_proj\.weight", name) for name in self.tensors)
        self.mlps = {int(gate[2]): gate[1] for gate in gates if gate}
        num_layers = self.config.get_text_config().num_hidden_layers
        if self.config.get_text_config() is not self.config or sorted(self.mlps) != list(range(num_layers)):
            raise ExpertMeshError(
                f"{path}: upcycling needs a dense language model with one gate_proj, up_proj and down_proj in each of "
                f"its {num_layers} layers; {len(self.mlps)} were found"
            )

    @cached_property
    def files(self) -> list[Path]:
        return sorted({part.file for tensor in self.tensors.values() for part in tensor.parts})


@dataclass(frozen=True)
class _Origin:
    """What a parameter is made of: a tensor of the dense model, times a factor, or numbers drawn, or zeros.

    expert: which of the matrices of an expert it is; None of what is none.
    """

    tensor: str = ""
    factor: float = 1.0
    expert: str | None = None
    is_router: bool = False


def upcycle(
    dense_path: Path,
    out: Path,
    recipe: Recipe,
    how: HowToWrite,
    like: str | None = None,
    experts: Sequence[Path] = (),
    prompts: Path | None = None,
) -> None:
    """Write a mixture-of-experts model of a dense one, in Hugging Face form and its dtype.

    Without noise, drawn neurons and other dense models it computes what the dense one does: the weights of a token's
    experts add up to 1.

    Args:
        like: its family; None: the one that goes with the dense family.
        experts: dense models of the same shape that the experts are copies of, in turn, in place of `dense_path`.
        prompts: file by which routers are made (see `read_prompts`); None: they are drawn.

    Raises:
        ExpertMeshError: the families do not fit, or `out` is not to be had.
    """
    dense = DenseModel(dense_path)
    models = [dense, *map(DenseModel, experts)]
    if experts and recipe.copies % len(experts):
        raise ExpertMeshError(f"--expert: {len(experts)} models do not divide the {recipe.copies} copies of the MLP")
    if recipe.average and not experts:
        raise ExpertMeshError("--average: the mean is that of the --expert models, and none are given")
    for other in models[1:]:
        if odd := {(n, t.shape) for n, t in dense.tensors.items()} ^ {(n, t.shape) for n, t in other.tensors.items()}:
            raise ExpertMeshError(f"--expert {other.path}: {min(odd)[0]} is not as in {dense.path}")
    family = like or UPCYCLED_AS.get(dense.config.model_type) or f"{dense.config.model_type}_moe"
    source = ModelSource(dense.path, family, made=moe_config(dense, recipe, family))
    names, origins = source.names, origins_of(dense, source, recipe)
    asked = None if prompts is None else read_prompts(prompts, recipe.copies)
    dtypes = {name: dense.tensors[origin.tensor].dtype for name, origin in origins.items() if origin.tensor}
    shapes = published_shapes(source.config)
    matched = names.match(shapes)
    assert not matched.problems, matched.problems
    plain = dense.tensors[f"{dense.mlps[0]}gate_proj.weight"].dtype
    exported = [
        DiskTensor(name, shapes[name], dtypes.get(regions[0].parameter, plain), regions)
        for name, regions in matched.tensors.items()
    ]
    routers = None if asked is None else routers_of_prompts(dense, asked)
    checkpoint = Checkpoint(
        *(dense.path, source, names, [], exported),
        files=sorted({file for model in models for file in model.files}),
        made_by=repr((recipe, [str(model.path) for model in models], asked)),
        make_reader=lambda: UpcycledReader(models, names, origins, recipe, routers),
    )
    write_hf(checkpoint, out, replace(how, card=_card(dense, recipe, experts)))


def moe_config(dense: DenseModel, recipe: Recipe, family: str) -> dict[str, Any]:
    """The config.json of the new model: the family's own, with all that the dense model's says of what both have.

    Raises:
        ExpertMeshError: transformers has no such family, or the dense model has a setting that it lacks.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if family not in CONFIG_MAPPING or CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ExpertMeshError(f"no MoE family {family} for a {dense.config.model_type}; name one with --like")
    kind = CONFIG_MAPPING[family]
    said = dense.config.to_dict()
    usual = type(dense.config)(num_hidden_layers=dense.config.num_hidden_layers).to_dict()
    # some are in no config, and only read by the model's code
    known = kind().to_dict().keys() | {"dtype"} | (_settings_read(family) & said.keys())
    lacking = [k for k in sorted(_settings_read(dense.config.model_type) & usual.keys() - known) if said[k] != usual[k]]
    if lacking:
        raise ExpertMeshError(f"{dense.path}: {family} has no {lacking[0]}, which is {said[lacking[0]]!r:.80} here")
    width, rest = divmod(dense.config.intermediate_size, recipe.granularity)
    if rest:
        raise ExpertMeshError(
            f"--granularity {recipe.granularity}: must divide the MLP's width {dense.config.intermediate_size}"
        )
    values = {"experts": recipe.experts, "top_k": recipe.top_k, "dense_width": dense.config.intermediate_size}
    values |= {"none": 0, "yes": True, "one": 1, "empty": []}
    taken = {k: v for k, v in said.items() if k in known and k not in ("model_type", "architectures")}
    taken |= {key: values[what] for key in known for pattern, what in _SETTINGS if re.fullmatch(pattern, key)}
    taken["moe_intermediate_size" if "moe_intermediate_size" in known else "intermediate_size"] = width
    made = kind(**taken).to_diff_dict()
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    made |= {"model_type": family, "architectures": [model_class.__name__]}
    check_config(made, f"--experts {recipe.experts}, --top-k {recipe.top_k}")
    return made


def _settings_read(family: str) -> set[str]:
    """The settings that a family's model reads by name."""
    return set(re.findall(r"config(?:\.|, \")(\w+)", family_source("modeling", family)))


def origins_of(dense: DenseModel, source: ModelSource, recipe: Recipe) -> dict[str, _Origin]:
    """What each parameter of the new model is made of.

    Raises:
        ExpertMeshError: the family does not have the experts asked for, needs what the dense model lacks, has no place
            for a tensor of it, or weighs a token's experts otherwise than with a constant sum.
    """
    names, family = source.names, source.model_type
    found, shape = names.shape, (recipe.experts, dense.config.hidden_size)
    if (found.num_experts, found.top_k) != (recipe.experts, recipe.top_k) or names.num_moe_layers != len(dense.mlps):
        raise ExpertMeshError(f"{family} cannot have {recipe.experts} experts, {recipe.top_k} per token, in all layers")
    parts = {f"{prefix}{part}.weight" for prefix in dense.mlps.values() for part in _PARTS.values()}
    weight = recipe.granularity / _sum_of_weights(names.model)
    shares = [name for name in names.parameters if _is_shared(name, names, dense)]
    gated = any(names.parameters[name] == (1, shape[1]) for name in names.parameters)
    half = 0.5 if shares else 1.0
    origins: dict[str, _Origin] = {}
    for name, own in names.parameters.items():
        if name in names.experts:
            part = name.rpartition(".")[2]
            tensor = f"{dense.mlps[_layer_of(name)]}{_PARTS[part]}.weight"
            origins[name] = _Origin(tensor, weight * half if part == "w2" else 1.0, part)
        elif name in shares:
            # a gate of zeros halves what an expert for all tokens gives
            tensor = dense.mlps[_layer_of(name)] + ".".join(name.split(".")[-2:])
            origins[name] = _Origin(tensor, half if tensor.endswith("down_proj.weight") and not gated else 1.0)
        elif name in dense.tensors and name not in parts:
            origins[name] = _Origin(name)
        elif (own in (shape, (1, shape[1])) or prod(own) == recipe.experts) and _layer_of(name) is not None:
            origins[name] = _Origin(is_router=own == shape)
        else:
            raise ExpertMeshError(f"{dense.path} has no {name}, which a {family} needs; try another --like")
        if (tensor := origins[name].tensor) and name not in names.experts:
            theirs = dense.tensors[tensor].shape
            if own != (theirs[::-1] if name in names.transposed else theirs):
                raise ExpertMeshError(f"{tensor}: has shape {list(theirs)} in {dense.path}, {list(own)} in a {family}")
    placed = {origin.tensor for origin in origins.values()} | names.aliases.keys()
    if spare := sorted(name for name in dense.tensors.keys() - placed if not names.is_computed(name)):
        raise ExpertMeshError(f"{dense.path}: a {family} has no place for {spare[0]}; try another --like")
    return origins


def _is_shared(name: str, names: Names, dense: DenseModel) -> bool:
    """Whether a parameter is of an expert for all tokens."""
    is_part = re.fullmatch(r".*\.shared_\w+\.(gate|up|down)_proj\.weight", name)
    return bool(is_part) and name not in names.experts and name not in dense.tensors


def _layer_of(name: str) -> Any:
    number = re.search(r"\.(\d+)\.", name)
    return None if number is None else int(number[1])


def _sum_of_weights(model: Any) -> float:
    """What the weights of a token's experts add up to, by a forward of the family's own router.

    Raises:
        ExpertMeshError: no constant.
    """
    sums: list[Tensor] = []

    def note(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sums.append(weights_TK.double().sum(-1))
        return x_TD

    with standing_in_for_weights(model):
        for layer in moe_layers(model):
            layer.forward = note  # type: ignore[method-assign]
        model(input_ids=torch.arange(3, 35).unsqueeze(0), use_cache=False)
    sums_T = torch.cat(sums)
    if not torch.allclose(sums_T, sums_T[0].expand_as(sums_T), rtol=1e-5, atol=0) or not sums_T[0]:
        raise ExpertMeshError(
            f"the weights of a token's experts add up to {sums_T.min():.3g} to {sums_T.max():.3g} in a "
            f"{model.config.model_type}, so copies of one MLP would not compute what it does; try another --like"
        )
    return float(sums_T.mean())


def read_prompts(file: Path, copies: int) -> list[dict[str, list[str]]]:
    """Prompts that each copy of the MLP is for, a line of JSON for each: {"prompts": [...], "negative_prompts": [...]}.

    Raises:
        ExpertMeshError: the file is no such list.
    """
    check_regular(file)
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ExpertMeshError(f"--router-prompts {file}: cannot be read as lines of JSON: {error}") from error
    for number, line in enumerate(lines, 1):
        lists = [line.get("prompts"), line.get("negative_prompts", [])] if isinstance(line, dict) else [None]
        is_text = all(isinstance(some, list) and all(isinstance(text, str) for text in some) for some in lists)
        if not is_text or not lists[0] or line.keys() - {"prompts", "negative_prompts"}:
            raise ExpertMeshError(
                f"--router-prompts {file}:{number}: must have prompts, a list of texts, for an expert"
            )
    if len(lines) != copies:
        raise ExpertMeshError(f"--router-prompts {file}: has {len(lines)} lines for {copies} copies of the MLP")
    return lines


def routers_of_prompts(dense: DenseModel, prompts: Sequence[Mapping[str, Sequence[str]]]) -> dict[int, Tensor]:
    """Router weights (C, D) of each layer: the mean direction of what its MLP gets for an expert's prompts, less that
    for its negative ones, as mergekit-moe's `hidden` makes them of the inputs of layers.

    Raises:
        ExpertMeshError: transformers cannot run the dense model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(dense.path, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(dense.path)
    except Exception as error:
        raise ExpertMeshError(f"--router-prompts: transformers cannot load {dense.path}: {error}") from error
    means: dict[int, Tensor] = {}
    for layer, prefix in dense.mlps.items():

        def note(_: Any, args: tuple[Tensor, ...], layer: int = layer) -> None:
            means[layer] = means.get(layer, 0.0) + args[0].double().mean((0, 1))

        model.get_submodule(prefix.removesuffix(".")).register_forward_pre_hook(note)

    def direction(texts: Sequence[str]) -> dict[int, Tensor]:
        means.clear()
        for text in texts:
            model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
        return {layer: torch.nn.functional.normalize(mean, dim=0) for layer, mean in means.items()}

    with torch.no_grad():
        toward = [direction(each["prompts"]) for each in prompts]
        away = [direction(each.get("negative_prompts", [])) for each in prompts]
    return {
        layer: torch.stack([one[layer] - other.get(layer, 0.0) for one, other in zip(toward, away, strict=True)])
        for layer in dense.mlps
    }


def _card(dense: DenseModel, recipe: Recipe, experts: Sequence[Path]) -> str:
    given = {name: value for name, value in asdict(recipe).items() if value}
    rows = {"method": "upcycling: the MLPs of a dense model became experts"}
    rows |= {name.replace("_", " "): f"{value:g}" for name, value in given.items()}
    rows |= {"experts of": ", ".join(path.name for path in experts)} if experts else {}
    versions = {name: found for name in ("expertmesh", "transformers") if (found := installed_version(name))}
    name = dense.path.resolve().name
    training = Training(name, False, ["moe", "upcycled"], rows=rows, versions=versions, how="upcycled")
    return model_card(training, dense.path, is_adapter=False)


class UpcycledReader:
    """A `ParameterReader` of the new model's parameters. Not for several threads."""

    def __init__(
        self,
        models: Sequence[DenseModel],
        names: Names,
        origins: Mapping[str, _Origin],
        recipe: Recipe,
        routers: Mapping[int, Tensor] | None,
    ):
        self.models, self.names, self.origins, self.recipe, self.routers = models, names, origins, recipe, routers
        self.givers = models[1:] or models
        self.readers = [SafetensorsReader() for _ in models]

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def rows(self, parameter: str, rows: range) -> tuple[Array, str]:
        origin = self.origins[parameter]
        if origin.expert is not None:
            return self._experts(parameter, origin, rows)
        if not origin.tensor:
            return self._router(parameter, rows) if origin.is_router else self._zeros(parameter, rows)
        transposed = parameter in self.names.transposed
        givers = self.givers if self.recipe.average else self.models[:1]
        found = [self._read(model, origin.tensor, rows, transposed) for model in givers]
        if len(found) == 1 and origin.factor == 1:
            return found[0]
        dtype = found[0][1]
        mean = sum(as_double(*each) for each in found) / len(found) * origin.factor
        return cast(np.asarray(mean, np.float32), "F32", dtype), dtype

    def _read(self, model: DenseModel, name: str, rows: range, transposed: bool) -> tuple[Array, str]:
        tensor = model.tensors[name]
        region = Region(name, range(tensor.shape[1] if transposed else rows_of(tensor.shape)), transposed=transposed)
        return self.readers[self.models.index(model)].read(tensor, region, rows), tensor.dtype

    def _router(self, parameter: str, rows: range) -> tuple[Array, str]:
        """The parts of one copy have equal rows, and so are chosen together."""
        num_experts, width = self.names.parameters[parameter]
        if self.routers is not None:
            copies_CD = self.routers[_layer_of(parameter)].float().numpy()
        else:
            std = getattr(self.names.model.config, "initializer_range", 0.02)
            copies_CD = self.recipe.random(0, parameter).standard_normal((self.recipe.copies, width)) * std
        all_rows = np.repeat(copies_CD.astype(np.float32), num_experts // len(copies_CD), axis=0)
        return all_rows[rows.start : rows.stop], "F32"

    def _zeros(self, parameter: str, rows: range) -> tuple[Array, str]:
        return np.zeros((len(rows), *self.names.parameters[parameter][1:]), np.float32), "F32"

    def _experts(self, parameter: str, origin: _Origin, rows: range) -> tuple[Array, str]:
        width = self.names.experts[parameter]
        pieces = list(self._pieces(parameter, origin, rows, width))
        return pieces[0][0] if len(pieces) == 1 else np.concatenate([rows for rows, _ in pieces]), pieces[0][1]

    def _pieces(self, parameter: str, origin: _Origin, rows: range, width: int) -> Iterator[tuple[Array, str]]:
        """The same, expert by expert."""
        recipe, start = self.recipe, rows.start
        while start < rows.stop:
            expert, first = divmod(start, width)
            run = range(first, min(rows.stop - expert * width, width))
            copy, part = divmod(expert, recipe.granularity)
            in_mlp = range(part * width + run.start, part * width + run.stop)
            model = self.givers[copy % len(self.givers)]
            values, dtype = self._read(model, origin.tensor, in_mlp, transposed=origin.expert == "w2")
            if origin.factor != 1 or recipe.noise or recipe.drop:
                wide = _float(values, dtype) * np.float32(origin.factor)
                self._change(wide, parameter, expert, run, width)
                values = cast(wide, "F32", dtype)
            yield values, dtype
            start = expert * width + run.stop

    def _change(self, values: Array, parameter: str, expert: int, rows: range, width: int) -> None:
        """Add noise to an expert's rows, which are its neurons, and draw some anew: the same of all three matrices."""
        recipe, layer = self.recipe, parameter.rpartition(".")[0]
        drawn = np.zeros(width, bool)
        if recipe.drop:
            drawn[recipe.random(0, layer, expert).permutation(width)[: round(recipe.drop * width)]] = True
        for row, value in zip(rows, values, strict=True):
            if drawn[row]:
                normal = recipe.random(row, parameter, expert).standard_normal(len(value), np.float32)
                value[:] = normal * value.std() + value.mean()
            elif recipe.noise:
                value *= 1 + recipe.noise * recipe.random(row, parameter, expert).standard_normal(
                    len(value), np.float32
                )


def _float(values: Array, dtype: str) -> Array:
    """In fp32, in memory of its own."""
    return as_array(as_tensor(np.ascontiguousarray(values), dtype).float()).copy()


def published_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `save_pretrained` writes of this family, which servers read."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(x.shape) for name, x in revert_weight_conversion(model, model.state_dict()).items()}
