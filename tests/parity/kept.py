"""References that are computed once and kept on disk, for the other processes of a run and for later runs.

A file's name is the hash of all that its content depends on: the model's class, config and every bit of its weights,
what is asked, the source that computes it, and what that runs on. So none is ever out of date, and nothing is compared
before it is used. Files that no run has used for a week are deleted.
"""

import hashlib
import io
import json
import os
import platform
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from expertmesh.moe.hf_model.build import build_model
from expertmesh.sharding.state import parameters_of
from tests.parity import reference
from tests.parity.case import Case, Figures, hf_model
from tests.tiny import our_rows

DIRECTORY = Path(__file__).parents[2] / ".pytest_cache" / "d" / "parity"
"""Where pytest's own cache keeps directories."""
A_WEEK = 7 * 24 * 3600.0


def expected(case: Case, model: Any = None) -> Figures:
    """What transformers' class gives in one process, under our names and in our layout.

    Args:
        model: of transformers, where it is not the case's own; it is trained.
    """
    model = hf_model(case) if model is None else model
    config, asked = model.config, reference.question(case)
    file = DIRECTORY / f"{_key(model, asked)}.pt"
    try:
        found = torch.load(io.BytesIO(file.read_bytes()), weights_only=True)
        os.utime(file)
    except FileNotFoundError:
        found = reference.answer(model, asked)
        _keep(file, found)
    for what in ("grads", "weights"):
        found[what] = in_our_layout(config, found[what])
    without = {"balances": None} if not case.balance else {}
    return Figures(**found | without | ({"zs": None} if not case.z else {}))


def _key(model: Any, asked: dict[str, Any]) -> str:
    hashed = hashlib.blake2b(f"{_surroundings()} {_order_of_sums()}".encode(), digest_size=16)
    hashed.update(f"{type(model)} {model.config.to_json_string(use_diff=False)} {json.dumps(asked)}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


@cache
def _surroundings() -> str:
    """What is the same for all of a run: the source, versions, and the kind of CPU."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    versions = (torch.__version__, transformers.__version__, platform.python_version())
    return f"{source} {versions} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _order_of_sums() -> str:
    """What the libraries are told of it."""
    told = {name: value for name, value in os.environ.items() if re.match("ATEN_|ONEDNN_|DNNL_|MKL_|OPENBLAS_", name)}
    return f"{sorted(told.items())} {torch.get_num_threads()}"


def _keep(file: Path, found: dict[str, Any]) -> None:
    """Atomically: another process may be writing the same."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for other in DIRECTORY.iterdir():
        with suppress(FileNotFoundError):  # another process has deleted it
            if time.time() - other.stat().st_mtime > A_WEEK:
                other.unlink()
    own = file.with_suffix(f".{os.getpid()}")
    torch.save(found, own)
    own.replace(file)


def in_our_layout(config: Any, theirs: dict[str, torch.Tensor], images: bool = False) -> dict[str, torch.Tensor]:
    """A HF model's gradients or weights under our names and in our layout, where there are any."""
    figures = {}
    for name, part in parameters_of(build_model(config, "eager", images)).items():
        if part.expert is None:
            if (tensor := theirs.get(name)) is not None:
                figures[name] = tensor.t() if part.transposed else tensor
        elif (tensor := theirs.get(f"{name.rpartition('.mlp.')[0]}.{part.expert.place.tensor}")) is not None:
            figures[name] = our_rows(part.expert, tensor)
    return figures
