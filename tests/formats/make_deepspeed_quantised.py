#!/usr/bin/env python3
"""Writes z2_bnb8_w2 of tests/data/deepspeed: bitsandbytes' 8-bit AdamW on two ranks of stage 2, on gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_quantised.py FOLDER

Written with DeepSpeed 0.19.8, torch 2.6.0 and bitsandbytes 0.50.2, which is the first whose 8-bit optimizers run without a GPU. It puts states into a dict of
their own in state_dict(), for FSDP; until 0.49 that was torch's, as it is here. The truth is what the running engine has: masters, the copy, and of states
what the optimizer itself holds of its partitions.
"""
import hashlib
import json
import os
import shutil
import sys

import bitsandbytes
import deepspeed
import torch
import torch.distributed as dist
from make_deepspeed_frozen import objects
from torch import nn

NAME = "z2_bnb8_w2"
FIRST = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
TABLES = ("qmap1", "qmap2", "absmax1", "absmax2")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
bitsandbytes.optim.optimizer.Optimizer8bit.state_dict = torch.optim.Optimizer.state_dict


def told(t):
    t = t.detach().contiguous()
    return {"dtype": TYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def whole(parts):
    """The partitions of all ranks, one behind the other."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, parts)
    return torch.cat(out)


def of_groups(engine, optimizer):
    """Masters and states of each parameter; which lie in the order of the group."""
    out = {}
    for group, flat in zip(engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups):
        states = {"": whole(flat.detach().clone())}
        states.update({k: whole(optimizer.state[flat][k].clone()) for k in ("state1", "state2")})
        at = 0
        for p in group:
            name = engine.param_names[p]
            for state, t in states.items():
                out[f"optimizer.state.{name}.{state}" if state else name] = told(t[at : at + p.numel()].view(p.shape))
            at += p.numel()
    return out


def tables(folder):
    """Of each rank's file what is not cut by parameters."""
    out = {}
    for r in range(dist.get_world_size()):
        name = f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        state = torch.load(f"{folder}/{name}", weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
        for g, one in state.items():
            out.update({f"{name}:optimizer_state_dict.base_optimizer_state.state.{g}.{k}": told(t) for k, t in one.items()
                        if k in TABLES})
    return out


def state_shown(g, key, v):
    if key in TABLES:
        return {"$type": "tensor", "key": f"{FIRST}:optimizer_state_dict.base_optimizer_state.state.{g}.{key}"}
    return {"$type": "opaque", "class": "torch.Tensor", "dtype": TYPES[v.dtype], "shape": list(v.shape)} if torch.is_tensor(v) else v


def with_state(path):
    """A state that has numbers is an object too."""
    out = objects(path, FIRST)
    state = torch.load(f"{path}/{FIRST}", weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
    out["optimizer.state"] = {"$type": "dict", "items": [[g, {k: state_shown(g, k, v) for k, v in one.items()}] for g, one in state.items()]}
    return out


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(23, 29), nn.LayerNorm(29), nn.Linear(29, 11))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2, min_8bit_size=8)
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 23, generator=g).bfloat16()).float().square().mean())
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    tensors = of_groups(engine, optimizer)
    tensors.update({f"module.{k}": told(v) for k, v in engine.module.state_dict().items()})
    if dist.get_rank() == 0:
        tensors.update(tables(path))
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_quantised.py", "format": "deepspeed-zero2", "framework": "DeepSpeed",
                       "warnings": 2, "objects": with_state(path), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
