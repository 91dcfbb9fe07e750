# SPDX-License-Identifier: MIT
"""Checkpoints in moto's S3 server, put there by boto3; botocore's own signer checks the signature of every request."""
import contextlib
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

import boto3
import torch
import transformers

import check_mount
import moto_s3
import mounted
import s3_server
import test_transformers
import truth

FIXTURES = ("torch_dcp/dcp_fsdp2_adamw_2r", "hf_dcp/hfdcp_row_5", "zarr/zarr2_arrays", "torch_file/composer_like",
            "safetensors/hf_sharded_f32", "olmo_core", "megatron")


class Bucket:
    """A bucket of a server of its own; `seen`: what came from us: [method, target, is the signature botocore's?]."""

    def __init__(self, name):
        self.name, self.seen, self.client, self.reader = name, [], None, None

    def read(self, lines):
        for line in lines:
            self.seen.append(json.loads(line))

    @contextlib.contextmanager
    def serve(self):
        with subprocess.Popen([sys.executable, moto_s3.__file__], stdout=subprocess.PIPE, text=True) as server:
            try:
                url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                self.reader = threading.Thread(target=self.read, args=(server.stdout,), daemon=True)
                self.reader.start()
                env = {"AWS_ENDPOINT_URL": url, "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
                       "AWS_DEFAULT_REGION": "us-east-1", **moto_s3.KEYS}
                with unittest.mock.patch.dict(os.environ, env):
                    self.client = boto3.client("s3", config=boto3.session.Config(s3={"addressing_style": "path"}))
                    self.client.create_bucket(Bucket=self.name)
                    yield self
            finally:
                server.terminate()

    def put(self, folder, prefix):
        folder = pathlib.Path(folder)
        for path in [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file()):
            key = prefix if path == folder else f"{prefix}/{path.relative_to(folder)}"
            self.client.upload_file(str(path), self.name, key)


class InDirectoryBucket(unittest.TestCase):
    """boto3 and unshard are let into the same directory bucket (S3 Express), by sessions of their own."""

    def test_boto3_is_let_in_as_we_are(self):
        name, fixture = "runs--usw2-az1--x-s3", mounted.DATA / "safetensors" / "hf_single_bf16"
        with tempfile.TemporaryDirectory(prefix="unshardfs-s3-") as root:
            shutil.copytree(fixture, f"{root}/{name}/run/step1")
            with s3_server.S3Server(root) as s3, unittest.mock.patch.dict(os.environ, s3.env(), clear=True):
                s3.region = "us-west-2"
                client = boto3.session.Session().client("s3", region_name="us-west-2")
                client.head_bucket(Bucket=name)
                listed = client.list_objects_v2(Bucket=name, Prefix="run/", Delimiter="/")
                self.assertEqual(listed["CommonPrefixes"], [{"Prefix": "run/step1/"}])
                image = client.get_object(Bucket=name, Key="run/step1/model.safetensors")["Body"].read()
                theirs = len(s3.sessions[name])
                with mounted.mounted(f"s3://{name}/run") as mnt:
                    self.assertEqual((mnt / "step1/model.safetensors").read_bytes(), image)
                self.assertEqual([c for c in s3.codes if c], [])
                self.assertGreater(len(s3.sessions[name]), theirs)


