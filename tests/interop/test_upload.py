# SPDX-License-Identifier: MIT
"""Checkpoints saved to moto's S3 server, fetched by boto3, and loaded by the frameworks' own loaders."""
import pathlib
import shutil
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import mounted
import test_s3
import truth

NESTED = mounted.DATA / "torch_dcp" / "dcp_fsdp2_adamw_3r_bf16"
CONFIG = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 32000}


def tensors_of(state):
    return {k: (str(t.dtype), tuple(t.shape), truth.raw(t)) for k, t in state.items() if isinstance(t, torch.Tensor)}


class Upload(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-upload-"))
        self.addCleanup(shutil.rmtree, self.dir)
        self.bucket = test_s3.Bucket("checkpoints")
        self.addCleanup(test_s3.InBucket.check_signatures, self)
        self.enterContext(self.bucket.serve())

    def fetch(self, prefix):
        """All objects below a prefix as files; nothing else may be left of the save."""
        folder, client = self.dir / prefix, self.bucket.client
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="checkpoints"):
            for found in page.get("Contents", []):
                self.assertNotIn(".unshard-staging", found["Key"])
                if found["Key"].startswith(prefix + "/"):
                    path = self.dir / found["Key"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    client.download_file("checkpoints", found["Key"], str(path))
        self.assertEqual(client.list_multipart_uploads(Bucket="checkpoints").get("Uploads", []), [])
        return folder

    def model(self):
        """80 MB: uploads of several parts."""
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        self.assertGreater(sum(p.numel() for p in model.parameters()) * 4, 60 << 20)
        return model

    def test_dcp_by_torch(self):
        mounted.run("convert", NESTED, "s3://checkpoints/run/step1", "--to", "dcp", "--mesh", "2x2")
        there = self.fetch("run/step1")
        self.assertEqual(tensors_of(truth.dcp_flat(there)), tensors_of(truth.dcp_flat(NESTED)))
        self.assertEqual(truth.dcp_paths(there), truth.dcp_paths(NESTED))
        dcp_to_torch_save(str(there), str(self.dir / "ours.pt"))
        dcp_to_torch_save(str(NESTED), str(self.dir / "theirs.pt"))
        ours, theirs = (torch.load(self.dir / f, weights_only=False) for f in ("ours.pt", "theirs.pt"))
        self.assertEqual(tensors_of(ours["model"]), tensors_of(theirs["model"]))
        done = mounted.run("diff", NESTED, "s3://checkpoints/run/step1", check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_parts_by_torch(self):
        """A model of several parts a file, sent by two commands and a third, to DCP and back."""
        model = self.model()
        model.save_pretrained(self.dir / "model")
        to = ("convert", self.dir / "model", "s3://checkpoints/big", "--to", "dcp", "--ranks", "3")
        mounted.run(*to, "--part", "2/2")
        mounted.run(*to, "--part", "1/2")
        self.assertEqual(self.bucket.client.list_objects_v2(Bucket="checkpoints", Prefix="big/")["KeyCount"], 0)
        mounted.run(*to, "--finish")
        there = self.fetch("big")
        self.assertGreater(sum("partNumber=" in target for _, target, _ in self.bucket.seen), 8)
        state = {k: torch.zeros_like(t) for k, t in model.state_dict().items()}
        dcp.load(state, checkpoint_id=str(there), no_dist=True)
        self.assertEqual([k for k, t in model.state_dict().items() if not torch.equal(t, state[k])], [])
        mounted.run("convert", "s3://checkpoints/big", "s3://checkpoints/back", "--to", "hf", "--max-shard-size", "30MB")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(self.fetch("back"))
        self.assertEqual([k for k, t in model.state_dict().items() if not torch.equal(t, loaded.state_dict()[k])], [])

    def test_save_into_a_mounted_bucket(self):
        """What Transformers and torch write is in the bucket when their calls return, and loads from it and from the mount."""
        model = self.model()
        state = model.state_dict()
        with mounted.mounted("s3://checkpoints", "rw") as mnt:
            model.save_pretrained(mnt / "one")
            model.save_pretrained(mnt / "some", max_shard_size="20MB")
            dcp.save(state, checkpoint_id=str(mnt / "dcp"), no_dist=True)
            torch.save(state, mnt / "one.pt")
            for name in ("one", "some"):
                there = self.fetch(name)
                self.assertEqual(sorted(p.name for p in there.iterdir()), sorted(p.name for p in (mnt / name).iterdir()))
                for path in there, mnt / name:
                    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
                    self.assertEqual([k for k, t in state.items() if not torch.equal(t, loaded.state_dict()[k])], [], path)
                    del loaded
            for path in self.fetch("dcp"), mnt / "dcp":
                back = {k: torch.zeros_like(t) for k, t in state.items()}
                dcp.load(back, checkpoint_id=str(path), no_dist=True)
                self.assertEqual([k for k, t in state.items() if not torch.equal(t, back[k])], [], path)
            back = torch.load(mnt / "one.pt")
            self.assertEqual([k for k, t in state.items() if not torch.equal(t, back[k])], [])
            self.assertEqual((mnt / "dcp/raw/model.norm.weight").read_bytes(), truth.raw(state["model.norm.weight"]))
        with mounted.mounted("s3://checkpoints") as mnt:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(mnt / "some")
            self.assertEqual([k for k, t in state.items() if not torch.equal(t, loaded.state_dict()[k])], [])
            del loaded

    def test_what_is_there_is_not_written_over(self):
        self.bucket.client.put_object(Bucket="checkpoints", Key="x/.metadata", Body=b"theirs")
        done = mounted.run("convert", NESTED, "s3://checkpoints/x", "--to", "dcp", check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("is there already", done.stderr)
        self.assertEqual(self.bucket.client.get_object(Bucket="checkpoints", Key="x/.metadata")["Body"].read(), b"theirs")


if __name__ == "__main__":
    unittest.main()
