# SPDX-License-Identifier: MIT
"""What docs/using.md says of programs: each reads a mount and gets what it gets from the original."""
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile
import unittest

import numpy as np
import safetensors
import safetensors.torch
import torch

import mounted
import truth

ORIGINAL = mounted.DATA / "safetensors" / "hf_sharded_f32"
DCP = mounted.DATA / "torch_dcp" / "dcp_fsdp2_adamw_2r"


def needs(module):
    return unittest.skipUnless(importlib.util.find_spec(module), f"{module} is not installed")


def tool(name):
    return unittest.skipUnless(shutil.which(name), f"{name} is not installed")


def shards():
    """{name: tensor} of the original, by safetensors itself."""
    found = {}
    for path in sorted(ORIGINAL.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def out_of(*command, cwd=None):
    return subprocess.run([str(c) for c in command], cwd=cwd, check=True, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "LC_ALL": "C"}).stdout


class Loaders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mnt = cls.enterClassContext(mounted.mounted(ORIGINAL))
        cls.want = shards()

    def check(self, tensors):
        self.assertEqual(sorted(tensors), sorted(self.want))
        self.assertEqual([k for k in tensors if truth.raw(tensors[k]) != truth.raw(self.want[k])], [])

    def test_numpy(self):
        self.check({k: torch.from_numpy(np.load(self.mnt / f"tensors/{k}.npy", mmap_mode="r").copy()) for k in self.want})

    def test_plain_open(self):
        key = sorted(self.want)[0]
        with open(self.mnt / "raw" / key, "rb") as f:
            self.assertEqual(f.read(), truth.raw(self.want[key]))

    def test_torch(self):
        """By a mapping of raw/KEY, as torch has it for its own files."""
        for key, t in self.want.items():
            mapped = torch.from_file(str(self.mnt / "raw" / key), shared=False, size=t.numel(), dtype=t.dtype).reshape(t.shape)
            self.assertTrue(torch.equal(mapped, t), key)

    def test_safetensors(self):
        self.check(safetensors.torch.load_file(self.mnt / "model.safetensors"))
        with safetensors.safe_open(self.mnt / "model.safetensors", framework="np") as f:
            key = sorted(f.keys())[0]
            self.assertEqual(f.get_slice(key)[1:3].tobytes(), truth.raw(self.want[key][1:3].contiguous()))

    @needs("fastsafetensors")
    def test_fastsafetensors(self):
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(self.mnt / "model.safetensors")]})
        files = loader.copy_files_to_device()
        self.check({k: files.get_tensor(k).clone() for k in self.want})
        files.close()
        loader.close()

    @needs("runai_model_streamer")
    def test_runai_model_streamer(self):
        from runai_model_streamer import SafetensorsStreamer
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(self.mnt / "model.safetensors"))
            self.check({name: t.clone() for name, t in streamer.get_tensors()})

    @needs("diffusers")
    def test_diffusers_loader(self):
        from diffusers.models.model_loading_utils import load_state_dict
        self.check(load_state_dict(str(self.mnt / "model.safetensors")))

    @needs("diffusers")
    def test_diffusers_pipeline(self):
        """Its components whole, in shards, and as a variant: diffusers asks for files of its own names."""
        import diffusers
        blocks = {"block_out_channels": (32, 64), "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        unet = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, **blocks)
        pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler())
        for how in ({}, {"max_shard_size": "400KB"}, {"variant": "fp16"}):
            with self.subTest(how), tempfile.TemporaryDirectory() as t:
                pipe.save_pretrained(t, **how)
                with mounted.mounted(t) as mnt:
                    got = diffusers.DiffusionPipeline.from_pretrained(mnt, variant=how.get("variant"), disable_mmap=True)
                    found = {k: truth.raw(v) for k, v in got.unet.state_dict().items()}
                    self.assertEqual(found, {k: truth.raw(v) for k, v in unet.state_dict().items()})
                    del got

    @needs("accelerate")
    def test_accelerate_loader(self):
        from accelerate.utils import load_state_dict
        self.check(load_state_dict(str(self.mnt / "model.safetensors")))


class Tools(unittest.TestCase):
    """What a shell does with a mounted DCP checkpoint."""

    @classmethod
    def setUpClass(cls):
        cls.mnt = cls.enterClassContext(mounted.mounted(DCP))
        cls.want = json.loads(DCP.with_name(DCP.name + mounted.EXPECTED).read_text())["tensors"]

    def check_copy(self, path):
        found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in pathlib.Path(path).joinpath("raw").iterdir()}
        self.assertEqual(found, {k: t["sha256"] for k, t in self.want.items()})

    @tool("sha256sum")
    def test_sha256sum(self):
        lines = out_of("sha256sum", *sorted(os.listdir(self.mnt / "raw")), cwd=self.mnt / "raw").splitlines()
        self.assertEqual({line.split(None, 1)[1]: line.split()[0] for line in lines}, {k: t["sha256"] for k, t in self.want.items()})

    @tool("rsync")
    def test_rsync(self):
        with tempfile.TemporaryDirectory() as t:
            out_of("rsync", "-a", "--exclude", ".unshard", f"{self.mnt}/", t + "/copy/")
            self.check_copy(t + "/copy")
            self.assertEqual(out_of("rsync", "-a", "-i", "--exclude", ".unshard", f"{self.mnt}/", t + "/copy/"), "", "a second run has nothing to do")

    def test_tar(self):
        with tempfile.TemporaryDirectory() as t:
            out_of("tar", "-cf", t + "/all.tar", "-C", self.mnt, "raw", "model.safetensors")
            with tarfile.open(t + "/all.tar") as tar:
                # Debian 12's Python has no filters yet, and 3.14 wants one.
                tar.extractall(t + "/out", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            self.check_copy(t + "/out")

    def test_cp(self):
        with tempfile.TemporaryDirectory() as t:
            out_of("cp", "-a", self.mnt / "raw", t + "/raw")
            self.check_copy(t)

    def test_find_and_du(self):
        sizes = {k: os.stat(self.mnt / "raw" / k).st_size for k in self.want}
        found = out_of("find", self.mnt / "raw", "-type", "f", "-printf", "%f %s\n").splitlines()
        self.assertEqual({line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in found}, sizes)
        told = int(out_of("du", "-s", "--apparent-size", "-B1", self.mnt / "raw").split()[0])
        self.assertGreaterEqual(told, sum(sizes.values()))
        self.assertLess(told, sum(sizes.values()) + 65536)

    @unittest.skipUnless(os.geteuid() == 0, "needs root")
    def test_a_bind_mount_in_another_namespace(self):
        """As a container has it: a slave mount namespace with the mount at another place, and another root."""
        key, t = "model.emb.weight", tempfile.mkdtemp()
        script = f"mkdir -p {t}/models {t}/usr && mount --rbind {self.mnt} {t}/models && mount --rbind /usr {t}/usr && " \
                 f"ln -s usr/lib usr/lib64 usr/bin {t}/ && chroot {t} /usr/bin/sha256sum /models/raw/{key}"
        told = out_of("unshare", "-m", "--propagation", "slave", "sh", "-c", script)
        self.assertEqual(told.split()[0], self.want[key]["sha256"])
        for name in "lib", "lib64", "bin":
            os.unlink(f"{t}/{name}")
        for name in "usr", "models", "":
            os.rmdir(f"{t}/{name}")  # they are empty here: the mounts were the other namespace's
