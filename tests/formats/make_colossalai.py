#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/colossalai/booster with Colossal-AI's own checkpoint IO, and what its loaders give.

    python tests/formats/make_colossalai.py FOLDER

Needs torch, and colossalai 0.4.9 (pip install --no-deps): what else it imports is replaced by empty modules, and the
writer of tensornvme, which only does the same later, by one that writes at once.
"""
import ctypes
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
import types

import torch
import torch._dynamo  # before any module is replaced

ABSENT = ("accelerate bitsandbytes click contexttimer diffusers einops fabric fastapi galore_torch google peft psutil pydantic ray rich "
          "rpyc sentencepiece tensornvme transformers uvicorn").split()


class Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of these names are there, with whatever is asked of them, and do nothing."""

    def __init__(self, absent):
        self.absent = absent

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.absent else None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


class Writer:
    """tensornvme.async_file_io.AsyncFileWriter, as far as it is used."""

    def __init__(self, path, **_):
        self.file, self.offset = open(path, "wb"), 0

    def write(self, data):
        self.file.write(data)
        self.file.flush()
        self.offset += len(data)

    def register_h2d(self, count):
        pass

    def sync_before_step(self):
        pass

    synchronize = sync_before_step

    def write_tensor(self, tensor, pinned=None):
        self.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))


def main(folder):
    sys.meta_path.append(Finder(ABSENT))
    from colossalai.checkpoint_io import general_checkpoint_io, utils
    from colossalai.utils import safetensors
    safetensors.AsyncFileWriter = Writer
    pin = lambda state, **_: torch.utils._pytree.tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, state)
    utils.create_pinned_state_dict = general_checkpoint_io.create_pinned_state_dict = pin
    io = general_checkpoint_io.GeneralCheckpointIO()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 5), torch.nn.Linear(5, 5).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    half = 7 * 11 * 4 / 1024 / 1024  # MiB a file
    top = os.path.join(folder, "booster")
    shutil.rmtree(top, ignore_errors=True)
    step = os.path.join(top, "epoch-0_step-7")  # as the applications' save_checkpoint has it
    io.save_sharded_model(model, os.path.join(step, "modeling"), max_shard_size=half)
    io.save_sharded_optimizer(optimizer, os.path.join(step, "optimizer"), True, None, half)
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(), os.path.join(step, "lr_scheduler"))
    with open(os.path.join(step, "running_states.json"), "w") as f:
        json.dump({"epoch": 0, "step": 7, "sample_start_index": 56}, f, indent=4)
    io.save_sharded_optimizer(optimizer, os.path.join(top, "prefix"), True, "second", half)
    io.save_sharded_optimizer(optimizer, os.path.join(top, "async"), True, None, half, use_async=True)

    def note(tensors, path, key, t):
        data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[t.dtype]
        tensors[f"{path}:{key}"] = {"dtype": kind, "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}

    tensors = {}
    for path in ("epoch-0_step-7/optimizer", "prefix", "async"):
        place = os.path.join(top, path)
        files = [os.path.join(place, f) for f in sorted(os.listdir(place)) if "-0000" in f]
        for state in utils.load_state_dict_shards(files, True, False):
            for number, states in state.items():
                for name, t in states.items():
                    note(tensors, path.split("/")[0], f"state.{number}.{name}", t)
    place = os.path.join(step, "modeling")
    files = [os.path.join(place, f) for f in sorted(os.listdir(place)) if "-0000" in f]
    for state in utils.load_state_dict_shards(files, False, False):
        for name, t in state.items():
            note(tensors, "epoch-0_step-7", name, t)
    about = {"format": "colossalai", "framework": "Colossal-AI"}
    expected = {
        "written_by": f"colossalai 0.4.9, torch {torch.__version__.split('+')[0]}",
        "checkpoints": {
            "epoch-0_step-7": {**about, "step": 7, "topology": {"optimizer_files": 4, "epoch": 0}, "roles": [6, 18, 0],
                               "objects": {"param_groups": None, "lr_scheduler": None, "running_states.json": {"epoch": 0, "step": 7, "sample_start_index": 56}}},
            "prefix": {**about, "topology": {"optimizer_files": 4}, "roles": [0, 18, 0], "objects": {"param_groups": None}},
            "async": {**about, "topology": {"optimizer_files": 4}, "roles": [0, 18, 0], "objects": {"param_groups": None}},
        },
        "tensors": tensors,
    }
    with open(top + ".expected.json", "w") as f:
        json.dump(expected, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
