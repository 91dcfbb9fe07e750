# SPDX-License-Identifier: MIT
"""What a store does wrong, how often, and what a reader of the mount sees: the same bytes, or an error with words.

Every fault has a shard of its own, so that what was read before hides nothing, and each time another tensor is read
beside it. The table is printed as the tests' comments.
"""
import errno
import json
import os
import pathlib
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request

from mountlib import PATIENCE, UNSHARD, Mount, errno_name, main, read_all, same, safetensors_image, tensor_bytes, wait_for, write_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "remote"))

from fault_server import Server  # noqa: E402

SIZE = 200 << 10  # more than what is fetched with a header
TRIES, STALL, DEADLINE = 4, 2, 20
ROW_TRIES = 4  # of a row of the table
ENV = {**os.environ, "UNSHARD_HTTP_TRIES": str(TRIES), "UNSHARD_HTTP_STALL": str(STALL),
       "UNSHARD_HTTP_DEADLINE": str(DEADLINE), "UNSHARD_HTTP_CONNECT": "5"}
NO_END = {**ENV, "UNSHARD_HTTP_DEADLINE": "600", "UNSHARD_HTTP_TRIES": "1000"}  # what ends then has not waited for the server
X509_V_FLAG_NO_CHECK_TIME = 0x200000
BYTES = "the bytes"
ALWAYS = -1

# name: times, fault, what the reader gets, words of the log
TABLE = {
    "429 with Retry-After": (2, {"kind": "status", "status": 429, "code": "SlowDown", "retry_after": 1}, BYTES, ()),
    "503 with Retry-After": (1, {"kind": "status", "status": 503, "retry_after": 1}, BYTES, ()),
    "503 SlowDown": (3, {"kind": "status", "status": 503}, BYTES, ()),
    "503 always": (ALWAYS, {"kind": "status", "status": 503}, errno.EIO, ("HTTP 503 SlowDown", "status 503", f"{TRIES} tries")),
    "503, longer than there is time": (ALWAYS, {"kind": "status", "status": 503, "retry_after": 3600}, errno.EIO,
                                       ("asks to wait 3600 s", "1 try")),
    "500": (2, {"kind": "status", "status": 500, "code": "InternalError"}, BYTES, ()),
    "reset before an answer": (2, {"kind": "reset"}, BYTES, ()),
    "reset in the body": (2, {"kind": "cut", "after": 1000}, BYTES, ()),
    "reset in the body, always": (ALWAYS, {"kind": "cut", "after": 1000}, errno.EIO, ("the connection broke", f"{TRIES} tries")),
    "stall before an answer": (1, {"kind": "stall"}, BYTES, ()),
    "stall in the body": (1, {"kind": "stall", "after": 1000}, BYTES, ()),
    "stall, always": (ALWAYS, {"kind": "stall"}, errno.EIO, ("the server stalled",)),
    "a byte a second": (ALWAYS, {"kind": "slow", "seconds": 0.3}, errno.EIO, ("no answer in time", "status 206")),
    "body one byte short": (2, {"kind": "short", "bytes": 1}, BYTES, ()),
    "body short, always": (ALWAYS, {"kind": "short", "bytes": 7}, errno.EIO, ("a body of", f"{TRIES} tries")),
    "body too long": (1, {"kind": "long", "bytes": 5}, BYTES, ()),
    "wrong Content-Range": (2, {"kind": "wrong_range"}, BYTES, ()),
    "wrong Content-Range, always": (ALWAYS, {"kind": "wrong_range"}, errno.EIO, ("wrong Content-Range", "status 206")),
    "200 instead of 206": (2, {"kind": "ignore_range"}, BYTES, ()),
    "200 instead of 206, always": (ALWAYS, {"kind": "ignore_range"}, errno.EIO, ("200 instead of 206", "status 200")),
    "no ETag": (ALWAYS, {"kind": "no_etag"}, BYTES, ()),
    "neither ETag nor Last-Modified": (2, {"kind": "untold"}, BYTES, ()),
    "neither of them, always": (ALWAYS, {"kind": "untold"}, errno.EIO, ("tells no ETag", f"{TRIES} tries")),
    "not HTTP at all": (1, {"kind": "garbage"}, BYTES, ()),
    "redirected in a circle": (ALWAYS, {"kind": "redirect"}, errno.EIO, ("redirected too often",)),
    "redirected to a file": (ALWAYS, {"kind": "redirect", "location": "file:///etc/passwd"}, errno.EIO, ("not followed",)),
    "401": (ALWAYS, {"kind": "status", "status": 401, "code": "ExpiredToken"}, errno.EACCES, ("HTTP 401 ExpiredToken",)),
    "403": (ALWAYS, {"kind": "status", "status": 403, "code": "AccessDenied"}, errno.EACCES, ("HTTP 403 AccessDenied",)),
    "404 of what was listed": (ALWAYS, {"kind": "status", "status": 404, "code": "NoSuchKey"}, errno.ESTALE, ()),
}


