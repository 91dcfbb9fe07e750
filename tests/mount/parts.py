#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checkpoints of several parts: their folders hidden, the model's side files at the top, links and marks."""
import json
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, UNSHARD, Mount, main, read_all, same, wait_for, write_file  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
NEMO = os.path.join(DATA, "nemo_automodel", "nemo_full_recipe_safetensors")
NEMO2 = os.path.join(DATA, "nemo", "real_nemo2_tp2")
OURS = {".unshard", "model.safetensors", "optimizer", "raw", "tensors", "tree"}


def copy_run(t):
    """NeMo's run with real links: the fixture has them as files."""
    shutil.copytree(NEMO, t + "/run")
    for root, dirs, _ in os.walk(t + "/run"):
        for d in [root, *(os.path.join(root, x) for x in dirs)]:
            os.chmod(d, 0o755)
    for link, to in (("LATEST", "epoch_1_step_4"), ("LOWEST_VAL", "epoch_0_step_2")):
        os.unlink(f"{t}/run/{link}")
        os.symlink(to, f"{t}/run/{link}")
    return t + "/run"


def test_side_files_come_to_the_top(t):
    epoch = os.path.join(NEMO, "epoch_0_step_2")
    with Mount(epoch, t + "/mnt") as m:
        lifted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        same("top", set(os.listdir(m.path)), OURS | lifted | {"config.yaml", "losses.json", "consolidate.sh"})
        for name in lifted:
            same(name, read_all(m / name), read_all(f"{epoch}/model/.hf_metadata/{name}"))
        same("consolidate.sh", read_all(m / "consolidate.sh"), read_all(epoch + "/model/consolidate.sh"))
        with open(m / ".unshard/checkpoint.json") as f:
            same("warnings", json.load(f)["warnings"], [])
        with open(m / ".unshard/objects.json") as f:
            same("step_scheduler.pt", json.load(f)["step_scheduler.pt"], {"step": 1, "epoch": 0})


def test_an_adapter(t):
    epoch = os.path.join(DATA, "nemo_automodel", "nemo_peft_dora", "epoch_0_step_2")
    with Mount(epoch, t + "/mnt") as m:
        top = set(os.listdir(m.path))
        same("top", top, OURS - {"model.safetensors"} | {
            "adapter_model.safetensors", "adapter_config.json", "automodel_peft_config.json", "tokenizer.json",
            "tokenizer_config.json"})
        same("the adapter, byte for byte", read_all(m / "adapter_model.safetensors"),
             read_all(epoch + "/model/adapter_model.safetensors"))


def test_links_within_the_run(t):
    run = copy_run(t)
    with Mount(run, t + "/mnt") as m:
        same("top", sorted(os.listdir(m.path)), ["LATEST", "LOWEST_VAL", "epoch_0_step_2", "epoch_1_step_4"])
        same("LATEST", os.readlink(m / "LATEST"), "epoch_1_step_4")
        same("through it", read_all(m / "LATEST/losses.json"), read_all(run + "/epoch_1_step_4/losses.json"))


def test_a_file_that_names_the_latest(t):
    """Where links cannot be made."""
    run = copy_run(t)
    os.unlink(run + "/LATEST")
    write_file(run + "/LATEST.txt", b"epoch_1_step_4\n")
    with Mount(run, t + "/mnt") as m:
        same("latest", os.readlink(m / "latest"), "epoch_1_step_4")
        same("in .unshard", os.readlink(m / ".unshard/latest"), "../epoch_1_step_4")


def test_a_tag_of_a_part(t):
    """DeepSpeed's `latest` in a Trainer's checkpoint names a folder that is a part: no step of a run."""
    step = os.path.join(DATA, "hf_trainer", "trainer_deepspeed_1_and_3", "checkpoint-4")
    with Mount(step, t + "/mnt") as m:
        same("top", set(os.listdir(m.path)), OURS | {"config.json", "trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"})
        same("latest", os.path.lexists(m / "latest"), False)
        same("in .unshard", "latest" in os.listdir(m / ".unshard"), False)
        same("looked up", os.path.lexists(m / ".unshard/latest"), False)


def test_an_unfinished_save_is_plain(t):
    run = copy_run(t)
    mark = run + "/epoch_1_step_4/.incomplete"
    write_file(mark, b"")
    with Mount(run, t + "/mnt") as m:
        step = m / "epoch_1_step_4"
        same("as it is", sorted(os.listdir(step)), sorted(os.listdir(run + "/epoch_1_step_4")))
        for below in ("model", "model/consolidated", "optim", "rng"):
            same(below, sorted(os.listdir(f"{step}/{below}")), sorted(os.listdir(f"{run}/epoch_1_step_4/{below}")))
        assert os.path.exists(m / "epoch_0_step_2/model.safetensors")
        os.unlink(mark)
        wait_for("the finished save", PATIENCE, lambda: os.path.exists(step + "/model.safetensors"))


def test_a_mark_beside(t):
    """NeMo 2's NAME-unfinished: while it is there, NAME and what is in it are plain directories."""
    run, name = t + "/run", "model--step=7"
    shutil.copytree(NEMO2, f"{run}/{name}")
    os.symlink(name, f"{run}/{name}-last")
    mark = f"{run}/{name}-unfinished"
    write_file(mark, b"")
    with Mount(run, t + "/mnt") as m:
        same("as it is", sorted(os.listdir(m / name)), ["context", "weights"])
        same("weights", sorted(os.listdir(f"{m / name}/weights")), sorted(os.listdir(NEMO2 + "/weights")))
        os.unlink(mark)
        wait_for("the finished save", PATIENCE, lambda: os.path.exists(f"{m / name}/model.safetensors"))
        same("its link", os.path.samefile(f"{m / name}-last", m / name), True)
        write_file(mark, b"")  # removed, or saved over
        wait_for("the mark again", PATIENCE, lambda: not os.path.exists(f"{m / name}/model.safetensors"))


def test_a_checkpoint_in_a_part(t):
    """What Model Optimizer puts into weights/ is shown beside them."""
    shutil.copytree(NEMO2, t + "/step")
    shutil.copytree(NEMO2 + "/weights", t + "/step/weights/modelopt_state")
    os.mkdir(t + "/step/weights/other")
    with Mount(t + "/step", t + "/mnt") as m:
        same("top", set(os.listdir(m.path)), OURS | {"context", "modelopt_state"})
        same("within", set(os.listdir(m / "modelopt_state")), OURS)
        same("tensors", sorted(os.listdir(m / "modelopt_state/tensors")), sorted(os.listdir(m / "tensors")))
        same("bytes", read_all(m / "modelopt_state/model.safetensors"), read_all(m / "model.safetensors"))
    listed = subprocess.run([UNSHARD, "ls", t], capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    same("listed", [line.split()[0] for line in listed.splitlines()], ["step", "step/weights/modelopt_state"])


if __name__ == "__main__":
    main(globals())
