#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The plan service: where a mount says that a tensor's bytes are, to whom, and what it makes of nonsense."""
import errno
import glob
import os
import signal
import socket
import stat
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "cli")]
from mountlib import PATIENCE, Mount, Skip, main, make_tensors, read_all, same, wait_for, write_checkpoint  # noqa: E402
from planlib import Plan  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(HERE, "..", "data"))
DCP = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
QUESTION = "<8sqII"


def where(path):
    """The socket, checkpoint and tensor that the attribute names."""
    value = os.getxattr(path, "user.unshard.plan").decode()
    assert value.startswith("unix:"), value
    address, number = value[5:].rsplit(" ", 1)
    checkpoint, tensor = number.split(".")
    return address, int(checkpoint), int(tensor)


def moved(path, old):
    """Somebody who asks while the checkpoint changes may be told so, and asks again."""
    try:
        return where(path) != old
    except OSError as e:
        if e.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return False


def talk(address, question):
    """All that the server says."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(PATIENCE)
        s.connect(address)
        try:
            s.sendall(question)
            s.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: s.recv(1 << 16), b""))
        except (BrokenPipeError, ConnectionResetError):
            return b""


def ask(address, checkpoint, tensor):
    """errno and plan (or words)."""
    said = talk(address, struct.pack(QUESTION, b"UFSASK1\0", checkpoint, tensor, 0))
    code, zero, length = struct.unpack_from("<IIQ", said)
    same("head", (zero, length), (0, len(said) - 16))
    return code, said[16:]


def test_plans_give_the_bytes_of_the_mount(t):
    with Mount(DCP, t + "/mnt") as m:
        names = os.listdir(m / "raw")
        assert len(names) > 20
        for name in names:
            code, said = ask(*where(m / ("raw/" + name)))
            same(name, code, 0)
            plan = Plan(said)
            same(name, plan.assemble(), read_all(m / ("raw/" + name)))
            same("of the .npy", where(m / f"tensors/{name}.npy"), where(m / ("raw/" + name)))


def test_the_same_as_the_command_prints(t):
    key = "model.emb.weight"
    with Mount(DCP, t + "/mnt") as m:
        said = ask(*where(m / ("raw/" + key)))[1]
        env = {**os.environ, "XDG_CACHE_HOME": t + "/cache"}
        printed = subprocess.run([os.environ.get("UNSHARD", "unshard"), "plan", DCP, key, "--binary"], env=env, check=True,
                                 stdout=subprocess.PIPE).stdout
        same("plan", said, printed)


def test_compressed_pieces(t):
    with Mount(os.path.join(DATA, "torch_dcp", "dcp_zstd_2r"), t + "/mnt") as m:
        for name in os.listdir(m / "raw"):
            code, said = ask(*where(m / ("raw/" + name)))
            same(name, (code, Plan(said).through), (0, True))


def test_nonsense(t):
    with Mount(DCP, t + "/mnt") as m:
        path = m / "raw/model.emb.weight"
        address, checkpoint, tensor = where(path)
        good = struct.pack(QUESTION, b"UFSASK1\0", checkpoint, tensor, 0)
        same("another question", struct.unpack_from("<I", talk(address, b"x" * 24))[0], errno.EPROTO)
        for part in (b"", good[:5], good[:-1]):
            same("cut", talk(address, part), b"")
        same("no such tensor", ask(address, checkpoint, 1 << 31)[0], errno.ENOENT)
        same("no such checkpoint", ask(address, checkpoint + 1, tensor)[0], errno.ESTALE)
        same("not any", ask(address, -1, 0)[0], errno.ESTALE)
        same("it goes on", ask(address, checkpoint, tensor)[0], 0)


def test_a_caller_who_says_nothing(t):
    """Others wait for no more than some seconds."""
    with Mount(DCP, t + "/mnt") as m:
        address, checkpoint, tensor = where(m / "raw/model.emb.weight")
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(address)
            same("after it", ask(address, checkpoint, tensor)[0], 0)


def test_a_checkpoint_that_changed(t):
    write_checkpoint(t + "/src", make_tensors(3))
    with Mount(t + "/src", t + "/mnt") as m:
        name = os.listdir(m / "raw")[0]
        old = where(m / ("raw/" + name))
        write_checkpoint(t + "/src", make_tensors(4))
        wait_for("the new one", PATIENCE, lambda: moved(m / ("raw/" + name), old))
        code, words = ask(*old)
        same(words, code, errno.ESTALE)
        same("the new one", ask(*where(m / ("raw/" + name)))[0], 0)


def test_a_shard_that_is_gone(t):
    write_checkpoint(t + "/src", make_tensors(3))
    with Mount(t + "/src", t + "/mnt") as m:
        name = os.listdir(m / "raw")[0]
        question = where(m / ("raw/" + name))
        for shard in glob.glob(t + "/src/*.safetensors"):
            os.unlink(shard)
        code, words = ask(*question)
        assert code in (errno.ENOENT, errno.ESTALE), (code, words)


def test_only_for_its_user(t):
    if os.geteuid() != 0:
        raise Skip("to be another user takes root")
    with Mount(DCP, t + "/mnt") as m:
        address, checkpoint, tensor = where(m / "raw/model.emb.weight")
        folder = os.path.dirname(address)
        same("modes", (stat.S_IMODE(os.stat(address).st_mode), stat.S_IMODE(os.stat(folder).st_mode)), (0o600, 0o700))
        up = folder
        while up != t:  # were they wider, the server would still look who calls
            os.chmod(up, os.stat(up).st_mode | 0o711)
            up = os.path.dirname(up)
        os.chmod(t, 0o755)
        os.chmod(address, 0o666)
        code = f"""if True:
            import os, socket, struct, sys
            os.setgid(65534); os.setuid(65534)
            s = socket.socket(socket.AF_UNIX); s.connect({address!r})
            try:
                s.sendall(struct.pack({QUESTION!r}, b"UFSASK1\\0", {checkpoint}, {tensor}, 0))
                sys.exit(len(s.recv(100)) != 0)
            except (BrokenPipeError, ConnectionResetError):
                pass"""
        same("status of another user", subprocess.run([sys.executable, "-c", code], timeout=30).returncode, 0)
        same("ours", ask(address, checkpoint, tensor)[0], 0)


def test_a_long_path(t):
    """Names of sockets end at 107 bytes; directories do not."""
    deep = t + "/" + "d" * 120
    os.mkdir(deep)
    with Mount(DCP, deep + "/mnt") as m:
        address = where(m / "raw/model.emb.weight")[0]
        assert len(address) > 108 and stat.S_ISSOCK(os.stat(address).st_mode), address
        fd = os.open(os.path.dirname(address), os.O_PATH)
        short = f"/proc/self/fd/{fd}/{os.path.basename(address)}"
        same("answer", ask(short, *where(m / "raw/model.emb.weight")[1:])[0], 0)
        os.close(fd)


def test_what_is_left_behind(t):
    """A socket goes with its mount; that of a server which was killed goes with the next one."""
    with Mount(DCP, t + "/mnt") as m:
        address = where(m / "raw/model.emb.weight")[0]
    same("after the mount", os.path.lexists(address), False)
    with Mount(DCP, t + "/mnt2") as m:
        address, cache = where(m / "raw/model.emb.weight")[0], m.dir + "/cache"
        m.process.send_signal(signal.SIGKILL)
        m.process.wait()
        m.process.returncode = 0  # which was to be seen
    same("after SIGKILL", os.path.lexists(address), True)
    with Mount(DCP, t + "/mnt3", f"cache_dir={cache}") as m:
        same("after the next", os.path.lexists(address), False)


def test_in_the_runtime_directory(t):
    os.mkdir(t + "/run", 0o700)
    with Mount(DCP, t + "/mnt", env={**os.environ, "XDG_RUNTIME_DIR": t + "/run"}) as m:
        same("there", os.path.dirname(where(m / "raw/model.emb.weight")[0]), t + "/run/unshardfs")
    os.chmod(t + "/run", 0o755)
    with Mount(DCP, t + "/mnt", env={**os.environ, "XDG_RUNTIME_DIR": t + "/run"}) as m:
        same("not where others look in", os.path.dirname(where(m / "raw/model.emb.weight")[0]), m.dir + "/cache")


if __name__ == "__main__":
    main(globals())
