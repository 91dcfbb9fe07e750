"""Writes tests/data/flax/flax_processes: make_flax_processes.py OUTDIR (starts itself twice).

flax.training.checkpoints without Orbax keeps arrays that several processes hold parts of in zarr's directories beside the file,
which has their paths alone. flax's reader wants arrays of two processes as targets: the truth is what was given to the save.
Written with flax 0.12.12, jax 0.12.0.1 and tensorstore 0.1.86.
"""
import hashlib
import json
import os
import subprocess
import sys

OUT, RANK = sys.argv[1], sys.argv[2:]
if not RANK:
    children = [subprocess.Popen([sys.executable, __file__, OUT, str(r)]) for r in range(2)]
    sys.exit(max(c.wait() for c in children))
RANK = int(RANK[0])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:29917", 2, RANK)
flax.config.update("flax_use_orbax_checkpointing", False)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
rng = np.random.default_rng(11)
NAMES = {"float32": "F32", "bfloat16": "BF16"}
tensors = {}


def leaf(key, shape, spec=None, dtype="f4"):
    a = rng.standard_normal(shape).astype(dtype)
    tensors[key] = {"dtype": NAMES[a.dtype.name], "shape": list(shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
    if spec is None:
        return a
    return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: a[i])


state = {"params": {"dense": {"kernel": leaf("params.dense.kernel", (8, 6), ("x", "y")), "bias": leaf("params.dense.bias", (6,), ("y",))},
                    "lin/~/w": leaf("params.lin/~/w", (4, 4), (None, "x"), jnp.bfloat16)},
         "opt_state": [{"mu": leaf("opt_state.0.mu", (8, 6), ("y",)), "count": 4}, {}], "local": leaf("local", (3,)), "step": 7, "name": "x"}
manager = GlobalAsyncCheckpointManager()
os.makedirs(f"{OUT}/flax_processes", exist_ok=True)
checkpoints.save_checkpoint_multiprocess(f"{OUT}/flax_processes", state, 5, gda_manager=manager)
manager.wait_until_finished()
if RANK == 0:
    objects = {"step": 7, "name": "x", "opt_state": {"0": {"mu": {"$type": "tensor", "key": "opt_state.0.mu"}, "count": 4}, "1": {}}}
    with open(f"{OUT}/flax_processes.expected.json", "w") as f:
        json.dump({"format": "flax-msgpack", "framework": "Flax", "notes": "", "objects": objects, "tensors": tensors, "warnings": 0,
                   "written_by": "tests/formats/make_flax_processes.py"}, f, indent=1, sort_keys=True)
        f.write("\n")
