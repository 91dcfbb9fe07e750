#!/usr/bin/env python3
"""Writes two fixtures of tests/data/orbax: make_orbax_kinds.py FOLDER old|new.

old: FOLDER/orbax_text, leaves that are no arrays beside the file `checkpoint` (text stands in _strings.json alone, null twice), and a
number that was cast. Written with orbax-checkpoint 0.5.3, jax 0.4.20 and tensorstore 0.1.56.
new: FOLDER/orbax_one_leaf, a tree that is one array, not OCDBT: it lies beside _METADATA. orbax-checkpoint 0.12.8, tensorstore 0.1.86.
"""
import hashlib
import json
import sys

import numpy as np
import orbax.checkpoint as ocp

OUT, KIND = sys.argv[1], sys.argv[2]
rng = np.random.default_rng(5)


def entry(a):
    a = np.ascontiguousarray(a)
    return {"dtype": "F32", "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}


def expect(name, tensors, objects, form):
    with open(f"{OUT}/{name}.expected.json", "w") as f:
        json.dump({"format": form, "framework": "Orbax", "objects": objects, "tensors": tensors, "written_by": "tests/formats/make_orbax_kinds.py"},
                  f, indent=1, sort_keys=True)
        f.write("\n")


if KIND == "old":
    tree = {"w": rng.standard_normal((3, 4)).astype("f4"), "opt": {"m": rng.standard_normal(5).astype("f4"), "none": None}, "name": "héllo",
            "cfg": {"a/b": "x~y", "act": "relu"}, "none": None, "half": 2.5, "step": 3}
    args = {k: ocp.SaveArgs() for k in ("w", "name", "step")}
    args.update(opt={"m": ocp.SaveArgs(), "none": None}, cfg={"a/b": ocp.SaveArgs(), "act": ocp.SaveArgs()}, none=None,
                half=ocp.SaveArgs(dtype=np.dtype("float16")))
    c = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    c.save(f"{OUT}/orbax_text", args=ocp.args.PyTreeSave(tree, save_args=args))
    back = c.restore(f"{OUT}/orbax_text")
    expect("orbax_text", {"w": entry(back["w"]), "opt.m": entry(back["opt"]["m"])},
           {"name": back["name"], "none": None, "opt.none": None, "half": float(back["half"]), "step": back["step"], "cfg.act": back["cfg"]["act"],
            "cfg.a/b": back["cfg"]["a/b"]}, "orbax-zarr")
else:
    c = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    c.save(f"{OUT}/orbax_one_leaf", args=ocp.args.PyTreeSave(rng.standard_normal((3, 4)).astype("f4")))
    expect("orbax_one_leaf", {"": entry(c.restore(f"{OUT}/orbax_one_leaf"))}, {}, "orbax-zarr")
