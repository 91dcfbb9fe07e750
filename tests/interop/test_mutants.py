# SPDX-License-Identifier: MIT
"""Files that are damaged or strangely made: what is served is what the framework's own loader gives, or an error.

Each mutant comes of a number, which a failure names. $MUTANTS makes as many times more of them.
"""
import io
import json
import os
import pathlib
import pickle
import pickletools
import random
import shutil
import struct
import tempfile
import unittest
import zipfile

import numpy as np
import safetensors
import tensorstore
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import truth
from test_client import ROOT, client

TIMES = int(os.environ.get("MUTANTS", "1"))
INTS = ("BININT", "BININT1", "BININT2", "LONG1")
SIZES = {"F32": 4, "F64": 8, "BF16": 2, "I64": 8, "U8": 1, "I16": 2, "F8_E4M3": 1}


def served(path):
    """{key: (dtype, shape, bytes)} of what can be read of a checkpoint."""
    out = {}
    try:
        with client().open(path, index_memory=True) as c:
            for key in c.keys():
                try:
                    out[key] = c.info(key).dtype, c.info(key).shape, truth.raw(c.load(key, to="torch"))
                except OSError:
                    pass
    except OSError:
        pass
    return out


def told(t):
    return truth.DTYPES[t.dtype], tuple(t.shape), truth.raw(t)


# ---- pickles ----

def state(rng):
    """Tensors, some of which share a storage: slices, transposed and repeated ones, conjugated and negated views."""
    out, bases = {}, []
    for i in range(rng.randint(2, 5)):
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8, torch.bool])
        bases.append(truth.values((rng.choice([1, 6, 12, 24]),), dtype, rng.randrange(1000)))
        base = rng.choice(bases)
        last = base.numel() - 1
        step, count = rng.choice([0, 1, 2, 3]), rng.choice([0, 1, 2, 3])
        offset = rng.randint(0, max(0, last - step * count))
        t = torch.as_strided(base, (count, 1), (step, 7), offset) if offset + step * max(count - 1, 0) <= last else base
        if t.is_complex():
            t = rng.choice([t, t.conj()])
        elif t.is_floating_point():
            t = rng.choice([t, torch._neg_view(t)])
        out[rng.choice([f"w{i}", f"a.{i}", i, (i, "b")])] = rng.choice([t, t.t() if t.dim() == 2 else t, [t], {"in": t}])
    return out


def flat(value, at=()):
    """By path; of two tensors whose paths are spelt the same the first."""
    if isinstance(value, torch.Tensor):
        return {".".join(at): told(value)}
    out = {}
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for path, t in flat(inner, (*at, str(key))).items():
                out.setdefault(path, t)
    return out


