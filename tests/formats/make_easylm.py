"""Writes the checkpoints of tests/data/flax that EasyLM streams: python make_easylm.py EASYLM OUTDIR

EASYLM is a checkout of young-geng/EasyLM: its EasyLM/checkpoint.py writes and reads them here (its jax_utils.py asks for
transformers, so the one function of it that is needed stands here). Needs flax, optax, ml_collections, mlxu. Beside each:
NAME.expected.json, from EasyLM's own loader.
"""
import hashlib
import json
import os
import pathlib
import pickle
import sys
import types

import flax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import serialization
from flax.training.train_state import TrainState

EASYLM, OUT = pathlib.Path(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(8)
NAMES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def cast(tensor, dtype):
    """EasyLM.jax_utils.float_tensor_to_dtype, of what is asked for here."""
    if dtype == "bf16" and getattr(tensor, "dtype", None) in (np.float32, jnp.float32):
        return np.asarray(tensor).astype(ml_dtypes.bfloat16)
    return tensor


sys.modules["EasyLM"] = types.ModuleType("EasyLM")
sys.modules["EasyLM.jax_utils"] = types.SimpleNamespace(tree_apply=None, float_tensor_to_dtype=cast)
easylm = types.ModuleType("easylm_checkpoint")
exec((EASYLM / "EasyLM/checkpoint.py").read_text(), easylm.__dict__)
saver = easylm.StreamingCheckpointer


def flatten(tree, path, tensors, objects):
    for k, v in tree.items():
        at = path + [k]
        if isinstance(v, dict):
            flatten(v, at, tensors, objects)
        elif isinstance(v, (np.ndarray, np.generic)):
            a = np.asarray(v)
            tensors[".".join(at)] = {"dtype": NAMES[a.dtype.name], "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
        else:
            objects[".".join(at)] = v


def make(name, file, tree, dtype, pickles=()):
    os.makedirs(f"{OUT}/{name}", exist_ok=True)
    saver.save_train_state_to_file(tree, f"{OUT}/{name}/{file}", None, dtype)
    for n in pickles:
        with open(f"{OUT}/{name}/{n}", "wb") as f:
            pickle.dump({"step": 1}, f)
    tensors, objects = {}, {}
    flatten(saver.load_checkpoint(f"{OUT}/{name}/{file}"), [], tensors, objects)
    with open(f"{OUT}/{name}.expected.json", "w") as f:
        json.dump({"format": "easylm-stream", "framework": "EasyLM", "notes": "", "objects": objects, "tensors": tensors, "warnings": 0,
                   "written_by": f"EasyLM's StreamingCheckpointer, flax=={flax.__version__}"}, f, indent=1, sort_keys=True)
        f.write("\n")


def f4(*shape):
    return rng.standard_normal(shape).astype("f4")


make("easylm_params", "streaming_params_100", {
    "model": {"wte": {"embedding": f4(7, 5)}, "h": {"0": {"kernel": f4(5, 3), "scale": np.float32(2.5), "mask": np.array([True, False])}},
              "a/b.c": f4(2), "empty": np.zeros((0, 3), "f4"), "fortran": np.asfortranarray(f4(3, 2))},
    "lm_head": {"kernel": f4(3, 7)}}, "bf16")
# Arrays of more than a GiB are cut into ranges of their elements.
serialization.MAX_CHUNK_SIZE = 40
state = TrainState.create(apply_fn=None, params={"params": {"w": f4(5, 3, 7), "b": f4(2)}}, tx=optax.adamw(1e-3))
make("easylm_state", "streaming_train_state", state.replace(step=12), None, ("metadata.pkl", "dataset.pkl"))
