"""A newer flash attention takes the place of torch's operators where it is installed, and what keeps it from that is
told; what the package of flash attention 4 is given by torch is what it takes, and what it gives back is attention."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.attention import flash, flash_kernels
from expertmesh.training.attention.flash import flash_attention
from expertmesh.training.attention.flash_kernels import FLASH_KERNELS, not_installed, restore, use_flash_kernels
from expertmesh.training.config.train_config import TrainConfig
from tests.gpus import SetCapability
from tests.tiny import relative_error, tiny_config
from tests.training import flash_4_stand_in

BY_VERSION = {kernels.version: kernels for kernels in FLASH_KERNELS}
SOURCES = {
    3: (
        "flash_attn_interface.py",
        "import torch\n"
        'library = torch.library.Library("flash_attn_3", "FRAGMENT")\n'
        'library.define("fwd(Tensor q) -> Tensor")\n'
        'library.define("bwd(Tensor q) -> Tensor")\n',
    ),
    4: ("flash_attn/cute/interface.py", Path(flash_4_stand_in.__file__).read_text(encoding="utf-8")),
}
"""Stand-ins for the packages, by version: a file and what is in it."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is called here is for a CPU")
Install = Callable[..., Path]


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="model", dataset=["data"], **settings)


def forget_modules() -> None:
    for name in [name for name in sys.modules if re.match(r"flash_attn(_interface|\.|$)", name)]:
        del sys.modules[name]


@pytest.fixture
def install(
    set_capability: SetCapability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, str], Path]]:
    """Makes a stand-in for a version's package, of a release, on a Hopper; gives its file."""
    releases: dict[str, str] = {}

    def installs(version: int, release: str = "4.0.0b36") -> Path:
        name, source = SOURCES[version]
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        releases[BY_VERSION[version].package] = release
        return file

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_kernels, "installed_version", lambda package: releases.get(package, ""))
    set_capability((9, 0))
    forget_modules()
    yield installs
    restore()
    forget_modules()


