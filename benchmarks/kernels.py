"""What Triton makes of every kernel for GPUs that need not be there: `python -m benchmarks.kernels`.

Our wrappers, and MegaBlocks' and stk's, are called as a training step calls them (`benchmarks.kernel_calls`), each
launch is caught with its types, alignments and constants, and what would have been launched is compiled for compute
capability 8.0, 9.0 and 10.0 (A100, H100, B200), but for what never runs on the first, by the assembler that triton
brings. The table is read from the machine
code: registers per thread, spills (instructions that move registers to or from memory), shared memory against what a
block may use of the card's, bits of global memory that a thread reads and writes at once, tensor-core instructions, and
the size of the binary. Nothing runs. The exit code is 1 where a kernel spills, does not fit, multiplies without tensor
cores, or moves less than 128 bits at once and nobody has said why.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.commands import command, parser_of, print_rows, write_json
from benchmarks.kernel_calls import EXAMPLES, Example

KIB = 1024
SHARED_LIMITS = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""Bytes of shared memory that a block may have, by compute capability times ten."""


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel, with which a launch would have begun."""

    kernel: Any
    example: Example
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A launch compiled for one architecture."""

    kernel: str
    module: str
    example: str
    variant: str
    """Its constants and warps."""
    capability: int
    registers: int
    spills: int
    shared: int
    """Bytes a block."""
    loads: dict[int, int]
    """How many instructions read so many bits a thread."""
    stores: dict[int, int]
    narrow: dict[str, str]
    """Pointers by which fewer than 128 bits are read or written, and the example's reason."""
    multiplies: bool
    """Whether it has products of matrices."""
    tensor_core: dict[str, int]
    """How many instructions of each kind."""
    size: int
    """Bytes of the binary."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser_of(__doc__, json=None).parse_args(argv)
    # the interpreter takes the place of compilable kernels as their modules are imported
    os.environ.pop("TRITON_INTERPRET", None)
    launches = [launch for example in EXAMPLES for launch in launches_of(example)]
    jobs = [
        (launch, capability)
        for launch in launches
        for capability in SHARED_LIMITS
        if capability >= launch.example.since
    ]
    with tempfile.TemporaryDirectory() as cache_dir, ThreadPoolExecutor(os.cpu_count()) as pool:
        # what Triton has kept of an earlier run may have the lines of an earlier source
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        rows = list(pool.map(lambda job: compiled(*job), jobs))
    print_table(rows)
    write_json(arguments.json, [asdict(row) for row in rows])
    found = [flaw for row in rows for flaw in flaws(row)]
    for flaw in found:
        print(flaw, file=sys.stderr)
    return 1 if found else 0


def flaws(row: Row) -> list[str]:
    """What a kernel ought not to do, a line each."""
    found = []
    if row.spills:
        found.append(f"has {row.spills} instructions that spill registers")
    if row.shared > SHARED_LIMITS[row.capability]:
        found.append(f"takes {row.shared} bytes of shared memory per block, of {SHARED_LIMITS[row.capability]}")
    unexplained = ", ".join(name for name, reason in row.narrow.items() if not reason)
    if unexplained:
        found.append(f"moves less than 128 bits per thread at {unexplained}, for which its example has no reason")
    if not row.narrow and any(bits < 128 for bits in (*row.loads, *row.stores)):
        found.append("moves less than 128 bits per thread where its source moves 128")
    if row.multiplies and not row.tensor_core:
        found.append("multiplies matrices without tensor cores")
    return [f"{row.module}.{row.kernel} ({row.variant}) for sm_{row.capability} {flaw}" for flaw in found]


def launches_of(example: Example) -> list[Launch]:
    """What an example would launch, each specialisation once, and of autotuned kernels each configuration."""
    launches: dict[str, Launch] = {}

    def catch(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
        options = {name: compile[name] for name in names}
        (attributes,) = compile["configs"]
        launch = Launch(fn.jit_function, example, compile["signature"], compile["constants"], attributes, options)
        launches.setdefault(f"{fn.module}.{fn.name} {compile['key']}", launch)
        # handled: neither compiled nor launched
        return True

    with _without_device(catch):
        example.call(example.dtype)
    return list(launches.values())


@contextmanager
def _without_device(hook: Callable[..., bool]) -> Iterator[None]:
    """Triton without a driver, which shows `hook` each launch before it would compile it."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import Autotuner, driver

    def run_each(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    stand_in = mock.Mock()
    # the target decides nothing that is kept of a launch
    stand_in.get_current_target.return_value = GPUTarget("cuda", max(SHARED_LIMITS), 32)
    with mock.patch.object(Autotuner, "run", run_each), mock.patch.object(knobs.runtime, "jit_cache_hook", hook):
        driver.set_active(stand_in)
        yield


def compiled(launch: Launch, capability: int) -> Row:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        # where control may flow is of no interest, and takes a quarter of the time
        code = _tool("nvdisasm", "--no-dataflow", "--print-code", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    variant = {p.name: launch.constants[(p.num,)] for p in launch.kernel.params if p.is_constexpr}
    variant["warps"] = launch.options["num_warps"]
    narrow = [name for name, bits in by_pointer(made.asm["llir"]).items() if bits < 128]
    return Row(
        kernel=launch.kernel.__name__,
        module=launch.kernel.__module__,
        example=launch.example.title,
        variant=" ".join(f"{name}={value}" for name, value in variant.items()),
        capability=capability,
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=made.metadata.shared,
        loads=by_width(code, "LDG"),
        stores=by_width(code, "STG"),
        narrow={name: launch.example.narrow.get(name, "") for name in sorted(narrow)},
        multiplies="tt.dot" in made.asm["ttir"],
        tensor_core=dict(Counter(re.findall(r"\b[A-Z]+MMA\b", code))),
        size=len(made.asm["cubin"]),
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def by_width(code: str, instruction: str) -> dict[int, int]:
    """How many instructions move so many bits a thread.

    Args:
        code: disassembled.
        instruction: LDG, which stands for copies to shared memory (LDGSTS) too, or STG.
    """
    found: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{instruction}(?:STS)?\.([\w.]+)", code):
        parts = modifiers.split(".")
        wide = [int(part) for part in parts if part in ("64", "128", "256")]
        small = [int(part[1:]) for part in parts if part in ("U8", "S8", "U16", "S16")]
        found[(wide + small + [32])[0]] += 1
    return dict(sorted(found.items(), reverse=True))


def by_pointer(llir: str) -> dict[str, int]:
    """Bits a thread moves at once, at least, by the name of the pointer in `tl.load(NAME ...` or `tl.store(NAME ...` of
    a kernel's source. Of LLVM's form of it, whose moves have these widths already and still know their lines: to the
    assembler, each line of those that are several of its own is one further down."""
    found: dict[str, int] = {}
    for moved in re.finditer(r'asm sideeffect "([^"]*(?:ld\.global|st\.global|cp\.async\.c)[^"]*)".*!dbg !(\d+)', llir):
        if copied := re.search(r"cp\.async\.\w+\.shared\.global.*?, 0x(\w+)", moved[1]):
            bits = 8 * int(copied[1], 16)
        else:
            vector = re.search(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[a-z](\d+)", moved[1])
            assert vector is not None, moved[1]
            bits = int(vector[1] or 1) * int(vector[2])
        name = _pointer(llir, moved[2])
        found[name] = min(bits, found.get(name, bits))
    return found


def _pointer(llir: str, location: str) -> str:
    """The name of the pointer in the call that a location in LLVM's form stands for."""
    place = re.search(rf"^!{location} = !DILocation\(line: (\d+), column: (\d+), scope: !(\d+)", llir, re.MULTILINE)
    assert place is not None, location
    scope = re.search(rf"^!{place[3]} = .*file: !(\d+)", llir, re.MULTILINE)
    assert scope is not None, place[0]
    file = re.search(rf'^!{scope[1]} = !DIFile\(filename: "([^"]+)", directory: "([^"]*)"', llir, re.MULTILINE)
    assert file is not None, scope[0]
    source = Path(file[2], file[1]).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)[int(place[1]) - 1 :]
    calls = list(re.finditer(r"tl\.(?:load|store|atomic\w+)\(\W*(\w+)", "".join(lines)))
    assert calls, (file[1], place[0], lines[0])
    # the column is where the call begins; with Triton 3.6 where its parenthesis does, or that of a call around it
    *_, call = [call for call in calls if call.start() < int(place[2])] or calls[:1]
    return call[1].removesuffix("_ptr")


def print_table(rows: list[Row]) -> None:
    print_rows(
        [
            {
                "kernel": f"{row.kernel} {row.variant}",
                "example": row.example,
                "sm": row.capability,
                "registers": row.registers,
                "spills": row.spills,
                "shared KiB": f"{row.shared / KIB:.1f} of {SHARED_LIMITS[row.capability] // KIB}",
                "reads": ", ".join(f"{count} x {bits}" for bits, count in row.loads.items()),
                "writes": ", ".join(f"{count} x {bits}" for bits, count in row.stores.items()),
                "narrow": ", ".join(row.narrow),
                "tensor cores": ", ".join(f"{count} {name}" for name, count in row.tensor_core.items()),
                "KiB": f"{row.size / KIB:.0f}",
            }
            for row in rows
        ],
        text=["example", "narrow"],
    )
    for name, reason in sorted({(name, reason) for row in rows for name, reason in row.narrow.items()}):
        print(f"{name}: {reason or 'no reason known'}")


if __name__ == "__main__":
    sys.exit(main())
