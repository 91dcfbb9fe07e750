# SPDX-License-Identifier: MIT
"""What frameworks write by themselves into a mount for saving: it stays what it is, down to the byte."""
import errno
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import IDLE, PATIENCE, UNSHARD, Mount, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, wait_for, write_checkpoint, write_file  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
FORMATS = ("rw", "rw,save=dcp:ranks=2", "rw,save=olmo")
# Checkpoints with metadata of their own; with files in optimizer/; of which each file has a part of each tensor under
# its name; a single file; a run of several.
WRITTEN = ("torch_dcp/dcp_minimal_handmade", "nanotron/nanotron_tp2_ep2", "hf_dcp/hfdcp_row_5", "olmo_v0/v00-april5-plain-w3",
           "torch_checkpointing/made_plain_2", "olmo_unsharded/step2000-unsharded", "torch_file/module_legacy", "zarr/zarr3_group_consolidated")


def files(path):
    """{path: bytes} of all files below a directory."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(pathlib.Path(path).rglob("*")) if f.is_file()}


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def test_what_a_framework_writes_stays(t):
    for i, options in enumerate(FORMATS):
        os.makedirs(f"{t}/run{i}")
        with Mount(f"{t}/run{i}", f"{t}/mnt{i}", options) as m:
            for name in WRITTEN:
                step = name.replace("/", "-")
                shutil.copytree(DATA / name, m / step)
                fsync(m / step)
                same(f"{options}: {name}", files(f"{t}/run{i}/{step}"), files(DATA / name))
                done = subprocess.run([UNSHARD, "diff", DATA / name, f"{t}/run{i}/{step}", "-o", "index=memory"], capture_output=True, text=True, timeout=PATIENCE)
                same(f"{options}: {name} by diff", (done.returncode, done.stderr), (0, ""))


STEPS = ("trainer_llama_adamw/checkpoint-4", "trainer_gpt2_ddp2_bf16/checkpoint-2", "trainer_qwen2_tied_adafactor/checkpoint-2")


def test_a_trainers_step_is_copied(t):
    """From a disk or out of the mount, with all views: what the Trainer's own save there gives."""
    for i, options in enumerate(FORMATS[:2]):
        run = f"{t}/run{i}"
        os.makedirs(run)
        with Mount(run, f"{t}/mnt{i}", options) as m:
            for step in STEPS:
                name, source = step.partition("/")[0], DATA / "hf_trainer" / step
                shutil.copytree(source, f"{run}/{name}")
                for copy, what in (("saved", source), ("shown", m / name)):
                    subprocess.run(["cp", "-r", what, m / f"{name}-{copy}"], check=True)
                    fsync(m / f"{name}-{copy}")
                    same(f"{options}: {name}, {copy}", files(f"{run}/{name}-{copy}"), files(f"{run}/{name}-saved"))
                if i == 0:
                    same(f"{name} as it was", files(f"{run}/{name}-saved"), files(source))
                assert "none of the objects" not in m.messages(), m.messages()


