"""The page of other tools' keys."""

from expertmesh.training.config.train_config import make_parser
from tests.training.migrate_page import KEYS, keys


def test_the_commonest_keys_of_every_tool_have_an_answer() -> None:
    """As flags here, or with what to give instead: none is merely unknown."""
    parser = make_parser()
    for tool, theirs in keys().items():
        assert len(theirs) > (30 if tool.startswith("Megatron") else 60), tool
        asked = [(name, value) for name, values in theirs for value in values or ["x"] if name not in parser.names]
        assert not [(name, value) for name, value in asked if parser.instead_of(name, [value]) is None], tool
    assert {"axolotl", "LLaMA-Factory", "ms-swift"} <= KEYS.keys()
