#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/colossalai/pipeline with Colossal-AI's own HybridParallelPlugin: a Llama whose ends are tied, trained by
two stages of a pipeline, and what its loaders give.

    python -m torch.distributed.run --nproc_per_node 2 tests/formats/make_colossalai_pipeline.py FOLDER

Needs torch 2.2, transformers 4.39.3, peft 0.13.2 and colossalai 0.4.9 (pip install --no-deps). It runs on a CPU: what Colossal-AI
asks of a GPU (streams, random numbers of a device, apex, flash attention) is replaced by what does nothing.
"""
import hashlib
import json
import os
import pathlib
import shutil
import sys

import torch
import torch._dynamo  # before any module is replaced
import torch.distributed as dist
import peft  # noqa: F401
from make_colossalai import Finder
from transformers import LlamaConfig, LlamaForCausalLM

ABSENT = "apex bitsandbytes click contexttimer diffusers fabric fastapi flash_attn galore_torch google ray rpyc sentencepiece tensornvme uvicorn".split()


def on_a_cpu():
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator as A

    A.get_rng_state = lambda self, device=None: torch.get_rng_state()
    A.set_rng_state = lambda self, state, device=None: torch.set_rng_state(state)
    A.manual_seed = lambda self, seed: torch.manual_seed(seed)
    for name in "set_device synchronize empty_cache current_device".split():
        setattr(A, name, lambda self, *a, **k: None)
    dist.Backend.HCCL = "hccl"


def note(tensors, key, t):
    data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    tensors[key] = {"dtype": "F32", "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}


def expected(top, step):
    from colossalai.checkpoint_io import GeneralCheckpointIO

    tensors = {}
    config = LlamaConfig.from_pretrained(os.path.join(step, "modeling"))
    model = LlamaForCausalLM(config)
    io = GeneralCheckpointIO()
    io.load_sharded_model(model, pathlib.Path(step, "modeling", "model.safetensors.index.json"))
    for name, t in model.state_dict().items():
        note(tensors, "epoch-0_step-2:" + name, t)
    optimizer = torch.optim.AdamW(model.parameters())
    io.load_sharded_optimizer(optimizer, os.path.join(step, "optimizer", "pytorch_optim.bin.index.json"), "")
    state = optimizer.state_dict()["state"]
    for number, values in state.items():
        for name, t in values.items():
            note(tensors, f"epoch-0_step-2:state.{number}.{name}", t)
    files = len([f for f in os.listdir(os.path.join(step, "optimizer")) if "-shard-" in f])
    about = {
        "format": "colossalai",
        "framework": "Colossal-AI",
        "step": 2,
        "topology": {"optimizer_files": files, "epoch": 0},
        "warnings": 1,  # parameter 0 is in a file of each stage
        "roles": [len(model.state_dict()), 3 * len(state), 0],
        "objects": {"param_groups": None, "lr_scheduler": None, "running_states.json": {"epoch": 0, "step": 2, "sample_start_index": 4}},
    }
    with open(top + ".expected.json", "w") as f:
        json.dump({"written_by": f"colossalai 0.4.9, torch {torch.__version__.split('+')[0]}", "checkpoints": {"epoch-0_step-2": about}, "tensors": tensors},
                  f, indent=1, sort_keys=True)
        f.write("\n")


def main(folder):
    sys.meta_path.append(Finder(ABSENT))
    import colossalai
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    on_a_cpu()
    colossalai.launch_from_torch(seed=1, verbose=False)
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
                                         max_position_embeddings=8, tie_word_embeddings=True, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32", enable_fused_normalization=False,
                                                  enable_flash_attention=False, enable_jit_fused=False, make_vocab_size_divisible_by=1))
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    for n in range(2):
        x = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(n))
        booster.execute_pipeline(iter([{"input_ids": x, "labels": x}]), model, lambda o, i: o.loss, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
    top = os.path.join(folder, "pipeline")
    step = os.path.join(top, "epoch-0_step-2")
    if first:
        shutil.rmtree(top, ignore_errors=True)
        os.makedirs(step)
    dist.barrier()
    half = 1 / 1024  # MiB a file
    booster.save_model(model, os.path.join(step, "modeling"), shard=True, size_per_shard=half, use_safetensors=True)
    booster.save_optimizer(optimizer, os.path.join(step, "optimizer"), shard=True, size_per_shard=2 * half)
    booster.save_lr_scheduler(scheduler, os.path.join(step, "lr_scheduler"))
    dist.barrier()
    if first:
        with open(os.path.join(step, "running_states.json"), "w") as f:
            json.dump({"epoch": 0, "step": 2, "sample_start_index": 4}, f, indent=4)
        expected(top, step)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
