#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes fixtures of tests/data/torch_dcp as trainers of reinforcement learning save by torch.distributed.checkpoint: FSDP2 on two gloo ranks.

    make_rl_dcp.py FOLDER AREAL        FOLDER/torch_dcp/areal_2r, prime_2r

AREAL is where the package areal lies: its own DCPState (areal/engine/fsdp_utils/checkpoint.py) is what is saved. prime-rl is on no index of packages: its calls
(src/prime_rl/trainer/ckpt.py) are made here. Written with AReaL 1.0.4 and torch 2.15.0.
"""
import hashlib
import importlib.util
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from make_verl import DTYPES


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 5)
        self.lm_head = torch.nn.Linear(5, 3, bias=False)


class AppState(Stateful):
    def __init__(self, model, optimizers, scheduler):
        self.model, self.optimizers, self.scheduler = model, optimizers, scheduler

    def state_dict(self):
        model, optimizers = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizers": optimizers, "scheduler": self.scheduler.state_dict(),
                "progress": {"step": 5, "total_tokens": 640, "total_samples": 20}}


def told(t, role):
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "role": role,
            "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def plain(value):
    return {"$type": "tuple", "items": list(value)} if isinstance(value, tuple) else value


def write(rank, world, folder, areal):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29579")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    spec = importlib.util.spec_from_file_location("checkpoint", areal + "/areal/engine/fsdp_utils/checkpoint.py")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for p in model.parameters():
        p.grad = p.detach() * 0.5
    optimizer.step()
    scheduler.step()
    for name, state, optim, more in (("areal_2r", {"dcp": own.DCPState(model, optimizer)}, "optim", {}),
                                     ("prime_2r", {"app": AppState(model, [optimizer], scheduler)}, "optimizers", {"step": 5})):
        dcp.save(state, checkpoint_id=f"{folder}/torch_dcp/{name}")
        around, = state
        weights, states = get_state_dict(model, optimizer)
        tensors = {f"{around}.model.{k}": told(t, "model") for k, t in weights.items()}
        tensors.update({f"{around}.{optim}.state.{n}.{k}": told(t, "optimizer") for n, of in states["state"].items() for k, t in of.items()})
        flat, _ = flatten_state_dict({around: state[around].state_dict()})
        objects = {k: plain(v) for k, v in flat.items() if not torch.is_tensor(v)}
        if rank == 0:
            with open(f"{folder}/torch_dcp/{name}.expected.json", "w") as f:
                json.dump({"written_by": "tests/formats/make_rl_dcp.py", "format": "torch-dcp", "tensors": tensors, "objects": objects, **more},
                          f, indent=1, sort_keys=True)
                f.write("\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1] + "/torch_dcp", exist_ok=True)
    mp.start_processes(write, args=(2, sys.argv[1], sys.argv[2]), nprocs=2, join=True, start_method="fork")
