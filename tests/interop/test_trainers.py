# SPDX-License-Identifier: MIT
"""transformers' Trainer with its output in a mount: every byte that a run into a plain directory leaves."""
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import torch

import mounted

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "mount"))
from storagelib import names_below  # noqa: E402

# Imports once, and runs in a child of its own what each line says: the output directory, the number of steps, the
# checkpoint to go on from or "", and for how many seconds it stands still after each save.
TRAIN = """
import json, os, sys, time, torch, transformers, transformers.trainer, accelerate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

class Data(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randint(0, 64, (n, 8), generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}

class Pause(transformers.TrainerCallback):
    def __init__(self, seconds):
        self.seconds = seconds
    def on_save(self, *args, **kw):
        time.sleep(self.seconds)

def train(out, steps, resume, pause):
    transformers.set_seed(7)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                         num_key_value_heads=2, max_position_embeddings=32))
    args = TrainingArguments(output_dir=out, max_steps=steps, per_device_train_batch_size=4, save_steps=2, eval_strategy="steps", eval_steps=2,
                             save_total_limit=2, load_best_model_at_end=True, logging_steps=1, report_to=[], seed=7, use_cpu=True,
                             learning_rate=1e-2, disable_tqdm=True)
    trainer = Trainer(model=model, args=args, train_dataset=Data(64, 1), eval_dataset=Data(8, 2),
                      callbacks=[Pause(pause)])
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(out)
    trainer.save_state()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        train(*json.loads(line))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
RUNS = ((6, ""), (8, "checkpoint-6"), (4, ""))  # a run, one that goes on, and another one into the same directory
SECONDS = 600


def untimed(x):
    if isinstance(x, dict):
        return {k: untimed(v) for k, v in x.items() if not k.endswith(("runtime", "per_second"))}
    return [untimed(v) for v in x] if isinstance(x, list) else x


def files(path):
    """{path: bytes}, without what says how long something took."""
    found = {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}
    return {k: json.dumps(untimed(json.loads(v))).encode() if k.endswith("trainer_state.json") else v for k, v in found.items()}


@unittest.skipUnless(importlib.util.find_spec("accelerate"), "transformers' Trainer needs accelerate")
class Output(unittest.TestCase):
    """Runs into the same path each time, as the arguments of a run stand in its files."""

    @classmethod
    def setUpClass(cls):
        cls.top = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-trainer-"))
        cls.addClassCleanup(shutil.rmtree, cls.top, ignore_errors=True)
        cls.at = cls.top / "at"
        cls.at.mkdir()
        with open(cls.top / "log", "w") as log:
            cls.trainer = subprocess.Popen([sys.executable, "-c", TRAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                           env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        cls.want = []
        for run in RUNS:
            cls.train(*run)
            cls.want.append(files(cls.at))
        shutil.move(cls.at / "run", cls.top / "earlier")

    @classmethod
    def tearDownClass(cls):
        cls.trainer.stdin.close()
        cls.trainer.wait(SECONDS)
        cls.trainer.stdout.close()

    @classmethod
    def train(cls, steps, resume, pause=0):
        out = cls.at / "run"
        time.sleep(1.2)  # the oldest of checkpoints is told by the times of directories, unless all are of one second
        print(json.dumps([str(out), steps, resume and str(out / resume), pause]), file=cls.trainer.stdin, flush=True)
        if cls.trainer.stdout.readline() != "0\n":
            raise AssertionError((cls.top / "log").read_text()[-3000:])

    def through_the_mount(self, source, runs, want, pause=0):
        for run, files_of in zip(runs, want):
            mounted.run("mount", source, self.at, "-o", f"rw,cache_dir={self.top}/cache")
            try:
                self.train(*run, pause)
                self.assertEqual(names_below(self.at), names_below(source))
            finally:
                mounted.run("umount", self.at)
            got = files(source)
            self.assertEqual(sorted(got), sorted(files_of))
            self.assertEqual([name for name in got if got[name] != files_of[name]], [], "other bytes")

    def test_a_new_directory(self):
        source = self.top / "new"
        source.mkdir()
        self.through_the_mount(source, RUNS, self.want)

    def test_a_slow_run(self):
        """It stands still after each save, for longer than anything is held back."""
        source = self.top / "slow"
        source.mkdir()
        self.through_the_mount(source, RUNS[:1], self.want[:1], 6)

    def test_a_directory_that_is_there(self):
        (self.top / "there/run").mkdir(parents=True)
        self.through_the_mount(self.top / "there", RUNS[:1], self.want[:1])

    def test_a_directory_of_an_earlier_run(self):
        shutil.copytree(self.top / "earlier", self.top / "again/run")
        self.through_the_mount(self.top / "again", RUNS[2:], self.want[2:])


class Resume(unittest.TestCase):
    def test_the_state_of_an_optimizer_is_loaded(self):
        """As torch reads it out of the file of a step in a mount."""
        step = mounted.DATA / "hf_trainer/trainer_gpt2_ddp2_bf16/checkpoint-2"
        with mounted.mounted(step) as mnt:
            for name in ("optimizer.pt", "scheduler.pt"):
                want, got = (torch.load(p / name, weights_only=True) for p in (step, mnt))
                self.assertEqual(repr(got), repr(want), name)


if __name__ == "__main__":
    unittest.main()
