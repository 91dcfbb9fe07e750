#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what Megatron-FSDP saves, with its own code on gloo ranks: tests/data/torch_dcp/megatron_fsdp_3r (by itself, an optimizer of torch) and
tests/data/dcp_trainers/megatron_lm_fsdp_4r (Megatron-LM's --ckpt-format fsdp_dtensor: tensor parallelism 2, experts, without the optimizer).

    for RANK in 0 1 2:   make_megatron_fsdp.py FOLDER alone      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed.run sets them
    for RANK in 0 to 3:  make_megatron_fsdp.py FOLDER lm

Written with torch 2.15.0, megatron-fsdp 0.6.1 and megatron-core 0.19.2 (the wheel for Python 3.12, unpacked). It runs on a CPU: what is asked of a GPU
(streams, the current device, random states) is replaced by what does nothing, meshes of "cuda" are of "cpu".
"""
import argparse
import contextlib
import copy
import hashlib
import json
import logging
import os
import re
import sys
import types
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.device_mesh as meshes
from torch import nn

from make_verl import DTYPES

CPU = torch.device("cpu")
STEP = 10


class Stream:
    def __init__(self, *args, **kw):
        pass


class NoGpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if type(device) is int or str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def on_a_cpu():
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *args, **kw: torch.arange(16, dtype=torch.uint8)
    torch.Tensor.cuda = lambda self, *args, **kw: self
    groups = meshes.DeviceMesh.from_group
    meshes.DeviceMesh.from_group = staticmethod(lambda group, device_type, *args, **kw: groups(group, "cpu", *args, **kw))
    meshes._mesh_resources.child_to_root_mapping = {}  # asked for where a mesh has no flattened ones
    NoGpu().__enter__()


def told(t, role):
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "role": role,
            "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def write_json(path, value):
    with open(path, "w") as f:
        json.dump({"written_by": "tests/formats/make_megatron_fsdp.py", **value}, f, indent=1, sort_keys=True)
        f.write("\n")


# ---- megatron_fsdp by itself ----

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.conv = nn.Conv1d(4, 5, 2, bias=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(13, 4)
        self.block = Block()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 3).requires_grad_(False)


def fill_states(optimizer):
    """Powers of two times the parameter: exact however it is cut."""
    for p, state in optimizer.state.items():
        for name, factor in (("exp_avg", 2), ("exp_avg_sq", 4)):
            ours, of = (x._local_tensor if hasattr(x, "_local_tensor") else x for x in (state[name], p))
            ours.copy_(of * factor)


def alone(folder):
    sys.modules["megatron"] = None  # it would take classes of Megatron Core where that is there
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    torch.manual_seed(1)
    net = Net()
    whole = copy.deepcopy(net)
    mesh = meshes.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard_model(net, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp", fsdp_unit_modules=[Block], device=CPU,
                              zero_dp_strategy="optim_grads_params")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    fully_shard_optimizer(optimizer)
    reference = torch.optim.Adam(whole.parameters(), lr=0.0)
    for p in whole.parameters():
        p.grad = torch.zeros_like(p)
    reference.step()
    with torch.no_grad():
        fill_states(optimizer)
        fill_states(reference)
    path = folder + "/torch_dcp/megatron_fsdp_3r"
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    tensors = {"model.module." + k: told(v, "model") for k, v in whole.state_dict().items()}
    state = reference.state_dict()
    tensors.update({f"optimizer.state.{n}.{k}": told(v, "optimizer") for n, of in state["state"].items() for k, v in of.items()})
    objects = {"optimizer.param_groups.0." + k: {"$type": "tuple", "items": list(v)} if isinstance(v, tuple) else v
               for k, v in state["param_groups"][0].items()}
    write_json(path + ".expected.json", {"format": "torch-dcp", "tensors": tensors, "objects": objects})


# ---- Megatron-LM ----

def full_of(p, name, cut, rank, ranks, gated):
    """Gives a rank its part of a tensor that is made from its name, and returns the whole."""
    shape = list(p.shape)
    if cut is not None:
        shape[cut] *= ranks
    full = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).to(p.dtype)
    pieces = full.chunk(2) if gated else [full]
    p.copy_(full if cut is None else torch.cat([x.chunk(ranks, cut)[rank] for x in pieces]))
    return full


def fill_model(model, tp_rank, tp, first_expert):
    """The tensors of the whole model by the names that are saved."""
    wholes = {}
    for name, p in model.named_parameters():
        name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first_expert}", name)
        expert = "local_experts" in name
        rows = re.search(r"(linear_qkv|linear_fc1|word_embeddings)\.weight$", name)
        cut = 0 if rows else 1 if re.search(r"(linear_proj|linear_fc2)\.weight$", name) else None
        gated = "linear_fc1" in name
        full = full_of(p, name, cut, 0 if expert else tp_rank, 1 if expert else tp, gated).float()
        wholes.update(zip([name + "_w", name + "_v"], full.chunk(2)) if gated else [(name, full)])
    return wholes


def trainer(package):
    """megatron.training.checkpointing, without what it imports for logs and queues."""
    training = types.ModuleType("megatron.training")
    training.__path__ = [os.path.join(os.path.dirname(os.path.dirname(package.__file__)), "training")]
    sys.modules["megatron.training"] = training
    nothing = lambda *args, **kw: None  # noqa: E731
    for name, members in {"ft_integration": "on_checkpointing_start on_checkpointing_end", "wandb_utils": "on_save_checkpoint_success",
                          "global_vars": "get_args", "one_logger_utils": "on_save_checkpoint_start on_save_checkpoint_success",
                          "async_utils": "get_save_and_finalize_callbacks is_empty_async_queue schedule_async_save",
                          "utils": "append_to_progress_log is_last_rank print_rank_0"}.items():
        module = types.ModuleType("megatron.training." + name)
        module.__dict__.update(dict.fromkeys(members.split(), nothing))
        sys.modules[module.__name__] = module
        setattr(training, name, module)
    import megatron.training.checkpointing as checkpointing
    return checkpointing


def lm(folder):
    import megatron.core
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(2, 1, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tracker = {"model-parallel-rng": torch.full((16,), parallel_state.get_tensor_model_parallel_rank(), dtype=torch.uint8)}
    tensor_parallel.get_cuda_rng_tracker().states_ = tracker
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, num_query_groups=2, use_cpu_initialization=True, gated_linear_unit=True,
        activation_func=nn.functional.silu, add_bias_linear=False, normalization="RMSNorm", bf16=True, params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
        bias_dropout_fusion=False, num_moe_experts=4, moe_ffn_hidden_size=4, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False)
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"),
                     vocab_size=12, max_sequence_length=8, share_embeddings_and_output_weights=True, position_embedding_type="rope").bfloat16()
    with torch.no_grad():
        wholes = fill_model(model, parallel_state.get_tensor_model_parallel_rank(), 2, 2 * parallel_state.get_expert_model_parallel_rank())
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, wholes)
    plan = DistributedDataParallelConfig(use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params",
                                         overlap_grad_reduce=True)
    model = FullyShardedDataParallel(config, plan, Float16Module(config, model), device=CPU)
    top = folder + "/dcp_trainers/megatron_lm_fsdp_4r"
    args = argparse.Namespace(
        save=top, ckpt_format="fsdp_dtensor", use_dist_ckpt=True, async_save=False, no_save_optim=True, no_save_rng=False, swiglu=True, num_experts=4,
        use_distributed_optimizer=True, data_parallel_random_init=False, log_progress=False, tensor_model_parallel_size=2, num_layers=1)
    checkpointing = trainer(megatron.core)
    checkpointing.get_args = lambda: args
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    os.makedirs(top, exist_ok=True)
    checkpointing.save_checkpoint(STEP, [model], None, None, 123)
    tensors = {"model.module." + k: told(v, "model") for of in every for k, v in of.items()}
    for tp in range(2):
        random = {"torch_rng_state": None, "cuda_rng_state": torch.cuda.get_rng_state(),
                  # The wrapper gives all tensor ranks the first one's.
                  "rng_tracker_states.model-parallel-rng": torch.zeros(16, dtype=torch.uint8)}
        saved = {f"rng_state.(0, {tp}).0.torch_rng_state": torch.empty(5056, dtype=torch.uint8)}
        dcp.load(saved, checkpoint_id=f"{top}/iter_{STEP:07d}", planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
        random["torch_rng_state"], = saved.values()
        tensors.update({f"rng_state.(0, {tp}).0.{k}": told(v, "other") for k, v in random.items()})
    named = dcp.FileSystemReader(f"{top}/iter_{STEP:07d}").read_metadata().state_dict_metadata
    objects = dict.fromkeys(k for k, v in named.items() if not hasattr(v, "size"))
    objects.update({"iteration": STEP, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 123})
    if rank == 0:
        roles = [sum(t["role"] == role for t in tensors.values()) for role in ("model", "optimizer", "other")]
        about = {"format": "torch-dcp", "framework": "Megatron-LM", "step": STEP, "roles": roles, "objects": objects,
                 "topology": {"ranks": 4, "files": 4, "metadata_version": "1.0.0"}}
        write_json(top + ".expected.json", {"checkpoints": {f"iter_{STEP:07d}": about},
                                            "tensors": {f"iter_{STEP:07d}:{k}": t for k, t in tensors.items()}})


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    on_a_cpu()
    dist.init_process_group("gloo")
    {"alone": alone, "lm": lm}[sys.argv[2]](sys.argv[1])
    dist.barrier()
