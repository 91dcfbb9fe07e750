# SPDX-License-Identifier: MIT
"""Models that are saved into a directory that is there: a trainer makes its output directory first, and fills it later."""
import errno
import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import IDLE, PATIENCE, UNSHARD, Mount, Skip, fails, main, make_tensors, read_all, safetensors_image, same, stored, wait_for, write_checkpoint, write_file  # noqa: E402
from save_whole import files, fsync, published  # noqa: E402


def image(seed):
    """A model as save_pretrained writes it."""
    plain = safetensors_image(make_tensors(seed))
    size = int.from_bytes(plain[:8], "little")
    text = b'{"__metadata__":{"format":"pt"},' + plain[9:8 + size].rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + plain[8 + size:]


def save_file(path, data):
    """As safetensors does it: under another name, which becomes the file's before it is closed."""
    early = os.path.join(os.path.dirname(path), ".tmpQ1w2E3")
    fd = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, len(data))
    os.pwrite(fd, data[:1000], 0)
    os.rename(early, path)
    same("size of what is open", os.fstat(fd).st_size, len(data))
    os.pwrite(fd, data[1000:], 1000)
    os.close(fd)


KILLED = """
import os, signal, sys
early, path, image = sys.argv[1], sys.argv[2], sys.stdin.buffer.read()
fd = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
os.ftruncate(fd, len(image))
os.pwrite(fd, image[:1000], 0)
for name in sys.argv[3:] + [path]:
    os.rename(early, name)
    early = name
os.pwrite(fd, image[2000:], 2000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_saver_left_is_not_published(t):
    """It had the file open under its first name: what lacks are zeros where tensors should be."""
    os.makedirs(t + "/src/run")
    write_file(t + "/src/run/config.json", b"{}")
    data = image(1)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for more in ([], ["run/second.tmp"]):
            args = ["run/.tmpQ1w2E3", "run/model.safetensors", *more]
            subprocess.run([sys.executable, "-S", "-c", KILLED, *[m / x for x in args]], input=data, timeout=PATIENCE, check=False)
            fails("publication", errno.EIO, lambda: fsync(m / "run"))
            assert "from byte 1000" in m.messages(), m.messages()
            assert "model.safetensors" not in os.listdir(t + "/src/run"), "it is published with zeros"
            os.unlink(m / "run/model.safetensors")
        fd = os.open(m / "run/first.tmp", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, len(data))
        os.rename(m / "run/first.tmp", m / "run/second.tmp")
        os.rename(m / "run/second.tmp", m / "run/model.safetensors")
        fails("while it is written", errno.EBUSY, lambda: fsync(m / "run"))
        os.pwrite(fd, data, 0)
        os.close(fd)
        fsync(m / "run")
        same("in the source", read_all(t + "/src/run/model.safetensors"), data)


def test_what_the_disk_refused_a_saver_is_not_published(t):
    """The same where there is no room for what it writes on."""
    os.mkdir(t + "/disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", t + "/disk"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("no right to mount")
    try:
        os.makedirs(t + "/disk/src/run")
        data = image(1)
        with Mount(t + "/disk/src", t + "/mnt", "rw") as m:
            for early in (True, False):
                fd = os.open(m / "run/first.tmp", os.O_RDWR | os.O_CREAT)
                os.ftruncate(fd, len(data))
                os.pwrite(fd, data[:4096], 0)
                if not early:
                    os.rename(m / "run/first.tmp", m / "run/model.safetensors")
                with open(t + "/disk/full", "wb", buffering=0) as f:
                    fails("room", errno.ENOSPC, lambda: [f.write(bytes(4096)) for _ in range(1000)])
                fails("the rest", errno.ENOSPC, lambda: os.pwrite(fd, data[8192:], 8192))
                os.unlink(t + "/disk/full")
                if early:
                    os.rename(m / "run/first.tmp", m / "run/model.safetensors")
                os.close(fd)
                fails("publication", errno.ENOSPC, lambda: fsync(m / "run"))
                assert "model.safetensors" not in os.listdir(t + "/disk/src/run"), "it is published with zeros"
                if early:
                    os.unlink(m / "run/model.safetensors")
            with open(m / "run/model.safetensors", "r+b") as f:
                f.write(data)
            fsync(m / "run")
            same("written anew", read_all(t + "/disk/src/run/model.safetensors"), data)
    finally:
        subprocess.run(["umount", "-l", t + "/disk"], check=False)


def test_a_saver_that_stays_open_keeps_nobody_waiting(t):
    """What it has open is not published; what others have closed is."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw", idle=2) as m:
        os.mkdir(m / "step_1")
        with open(m / "step_1/model.safetensors", "wb") as other:
            with open(m / "run/first.tmp", "wb") as f:
                f.write(image(1))
                f.flush()
                os.rename(m / "run/first.tmp", m / "run/model.safetensors")
                wait_for("the time at which it would be published", PATIENCE, lambda begun=time.monotonic(): time.monotonic() > begun + 3)
                other.write(image(2))
                other.close()
                wait_for("the other one", PATIENCE, lambda: os.path.exists(t + "/src/step_1/model.safetensors"))
                assert m.messages().count("open for writing") == 0, m.messages()
        wait_for("this one", PATIENCE, lambda: os.path.exists(t + "/src/run/model.safetensors"))


