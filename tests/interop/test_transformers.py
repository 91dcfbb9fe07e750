# SPDX-License-Identifier: MIT
"""transformers.from_pretrained on a mount gives the model that it gives on the original, or that was trained."""
import json
import pathlib
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
import transformers

import mounted
import truth

MODELS = mounted.DATA / "safetensors"
IDS = torch.arange(1, 24).reshape(1, -1)
CONFIG = {"vocab_size": 101, "hidden_size": 36, "intermediate_size": 55, "num_hidden_layers": 3, "num_attention_heads": 6,
          "num_key_value_heads": 2, "max_position_embeddings": 64}


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


def loaded(path):
    """({name: bytes}, logits, config) of what from_pretrained gives; nothing of it maps the file any more."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype="auto")
    config = model.config.to_dict() | {"_name_or_path": ""}
    return {k: truth.raw(t) for k, t in model.state_dict().items()}, truth.raw(logits(model)), config


class OfOriginals(unittest.TestCase):
    maxDiff = 2000

    def check(self, name):
        with mounted.mounted(MODELS / name) as mnt:
            ours, theirs = loaded(mnt), loaded(MODELS / name)
            self.assertEqual(ours[0].keys(), theirs[0].keys())
            self.assertEqual([k for k in ours[0] if ours[0][k] != theirs[0][k]], [])
            self.assertEqual(ours[1], theirs[1], "logits")
            self.assertEqual(ours[2], theirs[2])

    def test_tokenizer(self):
        with mounted.mounted(MODELS / "hf_single_bf16") as mnt:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(mnt))
            self.assertEqual(tokenizer("w1 w7 w90")["input_ids"], [4, 10, 93])


def claim(name):
    return lambda self: self.check(name)


for model in ("hf_single_bf16", "hf_sharded_f32", "hf_tied_single", "hf_tied_sharded", "hf_gpt2_prefix"):
    setattr(OfOriginals, "test_" + model, claim(model))
del model


def train(rank, world, path, tied, seed):
    """Two steps of AdamW on an FSDP2-sharded Llama, saved as trainers do."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        torch.manual_seed(seed + 10 * step + rank)
        model(torch.randint(0, 101, (2, 9))).logits.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=path)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in weights.items()}
    if rank == 0:
        torch.save(whole, path + ".whole.pt")
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = "float32"
        config.save_pretrained(path)


class OfTrainedModels(unittest.TestCase):
    def check(self, world, tied):
        with tempfile.TemporaryDirectory(prefix="unshardfs-run-") as run:
            step = str(pathlib.Path(run) / "step2")
            truth.run_ranks(world, train, step, tied, 7 * world + tied)
            trained = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=tied))
            trained.load_state_dict(torch.load(step + ".whole.pt"))
            with mounted.mounted(run) as mnt:
                weights, answer, _ = loaded(mnt / "step2")
                self.assertEqual(answer, truth.raw(logits(trained)), "logits")
                self.assertEqual([k for k, t in trained.state_dict().items() if weights[k] != truth.raw(t)], [])
                flat = truth.dcp_flat(step)
                self.assertTrue(any(k.startswith("optim.state.") for k in flat))
                self.assertEqual(truth.wrong_checkpoint(mnt / "step2", flat, truth.dcp_paths(step)), [])
                objects = json.loads((mnt / "step2" / ".unshard" / "objects.json").read_text(encoding="utf-8"))
                self.assertEqual(objects["step"], 2)

    def test_fsdp2_on_two_ranks(self):
        self.check(2, False)

    def test_fsdp2_on_three_ranks_with_tied_embeddings(self):
        self.check(3, True)
