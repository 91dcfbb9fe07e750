#!/usr/bin/env python3
"""Writes autoep2_z2_w4 of tests/data/deepspeed: Mixtral's experts on two ranks each by AutoEP, stage 2, on four ranks and gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 4 make_deepspeed_autoep.py FOLDER

Written with DeepSpeed 0.19.8, torch 2.15.0 and transformers 5.23.0. The truth is what the running engine has: parameters, which are the masters in 32 bits, the experts
of the first two ranks one behind the other, and the partitions of its states.
"""
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_presets import base
from make_deepspeed_frozen import objects, told
from transformers import MixtralConfig, MixtralForCausalLM

NAME = "autoep2_z2_w4"
RANKS = 2


def whole(p, t):
    """Of all experts, where they are."""
    if getattr(p, "allreduce", True):
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.cat(parts[:RANKS])


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    base._install_instance_transformers_output_recorders = lambda *a, **k: False  # does not know transformers 5.23
    model = MixtralForCausalLM(MixtralConfig(vocab_size=11, hidden_size=8, intermediate_size=5, num_hidden_layers=1, num_attention_heads=2,
                                             num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2))
    conf = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "expert_parallel": {"enabled": True, "autoep_size": RANKS, "preset_model": "mixtral", "use_grouped_mm": False}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=conf)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        ids = torch.randint(0, 11, (1, 8), generator=g)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    path = os.path.join(folder, NAME)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    tensors = {}
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        copy = whole(p, p.detach().clone())
        tensors[name] = told(copy)
        if getattr(p, "allreduce", True):
            tensors[f"module.{name}"] = told(copy)
        else:
            tensors.update({f"module.{name}.{i}": told(one) for i, one in enumerate(copy)})
    zero = engine.optimizer
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
        for state in "exp_avg", "exp_avg_sq":
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, zero.optimizer.state[flat][state])
            sets = 1 if getattr(group[0], "allreduce", True) else RANKS
            flats = [torch.cat(parts[k::sets]) for k in range(sets)]
            at = 0
            for p in group:
                name = engine.param_names[p]
                tensors[f"optimizer.state.{name}.{state}"] = told(torch.cat([f[at : at + p.numel()].view(p.shape) for f in flats]))
                tensors[f"optimizer.state.{name}.step"] = told(torch.tensor(2.0))
                at += p.numel()
    if dist.get_rank() == 0:
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_autoep.py", "format": "deepspeed-zero2", "framework": "DeepSpeed",
                       "objects": objects(path), "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
