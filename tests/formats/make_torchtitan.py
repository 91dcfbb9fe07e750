#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes fixtures of tests/data/torch_dcp with torchtitan: its models on two gloo ranks, and under which names of transformers its own adapter puts them.

    make_torchtitan.py FOLDER        FOLDER/torch_dcp/NAME

NAME.mapped.json has the config.json of the model in transformers, and the tensors that the adapter's to_hf() gives. Written with torchtitan 0.3.0 and
torch 2.15.0.
"""
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.nn_modules import RMSNorm

from make_verl import DTYPES

DIM, VOCAB = 16, 20
SIZES = {"hidden_size": DIM, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4}


def told(t):
    t = t.detach().contiguous()
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def ends():
    """What a model has beside its layers."""
    return {"dim": DIM, "vocab_size": VOCAB, "tok_embeddings": Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM),
            "norm": RMSNorm.Config(normalized_shape=DIM), "lm_head": Linear.Config(in_features=DIM, out_features=VOCAB)}


def llama():
    layers = llama3._build_llama3_layers(n_layers=2, dim=DIM, n_heads=4, n_kv_heads=2, hidden_dim=12, attn_backend="flex",
                                         rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0))
    return llama3.Llama3Model.Config(**ends(), layers=layers), llama3.Llama3StateDictAdapter, {
        "model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 12, **SIZES}


def qwen(tied):
    layers = qwen3._build_qwen3_layers(n_layers=2, dim=DIM, n_heads=4, n_kv_heads=2, head_dim=6, hidden_dim=12, attn_backend="flex",
                                       rope=CosSinRoPE.Config(dim=6, max_seq_len=64, theta=10000.0))
    return qwen3.Qwen3Model.Config(**ends(), layers=layers, enable_weight_tying=tied), qwen3.Qwen3StateDictAdapter, {
        "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 12, "tie_word_embeddings": tied, **SIZES}


def qwen_moe():
    layers = qwen3._build_qwen3_moe_layers(n_layers=2, dim=DIM, n_heads=4, n_kv_heads=2, head_dim=6, moe_hidden_dim=12, num_experts=4, top_k=2,
                                           attn_backend="flex", moe_comm_backend="standard",
                                           rope=CosSinRoPE.Config(dim=6, max_seq_len=64, theta=10000.0))
    return qwen3.Qwen3Model.Config(**ends(), layers=layers), qwen3.Qwen3StateDictAdapter, {
        "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 6, "moe_intermediate_size": 12, "num_experts": 4, **SIZES}


def deepseek(q_rank, further):
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=2, n_dense_layers=1, dim=DIM, n_heads=4, q_lora_rank=q_rank, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
        mscale=1.0, dense_hidden_dim=12, moe_hidden_dim=6, num_experts=4, num_shared_experts=2, router_top_k=2, router_score_func="sigmoid",
        attn_backend="flex", moe_comm_backend="standard", non_blocking_capacity_factor=None, rope=ComplexRoPE.Config(dim=2, max_seq_len=64, theta=10000.0))
    more = {"mtp_layers": deepseek_v3._build_mtp_layers(layers[-1], dim=DIM, num_mtp_layers=further)}
    return deepseek_v3.DeepSeekV3Model.Config(**ends(), layers=layers, **more), deepseek_v3.DeepSeekV3StateDictAdapter, {
        "model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": q_rank or None, "n_routed_experts": 4, **SIZES}


MODELS = {"titan_llama3_2r": llama, "titan_qwen3_tied_2r": lambda: qwen(True), "titan_qwen3_moe_2r": qwen_moe,
          "titan_deepseek_v3_2r": lambda: deepseek(6, 1), "titan_deepseek_v3_plain_queries_2r": lambda: deepseek(0, 0)}


def write(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name, make in MODELS.items():
        config, adapter, hf = make()
        torch.manual_seed(0)
        model = config.build()
        with torch.no_grad():
            for i, t in enumerate([*model.parameters(), *model.buffers()]):
                if t.is_floating_point():
                    t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)))
        plain = {k: v.detach().clone() for k, v in model.state_dict().items()}
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/torch_dcp/{name}")
        if rank == 0:
            mapped = adapter(config, None).to_hf(dict(plain))
            for suffix, members in ((".expected.json", {"format": "torch-dcp", "tensors": {k: told(t) for k, t in plain.items()}}),
                                    (".mapped.json", {"config": hf, "tensors": {k: told(t) for k, t in mapped.items()}})):
                with open(f"{folder}/torch_dcp/{name}{suffix}", "w") as f:
                    json.dump({"written_by": "tests/formats/make_torchtitan.py", **members}, f, indent=1, sort_keys=True)
                    f.write("\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1] + "/torch_dcp", exist_ok=True)
    mp.start_processes(write, args=(2, 29571, sys.argv[1]), nprocs=2, join=True, start_method="fork")