def make(t, names, times=1):
    """A checkpoint with so many shards a name and two more; {key: bytes} by shard number."""
    os.makedirs(t + "/src/run")
    data = {}
    for i in range(times * len(names) + 2):
        data[i] = tensor_bytes(f"{t}{i}", SIZE)
        write_file(f"{t}/src/run/s{i}-.safetensors", safetensors_image({f"w{i}": ("U8", (SIZE,), data[i])}))
    index = {f"w{i}": f"s{i}-.safetensors" for i in data}
    write_file(t + "/src/run/model.safetensors.index.json",
               json.dumps({"metadata": {}, "weight_map": index}).encode())
    write_file(t + "/src/run/config.json", b"{}")
    return data


def outcome(path):
    try:
        return read_all(path)
    except OSError as e:
        return e.errno


class Other(AssertionError):
    """Not what the row says."""


def check_row(m, server, data, i, row):
    """Reads the tensor of shard i, which meets the row's fault; what came of it, how often, and the seconds."""
    times, fault, wanted, words = row
    rule = server.fault(times=times, match=f"/s{i}-", **fault)
    before, start = len(m.messages()), time.monotonic()
    got = outcome(m / f"raw/w{i}")
    seconds, log = time.monotonic() - start, m.messages()[before:]
    told = errno_name(got) if isinstance(got, int) else "the same bytes"
    assert isinstance(got, int) or got == data[i], "other bytes"
    if rule.used == 0:
        raise Other("the fault was not met")
    if got != (data[i] if wanted == BYTES else wanted):
        raise Other(f"{told}, not {wanted if wanted == BYTES else errno_name(wanted)}")
    if wanted == BYTES and times not in (ALWAYS, rule.used):
        raise Other(f"met {rule.used} times, not {times}")
    for word in (*words, *((f"s{i}-.safetensors", "127.0.0.1") if words else ())):
        if word not in log:
            raise Other(f"no {word!r} in {log!r}")
    return told, rule.used, seconds


def test_fault_table(t):
    """Each row has more than one shard: a server that has no turn for seconds is one more fault, and the row is tried again."""
    data = make(t, TABLE, ROW_TRIES)
    other = ROW_TRIES * len(TABLE)
    with Server(t + "/src") as server, Mount(server.url + "/run", t + "/mnt", env=ENV) as m:
        os.listdir(m / "raw")
        for i, (name, row) in enumerate(TABLE.items()):
            for n in range(ROW_TRIES):
                try:
                    result, used, seconds = check_row(m, server, data, ROW_TRIES * i + n, row)
                    break
                except Other as e:
                    print(f"# {name}: {e}")
                    wrong = e
            else:
                raise AssertionError(f"{name}: each of {ROW_TRIES} times") from wrong

            def is_whole(at=4096 * i):
                with open(m / f"raw/w{other}", "rb") as f:
                    f.seek(at)
                    return f.read(4096) == data[other][at:at + 4096]
            same(f"{name}: the other tensor", is_whole(), True)  # others stay readable
            print(f"# {name:32} times {'always' if row[0] < 0 else row[0]:>6}  {result:14} {used} met, {seconds:.1f} s")
        server.clear()
        for i in range(other):
            wait_for(f"w{i} once all is well", PATIENCE, lambda n=i: right(outcome(m / f"raw/w{n}"), data[n]))


