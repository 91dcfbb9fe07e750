#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes checkpoints of any size without torch: random numbers, or holes that cost no disk.

    make_checkpoint.py hf DIR   [--tensors N] [--bytes B] [--sparse]
    make_checkpoint.py dcp DIR  [--tensors N] [--bytes B] [--sparse] [--ranks R] [--row-bytes W | --mesh AxB | --flat N]

N float32 tensors of B bytes each. hf: one model.safetensors. dcp: as torch writes it, one
.distcp a rank; each tensor is cut by rows, or with --row-bytes by columns so that every
rank holds rows of W bytes, or with --mesh to boxes in A rows and B columns, a rank each, or
with --flat to N uneven ranges of one dimension, by turns to the ranks. --piece: the bytes of
a write; what is written in small ones lies in small pages of the page cache.
"""
import argparse
import json
import math
import os
import pickle
import struct
import zlib

import make_metadata as torch_like

CHUNK = 16 << 20
EXPONENTS = bytes(b & 0x80 | 0x3d for b in range(256))  # of float32 numbers of 1/32 to 1/8, as weights are


def random_data(f, size, sparse, piece):
    """Writes size bytes at the file's end and returns their CRC-32 (of holes: 0, nobody asks)."""
    if sparse:
        f.seek(size, os.SEEK_CUR)
        return 0
    crc = 0
    while size:
        data = bytearray(os.urandom(min(size, CHUNK)))
        data[3::4] = data[3::4].translate(EXPONENTS)
        crc = zlib.crc32(data, crc)
        for i in range(0, len(data), piece):
            f.write(memoryview(data)[i:i + piece])
            if piece < CHUNK:
                f.flush()
        size -= len(data)
    return crc


def write_hf(folder, tensors, size, sparse, piece):
    shape = [size // 4096, 1024]
    header = {f"model.layers.{i}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(tensors)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        random_data(f, tensors * size, sparse, piece)
        f.truncate(8 + len(text) + tensors * size)


def pickled_tensor(shape):
    """data.pkl of a float32 tensor: protocol 2, as torch.save writes it, without a memo."""
    def integer(v):
        return b"\x8a\x08" + struct.pack("<q", v) if v >= 1 << 31 else b"J" + struct.pack("<i", v)

    def string(s):
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    def integers(values):
        return b"(" + b"".join(map(integer, values)) + b"t"

    strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    storage = b"(" + string("storage") + b"ctorch\nFloatStorage\n" + string("0") + string("cpu") + integer(math.prod(shape)) + b"tQ"
    return (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(0) + integers(shape) + integers(strides) +
            b"\x89ccollections\nOrderedDict\n)RtR.")


def write_blob(f, shape, sparse, piece):
    """A stored zip as torch.save makes it: data 64-byte aligned within, sizes in both headers."""
    start, size, central = f.tell(), 4 * math.prod(shape), b""
    small = [("data.pkl", pickled_tensor(shape)), ("byteorder", b"little"), ("version", b"3\n"), ("data/0", None)]
    for name, data in small:
        name, at, length = ("archive/" + name).encode(), f.tell() - start, size if data is None else len(data)
        padding = -(at + 30 + len(name) + 4) % 64
        extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        f.write(b"\0" * 30 + name + extra)
        crc = random_data(f, size, sparse, piece) if data is None else zlib.crc32(data)
        f.write(data or b"")
        end = f.tell()
        fields = struct.pack("<HHHHHIIIH", 0, 0, 0, 0, 0, crc, length, length, len(name))
        f.seek(start + at)
        f.write(b"PK\3\4" + fields + struct.pack("<H", len(extra)))
        f.seek(end)
        central += b"PK\1\2\0\0" + fields + struct.pack("<HHHHII", 0, 0, 0, 0, 0, at) + name
    directory = f.tell() - start
    f.write(central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(small), len(small), len(central), directory, 0))
    return start, f.tell() - start


def evenly(length, parts):
    """[(offset, size)] as torch cuts a dimension: the last parts are shorter, or empty."""
    each = -(-length // parts)
    return [(min(i * each, length), max(0, min(each, length - i * each))) for i in range(parts)]


def unevenly(length, parts):
    """[(offset, size)] of ranges whose lengths differ and whose borders are not round."""
    borders = [0, *(length * i // parts + (i * 7919 % 13 if length // parts > 26 else 0) for i in range(1, parts)), length]
    return [(a, b - a) for a, b in zip(borders, borders[1:])]


def cut(size, a):
    """(shape, [(offsets, sizes)]) of a tensor of size bytes; boxes go to the ranks by turns."""
    if a.flat:
        return (size // 4,), [((o,), (n,)) for o, n in unevenly(size // 4, a.flat)]
    columns = a.ranks * a.row_bytes // 4 if a.row_bytes else 1024
    shape = (size // (4 * columns), columns)
    rows, across = (1, a.ranks) if a.row_bytes else map(int, a.mesh.split("x")) if a.mesh else (a.ranks, 1)
    return shape, [((o, p), (n, m)) for o, n in evenly(shape[0], rows) for p, m in evenly(columns, across)]


def write_dcp(folder, a):
    shape, boxes = cut(a.bytes, a)
    files = [f"__{r}_0.distcp" for r in range(a.ranks)]
    keys = [f"model.layers.{i}.weight" for i in range(a.tensors)]
    meta, storage = {}, {}
    for rank, name in enumerate(files):
        with open(os.path.join(folder, name), "wb") as f:
            for key in keys:
                for i in range(rank, len(boxes), a.ranks):
                    at, length = write_blob(f, boxes[i][1], a.sparse, a.piece)
                    index = torch_like.make(torch_like.Index, fqn=key, index=i, offset=torch_like.Size(boxes[i][0]))
                    storage[index] = torch_like.make(torch_like.StorageInfo, relative_path=name, offset=at, length=length)
    for key in keys:
        properties = torch_like.Properties()
        properties.state = (torch_like.float32, torch_like.layout(), False, torch_like.MemFormat(0), False)
        chunks = [torch_like.make(torch_like.Chunk, offsets=torch_like.Size(o), sizes=torch_like.Size(s)) for o, s in boxes]
        meta[key] = torch_like.make(torch_like.TensorStorage, properties=properties, size=torch_like.Size(shape), chunks=chunks)
    whole = torch_like.make(torch_like.Metadata, state_dict_metadata=meta, planner_data={k: tuple(k.split(".")) for k in keys}, storage_data=storage,
                            version="1.0.0", storage_meta=torch_like.make(torch_like.StorageMeta, checkpoint_id="/c", save_id="1", load_id=None, modules=[]))
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(whole, f, protocol=4)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("format", choices=["hf", "dcp"])
    p.add_argument("dir")
    p.add_argument("--tensors", type=int, default=4)
    p.add_argument("--bytes", type=int, default=64 << 20)
    p.add_argument("--sparse", action="store_true")
    p.add_argument("--ranks", type=int, default=4)
    way = p.add_mutually_exclusive_group()
    way.add_argument("--row-bytes", type=int, default=0)
    way.add_argument("--mesh", metavar="AxB", help="A times B is the number of ranks")
    way.add_argument("--flat", type=int, default=0, metavar="N")
    p.add_argument("--piece", type=int, default=CHUNK)
    a = p.parse_args()
    os.makedirs(a.dir, exist_ok=True)
    if a.format == "hf":
        write_hf(a.dir, a.tensors, a.bytes, a.sparse, a.piece)
    else:
        write_dcp(a.dir, a)


if __name__ == "__main__":
    main()
