# SPDX-License-Identifier: MIT
"""Writing to a mounted bucket: names are objects, close(2) waits for the upload, views stay read-only."""
import errno
import json
import mmap
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "remote"))
from bucket_server import BucketServer  # noqa: E402
from mountlib import PATIENCE, UNSHARD, Mount, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, tensor_bytes, wait_for, write_file  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
LARGE = 20 << 20  # in parts


class Bucket(BucketServer):
    def mount(self, t, options="rw", name="mnt", source=None, **more):
        cache = {"XDG_CACHE_HOME": t + "/cache"}
        self.objects.setdefault("runs/notes.txt", (b"notes", None))
        return Mount(source or f"s3://{self.bucket}/runs", f"{t}/{name}", options, env={**os.environ, **self.env(), **cache}, **more)

    def files(self, prefix="runs/"):
        return {name: data for name, data in self.tree(prefix).items() if name != "notes.txt"}

    def check_uploads(self):
        same("uploads", self.uploads, {})


def umount(m, env):
    done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=600, env={**os.environ, **env})
    same("umount", (done.returncode, done.stderr), (0, ""))
    m.process.wait(PATIENCE)
    same("exit", m.process.returncode, 0)


def files_of(root):
    """{name below it: bytes}"""
    return {str(f.relative_to(root)): f.read_bytes() for f in pathlib.Path(root).rglob("*") if f.is_file()}


def put(path, data, mode="wb"):
    with open(path, mode) as f:
        f.write(data)


def write_checkpoint(path, tensors):
    os.mkdir(path)
    write_file(path + "/model.safetensors", safetensors_image(tensors))
    put(path + "/config.json", b"{}")


