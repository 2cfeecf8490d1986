"""What Triton needs at run time: a C compiler and Python's headers, for the code that starts its kernels."""

import os
import subprocess
import sysconfig
from importlib.util import find_spec

from ..util.errors import ExpertMeshError

_NAME = "expertmesh_probe"
_PROBE = f"""
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{_NAME}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{_NAME}(void) {{ return PyModule_Create(&module); }}
"""


def check_c_compiler(device_type: str) -> None:
    """Compile a few lines as Triton will: it does so when a kernel first runs, which is after the weights were loaded.

    What Triton has compiled it keeps in its cache, this too.

    Args:
        device_type: what the run computes on. On a CPU no Triton kernel runs.

    Raises:
        ExpertMeshError: Triton is installed, and cannot compile.
    """
    if device_type != "cuda" or find_spec("triton") is None:
        return
    from triton.runtime.build import compile_module_from_src

    try:
        compile_module_from_src(_PROBE, _NAME)
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        if not _runs_from_cache():
            raise ExpertMeshError(_what_is_missing(error)) from error


def _runs_from_cache() -> bool:
    """Whether Triton finds what it compiles first, its access to the driver, in its cache, from an earlier run."""
    from triton.runtime import driver

    try:
        return driver.active is not None and driver.active.get_current_target() is not None
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError):
        return False


def _what_is_missing(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        include = sysconfig.get_paths()["include"]
        return (
            f"Triton's kernels need a C compiler and Python's headers at run time. {error.cmd[0]} "
            "could not compile a file that includes Python.h (see its message above). Python.h "
            f"belongs in {include}: install python3-dev (python3-devel on Red Hat)"
        )
    named = os.environ.get("CC")
    found = f"CC is {named}" if named else "CC is not set, and neither gcc nor clang is in PATH"
    return (
        f"Triton's kernels need a C compiler at run time, and Triton cannot use one ({found}): {error}; install gcc, "
        "or set CC to a compiler"
    )