def write_output(path):
    """What a run has left beside the model that is to come."""
    os.makedirs(path, exist_ok=True)
    write_file(path + "/config.json", b'{"model_type": "llama"}\n')
    write_checkpoint(path + "/checkpoint-500", make_tensors(5))
    os.makedirs(path + "/runs")
    write_file(path + "/runs/events", b"one line\n")


def test_a_model_comes_to_a_directory_that_is_there(t):
    """Copied or saved; in the source nothing is to be seen of it until all of it is there."""
    for name in ("copied", "saved", "empty"):
        os.makedirs(t + "/src/" + name)
        if name != "empty":
            write_output(t + "/src/" + name)
    before, data = files(t + "/src"), image(1)
    write_file(t + "/file", data)
    with Mount(t + "/src", t + "/mnt", "rw", idle=IDLE) as m:
        with open(t + "/src/saved/runs/events", "rb") as log:
            shutil.copy(t + "/file", m / "copied/model.safetensors")
            for name in ("saved", "empty"):
                save_file(m / name + "/model.safetensors", data)
            for name in ("copied", "saved", "empty"):
                same("bytes that are shown", read_all(m / name + "/model.safetensors"), data)
                assert "model.safetensors" in os.listdir(m / name) and ".tmpQ1w2E3" not in os.listdir(m / name), os.listdir(m / name)
                same("nothing in the source", {k: v for k, v in published(t + "/src").items() if not k.endswith(".tmpQ1w2E3")}, before)
            write_file(m / "saved/config.json", b'{"model_type": "gpt2"}\n')
            before["saved/config.json"] = b'{"model_type": "gpt2"}\n'
            fsync(m / "saved")
            same("the log is the same file", os.fstat(log.fileno()).st_ino, os.stat(t + "/src/saved/runs/events").st_ino)
        assert os.path.exists(m / "saved/.unshard/checkpoint.json"), "it is a checkpoint from now on"
        assert os.path.exists(m / "saved/checkpoint-500/.unshard/checkpoint.json"), "beside the one that was there"
        wait_for("the others to be published", PATIENCE, lambda: all(os.path.exists(f"{t}/src/{n}/model.safetensors") for n in ("copied", "empty")))
        wait_for("the end of it", PATIENCE, lambda: not any(".unshard-staging" in n for n in files(t + "/src")))
        for name in ("copied", "saved", "empty"):
            before[name + "/model.safetensors"] = data
        same("names", sorted(files(t + "/src")), sorted(before))
        assert files(t + "/src") == before, "other bytes"
        same("mode", os.stat(t + "/src/saved/model.safetensors").st_mode & 0o777, 0o600)
        save_file(m / "saved/model.safetensors", image(2))
        fsync(m / "saved")
        same("and again", stored(t + "/src/saved"), make_tensors(2))