def work(root):
    """What trainers do to files, in a directory."""
    write_checkpoint(f"{root}/step1", make_tensors(1))
    shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", f"{root}/dcp")
    os.makedirs(f"{root}/a/b/c")
    put(f"{root}/a/b/c/large", tensor_bytes(1, LARGE))
    put(f"{root}/a/empty", b"")
    put(f"{root}/latest", b"step1")
    put(f"{root}/latest", b"dcp")
    put(f"{root}/log", b"one\n")
    put(f"{root}/log", b"two\n", "ab")
    with open(f"{root}/a/b/c/large", "r+b") as f:
        f.seek(LARGE - 3)
        f.write(b"in place")
        f.seek(5)
        same("read back", f.read(3), tensor_bytes(1, LARGE)[5:8])
    put(f"{root}/hole", b"")
    os.truncate(f"{root}/hole", 70000)
    put(f"{root}/cut", b"0123456789")
    os.truncate(f"{root}/cut", 4)
    with open(f"{root}/mapped", "w+b") as f:
        f.truncate(9000)
        with mmap.mmap(f.fileno(), 9000) as page:
            page[100:105] = b"pages"
    fd = os.open(f"{root}/log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"three\n")
    os.rename(f"{root}/log", f"{root}/a/log")
    os.write(fd, b"four\n")
    os.close(fd)
    put(f"{root}/over", b"new")
    with open(f"{root}/cut", "rb") as reader:
        os.rename(f"{root}/over", f"{root}/cut")
        same("who has it open", reader.read(), b"0123")
    put(f"{root}/gone", b"gone")
    with open(f"{root}/gone", "r+b") as f:
        os.unlink(f"{root}/gone")
        f.write(b"G")
        f.seek(0)
        same("without a name", f.read(), b"Gone")
    os.makedirs(f"{root}/tmp/deep")
    put(f"{root}/tmp/deep/x", b"x")
    shutil.rmtree(f"{root}/tmp")
    fails("not empty", errno.ENOTEMPTY, lambda: os.rmdir(f"{root}/a"))
    fails("exclusive", errno.EEXIST, lambda: open(f"{root}/latest", "x"))
    fails("a directory", errno.EISDIR, lambda: open(f"{root}/a", "wb"))
    fails("mkdir", errno.EEXIST, lambda: os.mkdir(f"{root}/a"))
    fails("there is none", errno.ENOENT, lambda: open(f"{root}/nowhere/x", "wb"))
    same("names", sorted(os.listdir(root)), ["a", "cut", "dcp", "hole", "latest", "mapped", "notes.txt", "step1"])
    same("sizes", [os.stat(f"{root}/{n}").st_size for n in ("cut", "hole", "a/log")], [3, 70000, 19])


def test_as_on_a_disk(t):
    """The same names and bytes as the same run leaves on a disk; also of a directory bucket, and after a new mount."""
    os.mkdir(t + "/disk")
    put(t + "/disk/notes.txt", b"notes")
    work(t + "/disk")
    expected = files_of(t + "/disk")
    for i, bucket in enumerate(("bucket", "runs--use1-az4--x-s3")):
        with Bucket(bucket=bucket) as s, s.mount(t, name=f"mnt{i}") as m:
            s.old_sessions, s.copies = True, i == 0
            work(m.path)
            same("objects", {k: v for k, v in s.tree("runs/").items()}, expected)
            same("files", files_of(m.path), expected)
            umount(m, s.env())
            same("objects", s.tree("runs/"), expected)
            same("keys", [k for k in s.objects if not k.startswith("runs/")], [])
            s.check_uploads()
            same("spools", [n for _, _, names in os.walk(t + "/cache") for n in names if "spool" in n], [])


def test_close_waits(t):
    """The object is there when close(2) or fsync(2) has returned; another mount sees it then."""
    with Bucket() as s, s.mount(t) as m:
        for size in 0, 5, LARGE:
            data = tensor_bytes(size, size)
            fd = os.open(m / f"f{size}", os.O_WRONLY | os.O_CREAT)
            os.write(fd, data)
            assert f"f{size}" not in s.files(), "too early"
            os.fsync(fd)
            same("after fsync", s.files()[f"f{size}"] == data, True)
            os.pwrite(fd, b"end", size)
            os.close(fd)
            same("after close", s.files()[f"f{size}"] == data + b"end", True)
        first = os.open(m / "two", os.O_WRONLY | os.O_CREAT)
        second = os.open(m / "two", os.O_WRONLY)
        os.write(first, b"12")
        os.close(first)
        assert "two" not in s.files(), "somebody writes it yet"
        os.pwrite(second, b"34", 2)
        os.close(second)
        same("by the last one", s.files()["two"], b"1234")
        puts = len(s.history)
        put(m / "two", b"", "r+b")
        open(m / "two", "ab").close()
        same("nothing was written", len(s.history), puts)
        with s.mount(t, "ro", "other") as other:
            same("another mount", read_all(other / "two"), b"1234")


def test_order(t):
    """Objects come in the order in which their files are closed: what makes a checkpoint of them comes last."""
    files = ["dcp_minimal_handmade/" + n for n in ("__0_0.distcp", "__1_0.distcp", ".metadata")]
    with Bucket() as s, s.mount(t) as m:
        os.mkdir(m / "dcp_minimal_handmade")
        there = [n for n in files if (DATA / "torch_dcp" / n).exists()]
        for name in there:
            same("no checkpoint yet", os.path.exists(m / "dcp_minimal_handmade/tensors"), False)
            shutil.copyfile(DATA / "torch_dcp" / name, m / name)
        same("order", s.history, ["runs/" + n for n in there])
        same("the last", s.history[-1], "runs/dcp_minimal_handmade/.metadata")
        assert os.listdir(m / "dcp_minimal_handmade/tensors")


def close_fails(path, data, code):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, data)
    fails("close", code, lambda: os.close(fd))


def test_a_store_that_fails(t):
    """close(2) says so; the object is the old one, or there is none; of the upload nothing is left."""
    with Bucket() as s, s.mount(t) as m:
        put(m / "old", b"old")
        for method, pattern, size in (("PUT", "", 4), ("POST", "uploads", LARGE), ("PUT", "partNumber=2", LARGE), ("POST", "uploadId=", LARGE)):
            s.fault(403, method, pattern, count=1000)
            close_fails(m / "new", bytes(size), errno.EACCES)
            close_fails(m / "old", bytes(size), errno.EACCES)
            fd = os.open(m / "synced", os.O_WRONLY | os.O_CREAT)
            os.write(fd, bytes(size))
            fails("fsync", errno.EACCES, lambda: os.fsync(fd))
            s.faults.clear()
            os.close(fd)
            same("sent again by close(2)", s.files()["synced"] == bytes(size), True)
            os.unlink(m / "synced")
            same(pattern, s.files(), {"old": b"old"})
            same("names", sorted(os.listdir(m.path)), ["notes.txt", "old"])
            same("bytes", read_all(m / "old"), b"old")
            s.check_uploads()
        s.fault(403, "DELETE", "", count=1)
        fails("unlink", errno.EACCES, lambda: os.unlink(m / "old"))
        s.fault(403, "DELETE", "", count=1)
        fails("rename", errno.EACCES, lambda: os.rename(m / "old", m / "older"))
        same("both", s.files(), {"old": b"old", "older": b"old"})
        assert "AccessDenied" in m.messages(), m.messages()


