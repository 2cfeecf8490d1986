"""Pages that are made of the code: `python -m tests.pages` writes them, `tests/test_pages.py` compares.

`docs/reference/models.md` takes minutes and has a command of its own (`tests/families/models_page.py`).
"""

from collections.abc import Callable
from pathlib import Path

from tests import commands_page, errors_page
from tests.training import flags_page, migrate_page

ROOT = Path(__file__).parents[1]
MADE: dict[str, Callable[[], str]] = {
    "docs/reference/flags.md": flags_page.page,
    "docs/reference/commands.md": commands_page.page,
    "docs/how-to/migrate.md": migrate_page.page,
    "docs/reference/errors.md": errors_page.page,
}


def main() -> None:
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
