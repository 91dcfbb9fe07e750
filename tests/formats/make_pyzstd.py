#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/torch_dcp/dcp_pyzstd: blobs as torch compresses them with pyzstd, where zstandard is not installed.

    python tests/formats/make_pyzstd.py FOLDER        needs torch and pyzstd
"""
import hashlib
import json
import os
import shutil
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, _extension


def main(folder):
    _extension.zstandard = None
    path = os.path.join(folder, "dcp_pyzstd")
    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    state = {"w": torch.randn(7, 5), "zeros": torch.zeros(3000), "turned": torch.randn(4, 3).t(), "empty": torch.empty(0), "half": torch.randn(5).bfloat16(), "object": {"a": 1}}
    dcp.save(state, storage_writer=FileSystemWriter(path, _extensions=[_extension.ZStandard()]), no_dist=True)
    loaded = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in state.items() if isinstance(v, torch.Tensor)}
    dcp.load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
    tensors = {k: {"dtype": kinds[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}
               for k, t in loaded.items()}
    with open(path + ".expected.json", "w") as f:
        json.dump({"written_by": f"torch {torch.__version__.split('+')[0]}, pyzstd", "tensors": tensors, "objects": {"object.a": 1}, "format": "torch-dcp-zstd"}, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
