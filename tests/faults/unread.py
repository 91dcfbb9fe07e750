#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A file whose first bytes the disk cannot read is never taken for one of another format, or for none.

Fixtures of many formats, one file of each after the other: `verify --deep` says that it cannot be read, and does not call
whole what may lack its tensors. A mount does not show the checkpoint as the files that it lies in.
$UNSHARD is the program, $SECTOR the library made of sector.c.
"""
import errno
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mount"))
from mountlib import PATIENCE, SANITIZED, UNSHARD, Mount, Skip, main, same, wait_for, write_file  # noqa: E402

DATA = HERE.parent / "data"
FIXTURES = ["torch_dcp/dcp_fsdp2_adamw_2r", "dcp_trainers/composer_real_mono", "dcp_trainers/titan_3r", "fairscale/fairscale_flat_3r",
            "flax/flax_kinds", "hf_dcp/hfdcp_row_5", "hf_trainer/accelerate_fsdp1_full_2r", "torchtune/torchtune_epoch"]
# What nothing of a checkpoint is read from.
SIDES = {"adapter_config.json"}


def sanitized():
    if SANITIZED:
        raise Skip("a sanitizer stands where calls are to fail")


def environment(bad, cache):
    return {**os.environ, "LD_PRELOAD": os.environ["SECTOR"], "UFS_BAD_FILE": bad, "UNSHARD_CONFINE": "0", "XDG_CACHE_HOME": cache}


def verify(source, bad, cache):
    shutil.rmtree(cache, ignore_errors=True)
    done = subprocess.run([UNSHARD, "verify", "--deep", source], env=environment(bad, cache), capture_output=True, text=True, timeout=600,
                          check=False)
    return done.returncode, done.stdout + done.stderr


def test_verify_tells_of_each_file(t):
    sanitized()
    tried = 0
    for fixture in FIXTURES:
        source = f"{t}/{os.path.basename(fixture)}"
        shutil.copytree(DATA / fixture, source)
        same(f"{fixture}: status", verify(source, "", t + "/cache")[0], 0)
        for path in sorted(pathlib.Path(source).rglob("*")):
            if not path.is_file() or path.stat().st_size < 4 or path.name in SIDES:
                continue
            status, said = verify(source, str(path), t + "/cache")
            assert status != 0 and "Input/output error" in said, (fixture, path.name, status, said)
            tried += 1
    print(f"# {tried} files of {len(FIXTURES)} checkpoints")


def test_ls_lists_the_other_checkpoints(t):
    """Also where the only other one might stand for the tree."""
    sanitized()
    for place in "bad", "step1":
        shutil.copytree(DATA / "torch_file/math", f"{t}/run/{place}")
    done = subprocess.run([UNSHARD, "ls", t + "/run"], env=environment(t + "/run/bad/model.pt", t + "/cache"), capture_output=True, text=True,
                          timeout=600, check=False)
    same("listed", [line.split()[0] for line in done.stdout.splitlines()], ["step1"])
    same("reported", (done.returncode, done.stderr.startswith("unshard: bad/model.pt: "), "Input/output error" in done.stderr), (3, True, True))


def test_a_mount_shows_no_checkpoint_as_its_files(t):
    sanitized()
    os.makedirs(t + "/run/step1")
    shutil.copy(DATA / "flax/flax_kinds/checkpoint_12", t + "/run/step1/checkpoint_12")
    env = {**environment(t + "/run/step1/checkpoint_12", t), "UFS_BAD_WHILE": t + "/bad"}
    with Mount(t + "/run", t + "/mnt", env=env) as m:
        shown = sorted(os.listdir(m / "step1"))
        assert "tensors" in shown and "checkpoint_12" not in shown, shown
        write_file(t + "/bad", b"")
        write_file(t + "/run/step1/note.txt", b"n")  # so that it is looked at anew

        def listed():
            try:
                return sorted(os.listdir(m / "step1"))
            except OSError as e:
                same("errno", errno.errorcode[e.errno], "EIO")
                return None

        def refused():
            names = listed()
            assert names is None or "tensors" in names, names
            return names is None
        wait_for("an error", PATIENCE, refused)
        os.unlink(t + "/bad")
        wait_for("all of it", PATIENCE, lambda: listed() == sorted([*shown, "note.txt"]))


main(globals(), seconds=1200)