def as_int(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def damaged_pickle(rng, data):
    """One opcode or two are changed, lost, doubled or moved; numbers become their neighbours and each other."""
    ops = list(pickletools.genops(data))
    ends = [pos for _, _, pos in ops[1:]] + [ops[-1][2] + 1]
    text = [data[pos:end] for (_, _, pos), end in zip(ops, ends)]
    ints = [i for i, (op, _, _) in enumerate(ops) if op.name in INTS]
    gets = [i for i, (op, _, _) in enumerate(ops) if op.name == "BINGET"]
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        kind, i = rng.choice(["int", "int", "int", "swap", "get", "lost", "twice"]), rng.randrange(1, len(ops) - 1)
        if kind == "int":
            i = rng.choice(ints)
            text[i] = as_int(rng.choice([ops[i][1] + rng.choice([-1, 1]), ops[rng.choice(ints)][1], 1000, 2**63]))
        elif kind == "swap":
            i, j = rng.choice(ints), rng.choice(ints)
            text[i], text[j] = text[j], text[i]
        elif kind == "get" and gets:
            text[rng.choice(gets)] = text[rng.choice(gets)]
        elif kind == "lost":
            text[i] = b""
        elif kind == "twice":
            text[i] *= 2
    return b"".join(text)


def pickled(rng, path):
    b = io.BytesIO()
    legacy = rng.random() < .4
    torch.save(state(rng), b, _use_new_zipfile_serialization=not legacy)
    data = b.getvalue()
    if legacy:
        b.seek(0)
        starts = []
        for _ in range(5):
            starts.append(b.tell())
            for _ in pickletools.genops(b):
                pass
        data = data[:starts[3]] + damaged_pickle(rng, data[starts[3]:starts[4]]) + data[starts[4]:]
    else:
        with zipfile.ZipFile(b) as z:
            members = [(n, z.read(n)) for n in z.namelist()]
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as z:
            for name, member in members:
                z.writestr(zipfile.ZipInfo(name), damaged_pickle(rng, member) if name.endswith("/data.pkl") else member)
        data = out.getvalue()
    path.write_bytes(data)


# ---- the header of a safetensors file ----

def header(rng, path):
    """Entries in any order with holes and overlaps, numbers in every spelling, names twice and escaped."""
    def number(v):
        return str(v) if rng.random() > .02 else rng.choice([f"{v}.0", f"{v}e0", f"-{v}", str(v + 1), str(2**64 + v), f'"{v}"', "null"])

    entries, data = [], b""
    for i in range(rng.randint(0, 4)):
        dtype, shape = rng.choice(list(SIZES)), [rng.choice([0, 1, 2, 3]) for _ in range(rng.randint(0, 3))]
        size = SIZES[dtype] * int(np.prod(shape))
        begin = len(data) + rng.choice([0] * 30 + [-1, 1])
        name = rng.choice([f"w{i}"] * 20 + ["w0", "a/b", "\\u0061", "\\ud83d\\ude00", "\\ud800"])
        shape = ",".join(map(number, shape))
        entries.append(f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{number(begin)},{number(begin + size)}]}}')
        data += rng.randbytes(size)
    entries += rng.choice([[], [], [], ['"__metadata__":{"format":"pt"}'], ['"__metadata__":{"a":1}'], ['"__metadata__":null']])
    rng.shuffle(entries)
    text = rng.choice(["{", " {\n"]) + rng.choice([",", " ,\t"]).join(entries) + rng.choice(["}", "}", "}", "}  ", "}  ", ",}", "}\0"])
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data + rng.choice([b""] * 9 + [b"\0"]))


# ---- zarr ----

