#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Saving to an object store: unshard convert to s3://, killed, cut off, refused, shared by parts."""
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "cli")]
from bucket_server import BucketServer  # noqa: E402
from commands import DATA, DCP, DONE, ROOM, SOURCE, USAGE, Cli, main, same  # noqa: E402
from convert import HF, big_source  # noqa: E402
from mountlib import PATIENCE, UNSHARD  # noqa: E402

DEST = "s3://bucket/runs/step 1"
PREFIX = "runs/step 1/"
STAGING = "runs/.unshard-staging-step 1/"


def files(path):
    """{name: bytes} of all files below."""
    found = {}
    for root, _, names in os.walk(path):
        for name in names:
            full = os.path.join(root, name)
            with open(full, "rb") as f:
                found[os.path.relpath(full, path)] = f.read()
    return found


class Store(BucketServer):
    """A server, and unshard that saves to it."""

    def __init__(self, t, **more):
        super().__init__(**more)
        self.cli = Cli(t)

    def convert(self, src, *args, dest=DEST, **more):
        return self.cli.run("convert", src, dest, *args, env={**self.env(), **more.pop("env", {})}, **more)

    def start(self, src, *args):
        env = {**os.environ, "XDG_CACHE_HOME": self.cli.cache, **self.env()}
        return subprocess.Popen([UNSHARD, "convert", src, DEST, *args], env=env, stderr=subprocess.PIPE, text=True)

    def check_whole(self, want):
        """Exactly these files, and nothing else anywhere."""
        same("names", sorted(self.tree(PREFIX)), sorted(want))
        for name, data in self.tree(PREFIX).items():
            assert data == want[name], f"{name}: other bytes"
        same("uploads", self.uploads, {})
        same("what else is there", [k for k in self.objects if not k.startswith(PREFIX)], [])

    def requests(self, method, word):
        return [target for m, target in self.log if m == method and word in target]


def local(t, src, *args):
    """The same save to a local directory."""
    Cli(t).run("convert", src, t + "/want", *args)
    want = files(t + "/want")
    shutil.rmtree(t + "/want")
    return want


def test_formats(t):
    """Byte for byte what a local directory gets; the file that completes it comes last."""
    last = {"hf": "model.safetensors", "dcp": ".metadata", "dcp-hf": "model.safetensors.index.json", "pt": "pytorch_model.bin",
            "npz": "tensors.npz", "torch_dist": "metadata.json", "zarr": "metadata.json", "olmo": "config.yaml"}
    for to, name in last.items():
        args = ["--to", to]
        if to == "olmo":
            args += ["--drop", "objects"]
        want = local(t, HF, *args)
        with Store(t) as s:
            s.convert(HF, *args)
            s.check_whole(want)
            if name in want:
                same(f"{to}: the last object", s.history[-1], PREFIX + name)


def test_directory_bucket(t):
    """S3 Express: by a session's keys, which end in the middle of it, and go on."""
    src, name = big_source(t + "/src", tensors=3), "runs--use1-az4--x-s3"
    want = local(t, src, "--to", "dcp", "--ranks", "2")
    with Store(t, bucket=name) as s:
        s.fault("expired", "PUT", first=2)
        s.convert(src, "--to", "dcp", "--ranks", "2", dest=f"s3://{name}/runs/step 1")
        s.check_whole(want)
        same("sessions", s.sessions, 2)


def test_customer_key(t):
    """What is saved lies under a key of the user's own, objects and parts."""
    src = big_source(t + "/src", tensors=3)
    want = local(t, src, "--to", "dcp", "--ranks", "2")
    with open(t + "/key", "wb") as f:
        f.write(bytes(32))
    with Store(t) as s:
        s.customer_key = "A" * 43 + "="
        s.convert(src, "--to", "dcp", "--ranks", "2", env={"UNSHARD_CUSTOMER_KEY": t + "/key"})
        s.check_whole(want)


def test_large(t):
    """Many parts; tensors cut by rows and by columns; sums that go across parts."""
    src = big_source(t + "/src", tensors=6)
    for args in (["--to", "dcp", "--mesh", "2x2"], ["--to", "pt"], ["--to", "hf", "--max-shard-size", "20M"]):
        want = local(t, src, *args)
        with Store(t) as s:
            s.convert(src, *args)
            s.check_whole(want)
            assert len(s.requests("PUT", "partNumber=")) >= 6, s.log


