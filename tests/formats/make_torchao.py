#!/usr/bin/env python3
"""Writes fixtures of tests/data/torch_dcp and torch_file with torchao: weights and states of classes of its own, on gloo ranks.

    make_torchao.py FOLDER        FOLDER/torch_dcp/NAME, FOLDER/torch_file/NAME

The truth is what the model had before torchao put its classes in place of the weights, and for what such a class holds its own attributes. Written with
torchao 0.18.0 and torch 2.15.0.
"""
import hashlib
import json
import os
import shutil
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from make_verl import DTYPES


def told(t):
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def expect(path, tensors, inside, **more):
    with open(path + ".expected.json", "w") as f:
        json.dump(dict({"written_by": "tests/formats/make_torchao.py", "tensors": {k: told(t) for k, t in tensors.items()},
                        "inside_objects": {k: told(t) for k, t in inside.items()}}, **more), f, indent=1, sort_keys=True)
        f.write("\n")


def float8(rank, world, folder):
    """Weights that are cast to float8 as they are gathered: torchtitan's enable_fsdp_float8_all_gather."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(16, 48, bias=False), torch.nn.Linear(48, 16))
    truth = {k: v.detach().clone() for k, v in m.state_dict().items()}
    convert_to_float8_training(m, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    if world == 1:
        os.makedirs(f"{folder}/torch_file/float8_held")
        torch.save(m.state_dict(), f"{folder}/torch_file/float8_held/model.pt")
        expect(f"{folder}/torch_file/float8_held", truth, {}, format="torch-file")
        return
    fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
    dcp.save({"model": m.state_dict()}, checkpoint_id=f"{folder}/torch_dcp/dcp_float8_held_3r")
    if rank == 0:
        expect(f"{folder}/torch_dcp/dcp_float8_held_3r", {"model." + k: v for k, v in truth.items()}, {}, format="torch-dcp")


def run(rank, world, port, make, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    make(rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for family in ("torch_dcp", "torch_file"):
        shutil.rmtree(f"{sys.argv[1]}/{family}", ignore_errors=True)
        os.makedirs(f"{sys.argv[1]}/{family}")
    for make, world in ((float8, 1), (float8, 3)):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(run, (world, port, make, sys.argv[1]), nprocs=world)


if __name__ == "__main__":
    main()
