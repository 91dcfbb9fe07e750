# SPDX-License-Identifier: MIT
"""Frameworks save into a mount; what comes out of the source is loaded by frameworks without it."""
import pathlib
import shutil
import tempfile
import unittest

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers

import mounted


class SaveMount(unittest.TestCase):
    def setUp(self):
        self.source = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-save-"))
        self.addCleanup(shutil.rmtree, self.source)

    def test_save_pretrained(self):
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
        model = transformers.LlamaForCausalLM(config)
        with mounted.mounted(self.source, "rw") as mnt:
            model.save_pretrained(mnt / "one")
            model.save_pretrained(mnt / "four", max_shard_size="100KB")
        for name in ("one", "four"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(self.source / name)
            for key, want in model.state_dict().items():
                self.assertTrue(torch.equal(loaded.state_dict()[key], want), f"{name}: {key}")

    def test_numpy(self):
        with mounted.mounted(self.source, "rw,save=hf") as mnt:
            (mnt / "a/tensors").mkdir(parents=True)
            np.save(mnt / "a/tensors/plain.npy", np.arange(12.).reshape(3, 4))
            np.save(mnt / "a/tensors/odd.npy", np.asfortranarray(np.arange(24, dtype=">i4").reshape(2, 3, 4)))
            mapped = np.lib.format.open_memmap(mnt / "a/tensors/mapped.npy", mode="w+", dtype=np.float32, shape=(1000, 100))
            mapped[:] = np.arange(100000).reshape(1000, 100)
            mapped.flush()
            del mapped
        loaded = safetensors.torch.load_file(self.source / "a/model.safetensors")
        np.testing.assert_array_equal(loaded["plain"].numpy(), np.arange(12.).reshape(3, 4))
        np.testing.assert_array_equal(loaded["odd"].numpy(), np.arange(24, dtype=np.int32).reshape(2, 3, 4))
        np.testing.assert_array_equal(loaded["mapped"].numpy().ravel(), np.arange(100000, dtype=np.float32))

    def test_dcp_is_written_and_keeps_its_format(self):
        tensors = {"x.w": torch.arange(40.).reshape(10, 4), "y": torch.ones(3, 4).bfloat16()}
        with mounted.mounted(self.source, "rw", "save=dcp:ranks=4") as mnt:
            (mnt / "a").mkdir()
            safetensors.torch.save_file(tensors, mnt / "a/model.safetensors")
        self.assertEqual(self.load(tensors), 4)
        with mounted.mounted(self.source, "rw") as mnt:
            np.save(mnt / "a/tensors/x.w.npy", np.full((10, 4), 5, np.float32))
        tensors["x.w"] = torch.full((10, 4), 5.)
        self.assertEqual(self.load(tensors), 4)

    def load(self, want):
        """Compares what torch loads; returns the number of shards."""
        state = {k: torch.zeros_like(v) for k, v in want.items()}
        dcp.load(state, checkpoint_id=self.source / "a", no_dist=True)
        for key, value in want.items():
            self.assertTrue(torch.equal(state[key], value), key)
        return len(list((self.source / "a").glob("*.distcp")))


if __name__ == "__main__":
    unittest.main()
