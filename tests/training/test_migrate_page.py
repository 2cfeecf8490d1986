"""The page of other tools' keys."""

from pathlib import Path

from expertmesh.training.config.train_config import make_parser
from tests.training.migrate_page import KEYS, keys, page

FILE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md"


def test_it_is_what_the_command_prints() -> None:
    assert FILE.read_text(encoding="utf-8") == page(), "make it anew: its first lines say how"


def test_the_commonest_keys_of_every_tool_have_an_answer() -> None:
    """As flags here, or with what to give instead: none is merely unknown."""
    parser = make_parser()
    for tool, theirs in keys().items():
        assert len(theirs) > (30 if tool.startswith("Megatron") else 60), tool
        asked = [(name, value) for name, values in theirs for value in values or ["x"] if name not in parser.names]
        assert not [(name, value) for name, value in asked if parser.instead_of(name, [value]) is None], tool
    assert {"axolotl", "LLaMA-Factory", "ms-swift"} <= KEYS.keys()
