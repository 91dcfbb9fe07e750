# SPDX-License-Identifier: MIT
"""Steps that a trainer saves beside its model, in the directory of a checkpoint: each comes alone, and nothing of that one is touched."""
import errno
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import IDLE, PATIENCE, UNSHARD, Mount, fails, main, make_tensors, npy_image, read_all, same, stored, wait_for, write_checkpoint, write_file  # noqa: E402
from save_over import image, save_file  # noqa: E402
from save_whole import DATA, files, fsync, published  # noqa: E402


def write_run(path):
    """A trainer's output whose model was saved, and that goes on."""
    write_checkpoint(path, make_tensors(1))
    write_checkpoint(path + "/checkpoint-500", make_tensors(5))
    os.makedirs(path + "/runs")
    write_file(path + "/runs/events", b"one line\n")


def identities(path):
    """Who each file and directory is, and when it changed last: links and copies show. The directory that names come to changes with them."""
    found = {str(p.relative_to(path)): (p.stat().st_ino, p.stat().st_ctime_ns) for p in sorted(pathlib.Path(path).rglob("*"))}
    return {**found, "": os.stat(path).st_ino}


def same_beside(what, path, before, new):
    now = identities(path)
    same(what, {k: v for k, v in now.items() if k.split("/")[0] not in new}, before)


def save_step(path, seed):
    """As the Trainer does."""
    os.mkdir(path)
    write_file(path + "/config.json", b'{"model_type": "llama"}\n')
    save_file(path + "/model.safetensors", image(seed))
    write_file(path + "/trainer_state.json", b"{}")


def test_a_step_comes_alone(t):
    for options in ("rw", "rw,save=dcp:ranks=2"):
        run = f"{t}/{options[-1]}/run"
        write_run(run)
        before = identities(run)
        with Mount(os.path.dirname(run), f"{t}/mnt{options[-1]}", options, idle=IDLE) as m:
            with open(m / "run/model.safetensors", "rb") as reader:
                first = reader.read(1000)
                save_step(m / "run/checkpoint-501", 2)
                assert "checkpoint-501" in os.listdir(m / "run"), os.listdir(m / "run")
                same("names of it", sorted(os.listdir(m / "run/checkpoint-501")), ["config.json", "model.safetensors", "trainer_state.json"])
                assert not os.path.exists(run + "/checkpoint-501"), "nothing is published yet"
                same("nothing else is staged", [n for n in os.listdir(os.path.dirname(run)) if n != "run"], [])
                fsync(m / "run/checkpoint-501")
                same_beside("after its publication", run, before, ["checkpoint-501"])
                same("who reads the model goes on", first + reader.read(), read_all(m / "run/model.safetensors"))
            assert os.path.exists(m / "run/checkpoint-501/.unshard/checkpoint.json"), "it is a checkpoint"
            save_step(m / "run/tmp-checkpoint-502", 3)
            os.rename(m / "run/tmp-checkpoint-502", m / "run/checkpoint-502")
            assert os.path.exists(run + "/checkpoint-502"), "a rename publishes"
            begin = time.monotonic()
            save_step(m / "run/step_7", 4)
            wait_for("what was left alone", PATIENCE, lambda: os.path.exists(run + "/step_7"))
            assert time.monotonic() - begin > IDLE - 1, "it was still being written"
            wait_for("its end", PATIENCE, lambda: not [n for n in os.listdir(run) if n.startswith(".unshard-staging")])
            same_beside("after all of them", run, before, ["checkpoint-501", "checkpoint-502", "step_7"])
        for name, seed in (("checkpoint-501", 2), ("checkpoint-502", 3), ("step_7", 4)):
            if options == "rw":
                same(name, stored(f"{run}/{name}"), make_tensors(seed))
                same("as it came", read_all(f"{run}/{name}/model.safetensors"), image(seed))
            else:
                same(name, sorted(os.listdir(f"{run}/{name}")), [".metadata", "__0_0.distcp", "__1_0.distcp", "config.json", "trainer_state.json"])


