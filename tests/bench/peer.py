#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the peers do, run by their own Python: peer.py NAME ARGUMENT... prints a JSON line a round.

A peer's time begins when its modules are imported, which takes seconds: that is in the peers' favour.
"""
import glob
import json
import os
import pathlib
import resource
import sys
import time


def tell(work):
    """Runs it once: {"seconds", "cpu", "rss"}."""
    begin, cpu = time.monotonic(), time.process_time()
    work()
    print(json.dumps({"seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu,
                      "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)


def tensorstore(array, rounds):
    import tensorstore as ts
    for _ in range(int(rounds)):
        store = ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": array}}).result()
        tell(lambda store=store: store.read().result())


def unpickle(file):
    """A .metadata as Python reads it."""
    import make_metadata  # the classes

    def load():
        with open(file, "rb") as f:
            make_metadata.pickle.load(f)
    tell(load)


# ---- converters ----

def dcp_to_torch(source, target):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    tell(lambda: dcp_to_torch_save(source, target))


def consolidate(source, target):
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    os.makedirs(target)
    names = {}
    for file in glob.glob(os.path.join(source, "**", "*.safetensors"), recursive=True):
        with safe_open(file, "pt") as f:
            names.update(dict.fromkeys(f.keys(), 1))
    folder = os.path.dirname(file)
    tell(lambda: consolidate_safetensors_files(folder, target, names, num_threads=len(os.sched_getaffinity(0))))


def olmo_unshard(source, target):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../interop"))
    from olmo_models import without_network
    without_network()
    sys.modules["cached_path"].cached_path = lambda path, **_: pathlib.Path(path)
    from olmo_core.distributed.checkpoint import unshard_checkpoint
    tell(lambda: unshard_checkpoint(source, target, optim=False, quiet=True))


def zero_to_fp32(source, target):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    tell(lambda: convert_zero_checkpoint_to_fp32_state_dict(os.path.dirname(source), target, tag=os.path.basename(source)))


def make_zero(step, size, ranks=4, tensors=32):
    """A ZeRO-2 checkpoint as DeepSpeed lays it out: a flat float32 master, an equal part of it a rank."""
    import collections
    import torch
    rows = int(size) // tensors // 4096
    names = [f"layers.{i}.weight" for i in range(tensors)]
    part = tensors * rows * 1024 // ranks
    os.makedirs(step)
    module = {name: torch.zeros(rows, 1024, dtype=torch.bfloat16) for name in names}
    torch.save({"module": module, "buffer_names": [], "param_shapes": [collections.OrderedDict((n, torch.Size((rows, 1024))) for n in names)],
                "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "ds_version": "0.19.8", "ds_config": {}, "dp_world_size": ranks,
                "mp_world_size": 1}, os.path.join(step, "mp_rank_00_model_states.pt"))
    for rank in range(ranks):
        moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(part), "exp_avg_sq": torch.zeros(part)}
        state = {"zero_stage": 2, "partition_count": [ranks], "single_partition_of_fp32_groups": [torch.randn(part)], "loss_scaler": None, "dynamic_loss_scale": False,
                 "overflow": False, "clip_grad": 0.0, "base_optimizer_state": {"state": {0: moments}, "param_groups": [{"params": [0], "lr": 0.001}]},
                 "group_paddings": [0], "ds_version": "0.19.8"}
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
                   os.path.join(step, f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


# ---- one pass over every byte ----

def numpy_stats(rounds, file):
    import numpy as np
    from safetensors import safe_open

    def work():
        with safe_open(file, "np") as f:
            for name in f.keys():
                x = f.get_tensor(name)
                finite = x[np.isfinite(x)]
                finite.min(), finite.max(), finite.mean(dtype=np.float64), finite.std(dtype=np.float64)
                np.isnan(x).sum(), np.isinf(x).sum(), (x == 0).sum(), np.histogram(finite, 16)

    for _ in range(int(rounds)):
        tell(work)


def numpy_diff(rounds, one, other):
    import numpy as np
    from safetensors import safe_open

    def work():
        with safe_open(one, "np") as f, safe_open(other, "np") as g, np.errstate(all="ignore"):
            for name in f.keys():
                a, b = f.get_tensor(name), g.get_tensor(name)
                if not np.array_equal(a, b):
                    unequal, distance = a != b, np.abs(a - b)
                    unequal.sum(), np.nanmax(distance), np.nanmax(distance / np.abs(b)), unequal.argmax()

    for _ in range(int(rounds)):
        tell(work)


PEERS = {f.__name__: f for f in (tensorstore, unpickle, dcp_to_torch, consolidate, olmo_unshard, zero_to_fp32, make_zero, numpy_stats, numpy_diff)}

if __name__ == "__main__":
    PEERS[sys.argv[1]](*sys.argv[2:])
