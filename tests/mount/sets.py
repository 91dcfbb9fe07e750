#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checkpoints that are a file of one name in each of several directories: NeMo's ranks, one save and several, and one that comes meanwhile."""
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, UNSHARD, Mount, main, read_all, same, wait_for  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
REAL = os.path.join(DATA, "nemo", "real_train_tp2_pp2")
OURS = {".unshard", "model.safetensors", "optimizer", "raw", "tensors", "tree"}


def put(folder, name, but=()):
    """The fixture's files of all ranks under another name."""
    for rank in sorted(os.listdir(REAL)):
        os.makedirs(f"{folder}/{rank}", exist_ok=True)
        for file in os.listdir(f"{REAL}/{rank}"):
            if rank not in but:
                shutil.copy(f"{REAL}/{rank}/{file}", f"{folder}/{rank}/{name}")


def real_model(t):
    with Mount(REAL, t + "/real") as m:
        return read_all(m / "model.safetensors")


def told(*args):
    p = subprocess.run([UNSHARD, *args], capture_output=True, text=True, timeout=PATIENCE)
    return p.returncode, p.stdout + p.stderr


def test_one(t):
    put(t + "/src/checkpoints", "a.ckpt")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", set(os.listdir(m / "checkpoints")), OURS)
        same("model", read_all(m / "checkpoints/model.safetensors"), real_model(t))


def test_several(t):
    model = real_model(t)
    put(t + "/src/checkpoints", "a.ckpt")
    put(t + "/src/checkpoints", "b-last.ckpt")
    with open(t + "/src/checkpoints/notes.txt", "w") as f:
        f.write("x")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", set(os.listdir(m / "checkpoints")), {"a.ckpt", "b-last.ckpt", "notes.txt"})
        for name in ("a.ckpt", "b-last.ckpt"):
            same(name, set(os.listdir(m / f"checkpoints/{name}")), OURS)
            same("model of " + name, read_all(m / f"checkpoints/{name}/model.safetensors"), model)
        same("a rank's directory", os.path.exists(m / "checkpoints/tp_rank_00_pp_rank_000"), False)
    status, text = told("verify", "--deep", t + "/src")
    same("verify", (status, text.count("every byte read: whole")), (0, 2))
    # Called by its name, though there is no such file.
    status, text = told("info", t + "/src/checkpoints/b-last.ckpt")
    same("info", (status, "TP 2, PP 2" in text), (0, True))
    status, text = told("info", t + "/src/checkpoints/c.ckpt")
    same("none", (status, "No such file or directory" in text), (3, True))


def test_one_comes(t):
    put(t + "/src", "a.ckpt")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", set(os.listdir(m.path)), OURS)
        # NeMo 2.0's mark: what is being saved is not shown yet.
        open(t + "/src/b-unfinished", "w").close()
        put(t + "/src", "b.ckpt", but=["tp_rank_01_pp_rank_001"])
        put(t + "/src", "b.ckpt")
        os.unlink(t + "/src/b-unfinished")
        wait_for("both checkpoints", PATIENCE, lambda: set(os.listdir(m.path)) == {"a.ckpt", "b.ckpt"})
        same("the same model", read_all(m / "a.ckpt/model.safetensors"), read_all(m / "b.ckpt/model.safetensors"))


def test_a_rank_comes(t):
    """A tensor that lacks a part is refused until the part is there."""
    name = "model.language_model.encoder.layers.3.mlp.dense_4h_to_h.weight"
    put(t + "/src", "a.ckpt")
    put(t + "/src", "b.ckpt", but=["tp_rank_01_pp_rank_001"])
    with Mount(t + "/src", t + "/mnt") as m:
        whole = read_all(m / f"a.ckpt/raw/{name}")
        try:
            read_all(m / f"b.ckpt/raw/{name}")
            raise AssertionError("it was read without a part")
        except OSError:
            pass
        put(t + "/src", "b.ckpt")

        def there():
            try:
                return read_all(m / f"b.ckpt/raw/{name}") == whole
            except OSError:
                return False
        wait_for("the tensor", PATIENCE, there)


if __name__ == "__main__":
    main(globals())
