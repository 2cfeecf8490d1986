"""Our name in transformers' registry of expert parallelism."""

import sys
from types import ModuleType

import pytest

from expertmesh.moe.registration import NAME, register_ep_implementation
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import is_older


@pytest.mark.skipif(is_older(), reason="this transformers has no EPImplementationInterface")
def test_registers() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    for _ in range(2):
        register_ep_implementation()
        assert NAME in EPImplementationInterface()


def test_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.distributed.expert_parallel"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ExpertMeshError, match=r"EPImplementationInterface; install transformers>=5\.23"):
        register_ep_implementation()
