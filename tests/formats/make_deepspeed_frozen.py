#!/usr/bin/env python3
"""Writes pipe2_frozen_z1_w2 of tests/data/deepspeed: a pipeline of two stages of which parameters are frozen, on gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_frozen.py FOLDER

The truth is what the running engine says of its masters and states, and the model's own parameters and buffers. Written with DeepSpeed 0.16.9 and torch 2.6.0,
whose CPU accelerator was told to use gloo.
"""
import enum
import hashlib
import json
import os
import shutil
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

NAME = "pipe2_frozen_z1_w2"
FROZEN = ("tied_modules.", "1.w.", "2.", "3.")


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 6))

    def forward(self, x):
        return nn.functional.embedding(x, self.weight)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("pos", torch.arange(6.0))

    def forward(self, x):
        return self.norm(torch.relu(self.w(x))) + self.pos


def told(t):
    t = t.detach().contiguous()
    return {"dtype": "F32", "shape": list(t.shape), "sha256": hashlib.sha256(t.numpy().tobytes()).hexdigest()}


def truth(model, rank):
    """Of this rank's layers. A layer that is frozen as a whole, and has no buffer, has no name but its file's: it might be a tied module."""
    out = {}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        tied = name.startswith("tied_modules.")
        if tied and rank > 0:
            continue  # layer 0's, which stage 0 saves
        layer, key = ("0", name.rpartition(".")[2]) if tied else name.split(".", 1)
        out[f"layer_{int(layer):02}/{key}"] = told(t)
        if tied or layer == "3":
            continue
        out[name] = told(t if name.endswith(".pos") or name.startswith(FROZEN) else safe_get_full_fp32_param(t).view(t.shape))
        if name.endswith(".pos") or name.startswith(FROZEN):
            continue
        for state in "exp_avg", "exp_avg_sq":
            out[f"optimizer.state.{name}.{state}"] = told(safe_get_full_optimizer_state(t, state).view(t.shape))
        out[f"optimizer.state.{name}.step"] = told(torch.tensor(2.0))
    return out


def shown(v):
    """As objects.json has it."""
    if isinstance(v, dict) and not all(isinstance(k, str) for k in v):
        return {"$type": "dict", "items": [[shown(k), shown(x)] for k, x in v.items()]}
    if isinstance(v, dict):
        return {k: shown(x) for k, x in v.items()}
    if isinstance(v, list):
        return [shown(x) for x in v]
    if isinstance(v, (tuple, set)):
        return {"$type": type(v).__name__, "items": [shown(x) for x in v]}
    if v is None or type(v) in (bool, int, float, str):
        return v
    state = {"value": v.value} if isinstance(v, enum.Enum) else {"state": vars(v)}
    return {"$type": "opaque", "class": f"{type(v).__module__}.{type(v).__name__}", **state}


def objects(path, first="zero_pp_rank_0_mp_rank_00_optim_states.pt", model="mp_rank_00_model_states.pt"):
    tensors = "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments".split()
    states = "base_optimizer_state single_partition_of_fp32_groups param_slice_mappings".split()
    model = torch.load(f"{path}/{model}", weights_only=False)
    optim = torch.load(f"{path}/{first}", weights_only=False)["optimizer_state_dict"]
    out = {k: shown(v) for k, v in model.items() if k not in tensors}
    out.update({"optimizer." + k: shown(v) for k, v in optim.items() if k not in states})
    out["optimizer.param_groups"] = shown(optim["base_optimizer_state"]["param_groups"])
    return out


def main(folder):
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [TiedLayerSpec("embed", Embedding), LayerSpec(Layer), LayerSpec(Layer), LayerSpec(nn.Linear, 6, 6), LayerSpec(Layer),
              TiedLayerSpec("embed", Embedding, forward_fn=lambda m, x: x @ m.weight.t())]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda o, y: nn.functional.cross_entropy(o.view(-1, 11), y.view(-1)), partition_method="uniform")
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(FROZEN))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    conf = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=conf)
    g = torch.Generator().manual_seed(1)

    def batches():
        while True:
            yield torch.randint(0, 11, (1, 4), generator=g), torch.randint(0, 11, (1, 4), generator=g)

    for _ in range(2):
        engine.train_batch(batches())
    path = os.path.join(folder, NAME)
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag=NAME, save_latest=False)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, truth(model, rank))
    if rank == 0:
        seen = objects(path)
        seen["mp_rank_01_model_states.pt:sparse_tensor_module_names"] = seen["sparse_tensor_module_names"]
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_frozen.py", "format": "deepspeed-zero1", "framework": "DeepSpeed",
                       "objects": seen,
                       "tensors": {k: v for part in parts for k, v in part.items()}}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
