# SPDX-License-Identifier: MIT
"""A second reader of binary plans (gpu/plan_wire.h), byte by byte and slow."""
import itertools
import os
import struct

SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "C128": 16, "F32": 4, "I32": 4, "U32": 4, "C32": 4, "F16": 2, "BF16": 2,
         "I16": 2, "U16": 2}
SWAP, CONJ, NEG = 1, 2, 4


class Plan:
    def __init__(self, data):
        magic, length, flags, self.bytes, dtype, stored, nd, pnd, sources, pieces, key = struct.unpack_from("<8s3Q16s16sIIQQQ", data)
        assert (magic, length) == (b"UFSPLAN1", len(data)) and flags in (0, 1)
        self.through, self.dtype, self.stored = bool(flags), dtype.rstrip(b"\0").decode(), stored.rstrip(b"\0").decode()
        self.shape = list(struct.unpack_from(f"<{nd}Q", data, 96))
        at = 96 + 8 * nd
        self.key, at = data[at:at + key].decode(), at + (key + 7) // 8 * 8
        self.sources, self.pieces = [], []
        for _ in range(sources):
            size, mtime, n = struct.unpack_from("<QqQ", data, at)
            self.sources.append((data[at + 24:at + 24 + n].decode(), size, mtime))
            at += 24 + (n + 7) // 8 * 8
        for _ in range(pieces):
            source, kind, work, zero, base, value = struct.unpack_from("<IBBHQ16s", data, at)
            assert kind in (0, 1) and zero == 0
            rows = struct.unpack_from(f"<{2 * pnd}Q{pnd}q", data, at + 32)
            self.pieces.append((source, kind, work, base, value, rows[:pnd], rows[pnd:2 * pnd], rows[2 * pnd:]))
            at += 32 + 24 * pnd
        assert at == len(data), (at, len(data))

    def units(self):
        """Bytes of a storage unit, and the shape in them."""
        unit = SIZES.get(self.stored, 1)
        if not self.pieces:
            return unit, self.shape
        dims = [max(p[5][k] + p[6][k] for p in self.pieces) for k in range(len(self.pieces[0][5]))]
        return unit, dims

    def assemble(self):
        """The tensor's bytes; every one of them must be written once."""
        unit, dims = self.units()
        total = unit
        for d in dims:
            total *= d
        out, seen, files = bytearray(total), bytearray(total), {}
        for path, size, mtime in self.sources:
            st = os.stat(path)
            assert (st.st_size, st.st_mtime_ns) == (size, mtime), path
            with open(path, "rb") as f:
                files[path] = f.read()
        for source, kind, work, base, value, start, count, step in self.pieces:
            data = files[self.sources[source][0]]
            for index in itertools.product(*(range(n) for n in count)):
                at = base + sum(i * s for i, s in zip(index, step))
                element = value[:unit] if kind else data[at:at + unit]
                to = 0
                for k, d in enumerate(dims):
                    to = to * d + start[k] + index[k]
                out[to * unit:(to + 1) * unit] = worked(element, work, self.stored)
                for b in range(to * unit, (to + 1) * unit):
                    seen[b] += 1
        assert seen == b"\1" * total, "not every byte is written once"
        return bytes(out)


def worked(element, work, dtype):
    """Swapped, conjugated, negated, in this order; components of complex types by themselves."""
    complex_ = dtype in ("C32", "C64", "C128")
    n = len(element) // (2 if complex_ else 1)
    parts = [element[i:i + n] for i in range(0, len(element), n)]
    if work & SWAP:
        parts = [p[::-1] for p in parts]
    if work & CONJ:
        parts[1] = flip(parts[1])
    if work & NEG:
        parts = [flip(p) for p in parts]
    return b"".join(parts)


def flip(number):
    return number[:-1] + bytes([number[-1] ^ 0x80])
