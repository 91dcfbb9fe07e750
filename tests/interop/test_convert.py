# SPDX-License-Identifier: MIT
"""What `unshard convert` writes, loaded by the frameworks' own loaders: the same tensors, the same objects."""
import io
import pathlib
import shutil
import tempfile
import unittest
import zipfile

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import mounted
import truth

DCP = mounted.DATA / "torch_dcp"
MODELS = mounted.DATA / "safetensors"
NESTED, FLAT = DCP / "dcp_fsdp2_adamw_3r_bf16", DCP / "dcp_fsdp2_adamw_4r_flatopt"


def bytes_of(state):
    return {k: (str(t.dtype), tuple(t.shape), truth.raw(t)) for k, t in state.items() if isinstance(t, torch.Tensor)}


def objects_of(state):
    return {k: repr(v) for k, v in state.items() if not isinstance(v, torch.Tensor)}


def load_on_rank(rank, size, path, out):
    """dcp.load into tensors that this world cuts by rows; rank 0 keeps what they are together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (size,))
    meta = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {}
    for key, m in meta.items():
        if not hasattr(m, "size"):
            continue
        zeros = torch.zeros(m.size, dtype=m.properties.dtype)
        state[key] = distribute_tensor(zeros, mesh, [Shard(0)]) if m.size else zeros
    dcp.load(state, checkpoint_id=path)
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in state.items()}
    if rank == 0:
        torch.save(whole, out)
    dist.barrier()


class Convert(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-convert-"))
        self.addCleanup(shutil.rmtree, self.dir)

    def convert(self, source, to, *options):
        dest = self.dir / f"{source.name}-{to}-{len(list(self.dir.iterdir()))}"
        mounted.run("convert", source, dest, "--to", to, *options)
        return dest

    def test_dcp_by_torch(self):
        for source in NESTED, FLAT, DCP / "dcp_mesh_2x2", DCP / "dcp_zstd_2r":
            want = truth.dcp_flat(source)
            for how in ["--ranks", "1"], ["--ranks", "7"], ["--mesh", "2x3"]:
                got = truth.dcp_flat(self.convert(source, "dcp", *how))
                self.assertEqual(bytes_of(got), bytes_of(want), (source.name, how))
                self.assertEqual(objects_of(got), objects_of(want), (source.name, how))

    def test_dcp_of_every_type(self):
        want = truth.dcp_flat(DCP / "dcp_plain_dtypes_objects")
        got = truth.dcp_flat(self.convert(DCP / "dcp_plain_dtypes_objects", "dcp", "--ranks", "2", "--drop", "other,objects"))
        self.assertGreater(len(bytes_of(got)), 20)
        self.assertEqual(bytes_of(got), {k: v for k, v in bytes_of(want).items() if k in got})

    def test_planner_data_is_what_torch_wrote(self):
        for source in NESTED, FLAT:
            want = truth.dcp_paths(source)
            self.assertEqual(truth.dcp_paths(self.convert(source, "dcp", "--ranks", "2")), want)

    def test_dcp_at_another_world_size(self):
        want = bytes_of(truth.dcp_flat(NESTED))
        there = self.convert(NESTED, "dcp", "--ranks", "5")
        for world in 2, 3:
            truth.run_ranks(world, lambda rank, size: load_on_rank(rank, size, str(there), str(self.dir / "whole.pt")))
            self.assertEqual(bytes_of(torch.load(self.dir / "whole.pt")), want)

    def test_dcp_to_torch_save(self):
        there = self.convert(NESTED, "dcp", "--mesh", "2x2")
        dcp_to_torch_save(str(NESTED), str(self.dir / "theirs.pt"))
        dcp_to_torch_save(str(there), str(self.dir / "ours.pt"))
        ours, theirs = (torch.load(self.dir / f, weights_only=False) for f in ("ours.pt", "theirs.pt"))
        self.assertEqual(ours.keys(), theirs.keys())
        self.assertEqual(bytes_of(ours["model"]), bytes_of(theirs["model"]))
        self.assertEqual(ours["optim"]["param_groups"], theirs["optim"]["param_groups"])
        for name, moments in theirs["optim"]["state"].items():
            self.assertEqual(bytes_of(ours["optim"]["state"][name]), bytes_of(moments), name)

    def test_dcp_hf_by_torch(self):
        want = safetensors_of(MODELS / "hf_sharded_f32")
        for how in ["--ranks", "3"], ["--ranks", "8", "--max-shard-size", "40K"], ["--mesh", "2x2"]:
            there = self.convert(MODELS / "hf_sharded_f32", "dcp-hf", *how)
            self.assertEqual(bytes_of(truth.hf_writer_flat(str(there))), want, how)

    def test_pt(self):
        want = safetensors_of(MODELS / "hf_safetensors_dtypes")
        there = self.convert(MODELS / "hf_safetensors_dtypes", "pt")
        for how in {}, {"mmap": True}:
            got = torch.load(there / "pytorch_model.bin", weights_only=True, **how)
            self.assertEqual(bytes_of(got), want, how)
        self.assertIsNone(zipfile.ZipFile(there / "pytorch_model.bin").testzip())
        there = self.convert(NESTED, "pt", "--drop", "objects")
        got = torch.load(there / "optimizer.pt", weights_only=True)
        self.assertEqual(bytes_of(got), {k: v for k, v in bytes_of(truth.dcp_flat(NESTED)).items() if k.startswith("optim.")})

    def test_distcp_checksums(self):
        there = self.convert(NESTED, "dcp", "--ranks", "2")
        for info in dcp.FileSystemReader(there).read_metadata().storage_data.values():
            with open(there / info.relative_path, "rb") as f:
                f.seek(info.offset)
                blob = f.read(info.length)
            with zipfile.ZipFile(io.BytesIO(blob)) as z:
                self.assertIsNone(z.testzip())

    def test_npz(self):
        want = safetensors_of(MODELS / "hf_sharded_f32")
        there = self.convert(MODELS / "hf_sharded_f32", "npz")
        self.assertIsNone(zipfile.ZipFile(there / "tensors.npz").testzip())
        with np.load(there / "tensors.npz") as got:
            self.assertEqual({k: (str(got[k].dtype), got[k].shape, got[k].tobytes()) for k in got.files},
                             {k: (d.removeprefix("torch."), s, b) for k, (d, s, b) in want.items()})

    def test_transformers(self):
        want = logits(MODELS / "hf_sharded_f32")
        there = self.convert(MODELS / "hf_sharded_f32", "dcp", "--ranks", "3")
        for how in [], ["--max-shard-size", "40K"]:
            self.assertEqual(logits(self.convert(there, "hf", *how)), want, how)
        self.assertEqual(logits(self.convert(there, "pt")), want)


def safetensors_of(path):
    state = {}
    for f in sorted(path.glob("*.safetensors")):
        state.update(safetensors.torch.load_file(f))
    return bytes_of(state)


def logits(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype="auto")
    model.eval()
    with torch.no_grad():
        return truth.raw(model(torch.arange(1, 24).reshape(1, -1)).logits)
