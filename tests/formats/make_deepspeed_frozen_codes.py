#!/usr/bin/env python3
"""Writes z3_frozen_codes_w2 of tests/data/deepspeed: stage 3 with zero_quantized_nontrainable_weights, on two ranks and gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_frozen_codes.py FOLDER

Written with DeepSpeed 0.17.6 and torch 2.6.0. DeepSpeed's quantiser is a CUDA kernel: a stand-in gives what that gives, codes of 8 bits of one scale a
group, and all else is DeepSpeed's. What it saves of frozen parameters are codes alone.
"""
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from torch import nn

NAME = "z3_frozen_codes_w2"


class Quantiser:
    def quantize(self, t, groups=None):
        scale = (t.float().abs().max() / 127).reshape(1)
        return (t.float() / scale).round().clamp(-128, 127).to(torch.int8), scale

    def dequantize(self, codes, scale):
        return codes.float() * scale


def main(folder):
    partition_parameters.CUDAQuantizer = Quantiser
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True, "stage3_param_persistence_threshold": 0}}
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=conf)
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
