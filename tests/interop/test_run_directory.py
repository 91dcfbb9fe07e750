# SPDX-License-Identifier: MIT
"""Run directories that grow and change while they are mounted, and the cache of huggingface_hub."""
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import mounted
import truth
import writers

# One large save in a process of its own. Before torch writes `.metadata`, the last file of a save, it waits for a
# line: the half that is there can be looked at on a machine of any speed.
SAVE = """
import sys, torch, torch.distributed.checkpoint as dcp
class Halfway(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        sys.stdin.readline()
        super().finish(metadata, results)
state = {"model": {f"l{i}": torch.full((1024, 2048), float(i + 1)) for i in range(24)}}
dcp.save(state, storage_writer=Halfway(sys.argv[1]), no_dist=True)
"""


PATIENCE = 120  # seconds


def steps(mnt):
    return sorted(p.name for p in mnt.iterdir() if (p / "tensors").is_dir())


class RunDirectory(unittest.TestCase):
    def setUp(self):
        self.run_dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-run-"))
        self.addCleanup(shutil.rmtree, self.run_dir)

    def save(self, name, seed, **kw):
        state = {"model": {f"w{i}": truth.values((64, 33), seed=100 * seed + i) for i in range(4)}, "step": seed}
        dcp.save(state, checkpoint_id=str(self.run_dir / name), no_dist=True, **kw)
        return {f"model.w{i}": t for i, t in enumerate(state["model"].values())}

    def wait(self, what):
        """True when what() comes to hold. CONTRACT.md gives it a second; a machine that is busy with other tests more."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if what():
                return True
            time.sleep(0.02)
        return bool(what())

    def shows(self, step, flat):
        """Whether the file of one tensor has these bytes by now: those of a save are all shown at once."""
        try:
            return (step / "raw" / "model.w0").read_bytes() == truth.raw(flat["model.w0"])
        except OSError:
            return False

    def test_steps_show_beside_each_other(self):
        first, second = self.save("step1", 1), self.save("step2", 2)
        (self.run_dir / "run.log").write_text("loss 3.0\n")
        with mounted.mounted(self.run_dir) as mnt:
            self.assertEqual(steps(mnt), ["step1", "step2"])
            self.assertEqual((mnt / "run.log").read_text(), "loss 3.0\n")
            for name, flat in (("step1", first), ("step2", second)):
                self.assertEqual(truth.wrong_checkpoint(mnt / name, flat, truth.dcp_paths(self.run_dir / name)), [])
            third = self.save("step3", 3)
            self.assertTrue(self.wait(lambda: "step3" in steps(mnt)))
            self.assertEqual(truth.wrong_checkpoint(mnt / "step3", third, truth.dcp_paths(self.run_dir / "step3")), [])
            shutil.rmtree(self.run_dir / "step1")
            self.assertTrue(self.wait(lambda: not (mnt / "step1").exists()))

    def test_a_save_is_never_seen_half(self):
        self.save("step1", 1)
        target = self.run_dir / "step2"
        with mounted.mounted(self.run_dir) as mnt, \
                subprocess.Popen([sys.executable, "-c", SAVE, str(target)], stdin=subprocess.PIPE) as saving:
            self.addCleanup(saving.kill)
            looks, half, committed = 0, None, None  # half, committed: since when the shards, and all of it, are there
            while True:
                # In this order: what the mount shows is asked first, so that a commit between the two is no fault.
                ended = saving.poll() is not None
                names = os.listdir(mnt / "step2") if (mnt / "step2").exists() else []
                complete = (target / ".metadata").exists()
                if "tensors" in names:
                    self.assertTrue(complete, "shown before it was complete")
                    self.assertEqual(len(os.listdir(mnt / "step2" / "tensors")), 24)
                    self.assertFalse([n for n in names if n.endswith(".distcp")])
                    break
                looks += any(n.endswith(".distcp") for n in names)
                half = half or (looks and time.monotonic()) or None
                if looks > 10 and not saving.stdin.closed and time.monotonic() - half > 1.5:
                    saving.stdin.close()  # a second and a half as plain files, longer than a mount takes to look again
                committed = committed or (complete and time.monotonic()) or None
                if committed:
                    self.assertLess(time.monotonic() - committed, PATIENCE, "not shown")
                self.assertTrue(not ended or committed, "the save failed")
                time.sleep(0.01)
            self.assertEqual(saving.wait(600), 0)
            model = {k: t.clone() for k, t in safetensors.torch.load_file(mnt / "step2" / "model.safetensors").items()}
        self.assertGreater(looks, 10, "the half of the save was not looked at")
        for i in range(24):
            self.assertTrue(torch.equal(model[f"l{i}"], torch.full((1024, 2048), float(i + 1))))

    def test_overwritten_in_place_is_old_or_refused_and_new_when_opened_again(self):
        old = self.save("step", 1)
        with mounted.mounted(self.run_dir) as mnt:
            held = os.open(mnt / "step" / "raw" / "model.w0", os.O_RDONLY)
            try:
                self.assertEqual(os.pread(held, 1 << 20, 0), truth.raw(old["model.w0"]))
                new = self.save("step", 2)
                try:
                    self.assertEqual(os.pread(held, 1 << 20, 0), truth.raw(old["model.w0"]))
                except OSError as e:
                    self.assertIn(e.errno, (errno.ESTALE, errno.EIO))
            finally:
                os.close(held)
            self.assertTrue(self.wait(lambda: self.shows(mnt / "step", new)))
            self.assertEqual(truth.wrong_checkpoint(mnt / "step", new, truth.dcp_paths(self.run_dir / "step")), [])

    def test_replaced_by_a_rename(self):
        self.save("step", 1)
        with mounted.mounted(self.run_dir) as mnt:
            self.assertEqual(steps(mnt), ["step"])
            new = self.save("next", 2)
            (self.run_dir / "step").rename(self.run_dir / "gone")
            (self.run_dir / "next").rename(self.run_dir / "step")
            self.assertTrue(self.wait(lambda: self.shows(mnt / "step", new)))
            self.assertEqual(truth.wrong_checkpoint(mnt / "step", new, truth.dcp_paths(self.run_dir / "step")), [])


class HubCache(unittest.TestCase):
    """models--ORG--NAME/{refs,blobs,snapshots/REV} with links, as huggingface_hub lays it out."""

    def setUp(self):
        self.cache = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-hub-"))
        self.addCleanup(shutil.rmtree, self.cache)
        self.source = mounted.DATA / "safetensors" / "hf_single_bf16"
        self.repo = self.cache / "models--acme--tiny"
        self.snapshot = self.repo / "snapshots" / ("5" * 40)
        (self.repo / "blobs").mkdir(parents=True)
        (self.repo / "refs").mkdir()
        (self.repo / "refs" / "main").write_text("5" * 40)
        self.snapshot.mkdir(parents=True)
        for f in self.source.iterdir():
            blob = self.repo / "blobs" / hashlib.sha256(f.read_bytes()).hexdigest()
            shutil.copyfile(f, blob)
            (self.snapshot / f.name).symlink_to(os.path.relpath(blob, self.snapshot))

    def check(self, mounted_snapshot):
        import transformers
        for f in self.source.iterdir():
            self.assertEqual((mounted_snapshot / f.name).read_bytes(), f.read_bytes(), f.name)
        self.assertEqual(truth.wrong_checkpoint(mounted_snapshot, truth.safetensors_flat(self.source)), [])
        config = transformers.AutoConfig.from_pretrained(str(mounted_snapshot))
        self.assertEqual(config.model_type, "llama")

    def test_of_a_snapshot(self):
        with mounted.mounted(self.snapshot) as mnt:
            self.check(mnt)

    def test_of_a_repository(self):
        with mounted.mounted(self.repo) as mnt:
            self.check(mnt / "snapshots" / ("5" * 40))

    def test_of_the_whole_cache(self):
        with mounted.mounted(self.cache) as mnt:
            self.check(mnt / "models--acme--tiny" / "snapshots" / ("5" * 40))
