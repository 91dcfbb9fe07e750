#!/usr/bin/env python3
"""Writes autotp2_0189_z1_w2 of tests/data/deepspeed: AutoTP of DeepSpeed 0.18.9, which did not note what it left alone, on two ranks of gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_autotp_old.py FOLDER

Written with DeepSpeed 0.18.9, torch 2.15.0 and transformers 5.23.0. The truth is the model that the engine gathers itself, which is that of the masters in 32 bits, and its
states, put together as it has cut the layers.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from make_deepspeed_frozen import objects, told
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "autotp2_0189_z1_w2"


def whole(t, shape):
    """A rank's piece of a state, and the shape of all."""
    if tuple(t.shape) == tuple(shape):
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, 0 if t.shape[1:] == shape[1:] else 1)


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                                         attention_bias=True))
    model.config.base_model_tp_plan = model._tp_plan = None  # with a plan 0.18.9 notes nothing at all
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=conf)
    g = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(0, 10, (1, 8), generator=g)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    full = engine._replace_module_consolidated_state_dict()
    shapes = [{k: v.shape for k, v in full.items()} if full else None]
    dist.broadcast_object_list(shapes)
    tensors = {}
    for name, p in engine.module.named_parameters():
        for state in "exp_avg", "exp_avg_sq":
            t = safe_get_full_optimizer_state(p, state).view(p.shape)
            tensors[f"optimizer.state.{name}.{state}"] = told(whole(t, shapes[0][name]))
        tensors[f"optimizer.state.{name}.step"] = told(torch.tensor(2.0))
    if dist.get_rank() == 0:
        seen = objects(path)
        seen["mp_rank_01_model_states.pt:sparse_tensor_module_names"] = seen["sparse_tensor_module_names"]
        tensors.update({k: told(v) for k, v in full.items()} | {"module." + k: told(v) for k, v in full.items()})
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_autotp_old.py", "format": "deepspeed-zero1", "framework": "DeepSpeed",
                       "objects": seen, "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
