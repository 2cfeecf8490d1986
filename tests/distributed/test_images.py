"""Models that see images: loss, every gradient of text and tower and weights after steps are the same with every
parallel layout as by transformers' own classes in one process (tests/images.py), ranks without any image included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import ModuleList

import expertmesh
from expertmesh.checkpoints.__main__ import main as verify
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.hf_model.families import families_with_plan
from expertmesh.moe.hf_model.image_costs import image_flops
from expertmesh.sharding.parallelize import tower
from expertmesh.training.config.train_config import make_config
from expertmesh.training.engine.assembly import assemble
from expertmesh.training.steps.generate import generate
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full
from tests.images import FAMILIES, ImageSample, answer, collated, image_model, is_vision, sample, samples_of, stepped
from tests.parity.kept import in_our_layout
from tests.rounding import AFTER_ADAMW, OTHER_ORDER, error_beyond, gradient_errors, near
from tests.tiers import tiered, two_diagonals

BOTH = ["tower", "projector"]
ON_CPU: dict[str, Any] = {"router_aux_loss_coef": 0.0, "use_cpu": True}
STEPS = dict(learning_rate=1e-3, weight_decay=0.0, max_grad_norm=0.0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2 ep 2": (2, dict(ep_size=2)),
    "4 ep 2": (4, dict(ep_size=2)),
    "4 ep 2 hybrid": (4, dict(ep_size=2, dense_shard="hybrid")),
    "1 packed": (1, dict(packing=True)),
    "2 cp 2": (2, dict(cp_size=2)),
    "2 tp 2": (2, dict(tp_size=2)),
    "4 ep 2 cp 2 packed": (4, dict(ep_size=2, cp_size=2, packing=True)),
    "4 ep 2 pp 2": (4, dict(ep_size=2, pp_size=2)),
    "2 full": (2, dict(ep_size=2, gradient_checkpointing="full")),
    "2 selective": (2, dict(ep_size=2, gradient_checkpointing="selective")),
}
IN_UNITS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "4 ep 2 no reshard": (4, dict(ep_size=2, reshard_after_forward=False)),
    "4 ep 2 offload": (4, dict(ep_size=2, offload=True)),
    "4 ep 2 tower alone": (4, dict(ep_size=2, train_vision=["tower"])),
    "4 ep 2 projector alone": (4, dict(ep_size=2, train_vision=["projector"])),
    "4 ep 2 frozen": (4, dict(ep_size=2, train_vision=[])),
}
"""Those in which every block of the tower is an FSDP unit."""
AMPLIFIED = {"qwen4_exp": 2e-4, "glm5_next": 5e-5, "glm4v_moe": 3e-5, "qwen3_5_moe": 7e-5, "muse_spark": 9e-5}
"""What gradients may be off by in a family that takes the root of scores, whose slope has no bound near 0; in others
twice what transformers' own change by where numbers of a patch, or all, are added up in another order."""
NOT_DIVIDED = set(FAMILIES) - set(families_with_plan())
"""Families whose attention tensor parallelism does not divide."""