def test_a_store_that_stumbles(t):
    """Requests that fail for a moment, or whose answer is lost, are sent again: also the last one of an upload."""
    with Bucket() as s, s.mount(t) as m:
        for i, how in enumerate((503, "reset", "lost")):
            for j, (method, pattern, size) in enumerate((("PUT", "f", 4), ("PUT", "partNumber=2", LARGE), ("POST", "uploadId=", LARGE))):
                name, data = f"f{i}{j}", tensor_bytes(i, size)
                s.fault(how, method, pattern)
                put(m / name, data)
                same(f"{how} {pattern}", s.files()[name] == data, True)
                same("read", read_all(m / name) == data, True)
        s.check_uploads()
        s.fault(503, "GET", "list-type", count=2)
        put(m / "after", b"1")
        same("listed", "after" in os.listdir(m.path), True)


class HeldBucket(Bucket):
    """Gives a list as it was when it was asked for, some time later."""
    held = None

    def list_objects(self, q):
        answer, held = super().list_objects(q), self.held
        if held:
            self.held = None
            held[0].set()
            self.lock.release()
            held[1].wait(PATIENCE)
            self.lock.acquire()
        return answer


def test_listings_are_of_now(t):
    """A list that was asked for before an object was written, and comes after, hides nothing."""
    with HeldBucket() as s, s.mount(t) as m:
        put(m / "first", b"1")
        fd = os.open(m / "second", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"2")
        put(m / "third", b"3")
        s.held = asked, go = threading.Event(), threading.Event()
        looks = threading.Thread(target=os.listdir, args=(m.path,))
        looks.start()
        assert asked.wait(PATIENCE)
        os.fsync(fd)
        after = []
        later = threading.Thread(target=lambda: after.append(sorted(os.listdir(m.path))))
        later.start()
        os.close(fd)
        go.set()
        looks.join(PATIENCE)
        later.join(PATIENCE)
        same("asked for later", after, [["first", "notes.txt", "second", "third"]])
        same("now", sorted(os.listdir(m.path)), ["first", "notes.txt", "second", "third"])
        same("read", read_all(m / "second"), b"2")


def test_killed(t):
    """The server is killed while it sends: the object is the old one, and the next mount writes it."""
    for i, (method, pattern, size) in enumerate((("PUT", "runs/old", 5), ("PUT", "partNumber=2", LARGE), ("POST", "uploadId=", LARGE))):
        with Bucket() as s:
            with s.mount(t, name=f"mnt{i}") as m:
                def kill():
                    m.process.send_signal(signal.SIGKILL)
                    m.process.wait()
                    return "reset"

                put(m / "old", b"old")
                s.fault(kill, method, pattern)
                fd = os.open(m / "old", os.O_WRONLY | os.O_TRUNC)
                os.write(fd, bytes(size))
                try:
                    os.close(fd)
                    raise AssertionError("close(2) did not fail")
                except OSError as e:
                    same("errno", e.errno in (errno.ECONNABORTED, errno.ENOTCONN, errno.EINTR), True)
                m.process.wait(PATIENCE)
                m.process.returncode = 0
            s.wait_idle()
            s.faults.clear()
            same("objects", s.files(), {"old": b"old"})
            with s.mount(t, name=f"again{i}") as m:
                same("read", read_all(m / "old"), b"old")
                put(m / "old", b"new")
                same("written", s.files(), {"old": b"new"})