def test_several_files_come_in_one_step(t):
    """A set is exchanged with what is there: the set whole, or the directory that was."""
    write_output(t + "/src/run")
    before = files(t + "/src")
    tensors = make_tensors(1)
    with Mount(t + "/src", t + "/mnt", "rw,save=dcp:ranks=2") as m:
        write_checkpoint(m / "run", tensors, shards=3)
        os.unlink(m / "run/model-00002-of-00003.safetensors")
        fails("a file of the set lacks", errno.EINVAL, lambda: fsync(m / "run"))
        same("nothing has changed", {k: v for k, v in published(t + "/src").items() if not k.endswith(".tmp-write")}, before)
        write_file(m / "run/model-00002-of-00003.safetensors", safetensors_image({k: tensors[k] for k in list(tensors)[1::3]}))
        with open(m / "run/runs/events", "ab", buffering=0) as log:
            log.write(b"before\n")
            fsync(m / "run")
            log.write(b"after\n")
        same("the log goes on", read_all(t + "/src/run/runs/events"), b"one line\nbefore\nafter\n")
        same("as save= says", sorted(os.listdir(t + "/src/run")), [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint-500", "config.json", "runs"])
        for key, (_, _, data) in tensors.items():
            same(key, read_all(m / "run/raw/" + key), data)
        same("the step that was there", stored(t + "/src/run/checkpoint-500"), make_tensors(5))


def test_what_is_staged_over_a_directory_is_changed(t):
    """Unlinked, renamed, written over: as in any directory."""
    os.makedirs(t + "/src/run")
    write_file(t + "/src/run/notes.txt", b"notes")
    write_file(t + "/src/run/part.safetensors.bak", image(3))
    data = image(1)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        save_file(m / "run/model.safetensors", data)
        os.unlink(m / "run/model.safetensors")
        same("it is gone, and its first name too", sorted(os.listdir(t + "/src/run")), ["notes.txt", "part.safetensors.bak"])
        same("nothing is staged", os.listdir(t + "/src"), ["run"])
        os.rename(m / "run/part.safetensors.bak", m / "run/a.safetensors")
        same("a file of the source", sorted(os.listdir(m / "run")), ["a.safetensors", "notes.txt"])
        os.rename(m / "run/a.safetensors", m / "run/model.safetensors")
        same("bytes", read_all(m / "run/model.safetensors"), image(3))
        fails("no place for it", errno.EEXIST, lambda: os.open(m / "run/model.safetensors", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        fails("a directory with tensors", errno.ENOTEMPTY, lambda: os.rmdir(m / "run"))
        save_file(m / "run/model.safetensors", data)  # over it
        write_file(t + "/src/run/model.safetensors", image(4))  # somebody else's
        fails("written over by others", errno.EINVAL, lambda: fsync(m / "run"))
        same("theirs stays", read_all(t + "/src/run/model.safetensors"), image(4))
        os.unlink(t + "/src/run/model.safetensors")
        same("ours too", read_all(m / "run/model.safetensors"), data)
        fsync(m / "run")
        same("names", sorted(os.listdir(t + "/src/run")), ["model.safetensors", "notes.txt"])
        same("bytes of it", read_all(t + "/src/run/model.safetensors"), data)


def test_a_model_is_saved_twice_before_it_is_published(t):
    """Under the same name first, which is hidden by then: the second one counts, whole."""
    write_output(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw,save=dcp:ranks=2") as m:
        before = published(t + "/src")
        for seed in (1, 2):
            save_file(m / "run/model.safetensors", image(seed))
            same("nothing in the source", {k: v for k, v in published(t + "/src").items() if not k.endswith(".tmpQ1w2E3")}, before)
        fsync(m / "run")
        same("names", sorted(os.listdir(t + "/src/run")), [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint-500", "config.json", "runs"])
        for key, (_, _, data) in make_tensors(2).items():
            same(key, read_all(m / "run/raw/" + key), data)


def test_a_model_beside_files_that_are_checkpoints_is_refused(t):
    """It would be taken for all of them."""
    os.makedirs(t + "/src/run")
    for name in ("a", "b"):
        write_file(f"{t}/src/run/{name}.safetensors", image(1))
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        fails("a third one", errno.EROFS, lambda: open(m / "run/c.safetensors", "wb"))
        same("nothing came", sorted(os.listdir(t + "/src/run")), ["a.safetensors", "b.safetensors"])


def test_steps_come_and_go_beside_a_model(t):
    """As a trainer saves: a step, the model, and the oldest step goes; also with fsync while others are on their way."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for i in range(5):
            os.mkdir(m / f"run/checkpoint-{i}")
            save_file(m / f"run/checkpoint-{i}/model.safetensors", image(i))
            write_file(m / f"run/checkpoint-{i}/scheduler.pt", b"state")
            save_file(m / "run/model.safetensors", image(10 + i))
            fsync(m / "run")
            same("the model", read_all(t + "/src/run/model.safetensors"), image(10 + i))
            same("the step", read_all(t + f"/src/run/checkpoint-{i}/model.safetensors"), image(i))
            if i > 1:
                shutil.rmtree(m / f"run/checkpoint-{i - 2}")
        same("what is left", sorted(os.listdir(t + "/src/run")), ["checkpoint-3", "checkpoint-4", "model.safetensors"])


def ages(run):
    """Trainers sort their checkpoints by them before they remove the oldest."""
    return {name: os.stat(os.path.join(run, name)).st_mtime_ns for name in ("checkpoint-4", "checkpoint-8", "checkpoint-8/logs", "checkpoint-12")}


def test_directories_keep_their_age(t):
    os.makedirs(t + "/src/there")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        want = {}
        for run in ("new", "there"):
            for name in ("checkpoint-12", "checkpoint-4", "checkpoint-8/logs"):  # no order by name
                os.makedirs(m / f"{run}/{name}")
                write_file(m / f"{run}/{name}/log", b"1")
                write_file(m / f"{run}/{name.split('/')[0]}/model.safetensors", image(name))
            want[run] = ages(m / run)
            fsync(m / f"{run}/checkpoint-4")
            fsync(m / run)
            same("in the mount", ages(m / run), want[run])
    for run, of_run in want.items():
        same("in the source", ages(f"{t}/src/{run}"), of_run)


def test_killed_before_publication(t):
    """Everything is as it was, and the next mount takes the rest away."""
    write_output(t + "/src/run")
    write_file(t + "/src/run/old.bin", image(3))
    before = files(t + "/src")
    m = Mount(t + "/src", t + "/mnt", "rw")
    with m:
        save_file(m / "run/model.safetensors", image(1))
        os.rename(m / "run/old.bin", m / "run/model.safetensors")
        m.process.kill()
        m.process.wait()
        m.process.returncode = 0
    same("all is there", published(t + "/src"), before)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        save_file(m / "run/model.safetensors", image(1))
        subprocess.run([UNSHARD, "umount", m.path], check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    before["run/model.safetensors"] = image(1)
    same("names", sorted(files(t + "/src")), sorted(before))
    assert files(t + "/src") == before, "other bytes"


if __name__ == "__main__":
    main(globals())
