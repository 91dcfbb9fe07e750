#!/usr/bin/env python3
"""Writes the fixtures of tests/data/pt2 with torch.export.save of the torch that is installed.

    make_pt2.py FOLDER

A folder torch_VERSION with one program of odd tensors, and what torch.export.load(...) gives: its state_dict, and its constants, which have role other.
"""
import hashlib
import json
import os
import sys
import warnings

import torch

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


class Odd(torch.nn.Module):
    """Tied weights, slices of one storage, transposed and expanded ones, buffers that are saved and not, constants."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(3, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("keep", torch.arange(5.))
        self.register_buffer("drop", torch.arange(6.) * 2, persistent=False)
        base = torch.arange(40.).reshape(5, 8)
        self.t = torch.nn.Parameter(torch.arange(6.).reshape(2, 3).t())
        self.off = torch.nn.Parameter(base[1:3, 2:5])
        self.off2 = torch.nn.Parameter(base[3:5])
        self.register_buffer("h", torch.arange(7).to(torch.bfloat16))
        self.register_buffer("z", torch.zeros(0, 3))
        self.register_buffer("sc", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("ex", torch.arange(3.).expand(2, 3))
        self.const = torch.tensor([1., 2., 3.])

    def forward(self, x):
        extra = self.t.sum() + self.off.sum() + self.off2.sum() + self.h.sum() + self.sc + self.ex.sum()
        return self.a(x) + self.b(x) + self.keep[:4] + self.drop[:4] + extra + self.const.sum() + torch.tensor([5., 6.]).sum() + self.z.sum()


def bytes_of(t):
    t = t.detach().contiguous().reshape(-1)
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def main(root):
    version = torch.__version__.split("+")[0]
    name = "torch_" + version
    folder = os.path.join(root, name)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "m.pt2")
    warnings.simplefilter("ignore")
    torch.export.save(torch.export.export(Odd().eval(), (torch.ones(2, 3),)), path)
    program = torch.export.load(path)
    tensors = {k: v for k, v in program.state_dict.items()}
    for k, v in program.constants.items():
        assert isinstance(v, torch.Tensor) and k not in tensors
        tensors[k] = v
    listed = {k: {"dtype": DTYPES[v.dtype], "shape": list(v.shape), "sha256": hashlib.sha256(bytes_of(v)).hexdigest()} for k, v in tensors.items()}
    with open(folder + ".expected.json", "w") as f:
        json.dump({"format": "torch-export", "framework": "PyTorch", "written_by": f"make_pt2.py, torch {version}", "tensors": listed, "objects": {}, "warnings": 0},
                  f, indent=1, sort_keys=True)
        f.write("\n")
    print(folder)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