def test_ends(t):
    """SIGTERM with a file open: what was written goes to the store, as it would stand on a disk."""
    with Bucket() as s:
        with s.mount(t) as m:
            fd = os.open(m / "open", os.O_WRONLY | os.O_CREAT)
            os.write(fd, b"so far")
            m.process.send_signal(signal.SIGTERM)
            m.process.wait(PATIENCE)
            try:
                os.close(fd)
            except OSError:
                pass
        same("objects", s.files(), {"open": b"so far"})


def test_a_program_that_is_killed(t):
    """What it wrote is there, as on a disk."""
    with Bucket() as s, s.mount(t) as m:
        script = "import os,sys\nfd=os.open(sys.argv[1],os.O_WRONLY|os.O_CREAT)\nos.write(fd,b'so far')\nos.kill(os.getpid(),9)"
        subprocess.run([sys.executable, "-c", script, m / "x"], check=False)
        wait_for("the object", PATIENCE, lambda: s.files() == {"x": b"so far"})


def test_views(t):
    """By name, of what was written through the same mount a moment ago; not listed, not to be changed."""
    tensors = make_tensors(2)
    with Bucket() as s, s.mount(t) as m:
        shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", m / "dcp")
        write_checkpoint(m / "step1", tensors)
        same("listed", sorted(os.listdir(m / "step1")), ["config.json", "model.safetensors"])
        for key, (_, _, data) in tensors.items():
            same(key, read_all(m / f"step1/raw/{key}"), data)
        with open(m / "step1/.unshard/checkpoint.json") as f:
            same("format", json.load(f)["format"], "hf-safetensors")
        same("attribute", os.getxattr(m / "step1", "user.unshard.format"), b"hf-safetensors")
        before = dict(s.objects)
        some = next(iter(tensors))
        for name in f"tensors/{some}.npy", f"raw/{some}":
            fails(name, errno.EROFS, lambda n=name: open(m / f"step1/{n}", "r+b"))
            fails(name, errno.EROFS, lambda n=name: open(m / f"step1/{n}", "wb"))
            fails(name, errno.EROFS, lambda n=name: os.truncate(m / f"step1/{n}", 0))
            fails(name, errno.EROFS, lambda n=name: os.unlink(m / f"step1/{n}"))
        fails("a new one", errno.EROFS, lambda: put(m / "step1/tensors/new.npy", npy_image("<f4", (1,), bytes(4))))
        fails("mkdir", errno.EROFS, lambda: os.mkdir(m / "step1/tensors/new"))
        fails("rename", errno.EXDEV, lambda: os.rename(m / f"step1/raw/{some}", m / "step1/x"))
        fails("in place", errno.EROFS, lambda: open(m / "dcp/model.safetensors", "r+b"))
        fails("rmdir", errno.EROFS, lambda: os.rmdir(m / "step1/tensors"))
        assert "cannot be changed" in m.messages(), m.messages()
        same("objects", s.objects, before)
        other = make_tensors(3)
        write_file(m / "step1/model.safetensors", safetensors_image(other))
        for key, (_, _, data) in other.items():
            same(key, read_all(m / f"step1/raw/{key}"), data)
        os.unlink(m / "step1/model.safetensors")
        same("no views", os.path.exists(m / "step1/tensors"), False)
        umount(m, s.env())
    with Bucket() as s, s.mount(t, "rw,views=tensors", "listed") as m:
        write_checkpoint(m / "step1", tensors)
        same("listed", sorted(os.listdir(m / "step1")), ["config.json", "model.safetensors", "tensors"])


def test_a_file_over_a_view(t):
    """A name that is a view only: a new file of it is stored."""
    image = safetensors_image(make_tensors(1))
    with Bucket() as s, s.mount(t) as m:
        shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", m / "dcp")
        assert os.path.exists(m / "dcp/model.safetensors")
        put(m / "dcp/model.safetensors", image)
        same("stored", s.files("runs/dcp/")["model.safetensors"], image)
        same("read", read_all(m / "dcp/model.safetensors"), image)


