#!/usr/bin/env python3
"""Writes z1_fast_w2 of tests/data/deepspeed: stage 1 saved by DeepNVMe's FastFileWriter, on two ranks and gloo.

    DS_ACCELERATOR=cpu LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 torchrun --nproc_per_node 2 make_deepspeed_fast.py FOLDER

Written with DeepSpeed 0.19.8 and torch 2.15.0. Two ranks are writers ("data_parallel": "replica"), so that the model states are there twice; in place of libaio
pwrite(2) writes what the writer hands over. The truth is what the running engine says of its masters and states, and the module's own state dict.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.io import fast_file_writer
from deepspeed.runtime.model_checkpointing import writer_factory
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from make_deepspeed_frozen import objects, told
from torch import nn

NAME = "z1_fast_w2"


class Handle:
    """Of asynchronous writes."""

    def __init__(self, **_):
        pass

    def get_alignment(self):
        return 512

    def async_pwrite(self, tensor, fd, offset):
        plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        os.pwrite(plain, tensor.numpy().tobytes(), offset)
        os.close(plain)
        return 0

    def wait(self):
        return 1


class Builder:
    aio_handle = Handle
    cast_to_byte_tensor = None

    def load(self):
        return self


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    torch.Tensor.pin_memory = lambda t: t  # asks for a GPU
    writer_factory.AsyncIOBuilder = fast_file_writer.UtilsBuilder = Builder
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1},
            "checkpoint": {"writer": {"type": "fast", "io_buffer_size": 1 << 20, "data_parallel": "replica"}}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 5, generator=g)).square().mean())
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    tensors = {f"module.{k}": told(v) for k, v in engine.module.state_dict().items()}
    for name, p in model.named_parameters():
        tensors[name] = told(safe_get_full_fp32_param(p).view(p.shape))
        for state in "exp_avg", "exp_avg_sq":
            tensors[f"optimizer.state.{name}.{state}"] = told(safe_get_full_optimizer_state(p, state).view(p.shape))
        tensors[f"optimizer.state.{name}.step"] = told(torch.tensor(2.0))
    if dist.get_rank() == 0:
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_fast.py", "format": "deepspeed-zero1", "framework": "DeepSpeed",
                       "objects": objects(path, "zero_pp_rank_0_mp_rank_00_optim_states.pt-0.2", "mp_rank_00_model_states.pt-0.2"), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
