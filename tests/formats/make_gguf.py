"""Writes the checkpoints of tests/data/gguf: python make_gguf.py OUTDIR FIXTURE

Needs gguf and numpy. FIXTURE is a gguf_plain that gguf-py wrote; it is taken as it is. Beside
each: NAME.expected.json. Quantised tensors are U8, rows of blocks.
"""
import hashlib
import json
import os
import shutil
import struct
import sys

import gguf
import numpy as np

OUT, PLAIN = sys.argv[1:3]
rng = np.random.default_rng(11)
Q8, Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
DTYPES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8"}


def entry(a, dtype=None):
    a = np.asarray(a, order="C")
    a = a.astype(a.dtype.newbyteorder("<"))
    return {"dtype": dtype or DTYPES[a.dtype.str], "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}


def expect(name, tensors, objects, by="gguf==0.19.0 GGUFWriter", warnings=0):
    with open(f"{OUT}/{name}.expected.json", "w") as f:
        json.dump({"format": "gguf", "framework": "GGML", "notes": "shape = ggml's dims reversed; quantised ones: bytes of the blocks", "objects": objects,
                   "tensors": tensors, "warnings": warnings, "written_by": by}, f, indent=1, sort_keys=True)
        f.write("\n")


def f4(*shape):
    return rng.standard_normal(shape).astype("f4")


def write(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# As gguf-py wrote it.
shutil.copytree(PLAIN, f"{OUT}/gguf_plain", dirs_exist_ok=True)
want = json.load(open(PLAIN.rstrip("/") + ".expected.json"))
reader = gguf.GGUFReader(f"{PLAIN}/model.gguf")
for t in reader.tensors:
    if t.tensor_type in (Q8, Q4):
        want["tensors"][t.name] = entry(t.data)
        assert hashlib.sha256(t.data.tobytes()).hexdigest() == want["objects"]["quantized"][t.name]["raw_sha256"]
expect("gguf_plain", want["tensors"], {
    "general.architecture": "llama", "llama.block_count": 2, "general.name": "tiny", "test.list": [1, 2, 3], "test.words": ["a", "bc"],
    "test.flag": True, "test.f64": 0.5, "test.u64": {"$type": "int", "value": str(2**63 + 1)}})

# Big-endian, with one quantised tensor, whose blocks stay as they are.
os.makedirs(f"{OUT}/gguf_big_endian", exist_ok=True)
path = f"{OUT}/gguf_big_endian/be.gguf"
w = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
w.add_name("big")
w.add_array("test.list", [-1, 2, 300])
src = {"a": f4(3, 5), "h": f4(4, 6).astype("f2"), "i": rng.integers(-9, 9, (2, 3)).astype("i8"), "b": rng.integers(-9, 9, 7).astype("i1")}
for k, v in src.items():
    w.add_tensor(k, v.copy())
blocks = gguf.quants.quantize(f4(2, 32), Q8)
w.add_tensor("q", blocks.copy(), raw_dtype=Q8)
write(w)
tensors = {k: entry(v) for k, v in src.items()}
tensors["q"] = entry(next(t for t in gguf.GGUFReader(path).tensors if t.name == "q").data)
expect("gguf_big_endian", tensors, {"general.architecture": "llama", "general.name": "big", "test.list": [-1, 2, 300]})

# A set of files: the first has the metadata alone.
os.makedirs(f"{OUT}/gguf_split", exist_ok=True)
w = gguf.GGUFWriter(f"{OUT}/gguf_split/m.gguf", "llama", split_max_tensors=2, small_first_shard=True)
w.add_name("split")
src = {f"blk.{i}.w": f4(i + 1, 4) for i in range(4)}
for k, v in src.items():
    w.add_tensor(k, v)
write(w)
assert sorted(os.listdir(f"{OUT}/gguf_split")) == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
expect("gguf_split", {k: entry(v) for k, v in src.items()},
       {"general.architecture": "llama", "general.name": "split", "split.no": 0, "split.count": 3, "split.tensors.count": 4})


# By hand: version 2, an alignment of its own, every type of value, arrays in arrays, no dimension, an empty tensor.
def text(s):
    return struct.pack("<Q", len(s)) + s


def kv(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


entries = [kv(b"general.alignment", 4, struct.pack("<I", 64)), kv(b"u8", 0, b"\xff"), kv(b"i8", 1, b"\xff"), kv(b"u16", 2, b"\xff\xff"),
           kv(b"i16", 3, b"\xfe\xff"), kv(b"i32", 5, struct.pack("<i", -7)), kv(b"f32", 6, struct.pack("<f", 1.5)), kv(b"yes", 7, b"\1"),
           kv(b"bytes", 8, text(b"\xff\x00")), kv(b"u64", 10, struct.pack("<Q", 2**64 - 1)), kv(b"i64", 11, struct.pack("<q", -2**63)),
           kv(b"nan", 12, struct.pack("<d", float("nan"))), kv(b"none", 9, struct.pack("<IQ", 8, 0)),
           kv(b"nested", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ", 5, 2) + struct.pack("<2i", 1, -2) + struct.pack("<IQ", 8, 1) + text(b"x")),
           kv(b"$type", 7, b"\0")]
a, z = f4(2, 3), f4()
infos = (text(b"a") + struct.pack("<I2QIQ", 2, 3, 2, 0, 0) + text(b"none") + struct.pack("<I2QIQ", 2, 0, 4, 1, 64) +
         text(b"zero_d") + struct.pack("<IIQ", 0, 0, 64))
head = b"GGUF" + struct.pack("<IQQ", 2, 3, len(entries)) + b"".join(entries) + infos
data = a.tobytes().ljust(64, b"\0") + z.tobytes()
os.makedirs(f"{OUT}/gguf_version2", exist_ok=True)
with open(f"{OUT}/gguf_version2/x.gguf", "wb") as f:
    f.write(head + b"\0" * (-len(head) % 64) + data)
expect("gguf_version2", {"a": entry(a), "none": entry(np.zeros((4, 0), "f2")), "zero_d": entry(np.asarray(z).reshape(()))}, {
    "general.alignment": 64, "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "i32": -7, "f32": 1.5, "yes": True,
    "bytes": {"$type": "opaque", "class": "builtins.str", "surrogatepass": "/wA="}, "u64": {"$type": "int", "value": str(2**64 - 1)},
    "i64": {"$type": "int", "value": str(-2**63)}, "nan": {"$type": "float", "value": "nan"}, "none": [], "nested": [[1, -2], ["x"]],
    "$type": False}, by="hand")

# A set with an alignment of its own, which gguf-py tells in the first file only.
os.makedirs(f"{OUT}/gguf_split_aligned", exist_ok=True)
w = gguf.GGUFWriter(f"{OUT}/gguf_split_aligned/m.gguf", "llama", split_max_tensors=2, small_first_shard=True)
w.add_custom_alignment(512)
src = {f"blk.{i}.w": f4(i + 1, 5) for i in range(4)}
for k, v in src.items():
    w.add_tensor(k, v)
write(w)
expect("gguf_split_aligned", {k: entry(v) for k, v in src.items()},
       {"general.alignment": 512, "general.architecture": "llama", "split.no": 0, "split.count": 3, "split.tensors.count": 4})