def test_names(t):
    """What an object store has no way for is refused; modes and times are taken and not kept."""
    with Bucket() as s, s.mount(t) as m:
        put(m / "f", b"1")
        os.mkdir(m / "d")
        fails("link", errno.ENOTSUP, lambda: os.link(m / "f", m / "g"))
        fails("symlink", errno.ENOTSUP, lambda: os.symlink("f", m / "g"))
        fails("mkfifo", errno.ENOTSUP, lambda: os.mkfifo(m / "g"))
        fails("xattr", errno.ENOTSUP, lambda: os.setxattr(m / "f", "user.x", b"1"))
        fails("a directory", errno.EXDEV, lambda: os.rename(m / "d", m / "e"))
        fails("onto a directory", errno.EISDIR, lambda: os.rename(m / "f", m / "d"))
        fails("ours", errno.EACCES, lambda: put(m / ".unshard-staging-x", b""))
        os.chmod(m / "f", 0o600)
        os.utime(m / "f", (1, 1))
        same("mode", os.stat(m / "f").st_mode & 0o777, 0o644)
        s.objects["runs/theirs/x"] = (b"theirs", None)
        s.objects["runs/marked/"] = (b"", None)
        put(m / "g", b"2")
        same("names", sorted(os.listdir(m.path)), ["d", "f", "g", "marked", "notes.txt", "theirs"])
        os.rmdir(m / "marked")
        os.rmdir(m / "d")
        fails("again", errno.ENOENT, lambda: os.rmdir(m / "d"))
        same("objects", sorted(s.files()), ["f", "g", "theirs/x"])
        put(m / "theirs/x", b" too", "ab")
        same("appended", s.files()["theirs/x"], b"theirs too")


def test_rename(t):
    """By the store itself, or through this machine; of a file that is open, what it has then and later."""
    data = tensor_bytes(7, LARGE)
    for i, copies in enumerate((True, False)):
        with Bucket() as s, s.mount(t, name=f"mnt{i}") as m:
            s.copies = copies
            put(m / "a b+%25é", data)
            gets = len([1 for method, target in s.log if method == "GET" and "list-type" not in target])
            os.rename(m / "a b+%25é", m / "new")
            same("objects", s.files() == {"new": data}, True)
            same("fetched", len([1 for method, target in s.log if method == "GET" and "list-type" not in target]) > gets, not copies)
            same("read", read_all(m / "new") == data, True)
            s.fault(403, "PUT", "/third", count=9)
            fails("refused", errno.EACCES, lambda: os.rename(m / "new", m / "third"))
            same("objects", s.files() == {"new": data}, True)
            with open(m / "open", "wb", buffering=0) as f, open(m / "old", "wb", buffering=0) as old:
                f.write(b"one")
                old.write(b"old")
                os.rename(m / "open", m / "old")
                f.write(b"two")
                old.write(b"more")
                s.fault(403, "DELETE", "", count=1)
                fails("refused", errno.EACCES, lambda: os.rename(m / "old", m / "fourth"))
                os.unlink(m / "fourth")
            same("old", s.files()["old"], b"onetwo")
            same("names", sorted(s.files()), ["new", "old"])


def test_many_at_once(t):
    """Threads that write, read, rename and remove beside each other."""
    with Bucket() as s, s.mount(t) as m:
        wrong = []

        def writer(i):
            try:
                for j in range(6):
                    data = tensor_bytes(i * 100 + j, 3000)
                    write_file(m / f"f{i}", data)
                    same("read", read_all(m / f"f{i}"), data)
                    put(m / f"t{i}", data)
                    os.unlink(m / f"t{i}")
            except Exception as e:  # noqa: BLE001
                wrong.append(e)

        threads = [threading.Thread(target=writer, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same("wrong", wrong, [])
        same("objects", s.files(), {f"f{i}": tensor_bytes(i * 100 + 5, 3000) for i in range(8)})


def test_refused(t):
    """Stores that are not written, and options that do not go with one."""
    for source, options, words in (("http://127.0.0.1:9/x", "rw", ""), ("s3://bucket/runs", "rw,save=hf", "save=")):
        with Bucket() as s:
            s.objects["runs/x"] = (b"", None)
            done = subprocess.run([UNSHARD, "mount", source, t, "-o", options, "-f"], capture_output=True, text=True, timeout=600, check=False,
                                  env={**os.environ, **s.env(), "XDG_CACHE_HOME": t + "/cache"})
            assert done.returncode != 0 and words in done.stderr, done


if __name__ == "__main__":
    main(globals())
