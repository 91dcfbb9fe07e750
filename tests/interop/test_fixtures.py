# SPDX-License-Identifier: MIT
"""Every fixture of tests/data through a mount: against the stored hashes, and what its framework loads here and now."""
import contextlib
import hashlib
import io
import json
import pathlib
import unittest

import safetensors.torch
import torch

import check_mount
import mounted
import truth

# What torch 2.15 itself cannot read back, or reads only rank by rank: the stored hashes stand alone.
HASHES_ONLY = {"dcp_safetensors_fmt", "dcp_rank_local_3r"}
# Modules that later versions of torch have still, and whose classes their reader refuses.
HASHES_ONLY |= {"dcp_torch113_2r"}
# Files of torch.save whose keys are more than paths of dicts and lists: modules, parts of sparse tensors, equal paths, roles and
# wrappers that only such files have.
HASHES_ONLY |= {"composer_like", "dtensor", "math", "module", "module_legacy", "odd_layouts", "pt_zip_quantized_sparse", "same_key",
                "module_lstm", "module_unsaved", "module_unsaved_p4", "path_keys", "reconstructed", "script_frozen", "script_lists",
                "storages", "subclass", "wrapper"}
# OLMo-core's own class is in their .metadata, and torch's reader unpickles it: it needs that package.
HASHES_ONLY |= {"v30-few-w1", "v30-odd-flat-w3", "v30-odd-unflat-w3", "v30-state-dict-w4"}
# Classes of torchao, which is not installed.
HASHES_ONLY |= {"dcp_float8_held_3r", "dcp_own_class_2r", "float8_held"}
# An adapter with its value head in a file of its own.
HASHES_ONLY |= {"adapter_value_head", "hf_peft_value_head"}
# Of torch 1.4, whose zip no later version reads, and of whose scripts torch 2.15 gives no buffers.
HASHES_ONLY |= {"torch14_zip", "torch14_script"}


def sha256(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def framework_reads(name, path):
    """({key: tensor or object}, planner_data), or None where the framework has no reader."""
    if name in HASHES_ONLY:
        return None
    if (path / ".metadata").exists():
        return truth.dcp_flat(path), truth.dcp_paths(path)
    if name.startswith("hfdcp"):
        shards = path / "sharded" if (path / "sharded").exists() else path
        return truth.hf_writer_flat(shards), None
    if path.parent.name == "torch_file":
        return truth.torch_flat(path)
    return truth.safetensors_flat(path), None


class Fixtures(unittest.TestCase):
    maxDiff = None

    def check(self, name, path, expected):
        with mounted.mounted(path) as mnt:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                status = check_mount.main(str(mnt), [str(e) for e in expected])
            self.assertEqual(status, 0, said.getvalue())
            self.check_framework(name, path, mnt)
            self.check_single_file(path, mnt)
            self.check_side_files(path, mnt)

    def check_framework(self, name, path, mnt):
        read = framework_reads(name, path)
        if read is None:
            return
        flat, paths = read
        self.assertTrue(any(isinstance(v, torch.Tensor) for v in flat.values()))
        if (path / "adapter_config.json").exists():
            self.assertEqual(truth.wrong_whole(mnt / "adapter_model.safetensors", flat), [])
            self.assertEqual(truth.wrong_tensors(mnt, flat), [])
        else:
            self.assertEqual(truth.wrong_checkpoint(mnt, flat, paths), [])

    def check_single_file(self, path, mnt):
        """A source that is one file with this very content is served as it is."""
        for whole in ("model.safetensors", "adapter_model.safetensors"):
            if (path / whole).exists() and len(list(path.glob("*.safetensors"))) == 1:
                self.assertEqual(sha256(mnt / whole), sha256(path / whole))

    def check_side_files(self, path, mnt):
        for side in path.glob("*.json"):
            if not side.name.endswith(".index.json"):
                self.assertEqual((mnt / side.name).read_bytes(), side.read_bytes(), side.name)
        objects = json.loads((mnt / ".unshard" / "objects.json").read_text(encoding="utf-8"))
        self.assertIsInstance(objects, dict)


def claim(name, path, expected):
    def test(self):
        self.check(name, path, expected)
    return test


for fixture in mounted.fixtures("torch_dcp", "safetensors", "torch_file"):
    setattr(Fixtures, "test_" + fixture[0], claim(*fixture))
del fixture
