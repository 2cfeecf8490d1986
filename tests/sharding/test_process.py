"""malloc, as `settle_malloc` leaves it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import torch
from sharding import settle_malloc

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2

if sys.argv[1] == "settled":
    settle_malloc()
# by default its being freed raises the size from which blocks get pages of their own
del_me = torch.empty(30 * 2**20, dtype=torch.uint8)
del del_me
before = mallinfo2().hblks
large, small = torch.empty(20 * 2**20, dtype=torch.uint8), torch.empty(10 * 2**20, dtype=torch.uint8)
print(mallinfo2().hblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
@pytest.mark.parametrize(("how", "own_pages"), [("settled", 1), ("as it is", 0)])
def test_large_tensors_get_pages_of_their_own(how: str, own_pages: int) -> None:
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) == own_pages
