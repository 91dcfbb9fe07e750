#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/torch_file/torch14_zip and torch14_script: the zip that torch.save of 1.4 had as an option, and its TorchScript.

    python3.8 tests/formats/make_torch14.py FOLDER        needs torch 1.4.0 and numpy
"""
import hashlib
import json
import os
import shutil
import sys

import torch

KINDS = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("counts", torch.arange(6).reshape(2, 3))

    def forward(self, x):
        return self.norm(self.fc(x)) + self.counts[0]


def shown(module, path=""):
    """The module as objects.json has it: an instance of a class of the file's own code."""
    kind = type(module)
    state = {"training": True}
    for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        state[name] = {"$type": "tensor", "key": path + name}
    for name, below in module.named_children():
        state[name] = shown(below, path + name + ".")
    where = "" if kind is Net else kind.__module__ + "."
    return {"$type": "opaque", "class": "__torch__." + where + kind.__name__, "state": state}


def expect(folder, name, tensors, **more):
    told = {k: {"dtype": KINDS[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest()}
            for k, t in tensors.items()}
    with open(os.path.join(folder, name + ".expected.json"), "w") as f:
        json.dump(dict({"written_by": "torch " + torch.__version__, "tensors": told}, **more), f, indent=1, sort_keys=True)
        f.write("\n")


def main(folder):
    torch.manual_seed(0)
    for name in ("torch14_zip", "torch14_script"):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        os.makedirs(os.path.join(folder, name))
    base = torch.randn(5, 4)
    state = {"base": base, "turned": base.t(), "rows": base[1:3], "half": torch.randn(3).half(), "one": torch.tensor(7), "none": torch.empty(0, 2),
             "bytes": torch.arange(5, dtype=torch.uint8), "yes": torch.tensor([True, False])}
    path = os.path.join(folder, "torch14_zip", "weights.pt")
    torch.save(state, path, _use_new_zipfile_serialization=True)
    expect(folder, "torch14_zip", torch.load(path), format="torch-file", objects={})
    path = os.path.join(folder, "torch14_script", "net.pt")
    net = Net()
    torch.jit.script(net).save(path)
    expect(folder, "torch14_script", torch.jit.load(path).state_dict(), format="torchscript", objects={"net.pt": shown(net)})


if __name__ == "__main__":
    main(sys.argv[1])
