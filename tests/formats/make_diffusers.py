#!/usr/bin/env python3
"""Writes a fixture of tests/data/hf_trainer: a step of diffusers' scripts that train a LoRA (train_text_to_image_lora.py and its like).

    make_diffusers.py FOLDER

Their hook puts pytorch_lora_weights.safetensors in the place of the model into what Accelerate's save_state writes. Written with diffusers 0.42.1,
Accelerate 1.15.0, peft 0.21.2 and torch 2.15.0. The truth: peft's state dict of the model in memory, and torch.load of the other files.
"""
import hashlib
import json
import os
import shutil
import sys

import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict


def told(t):
    t = t.detach().contiguous()
    kind = {torch.float32: "F32", torch.uint8: "U8"}[t.dtype]
    return {"dtype": kind, "shape": list(t.shape), "sha256": hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}


def train():
    torch.manual_seed(0)
    model = UNet2DConditionModel(block_out_channels=(4, 8), layers_per_block=1, sample_size=4, in_channels=2, out_channels=2,
                                 down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
                                 mid_block_type=None, cross_attention_dim=6, attention_head_dim=2, norm_num_groups=2)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=3, target_modules=["to_q", "to_v"], init_lora_weights="gaussian"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, optimizer


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    root = f"{sys.argv[1]}/accelerate_diffusers_lora/checkpoint-20"
    shutil.rmtree(os.path.dirname(root), ignore_errors=True)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*train())

    def save(models, weights, folder):
        for m in models:
            lora = get_peft_model_state_dict(accelerator.unwrap_model(m))
            weights.pop()
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=lora, safe_serialization=True)

    accelerator.register_save_state_pre_hook(save)
    for _ in range(2):
        out = model(torch.ones(1, 2, 4, 4), 3, torch.ones(1, 5, 6)).sample
        accelerator.backward(out.pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(root)
    model_truth = {"model:unet." + k: told(v) for k, v in get_peft_model_state_dict(accelerator.unwrap_model(model)).items()}
    state = torch.load(f"{root}/optimizer.bin", weights_only=False)["state"]
    states = {f"optimizer.bin:state.{i}.{k}": told(v) for i, s in state.items() for k, v in s.items()}
    random = torch.load(f"{root}/random_states_0.pkl", weights_only=False)
    inside = {f"random_states_0.pkl:{k}": told(v) for k, v in random.items() if isinstance(v, torch.Tensor)}
    about = {"format": "accelerate", "framework": "Hugging Face Accelerate", "step": 20, "warnings": 0,
             "topology": {"ranks": 1, "model": "diffusers' LoRA", "optimizer": "in one file"},
             "objects": dict.fromkeys(["optimizer.bin:param_groups", "random_states_0.pkl"]),
             "roles": [len(model_truth), len(states), len(inside)]}
    with open(os.path.dirname(root) + ".expected.json", "w") as f:
        json.dump({"format": "accelerate", "written_by": "tests/formats/make_diffusers.py", "checkpoints": {"checkpoint-20": about},
                   "tensors": {"checkpoint-20/" + k: v for k, v in {**model_truth, **states, **inside}.items()}}, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    main()
