"""Writes the checkpoints of tests/data/flax that flax itself packs: python make_flax.py OUTDIR

Needs flax, ml_dtypes, numpy. The chunk size is lowered so that small arrays are cut as
those above 1 GiB are. Beside each: NAME.expected.json, from flax's own loader.
"""
import hashlib
import json
import os
import sys

import flax
import ml_dtypes
import numpy as np
from flax import serialization

OUT = sys.argv[1]
rng = np.random.default_rng(7)
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
         "int8": "I8", "uint8": "U8", "uint16": "U16", "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
         "float8_e5m2": "F8_E5M2", "int4": "U8"}


def entry(a):
    a = np.asarray(a)
    return {"dtype": NAMES[a.dtype.name], "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes("C")).hexdigest()}


def flatten(tree, path, out):
    if isinstance(tree, (dict, list)):
        for k, v in tree.items() if isinstance(tree, dict) else enumerate(tree):
            flatten(v, path + [str(k)], out)
    elif isinstance(tree, (np.ndarray, np.generic)):
        out[".".join(path)] = entry(tree)
    return out


def expect(name, trees, objects, twice=(), warnings=0):
    """twice: keys of tensors that other paths of theirs are spelt as too."""
    tensors = {}
    for t in trees:
        flatten(t, [], tensors)
    tensors.update(twice)
    with open(f"{OUT}/{name}.expected.json", "w") as f:
        json.dump({"format": "flax-msgpack", "framework": "Flax", "notes": "", "objects": objects, "tensors": tensors, "warnings": warnings,
                   "written_by": f"flax=={flax.__version__} msgpack_serialize / msgpack_restore"}, f, indent=1, sort_keys=True)
        f.write("\n")


def save(path, tree):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    data = serialization.msgpack_serialize(tree)
    with open(path, "wb") as f:
        f.write(data)
    return serialization.msgpack_restore(data)


def f4(*shape):
    return rng.standard_normal(shape).astype("f4")


# Every kind of leaf; odd keys; a list; nothing at all.
kinds = {"params": {"w": f4(3, 4), "empty": np.zeros((0, 5), "f4"), "zero_d": np.float64(2.5), "fp8": f4(4).astype(ml_dtypes.float8_e4m3fn),
                    "fp8b": f4(2, 3).astype(ml_dtypes.float8_e5m2), "nibbles": np.array([1, -2, 7], ml_dtypes.int4),
                    "bool": np.array([True, False]), "c64": np.array([1 + 2j], "c8"), "u16": np.arange(3, dtype="u2"), "a.b": f4(2),
                    "fortran": np.asfortranarray(f4(3, 2))},
         "opt_state": {"0": {"mu": f4(2, 2), "count": np.int32(11)}, "1": {}},
         "step": 12, "big": 2**63 + 5, "lr": 0.1, "inf": float("inf"), "none": None, "text": "héllo", "raw": b"\x00\xff", "z": 1 - 2j,
         "flag": True, "list": [1, np.float32(4.5), [False]], "$type": {"$type": "x"}}
back = save(f"{OUT}/flax_kinds/checkpoint_12", kinds)
expect("flax_kinds", [back], {
    "step": 12, "big": {"$type": "int", "value": str(2**63 + 5)}, "lr": 0.1, "inf": {"$type": "float", "value": "inf"}, "none": None,
    "text": "héllo", "raw": {"$type": "bytes", "value": "AP8="}, "z": {"$type": "opaque", "class": "builtins.complex", "args": [1.0, -2.0]},
    "flag": True, "list": [1, {"$type": "tensor", "key": "list.1"}, [False]], "$type": {"$$type": "x"}})

# Cut into chunks of 40 bytes of their flat elements.
serialization.MAX_CHUNK_SIZE = 40
back = save(f"{OUT}/flax_chunked/state.msgpack", {"params": {"w": f4(5, 3, 7), "v": f4(11), "b": f4(2), "h": f4(9, 5).astype(ml_dtypes.bfloat16)}})
expect("flax_chunked", [back], {})
serialization.MAX_CHUNK_SIZE = 2**30

# A model of transformers in shards.
shards = [{"model": {"embed": {"embedding": f4(6, 4)}}}, {"model": {"norm": {"scale": f4(4)}}, "lm_head": {"kernel": f4(4, 6)}}]
d = f"{OUT}/flax_sharded"
backs = [save(f"{d}/flax_model-0000{i + 1}-of-00002.msgpack", s) for i, s in enumerate(shards)]
index = {"model/embed/embedding": 1, "model/norm/scale": 2, "lm_head/kernel": 2}
with open(f"{d}/flax_model.msgpack.index.json", "w") as f:
    json.dump({"metadata": {"total_size": 0}, "weight_map": {k: f"flax_model-0000{i}-of-00002.msgpack" for k, i in index.items()}}, f)
expect("flax_sharded", backs, {})

# Paths that are spelt the same; flax packs the keys of a dict sorted.
same = {"a.b": f4(3), "a": {"b": f4(4), "n": 3}, "m": {"x.y": f4(2), "x": {"y": f4(5)}, "x.y:2": f4(6)}}
back = save(f"{OUT}/flax_same_key/state.msgpack", same)
expect("flax_same_key", [], {"a": {"b": {"$type": "tensor", "key": "a.b"}, "n": 3}},
       {"a.b": entry(back["a"]["b"]), "a.b:2": entry(back["a.b"]), "m.x.y": entry(back["m"]["x"]["y"]), "m.x.y:2": entry(back["m"]["x.y"]),
        "m.x.y:2:2": entry(back["m"]["x.y:2"])}, 3)
# The other way round, as a program that packs a map by itself may have it: the object names the second one.
back = {"a.b": f4(3), "a": {"b": f4(4), "n": 3}}
pack = {k: serialization.msgpack_serialize(v) for k, v in back.items()}
os.makedirs(f"{OUT}/flax_same_key_late")
with open(f"{OUT}/flax_same_key_late/state.msgpack", "wb") as f:
    f.write(b"\x82\xa3a.b" + pack["a.b"] + b"\xa1a" + pack["a"])
expect("flax_same_key_late", [], {"a": {"b": {"$type": "tensor", "key": "a.b:2"}, "n": 3}},
       {"a.b": entry(back["a.b"]), "a.b:2": entry(back["a"]["b"])}, 1)
