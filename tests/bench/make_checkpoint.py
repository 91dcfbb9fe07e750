#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes checkpoints of any size without torch: random bytes, or holes that cost no disk.

    make_checkpoint.py hf DIR   [--tensors N] [--bytes B] [--sparse]
    make_checkpoint.py dcp DIR  [--tensors N] [--bytes B] [--sparse] [--ranks R] [--row-bytes W]

N float32 tensors of B bytes each. hf: one model.safetensors. dcp: as torch writes it, one
.distcp a rank; each tensor is cut by rows, or with --row-bytes by columns so that every
rank holds rows of W bytes.
"""
import argparse
import json
import os
import pickle
import struct
import zlib

import make_metadata as torch_like

CHUNK = 16 << 20


def random_data(f, size, sparse):
    """Writes size bytes at the file's end and returns their CRC-32 (of holes: 0, nobody asks)."""
    if sparse:
        f.seek(size, os.SEEK_CUR)
        return 0
    crc = 0
    while size:
        part = os.urandom(min(size, CHUNK))
        f.write(part)
        crc = zlib.crc32(part, crc)
        size -= len(part)
    return crc


def write_hf(folder, tensors, size, sparse):
    shape = [size // 4096, 1024]
    header = {f"model.layers.{i}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(tensors)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        random_data(f, tensors * size, sparse)
        f.truncate(8 + len(text) + tensors * size)


def pickled_tensor(shape):
    """data.pkl of a float32 tensor: protocol 2, as torch.save writes it, without a memo."""
    def integer(v):
        return b"\x8a\x08" + struct.pack("<q", v) if v >= 1 << 31 else b"J" + struct.pack("<i", v)

    def string(s):
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    storage = b"(" + string("storage") + b"ctorch\nFloatStorage\n" + string("0") + string("cpu") + integer(shape[0] * shape[1]) + b"tQ"
    return (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(0) + b"(" + integer(shape[0]) + integer(shape[1]) + b"t(" +
            integer(shape[1]) + integer(1) + b"t\x89ccollections\nOrderedDict\n)RtR.")


def write_blob(f, shape, sparse):
    """A stored zip as torch.save makes it: data 64-byte aligned within, sizes in both headers."""
    start, size, central = f.tell(), 4 * shape[0] * shape[1], b""
    small = [("data.pkl", pickled_tensor(shape)), ("byteorder", b"little"), ("version", b"3\n"), ("data/0", None)]
    for name, data in small:
        name, at, length = ("archive/" + name).encode(), f.tell() - start, size if data is None else len(data)
        padding = -(at + 30 + len(name) + 4) % 64
        extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        f.write(b"\0" * 30 + name + extra)
        crc = random_data(f, size, sparse) if data is None else zlib.crc32(data)
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


def boxes(shape, ranks, row_bytes):
    """[(offsets, sizes)] a rank."""
    if row_bytes:
        columns = row_bytes // 4
        return [((0, r * columns), (shape[0], columns)) for r in range(ranks)]
    rows = -(-shape[0] // ranks)
    return [((min(r * rows, shape[0]), 0), (max(0, min(rows, shape[0] - r * rows)), shape[1])) for r in range(ranks)]


def write_dcp(folder, tensors, size, sparse, ranks, row_bytes):
    columns = ranks * row_bytes // 4 if row_bytes else 1024
    shape = (size // (4 * columns), columns)
    files = [f"__{r}_0.distcp" for r in range(ranks)]
    keys = [f"model.layers.{i}.weight" for i in range(tensors)]
    meta, storage = {}, {}
    cut = boxes(shape, ranks, row_bytes)
    for rank, name in enumerate(files):
        with open(os.path.join(folder, name), "wb") as f:
            for key in keys:
                at, length = write_blob(f, cut[rank][1], sparse)
                index = torch_like.make(torch_like.Index, fqn=key, index=rank, offset=torch_like.Size(cut[rank][0]))
                storage[index] = torch_like.make(torch_like.StorageInfo, relative_path=name, offset=at, length=length)
    for key in keys:
        properties = torch_like.Properties()
        properties.state = (torch_like.float32, torch_like.layout(), False, torch_like.MemFormat(0), False)
        chunks = [torch_like.make(torch_like.Chunk, offsets=torch_like.Size(o), sizes=torch_like.Size(s)) for o, s in cut]
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
    p.add_argument("--row-bytes", type=int, default=0)
    a = p.parse_args()
    os.makedirs(a.dir, exist_ok=True)
    if a.format == "hf":
        write_hf(a.dir, a.tensors, a.bytes, a.sparse)
    else:
        write_dcp(a.dir, a.tensors, a.bytes, a.sparse, a.ranks, a.row_bytes)


if __name__ == "__main__":
    main()