def rows_of(engine: Any, samples: Sequence[ImageSample]) -> list[list[list[ImageSample]]]:
    """This rank's micro-batches: the first ranks have the samples with images, others have some without any."""
    mine = list(samples[engine.data_rank :: engine.data_size])
    if engine.config.packing:
        return [[mine[: len(mine) // 2]], [mine[len(mine) // 2 :]]]
    return [[[sample] for sample in mine[:1]], [[sample] for sample in mine[1:]]]


def ours(path: Path, settings: dict[str, Any], samples: Sequence[ImageSample]) -> Any:
    """(what a forward and backward gave, gradients, the number of FSDP units in the tower)."""
    engine = expertmesh.load(str(path), **{**ON_CPU, "images": True, "train_vision": BOTH, **settings})
    batches = [collated(engine.model, rows) for rows in rows_of(engine, samples)]
    before = engine.evaluate(batches)
    result = engine.forward_backward(batches)
    assert before.loss == near(result.loss)
    grads = in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    units = sum(isinstance(part, FSDPModule) for name, part in engine.model.named_modules() if is_vision(name))
    if units and not engine.config.packing and engine.config.cp_size == engine.config.pp_size == 1:
        assert [len(each) for each in generate(engine.model, [[5, 6, 7], [8, 9]], 2, [], engine.ranks)] == [2, 2]
    return result, grads, units


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def model_of(family: str) -> tuple[Path, Any]:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model", image_model(family)
            made[family][1].save_pretrained(made[family][0])
            # which is kept: else all ranks find it out at the same time
            config = make_config({"model": str(made[family][0]), "images": True, "train_vision": BOTH, **ON_CPU})
            source = open_source(made[family][0]).seeing_images()
            image_flops(assemble(config, source, "cpu").model)
        return made[family]

    return model_of


def assert_gradients(
    found: dict[str, Tensor], model: Any, theirs: dict[str, Tensor], trained: Sequence[str] = tuple(BOTH)
) -> None:
    wanted = in_our_layout(model.config, theirs, images=True)
    if tuple(trained) != tuple(BOTH):
        wanted = {name: grad for name, grad in wanted.items() if is_trained(name, trained)}
    # indexers get no gradient, or zeros, as of tokens that are all chosen
    unreached = {name: found[name] for name in found.keys() - wanted.keys()}
    assert all(not grad.any() for grad in unreached.values()), unreached.keys()
    errors = gradient_errors({name: found[name] for name in wanted}, wanted)
    allowed = AMPLIFIED.get(model.config.model_type, OTHER_ORDER)
    assert max(errors.values()) <= allowed, sorted(errors.items(), key=lambda each: -each[1])[:5]
    assert any(is_vision(name) for name in wanted) == bool(trained)


def is_trained(name: str, trained: Sequence[str]) -> bool:
    return not is_vision(name) or ("projector" if "merger" in name else "tower") in trained


QUICK = [("qwen3_vl_moe", "4 ep 2")]
REST = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) not in QUICK and not (family in NOT_DIVIDED and "tp 2" in layout)
]
SLOW = [pair for pair in two_diagonals(FAMILIES, [*LAYOUTS]) if pair in REST]


@pytest.mark.parametrize(("family", "layout"), tiered(QUICK, SLOW, [pair for pair in REST if pair not in SLOW]))
def test_with_any_layout(family: str, layout: str, ranks: RankPool, models: Any) -> None:
    path, model = models(family)
    samples = samples_of(model)
    wanted = answer(model, samples)
    world_size, settings = LAYOUTS[layout]
    found = ranks.run(ours, world_size, path, settings, samples)
    assert all(result.loss == near(wanted.loss) for result, _, _ in found)
    patches = [len(each.pixels) for sample in samples for each in sample.pictures]
    counted = (len(patches), sum(patches), sum(number**2 for number in patches))
    assert {result.of_images for result, _, _ in found} == {counted}
    assert_gradients(found[0][1], model, wanted.grads)


def as_it_is(job: Any, *args: Any) -> Any:
    return job(*args)


def in_units(job: Any, *args: Any) -> Any:
    """What a job gives with so low a limit that every tower counts as large."""
    with mock.patch.object(tower, "LARGEST_IN_ROOT", 0):
        return job(*args)


UNITS_QUICK = [("qwen3_vl_moe", "4 ep 2")]
UNITS_REST = [("qwen3_vl_moe", layout) for layout in IN_UNITS if layout != "4 ep 2"]
UNITS_REST += [(family, "4 ep 2") for family in FAMILIES if family != "qwen3_vl_moe"]


@pytest.mark.parametrize(
    ("family", "layout"), tiered(UNITS_QUICK, UNITS_REST[::3], UNITS_REST[1::3] + UNITS_REST[2::3])
)
def test_a_large_tower_is_sharded_by_block(family: str, layout: str, ranks: RankPool, models: Any) -> None:
    """Each of its blocks is a unit, which all ranks gather, those without images too; loss and gradients stay.
    Generation, in which no rank has an image, does not need them."""
    path, model = models(family)
    samples = samples_of(model)
    wanted = answer(model, samples)
    world_size, settings = IN_UNITS[layout]
    found = ranks.run(in_units, world_size, ours, path, settings, samples)
    assert all(result.loss == near(wanted.loss) for result, _, _ in found)
    assert_gradients(found[0][1], model, wanted.grads, tuple(settings.get("train_vision", BOTH)))
    if settings.get("pp_size") is None:
        lists = [len(part) for name, part in model.named_modules() if is_vision(name) and isinstance(part, ModuleList)]
        assert {units for _, _, units in found} == {max(lists)}


def trained_on(path: Path, out: Path, settings: dict[str, Any], samples: Sequence[ImageSample]) -> Any:
    """(weights after three steps, whether they are the same where the third one resumes, first lines)"""
    settings = {**ON_CPU, "images": True, **STEPS, **settings}
    engine = expertmesh.load(str(path), **settings)
    batches = [collated(engine.model, rows) for rows in rows_of(engine, samples)]
    for _ in range(2):
        engine.step(batches)
    saved = engine.save(out / "checkpoints")
    engine.step(batches)
    engine.save(out / "checkpoints")
    again = expertmesh.load(str(path), resume=str(saved), **settings)
    again.step(batches)
    ours, theirs = (in_full(dict(each.model.named_parameters())) for each in (engine, again))
    engine.export(out / "hf")
    return ours, all(torch.equal(theirs[name], weight) for name, weight in ours.items()), engine.trained


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("trained", [[], ["projector"], BOTH], ids=["frozen", "projector", "both"])
@pytest.mark.parametrize(
    ("layout", "how"), [("1", as_it_is), ("4 ep 2", as_it_is), ("4 ep 2 pp 2", as_it_is), ("4 ep 2", in_units)]
)
def test_steps_resume_and_export(
    layout: str, how: Any, trained: list[str], ranks: RankPool, models: Any, tmp_path: Path
) -> None:
    """Weights after three steps are transformers' own; a resume changes no bit; transformers reads the export back."""
    path, _ = models("qwen3_vl_moe")
    model = image_model("qwen3_vl_moe")
    samples = samples_of(model)
    world_size, settings = LAYOUTS[layout]
    found = ranks.run(how, world_size, trained_on, path, tmp_path, {**settings, "train_vision": trained}, samples)
    weights, is_resumed_exactly, lines = found[0]
    assert is_resumed_exactly
    assert any(line.startswith("images: tower") for line in lines)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    theirs = stepped(model, samples, 3, STEPS["learning_rate"], lambda name: is_trained(name, trained))
    wanted = in_our_layout(model.config, theirs, images=True)
    for name, weight in wanted.items():
        assert error_beyond(0.0, weights[name], weight) <= AFTER_ADAMW, name
    back: Any = type(model).from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, weight in back.named_parameters():
        assert error_beyond(0.0, weight, theirs[name]) <= AFTER_ADAMW, name
        if not is_trained(name, trained):
            assert torch.equal(weight, before[name]), name
    *_, saved = sorted((tmp_path / "checkpoints").iterdir())
    assert verify(["verify", str(saved), str(tmp_path / "hf")]) == 0
    assert verify(["verify", str(saved), str(path)]) == 1


def adapted(path: Path, out: Path, settings: dict[str, Any], samples: Sequence[ImageSample]) -> Any:
    settings = {**ON_CPU, "images": True, **STEPS, **settings}
    engine = expertmesh.load(str(path), **settings)
    batches = [collated(engine.model, rows) for rows in rows_of(engine, samples)]
    losses = [engine.step(batches).loss for _ in range(3)]
    after = engine.evaluate(batches).loss
    engine.export(out / "adapter")
    engine.merge(out / "adapter", out / "merged")
    trained = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    return losses, after, trained


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "nf4", "fp8"])
def test_adapters(base: str, ranks: RankPool, models: Any, tmp_path: Path) -> None:
    """Of the language model alone; merged, transformers' class has the same loss on images."""
    path, model = models("qwen3_vl_moe")
    samples = samples_of(model)
    settings = dict(ep_size=2, adapter="lora", lora_rank=4, base_dtype=base, learning_rate=1e-2)
    losses, after, trained = ranks.run(adapted, 2, path, tmp_path, settings, samples)[0]
    assert losses[0] > losses[2] > after
    assert trained
    assert not any(is_vision(name) for name in trained)
    if base == "float32":
        assert losses[0] == near(answer(model, samples).loss)
        merged: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert answer(merged, samples).loss == near(after)


