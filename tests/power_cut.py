"""What a power cut leaves on disk: the worst that a file system may make of a program's writes.

A file has the bytes of its last fsync, or none. A directory has the names of its last fsync, or any that it had since:
each directory by itself, so that deletions within one may last while its own renaming is lost.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "symlink", "link")
TEMPORARY = r"\.[^/]+-[a-z0-9_]{8}\.part"
"""What `tempfile.mkdtemp` calls directories."""
Names = dict[str, int]
"""Of a directory: what has which name."""


class Disk:
    """What is durable of the tree under `root`, where everything is in the beginning.

    Beginning with what was there when `recorded` began, `cuts` are the states of the disk that a power cut before each
    change could leave.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept: list[int] = []
        self.links: dict[int, str] = {}
        self.bytes: dict[int, bytes] = {}
        self.names: dict[int, list[Names]] = {}
        self.cuts: list[tuple[str, list[dict[str, bytes | str | None]]]] = []
        self.told = {"the end"}
        self.turn = threading.RLock()
        self.top = root.stat().st_ino
        self.look()
        for number, versions in self.names.items():
            self.names[number] = versions[-1:]
        for file in root.rglob("*"):
            if file.is_file() and not file.is_symlink():
                self.bytes[file.stat().st_ino] = file.read_bytes()

    def look(self) -> None:
        """Note the names that directories have now."""
        for folder, _, _ in os.walk(self.root):
            names: Names = {}
            for entry in os.scandir(folder):
                names[entry.name] = number = entry.inode()
                if number in self.names or number in self.bytes or number in self.links:
                    continue
                # held for as long as this is, that no other file gets its number
                self.kept.append(os.open(entry.path, os.O_PATH | os.O_NOFOLLOW))
                if entry.is_symlink():
                    self.links[number] = os.readlink(entry.path)
                elif not entry.is_dir():
                    self.bytes[number] = b""
            versions = self.names.setdefault(os.stat(folder).st_ino, [{}] if folder != str(self.root) else [])
            if not versions or versions[-1] != names:
                versions.append(names)

    def tell(self, what: str) -> None:
        """A power cut from now on comes after this has been told."""
        self.told.add(what)
        self.cut(what)

    def cut(self, before: str) -> None:
        """Note what a power cut would leave now."""
        with self.turn:
            self.look()
            oldest, newest = (dict.fromkeys(self.names, end) for end in (0, -1))
            choices = [oldest, newest]
            for number, versions in self.names.items():
                choices += [base | {number: at} for base in (oldest, newest) for at in range(len(versions))]
            found = [self._content(choice, self.top, "") for choice in choices]
            self.cuts.append((before, [state for at, state in enumerate(found) if state not in found[:at]]))

    def _content(self, choice: dict[int, int], folder: int, path: str) -> dict[str, bytes | str | None]:
        """By path: the bytes of a file, what a link leads to, None for a directory."""
        found: dict[str, bytes | str | None] = {}
        for name, number in self.names[folder][choice[folder]].items():
            if number in self.links:
                found[path + name] = self.links[number]
            elif number in self.names:
                found |= {path + name: None, **self._content(choice, number, path + name + "/")}
            else:
                found[path + name] = self.bytes[number]
        return found

    def synced(self, descriptor: int) -> None:
        with self.turn:
            self.look()
            number = os.fstat(descriptor).st_ino
            if number in self.names:
                self.names[number] = self.names[number][-1:]
            elif number in self.bytes:
                self.bytes[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()


@contextmanager
def recorded(root: Path) -> Iterator[Disk]:
    """In the block, what this process does to files under `root` is recorded."""
    disk = Disk(root)

    def synced(descriptor: int) -> None:
        disk.cut("fsync")
        disk.synced(descriptor)  # the real disk's would take its time and change nothing here

    def guarded(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            with disk.turn:
                disk.cut(f"{name} {' '.join(map(str, arguments))}".replace(str(root), ""))
                return change(*arguments, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "fdatasync", synced)
        yield disk
    disk.cut("the end")
    for descriptor in disk.kept:
        os.close(descriptor)


def states(disk: Disk, place: Path) -> Iterator[tuple[str, Path]]:
    """Each state that a power cut could leave, made anew in `place`, with what it came before. Directories that are
    merely temporary, as no recovery looks into them, are left out."""
    seen: set[Any] = set()
    told = ""
    for before, found in disk.cuts:
        # what is promised changes there
        told = before if before in disk.told else told
        for whole in found:
            state = {name: content for name, content in whole.items() if not re.match(TEMPORARY, name)}
            key = told, tuple(state.items())
            if key in seen:
                continue
            seen.add(key)
            made = place / str(len(seen))
            made.mkdir(parents=True)
            for name, content in state.items():
                if content is None:
                    (made / name).mkdir()
                elif isinstance(content, str):
                    (made / name).symlink_to(content)
                else:
                    (made / name).write_bytes(content)
            yield before, made
