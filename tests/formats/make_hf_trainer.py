#!/usr/bin/env python3
"""Writes fixtures of tests/data/hf_trainer: checkpoints of transformers' Trainer under FSDP, on two gloo ranks.

    make_hf_trainer.py FOLDER

Trainer enters its FSDP branch on accelerators only, so the accelerator is told of FSDP by hand; all that follows is its own code, Accelerate's and
torch's. Written with transformers 5.23.0, Accelerate 1.15.0 and torch 2.15.0. The truth: torch.load of each rank's file for what only that rank has, the
flattened parameters joined from all ranks', torch's DCP loader for the optimizer.
"""
import hashlib
import json
import os
import shutil
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed._shard.sharded_tensor import ShardedTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from make_verl import DTYPES

RANKS = 2
CONFIG = dict(hidden_size=6, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=11,
              max_position_embeddings=16, tie_word_embeddings=False)


def tell_of_fsdp(plugin):
    made = Trainer.create_accelerator_and_postprocess

    def told(self):
        made(self)
        for state in (AcceleratorState._shared_state, PartialState._shared_state):
            state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, device=torch.device("cpu"))
        self.is_fsdp_enabled = True

    Trainer.create_accelerator_and_postprocess = told


def train(rank, port, folder, state_dict_type):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(RANKS), ACCELERATE_USE_CPU="1", ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    torch.manual_seed(0)
    tell_of_fsdp(FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=state_dict_type, auto_wrap_policy="transformer_based_wrap",
                                                transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
                                                sync_module_states=False, use_orig_params=True))
    text = [{"input_ids": torch.randint(0, 11, (5,)), "labels": torch.randint(0, 11, (5,))} for _ in range(8)]
    args = TrainingArguments(output_dir=folder, per_device_train_batch_size=2, max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
                             learning_rate=1e-2, optim="sgd")
    Trainer(model=LlamaForCausalLM(LlamaConfig(**CONFIG)), args=args, train_dataset=text).train()
    dist.destroy_process_group()


def told(t):
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(torch.uint8).numpy().tobytes() if t.numel() else b"").hexdigest()}


def load(path):
    """Without a process group a ShardedTensor cannot be made: its shards are enough."""
    ShardedTensor.__setstate__ = lambda self, state: setattr(self, "told", (state[0], state[1].size))
    return torch.load(path, weights_only=False)


def truth(root):
    inside, flat = {}, {}
    for rank in range(RANKS):
        name = f"pytorch_model_fsdp_rank{rank}.bin"
        for key, t in load(f"{root}/{name}").items():
            if isinstance(t, ShardedTensor):
                shards, size = t.told
                for s in shards:
                    flat.setdefault(key, torch.zeros(size))[s.metadata.shard_offsets[0]:][:s.tensor.numel()] = s.tensor
            else:
                inside[f"{name}:{key}"] = told(t)
        inside[f"rng_state_{rank}.pth:cpu"] = told(torch.load(f"{root}/rng_state_{rank}.pth", weights_only=False)["cpu"])
    reader = dcp.FileSystemReader(f"{root}/optimizer_0")
    state = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in reader.read_metadata().state_dict_metadata.items() if hasattr(m, "size")}
    if state:
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {k: told(t) for k, t in flat.items()}, {k: told(t) for k, t in state.items()}, inside


def objects(root):
    """Their names; optimizer_0 has a parameter group a parameter, as names."""
    names = list(dcp.FileSystemReader(f"{root}/optimizer_0").read_metadata().state_dict_metadata)
    return dict.fromkeys(names + ["scheduler.pt", "trainer_state.json"] + [f"rng_state_{r}.pth" for r in range(RANKS)])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    name, work = "trainer_fsdp1_local_2r", os.path.join(sys.argv[1], "work")
    shutil.rmtree(work, ignore_errors=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(train, (port, work, "LOCAL_STATE_DICT"), nprocs=RANKS)
    root = os.path.join(sys.argv[1], name)
    shutil.rmtree(root, ignore_errors=True)
    os.rename(f"{work}/checkpoint-1", root)
    shutil.rmtree(work)
    model, optimizer, inside = truth(root)
    with open(root + ".expected.json", "w") as f:
        json.dump({"format": "hf-trainer", "written_by": "tests/formats/make_hf_trainer.py", "tensors": dict(model, **optimizer, **inside),
                   "checkpoints": {"": {"format": "hf-trainer", "framework": "Hugging Face Trainer", "step": 1, "warnings": 1,
                                        "topology": {"ranks": RANKS, "epoch": 0.5, "model": "FSDP, a file a rank", "optimizer": "FSDP, sharded"},
                                        "objects": objects(root), "roles": [len(model), len(optimizer), len(inside)]}}}, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    main()