def right(got, want):
    """Other bytes never are."""
    assert isinstance(got, int) or got == want, "other bytes"
    return got == want


def test_a_slow_link_is_no_fault(t):
    data = make(t, range(3))
    with Server(t + "/src") as server, Mount(server.url + "/run", t + "/mnt",
                                             env={**ENV, "UNSHARD_HTTP_DEADLINE": "3", "UNSHARD_HTTP_STALL": "30"}) as m:
        os.listdir(m / "raw")
        server.set("rate", 20 << 10)  # seven seconds for a tensor

        def comes(i):
            start = time.monotonic()
            came = right(outcome(m / f"raw/w{i}"), data[i])
            assert not came or time.monotonic() - start > 4, "the link was not slow"
            return came
        assert any(comes(i) for i in range(5)), "its bytes, of none"  # a link that is slow and stands still may be given up


def test_an_object_that_changes_under_its_reader(t):
    data = make(t, ())
    path = t + "/src/run/s0-.safetensors"
    fresh = tensor_bytes("fresh", SIZE)
    with Server(t + "/src") as server, Mount(server.url + "/run", t + "/mnt", "refresh=2", env=ENV) as m:
        with open(m / "raw/w0", "rb", buffering=0) as f:
            same("its beginning", f.read(4096), data[0][:4096])
            write_file(path, safetensors_image({"w0": ("U8", (SIZE,), fresh)}))
            f.seek(SIZE // 2)
            try:
                got = f.read(SIZE // 2)
                assert got == data[0][SIZE // 2:], "bytes of the new object through the old handle"
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO), e
        wait_for("the new object", PATIENCE, lambda: outcome(m / "raw/w0") == fresh)
        same("the other tensor", read_all(m / "raw/w1"), data[1])


def test_new_checkpoints_show_after_refresh(t):
    make(t, ())
    with Server(t + "/src") as server, Mount(server.url, t + "/mnt", "refresh=2", env=ENV) as m:
        same("at first", os.listdir(m.path), ["run"])
        os.mkdir(t + "/src/next")
        write_file(t + "/src/next/model.safetensors", safetensors_image({"k": ("U8", (3,), b"abc")}))
        print(f"# shown after {wait_for('the new checkpoint', PATIENCE, lambda: 'next' in os.listdir(m.path)):.1f} s, refresh=2")
        same("its tensor", read_all(m / "next/raw/k"), b"abc")


def test_no_refresh_is_soon(t):
    """refresh=0 is not the 60 s of who says nothing."""
    make(t, ())
    with Server(t + "/src") as server, Mount(server.url, t + "/mnt", "refresh=0", env=ENV) as m:
        same("at first", os.listdir(m.path), ["run"])
        os.mkdir(t + "/src/next")
        took = wait_for("the new directory", PATIENCE, lambda: "next" in os.listdir(m.path))
        assert took < 40, took


def test_secrets_are_not_told(t):
    data = make(t, ())
    secret, token = "s3cr%65t-w0rd", "t0k3n-in-query"
    with Server(t + "/src") as server:
        server.fault("skew", match="/s0-", seconds=3000)
        url = server.url.replace("//", f"//someone:{secret}@") + f"/run/?sig={token}"
        with Mount(url, t + "/mnt", env={**ENV, "UNSHARD_LOG": "debug"}) as m:
            same("with another clock", read_all(m / "raw/w0"), data[0])
            server.fault("status", times=ALWAYS, match="/s1-", status=403)
            same("refused", outcome(m / "raw/w1"), errno.EACCES)
            seen = m.messages() + read_all("/proc/mounts").decode()
            seen += read_all(f"/proc/{m.process.pid}/cmdline").decode()
            seen += read_all(m / ".unshard/last-error").decode() + read_all(m / ".unshard/checkpoint.json").decode()
            for folder, _, files in os.walk(m.path):
                for f in files:
                    path = os.path.join(folder, f)
                    seen += "".join(f"{n}={os.getxattr(path, n)!r}" for n in os.listxattr(path))
            for word in (secret, "s3cret", token, "c29tZW9uZ"):
                assert word not in seen, f"{word} is told: " + seen[max(0, seen.index(word) - 200):][:400]
        assert server.log(f"sig={token}") and server.log()[-1]["headers"]["Authorization"].startswith("Basic "), "they went out"
        done = subprocess.run([UNSHARD, "ls", url.replace("/run/", "/nothing/")], env=ENV, capture_output=True, text=True)
        same("status", done.returncode, 3)
        assert token not in done.stderr and secret not in done.stderr and "/nothing" in done.stderr, done.stderr


def test_authorization_stays_with_its_host(t):
    data = make(t, ())
    with Server(t + "/src") as server, Server(t + "/src") as elsewhere:
        server.fault("redirect", times=ALWAYS, match="/s0-", location=elsewhere.url + "/run/s0-.safetensors")
        with Mount(server.url.replace("//", "//u:p@") + "/run", t + "/mnt", env=ENV) as m:
            same("through a redirection", read_all(m / "raw/w0"), data[0])
        asked = elsewhere.log("/s0-")
        assert asked and not any("Authorization" in r["headers"] for r in asked), asked


# Nobody signed it. Its key is no secret.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUHehfQn6QX8oMd+djwq9Si65mjJIwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJMTI3LjAuMC4xMCAXDTI2MTEyMzAzMTUzNVoYDzIxMjYxMDMw
MDMxNTM1WjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATCeryHbIi4PkgG7dxjAK2GHYAHFkBGN8RrNXtbL9qvLEYtxdeBYa/o
AUVQG6O3+YeSC5LRLAJRSM/JS7c7RZKdo2QwYjAdBgNVHQ4EFgQUQrFdhekaF+AN
c8oH4wkHbQm1vuowHwYDVR0jBBgwFoAUQrFdhekaF+ANc8oH4wkHbQm1vuowDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IAQh36fJYDW06x3FhByQGVMaZ8kMlf4mbGyU1cpd1bnSAiEAhwIIQT16hleviBbW
xSyLK2yro6hRyQTNICoYRhfBD38=
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpYBlvj0psNj3pC0z
zfiwmXOHncSU6AEWIt+RyipU+wChRANCAATCeryHbIi4PkgG7dxjAK2GHYAHFkBG
N8RrNXtbL9qvLEYtxdeBYa/oAUVQG6O3+YeSC5LRLAJRSM/JS7c7RZKd
-----END PRIVATE KEY-----
"""


def test_a_certificate_that_is_not_trusted(t):
    """No request is sent to who shows it, nor what a request would have: told at once, by the command and by a mount."""
    make(t, ())
    write_file(t + "/certificate", CERTIFICATE.encode())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(t + "/certificate")
    os.mkdir(t + "/mnt")
    server = Server(t + "/src")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    with server:
        trusts = ssl.create_default_context(cafile=t + "/certificate")
        trusts.verify_flags |= X509_V_FLAG_NO_CHECK_TIME  # whatever the clock of this machine says
        with urllib.request.urlopen(server.url.replace("http:", "https:") + "/run/config.json", context=trusts) as answer:
            same("who trusts it", answer.status, 200)
        asked = len(server.log())
        url = server.url.replace("http://", "https://u:p@") + "/run"
        for command in ["ls", url], ["mount", url, t + "/mnt", "-f", "-o", "index=memory"]:
            done = subprocess.run([UNSHARD, *command], env=ENV, capture_output=True, text=True, timeout=600)
            same(f"{command[0]}: status", done.returncode, 3)
            for word in ("127.0.0.1", "certificate is not trusted", "1 try", "update-ca-certificates"):
                assert word in done.stderr, f"{command[0]}: no {word!r} in {done.stderr!r}"
            assert "u:p" not in done.stderr, done.stderr
        same("requests", len(server.log()), asked)


def test_names_that_do_not_resolve(t):
    # Whoever is asked for names here may say nothing for long: it is asked once, for a second.
    done = subprocess.run([UNSHARD, "ls", "http://no-such-host.invalid/run"], capture_output=True, text=True,
                          env={**ENV, "UNSHARD_ALLOW_HTTP": "1", "RES_OPTIONS": "timeout:1 attempts:1"})
    same("status", done.returncode, 3)
    for word in ("no-such-host.invalid", "cannot be resolved", f"{TRIES} tries"):
        assert word in done.stderr, done.stderr
    done = subprocess.run([UNSHARD, "ls", "http://no-such-host.invalid/run"], capture_output=True, text=True, env=ENV)
    same("status", done.returncode, 3)
    assert "UNSHARD_ALLOW_HTTP" in done.stderr, done.stderr


def is_stopped(task):
    """Is this thread? None: it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return None


class Stopped:
    """A server that is a process of its own, so that it can be stopped as a whole."""

    def __init__(self, root):
        script = pathlib.Path(__file__).resolve().parent.parent / "remote/fault_server.py"
        self.process = subprocess.Popen([sys.executable, str(script), root], stdout=subprocess.PIPE, text=True)
        self.url = "http://127.0.0.1:" + self.process.stdout.readline().split()[1]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def signal(self, number):
        """Sends it; that all threads are stopped, or go on, is waited for: one on another processor may still answer."""
        self.process.send_signal(number)
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        wait_for(f"signal {number}", PATIENCE,
                 lambda: all(is_stopped(task) in (None, number == signal.SIGSTOP) for task in tasks.iterdir()))


def timed(what, call):
    start = time.monotonic()
    result = call()
    print(f"# stopped server: {what}: {time.monotonic() - start:.1f} s")
    return result


def test_a_server_that_is_stopped(t):
    data = make(t, range(4))
    with Stopped(t + "/src") as server:
        with Mount(server.url + "/run", t + "/mnt", "refresh=1", env=NO_END) as m:
            same("before", read_all(m / "raw/w0"), data[0])
            server.signal(signal.SIGSTOP)
            reader = subprocess.Popen(["cat", m / "raw/w1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            hung = subprocess.Popen([sys.executable, "-c", f"import sys; open({m / 'raw/w2'!r}, 'rb').read()"],
                                    stderr=subprocess.DEVNULL)
            time.sleep(2.5)
            timed("df", lambda: subprocess.run(["df", m.path], check=True, capture_output=True, timeout=PATIENCE))
            same("ls", "w0" in timed("ls", lambda: os.listdir(m / "raw")), True)
            reader.send_signal(signal.SIGINT)  # kills
            hung.send_signal(signal.SIGINT)  # Python handles it
            timed("a killed reader", lambda: reader.wait(PATIENCE))
            timed("an interrupted reader", lambda: hung.wait(PATIENCE))
            got = {}
            late = threading.Thread(target=lambda: got.update(w3=outcome(m / "raw/w3")))
            late.start()
            time.sleep(1.5)
            server.signal(signal.SIGCONT)
            late.join(PATIENCE)
            same("what was asked meanwhile", got.get("w3"), data[3])
            server.signal(signal.SIGSTOP)
            last = subprocess.Popen(["cat", m / "raw/w5"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.5)
            m.process.send_signal(signal.SIGTERM)
            timed("SIGTERM", lambda: m.process.wait(PATIENCE))
            timed("its last reader", lambda: last.wait(PATIENCE))
            server.signal(signal.SIGCONT)
        env = {**ENV, "UNSHARD_HTTP_DEADLINE": "8", "UNSHARD_HTTP_TRIES": "50"}  # only the deadline ends it
        with Mount(server.url + "/run", t + "/mnt2", env=env) as m:
            same("before", read_all(m / "raw/w0"), data[0])
            server.signal(signal.SIGSTOP)
            same("who waits to the end", timed("EIO", lambda: outcome(m / "raw/w4")), errno.EIO)
            server.signal(signal.SIGCONT)


def test_umount_does_not_wait_for_a_stopped_server(t):
    data = make(t, ())
    with Stopped(t + "/src") as server, Mount(server.url + "/run", t + "/mnt", env=NO_END) as m:
        same("before", read_all(m / "raw/w0"), data[0])
        server.signal(signal.SIGSTOP)
        timed("umount", lambda: subprocess.run([UNSHARD, "umount", m.path], check=True, timeout=PATIENCE))
        timed("its process", lambda: m.process.wait(PATIENCE))


if __name__ == "__main__":
    main(globals())
