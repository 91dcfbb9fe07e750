#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""python/unshard on checkpoints that a mount shows: by plans of its server, and through its files where there is none."""
import errno
import os
import shutil
import struct
import subprocess
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from clientlib import DATA, data_of, expected  # noqa: E402
import unshard  # noqa: E402
from mountlib import PATIENCE, Mount, Skip, main, make_tensors, same, sha256, wait_for, write_checkpoint  # noqa: E402
from client import check_boxes, fails  # noqa: E402


def bytes_read(m):
    """How much the server has sent to readers of files."""
    import json
    with open(m / ".unshard/counters.json") as f:
        return json.load(f)["bytes_read"]


def check_counted(m, before, payload, direct):
    """Was it the server who read? It counts an answer when that is on its way, maybe a moment later."""
    if direct:
        read = bytes_read(m) - before
        assert read < payload // 2, (read, payload)
    else:
        wait_for("what the server has read", PATIENCE, lambda: bytes_read(m) - before >= payload // 2)


def check(t, name, direct, options=""):
    source = os.path.join(DATA, name)
    with Mount(source, t + "/mnt", options) as m:
        with unshard.open(m.path) as c:
            before = bytes_read(m)
            want = expected(source)
            same("keys", sorted(c.keys()), sorted(want))
            for key, w in want.items():
                same(key, sha256(data_of(c.load(key, to="dlpack"))), w["sha256"])
            check_counted(m, before, sum(c.info(k).bytes for k in want), direct)
            if not options:
                for key in list(want)[:6]:
                    check_boxes(c, key)


def test_by_plans(t):
    check(t, "torch_dcp/dcp_fsdp2_adamw_2r", direct=True)


def test_compressed(t):
    check(t, "torch_dcp/dcp_zstd_2r", direct=False)


def test_an_archive(t):
    check(t, "nemo/nemo_plain", direct=False)


def test_without_raw(t):
    check(t, "torch_dcp/dcp_zstd_2r", direct=False, options="views=tensors")


def test_one_file_by_its_path(t):
    source = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
    want = expected(source)["model.emb.weight"]["sha256"]
    with Mount(source, t + "/mnt") as m:
        for path in ("raw/model.emb.weight", "tensors/model.emb.weight.npy", "tree/model/emb/weight.npy"):
            same(path, sha256(data_of(unshard.load(m / path, to="dlpack"))), want)
        fails(ValueError, "no tensor's file", lambda: unshard.load(m / ".unshard/checkpoint.json"))


def test_a_mount_that_casts(t):
    source = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
    with Mount(source, t + "/mnt", "dtype=bf16") as m, unshard.open(m.path) as c, unshard.open(source, cache_dir=t) as plain:
        got = c.load("model.emb.weight", to="dlpack")
        same("as it shows it", (got.dtype, data_of(got)), ("BF16", data_of(plain.load("model.emb.weight", dtype="bf16", to="dlpack"))))
        back = c.load("model.emb.weight", dtype="f64", to="dlpack")
        shown = [v << 16 for (v,) in struct.iter_unpack("<H", data_of(got))]
        rounded = b"".join(struct.pack("<d", *struct.unpack("<f", struct.pack("<I", v))) for v in shown)
        same("another type, of what is shown", (back.dtype, data_of(back)), ("F64", rounded))
        fails(unshard.Error, "a map of its own", lambda: unshard.open(m.path, dtype="f32"))


def test_files_that_the_client_does_not_see(t):
    """In another mount namespace (a container) the plan's paths lead nowhere: the mount's files are read."""
    write_checkpoint(t + "/src", make_tensors(3))
    code = f"""if True:
        import hashlib, sys
        sys.path[:0] = {sys.path[:8]!r}
        import unshard
        from clientlib import data_of
        with unshard.open({t + "/mnt"!r}) as c:
            for key in c:
                print(key, hashlib.sha256(data_of(c.load(key, to="dlpack"))).hexdigest())"""
    hide = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', t + "/src"]
    if subprocess.run([*hide, "true"], capture_output=True).returncode != 0:
        raise Skip("no mount namespaces here")
    with Mount(t + "/src", t + "/mnt") as m:
        want = {k: sha256(v[2]) for k, v in make_tensors(3).items()}
        payload = sum(len(v[2]) for v in make_tensors(3).values())
        for wrapper, direct in (([], True), (hide, False)):
            before = bytes_read(m)
            said = subprocess.run([*wrapper, sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
            same("status", (said.returncode, said.stderr), (0, ""))
            same("bytes", dict(line.split() for line in said.stdout.splitlines()), want)
            check_counted(m, before, payload, direct)


def moved(path, old):
    """Not while it changes."""
    try:
        return os.getxattr(path, "user.unshard.plan") != old
    except OSError as e:
        if e.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return False


def test_a_tensor_of_an_unknown_type(t):
    """It is listed with its fault, as without a mount; the others are loaded."""
    src = t + "/src"
    shutil.copytree(os.path.join(DATA, "torch_dcp", "dcp_plain_dtypes_objects"), src)
    with open(src + "/.metadata", "rb") as f:
        metadata = f.read()
    with open(src + "/.metadata", "wb") as f:
        f.write(metadata.replace(b"float16", b"float99"))
    with Mount(src, t + "/mnt") as m, unshard.open(m.path) as c, unshard.open(src, cache_dir=t) as plain:
        infos = [c.info(k) for k in c]
        same("infos", infos, [plain.info(k) for k in plain])
        assert [i.key for i in infos if i.dtype == "NONE" and i.fault], infos
        memory = types.SimpleNamespace(flags=types.SimpleNamespace(c_contiguous=True, writeable=True), dtype="float16", shape=())
        for i in infos:
            if i.fault:
                fails(unshard.Error, i.fault, lambda i=i: c.load(i.key, to="dlpack"))
                fails(unshard.Error, i.fault, lambda i=i: c.load_into(i.key, memory))
            else:
                same(i.key, data_of(c.load(i.key, to="dlpack")), data_of(plain.load(i.key, to="dlpack")))


def has_shape(path, shape):
    """Not while it changes."""
    try:
        return os.getxattr(path, "user.unshard.shape") == shape
    except OSError as e:
        if e.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return False


def test_a_checkpoint_that_changes(t):
    """The new bytes, or an error once shapes are others; never a mixture."""
    write_checkpoint(t + "/src", make_tensors(3))
    with Mount(t + "/src", t + "/mnt") as m, unshard.open(m.path) as c:
        key = c.keys()[0]
        same("old", data_of(c.load(key, to="dlpack")), make_tensors(3)[key][2])
        new = {k: (d, s, b[::-1]) for k, (d, s, b) in make_tensors(3).items()}
        old = os.getxattr(m / ("raw/" + key), "user.unshard.plan")
        write_checkpoint(t + "/src", new)
        wait_for("the new one", PATIENCE, lambda: moved(m / ("raw/" + key), old))
        same("new", data_of(c.load(key, to="dlpack")), new[key][2])


def test_a_tensor_that_changes_shape(t):
    """Without a service too it is not taken for what it was: part of a larger one, or elements of another type."""
    def tensors(dtype, shape):
        n = 8 if dtype == "F64" else 4
        for d in shape:
            n *= d
        return {"a.w": (dtype, list(shape), bytes(range(n)))}

    env = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    for name, changed in (("larger", tensors("F32", (4, 4))), ("retyped", tensors("F64", (2, 2)))):
        src, mnt = f"{t}/{name}", f"{t}/mnt-{name}"
        write_checkpoint(src, tensors("F32", (2, 4)))
        with Mount(src, mnt, "index=memory", env=env) as m, unshard.open(m.path) as c:
            same("old", data_of(c.load("a.w", to="dlpack")), tensors("F32", (2, 4))["a.w"][2])
            write_checkpoint(src, changed)
            shape = str(changed["a.w"][1]).encode()
            wait_for("the new one", PATIENCE, lambda: has_shape(m / "raw/a.w", shape))
            fails(unshard.Error, "changed since it was opened", lambda: c.load("a.w", to="dlpack"))


def test_without_a_service(t):
    """No directory for a socket: the files are read."""
    source = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
    env = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    with Mount(source, t + "/mnt", "index=memory", env=env) as m, unshard.open(m.path) as c:
        same("attribute", os.getxattr(m / "raw/model.emb.weight", "user.unshard.plan").decode().split()[:2], ["unshard", "plan"])
        for key, w in expected(source).items():
            same(key, sha256(data_of(c.load(key, to="dlpack"))), w["sha256"])


if __name__ == "__main__":
    main(globals())
