# SPDX-License-Identifier: MIT
"""Lightning's Trainer with its checkpoints in a mount: the files of a run into a plain directory, kept, written over, and resumed from."""
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import mounted

# What each line says: the directory of the checkpoints, the number of epochs, how `last` is kept, what to go on from, and
# how long it pauses after each epoch.
TRAIN = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
torch.set_num_threads(1)

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, i):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

class Pause(Callback):
    def __init__(self, seconds):
        self.seconds = seconds
    def on_train_epoch_start(self, trainer, module):
        time.sleep(self.seconds)

def train(where, epochs, last, resume, pause):
    L.seed_everything(7, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    keep = ModelCheckpoint(dirpath=where, filename="{epoch}", monitor="loss", save_top_k=2, save_last=last)
    trainer = L.Trainer(max_epochs=epochs, callbacks=[keep, Pause(pause)], logger=False, enable_progress_bar=False, enable_model_summary=False,
                        accelerator="cpu", devices=1, default_root_dir=where)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume)
    best = torch.load(keep.best_model_path, weights_only=False)
    return {"names": sorted(os.listdir(where)), "files": [n for n in sorted(os.listdir(where)) if os.path.isfile(os.path.join(where, n))],
            "epoch": trainer.current_epoch, "steps": trainer.global_step, "best": os.path.basename(keep.best_model_path), "best epoch": best["epoch"],
            "weights": [p.tolist() for p in trainer.model.parameters()]}

print(json.dumps(train(**json.loads(sys.argv[1]))))
"""
SECONDS = 1200


def train(**what):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN, json.dumps(what)], capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def names(path):
    return sorted(p.name for p in path.iterdir())


@unittest.skipUnless(importlib.util.find_spec("lightning"), "no lightning here")
class Lightning(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-lightning-"))
        self.addCleanup(shutil.rmtree, self.dir)
        self.source = self.dir / "source"
        self.source.mkdir()

    def in_both(self, last, pause, *runs):
        """The same runs into a plain directory and into a mount: what each saw and ended with, and what lies there."""
        plain, where = self.dir / "plain", "run"
        want = [train(where=str(plain), last=last, pause=0, **run) for run in runs]
        with mounted.mounted(self.source, "rw") as mnt:
            for run, w in zip(runs, want):
                self.assertEqual(train(where=str(mnt / where), last=last, pause=pause, **run), w)
            self.assertEqual(names(mnt / where), names(plain))
            subprocess.run([mounted.unshard(), "umount", str(mnt)], check=True, timeout=SECONDS)
        self.assertEqual(names(self.source / where), names(plain))
        for name in names(plain):
            a, b = self.source / where / name, plain / name
            self.assertEqual((name, a.is_symlink() and a.readlink()), (name, b.is_symlink() and b.readlink()))
            # among the state of callbacks are the paths of the run
            diff = mounted.run("diff", a, b, "--drop", "other,objects", "-o", "index=memory", check=False)
            self.assertEqual((name, diff.returncode, diff.stdout + diff.stderr), (name, 0, diff.stdout))

    def test_runs_and_goes_on(self):
        self.in_both(True, 0, {"epochs": 3, "resume": None}, {"epochs": 5, "resume": "last"})

    def test_last_is_a_link(self):
        self.in_both("link", 0, {"epochs": 3, "resume": None}, {"epochs": 4, "resume": "last"})

    def test_last_is_a_link_with_pauses(self):
        self.in_both("link", 7, {"epochs": 2, "resume": None})

    def test_with_pauses(self):
        self.in_both(True, 7, {"epochs": 2, "resume": None}, {"epochs": 3, "resume": "last"})


if __name__ == "__main__":
    unittest.main()