def array(rng, path):
    """An array of version 2 or 3 of which chunks lack, with a fill value in any spelling and one number that may be another."""
    shape, chunk, three = [rng.randint(1, 5), rng.randint(1, 4)], [rng.randint(1, 3), rng.randint(1, 3)], rng.random() < .5
    kind = rng.choice(["float32", "float64", "float16", "int16", "uint8"])
    fill = rng.choice(["0", "-0", "-0.0", "1.5", "-7", "300", "0.1", "1e3", '"NaN"', '"-Infinity"', "65520", '"0x7e01"', "16777217"])
    big = rng.random() < .3
    for i in range(-(-shape[0] // chunk[0])):
        for j in range(-(-shape[1] // chunk[1])):
            if rng.random() < .7:
                (path / f"{i}.{j}").write_bytes(rng.randbytes(chunk[0] * chunk[1] * np.dtype(kind).itemsize))
    if rng.random() < .2:
        chunk[rng.randrange(2)] += 1
    if rng.random() < .2:
        shape[rng.randrange(2)] += 1
    if three:
        meta = {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": kind,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "chunk_key_encoding": {"name": "v2"}, "codecs": [{"name": "bytes", "configuration": {"endian": "big" if big else "little"}}]}
        if rng.random() < .4:
            meta["codecs"].insert(0, {"name": "transpose", "configuration": {"order": rng.choice([[0, 1], [1, 0]])}})
    else:
        meta = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": np.dtype(kind).newbyteorder(">" if big else "<").str,
                "compressor": None, "filters": None, "order": rng.choice("CF")}
    text = json.dumps(meta)
    (path / ("zarr.json" if three else ".zarray")).write_text(f'{text[:-1]}, "fill_value": {fill}}}', encoding="utf-8")
    return three


def by_tensorstore(path, three):
    store = tensorstore.open({"driver": "zarr3" if three else "zarr", "kvstore": path.as_uri() + "/"}).result()
    return {path.name: told(torch.from_numpy(np.ascontiguousarray(store.read().result()).astype(store.dtype.numpy_dtype.newbyteorder("="))))}


# ---- .metadata of DCP ----

def metadata(rng, path):
    """A chunk elsewhere in its tensor, of another size, twice, lost, or with another's bytes."""
    source = ROOT / "tests" / "data" / "torch_dcp" / rng.choice(["dcp_fsdp_tp_strided_2x2", "dcp_mesh_2x2", "dcp_sharded_tensor_3r", "dcp_torch231_2r"])
    shutil.copytree(source, path, dirs_exist_ok=True)
    with open(path / ".metadata", "rb") as f:
        meta = pickle.load(f)
    for _ in range(rng.choice([0, 1, 1, 2])):
        key = rng.choice([k for k, v in meta.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata) and v.chunks])
        t, stored = meta.state_dict_metadata[key], meta.storage_data
        kind, i = rng.choice(["shift", "size", "twice", "lost", "swap", "order", "whole"]), rng.randrange(len(t.chunks))
        begin, size = list(t.chunks[i].offsets), list(t.chunks[i].sizes)
        if kind in ("shift", "size") and begin:
            at = MetadataIndex(key, torch.Size(begin))
            changed = begin if kind == "shift" else size
            k = rng.randrange(len(begin))
            changed[k] = max(0, changed[k] + rng.choice([-1, 1]))
            t.chunks[i] = ChunkStorageMetadata(torch.Size(begin), torch.Size(size))
            if at in stored:
                stored[MetadataIndex(key, torch.Size(begin), i)] = stored.pop(at)
        elif kind == "twice":
            t.chunks.append(t.chunks[i])
        elif kind == "lost":
            del t.chunks[i]
        elif kind == "swap":
            a, b = rng.choice(list(stored)), rng.choice(list(stored))
            stored[a], stored[b] = stored[b], stored[a]
        elif kind == "order":
            rng.shuffle(t.chunks)
        elif t.size:
            t.size = torch.Size([t.size[0] + rng.choice([-1, 1]), *t.size[1:]])
    (path / ".metadata").write_bytes(pickle.dumps(meta))


def by_dcp(path):
    """Each tensor for itself, into memory of two kinds: what differs has never been written, what torch refuses is not there."""
    out, reader = {}, dcp.FileSystemReader(path)
    for key, meta in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(meta, TensorStorageMetadata):
            continue
        got = []
        for fill in (0, 1):
            t = torch.full(meta.size, fill, dtype=meta.properties.dtype)
            try:
                dcp.load({key: t}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
            except dcp.api.CheckpointException:
                break
            got.append(told(t))
        if len(got) == 2:
            out[key] = got[0] if got[0] == got[1] else ("not written", got[0][1], b"")
    return out


class Mutants(unittest.TestCase):
    def run_all(self, count, make, load, least):
        """`load` gives {key: (dtype, shape, bytes)}, or raises where the framework refuses. At `least` so many tensors are held against it."""
        same = 0
        for seed in range(count * TIMES):
            with self.subTest(seed=seed), tempfile.TemporaryDirectory() as d:
                path = make(random.Random(seed), pathlib.Path(d))
                got = served(path)
                try:
                    want = load(path)
                except Exception:  # whatever a loader that is fed rubbish comes to  pylint: disable=broad-except
                    continue
                for key, tensor in got.items():
                    if key in want:
                        self.assertEqual(tensor, want[key], key)
                        same += 1
                    elif ":" not in key:  # FILE:PATH and KEY:2 are names of ours; a class as a key is spelt in another way
                        self.assertIn(tensor, want.values(), key)
        self.assertGreater(same, least)

    def test_pickles(self):
        def make(rng, d):
            pickled(rng, d / "x.pt")
            return d / "x.pt"
        self.run_all(400, make, lambda path: flat(torch.load(path, weights_only=True)), 400)

    def test_safetensors_headers(self):
        def make(rng, d):
            header(rng, d / "model.safetensors")
            return d / "model.safetensors"

        def load(path):
            return {k: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for k, v in safetensors.deserialize(path.read_bytes())}
        self.run_all(800, make, load, 300)

    def test_zarr(self):
        three = []

        def make(rng, d):
            (d / "a").mkdir()
            three[:] = [array(rng, d / "a")]
            return d / "a"
        self.run_all(400, make, lambda path: by_tensorstore(path, *three), 120)

    def test_dcp_metadata(self):
        def make(rng, d):
            metadata(rng, d)
            return d
        self.run_all(25, make, by_dcp, 300)
