# SPDX-License-Identifier: MIT
"""Sources with what no checkpoint should have: loops, fifos, links that lead out, names of ours."""
import errno
import json
import os
import pathlib
import shutil
import socket

from mountlib import Mount, fails, main, make_tensors, read_all, safetensors_image, same, write_checkpoint, write_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"


def test_links_fifos_and_sockets(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    write_file(t + "/outside.txt", b"secret")
    os.mkdir(t + "/outside")
    write_file(t + "/outside/x", b"secret")
    os.symlink("step1", t + "/run/last")
    os.symlink(".", t + "/run/loop")
    os.symlink("self", t + "/run/self")
    os.symlink("../outside.txt", t + "/run/out.txt")
    os.symlink("../outside", t + "/run/out")
    os.symlink("/etc/passwd", t + "/run/passwd")
    os.symlink("nowhere", t + "/run/dangling")
    os.symlink("step1/config.json", t + "/run/config-link.json")
    os.mkfifo(t + "/run/fifo")
    with socket.socket(socket.AF_UNIX) as s, Mount(t + "/run", t + "/mnt") as m:
        s.bind(t + "/run/socket")
        same("shown", sorted(os.listdir(m.path)), ["config-link.json", "last", "loop", "step1"])
        same("a link within", os.readlink(m / "last"), "step1")
        same("its length", os.lstat(m / "last").st_size, 5)
        same("a file through a link", read_all(m / "config-link.json"), read_all(t + "/run/step1/config.json"))
        assert os.path.islink(m / "loop")
        same("loop", sorted(os.listdir(m / "loop/loop/loop")), sorted(os.listdir(m.path)))
        for name in ("self", "out.txt", "out", "passwd", "dangling", "fifo", "socket"):
            fails(name, errno.ENOENT, lambda: os.lstat(m / name))
        count = sum(len(files) for _, _, files in os.walk(m.path))  # comes to an end
        assert count < 100
        assert m.alive()


def test_an_index_whose_files_are_elsewhere(t):
    """People copy a model's config with all JSON beside it: the index of its shards makes no checkpoint, and leads loaders astray."""
    shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", t + "/run")
    for name, to in (("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
                     ("model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors"),
                     ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin")):
        write_file(f"{t}/run/{name}", json.dumps({"weight_map": {"w": to}}).encode())
    write_file(t + "/run/config.json", b"{}")
    with Mount(t + "/run", t + "/mnt") as m:
        same("format", json.loads(read_all(m / ".unshard/checkpoint.json"))["format"], "torch-dcp")
        same("shown", [n for n in os.listdir(m.path) if n.endswith(".json")], ["config.json"])
        assert os.listdir(m / "raw")
    os.mkdir(t + "/gone")  # alone it tells what lacks
    shutil.copy(t + "/run/model.safetensors.index.json", t + "/gone")
    with Mount(t + "/gone", t + "/mnt2") as m:
        fails("a missing file", errno.EIO, lambda: read_all(m / "raw/w"))


def test_follow_symlinks(t):
    os.mkdir(t + "/run")
    write_checkpoint(t + "/elsewhere/step1", make_tensors(1))
    os.symlink("../elsewhere/step1", t + "/run/step1")
    os.symlink(t + "/elsewhere/step1/config.json", t + "/run/config.json")
    with Mount(t + "/run", t + "/mnt") as m:
        same("without", os.listdir(m.path), [])
    with Mount(t + "/run", t + "/mnt", "follow_symlinks") as m:
        same("with", sorted(os.listdir(m.path)), ["config.json", "step1"])
        assert os.path.isdir(m / "step1") and not os.path.islink(m / "step1")
        for key, (_, _, data) in make_tensors(1).items():
            same(key, read_all(m / f"step1/raw/{key}"), data)


def test_hugging_face_cache(t):
    tensors = make_tensors(2)
    base = t + "/models--org--name"
    write_checkpoint(base + "/plain", tensors)
    snapshot = base + "/snapshots/abc"
    os.makedirs(base + "/blobs")
    os.makedirs(snapshot)
    for i, name in enumerate(sorted(os.listdir(base + "/plain"))):
        os.rename(f"{base}/plain/{name}", f"{base}/blobs/{i}")
        os.symlink(f"../../blobs/{i}", f"{snapshot}/{name}")
    with Mount(snapshot, t + "/mnt") as m:
        same("top", sorted(os.listdir(m.path)), [".unshard", "config.json", "model.safetensors", "raw", "tensors", "tree"])
        for key, (_, _, data) in tensors.items():
            same(key, read_all(m / f"raw/{key}"), data)


def test_names_of_ours_in_the_source(t):
    tensors = make_tensors(3)
    write_checkpoint(t + "/src", tensors)
    os.makedirs(t + "/src/tensors/sub")
    write_file(t + "/src/tensors/theirs.txt", b"theirs")
    os.mkdir(t + "/src/.unshard")
    write_file(t + "/src/.unshard/theirs.json", b"theirs")
    os.mkdir(t + "/src/optimizer")
    write_file(t + "/src/optimizer/theirs.txt", b"theirs")
    with Mount(t + "/src", t + "/mnt") as m:
        same("tensors/", sorted(os.listdir(m / "tensors")), sorted(k + ".npy" for k in tensors))
        assert "checkpoint.json" in os.listdir(m / ".unshard") and "theirs.json" not in os.listdir(m / ".unshard")
        # No tensor has this role, so the name is free for the source's own.
        same("optimizer/", os.listdir(m / "optimizer"), ["theirs.txt"])


def test_strange_keys(t):
    keys = ["", ".", "..", "a/b", "a..b", ".hidden", "100%", "new\nline", "x" * 300, "ü.ß", "t.npy", "t.npy.u", "-rf", "CON", "a.", "a. "]
    tensors = {k: ("U8", (2,), bytes((i, 255 - i))) for i, k in enumerate(keys)}
    os.mkdir(t + "/src")
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    with Mount(t + "/src", t + "/mnt") as m:
        for view in ("raw", "tensors"):
            found = {}
            for name in os.listdir(m / view):
                assert "/" not in name and "\n" not in name and not name.startswith(".") and len(os.fsencode(name)) <= 255, name
                key = os.getxattr(m / f"{view}/{name}", "user.unshard.key").decode()
                found[key] = read_all(m / f"{view}/{name}")[-2:]
            same(view, found, {k: v[2] for k, v in tensors.items()})
        found = {}
        for root, _, names in os.walk(m / "tree"):
            for name in names:
                path = os.path.join(root, name)
                found[os.getxattr(path, "user.unshard.key").decode()] = read_all(path)[-2:]
        same("tree", found, {k: v[2] for k, v in tensors.items()})
        fails("too long a name", errno.ENAMETOOLONG, lambda: os.stat(m / ("raw/" + "x" * 256)))
        fails("a file is no directory", errno.ENOTDIR, lambda: os.stat(m / "model.safetensors/x"))


def test_a_damaged_checkpoint_shows_why(t):
    image = safetensors_image(make_tensors(4))
    os.makedirs(t + "/run/bad")
    write_file(t + "/run/bad/model.safetensors", image[:-100])
    write_file(t + "/run/bad/config.json", b"{}")
    write_checkpoint(t + "/run/good", make_tensors(5))
    with Mount(t + "/run", t + "/mnt") as m:
        names = os.listdir(m / "bad")
        assert "config.json" in names and ".unshard" in names, names
        assert "raw" not in names and "tensors" not in names, names
        why = read_all(m / "bad/.unshard/checkpoint.json").decode()
        assert '"error":null' not in why.replace(" ", ""), why
        for name in ("model.safetensors", "raw", "tensors/x.npy"):
            fails(name, errno.EIO, lambda n=name: os.stat(m / f"bad/{n}"))
        fails("another name", errno.ENOENT, lambda: os.stat(m / "bad/other.json"))
        same("the good one", read_all(m / "good/config.json"), read_all(t + "/run/good/config.json"))
        for key, (_, _, data) in make_tensors(5).items():
            same(key, read_all(m / f"good/raw/{key}"), data)


def test_unreadable_files(t):
    tensors = make_tensors(6)
    write_checkpoint(t + "/src", tensors)
    os.makedirs(t + "/src/deep/" + "/".join("d" * 200 for _ in range(10)))
    with Mount(t + "/src", t + "/mnt") as m:
        path = m / "deep"
        for _ in range(10):
            same("deep", os.listdir(path), ["d" * 200])
            path += "/" + "d" * 200
        same("bottom", os.listdir(path), [])


if __name__ == "__main__":
    main(globals())
