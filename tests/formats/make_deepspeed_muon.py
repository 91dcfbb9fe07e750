#!/usr/bin/env python3
"""Writes z2_muon_w3 and z2_muon_cpu_w3 of tests/data/deepspeed: Muon in stage 2 on three ranks and gloo, the second with its optimizer on the CPU.

    DS_ACCELERATOR=cpu TORCHDYNAMO_DISABLE=1 torchrun --nproc_per_node 3 make_deepspeed_muon.py FOLDER

Written with DeepSpeed 0.19.8 and torch 2.6.0. The first rank's momentum is as long as its partition, as a matrix ends there; that of the others is not.
The truth is what the running engine's partitions of masters and states are, and of the first the files' momentum as it is.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from make_deepspeed_frozen import objects, told
from torch import nn



class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.ParameterList([torch.randn(3, 4), torch.randn(2, 5), torch.randn(2, 4), torch.randn(2, 3)])
        self.vector = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return sum((x[:, : w.shape[1]] @ w.t()).tanh().sum(1) for w in self.matrix) + x @ self.vector


def whole(part):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, part)
    return torch.cat(out)


def save(folder, name, offload):
    torch.manual_seed(0)
    model = Model()
    for p in model.parameters():
        p.use_muon = p.ndim > 1
    conf = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 2, **offload}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward((engine(torch.randn(4, 6, generator=g)) - 1).square().mean())
        engine.step()
    path = os.path.join(folder, name)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=name, save_latest=False)
    tensors = {f"module.{k}": told(v) for k, v in engine.module.state_dict().items()}
    states = ("exp_avg", "exp_avg_sq", "momentum_buffer") if offload else ("exp_avg", "exp_avg_sq")
    for group, flat in zip(engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups):
        state = engine.optimizer.optimizer.state[flat]
        parts = {"": whole(flat.detach().clone()), **{k: whole(state[k].clone()) for k in states if k in state}}
        at = 0
        for p in group:
            param = engine.param_names[p]
            for k, v in parts.items():
                tensors[f"optimizer.state.{param}.{k}" if k else param] = told(v[at : at + p.numel()].view(p.shape))
            if "step" in state:
                tensors[f"optimizer.state.{param}.step"] = told(state["step"])
            at += p.numel()
    if dist.get_rank() == 0:
        for r in range(0 if offload else dist.get_world_size()):
            file = f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
            state = torch.load(f"{path}/{file}", weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
            key = "optimizer_state_dict.base_optimizer_state.state.0.momentum_buffer"
            tensors[f"{file}:{key}"] = told(state[0]["momentum_buffer"])
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_muon.py", "format": "deepspeed-zero2", "framework": "DeepSpeed", "warnings": 0 if offload else 3,
                       "objects": objects(path), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


def main(folder):
    deepspeed.init_distributed("gloo")
    save(folder, "z2_muon_w3", {})
    save(folder, "z2_muon_cpu_w3", {"offload_optimizer": {"device": "cpu"}})


if __name__ == "__main__":
    main(sys.argv[1])