def on_ranks(monkeypatch: pytest.MonkeyPatch, *others: dict[int, str]) -> Ranks:
    """One rank of several; the others have these obstacles to versions, and none to those that are left out."""
    asked = iter([kernels.version for kernels in FLASH_KERNELS] * 9)

    def gather(into: list[Any], mine: Any) -> None:
        version = next(asked)
        into[:] = [mine, *(other.get(version, "") for other in others)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    return Ranks(0, 1 + len(others), torch.device("cuda"), dist.HashStore())


def model(**changes: Any) -> Any:
    return build_model(tiny_config(**changes))


def in_cuda(operator: Any) -> Callable[..., Any]:
    """What answers to CUDA's tensors, called with those of a CPU."""
    return partial(operator.default._op_dk, torch._C.DispatchKey.CUDA)


@pytest.mark.parametrize("version", BY_VERSION)
def test_torchs_operators_are_replaced(install: Install, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Those that our attention calls: what now answers is what asks for CUDA's tensors on behalf of the package."""
    install(version)
    package = BY_VERSION[version].package
    said = use_flash_kernels(model(), config(), on_ranks(monkeypatch))
    assert said == f"flash attention {version} ({package} 4.0.0b36) computes flash attention"
    assert current_flash_attention_impl() == BY_VERSION[version].name
    x, ends = torch.randn(4, 2, 8, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    lse, unused = torch.zeros(2, 4), torch.empty(0)
    common = (ends, ends, 4, 4, 0.0, True)
    told = rf"FA{version} flash_attention %s unsupported: inputs must be CUDA tensors"
    with pytest.raises(RuntimeError, match=told % "forward"):
        in_cuda(torch.ops.aten._flash_attention_forward)(x, x, x, *common, False)
    with pytest.raises(RuntimeError, match=told % "backward"):
        in_cuda(torch.ops.aten._flash_attention_backward)(x, x, x, x, x, lse, *common, unused, unused)
    # and once more does nothing
    assert use_flash_kernels(model(), config(), on_ranks(monkeypatch)) == said
    # the next model of the process has what it asks for
    use_flash_kernels(model(), config(deterministic=True), on_ranks(monkeypatch))
    assert current_flash_attention_impl() is None
    use_flash_kernels(model(), config(), on_ranks(monkeypatch))
    assert current_flash_attention_impl() == BY_VERSION[version].name
    use_flash_kernels(model(), config(), Ranks(0, 1, torch.device("cpu"), dist.HashStore()))
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("capability", "others", "taken", "said"),
    [
        ((9, 0), [], "expertmesh FA4", r"4 \(flash-attn-4 4\.0\.0b36\) computes flash attention$"),
        ((10, 3), [], "expertmesh FA4", "4 .* computes flash attention"),
        ((8, 0), [], None, r"4 is not used: .*9 \(Hopper\) or 10 \(Blackwell\); this one has 8\.0; .* 3 is not used"),
        ((9, 0), [{4: "why"}], "FA3", r"3 .*; flash attention 4 is not used: on rank 1 why$"),
        ((10, 0), [{4: "why"}], None, "4 is not used: on rank 1 why; flash attention 3 is not used: .*has 10.0"),
        ((9, 0), [{3: "why"}], "expertmesh FA4", "4 .* computes flash attention$"),
        ((9, 0), [{}, {4: "why", 3: "because"}], None, "4 is not used: on rank 2 why; .*on rank 2 because$"),
    ],
)
def test_the_newest_that_all_ranks_can_use(
    set_capability: SetCapability,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    others: list[dict[int, str]],
    taken: str | None,
    said: str,
) -> None:
    """Where both are installed; all ranks take the same, or none."""
    for version in BY_VERSION:
        install(version)
    set_capability(capability)
    found = use_flash_kernels(model(), config(), on_ranks(monkeypatch, *others))
    assert found is not None
    assert re.search(f"^flash attention {said}", found), found
    assert current_flash_attention_impl() == taken


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize(
    ("changes", "settings", "capability", "said"),
    [
        ({}, {}, (8, 0), r"Hopper.*; this one has 8\.0"),
        ({}, {}, (12, 0), r"this one has 12\.0"),
        ({"attention_dropout": 0.1}, {}, (9, 0), r"no dropout; this model's attention_dropout is 0\.1"),
        ({}, {"deterministic": True}, (9, 0), "--deterministic uses torch's own"),
    ],
)
def test_what_keeps_it_out_is_told(
    set_capability: SetCapability,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    settings: dict[str, Any],
    capability: tuple[int, int],
    said: str,
    version: int,
) -> None:
    install(version)
    set_capability(capability)
    found = use_flash_kernels(model(**changes), config(**settings), on_ranks(monkeypatch))
    assert found is not None
    assert re.search(f"^flash attention {version} is not used: .*{said}", found), found
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("capability", "changes", "is_used"),
    [
        ((10, 0), dict(head_dim=192, sliding_window=8), False),
        ((10, 0), dict(head_dim=192), True),
        ((10, 0), dict(head_dim=128, sliding_window=8), True),
        ((9, 0), dict(head_dim=192, sliding_window=8), True),
        ((10, 0), dict(hidden_size=512, num_attention_heads=2, head_dim=None, sliding_window=8), False),
    ],
)
def test_windows_in_wide_heads(
    set_capability: SetCapability,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    changes: dict[str, Any],
    is_used: bool,
) -> None:
    install(4)
    set_capability(capability)
    found = use_flash_kernels(model(**changes), config(), on_ranks(monkeypatch))
    told = "flash attention 4 is not used: on Blackwell it has no windows for heads wider than 128"
    assert (found != told) is is_used
    assert (current_flash_attention_impl() is not None) is is_used


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        (3, "raise ImportError('undefined symbol: _ZN3c104cuda')", "cannot be imported: ImportError: undefined symbol"),
        (4, "import cutlass.cute", "cannot be imported: ModuleNotFoundError: No module named 'cutlass"),
        (3, "import torch", "has no operator flash_attn_3::"),
        (4, "import torch", "flash_attn.cute.interface has no _flash_attn_fwd, which torch calls"),
        (4, "def _flash_attn_fwd(q, k, v): ...", "_flash_attn_fwd does not take what torch gives it"),
        (
            4,
            SOURCES[4][1].replace("out: Tensor, dout: Tensor", "dout: Tensor, out: Tensor"),
            "_flash_attn_bwd does not take what torch",
        ),
    ],
)
def test_a_package_that_does_not_work_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, version: int, source: str, said: str
) -> None:
    install(version).write_text(source)
    if "no operator" in said:
        monkeypatch.setattr(torch.ops, "flash_attn_3", object())
    found = use_flash_kernels(model(), config(), on_ranks(monkeypatch))
    assert found is not None
    assert said in found
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("release", "of_torch", "said"),
    [
        ("4.0.0b19", torch.__version__, "it needs flash-attn-4 4.0.0b36 or newer; this is 4.0.0b19"),
        ("4.0.0", "2.11.0+cu128", "it needs torch 2.12 or newer; this is 2.11.0+cu128"),
        ("4.0.0", "2.12.0", None),
        ("4.0.0b100", "2.14.1", None),
    ],
)
def test_releases_that_will_do(
    install: Install, monkeypatch: pytest.MonkeyPatch, release: str, of_torch: str, said: str | None
) -> None:
    """torch 2.11 refuses windows in the backward of flash attention 4."""
    install(4, release)
    monkeypatch.setattr(torch, "__version__", of_torch)
    found = flash_kernels.obstacle(BY_VERSION[4])
    assert found == (said or "")


