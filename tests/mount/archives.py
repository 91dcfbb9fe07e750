#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checkpoints in tar archives: tensors and side files of .nemo, plain and packed, alone, several, and replaced."""
import io
import json
import os
import shutil
import sys
import tarfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, main, read_all, same, wait_for  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
NEMO = os.path.join(DATA, "nemo")
OURS = {".unshard", "model.safetensors", "raw", "tensors", "tree"}
SIDE = {"model_config.yaml", "0123456789abcdef_vocab.txt"}


def archive_of(name):
    return os.path.join(NEMO, name, "tiny.nemo")


def pack(path, members, mode="w:"):
    with tarfile.open(path, mode) as t:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))


def weights():
    with tarfile.open(archive_of("nemo_plain")) as t:
        return t.extractfile("./model_weights.ckpt").read()


def check_top(path):
    same("top", set(os.listdir(path)), OURS | SIDE)
    same("config", read_all(os.path.join(path, "model_config.yaml")), b"target: tiny\n")
    same("vocabulary", read_all(os.path.join(path, "0123456789abcdef_vocab.txt")), b"a\nb\n")
    same("its mode", os.stat(os.path.join(path, "model_config.yaml")).st_mode & 0o222, 0)
    same("step", read_all(os.path.join(path, "raw/step")), (7).to_bytes(8, "little"))


def test_alone_in_a_folder(t):
    for name in ("nemo_plain", "nemo_gz"):
        with Mount(os.path.join(NEMO, name), t + "/mnt") as m:
            check_top(m.path)


def test_the_file_itself(t):
    shutil.copy(archive_of("nemo_gz"), t + "/x.nemo")
    pack(t + "/other.nemo", {"readme": b"not this one"})
    with Mount(t + "/x.nemo", t + "/mnt") as m:
        check_top(m.path)


def test_several(t):
    os.mkdir(t + "/src")
    for name in ("nemo_plain", "nemo_gz"):
        shutil.copy(archive_of(name), f"{t}/src/{name}.nemo")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", set(os.listdir(m.path)), {"nemo_plain.nemo", "nemo_gz.nemo"})
        for name in ("nemo_plain", "nemo_gz"):
            check_top(m / f"{name}.nemo")
        same("the same model", read_all(m / "nemo_gz.nemo/model.safetensors"), read_all(m / "nemo_plain.nemo/model.safetensors"))


def test_folders_in_it(t):
    os.mkdir(t + "/src")
    pack(t + "/src/x.nemo", {"./model_weights.ckpt": weights(), "./tokenizer/vocab.txt": b"x", "./tokenizer/more/y": b"yy"}, "w:gz")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", set(os.listdir(m.path)), OURS | {"tokenizer"})
        same("folder", sorted(os.listdir(m / "tokenizer")), ["more", "vocab.txt"])
        same("file", read_all(m / "tokenizer/more/y"), b"yy")


def test_replaced(t):
    os.mkdir(t + "/src")
    pack(t + "/src/x.nemo", {"./model_weights.ckpt": weights(), "./a": b"old"})
    with Mount(t + "/src", t + "/mnt") as m:
        same("before", read_all(m / "a"), b"old")
        pack(t + "/new", {"./b": b"new one", "./model_weights.ckpt": weights()}, "w:gz")
        os.rename(t + "/new", t + "/src/x.nemo")
        wait_for("the new archive", PATIENCE, lambda: os.path.exists(m / "b") and not os.path.exists(m / "a"))
        same("after", read_all(m / "b"), b"new one")
        same("step", read_all(m / "raw/step"), (7).to_bytes(8, "little"))


def test_refused(t):
    os.mkdir(t + "/src")
    pack(t + "/src/x.nemo", {"../../evil": b"x", "./model_weights.ckpt": weights()})
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", os.listdir(m.path), [".unshard"])
        with open(m / ".unshard/checkpoint.json") as f:
            why = json.load(f)["error"]
        assert "leads out of the archive" in why, why


if __name__ == "__main__":
    main(globals())
