#!/usr/bin/env python3
"""Writes z2_empty_w2 of tests/data/deepspeed: stage 2 with parameters of no elements, on two ranks and gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_empty.py FOLDER

Written with DeepSpeed 0.17.6 and torch 2.6.0. All that have no elements have one address, so that DeepSpeed notes them as shared. The truth is what the
running engine says of its masters and states, and the module's own state dict.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from make_deepspeed_frozen import objects, told
from torch import nn

NAME = "z2_empty_w2"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.a = nn.Linear(4, 3)
        self.nothing = nn.Parameter(torch.zeros(5, 0))
        self.b = nn.Linear(3, 4)

    def forward(self, x):
        return self.b(self.a(x)) + self.none.sum() + self.nothing.sum()


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 4, generator=g)).square().mean())
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    tensors = {f"module.{k}": told(v) for k, v in engine.module.state_dict().items()}
    for name, p in model.named_parameters():
        full = p.numel() > 0
        tensors[name] = told(safe_get_full_fp32_param(p).view(p.shape) if full else p)
        for state in "exp_avg", "exp_avg_sq":
            tensors[f"optimizer.state.{name}.{state}"] = told(safe_get_full_optimizer_state(p, state).view(p.shape) if full else p)
        tensors[f"optimizer.state.{name}.step"] = told(torch.tensor(2.0))
    if dist.get_rank() == 0:
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_empty.py", "format": "deepspeed-zero2", "framework": "DeepSpeed",
                       "objects": objects(path), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
