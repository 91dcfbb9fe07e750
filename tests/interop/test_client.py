# SPDX-License-Identifier: MIT
"""python/unshard against the frameworks: what it gives numpy and torch is what their own loaders give."""
import importlib
import os
import pathlib
import subprocess
import sys
import unittest

import numpy as np
import torch

import mounted
import truth

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FIXTURES = ["dcp_fsdp2_adamw_2r", "dcp_fsdp_tp_strided_2x2", "dcp_layouts", "dcp_zstd_2r", "dcp_fsdp2_adamw_3r_bf16"]


def client():
    """The module, with the library that was built beside the command under test."""
    if "UNSHARD_LIBRARY" not in os.environ:
        build = pathlib.Path(mounted.unshard()).resolve().parent.parent
        os.environ["UNSHARD_LIBRARY"] = str(build / "lib" / "libunshard.so.1")
    sys.path.insert(0, str(ROOT / "python"))
    return importlib.import_module("unshard")


class Client(unittest.TestCase):
    def tensors(self, name):
        path = ROOT / "tests" / "data" / "torch_dcp" / name
        flat = {k: v for k, v in truth.dcp_flat(path).items() if isinstance(v, torch.Tensor)}
        self.assertTrue(flat)
        return path, flat

    def check(self, c, flat):
        self.assertEqual(set(flat) - set(c.keys()), set())
        for key, want in flat.items():
            got = c.load(key, to="torch")
            self.assertEqual((got.dtype, got.shape, got.device.type), (want.dtype, want.shape, "cpu"))
            self.assertEqual(truth.raw(got), truth.raw(want), key)
            array = c.load(key, to="numpy")
            self.assertEqual(array.tobytes(), truth.raw(want), key)
            if want.dtype == torch.float32:
                np.testing.assert_array_equal(array, want.resolve_neg().numpy())

    def test_dcp(self):
        for name in FIXTURES:
            with self.subTest(name):
                path, flat = self.tensors(name)
                with client().open(path) as c:
                    self.check(c, flat)

    def test_dcp_by_its_mount(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with mounted.mounted(path) as mnt, client().open(mnt) as c:
            self.check(c, flat)

    def test_parts_as_torch_cuts_them(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c:
            for key, want in flat.items():
                for dim in range(want.dim()):
                    chunks = torch.chunk(want, 3, dim)
                    for rank, chunk in enumerate(chunks):
                        self.assertEqual(truth.raw(c.load(key, tp=(rank, 3, dim), to="torch")), truth.raw(chunk), (key, dim, rank))
                if want.dim() == 2:
                    self.assertEqual(truth.raw(c.load(key, slice=np.s_[1:-1, 2], to="torch")), truth.raw(want[1:-1, 2]))

    def test_casts_as_torch_does(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c:
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
                for key, want in flat.items():
                    if want.dtype == torch.float32:
                        got = c.load(key, dtype=dtype, to="torch")
                        self.assertEqual(got.dtype, dtype)
                        self.assertEqual(truth.raw(got), truth.raw(want.to(dtype)), (key, dtype))

    def test_many_and_into(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c:
            got = c.load_many(list(flat), to="torch")
            for key, want in flat.items():
                self.assertTrue(torch.equal(got[key], want), key)
            key = "model.emb.weight"
            into = torch.empty(flat[key].shape, dtype=torch.bfloat16)
            self.assertIs(c.load_into(key, into), into)
            self.assertTrue(torch.equal(into, flat[key].to(torch.bfloat16)))
            array = np.zeros(flat[key].shape, "<f4")
            c.load_into(key, array)
            np.testing.assert_array_equal(array, flat[key].numpy())
            with self.assertRaisesRegex(ValueError, "contiguous"):
                c.load_into(key, into.t())
            with self.assertRaisesRegex(ValueError, "shape"):
                c.load_into(key, into[1:])

    def test_into_bytes(self):
        """Bytes take what numpy has no type of its own for; integers and flags are not taken for other ones."""
        with client().open(ROOT / "tests" / "data" / "safetensors" / "hf_safetensors_dtypes") as c:
            for key in c:
                info = c.info(key)
                if info.dtype.startswith("F8"):
                    array = np.zeros(info.shape, "u1")
                    self.assertEqual(c.load_into(key, array).tobytes(), c.load(key, to="numpy").tobytes())
                elif info.dtype in ("I8", "BOOL"):
                    with self.assertRaises(OSError):
                        c.load_into(key, np.zeros(info.shape, "u1"))
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c, self.assertRaisesRegex(ValueError, "contiguous"):
            c.load_into("model.emb.weight", torch.zeros(flat["model.emb.weight"].shape, dtype=torch.complex64).conj())

    def test_dlpack(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c:
            for key, want in flat.items():
                got = torch.from_dlpack(c.load(key, to="dlpack"))
                self.assertTrue(torch.equal(got, want), key)
        self.assertTrue(torch.equal(got, want))  # the checkpoint is closed, its memory is not

    def test_every_type(self):
        import safetensors
        path = ROOT / "tests" / "data" / "safetensors" / "hf_safetensors_dtypes"
        with client().open(path) as c, safetensors.safe_open(path / "model.safetensors", "pt") as f:
            for key in f.keys():
                self.assertEqual(c.load(key, to="torch").dtype, f.get_tensor(key).dtype, key)
                self.assertEqual(truth.raw(c.load(key, to="torch")), truth.raw(f.get_tensor(key)), key)

    def test_the_default_follows_what_is_imported(self):
        """torch where the program has it; numpy where it has not, which is all that is imported then."""
        path, _ = self.tensors("dcp_fsdp2_adamw_2r")
        client()
        code = f"""if True:
            import sys, unshard
            w = unshard.load({str(path)!r}, "model.emb.weight")
            assert type(w).__module__ == "numpy" and "torch" not in sys.modules, type(w)
            import torch
            assert isinstance(unshard.load({str(path)!r}, "model.emb.weight"), torch.Tensor)"""
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        self.assertEqual(subprocess.run([sys.executable, "-c", code], env=env).returncode, 0)

    @unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
    def test_on_a_device(self):
        path, flat = self.tensors("dcp_fsdp2_adamw_2r")
        with client().open(path) as c:
            got = c.load_many(list(flat), device="cuda:0", to="torch")
            for key, want in flat.items():
                self.assertEqual(got[key].device.type, "cuda")
                self.assertTrue(torch.equal(got[key].cpu(), want), key)
            half = c.load("model.emb.weight", device="cuda:0", dtype="bf16", tp=(1, 2, 0), to="torch")
            self.assertTrue(torch.equal(half.cpu(), torch.chunk(flat["model.emb.weight"], 2)[1].to(torch.bfloat16)))
            into = torch.empty(flat["model.emb.weight"].shape, device="cuda:0")
            self.assertTrue(torch.equal(c.load_into("model.emb.weight", into).cpu(), flat["model.emb.weight"]))
            array = c.load("model.emb.weight", device="cuda:0", to="dlpack")
        self.assertTrue(torch.equal(torch.from_dlpack(array).cpu(), flat["model.emb.weight"]))


if __name__ == "__main__":
    unittest.main()