def test_killed(t):
    """Killed at any request: nothing that a loader takes is seen, and the same command goes on."""
    src, args = big_source(t + "/src", tensors=3), ["--to", "dcp", "--ranks", "2"]
    want = local(t, src, *args)
    with Store(t) as s:
        s.convert(src, *args)
        count = len(s.log)
    resumed = 0
    for n in [*range(0, count - 2, 2), count - 2, count - 1]:
        with Store(t) as s:
            p = []
            ready = threading.Event()

            def kill():
                ready.wait(PATIENCE)
                p[0].send_signal(signal.SIGKILL)
                p[0].wait()
                return "lost" if n % 4 else "reset"

            s.fault(kill, first=n)
            p.append(s.start(src, *args))
            ready.set()
            p[0].wait(600)
            p[0].stderr.close()
            same(f"request {n}: status", p[0].returncode, -signal.SIGKILL)
            s.wait_idle()
            seen = s.tree(PREFIX)
            for name, data in seen.items():
                assert data == want[name], f"request {n}: half of {name} is seen"
            if ".metadata" in seen:
                same(f"request {n}: seen as a whole", sorted(seen), sorted(want))
            parts = sum(len(u["parts"]) for u in s.uploads.values()) + 2 * sum(name.endswith(".distcp") for name in seen)
            before = len(s.requests("PUT", "partNumber="))
            if STAGING + "journal.1-of-1" in s.objects or not seen:
                s.convert(src, *args)
            else:  # killed when all was done
                same(f"request {n}", n, count - 1)
            s.check_whole(want)
            again = len(s.requests("PUT", "partNumber=")) - before
            if parts:
                same(f"request {n}: parts sent again", again, 4 - parts)
                resumed += 1
    assert resumed >= 4, resumed


def test_faults(t):
    """What passes is tried again: refusals, resets, answers that are lost after the deed."""
    src, args = big_source(t + "/src", tensors=3), ["--to", "dcp", "--ranks", "2"]
    want = local(t, src, *args)
    for how in (503, 500, "reset", "lost"):
        with Store(t) as s:
            s.fault(how, "POST", "uploads=")
            s.fault(how, "PUT", "partNumber=", first=1, count=2)
            s.fault(how, "POST", "uploadId=")
            s.fault(how, "PUT", "journal", first=1)
            s.fault(how, "GET", "uploadId=")
            s.fault(how, "PUT", "notes.bin")
            s.fault(how, "PUT", "[.]metadata")
            s.fault(how, "DELETE", "")
            s.convert(src, *args)
            same(f"{how}: all struck", [f.left for f in s.faults], [0] * 8)
            s.check_whole(want)


def test_credentials(t):
    """Keys that expire amid a save are fetched anew; without others it ends, and goes on later."""
    src, args = big_source(t + "/src", tensors=3), ["--to", "dcp", "--ranks", "2"]
    want = local(t, src, *args)
    with open(t + "/keys", "w") as f:
        f.write("first")
    with open(t + "/config", "w") as f:
        f.write(f"[default]\ncredential_process = {sys.executable} {t}/give.py\n")
    with open(t + "/give.py", "w") as f:
        f.write(f"import json\nprint(json.dumps({{'Version': 1, 'AccessKeyId': open({t + '/keys'!r}).read(), 'SecretAccessKey': 's'}}))\n")
    with Store(t) as s:
        def expire():
            with open(t + "/keys", "w") as f:
                f.write("second")
            s.keys = {"second"}
            return "expired"

        s.keys = {"first"}
        s.fault(expire, "PUT", "partNumber=", first=1)
        s.convert(src, *args, env={"AWS_CONFIG_FILE": t + "/config", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""})
        s.check_whole(want)
    with Store(t) as s:
        s.fault("expired", "PUT", "partNumber=", first=2, count=1000)
        env = {**os.environ, **s.env()}
        done = subprocess.run([UNSHARD, "convert", src, DEST, *args], env=env, capture_output=True, text=True)
        same("status", done.returncode, ROOM)
        assert "ExpiredToken" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert "test-secret" not in done.stderr
        same("nothing is seen", s.tree(PREFIX), {})
        s.faults.clear()
        s.convert(src, *args)
        s.check_whole(want)


def test_parts(t):
    """Two processes, each its part, at once; killed and run again; --finish shows the whole."""
    src, args = big_source(t + "/src", tensors=6), ["--to", "dcp", "--ranks", "4"]
    want = local(t, src, *args)
    with Store(t) as s:
        def fails(words, *more):
            done = s.convert(src, *args, *more, status=USAGE)
            assert words in done.stderr, done.stderr

        fails("nothing to finish", "--finish")
        both = [s.start(src, *args, "--part", f"{i}/2") for i in (1, 2)]
        for p in both:
            same("status", (p.wait(600), p.stderr.read()), (0, ""))
            p.stderr.close()
        same("nothing is seen", s.tree(PREFIX), {})
        s.convert(src, *args, "--part", "2/2")  # again: nothing to do
        s.convert(src, *args, "--finish")
        s.check_whole(want)
        fails("nothing to finish", "--finish")
        fails("is there already", "--part", "1/2")
    with Store(t) as s:
        s.convert(src, *args, "--part", "1/3")
        s.convert(src, *args, "--part", "3/3")
        done = s.convert(src, *args, "--finish", status=USAGE)
        assert "part 2 of 3 has not begun" in done.stderr, done.stderr
        s.fault(403, "PUT", "partNumber=", count=1000)
        s.convert(src, *args, "--part", "2/3", status=ROOM)
        done = s.convert(src, *args, "--finish", status=USAGE)
        assert "part 2 of 3 is not done" in done.stderr, done.stderr
        s.faults.clear()
        s.convert(src, *args, "--part", "2/3")
        s.convert(src, *args, "--finish")
        s.check_whole(want)


