"""The allocator keeps large chunks: seen in glibc's own statistics, in a process of its own."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

PROBE = """
import ctypes, json, sys
from diloco_common.allocator import MIB, tune_allocator

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split())]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = Mallinfo2

def mapped_by(num_bytes):
    before = libc.mallinfo2().hblks
    chunk = libc.malloc(num_bytes)
    count = libc.mallinfo2().hblks - before
    libc.free(chunk)
    return count

default = mapped_by(24 * MIB)
tuned = tune_allocator()
chunk = mapped_by(24 * MIB)
kept = libc.mallinfo2().fordblks >= 24 * MIB
print(json.dumps([default, tuned, chunk, kept, mapped_by(256 * MIB)]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="libc is not a recent glibc")
def test_chunks_come_from_the_heap_and_stay_there_after_they_are_freed():
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout

    default, tuned, chunk, kept, huge = json.loads(out)
    assert tuned is True
    assert (default, chunk) == (1, 0), "one mapping of its own before, none after"
    assert kept, "freed memory waits for the next chunk"
    assert huge == 1, "tensors larger than the threshold still go back to the kernel"


HOLES = """
import ctypes, json, mmap
from pathlib import Path
from diloco_common.allocator import MIB, trim, tune_allocator

tune_allocator()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
chunks = [bytes(2 * MIB + i) for i in range(40)]
filled = resident()
del chunks[::2]
freed = resident()
trim()
print(json.dumps([filled - freed, freed - resident()]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="libc is not a recent glibc")
def test_holes_between_chunks_are_given_back_when_they_are_said_to_be_of_no_use():
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout
    by_itself, given_back = json.loads(out)
    assert by_itself < 10 * 2**20 < 30 * 2**20 < given_back, "20 of 40 chunks of 2 MiB were freed"
