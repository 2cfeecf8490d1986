"""What servers do with an adapter: what they load rightly, and what they must be given. Declared here alone.

`tests/servers/` asks the code of the servers' own releases.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Server:
    """A server, as of the release that was asked.

    Attributes:
        known: last names of the layers whose adapters it loads; None: of any.
        unused: last names of layers whose adapters it loads, and does not compute with as PEFT does.
        beside: by last names, the layers beside it that must have adapters, too.
        by_disk_name: whether it finds modules by their names in the checkpoint alone, and drops others without a word.
        for_experts: what it must be given for experts' adapters. for_packed: for packed ones; None: it loads none.
        scales_rslora: whether it heeds `use_rslora`.
        ranks: what it can be given as the largest rank; none: it finds that out.
    """

    name: str
    release: str
    known: frozenset[str] | None = None
    unused: frozenset[str] = frozenset()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_disk_name: bool = False
    for_experts: tuple[str, ...] = ()
    for_packed: tuple[str, ...] | None = None
    scales_rslora: bool = True
    ranks: tuple[int, ...] = ()

    def lost(self, layers: Mapping[str, str | None]) -> list[str]:
        """The adapted layers whose adapters it does not load, or does not use.

        layers: by path, the path on disk; None where that is not one layer's.
        """
        return [
            path
            for path, on_disk in layers.items()
            for parent, _, name in [path.rpartition(".")]
            if (self.known is not None and name not in self.known)
            or name in self.unused
            or any(f"{parent}.{other}" not in layers for other in self.beside.get(name, ()))
            or (self.by_disk_name and on_disk is not None and in_layer(on_disk) != in_layer(path))
        ]


VLLM = Server(
    "vLLM",
    "0.32.0",
    # attention multiplies by a copy of the weight, made when the model is loaded; of routers, its tokens are not PEFT's
    unused=frozenset({"kv_b_proj", "gate", "router"}),
    by_disk_name=True,
    for_packed=("--enable-mixed-moe-lora-format", '"is_3d_lora_weight": true'),
    ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
)
SGLANG = Server(
    "SGLang",
    "0.5.23",
    known=frozenset(
        {
            *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
            *("gate_proj", "up_proj", "down_proj", "out_proj", "in_proj", "in_proj_qkvz"),
            *("fc1_latent_proj", "fc2_latent_proj"),
        }
    ),
    # those that it stacks
    beside={
        "q_proj": ("v_proj",),
        "k_proj": ("q_proj", "v_proj"),
        "v_proj": ("q_proj",),
        "up_proj": ("gate_proj",),
        "kv_a_proj_with_mqa": ("q_a_proj",),
    },
    for_experts=("--lora-target-modules all",),
    scales_rslora=False,
)
SERVERS = (VLLM, SGLANG)


def in_layer(path: str) -> str:
    """What follows the number of a layer in a path: what is before it is called otherwise in some classes."""
    return re.split(r"\.\d+\.", path, maxsplit=1)[-1]


def servable(paths: Iterable[str]) -> set[str]:
    """Those linear layers whose adapters every server loads rightly."""
    left = dict.fromkeys(paths)
    while lost := {path for server in SERVERS for path in server.lost(left)}:
        left = {path: None for path in left if path not in lost}
    return set(left)


def serving_lines(
    layers: Mapping[str, str | None],
    rank: int,
    is_packed: bool | None,
    is_packed_elsewhere: bool,
    use_rslora: bool,
    whole: Collection[str],
) -> list[str]:
    """A line for each server: what it must be given, or why the adapter must be merged to be served there.

    Args:
        layers: adapted linear layers and routers, as of `Server.lost`.
        rank: the largest that adapter_config.json names.
        is_packed: whether experts' adapters are packed; None: there are none. is_packed_elsewhere: whether their module
            has another name on disk.
        whole: names of what is trained whole, or in rows of tokens.
    """
    lines = []
    for server in SERVERS:
        needs, reasons = [], []
        if lost := dict.fromkeys(path.rpartition(".")[2] for path in server.lost(layers)):
            reasons.append(f"does not serve adapters of {', '.join(lost)}")
        if is_packed and (server.for_packed is None or (server.by_disk_name and is_packed_elsewhere)):
            reasons.append("does not serve packed adapters of experts")
        if use_rslora and not server.scales_rslora:
            reasons.append("scales by alpha / r in spite of --use-rslora")
        if whole:
            reasons.append("does not serve modules or tokens trained whole")
        if server.ranks:
            fitting = [each for each in server.ranks if each >= rank]
            needs += [f"--max-lora-rank {fitting[0]}"] if fitting else []
            reasons += [] if fitting else [f"takes no rank above {server.ranks[-1]}, and the largest is {rank}"]
        if is_packed is not None:
            needs += [*server.for_experts, *((server.for_packed or ()) if is_packed else ())]
        if reasons:
            lines.append(f"adapter: {server.name} {', and '.join(reasons)}; merge to serve there")
        elif needs:
            lines.append(f"adapter: {server.name} needs {', '.join(needs)}")
    return lines
