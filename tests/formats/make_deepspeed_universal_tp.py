#!/usr/bin/env python3
"""Writes ucp_autotp2_tied_w2 of tests/data/deepspeed: a universal checkpoint of a model whose head is its embedding, on two ranks of AutoTP, on gloo.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make_deepspeed_universal_tp.py FOLDER

Written with DeepSpeed 0.19.8, torch 2.15.0 and transformers 5.23.0. Its converter makes a file of the head too, out of the first rank's part. The truth is what
the converter made of the masters and states; the head is the embedding.
"""
import json
import os
import shutil
import subprocess
import sys

import deepspeed
import torch
import torch.distributed as dist
from make_deepspeed_frozen import shown, told
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "ucp_autotp2_tied_w2"
HEAD, OWNER = "lm_head.weight", "model.embed_tokens.weight"


def truth(path):
    out = {}
    for name in os.listdir(path + "/zero"):
        if not os.path.isdir(f"{path}/zero/{name}"):
            continue
        for file in os.listdir(f"{path}/zero/{name}"):
            state, t = file[:-3], torch.load(f"{path}/zero/{name}/{file}", weights_only=False)
            t = t["param"] if isinstance(t, dict) else t
            out[f"optimizer.state.{name}.{state}" if state != "fp32" else name] = told(t)
    out[f"zero/{HEAD}/fp32.pt:param"] = out[HEAD]
    out[HEAD] = out[OWNER]
    return out


def objects(path):
    tensors = "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments".split()
    out = {k: shown(v) for k, v in torch.load(path + "/mp_rank_00_model_states.pt", weights_only=False).items() if k not in tensors}
    return out | {"optimizer." + k: shown(v) for k, v in torch.load(path + "/zero/optimizer_state.pt", weights_only=False).items()}


def main(folder):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
                                         num_key_value_heads=2, tie_word_embeddings=True))
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
    engine.save_checkpoint(folder + "/plain", tag=NAME, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{folder}/plain/{NAME}", "--output_folder", path,
                        "--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
        with open(path + ".expected.json", "w") as f:
            json.dump({"written_by": "tests/formats/make_deepspeed_universal_tp.py", "format": "deepspeed-universal", "framework": "DeepSpeed",
                       "warnings": 2, "objects": objects(path), "tensors": truth(path)}, f, indent=1, sort_keys=True)
            f.write("\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
