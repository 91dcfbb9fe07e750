"""Writes tests/data/zarr/run-500: make_easydel.py OUTDIR.

EasyDeL's checkpoints by TensorStore are those of eformer: arrays of zarr 2 at PREFIX/a/b/kernel, all of them in one list. Written with
eformer 0.0.101, jax 0.12.0.1 and tensorstore 0.1.86, on four devices of one process.
"""
import hashlib
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from eformer.serialization.async_manager import AsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

OUT = sys.argv[1]
NAMES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
rng = np.random.default_rng(13)


def leaf(shape, *spec, dtype="f4"):
    return jax.device_put(rng.standard_normal(shape).astype(dtype), NamedSharding(mesh, PartitionSpec(*spec)))


def entries(tree, path, out):
    for k, v in tree.items():
        if isinstance(v, dict):
            entries(v, f"{path}/{k}", out)
        else:
            a = np.asarray(v)
            out[f"{path}/{k}"] = {"dtype": NAMES[a.dtype.name], "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
    return out


model = {"layers": {"0": {"kernel": leaf((8, 6), "x", "y")}, "1": {"kernel": leaf((8, 6), "y")}}, "emb": leaf((10, 6), "x", dtype=jnp.bfloat16)}
state = {"mu": {"0": {"kernel": leaf((8, 6), None, "x")}}, "count": jnp.int32(3)}
manager = AsyncCheckpointManager(use_tensorstore=True)
tensors = {}
for prefix, tree in (("model", model), ("tx", state)):
    manager.save_pytree(tree, f"{OUT}/run-500", mesh=mesh, prefix=prefix)
    back, _ = manager.load(f"{OUT}/run-500", mesh=mesh, prefix=prefix, partition_rules=[(".*", PartitionSpec())])
    entries(back, prefix, tensors)
assert tensors == entries(model, "model", {}) | entries(state, "tx", {})
with open(f"{OUT}/run-500.expected.json", "w") as f:
    json.dump({"format": "zarr2", "framework": "zarr", "objects": {}, "tensors": tensors, "written_by": "tests/formats/make_easydel.py"}, f, indent=1,
              sort_keys=True)
    f.write("\n")
