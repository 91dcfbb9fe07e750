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

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # ranks would share what they compile, for other sizes

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from make_verl import DTYPES

TYPES = {**DTYPES, torch.int8: "I8"}


def told(t):
    t = t.detach().contiguous()
    return {"dtype": TYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


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


def inner(name, t, out):
    """What a tensor of a class of its own holds."""
    if type(t) in (torch.Tensor, torch.nn.Parameter):
        out[name] = t
    else:
        for a in t.__tensor_flatten__()[0]:
            inner(f"{name}.{a}", getattr(t, a), out)
    return out


def as_object(cls, dtype, rows, state):
    """As objects.json has it."""
    def named(kind, name):
        return {"$type": "opaque", "class": kind, "value": name}

    def items(*v):
        return {"$type": "tuple", "items": list(v)}

    return {"$type": "opaque", "class": "torch._tensor._rebuild_from_type_v2",
            "args": [named("global", "torch._utils._rebuild_wrapper_subclass"), named("global", cls),
                     items(named("global", cls), named("torch.dtype", dtype), items(rows, 128), items(128, 1), 0,
                           named("torch.serialization._get_layout", "torch.strided"), named("torch.device", "cpu"), False), state]}


def held_by(place, *names):
    return {n: {"$type": "tensor", "key": f"{place}.{n}"} for n in names}


def quantised(rank, world, folder):
    """Weights of int8 and moments of 8 bits, which FSDP2 cuts; small tensors beside, of which one that is quantised is no shorter for it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    m = torch.nn.Sequential(torch.nn.Linear(128, 51, dtype=torch.bfloat16), torch.nn.Linear(128, 3, dtype=torch.bfloat16))
    quantize_(m, Int8WeightOnlyConfig())
    f = torch.nn.Linear(128, 65)
    truth = {"model." + k: v for k, v in m.state_dict().items() if k.endswith("bias")}
    fully_shard(f, mesh=mesh)
    o = AdamW8bit(f.parameters(), block_size=64)
    f(torch.ones(2, 128)).sum().backward()
    o.step()
    state = o.state_dict()["state"]
    sharded = {"weight": f.weight, "bias": f.bias, "avg": state[0]["exp_avg"], "avg_bias": state[1]["exp_avg"]}
    dcp.save({"model": m.state_dict(), "fsdp": sharded}, checkpoint_id=f"{folder}/torch_dcp/dcp_own_class_2r")
    truth.update({f"fsdp.{k}": sharded[k].full_tensor() for k in ("weight", "bias", "avg_bias")})
    inside = [None] * world
    mine = inner(f"__{rank}_0.distcp:fsdp.avg", sharded["avg"].to_local(), {})
    dist.all_gather_object(inside, mine)
    if rank == 0:
        info = dcp.FileSystemReader(f"{folder}/torch_dcp/dcp_own_class_2r").read_metadata().storage_data
        where = {i.fqn: s.relative_path for i, s in info.items()}
        held = {k: t for part in inside for k, t in part.items()}
        for k, v in m.state_dict().items():
            if not k.endswith("bias"):
                inner(f"{where['model.' + k]}:model.{k}", v, held)
        objects = {"fsdp.avg": as_object("torchao.optim.subclass_8bit.OptimState8bit", "torch.float32", 33,
                                         dict(held_by("__0_0.distcp:fsdp.avg", "codes", "scale", "qmap"), signed=True, block_size=64))}
        for k, rows in (("model.0.weight", 51), ("model.1.weight", 3)):
            objects[k] = as_object("torchao.quantization.Int8Tensor", "torch.bfloat16", rows,
                                   dict(held_by(f"{where[k]}:{k}", "qdata", "scale", "zero_point"), block_size=[1, 128], act_quant_kwargs=None,
                                        act_quant_scale=None, act_quant_zero_point=None, act_pre_scale=None, reduce_range=False))
        expect(f"{folder}/torch_dcp/dcp_own_class_2r", truth, held, objects=objects, format="torch-dcp", warnings=1)


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
    for make, world in ((float8, 1), (float8, 3), (quantised, 2)):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(run, (world, port, make, sys.argv[1]), nprocs=world)


if __name__ == "__main__":
    main()
