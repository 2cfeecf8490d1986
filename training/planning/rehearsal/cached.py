"""What was measured of a model, kept in memory and in the user's cache directory, so that it is measured once.

What a figure depends on is part of its file's name: the model's config, the flags that are read for it, our sources and
the packages that compute. So nothing is ever out of date, and the directory may be deleted at any time; a file that
nobody has read for a month is. What is kept is read without importing torch or transformers, which takes longer than
the rest of a plan.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ....checkpoints.files.checksums import check_seal, seal
from ....moe.dispatch.dispatcher_entries import DISPATCHER_ENTRIES
from ....moe.experts.model_facts import Attention
from ....moe.hf_model.counts import ParameterCounts
from ....moe.kernels.kernel_entries import KERNEL_ENTRIES
from ....moe.util.atomic_write import whole
from ....moe.util.errors import ExpertMeshError
from ....moe.util.sources import sources_digest
from ....moe.util.step_parts import has_modules_from_outside
from ....moe.util.user_cache import cache_directory
from ....moe.util.versions import installed_version
from ...config.optimizers import OUR_OPTIMIZERS
from ...config.train_config import TrainConfig
from ...model_setup.rates import Work
from ..planner.measured import (
    BlockUpdate,
    LayerParameters,
    Measured,
    MeasuredModel,
    MeasuredRange,
    MeasuredSpan,
    ModelCuts,
    ModelParameters,
    Parameter,
    Workload,
)

PACKAGES = ("torch", "transformers", "triton")
SOURCES = ("moe", "sharding", "training")
"""Folders of our code that a figure may depend on."""
READ = frozenset(
    {
        *("rope_scaling", "packing", "cp_size", "tp_size", "loss_parallel", "attn_implementation", "cross_entropy"),
        *("async_tp", "bf16", "optim", "freeze"),
        *("expert_kernel", "expert_precision", "dense_precision", "keep_expert_products"),
        *("router_aux_loss_coef", "router_z_loss_coef"),
        *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "use_rslora", "base_dtype"),
        *("modules_to_save", "train_new_tokens", "offload_experts"),
    }
)
"""Flags on which what is measured depends, beside those that the optimizer's entry reads. The others are not seen by
what measures: a `Workload` says them too, or their part is arithmetic, or they have none."""
KNOWN_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Values of `--attn-implementation` whose functions are in transformers' or our sources."""
LAYER_KINDS_MODULE = f"{__package__.removesuffix('.planning.rehearsal')}.attention.layer_kinds"


_UNREAD_SECONDS = 30 * 24 * 3600


class CachedMeasure:
    """A `Measure` of one model for one kind of device.

    Args:
        config: of the run.
        said: all that the model's config says (see `ModelSource.said`). load: returns transformers' config object;
            called only if there is something to measure.
        is_kept: whether figures go to the cache directory, and come from there; never where code from outside
            is registered, whose text is no part of the file's name.

    Raises:
        ExpertMeshError: the model cannot be built, or not divided by `--tp-size`.
    """

    def __init__(
        self,
        config: TrainConfig,
        said: Mapping[str, Any],
        load: Callable[[], Any],
        device: Literal["cuda", "cpu"],
        is_kept: bool = True,
    ):
        self.config, self.load, self.device = _with_what_is_read(config), load, device
        is_kept = is_kept and not has_code_from_outside(config)
        self.file = cache_directory("measured") / f"{_key(self.config, said, device)}.json" if is_kept else None
        self.found: dict[Workload, MeasuredModel | str] = {}
        self.is_new = False
        self.found_cuts: ModelCuts | str | None = None
        content = {} if self.file is None else _read(self.file)
        if "refused" in content:
            raise ExpertMeshError(content["refused"])
        if content:
            self.parameters = _parameters(content["parameters"])
            for each in content["found"]:
                told = each["measured"]
                self.found[Workload(**each["workload"])] = told if isinstance(told, str) else _measured(told)
            told = content["cuts"]
            self.found_cuts = _cuts(told) if isinstance(told, dict) else told
        else:
            self.parameters = self._measured_parameters()

    def _measured_parameters(self) -> ModelParameters:
        try:
            parameters: ModelParameters = self._measurer.parameters
        except ExpertMeshError as error:
            # it follows from the config; other refusals may be of what is installed
            if "--tp-size" in str(error):
                self._write({"refused": str(error)})
            raise
        return parameters

    @cached_property
    def _measurer(self) -> Any:
        # they load torch, and a model is built
        from .measure import Measurer

        return Measurer(self._built(), self.config)

    def _built(self) -> Any:
        from .building import build_rehearsed

        return build_rehearsed(self.config, self.load(), self.device)

    def __call__(self, workload: Workload) -> MeasuredModel:
        """
        Raises:
            ExpertMeshError: the model cannot compute this.
        """
        if workload not in self.found:
            self.is_new = True
            try:
                self.found[workload] = self._measurer(workload)
            except ExpertMeshError as error:
                self.found[workload] = str(error)
        found = self.found[workload]
        if isinstance(found, str):
            raise ExpertMeshError(found)
        return found

    def cuts(self) -> ModelCuts:
        """
        Raises:
            ExpertMeshError: the model cannot be cut into stages.
        """
        if self.found_cuts is None:
            from .measure import cuts_of

            self.is_new = True
            try:
                self.found_cuts = cuts_of(self._built(), self.config, self.parameters.root_names)
            except ExpertMeshError as error:
                self.found_cuts = str(error)
        if isinstance(self.found_cuts, str):
            raise ExpertMeshError(self.found_cuts)
        return self.found_cuts

    def save(self) -> None:
        """Keep what is new; where the directory cannot be written, nothing is kept."""
        if self.file is None or not self.is_new:
            return
        content = {
            "parameters": asdict(self.parameters),
            "cuts": _told_cuts(self.found_cuts) if isinstance(self.found_cuts, ModelCuts) else self.found_cuts,
            "found": [
                {"workload": asdict(workload), "measured": found if isinstance(found, str) else asdict(found)}
                for workload, found in self.found.items()
            ],
        }
        if self._write(content):
            self.is_new = False

    def _write(self, content: dict[str, Any]) -> bool:
        """Returns whether it is kept."""
        if self.file is None:
            return False
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with whole(self.file, writer=str(os.getpid())) as partial:
                partial.write_text(json.dumps(seal(content)), encoding="utf-8")
            for file in self.file.parent.glob("*.json"):
                if time.time() - file.stat().st_mtime > _UNREAD_SECONDS:
                    file.unlink(missing_ok=True)
            return True
        return False


