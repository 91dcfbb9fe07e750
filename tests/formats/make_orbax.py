#!/usr/bin/env python3
"""Writes the fixture of tests/data/orbax that has items of one array: make_orbax.py FOLDER makes FOLDER/2.

Until 0.11 ArrayCheckpointHandler saved a directory of zarr without _METADATA, by itself and for random keys. Written with
orbax-checkpoint 0.8.0, jax 0.5.3 and tensorstore 0.1.73.
"""
import hashlib
import json
import os
import shutil
import sys
import tempfile

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

OUT = sys.argv[1]
NAMES = {"float32": "F32", "bfloat16": "BF16", "uint32": "U32"}
rng = np.random.default_rng(3)
weight = rng.standard_normal((3, 5)).astype("f4")
half = rng.standard_normal((4, 3)).astype(ml_dtypes.bfloat16)
key = jax.random.key(5)


def entry(a):
    a = np.ascontiguousarray(a)
    return {"dtype": NAMES[a.dtype.name], "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}


with tempfile.TemporaryDirectory() as scratch:
    with ocp.CheckpointManager(scratch) as m:
        m.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": weight}), arr=ocp.args.ArraySave(half),
                                          rng=ocp.args.JaxRandomKeySave(key)))
        m.wait_until_finished()
        read = m.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore(), arr=ocp.args.ArrayRestore(),
                                                    rng=ocp.args.JaxRandomKeyRestore()))
    assert read.arr.tobytes() == half.tobytes() and read.rng == key
    shutil.copytree(f"{scratch}/2", f"{OUT}/2")
with open(f"{OUT}/2.expected.json", "w") as f:
    json.dump({"format": "orbax-manager", "framework": "Orbax", "objects": {"rng/jax_random_key_metadata": {"typed": True}},
               "tensors": {"w": entry(read.state["w"]), "arr/checkpoint": entry(read.arr), "rng/jax_random_key/checkpoint": entry(jax.random.key_data(read.rng))},
               "written_by": "tests/formats/make_orbax.py"}, f, indent=1, sort_keys=True)
    f.write("\n")
