"""Models that are alike are probed once, whichever process of the tests builds them.

Every rank of a job probes the model that it builds, as those of a real run do on cores of their own. Here they share
two, and a family is built in dozens of tests.
"""

import fcntl
import hashlib
import pickle
from pathlib import Path
from typing import Any

import expertmesh.moe.hf_model.build
from expertmesh.moe.experts.model_facts import ModelFacts
from expertmesh.moe.util.atomic_write import whole


def remember_probes(directory: Path) -> None:
    """Have this process look into `directory` before it probes a model, and leave there what it has seen: names and
    numbers, which a model's class, config and attention settle."""
    probe = expertmesh.moe.hf_model.build.probe
    remembered: dict[str, ModelFacts] = {}

    def probe_once(model: Any) -> ModelFacts:
        config = model.config
        settled = [repr(type(model)), config.to_json_string(use_diff=False), str(config._attn_implementation)]
        key = hashlib.sha256("\n".join(settled).encode()).hexdigest()
        if key not in remembered:
            file = directory / key
            with open(file.with_suffix(".lock"), "w") as lock:
                # the other ranks of the job wait for the first
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():
                    seen = probe(model)
                    with whole(file) as partial:
                        partial.write_bytes(pickle.dumps(seen))
            remembered[key] = pickle.loads(file.read_bytes())
        return remembered[key]

    expertmesh.moe.hf_model.build.probe = probe_once
