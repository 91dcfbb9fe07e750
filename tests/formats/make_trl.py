#!/usr/bin/env python3
"""Writes fixtures of tests/data/safetensors and torch_file: adapters that trl trained with a value head.

    make_trl.py FOLDER        FOLDER/safetensors/NAME, FOLDER/torch_file/NAME

AutoModelForCausalLMWithValueHead saves the adapter as PEFT does, and the head as pytorch_model.bin beside it, without a config.json. Written with
trl 0.23.1, peft 0.17.1, transformers 4.57.1 and torch 2.8.0; their README.md, which nobody reads here, is left out. The truth is the model in memory.
"""
import hashlib
import json
import os
import shutil
import sys
import tempfile

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from trl import AutoModelForCausalLMWithValueHead

CONFIG = dict(vocab_size=11, hidden_size=8, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def told(t):
    t = t.detach().contiguous()
    return {"dtype": {torch.float32: "F32"}[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()}


def write(root, base, safe):
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=lora)
    model.save_pretrained(root, safe_serialization=safe)
    os.remove(f"{root}/README.md")
    with open(root + ".expected.json", "w") as f:
        json.dump({"format": "hf-peft", "written_by": "tests/formats/make_trl.py", "objects": {}, "warnings": 0,
                   "tensors": {k: told(v) for k, v in get_peft_model_state_dict(model.pretrained_model).items()},
                   "inside_objects": {f"pytorch_model.bin:v_head.{k}": told(v) for k, v in model.v_head.state_dict().items()}}, f, indent=1, sort_keys=True)
        f.write("\n")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    top = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)  # adapter_config.json has the base model's path
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained("base")
        write(f"{top}/safetensors/hf_peft_value_head", "base", True)
        write(f"{top}/torch_file/adapter_value_head", "base", False)
        os.chdir("/")


if __name__ == "__main__":
    main()