def test_side_by_side(t):
    """Two processes of one save, at once: one is told, or both make the same; never another thing."""
    src, args = big_source(t + "/src", tensors=3), ["--to", "dcp", "--ranks", "2"]
    want = local(t, src, *args)
    with Store(t) as s:
        both = [s.start(src, *args) for _ in range(2)]
        status = []
        for p in both:
            p.wait(600)
            status.append(p.returncode)
            error = p.stderr.read()
            p.stderr.close()
            assert p.returncode == DONE or "another process" in error or "is there already" in error, error
        assert DONE in status, status
        s.check_whole(want)


def test_never_over_others(t):
    """What is there, or comes meanwhile, is never written over."""
    args = ["--to", "dcp", "--ranks", "2"]
    with Store(t) as s:
        s.objects[PREFIX + "theirs"] = (b"x", None)
        done = s.convert(HF, *args, status=USAGE)
        assert "s3://bucket/runs/step 1 is there already" in done.stderr, done.stderr
        same("objects", s.objects, {PREFIX + "theirs": (b"x", None)})
        same("uploads", s.uploads, {})
    for name in ".metadata", "__0_0.distcp", "config.json":
        with Store(t) as s:
            def come():
                s.objects[PREFIX + name] = (b"x", None)

            s.fault(come, "PUT", "journal", first=1)
            done = s.convert(HF, *args, status=SOURCE)
            assert "somebody else has written it meanwhile" in done.stderr, done.stderr
            same(name, s.objects[PREFIX + name], (b"x", None))
            assert name == ".metadata" or PREFIX + ".metadata" not in s.objects


def test_other_save(t):
    """What is begun there is of other options: refused, and left alone."""
    with Store(t) as s:
        s.fault(403, "PUT", "partNumber=", first=1, count=1000)
        s.convert(HF, "--to", "dcp", "--ranks", "3", status=ROOM)
        s.faults.clear()
        before = {k: dict(v["parts"]) for k, v in s.uploads.items()}
        done = s.convert(HF, "--to", "dcp", "--ranks", "4", status=USAGE)
        assert "holds another save" in done.stderr, done.stderr
        same("uploads", {k: dict(v["parts"]) for k, v in s.uploads.items()}, before)
        s.convert(HF, "--to", "dcp", "--ranks", "3")
        s.check_whole(local(t, HF, "--to", "dcp", "--ranks", "3"))


def test_ended_uploads(t):
    """Somebody ended our uploads (a rule of the bucket): the same command begins them anew."""
    src, args = big_source(t + "/src", tensors=3), ["--to", "dcp", "--ranks", "2"]
    with Store(t) as s:
        s.fault(403, "PUT", "partNumber=", first=2, count=1000)
        s.convert(src, *args, status=ROOM)
        s.faults.clear()
        s.uploads.clear()
        s.convert(src, *args)
        s.check_whole(local(t, src, *args))


def test_a_list_that_does_not_go_on(t):
    with Store(t) as s:
        s.endless = True
        s.convert(HF, "--to", "dcp", "--ranks", "2")
        asked = sum("uploads=" in str(entry) for entry in s.log)
        assert asked < 10, asked
        s.check_whole(local(t, HF, "--to", "dcp", "--ranks", "2"))


def test_no_conditions(t):
    """A store that knows no conditional writes."""
    with Store(t, conditional=False) as s:
        s.convert(HF, "--to", "dcp", "--ranks", "2")
        s.check_whole(local(t, HF, "--to", "dcp", "--ranks", "2"))


def test_usage(t):
    with Store(t) as s:
        for dest, words in {"https://host/x": "nothing is saved there", "hf://org/repo": "nothing is saved there",
                            "s3://bucket": "no name for a new checkpoint", "s3://bucket/": "no name for a new checkpoint"}.items():
            done = s.convert(HF, "--to", "hf", dest=dest, status=USAGE)
            assert words in done.stderr, done.stderr
        done = s.convert(HF, "--to", "hf", dest="s3://other/x", status=SOURCE)
        assert "no such bucket" in done.stderr, done.stderr
        same("nothing was made", (s.objects, s.uploads), ({}, {}))


def test_overlay(t):
    """--hf lays its files over the source's own, as locally."""
    os.mkdir(t + "/hf")
    with open(t + "/hf/config.json", "w") as f:
        json.dump({"model_type": "other"}, f)
    want = local(t, HF, "--to", "hf", "--hf", t + "/hf")
    assert b"other" in want["config.json"]
    with Store(t) as s:
        s.convert(HF, "--to", "hf", "--hf", t + "/hf")
        s.check_whole(want)


if __name__ == "__main__":
    main(globals())