def test_ranks_without_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(3)
    none = {version: not_installed(kernels) for version, kernels in BY_VERSION.items()}
    found = use_flash_kernels(model(), config(), on_ranks(monkeypatch, {4: none[4]}, none))
    assert found == "flash attention 3 is not used: on rank 2 flash_attn_3 is not installed"
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("version", BY_VERSION)
def test_torch_that_cannot_take_it(install: Install, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("no such operator")

    install(version)
    monkeypatch.setattr(flash_kernels, "activate_flash_attention_impl", refuse)
    told = f"flash attention {version} that is installed: no such operator; uninstall {BY_VERSION[version].package}"
    with pytest.raises(ExpertMeshError, match=told):
        use_flash_kernels(model(), config(), on_ranks(monkeypatch))


def test_nothing_is_said_without_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {version: not_installed(kernels) for version, kernels in BY_VERSION.items()}
    assert use_flash_kernels(model(), config(), on_ranks(monkeypatch, none)) is None
    on_cpu = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    assert use_flash_kernels(model(), config(), on_cpu) is None


def test_torch_has_them() -> None:
    assert {kernels.name for kernels in FLASH_KERNELS} <= {*list_flash_attention_impls()}


def as_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have our attention and torch's flash attention 4 take a CPU's tensors for CUDA's."""
    monkeypatch.setattr("torch.nn.attention._fa4._fa4_common_support_error", lambda *args, **settings: None)
    monkeypatch.setattr("torch.nn.attention._fa4._get_device_major", lambda device: 9)
    monkeypatch.setattr(flash, "has_kernel", lambda query, value: True)
    monkeypatch.setattr(flash, "flash_operator", lambda name: in_cuda(getattr(torch.ops.aten, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    flash._ends.cache_clear()


WIDTHS = {(16, 16): (16, 16), (192, 128): (192, 192), (200, 200): (200, 200), (256, 256): (256, 256)}
ON_BLACKWELL = {**WIDTHS, (192, 128): (256, 256), (200, 200): (256, 256)}
"""Widths of keys and values, and those that the package is given."""


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_packed_samples_through_torch(
    set_capability: SetCapability,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    widths: tuple[int, int],
    window: int,
    has_sinks: bool,
) -> None:
    """From our attention by torch's operators to a stand-in with the package's signature, which takes no other widths
    than the package: against our own attention without a kernel."""

    def run() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(70, heads, width, generator=generator)
            for heads, width in zip((6, 2, 2), (widths[0], *widths), strict=True)
        ]
        inputs = [x.requires_grad_() for x in drawn]
        sinks = [torch.randn(6, generator=generator).requires_grad_()] if has_sinks else []
        query, key, value = inputs
        out = flash_attention(query, key, value, (1, 50, 19), None, window, *sinks)
        grad = torch.randn(out.shape, generator=generator)
        return [out.detach(), *torch.autograd.grad(out, [*inputs, *sinks], grad)]

    is_refused = capability[0] == 10 and window > 0 and max(widths) > 128
    expected = run()
    install(4)
    assert use_flash_kernels(model(), config(), on_ranks(monkeypatch)) is not None
    as_of_cuda(monkeypatch)
    set_capability(capability)
    package = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(package, "MAJOR", capability[0])
    if is_refused:
        with pytest.raises(ExpertMeshError, match=r"heads of .* with windows.*uninstall flash-attn-4"):
            run()
        return
    found = run()
    flash._ends.cache_clear()
    given = (ON_BLACKWELL if capability[0] == 10 else WIDTHS)[widths]
    assert package.given == [(of, given, window > 0) for of in ("fwd", "bwd")]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("width", [16, 200])
def test_rows_through_torch(
    set_capability: SetCapability, install: Install, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """sdpa's operators, which give the package the place of the output."""
    install(4)
    assert use_flash_kernels(model(), config(), on_ranks(monkeypatch)) is not None
    as_of_cuda(monkeypatch)
    set_capability((10, 0))
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "MAJOR", 10)
    query, key, value = inputs = [torch.randn(2, 3, 20, width, requires_grad=True) for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    grad = torch.randn_like(expected)
    given = [x.detach() for x in inputs]
    out, lse, *_, seed, offset, _ = in_cuda(torch.ops.aten._scaled_dot_product_flash_attention)(
        *given, 0.0, True, False
    )
    gradients = in_cuda(torch.ops.aten._scaled_dot_product_flash_attention_backward)(
        grad, *given, out, lse, None, None, 20, 20, 0.0, True, seed, offset
    )
    assert relative_error(out, expected.detach()) <= 1e-5
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert relative_error(ours, theirs) <= 1e-5