def test_beside_what_is_not_written(t):
    """The checkpoint around it need not be of a format that takes changes."""
    shutil.copytree(DATA / "gguf/gguf_plain", t + "/src/run")
    before = identities(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        assert os.path.exists(m / "run/tensors"), "it is a checkpoint"
        fails("another directory", errno.EROFS, lambda: os.mkdir(m / "run/extra"))
        save_step(m / "run/checkpoint-1", 1)
        fsync(m / "run/checkpoint-1")
    same_beside("all else", t + "/src/run", before, ["checkpoint-1"])
    same("the step", stored(t + "/src/run/checkpoint-1"), make_tensors(1))


def test_other_directories_are_the_checkpoints(t):
    """Of what has no step's name nobody knows that it is no part: it comes with what else is changed, in one step."""
    write_run(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for name in ("global_step5", "optimizer_0", "extra"):
            os.mkdir(m / f"run/{name}")
            write_file(m / f"run/{name}/a", b"a")
        os.mkdir(m / "run/checkpoint-9")
        with open(m / "run/checkpoint-9/log", "wb"):
            fails("both at once", errno.EBUSY, lambda: fsync(m / "run"))
            assert not os.path.exists(t + "/src/run/extra"), "not without the step that is on its way"
        fsync(m / "run")
    for name in ("global_step5", "optimizer_0", "extra"):
        same(name, files(f"{t}/src/run/{name}"), {"a": b"a"})
    same("the step", os.listdir(t + "/src/run/checkpoint-9"), ["log"])
    same("the model", stored(t + "/src/run"), make_tensors(1))


def test_a_step_goes_before_it_is_published(t):
    write_run(t + "/src/run")
    before = identities(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for _ in range(3):
            save_step(m / "run/checkpoint-7", 7)
            fails("a full one", errno.ENOTEMPTY, lambda: os.rmdir(m / "run/checkpoint-7"))
            fails("once more", errno.EEXIST, lambda: os.mkdir(m / "run/checkpoint-7"))
            fails("over one that is there", errno.EEXIST, lambda: os.rename(m / "run/checkpoint-7", m / "run/checkpoint-500"))
            shutil.rmtree(m / "run/checkpoint-7")
            assert "checkpoint-7" not in os.listdir(m / "run"), os.listdir(m / "run")
            assert not os.path.exists(m / "run/checkpoint-7")
        os.mkdir(m / "run/checkpoint-8")
        os.rmdir(m / "run/checkpoint-8")
        same("nothing is staged", [n for n in os.listdir(t + "/src/run") if n.startswith(".unshard")], [])
        shutil.rmtree(m / "run/checkpoint-500")
        save_step(m / "run/checkpoint-500", 8)
        fsync(m / "run/checkpoint-500")
    before = {k: v for k, v in before.items() if not k.startswith("checkpoint-500")}
    same_beside("all else", t + "/src/run", before, ["checkpoint-500"])
    same("the other one of this name", stored(t + "/src/run/checkpoint-500"), make_tensors(8))


def test_a_new_checkpoint_moves_beside_a_model(t):
    """Made elsewhere, and renamed to where the run is; not onto what a view or a part has for a name."""
    write_run(t + "/src/run")
    os.makedirs(t + "/src/tmp")
    before = identities(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        save_step(m / "tmp/new", 3)
        for name in ("optimizer", "model-00001-of-00002.safetensors"):
            fails(name, errno.EXDEV, lambda to=name: os.rename(m / "tmp/new", m / f"run/{to}"))
        os.rename(m / "tmp/new", m / "run/best")
        same("there", stored(t + "/src/run/best"), make_tensors(3))
        same("not here", os.listdir(t + "/src/tmp"), [])
    same_beside("all else", t + "/src/run", before, ["best"])


def test_model_and_steps_at_once(t):
    """A trainer that saves both, time and again, and keeps two: none is lost, and none waits for ever."""
    write_run(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for i in range(4):
            save_step(m / f"run/checkpoint-{i}", i)
            save_file(m / "run/model.safetensors", image(10 + i))
            fsync(m / "run")
            same("the model", stored(t + "/src/run"), make_tensors(10 + i))
            same("the step", stored(t + f"/src/run/checkpoint-{i}"), make_tensors(i))
            if i > 1:
                shutil.rmtree(m / f"run/checkpoint-{i - 2}")
        same("steps", sorted(n for n in os.listdir(t + "/src/run") if n.startswith("checkpoint")), ["checkpoint-2", "checkpoint-3", "checkpoint-500"])


def patiently(call):
    for _ in range(1000):
        try:
            return call()
        except OSError as e:
            if e.errno not in (errno.ESTALE, errno.EBUSY):
                raise
            time.sleep(0.01)
    raise AssertionError("it changes at each look")


def test_steps_come_while_the_model_is_changed(t):
    """By several at once: the directory is exchanged while steps come to it."""
    write_run(t + "/src/run")
    key, (_, shape, data) = next(iter(make_tensors(1).items()))
    ended, errors, made = threading.Event(), [], []

    def change(m):
        try:
            for k in range(12):
                new = bytes([k]) * len(data)
                patiently(lambda n=new: write_file(m / f"run/tensors/{key}.npy", npy_image("<f4", shape, n)))
                patiently(lambda: fsync(m / "run"))
        except OSError as e:
            errors.append(e)
        finally:
            ended.set()

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        changer = threading.Thread(target=change, args=(m,))
        changer.start()
        while not ended.is_set() or not made:
            name = f"checkpoint-{1000 + len(made)}"
            os.mkdir(m / f"run/{name}")
            write_file(m / f"run/{name}/model.safetensors", image(len(made)))
            patiently(lambda n=name: fsync(m / f"run/{n}"))
            made.append(name)
            time.sleep(0.05)  # the model is published when none is on its way
        changer.join()
        same("errors", errors, [])
    for i, name in enumerate(made):
        same(name, stored(f"{t}/src/run/{name}"), make_tensors(i))
    same("the tensor", stored(t + "/src/run")[key][2], bytes([11]) * len(data))


def test_a_step_that_is_written_does_not_come_with_its_model(t):
    """The model was saved before and is due; of the step, file after file is still to come."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw", idle=3) as m:
        save_file(m / "run/model.safetensors", image(1))
        os.mkdir(m / "run/checkpoint-1")
        for i in range(16):
            write_file(m / f"run/checkpoint-1/rng_state_{i}.pth", b"state")
            time.sleep(0.4)
            assert "checkpoint-1" not in os.listdir(t + "/src/run"), f"published after {i + 1} of its files"
        wait_for("both", PATIENCE, lambda: {"checkpoint-1", "model.safetensors"} <= set(os.listdir(t + "/src/run")))
        same("the step", len(os.listdir(t + "/src/run/checkpoint-1")), 16)


def test_a_step_by_two_numbers(t):
    """A rename looks for the directories of both names; when the run was exchanged in between it is to look again: nothing is to be copied."""
    write_run(t + "/src/run")
    key, (_, shape, data) = next(iter(make_tensors(1).items()))
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        os.mkdir(m / "run/checkpoint-9")
        with open(m / "run/checkpoint-9/.part", "wb") as f:
            f.write(image(9))
        fsync(m / "run/checkpoint-9")
        os.stat(m / "run/checkpoint-9/.part")
        before = os.open(m / "run/checkpoint-9", os.O_RDONLY | os.O_DIRECTORY)
        write_file(m / f"run/tensors/{key}.npy", npy_image("<f4", shape, bytes(len(data))))
        fsync(m / "run")
        after = os.open(m / "run/checkpoint-9", os.O_RDONLY | os.O_DIRECTORY)
        fails("by both", errno.ESTALE, lambda: os.rename(".part", "model.safetensors", src_dir_fd=before, dst_dir_fd=after))
        os.rename(".part", "model.safetensors", src_dir_fd=after, dst_dir_fd=after)
        fsync(m / "run/checkpoint-9")
        os.close(before)
        os.close(after)
        same("steps", sorted(n for n in os.listdir(m / "run") if n.startswith("checkpoint")), ["checkpoint-500", "checkpoint-9"])
    same("the step", stored(t + "/src/run/checkpoint-9"), make_tensors(9))


def test_all_of_it_is_removed(t):
    """rm -r of a run with a step on its way; and one that ends before takes nothing but what was on its way."""
    write_run(t + "/src/run")
    before = published(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        os.mkdir(m / "run/checkpoint-9")
        write_file(m / "run/checkpoint-9/model.safetensors", image(9))
        os.unlink(m / "run/.unshard/checkpoint.json")  # as rm -r begins
        shutil.rmtree(m / "run/checkpoint-9")
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "run/.unshard/checkpoint.json"))
        same("nothing is gone", published(t + "/src"), before)
        os.mkdir(m / "run/checkpoint-9")
        write_file(m / "run/checkpoint-9/model.safetensors", image(9))
        done = subprocess.run(["rm", "-r", m / "run"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False)
        same("rm -r: " + done.stderr, done.returncode, 0)
        same("all of it", os.listdir(t + "/src"), [])


def test_killed_before_publication(t):
    write_run(t + "/src/run")
    before = published(t + "/src")
    m = Mount(t + "/src", t + "/mnt", "rw")
    with m:
        save_step(m / "run/checkpoint-9", 9)
        m.process.kill()
        m.process.wait()
        m.process.returncode = 0
    same("nothing came", published(t + "/src"), before)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        assert "checkpoint-9" not in os.listdir(m / "run")
        save_step(m / "run/checkpoint-9", 10)
        subprocess.run([UNSHARD, "umount", m.path], check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    same("the step", stored(t + "/src/run/checkpoint-9"), make_tensors(10))
    same("what is left", [n for n in os.listdir(t + "/src/run") if n.startswith(".unshard")], [])


def test_the_working_directory_is_a_step(t):
    """Who stands in it goes on, before and after."""
    write_run(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        os.mkdir(m / "run/checkpoint-9")
        os.chdir(m / "run/checkpoint-9")
        try:
            write_file("model.safetensors", image(9))
            fsync(".")
            same("working directory", os.getcwd(), m / "run/checkpoint-9")
            assert os.path.samestat(os.stat("."), os.stat(m / "run/checkpoint-9"))
            same("bytes", read_all("model.safetensors"), image(9))
            same("above", sorted(os.listdir("..")), sorted(os.listdir(m / "run")))
        finally:
            os.chdir("/")


def test_the_source_itself_is_the_run(t):
    write_run(t + "/run")
    before = identities(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        save_step(m / "checkpoint-9", 9)
        fsync(m / "checkpoint-9")
        same_beside("all else", t + "/run", before, ["checkpoint-9"])
        write_file(m / "notes.txt", b"n")
        save_step(m / "checkpoint-10", 10)
        fsync(m.path)
    same("steps", [stored(f"{t}/run/checkpoint-{i}") for i in (9, 10)], [make_tensors(9), make_tensors(10)])
    same("the model", stored(t + "/run"), make_tensors(1))
    same("a side file", read_all(t + "/run/notes.txt"), b"n")


if __name__ == "__main__":
    main(globals())