def test_a_copied_step_that_is_changed_is_refused(t):
    """What a view has and no file beside it would be lost: that is told, and published when it is in order."""
    source = DATA / "hf_trainer" / STEPS[0]
    shutil.copytree(source, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        key = next(n for n in sorted(os.listdir(m / "step/tensors")) if "exp_avg" in n)
        shown = read_all(m / f"step/tensors/{key}")
        view = f"tensors/{key}"
        cases = {"other bytes": (lambda copy: write_file(f"{copy}/{view}", shown[:-1] + bytes([shown[-1] ^ 1])), lambda copy: write_file(f"{copy}/{view}", shown)),
                 "without its file": (lambda copy: os.rename(f"{copy}/optimizer.pt", f"{copy}/old"), lambda copy: os.rename(f"{copy}/old", f"{copy}/optimizer.pt"))}
        for what, (change, back) in cases.items():
            copy = m / what.replace(" ", "-")
            subprocess.run(["cp", "-r", m / "step", copy], check=True)
            change(copy)
            fails(what, errno.EINVAL, lambda path=copy: fsync(path))
            assert "hf cannot hold" in m.messages(), m.messages()
            back(copy)
            fsync(copy)
            same(what, files(t + "/run/" + os.path.basename(copy)), files(source))


def test_a_directory_that_waited_for_tensors(t):
    """It was published while it was empty; then its framework wrote into it."""
    for i, options in enumerate(FORMATS[:2]):
        os.makedirs(f"{t}/run{i}")
        with Mount(f"{t}/run{i}", f"{t}/mnt{i}", options) as m:
            for name in WRITTEN[:1] + WRITTEN[-2:-1]:
                step = name.replace("/", "-")
                os.mkdir(m / step, 0o750)
                fsync(m / step)
                same("nothing is in it", os.listdir(f"{t}/run{i}/{step}"), [])
                same("its mode", stat.S_IMODE(os.stat(f"{t}/run{i}/{step}").st_mode), 0o750)
                for path, data in files(DATA / name).items():
                    write_file(m / f"{step}/{path}", data)
                fsync(m / step)
                same(f"{options}: {name}", files(f"{t}/run{i}/{step}"), files(DATA / name))
            os.mkdir(m / "views")
            fsync(m / "views")
            os.mkdir(m / "views/tensors")
            with open(m / "views/tensors/new.npy", "wb") as f:
                f.write(npy_image("<f4", (3,), bytes(12)))
            fails("not empty", errno.ENOTEMPTY, lambda: os.rmdir(m / "views/tensors"))
            fsync(m / "views")
            same("a tensor that came by a view", read_all(m / "views/raw/new"), bytes(12))
            os.mkdir(m / "late")
            fsync(m / "late")
            write_file(m / "late/model.safetensors", safetensors_image(make_tensors(1)))
            fsync(m / "late")
            wait_for("tensors", PATIENCE, lambda: len(os.listdir(m / "late/raw")) == len(make_tensors(1)))
            if "ranks" in options:
                same("as save= has it", sorted(os.listdir(f"{t}/run{i}/late")), [".metadata", "__0_0.distcp", "__1_0.distcp"])


def test_a_directory_of_directories_is_none(t):
    """A trainer's output: nothing is put beside the steps that come to it, and it is not there before they are."""
    os.mkdir(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        os.makedirs(m / "run/steps")
        os.mkdir(m / "later")
        wait_for("run", PATIENCE, lambda: os.path.exists(t + "/src/run"))
        same("run", [os.listdir(m / "run"), os.listdir(m / "run/steps"), os.listdir(t + "/src/run")], [["steps"], [], ["steps"]])
        assert not os.path.exists(t + "/src/later"), "nothing has come to it"
        for step in ("run/steps/1", "later/1"):
            shutil.copytree(DATA / "hf_trainer/trainer_gpt2_ddp2_bf16/checkpoint-2", m / step)
        same("later", os.listdir(m / "later"), ["1"])
        fsync(m / "later")
        fsync(m / "run/steps/1")
        for step in ("run/steps/1", "later/1"):
            same(step, files(t + "/src/" + step), files(DATA / "hf_trainer/trainer_gpt2_ddp2_bf16/checkpoint-2"))
        same("nothing beside them", [os.listdir(t + "/src/" + n) for n in ("run", "run/steps", "later")], [["steps"], ["1"], ["1"]])


def test_files_with_the_same_tensor(t):
    """They are one model: what was closed last counts, whatever the files are called, and that is told."""
    first, second = make_tensors(1), dict(list(make_tensors(2).items())[:2], new=make_tensors(3)[next(iter(make_tensors(3)))])
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for step, order in (("step1", ("model", "patch")), ("step2", ("patch", "model"))):
            os.mkdir(m / step)
            images = {"model": safetensors_image(first), "patch": safetensors_image(second)}
            for name in order:
                write_file(m / f"{step}/{name}.safetensors", images[name])
            fsync(m / step)
            same(step, stored(f"{t}/run/{step}"), {**first, **second} if order[-1] == "patch" else {**second, **first})
            assert f"save {step}: several safetensors files have the same tensor" in m.messages(), m.messages()


def test_what_is_no_tensor_in_a_view(t):
    """It would not be seen where it was written: that is told, and nothing is lost."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.makedirs(t + "/run/step1/logs")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step2")
        write_file(m / "step2/model.safetensors", safetensors_image(make_tensors(2)))
        os.mkdir(m / "step2/optimizer")
        for name in ("step1/tensors/notes.txt", "step2/optimizer/__0_0.distcp"):
            step = name.partition("/")[0]
            write_file(m / name, b"bytes that are no tensor")
            fails(name, errno.EINVAL, lambda s=step: fsync(m / s))
            assert f"{name.partition('/')[2]}: no tensor" in m.messages(), m.messages()
            same("it is kept", open(m / name, "rb").read(), b"bytes that are no tensor")
            os.unlink(m / name)
            write_file(m / f"{step}/tensors/new.npy", npy_image("|u1", (4,), b"abcd")) if step == "step1" else None
            fsync(m / step)
        same("tensors", sorted(stored(t + "/run/step1")), sorted([*make_tensors(1), "new"]))
        same("tensors", stored(t + "/run/step2"), make_tensors(2))


def test_what_a_framework_has_written_is_removed(t):
    """Also of a format that nobody changes here: savers keep the last few."""
    source = DATA / "deepspeed/z1_elastic_w2"
    os.mkdir(t + "/plain")
    shutil.copytree(source, t + "/plain/step1")
    with Mount(t + "/plain", t + "/mnt", "rw", idle=IDLE) as m:
        os.unlink(m / "step1/.unshard/checkpoint.json")  # as rm -r begins
        raw = next(os.scandir(m / "step1/raw")).path
        fails("what is left is not to be written", errno.EROFS, lambda: open(raw, "r+b"))
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "step1/.unshard/checkpoint.json"))
        same("nothing is removed", files(t + "/plain/step1"), files(source))
        fails("one tensor", errno.EROFS, lambda: os.unlink(next(os.scandir(m / "step1/tensors")).path))
        shutil.rmtree(m / "step1")
        same("all of it", os.listdir(t + "/plain"), [])


def outputs(path):
    """A trainer's output: a model with steps of all kinds beside it."""
    kinds = ("deepspeed/z1_elastic_w2", "nanotron/nanotron_tp2_ep2", "safetensors/hf_single_bf16", "hf_trainer/trainer_gpt2_ddp2_bf16/checkpoint-2")
    write_checkpoint(path, make_tensors(1))
    for i, kind in enumerate(kinds):
        shutil.copytree(DATA / kind, f"{path}/checkpoint-{i}")
    os.makedirs(path + "/runs/old")
    write_file(path + "/runs/old/log", b"lines")
    return len(kinds)


def test_a_checkpoint_beside_a_model_is_removed(t):
    """Trainers keep the last few, in the directory of the model that they trained."""
    steps = outputs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        for i in range(steps):
            shutil.rmtree(m / f"run/checkpoint-{i}")
            assert not os.path.exists(f"{t}/src/run/checkpoint-{i}"), i
        wait_for("the staging directories to go", PATIENCE, lambda: not [n for n in os.listdir(t + "/src/run") if n.startswith(".unshard")])
        same("the model stays", stored(t + "/src/run"), make_tensors(1))
        same("and all else", read_all(t + "/src/run/runs/old/log"), b"lines")


def test_a_file_that_is_a_checkpoint_is_removed(t):
    """Lightning keeps the best few: each is shown as a directory, and goes like one."""
    os.makedirs(t + "/src/run")
    for i in range(3):
        shutil.copy(DATA / "lightning/lightning_ckpt/last.ckpt", f"{t}/src/run/epoch={i}.ckpt")
    before = files(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        os.unlink(m / "run/epoch=0.ckpt/.unshard/checkpoint.json")  # as rm -r begins
        fails("one tensor", errno.EROFS, lambda: os.unlink(next(os.scandir(m / "run/epoch=1.ckpt/tensors")).path))
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "run/epoch=0.ckpt/.unshard/checkpoint.json"))
        same("nothing is removed", published(t + "/src"), before)
        shutil.rmtree(m / "run/epoch=0.ckpt")
        same("one is gone", sorted(n for n in published(t + "/src")), ["run/epoch=1.ckpt", "run/epoch=2.ckpt"])
        shutil.copy(DATA / "lightning/lightning_ckpt/last.ckpt", m / "run/epoch=3.ckpt")  # as the next one comes
        wait_for("it to be shown", PATIENCE, lambda: os.path.isdir(m / "run/epoch=3.ckpt"))
        shutil.rmtree(m / "run/epoch=1.ckpt")
        before = {"run/epoch=2.ckpt": before["run/epoch=2.ckpt"], "run/epoch=3.ckpt": before["run/epoch=0.ckpt"]}
        same("the others stay", sorted(published(t + "/src")), sorted(before))
        assert published(t + "/src") == before, "other bytes"


def test_files_that_are_checkpoints_come_one_after_the_other(t):
    """The directory is the first one's, then each one's own."""
    os.makedirs(t + "/src/run")
    source = DATA / "lightning/lightning_ckpt/last.ckpt"
    shutil.copy(source, t + "/src/run/epoch=0.ckpt")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        assert os.path.exists(m / "run/tensors"), "it is a checkpoint"
        for i in range(1, 4):
            shutil.copy2(source, m / f"run/epoch={i}.ckpt")
            wait_for("it to be there", PATIENCE, lambda n=i: os.path.exists(t + f"/src/run/epoch={n}.ckpt"))
            wait_for("it to be shown", PATIENCE, lambda n=i: os.path.isdir(m / f"run/epoch={n}.ckpt"))
        shutil.rmtree(m / "run/epoch=0.ckpt")
        same("names", sorted(published(t + "/src")), [f"run/epoch={i}.ckpt" for i in (1, 2, 3)])
        same("bytes", set(published(t + "/src").values()), {source.read_bytes()})


def remove_files_first(path, until=lambda at: False):
    """rm -r as Python's shutil.rmtree has it from 3.13 on: the files of a directory, then its directories from the last one on. Ends before the first name of which `until` is true, as one that is killed there."""
    stack = [("walk", path)]
    opened = []
    while stack:
        what, at = stack.pop()
        if what == "rmdir":
            os.close(opened.pop())
            if until(at):
                break
            os.rmdir(at)
            continue
        opened.append(os.open(at, os.O_RDONLY | os.O_DIRECTORY))
        stack.append(("rmdir", at))
        with os.scandir(opened[-1]) as found:
            entries = sorted(found, key=lambda e: e.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                stack.append(("walk", f"{at}/{entry.name}"))
            elif until(f"{at}/{entry.name}"):
                stack.clear()
                break
            else:
                os.unlink(entry.name, dir_fd=opened[-1])
    for fd in opened:
        os.close(fd)


def test_files_go_first(t):
    """Of checkpoints that are not written too, and with the reports last."""
    steps = outputs(t + "/src/run")
    os.mkdir(t + "/src/best")
    for name in ("a.ckpt", "b.ckpt"):
        shutil.copy(DATA / "lightning/lightning_ckpt/last.ckpt", f"{t}/src/best/{name}")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        for i in range(steps):
            remove_files_first(m / f"run/checkpoint-{i}")
            assert not os.path.exists(f"{t}/src/run/checkpoint-{i}"), i
        same("the model stays", stored(t + "/src/run"), make_tensors(1))
        remove_files_first(m / "run")
        remove_files_first(m / "best/a.ckpt")
        same("all but one", list(published(t + "/src")), ["best/b.ckpt"])


def test_files_go_first_and_no_more(t):
    """What was begun and not ended is undone, and who has not the directory open begins nothing."""
    shutil.copytree(DATA / "deepspeed/z1_elastic_w2", t + "/src/run")
    write_file(t + "/src/run/config.json", b"{}")
    before = files(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        for name in ("config.json", "model.safetensors"):
            fails(name, errno.EROFS, lambda n=name: os.unlink(m / f"run/{n}"))
        top = os.open(m / "run", os.O_RDONLY | os.O_DIRECTORY)
        os.unlink("config.json", dir_fd=top)
        os.unlink("model.safetensors", dir_fd=top)
        os.close(top)
        fails("a new file", errno.EROFS, lambda: write_file(m / "run/notes", b"x"))
        fails("the directory", errno.ENOTEMPTY, lambda: os.rmdir(m / "run"))
        assert not os.path.exists(m / "run/config.json"), "it is hidden"
        same("nothing is removed", published(t + "/src"), before)
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "run/config.json") and os.path.exists(m / "run/model.safetensors"))
        same("nothing is removed, later", published(t + "/src"), before)


def publish(m):
    """As umount does."""
    os.setxattr(m.path, "user.unshard.publish", b"")


def test_an_interrupted_removal_of_files_first_removes_nothing(t):
    """Of a format whose tensors can be removed one by one."""
    tensors = make_tensors(1)
    write_checkpoint(t + "/src/run", tensors)
    before = files(t + "/src")
    last = sorted(tensors)[-1]
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        shown = sorted(os.listdir(m / "run"))
        for end in ("tree", f"tensors/{last}.npy", "tensors", f"raw/{last}", "raw", ".unshard/checkpoint.json", ".unshard"):
            at = str(m / "run") + "/" + end
            remove_files_first(str(m / "run"), at.__eq__)
            assert os.path.exists(m / "run") and not os.path.exists(m / "run/model.safetensors"), end
            publish(m)
            same(f"the source, ended before {end}", files(t + "/src"), before)
            same("shown", sorted(os.listdir(m / "run")), shown)
            same("tensors", sorted(os.listdir(m / "run/tensors")), sorted(f"{k}.npy" for k in tensors))
        os.unlink(m / f"run/tensors/{last}.npy")
        publish(m)  # who removes a tensor alone does
        same("a tensor less", sorted(stored(t + "/src/run")), sorted(tensors)[:-1])
        remove_files_first(str(m / "run"))
        same("all of it", os.listdir(t + "/src"), [])


def published(path):
    """{path: bytes} of what is in the source, but for what is on its way."""
    return {name: data for name, data in files(path).items() if ".unshard-staging-" not in name}


def test_a_checkpoint_is_removed_with_those_in_it(t):
    """rm -r: in one step, or not at all."""
    outputs(t + "/src/run")
    before = files(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        os.unlink(m / "run/.unshard/checkpoint.json")  # as rm -r begins
        shutil.rmtree(m / "run/checkpoint-0")
        assert not os.path.exists(m / "run/checkpoint-0"), "it is hidden"
        same("nothing is gone yet", published(t + "/src"), before)
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "run/.unshard/checkpoint.json"))
        same("nothing is gone", published(t + "/src"), before)
        wait_for("the step to be there", PATIENCE, lambda: os.path.exists(m / "run/checkpoint-0/.unshard/checkpoint.json"))
        done = subprocess.run(["rm", "-r", m / "run"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False)
        same("rm -r: " + done.stderr, done.returncode, 0)
        same("all of it", os.listdir(t + "/src"), [])


def write_chunks(path, count):
    """A zarr array of so many files."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    about = {"zarr_format": 3, "node_type": "array", "shape": [count], "data_type": "uint8", "fill_value": 0, "attributes": {},
             "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
             "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "codecs": [{"name": "bytes"}]}
    os.makedirs(path + "/w/c")
    write_file(path + "/zarr.json", json.dumps(group).encode())
    write_file(path + "/w/zarr.json", json.dumps(about).encode())
    for i in range(count):
        fd = os.open(f"{path}/w/c/{i}", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"1")
        os.close(fd)


def test_others_are_served_while_one_is_removed(t):
    """To delete what it had takes time, and no lock: the name is gone by then."""
    write_chunks(t + "/src/step1", 30000)
    write_checkpoint(t + "/src/step2", make_tensors(1))
    looks, end = [], threading.Event()

    def look(path):
        while not end.is_set():
            gone = not os.path.exists(t + "/src/step1")
            os.listdir(path)
            looks.append(gone and not end.is_set())

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        same("it is read", len(read_all(m / "step1/raw/w")), 30000)
        thread = threading.Thread(target=look, args=(m / "step2",))
        thread.start()
        try:
            shutil.rmtree(m / "step1")
        finally:
            end.set()
            thread.join()
        assert not os.path.exists(t + "/src/step1")
        assert sum(looks) > 5, f"{sum(looks)} looks of another while it was deleted"


def test_a_part_of_a_checkpoint_is_not_removed_alone(t):
    """Whatever a directory looks like by itself: a checkpoint goes whole or not at all."""
    shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", t + "/src/run")
    shard = next(n for n in os.listdir(t + "/src/run") if n.endswith(".distcp"))
    write_checkpoint(t + "/src/run/a", make_tensors(1))
    moved = "a/" + shard[:len(shard) - len("a/.distcp")] + ".distcp"  # as long as it was: the metadata is a pickle
    os.rename(t + "/src/run/" + shard, t + "/src/run/" + moved)
    metadata = pathlib.Path(t + "/src/run/.metadata")
    metadata.write_bytes(metadata.read_bytes().replace(shard.encode(), moved.encode()))
    before = files(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for path in ("run", "run/a"):
            assert os.path.exists(m / path + "/.unshard/checkpoint.json"), path
        assert read_all(next(os.scandir(m / "run/raw")).path), "its tensors are whole"
        for path in ("run/a",):
            done = subprocess.run(["rm", "-r", m / path], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False)
            same(f"rm -r {path}: {done.stderr}", done.returncode, 1)
            same("nothing is removed", published(t + "/src"), before)


if __name__ == "__main__":
    main(globals())