def with_adapters_of_the_tower(path: Path, out: Path, samples: Sequence[ImageSample]) -> Any:
    settings: dict[str, Any] = dict(
        ep_size=2, adapter="lora", lora_targets=["vision"], init_adapter=str(out / "theirs")
    )
    engine = expertmesh.load(str(path), **ON_CPU, images=True, **settings)
    result = engine.forward_backward([collated(engine.model, rows) for rows in rows_of(engine, samples)])
    engine.export(out / "ours")
    return result.loss, in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})


@pytest.mark.slow
@pytest.mark.parametrize("how", [as_it_is, in_units])
def test_adapters_of_the_tower_are_pefts(how: Any, ranks: RankPool, models: Any, tmp_path: Path) -> None:
    """Of tower and projector: PEFT's are read, have its loss and gradients, and are exported as PEFT reads them."""
    peft = pytest.importorskip("peft")
    path, _ = models("qwen3_vl_moe")
    model = image_model("qwen3_vl_moe")
    linear = [name for name, part in model.named_modules() if is_vision(name) and isinstance(part, torch.nn.Linear)]
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear))
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    samples = samples_of(model)
    wanted = answer(theirs.get_base_model(), samples)
    plain = answer(image_model("qwen3_vl_moe"), samples)
    assert wanted.loss != near(plain.loss)
    loss, grads = ranks.run(how, 2, with_adapters_of_the_tower, path, tmp_path, samples)[0]
    assert loss == near(wanted.loss)
    of_theirs = {name.replace(".default.weight", ""): grad for name, grad in wanted.grads.items()}
    assert len(grads) == 2 * len(linear)
    errors = gradient_errors(grads, of_theirs)
    assert max(errors.values()) <= OTHER_ORDER, errors
    back = peft.PeftModel.from_pretrained(image_model("qwen3_vl_moe"), tmp_path / "ours")
    assert answer(back.get_base_model(), samples).loss == near(wanted.loss)


