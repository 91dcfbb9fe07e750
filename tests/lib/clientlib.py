# SPDX-License-Identifier: MIT
"""What the tests of python/unshard share; they need neither numpy nor torch."""
import ctypes
import itertools
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "cli"), os.path.join(HERE, "..", "mount"), os.path.join(HERE, "..", "remote"),
                os.path.join(HERE, "..", "..", "python")]
DATA = os.environ.get("TEST_DATA", os.path.join(HERE, "..", "data"))
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "C128": 128, "F32": 32, "I32": 32, "U32": 32, "C32": 32, "F16": 16,
        "BF16": 16, "I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def bits(dtype):
    return BITS.get(dtype, 8)


def expected(source):
    with open(source + ".expected.json", encoding="utf-8") as f:
        return json.load(f)["tensors"]


def data_of(array):
    """The bytes of an unshard.Array on the host."""
    return ctypes.string_at(array.address, array.nbytes)


def cut(data, unit, shape, start, count):
    """A box of row-major elements, slowly."""
    out = []
    for index in itertools.product(*(range(s, s + n) for s, n in zip(start, count))):
        at = 0
        for i, n in zip(index, shape):
            at = at * n + i
        out.append(data[at * unit:(at + 1) * unit])
    return b"".join(out)
