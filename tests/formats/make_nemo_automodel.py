#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes fixtures of tests/data/nemo_automodel: pipelines and expert parallelism by NeMo AutoModel's own code, on gloo ranks.

    make_nemo_automodel.py FOLDER        FOLDER/nemo_automodel/NAME/epoch_0_step_2

What ranks hand to the checkpointer, full, is held against what the framework's readers load from the files; that is NAME.expected.json. Written with
nemo-automodel 0.7.0, torch 2.10.0 and transformers 5.18.0.
"""
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from nemo_automodel.components.checkpoint import checkpointing
from nemo_automodel.components.checkpoint._backports.hf_storage import _HuggingFaceStorageReader
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh
from nemo_automodel.components.distributed.pipelining.functional import split_model_into_stages
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from nemo_automodel.components.moe.parallelizer import parallelize_model
from torch.distributed.tensor import DTensor


SIZES = {"vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def told(t):
    t = t.detach().contiguous()
    return {"dtype": {torch.float32: "F32"}[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def dense():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=14, tie_word_embeddings=True))


def moe():
    config = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=14, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, head_dim=6,
                                         tie_word_embeddings=False, dtype=torch.float32)
    config.torch_dtype = torch.float32
    return Qwen3MoeForCausalLM(config, backend=BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch",
                                                             rope_fusion=False, enable_hf_state_dict_adapter=True, enable_fsdp_optimizations=False))


class Momentum(torch.optim.Optimizer):
    """SGD with few settings, each of which is an object a parameter in the files."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum_buffer"] = p.grad.clone()


# Ranks, ranks that share experts, the model.
CASES = {"nemo_pp_tied": (2, 1, dense), "nemo_pp_ep": (4, 2, moe)}


def flat(state, at=""):
    out = {}
    for k, v in state.items():
        if isinstance(v, dict):
            out.update(flat(v, f"{at}{k}."))
        elif isinstance(v, torch.Tensor):
            out[at + k] = v
    return out


def full(state):
    """What all ranks hand over, by name."""
    mine = {k: told(v.full_tensor() if isinstance(v, DTensor) else v) for k, v in sorted(flat(state).items())}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {k: v for one in every for k, v in one.items()}


def load(folder, reader):
    metadata = reader.read_metadata()
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.state_dict_metadata.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=folder, storage_reader=reader, no_dist=True)
    return {k: told(v) for k, v in state.items()}


def write(rank, world, experts, make, name, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29573")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.cuda.current_device = lambda: 0  # models ask for it, also where all is on the CPU
    mesh, moe_mesh = _create_fsdp2_device_mesh(ParallelismSizes(pp_size=2, ep_size=experts), world_size=world)
    model = make()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    for key, p in model.named_parameters():
        p.requires_grad = experts == 1 or "self_attn" not in key  # frozen ones have no state: fewer small objects
    adapter = getattr(model, "state_dict_adapter", None)
    names = list(adapter.to_hf(model.state_dict()) if adapter else model.state_dict())
    stages, parts = split_model_into_stages(model, mesh["pp"], "pp", "1f1b", torch.device("cpu"), patch_inner_model=False, patch_causal_lm_model=False)
    for part in parts:
        part._pre_shard_hf_state_dict_keys = names
        if adapter:
            parallelize_model(part, mesh, moe_mesh, dp_axis_names=("dp_shard_cp",), ep_axis_name="ep")
    optimizers = [Momentum([p for p in part.parameters() if p.requires_grad]) for part in parts]
    for part, optimizer in zip(parts, optimizers):
        for p in part.parameters():
            p.grad = p.detach() * 0.5 if p.requires_grad else None
        optimizer.step()
    seen, save = {}, checkpointing.Checkpointer._do_save

    def save_and_see(self, state, path, *rest):
        seen[os.path.basename(path)] = full(state)
        return save(self, state, path, *rest)

    checkpointing.Checkpointer._do_save = save_and_see
    step = f"{folder}/nemo_automodel/{name}/epoch_0_step_2"
    config = checkpointing.CheckpointingConfig(checkpoint_dir=os.path.dirname(step), model_save_format="safetensors", model_cache_dir="/nowhere",
                                               model_repo_id="none/none", save_consolidated=False)
    checkpointer = checkpointing.Checkpointer(config, dp_rank=rank % (world // 2), tp_rank=0, pp_rank=mesh["pp"].get_local_rank(), moe_mesh=moe_mesh,
                                              pp_group=mesh["pp"].get_group())
    os.makedirs(step, exist_ok=True)
    checkpointer.save_model(parts, step)
    checkpointer.save_optimizer(optimizers, parts, step, optimizer_part_ids=[s.stage_index for s in stages])
    dist.barrier()
    if rank == 0:
        loaded = {"model": load(step + "/model", _HuggingFaceStorageReader(step + "/model")),
                  "optim": load(step + "/optim", dcp.FileSystemReader(step + "/optim"))}
        assert loaded == seen, "what was saved is not what is loaded"
        tensors = {f"epoch_0_step_2/{part}:{k}": v for part, all in loaded.items() for k, v in all.items()}
        with open(f"{folder}/nemo_automodel/{name}.expected.json", "w") as f:
            json.dump({"format": "nemo-automodel", "written_by": "tests/formats/make_nemo_automodel.py", "tensors": tensors}, f, indent=1, sort_keys=True)
            f.write("\n")
        os.remove(step + "/model/consolidate.sh")  # it has the path of where it was written
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name, (world, experts, make) in CASES.items():
        os.makedirs(f"{sys.argv[1]}/nemo_automodel/{name}", exist_ok=True)
        mp.start_processes(write, args=(world, experts, make, name, sys.argv[1]), nprocs=world, join=True, start_method="fork")