def without_images(path: Path, settings: dict[str, Any], samples: Sequence[ImageSample]) -> Any:
    found = []
    for images in (True, False):
        settings = {**ON_CPU, **STEPS, **settings}
        of_images: dict[str, Any] = {"images": True, "train_vision": BOTH} if images else {}
        engine = expertmesh.load(str(path), **settings, **of_images)
        batches: list[Any] = [collated(engine.model, rows) for rows in rows_of(engine, samples)]
        for batch in batches:
            batch.pop("mm_token_type_ids")
        result = engine.step(batches)
        found.append((result.loss, result.grad_norm, in_full(dict(engine.model.named_parameters()))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [as_it_is, in_units])
@pytest.mark.parametrize("layout", ["2 ep 2", "4 ep 2 pp 2"])
def test_no_image_on_any_rank(layout: str, how: Any, ranks: RankPool, models: Any) -> None:
    """A step on text is that of a model that was loaded for text, to the bit; the tower stays as it was."""
    path, model = models("qwen3_vl_moe")
    world_size, settings = LAYOUTS[layout]
    samples = [each for each in samples_of(model) if not each.pictures] * 2
    seeing, blind = ranks.run(how, world_size, without_images, path, settings, samples)[0]
    # the norm is of more tensors: its sum in fp64 has another order
    assert (seeing[0], seeing[1]) == (blind[0], pytest.approx(blind[1], rel=1e-12))
    assert all(torch.equal(seeing[2][name], weight) for name, weight in blind[2].items())
    before = dict(model.named_parameters())
    tower = seeing[2].keys() - blind[2].keys()
    assert tower
    assert all(torch.equal(seeing[2][name], before[name]) for name in tower)


def in_trainer(path: Path, out: Path, samples: Sequence[ImageSample]) -> list[float]:
    """The loss of an evaluation, of one with logits, and of the first step."""
    from transformers import TrainingArguments

    engine = expertmesh.load(str(path), **{**ON_CPU, "images": True, "ep_size": 2})
    given: dict[str, Any] = dict(
        max_steps=1, logging_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=2
    )
    args = TrainingArguments(
        str(out),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        **given,
    )

    def collator(some: Any) -> Any:
        return collated(engine.model, [[each] for each in some])

    data: Any = list(samples)
    losses = []
    computed: list[Any] = [None, lambda prediction: {}]
    for metrics in computed:
        trainer = expertmesh.Trainer(engine, args, collator, data, data, compute_metrics=metrics)
        trainer.args.prediction_loss_only = metrics is None
        losses.append(trainer.evaluate()["eval_loss"])
    trainer.train()
    return [*losses, trainer.state.log_history[-2]["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", [as_it_is, in_units])
def test_trainer(how: Any, ranks: RankPool, models: Any, tmp_path: Path) -> None:
    path, model = models("qwen3_vl_moe")
    one, other = samples_of(model)[0], sample(model, 15, seed=1)
    assert len(one.tokens) == len(other.tokens), "logits have one length"
    # of two ranks the second has no image
    samples = [one, one, other, other] * 2
    wanted = answer(model, samples).loss
    for losses in ranks.run(how, 2, in_trainer, path, tmp_path, samples):
        assert losses == [near(wanted)] * 3
