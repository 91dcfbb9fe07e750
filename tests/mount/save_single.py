# SPDX-License-Identifier: MIT
"""Files that are checkpoints by themselves (Lightning's .ckpt, .npz): to the mount through which they were written they stay files."""
import errno
import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import IDLE, PATIENCE, UNSHARD, Mount, fails, main, npy_image, read_all, same, wait_for, write_checkpoint, make_tensors  # noqa: E402
from save_over import image  # noqa: E402
from save_whole import DATA, files, fsync, published  # noqa: E402

CKPT = (DATA / "lightning/lightning_ckpt/last.ckpt").read_bytes()
OTHER = (DATA / "torch_file/pt_torch231/model.pt").read_bytes()


def put(path, data):
    """As open(path, "wb") of any program does it."""
    with open(path, "wb") as f:
        f.write(data)


def is_shown(m, path, data):
    """A regular file of these bytes, by name, by listing and by its size."""
    entry = next(x for x in os.scandir(os.path.dirname(m / path)) if x.name == os.path.basename(path))
    same(f"{path}: kind", (entry.is_file(), os.path.isfile(m / path), os.path.isdir(m / path)), (True, True, False))
    same(f"{path}: size", os.stat(m / path).st_size, len(data))
    same(f"{path}: bytes", read_all(m / path), data)


def settle(path):
    wait_for("publication", PATIENCE, lambda: not [n for n in os.listdir(path) if n.startswith(".unshard-staging")])


