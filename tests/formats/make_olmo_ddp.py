#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/olmo_core/step7 with OLMo-core: the state of its OLMoDDPOptimizer, with experts on two ranks and two copies of each, on four gloo ranks.

    make_olmo_ddp.py FOLDER        FOLDER/olmo_core/step7

The optimizer, the state dict and what saves it are OLMo-core's; the parameters are three of ours, as its models need a GPU. The truth is put together from what
the optimizer of each rank holds: experts by the rank that has them, then parts of each by the rank of its copies. Written with OLMo-core 3.0.0 and torch 2.15.0.
"""
import hashlib
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import olmo_models
from make_verl import DTYPES

olmo_models.without_network()

EXPERTS, RANKS = 4, 2  # and two copies of each rank's


def told(t, role):
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "role": role,
            "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def some(name, shape, rank=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * rank))


class Block(nn.Module):
    def __init__(self, rank):
        super().__init__()
        first = rank * EXPERTS // RANKS
        self.norm = nn.Parameter(some("norm", (7,)).bfloat16())
        self.w_up_gate = nn.Parameter(some("experts", (EXPERTS, 3, 10)).bfloat16()[first:first + EXPERTS // RANKS].clone())
        self.register_buffer("score_bias", some("bias", (EXPERTS,)))


class Model(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.embeddings = nn.Embedding(11, 6, _weight=some("embeddings", (11, 6)).bfloat16())
        self.blocks = nn.ModuleDict({"0": Block(rank)})


class Wrapped(nn.Module):
    """As OLMo-core's own DistributedDataParallel calls it."""

    def __init__(self, model):
        super().__init__()
        self.module = model


def write(rank, world, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29577", FS_LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    from olmo_core.optim.moe_optimizer import OLMoDDPOptimizer
    from olmo_core.train.checkpoint import Checkpointer
    from olmo_core.train.train_module.transformer.ddp_train_module import OLMoDDPTrainModule

    # It asks for types by their name on a GPU.
    name_of = torch.Tensor.type
    torch.Tensor.type = lambda t, *a, **k: name_of(t, *a, **k) if a or k else name_of(t).replace("torch.", "torch.cuda.")
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    experts = init_device_mesh("cpu", (world // RANKS, RANKS), mesh_dim_names=("ep_dp", "ep_mp"))
    place = experts["ep_mp"].get_local_rank()
    model = Wrapped(Model(place))
    groups = {"dp": {}, "ep_dp": {}}
    for name, p in model.named_parameters():
        groups["ep_dp" if "w_up_gate" in name else "dp"][name] = p
    optim = OLMoDDPOptimizer([{"named_params": of, "pg": pg} for pg, of in groups.items()], world_mesh={"dense": dense, "moe": experts},
                             dp_group=dense.get_group(), ep_dp_group=experts["ep_dp"].get_group(), device=torch.device("cpu"),
                             do_not_shard_tensor_smaller_than=16)
    mine = {}
    for key, t in optim.states.items():
        cut, expert = t.placements[0].is_shard(), key.rsplit(".", 1)[0] in groups["ep_dp"]
        part = t.device_mesh.get_local_rank() if cut else 0
        if not key.endswith(".main"):
            t.to_local().copy_(some(key, t.to_local().shape, 10 * place * expert + part) if not key.endswith(".step") else torch.tensor(5.0))
        mine[key] = ((place if expert and not key.endswith(".step") else 0, part), t.to_local().clone())
    optim._losses, optim._grad_norms = [torch.tensor(1.5), torch.tensor(2.25)], [torch.tensor(0.5)]
    held = [None] * world
    dist.all_gather_object(held, mine)
    module = object.__new__(OLMoDDPTrainModule)
    module.optim, module.model_parts = optim, [model]
    OLMoDDPTrainModule._require_optimizer = lambda self: self.optim
    path = folder + "/olmo_core/step7"
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    Checkpointer(work_dir=folder + "/work", save_thread_count=1).save(path, module, {"global_step": 7, "world_size": world})
    if rank == 0:
        shutil.rmtree(folder + "/work", ignore_errors=True)
        tensors = {"model_buffer.blocks.0.score_bias": told(some("bias", (EXPERTS,)), "model")}
        for key in mine:
            parts = dict(sorted((h[key] for h in held), key=lambda p: p[0]))
            whole = next(iter(parts.values())) if len(parts) == 1 else torch.cat(list(parts.values()))
            tensors[key] = told(whole, "model" if key.endswith(".main") else "optimizer")
        whole = some("experts", (EXPERTS, 3, 10)).bfloat16().float().view(-1)
        assert tensors["module.blocks.0.w_up_gate.main"] == told(whole, "model")
        objects = {f"train/rank{r}.pt": {"global_step": 7, "world_size": world} for r in range(world)}
        objects.update({"__moe_skip_step_losses": [1.5, 2.25], "__moe_skip_step_grad_norms": [0.5]})
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_olmo_ddp.py", "format": "olmo-core-step", "framework": "OLMo-core", "step": 7, "tensors": tensors,
                       "objects": objects}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    os.makedirs(sys.argv[1] + "/olmo_core", exist_ok=True)
    mp.start_processes(write, args=(4, sys.argv[1]), nprocs=4, join=True, start_method="fork")
