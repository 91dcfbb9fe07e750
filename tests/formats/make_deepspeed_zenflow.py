#!/usr/bin/env python3
"""Writes z2_zenflow_w2 of tests/data/deepspeed: stage 2 with ZenFlow between two selections, on two ranks and gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_zenflow.py FOLDER

Written with DeepSpeed 0.19.8 and torch 2.6.0. The truth is what the running engine's partitions of masters and states are, and its copy, which is ahead of them.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from make_deepspeed_quantised import told, whole, with_state
from torch import nn

NAME = "z2_zenflow_w2"


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    zenflow = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 4, "update_interval": 2, "overlap_step": False, "offload": False,
               "full_warm_up_rounds": 0}
    conf = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8, generator=g).bfloat16()).float().square().mean())
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    tensors = {f"module.{k}": told(v) for k, v in engine.module.state_dict().items()}
    behind = 0
    for group, flat in zip(engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups):
        state = engine.optimizer.optimizer.state[flat]
        parts = {k: whole(v.detach().clone()) for k, v in {"": flat, **state}.items() if torch.is_tensor(v) and v.numel() == flat.numel()}
        at = 0
        for p in group:
            for k, v in parts.items():
                name = engine.param_names[p]
                tensors[f"optimizer.state.{name}.{k}" if k else name] = told(v[at : at + p.numel()].view(p.shape))
            behind += int((parts[""][at : at + p.numel()].view(p.shape).bfloat16() != p).sum())
            at += p.numel()
    if dist.get_rank() == 0:
        print("behind the copy:", behind)
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_zenflow.py", "format": "deepspeed-zero2", "framework": "DeepSpeed", "warnings": 1,
                       "objects": with_state(path), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