def test_one_file_stays_one(t):
    """Alone in its directory that is a checkpoint, too; the file is there beside its views."""
    os.makedirs(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m, Mount(t + "/src", t + "/other") as other:
        os.mkdir(m / "run")
        put(m / "run/epoch=0.ckpt", CKPT)
        is_shown(m, "run/epoch=0.ckpt", CKPT)
        fsync(m / "run")
        same("in the source", published(t + "/src"), {"run/epoch=0.ckpt": CKPT})
        is_shown(m, "run/epoch=0.ckpt", CKPT)
        assert os.listdir(m / "run/tensors"), "its tensors are there, too"
        wait_for("the other mount", PATIENCE, lambda: os.path.exists(other / "run/tensors"))
        assert not os.path.exists(other / "run/epoch=0.ckpt"), "to others it is a checkpoint"
        for i in range(3):  # other bytes, in one step
            data = (OTHER, CKPT)[i % 2]
            put(m / "run/epoch=0.ckpt", data)
            is_shown(m, "run/epoch=0.ckpt", data)
            same("until then it is the old one", published(t + "/src"), {"run/epoch=0.ckpt": (CKPT, OTHER)[i % 2]})
            fsync(m / "run")
            same("in the source", published(t + "/src"), {"run/epoch=0.ckpt": data})
            is_shown(m, "run/epoch=0.ckpt", data)
        os.rename(m / "run/epoch=0.ckpt", m / "run/last.ckpt")
        is_shown(m, "run/last.ckpt", OTHER)
        os.unlink(m / "run/last.ckpt")
        same("nothing is left", (os.listdir(m / "run"), os.listdir(t + "/src/run")), ([], []))


def test_files_stay_files(t):
    """Several in a directory: each a directory to others."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files", idle=IDLE) as m, Mount(t + "/src", t + "/other") as other:
        for name in ("epoch=0.ckpt", "last.ckpt"):
            put(m / f"run/{name}", CKPT)
        for name in ("epoch=0.ckpt", "last.ckpt"):
            wait_for("the other mount", PATIENCE, lambda n=name: os.path.isdir(other / f"run/{n}"))
            is_shown(m, f"run/{name}", CKPT)
        time.sleep(0.5)  # what a directory shows is looked at again after 0.4 s
        put(m / "run/last.ckpt", OTHER)
        is_shown(m, "run/last.ckpt", OTHER)
        same("until then it is the old one", published(t + "/src")["run/last.ckpt"], CKPT)
        wait_for("publication", PATIENCE, lambda: read_all(t + "/src/run/last.ckpt") == OTHER)
        settle(t + "/src")
        is_shown(m, "run/last.ckpt", OTHER)
        os.rename(m / "run/epoch=0.ckpt", m / "run/epoch=1.ckpt")
        is_shown(m, "run/epoch=1.ckpt", CKPT)
        put(m / "run/new.tmp", CKPT)
        os.rename(m / "run/new.tmp", m / "run/last.ckpt")  # over it, as atomic savers do
        is_shown(m, "run/last.ckpt", CKPT)
        put(m / "run/last.ckpt", OTHER)
        os.rename(m / "run/last.ckpt", m / "run/best.ckpt")  # before it was published
        is_shown(m, "run/best.ckpt", OTHER)
        put(m / "run/best.ckpt", CKPT)
        put(m / "run/new.tmp", OTHER)
        os.replace(m / "run/new.tmp", m / "run/best.ckpt")  # over what is on its way
        is_shown(m, "run/best.ckpt", OTHER)
        os.unlink(m / "run/epoch=1.ckpt")
        fsync(m / "run")
        same("in the source", published(t + "/src"), {"run/best.ckpt": OTHER})
        is_shown(m, "run/best.ckpt", OTHER)


def test_ways_to_write_over_one(t):
    """Cut, written to in the middle, appended to, several at once; what is not written stays."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        for name in ("a.ckpt", "b.ckpt", "c.ckpt", "d.ckpt"):
            put(m / f"run/{name}", CKPT)
        time.sleep(0.5)
        with open(m / "run/a.ckpt", "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\1")
        with open(m / "run/b.ckpt", "ab") as f:
            f.write(b"more")
        os.truncate(m / "run/c.ckpt", 100)
        want = {"run/a.ckpt": CKPT[:-1] + b"\1", "run/b.ckpt": CKPT + b"more", "run/c.ckpt": CKPT[:100]}
        same("until then", published(t + "/src"), dict.fromkeys([*want, "run/d.ckpt"], CKPT))
        same("shown", {n: read_all(m / n) for n in want}, want)
        fsync(m / "run")
        same("in the source", published(t + "/src"), {**want, "run/d.ckpt": CKPT})
        same("shown then", {n: read_all(m / n) for n in want}, want)
        with open(m / "run/d.ckpt", "wb") as f:
            f.write(OTHER)
            fails("while it is open", errno.EBUSY, lambda: fsync(m / "run"))
        os.unlink(m / "run/d.ckpt")
        assert not os.path.exists(t + "/src/run/d.ckpt"), "what was there goes with what was to come"
        os.chmod(m / "run/b.ckpt", 0o640)
        os.utime(m / "run/b.ckpt", (1, 2))
        same("rights and times", (os.stat(t + "/src/run/b.ckpt").st_mode & 0o777, os.stat(t + "/src/run/b.ckpt").st_mtime), (0o640, 2))


def test_what_others_write_into_one_stays(t):
    """In place, or as another file that the disk gives the same number."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        put(m / "run/a.ckpt", CKPT)
        time.sleep(0.5)
        with open(m / "run/a.ckpt", "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\1")
        with open(t + "/src/run/a.ckpt", "r+b") as f:
            f.write(OTHER)
        theirs = read_all(t + "/src/run/a.ckpt")
        fails("publication", errno.EINVAL, lambda: fsync(m / "run"))
        same("theirs", read_all(t + "/src/run/a.ckpt"), theirs)
        same("ours is kept", read_all(m / "run/a.ckpt"), CKPT[:-1] + b"\1")
        os.unlink(m / "run/a.ckpt")
        put(m / "run/b.ckpt", CKPT)
        time.sleep(0.5)
        put(m / "run/b.ckpt", CKPT)
        os.unlink(t + "/src/run/b.ckpt")
        put(t + "/src/run/b.ckpt", OTHER)
        fails("publication", errno.EINVAL, lambda: fsync(m / "run"))
        same("theirs", read_all(t + "/src/run/b.ckpt"), OTHER)


def is_refused(path):
    try:
        put(path, image(1))
        return False
    except OSError as e:
        same("errno", e.errno, errno.EROFS)
        return True


def test_a_tensors_file_beside_them_is_refused(t):
    """As where others wrote them: one more file of tensors would be taken for all of them."""
    os.makedirs(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        for i in range(8):  # the slower a look at a directory is, the later is the next one
            run = f"run{i}"
            os.mkdir(t + f"/src/{run}")
            wait_for("the directory", PATIENCE, lambda run=run: os.path.isdir(m / run))
            put(m / run + "/a.ckpt", CKPT)
            put(m / run + "/b.ckpt", CKPT)
            time.sleep(0.5 + i)
            if is_refused(m / run + "/model.safetensors"):
                break
        else:
            raise AssertionError("a model is taken")
        put(m / run + "/a.ckpt", OTHER)
        fails("also while they are on their way", errno.EROFS, lambda: put(m / run + "/model.safetensors", image(1)))
        os.mkdir(m / run + "/checkpoint-1")
        put(m / run + "/checkpoint-1/model.safetensors", image(1))
        fsync(m / run + "/checkpoint-1")
        fsync(m / run)
    there = {n: data for n, data in published(t + "/src").items() if n.startswith(run + "/")}
    same("in the source", there, {f"{run}/a.ckpt": OTHER, f"{run}/b.ckpt": CKPT, f"{run}/checkpoint-1/model.safetensors": image(1)})


def test_arrays_stay_files(t):
    """numpy.save and savez into a directory, one after the other with a pause: formats that nobody changes here."""
    os.makedirs(t + "/src")
    images = {f"{i}.npy": npy_image("<f4", (2, i + 1), bytes(8 * (i + 1))) for i in range(3)}
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        os.mkdir(m / "new")
        for name, data in images.items():
            put(m / f"new/{name}", data)
            fsync(m / "new")
            is_shown(m, f"new/{name}", data)
        put(m / "new/0.npy", images["1.npy"])
        fsync(m / "new")
        is_shown(m, "new/0.npy", images["1.npy"])
    images["0.npy"] = images["1.npy"]
    same("in the source", files(t + "/src/new"), images)


def test_what_others_wrote_is_a_directory(t):
    """By the contract: until this mount writes a file of that name."""
    os.makedirs(t + "/src/run")
    for name in ("a.ckpt", "b.ckpt"):
        put(f"{t}/src/run/{name}", CKPT)
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        for name in ("a.ckpt", "b.ckpt"):
            assert os.path.isdir(m / f"run/{name}"), name
        fails("written over", errno.EISDIR, lambda: put(m / "run/a.ckpt", OTHER))
        shutil.rmtree(m / "run/a.ckpt")
        put(m / "run/a.ckpt", OTHER)
        is_shown(m, "run/a.ckpt", OTHER)
        fsync(m / "run")
        is_shown(m, "run/a.ckpt", OTHER)
        put(t + "/src/run/c.tmp", CKPT)
        os.rename(t + "/src/run/c.tmp", t + "/src/run/a.ckpt")  # somebody else's, in its place
        wait_for("the other one", PATIENCE, lambda: os.path.isdir(m / "run/a.ckpt"))
        put(m / "run/c.ckpt", OTHER)
        is_shown(m, "run/c.ckpt", OTHER)
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        assert os.path.isdir(m / "run/c.ckpt"), "the next mount did not write it"


def test_all_of_it_is_removed(t):
    """rm -r of a directory that is one file: whole, or not at all."""
    os.makedirs(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files", idle=IDLE) as m:
        os.mkdir(m / "run")
        put(m / "run/a.ckpt", CKPT)
        put(m / "run/notes.txt", b"n")
        fsync(m / "run")
        for name in (".unshard/checkpoint.json", "a.ckpt"):  # as rm -r begins
            os.unlink(m / f"run/{name}")
        assert not os.path.exists(m / "run/a.ckpt"), "it is hidden"
        wait_for("the end of what was begun", PATIENCE, lambda: os.path.exists(m / "run/a.ckpt"))
        same("nothing is gone", published(t + "/src"), {"run/a.ckpt": CKPT, "run/notes.txt": b"n"})
        done = subprocess.run(["rm", "-r", m / "run"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False)
        same("rm -r: " + done.stderr, done.returncode, 0)
        same("all of it", os.listdir(t + "/src"), [])
        os.mkdir(m / "run")
        put(m / "run/a.ckpt", CKPT)
        put(m / "run/b.ckpt", CKPT)
        fsync(m / "run")
        shutil.rmtree(m / "run")
        same("several", os.listdir(t + "/src"), [])


def test_beside_a_model_it_is_a_side_file(t):
    write_checkpoint(t + "/src/run", make_tensors(1))
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        put(m / "run/probe.ckpt", CKPT)
        fsync(m / "run")
        is_shown(m, "run/probe.ckpt", CKPT)
        put(m / "run/probe.ckpt", OTHER)
        fsync(m / "run")
        is_shown(m, "run/probe.ckpt", OTHER)
    same("in the source", read_all(t + "/src/run/probe.ckpt"), OTHER)


def test_killed_while_it_is_written_over(t):
    """The old one, whole."""
    os.makedirs(t + "/src/run")
    m = Mount(t + "/src", t + "/mnt", "rw,keep_files")
    with m:
        for name in ("a.ckpt", "b.ckpt"):
            put(m / f"run/{name}", CKPT)
        time.sleep(0.5)
        f = open(m / "run/a.ckpt", "wb")
        f.write(OTHER[:1000])
        f.flush()
        m.process.kill()
        m.process.wait()
        m.process.returncode = 0
        try:
            f.close()
        except OSError:
            pass
    same("in the source", published(t + "/src"), {"run/a.ckpt": CKPT, "run/b.ckpt": CKPT})
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        put(m / "run/c.ckpt", OTHER)
        shutil.rmtree(m / "run/a.ckpt")
        subprocess.run([UNSHARD, "umount", m.path], check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    same("what is left", published(t + "/src"), {"run/b.ckpt": CKPT, "run/c.ckpt": OTHER})


def test_a_tensor_of_it_is_changed(t):
    """By a view: the file has the new bytes, and is there as before."""
    os.makedirs(t + "/src")
    with Mount(t + "/src", t + "/mnt", "rw,keep_files") as m:
        os.mkdir(m / "run")
        put(m / "run/a.pt", OTHER)
        fsync(m / "run")
        with open(m / "run/raw/t", "r+b") as f:
            first = f.read(1)
            f.seek(0)
            f.write(bytes([first[0] ^ 1]))
        fsync(m / "run")
        now = read_all(t + "/src/run/a.pt")
        assert now != OTHER and len(now) == len(OTHER), "the file has the new byte"
        is_shown(m, "run/a.pt", now)
        put(m / "run/a.pt", OTHER)
        fails("a view of what is on its way", errno.EBUSY, lambda: open(m / "run/raw/t", "r+b"))
        fsync(m / "run")
        is_shown(m, "run/a.pt", OTHER)
    same("in the source", files(t + "/src"), {"run/a.pt": OTHER})


if __name__ == "__main__":
    main(globals())