def has_code_from_outside(config: TrainConfig) -> bool:
    """Whether figures may depend on code that is not of this project, or of transformers."""
    # that module imports torch; where it is not imported, nobody has registered a kind of layers
    layer_kinds = sys.modules.get(LAYER_KINDS_MODULE)
    return (
        has_modules_from_outside()
        or KERNEL_ENTRIES.has_entries_from_outside()
        or DISPATCHER_ENTRIES.has_entries_from_outside()
        or config.optimizer_entry not in OUR_OPTIMIZERS
        or config.attn_implementation not in KNOWN_ATTENTION
        or (layer_kinds is not None and layer_kinds.has_layer_kinds_from_outside())
    )


def _with_what_is_read(config: TrainConfig) -> TrainConfig:
    """The config with all flags that are not read at their defaults, so that no figure depends on a flag that its
    file's name does not."""
    names = READ.union(config.optimizer_entry.forecast_reads)
    # outputs of expert GEMMs are kept under no other checkpointing, and rows of new tokens trained where there are some
    alike = TrainConfig(model="any", dataset=["any"], gradient_checkpointing="selective", add_tokens=["any"])
    return replace(alike, **{name: getattr(config, name) for name in names})


def _key(config: TrainConfig, said: Mapping[str, Any], device: str) -> str:
    of_model = {name: value for name, value in said.items() if name not in ("_name_or_path", "transformers_version")}
    everything = [
        asdict(config),
        of_model,
        device,
        [installed_version(package) for package in PACKAGES],
        sources_digest(SOURCES),
    ]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(file: Path) -> dict[str, Any]:
    """What was written; nothing where there is no such file, a damaged one, or another program's."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        check_seal(content, file)
        os.utime(file)
        is_ours = isinstance(content, dict) and (
            {"parameters", "cuts", "found"} <= content.keys() or "refused" in content
        )
        return content if is_ours else {}
    except (OSError, ValueError, AttributeError, ExpertMeshError):
        return {}


def _parameters(told: dict[str, Any]) -> ModelParameters:
    def each(parameters: list[dict[str, Any]]) -> tuple[Parameter, ...]:
        return tuple(Parameter(**{**told, "blocks": tuple(map(_block, told["blocks"]))}) for told in parameters)

    kinds = tuple(
        LayerParameters(each(kind["dense"]), each(kind["experts"]), tuple(map(each, kind["regions"])))
        for kind in told["kinds"]
    )
    attention = tuple(Attention(**kind) for kind in told["counts"]["attention"])
    counts = ParameterCounts(**{**told["counts"], "attention": attention})
    rest = {name: told[name] for name in ("buffers", "num_experts", "top_k", "by_liger")}
    rest |= {name: tuple(told[name]) for name in ("root_names", "root_regions")}
    rest["looped"] = _tuples(told["looped"])
    return ModelParameters(kinds, tuple(told["layers"]), each(told["root"]), counts=counts, **rest)


def _block(told: dict[str, Any]) -> BlockUpdate:
    kernels = tuple((flops, Work(*work), times) for flops, work, times in told["kernels"])
    return BlockUpdate(tuple(told["shape"]), told["number"], kernels)


def _told_cuts(cuts: ModelCuts) -> dict[str, Any]:
    return asdict(cuts) | {"skips": sorted(cuts.skips)}


def _cuts(told: dict[str, Any]) -> ModelCuts:
    return ModelCuts(
        told["name"], tuple(told["flops"]), frozenset(_tuples(told["skips"])), _tuples(told["root_places"])
    )


def _measured(told: dict[str, Any]) -> MeasuredModel:
    def span(of: dict[str, Any]) -> MeasuredSpan:
        stretches = tuple(MeasuredRange(**{**s, "kernels": _kernels(s["kernels"])}) for s in of["stretches"])
        return MeasuredSpan(**{**of, "stretches": stretches})

    def part(of: dict[str, Any]) -> Measured:
        forward, backward = (tuple(map(span, of[name])) for name in ("forward", "backward"))
        return Measured(**{**of, "forward": forward, "backward": backward})

    return MeasuredModel(tuple(map(part, told["kinds"])), part(told["root"]))


def _kernels(rows: list[list[Any]]) -> tuple[Any, ...]:
    return tuple((flops, moved, Work(*work), times) for flops, moved, work, times in rows)


def _tuples(rows: list[list[Any]]) -> tuple[Any, ...]:
    return tuple(tuple(row) for row in rows)
