# SPDX-License-Identifier: MIT
"""Saving into a mounted bucket: a new checkpoint appears whole or not at all; what is there is never changed."""
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "remote"))
from bucket_server import BucketServer  # noqa: E402
from mountlib import PATIENCE, UNSHARD, Mount, fails, main, make_tensors, read_all, safetensors_image, same, stored, wait_for, write_file  # noqa: E402


class Bucket(BucketServer):
    def mount(self, t, options="rw", name="mnt", source="s3://bucket/runs", **more):
        cache = {"XDG_CACHE_HOME": t + "/cache"}
        self.objects.setdefault("runs/notes.txt", (b"notes", None))
        return Mount(source, f"{t}/{name}", options, env={**os.environ, **self.env(), **cache}, **more)

    def names(self, prefix="runs/step1/"):
        return sorted(self.tree(prefix))

    def stored(self, t, prefix="runs/step1/"):
        """Its tensors, by the tests' own reader."""
        where = f"{t}/stored"
        os.makedirs(where, exist_ok=True)
        for name in os.listdir(where):
            os.unlink(f"{where}/{name}")
        for name, data in self.tree(prefix).items():
            if name.endswith(".safetensors"):
                with open(f"{where}/{name}", "wb") as f:
                    f.write(data)
        return stored(where)

    def check_nothing_left(self):
        same("uploads", self.uploads, {})
        same("journals", [k for k in self.objects if "unshard-staging" in k], [])


def umount(m, env, ok=True):
    done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=600, env={**os.environ, **env})
    assert (done.returncode == 0) == ok, done
    if ok:
        m.process.wait(PATIENCE)
        same("exit", m.process.returncode, 0)
    return done.stderr


def spools(t):
    """What lies in the cache directory of what was written."""
    return [n for _, _, names in os.walk(t + "/cache/unshardfs/spool") for n in names]


def write_checkpoint(path, tensors):
    os.mkdir(path)
    write_file(path + "/model.safetensors", safetensors_image(tensors))
    with open(path + "/config.json", "w") as f:
        f.write("{}")


def write_source(path, tensors):
    os.makedirs(path)
    with open(path + "/model.safetensors", "wb") as f:
        f.write(safetensors_image(tensors))
    with open(path + "/config.json", "w") as f:
        f.write("{}")


def test_a_new_checkpoint(t):
    tensors = make_tensors(1, rows=9000)
    with Bucket() as s, s.mount(t) as m:
        write_checkpoint(m / "step1", tensors)
        same("staged names", sorted(os.listdir(m / "step1")), ["config.json", "model.safetensors"])
        same("nothing is published yet", s.names(), [])
        umount(m, s.env())
        same("names", s.names(), ["config.json", "model.safetensors"])
        same("the last object", s.history[-1], "runs/step1/model.safetensors")
        same("tensors", s.stored(t), tensors)
        s.check_nothing_left()
        same("spools", spools(t), [])


def test_directory_bucket(t):
    tensors, name = make_tensors(1, rows=9000), "runs--use1-az4--x-s3"
    with Bucket(bucket=name) as s, s.mount(t, source=f"s3://{name}/runs") as m:
        write_checkpoint(m / "step1", tensors)
        umount(m, s.env())
        same("tensors", s.stored(t), tensors)
        s.check_nothing_left()


def test_what_a_framework_writes_stays(t):
    """A checkpoint with metadata of its own, and safetensors files that are shards: sent as they are."""
    data = pathlib.Path(__file__).resolve().parent.parent / "data"
    for i, (name, options) in enumerate((("torch_dcp/dcp_minimal_handmade", "rw,save=dcp:ranks=2"), ("hf_dcp/hfdcp_row_5", "rw"))):
        with Bucket() as s, s.mount(t, options, f"mnt{i}") as m:
            shutil.copytree(data / name, m / "step1")
            umount(m, s.env())
            same(name, s.tree("runs/step1/"), {str(f.relative_to(data / name)): f.read_bytes() for f in (data / name).rglob("*") if f.is_file()})
            s.check_nothing_left()


def test_read_back(t):
    """Renamed into place, seen at once through the same mount, and through another."""
    tensors = make_tensors(2)
    with Bucket() as s:
        with s.mount(t, "rw,save=dcp:ranks=2") as m:
            write_checkpoint(m / "step1.tmp", tensors)
            os.rename(m / "step1.tmp", m / "step1")
            same("names", s.names(), [".metadata", "__0_0.distcp", "__1_0.distcp", "config.json"])
            same("the last object", s.history[-1], "runs/step1/.metadata")
            wait_for("the views", PATIENCE, lambda: os.path.exists(m / "step1/tensors"))
            for key, (_, _, data) in tensors.items():
                same(key, read_all(m / f"step1/raw/{key}"), data)
            same("listed", sorted(os.listdir(m.path)), ["notes.txt", "step1"])
            umount(m, s.env())
        with s.mount(t, "ro", "mnt2") as m:
            with open(m / "step1/.unshard/checkpoint.json") as f:
                same("format", json.load(f)["format"], "torch-dcp")
            for key, (_, _, data) in tensors.items():
                same(key, read_all(m / f"step1/raw/{key}"), data)
        s.check_nothing_left()


