"""The order in which a model's modules are changed: stated once, asserted, and known to all that changes any."""

import ast
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertmesh.moe.experts.lora import Lora, add_adapters
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.change_order import ORDER, begin_change
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from expertmesh.training.attention.by_sample import apply_packing
from expertmesh.training.loss.head import attach_loss_head
from tests.families.configs import tiny_config

ROOT = Path(__file__).parents[2]

WITHIN = {
    "moe/hf_model/probe.py": "for a trial, undone after it",
    "moe/hf_model/trial.py": "for a trial, undone after it",
    "checkpoints/upcycle.py": "for a trial, and of a model that only makes routers, undone after it",
    "sharding/pipeline/survey.py": "for a trial, undone after it",
    "moe/linear/linear.py": "one layer, for the changes of linear layers",
    "training/fused/liger_norm.py": "one module, for liger",
    "training/steps/generate.py": "for a generation, undone after it",
    "training/steps/pipelined.py": "for a call of all stages, undone after it",
    "training/planning/rehearsal/world.py": "a recorder of a dry run, outside of all",
}
"""What changes modules, and begins no change itself."""


def changing(tree: ast.AST) -> Iterator[ast.AST]:
    """Where code replaces a forward or a class of an object, or registers a hook on a forward."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                if name.endswith((".forward", ".__class__", ")['forward']")) and name != "self.forward":
                    yield node
        elif isinstance(node, ast.Call) and "register_forward_" in ast.unparse(node.func).rpartition(".")[2]:
            yield node


def test_whatever_changes_modules_has_a_place_in_the_order() -> None:
    begun, silent = set(), set()
    for floor in ("moe", "sharding", "checkpoints", "training"):
        for path in (ROOT / floor).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if not re.search(r"begin_change|\bforward\b|__class__|register_forward_", text):
                continue  # whose tree has nothing to find
            tree = ast.parse(text)
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            begins = {ast.literal_eval(c.args[1]) for c in calls if ast.unparse(c.func) == "begin_change"}
            begun |= begins
            if not begins and any(True for _ in changing(tree)):
                silent.add(path.relative_to(ROOT).as_posix())
    assert silent == WITHIN.keys()
    assert begun == ORDER.keys()


@pytest.mark.parametrize(
    "code",
    ["m.forward = f", "vars(m)['forward'] = f", "m.__class__ = C", "a.b.register_forward_hook(f)", "m.forward: F = f"],
)
def test_what_changes_modules_is_found(code: str) -> None:
    assert len(list(changing(ast.parse(code)))) == 1


def test_every_other_order_is_refused() -> None:
    for earlier, later in combinations(ORDER, 2):
        model = SimpleNamespace()
        for change in (earlier, earlier, later, later):
            begin_change(model, change)
        with pytest.raises(AssertionError, match=f"^{earlier} must be changed before {later}"):
            begin_change(model, earlier)


def test_a_planted_order_is_refused() -> None:
    model = build_model(tiny_config("mixtral"))
    attach_loss_head(model, "chunked")
    with pytest.raises(AssertionError, match="packing must be changed before loss head"):
        apply_packing(model)
    checkpoint_layers(model, "full")
    with pytest.raises(AssertionError, match="adapters must be changed before checkpointing"):
        add_adapters(model, Lora(4, 8.0), [], [], experts=True)
