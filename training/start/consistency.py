"""What a run is made of, in facts: compared over all nodes before the first step, and on resume (see
`training.start.resume`) with what it had read.

Flags and software are compared before ranks join a process group, the model's files before the model is built, the
data before weights are loaded. One rank of each node reads its node's files.
"""

import json
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import xxhash

from ...checkpoints.fingerprint import adapter_facts, flat, model_facts
from ...checkpoints.hf.source import ModelSource
from ...moe.util.parser import flag_of
from ...moe.util.process_place import process_place
from ...moe.util.sources import sources_digest
from ...moe.util.versions import installed_version
from ...sharding.runtime.agreement import check_alike
from ...sharding.runtime.process import Ranks, device_type, raise_together
from ..config.train_config import TrainConfig
from ..data.digest import explain_samples, samples_facts
from ..data.pictures import ImageProcessor
from .fingerprints import QUESTIONS, Facts
from .inputs import Inputs, Prompts, added_tokens

_PACKAGES = ("torch", "transformers")


def start_facts(config: TrainConfig) -> dict[str, str]:
    """Flags that must be alike, the kind of device, and versions of what decides the results."""
    facts = {}
    for setting in fields(config):
        value = getattr(config, setting.name)
        scope = setting.metadata.get("scope")
        if scope is None or value == "auto":
            facts[flag_of(setting.name)] = json.dumps(value)
        elif scope == "input":  # the place may be another, what is there is compared later
            facts[flag_of(setting.name)] = "given" if value else "not given"
    facts["device"] = device_type(config.use_cpu)
    if facts["device"] == "cuda":  # elsewhere none of its kernels is taken
        facts["liger-kernel"] = installed_version("liger-kernel") or "not installed"
    return {**facts, **{name: version(name) for name in _PACKAGES}, "expertmesh's code": _CODE}


# as close to what this process has imported as can be had
_CODE = sources_digest(("moe", "sharding", "checkpoints", "training"))[:16]


def compare_models(config: TrainConfig, source: ModelSource, ranks: Ranks) -> Facts:
    """Compare config.json, the files of weights, those of --init-adapter and new tokens over all nodes. All ranks call
    it together.

    Returns:
        The facts of each that the run has, on the first rank of each node.

    Raises:
        ExpertMeshError: on all ranks, when they differ, or cannot be read.
    """
    facts: Facts = {}
    with raise_together(patient=ranks):
        if _reads():
            facts["model"] = model_facts(source.path)
            if config.init_adapter and (adapter := adapter_facts(Path(config.init_adapter))):
                facts["adapter"] = adapter
            if config.add_tokens or config.resize_vocab:
                tokens = json.dumps([added_tokens(config), source.vocab_size, source.new_tokens])
                facts["tokens"] = {
                    "number": f"{len(source.new_tokens):,}",
                    "digest": xxhash.xxh3_64_hexdigest(tokens.encode()),
                }
    flags = {"model": "", "adapter": "--init-adapter ", "tokens": "--add-tokens "}
    mine = {flags[of] + name: value for of, table in facts.items() for name, value in table.items()}
    check_alike(ranks, "the files of --model", mine if _reads() else None, "copy one node's files to the others")
    return facts


def compare_teachers(path: Path, ranks: Ranks) -> dict[str, str]:
    """`compare_models` of the files of --teacher, which are in `path`."""
    teacher: dict[str, str] = {}
    with raise_together(patient=ranks):
        if _reads():
            teacher = model_facts(path)
    check_alike(ranks, "the files of --teacher", teacher if _reads() else None, "copy one node's files to the others")
    return teacher


def compare_data(inputs: Inputs, prompts: Prompts | None, num_steps: int, ranks: Ranks) -> Facts:
    """Compare samples, what reads images, the number of steps and prompts over all nodes. All ranks call it together.

    Returns:
        The facts of the data, on the first rank of each node.

    Raises:
        ExpertMeshError: on all ranks, when they differ.
    """
    facts: Facts = {}
    with raise_together(patient=ranks):
        if _reads():
            for name, rows in (("data", inputs.training), ("evaluation data", inputs.evaluation)):
                if rows is not None:
                    facts[name] = samples_facts(rows.samples)
            if inputs.questions is not None:
                facts[QUESTIONS] = samples_facts(inputs.questions.samples)
            if inputs.stream is not None:
                facts["data"] = inputs.stream.facts | facts["data"]
            if inputs.images is not None:
                facts["image processor"] = processor_facts(inputs.images)
    remedy = "give all nodes the same files, in the same order"
    for name, origin in (("data", "--dataset"), ("evaluation data", "the evaluation"), (QUESTIONS, "--eval-generate")):
        mine = facts.get(name, {}) if _reads() else None
        check_alike(ranks, f"the samples of {origin}", mine, remedy, explain_samples)
    if inputs.images is not None:
        mine = None
        if _reads():  # which versions a resumed run has is not compared, as of other libraries
            versions = {f"{name}:": value or "not installed" for name, value in inputs.images.versions.items()}
            mine = facts["image processor"] | versions
        check_alike(ranks, "the image processors of --model", mine, "give all nodes the same files and versions")
    asked = {"steps": str(num_steps), "prompts": json.dumps([prompts.tokens, prompts.texts] if prompts else [])}
    check_alike(ranks, "the number of steps, or the prompts,", asked if _reads() else None, remedy)
    return facts


def processor_facts(processor: ImageProcessor) -> dict[str, str]:
    """What a model's image processor does, by name, and its image token."""
    return {f"{name}:": value for name, value in flat(processor.settings).items()}


def _reads() -> bool:
    """Whether this rank is the one that reads its node's files."""
    return process_place().local_rank == 0