def test_published_when_idle(t):
    with Bucket() as s, s.mount(t, idle=None) as m:
        begin = time.monotonic()
        write_checkpoint(m / "step1", make_tensors(1))
        wait_for("publication", PATIENCE, lambda: "model.safetensors" in s.names())
        assert time.monotonic() - begin > 4, "it was still being written"
        umount(m, s.env())


def test_what_is_there_stays(t):
    """Every way to change it is refused, with the reason; the bucket is as it was."""
    with Bucket() as s, s.mount(t) as m:
        write_checkpoint(m / "step1", make_tensors(1))
        os.rename(m / "step1", m / "step2")
        before = dict(s.objects)
        closed = errno.EROFS if os.geteuid() == 0 else errno.EACCES  # nobody may write to an object
        fails("a tensor", errno.EROFS, lambda: open(m / "step2/tensors/new.npy", "wb"))
        fails("the file", closed, lambda: open(m / "step2/model.safetensors", "wb"))
        fails("a side file", closed, lambda: open(m / "step2/config.json", "w"))
        fails("unlink", errno.EROFS, lambda: os.unlink(m / "step2/config.json"))
        fails("rename", errno.EROFS, lambda: os.rename(m / "step2", m / "step3"))
        fails("a file beside", errno.EROFS, lambda: open(m / "latest", "w"))
        fails("notes", closed, lambda: open(m / "notes.txt", "a"))
        fails("unlink notes", errno.EROFS, lambda: os.unlink(m / "notes.txt"))
        fails("mkdir", errno.EEXIST, lambda: os.mkdir(m / "step2"))
        assert "object store" in m.messages(), m.messages()
        umount(m, s.env())
        same("objects", s.objects, before)


def test_a_store_that_fails(t):
    """Publication fails: told, nothing of it stays in the bucket, the stage does; later it goes."""
    tensors = make_tensors(1)
    with Bucket() as s, s.mount(t, "rw,save=hf:max_shard_size=20K") as m:
        write_checkpoint(m / "step1", tensors)
        for pattern in "partNumber=", "config[.]json", "index[.]json":
            s.fault(403, "PUT", pattern, count=1000)
            said = umount(m, s.env(), ok=False)
            assert "AccessDenied" in said, said
            same(f"{pattern}: nothing is seen", s.names(), [])
            s.check_nothing_left()
            s.faults.clear()
        assert os.path.exists(m / "step1/model.safetensors")
        umount(m, s.env())
        same("tensors", s.stored(t), tensors)
        s.check_nothing_left()


def test_killed(t):
    """Killed while it uploads: no checkpoint is seen; the next save of this host to that name ends what was begun."""
    tensors, hf = make_tensors(3), "rw,save=hf:max_shard_size=20K"
    write_source(t + "/src", tensors)
    for i, (method, pattern) in enumerate((("PUT", "partNumber="), ("PUT", "config[.]json"), ("PUT", "index[.]json"))):
        with Bucket() as s:
            with s.mount(t, hf, f"mnt{i}") as m:
                def kill():
                    m.process.send_signal(signal.SIGKILL)
                    m.process.wait()
                    return "reset"

                s.fault(kill, method, pattern)
                write_checkpoint(m / "step1", make_tensors(1))
                asks = threading.Thread(target=subprocess.run, args=([UNSHARD, "umount", m.path],), kwargs={"capture_output": True})
                asks.start()
                m.process.wait(PATIENCE)
                m.process.returncode = 0
            asks.join(PATIENCE)
            s.wait_idle()
            assert not any(n.endswith("index.json") for n in s.names()), s.names()
            same(f"{pattern}: shards are seen", s.names() != [], i > 0)
            if i == 0:
                with s.mount(t, hf, "again") as m:
                    write_checkpoint(m / "step1", tensors)
                    umount(m, s.env())
            else:
                subprocess.run([UNSHARD, "convert", t + "/src", "s3://bucket/runs/step1", "--to", "hf"], check=True,
                               env={**os.environ, **s.env(), "XDG_CACHE_HOME": t + "/cache"}, timeout=600)
                same("names", s.names(), ["config.json", "model.safetensors"])
            same("tensors", s.stored(t), tensors)
            s.check_nothing_left()


def test_another_writer(t):
    """rename(2) publishes, or says that another host is saving under that name; it stays what it was then."""
    tensors, journal = make_tensors(1), "runs/.unshard-staging-step1/journal.1-of-1"
    with Bucket() as s, s.mount(t) as m:
        s.objects[journal] = (b"unshardfs mount-save host elsewhere boot 1 pid 1\n", None)
        write_checkpoint(m / "step1.tmp", tensors)
        fails("rename", errno.EBUSY, lambda: os.rename(m / "step1.tmp", m / "step1"))
        del s.objects[journal]
        os.rename(m / "step1.tmp", m / "step1")
        same("tensors", s.stored(t), tensors)
        s.check_nothing_left()


def test_other_stores(t):
    """https:// is not written."""
    done = subprocess.run([UNSHARD, "mount", "http://127.0.0.1:9/x", t, "-o", "rw", "-f"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0, done


if __name__ == "__main__":
    main(globals())