class InBucket(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.bucket = Bucket("checkpoints")
        self.addCleanup(self.check_signatures)
        self.enterContext(self.bucket.serve())

    def check_signatures(self):
        self.bucket.reader.join(120)
        self.assertTrue(self.bucket.seen)
        self.assertEqual([s for s in self.bucket.seen if not s[2]], [], "requests whose signature is not botocore's")

    def test_fixtures(self):
        done = 0
        for name in FIXTURES:
            found = [f for f in mounted.fixtures(name.split("/")[0]) if "/" not in name or f[0] == name.split("/")[1]][:2]
            self.assertTrue(found, name)
            for fixture, source, expected in found:
                self.bucket.put(source, f"all/{fixture}")
                with mounted.mounted(f"s3://checkpoints/all/{fixture}") as mnt:
                    for e in expected:
                        self.assertEqual(check_mount.main(str(mnt), [str(e)]), 0, fixture)
                done += 1
        print(f"\n{done} fixtures", end=" ")

    def test_from_pretrained_of_a_dcp_checkpoint(self):
        with tempfile.TemporaryDirectory(prefix="unshardfs-run-") as run:
            step = str(pathlib.Path(run) / "step2")
            truth.run_ranks(2, test_transformers.train, step, False, 31)
            whole = torch.load(step + ".whole.pt")
            self.bucket.put(step, "run/step2")
        trained = transformers.LlamaForCausalLM(transformers.LlamaConfig(**test_transformers.CONFIG, tie_word_embeddings=False))
        trained.load_state_dict(whole)
        listed = json.loads(mounted.run("ls", "s3://checkpoints/run/step2", "--json").stdout)["tensors"]
        self.assertEqual(len([t for t in listed if t["role"] == "model"]), len(trained.state_dict()))
        with mounted.mounted("s3://checkpoints/run") as mnt:
            weights, answer, _ = test_transformers.loaded(mnt / "step2")
        self.assertEqual(answer, truth.raw(test_transformers.logits(trained)), "logits")
        self.assertEqual([k for k, t in trained.state_dict().items() if weights[k] != truth.raw(t)], [])
        print(f"\n`unshard ls s3://checkpoints/run/step2`: {len(listed)} tensors; from_pretrained of {len(weights)} of them: equal", end=" ")

    def test_more_than_a_thousand_objects(self):
        self.bucket.put(mounted.DATA / "safetensors" / "hf_sharded_f32", "big")
        for i in range(1234):
            self.bucket.client.put_object(Bucket="checkpoints", Key=f"big/n{i:04}.txt", Body=b"%d" % i)
        with mounted.mounted("s3://checkpoints/big") as mnt:
            self.assertEqual(sum(n.startswith("n") and n.endswith(".txt") for n in os.listdir(mnt)), 1234)
            self.assertEqual((mnt / "n1233.txt").read_bytes(), b"1233")
        self.assertTrue(any("continuation-token" in target for _, target, _ in self.bucket.seen))

    def test_keys_with_odd_characters(self):
        names = ("a b", "plus+plus", "per%cent%20", "\u00e9\u4e2d\U0001f600", "q?x#y;z", "(~)!*'@:$,", "<&\"'>=")
        image = (mounted.DATA / "safetensors" / "hf_single_bf16" / "model.safetensors").read_bytes()
        for name in names:
            self.bucket.client.put_object(Bucket="checkpoints", Key=f"odd/{name}/model.safetensors", Body=image)
        with mounted.mounted("s3://checkpoints/odd") as mnt:
            self.assertEqual(set(os.listdir(mnt)), set(names))
            for name in names:
                self.assertEqual((mnt / name / "model.safetensors").read_bytes(), image, name)
        for name in names:
            found = json.loads(mounted.run("ls", f"s3://checkpoints/odd/{name}", "--json").stdout)
            self.assertTrue(found["tensors"], name)

    def test_an_object_of_several_parts(self):
        source = mounted.DATA / "safetensors" / "hf_single_bf16" / "model.safetensors"
        image = source.read_bytes()
        upload = self.bucket.client.create_multipart_upload(Bucket="checkpoints", Key="parts/model.safetensors")
        where = {"Bucket": "checkpoints", "Key": "parts/model.safetensors", "UploadId": upload["UploadId"]}
        parts = [{"PartNumber": 1, "ETag": self.bucket.client.upload_part(**where, PartNumber=1, Body=image)["ETag"]}]
        self.bucket.client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
        self.assertRegex(self.bucket.client.head_object(Bucket="checkpoints", Key="parts/model.safetensors")["ETag"], "-1\"$")
        with mounted.mounted("s3://checkpoints/parts") as mnt:
            self.assertEqual((mnt / "model.safetensors").read_bytes(), image)

    def test_an_object_that_is_replaced(self):
        """Its bytes are the old ones or an error, never both; after `refresh` the new ones."""
        old, new = b"o" * 3_000_000, b"n" * 3_000_000
        self.bucket.put(mounted.DATA / "safetensors" / "hf_single_bf16", "x")
        self.bucket.client.put_object(Bucket="checkpoints", Key="x/notes.bin", Body=old)
        with mounted.mounted("s3://checkpoints/x", "refresh=1") as mnt:
            with open(mnt / "notes.bin", "rb", buffering=0) as f:
                self.assertEqual(f.read(1000), old[:1000])
                self.bucket.client.put_object(Bucket="checkpoints", Key="x/notes.bin", Body=new)
                f.seek(2_000_000)
                try:
                    self.assertEqual(f.read(1000), old[:1000])
                except OSError as e:
                    self.assertIn(e.errno, (errno.ESTALE, errno.EIO))
            deadline = mounted.SECONDS
            while deadline:
                with contextlib.suppress(OSError):
                    if (mnt / "notes.bin").read_bytes() == new:
                        break
                deadline -= 1
                threading.Event().wait(0.5)
            self.assertTrue(deadline, "the new object never showed")


if __name__ == "__main__":
    unittest.main()
