#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Made tests/data/wrapped_names with torch 2.15: names with parts that wrappers of modules left, and tensors beside the model."""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def ramp(n):
    return torch.arange(n, dtype=torch.float32)


out = sys.argv[1]
os.makedirs(out, exist_ok=True)
model = {"_orig_mod.layers.0._checkpoint_wrapped_module.w": ramp(3), "_orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.b": ramp(2),
         "_orig_mod.a.module": ramp(4), "_orig_mod.norm": ramp(5)}
torch.save({"model": model, "step": torch.tensor(7), "best_val_loss": torch.tensor(0.5), "ema": {k: v + 1 for k, v in model.items()},
            "optimizer": {"state": {0: {"exp_avg": ramp(3)}}}}, out + "/beside.pt")
torch.save({"model": {"module.x": ramp(3), "x": ramp(2), "module.y": ramp(1)}}, out + "/collide.pt")
dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
dcp.save({"model": model, "step": torch.tensor(7), "ema": {"x": ramp(3)}, "optim": {"s": ramp(2)}}, checkpoint_id=out + "/dcp")
