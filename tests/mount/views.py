# SPDX-License-Identifier: MIT
"""Every view of every fixture holds the expected bytes, and all views agree."""
import ast
import errno
import glob
import json
import os
import struct
import subprocess
import sys

from mountlib import (PATIENCE, Mount, fails, main, make_tensors, read_all, safetensors_image, same, sha256, wait_for,
                      write_checkpoint, write_file)

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def fixtures():
    """Each expected file of each format, and the fixture that it is about (steps of one run share theirs)."""
    for expected in sorted(glob.glob(os.path.join(TESTS, "data", "*", "*.expected.json"))):
        source = expected[: -len(".expected.json")]
        if not os.path.exists(source):
            source = os.path.splitext(source)[0]
        if os.path.isdir(source):
            yield expected, source


def xattr(path, name):
    return os.getxattr(path, "user.unshard." + name).decode("utf-8", "surrogateescape")


def npy(data):
    """Header as a dict, and the bytes behind it."""
    same("npy magic", data[:6], b"\x93NUMPY")
    wide = data[6] >= 2
    (n,) = struct.unpack("<I" if wide else "<H", data[8 : 12 if wide else 10])
    start = (12 if wide else 10) + n
    same("npy data is 64-byte aligned", start % 64, 0)
    return ast.literal_eval(data[12 if wide else 10 : start].decode()), data[start:]


def safetensors(data):
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], tuple(v["shape"]), data[8 + n :][slice(*v["data_offsets"])]) for k, v in header.items()}


def raw_tensors(checkpoint):
    found = {}
    for name in sorted(os.listdir(os.path.join(checkpoint, "raw"))):
        path = os.path.join(checkpoint, "raw", name)
        try:
            data = read_all(path)
        except OSError:
            data = None  # the reason must be told
            assert xattr(path, "fault"), path
        if data is not None:
            same(path + ": st_size", os.stat(path).st_size, len(data))
            same(path + ": st_blocks", os.stat(path).st_blocks, (len(data) + 511) // 512)
        found[xattr(path, "key")] = (xattr(path, "dtype"), tuple(json.loads(xattr(path, "shape"))), data, xattr(path, "role"))
    return found


def check_npy_views(checkpoint, raw):
    inodes, seen = {}, {"tensors": set(), "tree": set()}
    for view in seen:
        for root, _, names in os.walk(os.path.join(checkpoint, view)):
            for name in names:
                path = os.path.join(root, name)
                key = xattr(path, "key")
                seen[view].add(key)
                same(path + ": inode", inodes.setdefault(key, os.stat(path).st_ino), os.stat(path).st_ino)
                same(path + ": links", os.stat(path).st_nlink, 2)
                if raw[key][2] is None:
                    fails(path, 5, lambda: read_all(path))
                    continue
                header, data = npy(read_all(path))
                same(path + ": order", header["fortran_order"], False)
                same(path + ": bytes", sha256(data), sha256(raw[key][2]))
                same(path + ": attributes agree", xattr(path, "shape"), json.dumps(list(raw[key][1])))
    same(checkpoint + "/tensors: keys", seen["tensors"], set(raw))
    same(checkpoint + "/tree: keys", seen["tree"], set(raw))


def check_role_file(path, raw, role):
    want = {k: t for k, t in raw.items() if t[3] == role and t[0] not in ("C128", "C32")}
    if not want:
        assert not os.path.exists(path), path
        return
    if any(t[2] is None for t in want.values()):
        fails(path, 5, lambda: read_all(path))
        return
    got = safetensors(read_all(path))
    same(path + ": tensors", len(got), len(want))
    for name, tensor in got.items():
        keys = [k for k in want if (k == name or k.endswith("." + name) or k.endswith("/" + name)) and want[k][:3] == tensor]
        assert keys, f"{path}: {name} is not the tensor of that name"


def check_checkpoint(checkpoint):
    raw = raw_tensors(checkpoint)
    check_npy_views(checkpoint, raw)
    top = os.listdir(checkpoint)
    name = "adapter_model.safetensors" if "adapter_model.safetensors" in top and "model.safetensors" not in top else "model.safetensors"
    check_role_file(os.path.join(checkpoint, name), raw, "model")
    check_role_file(os.path.join(checkpoint, "optimizer", "optimizer.safetensors"), raw, "optimizer")
    info = json.loads(read_all(os.path.join(checkpoint, ".unshard", "checkpoint.json")))
    assert isinstance(info, dict) and info, checkpoint
    objects = read_all(os.path.join(checkpoint, ".unshard", "objects.json"))
    json.loads(objects)
    same(checkpoint + ": objects.json size", os.stat(os.path.join(checkpoint, ".unshard", "objects.json")).st_size, len(objects))
    assert os.getxattr(checkpoint, "user.unshard.format"), checkpoint
    return raw


def test_every_fixture_in_every_view(t):
    """All views of a checkpoint show the same bytes, and they are those of its framework's own loader."""
    count = 0
    for expected, source in fixtures():
        with Mount(source, os.path.join(t, "mnt")) as m:
            for root, dirs, _ in os.walk(m.path):
                if os.path.exists(os.path.join(root, ".unshard", "checkpoint.json")):
                    count += len(check_checkpoint(root))
                    dirs[:] = [d for d in dirs if d not in ("tensors", "tree", "raw", "optimizer", ".unshard")]
            done = subprocess.run([sys.executable, os.path.join(TESTS, "check_mount.py"), m.path, expected],
                                  capture_output=True, text=True)
            same(source + ": " + done.stdout, done.returncode, 0)
    assert count > 400, f"only {count} tensors were compared"
    print(f"# {count} tensors")


def test_side_files_are_shown_and_storage_is_not(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/src", tensors, shards=3)
    write_file(t + "/src/tokenizer.json", b"{}" * 70000)
    os.mkdir(t + "/src/assets")
    write_file(t + "/src/assets/a.txt", b"text")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", sorted(os.listdir(m.path)), [".unshard", "assets", "config.json", "model.safetensors", "raw", "tensors", "tokenizer.json", "tree"])
        for name in ("config.json", "tokenizer.json", "assets/a.txt"):
            same(name, read_all(m / name), read_all(t + "/src/" + name))
            same(name + " attributes", os.listxattr(m / name), [])
        for name in ("model-00001-of-00003.safetensors", "model.safetensors.index.json", "generation_config.json"):
            fails(name, 2, lambda: os.stat(m / name))
        same("model", safetensors(read_all(m / "model.safetensors")), {k: (d, tuple(s), b) for k, (d, s, b) in tensors.items()})
        same("files of .unshard", sorted(os.listdir(m / ".unshard")), ["checkpoint.json", "counters.json", "last-error", "objects.json"])
        assert json.loads(read_all(m / ".unshard/counters.json"))["opens"] > 0
        same("last-error", read_all(m / ".unshard/last-error"), b"")


def test_files_of_training_stay_visible(t):
    """A trainer that goes on without them says nothing, and has an optimizer that knows nothing."""
    there = {"trainer_gpt2_ddp2_bf16/checkpoint-2": ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"),
             "accelerate_fsdp2_full_2r": ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl")}
    for name, files in there.items():
        source = os.path.join(TESTS, "data", "hf_trainer", name)
        with Mount(source, t + "/mnt") as m:
            for file in files:
                same(f"{name}/{file}", read_all(m / file), read_all(os.path.join(source, file)))
            assert os.listdir(m / "optimizer") == ["optimizer.safetensors"], "its tensors are shown all the same"


def test_one_whole_file_is_served_byte_for_byte(t):
    os.mkdir(t + "/src")
    image = safetensors_image(make_tensors(2))
    write_file(t + "/src/model.safetensors", image)
    with Mount(t + "/src", t + "/mnt") as m:
        same("model.safetensors", sha256(read_all(m / "model.safetensors")), sha256(image))


def test_source_that_is_a_file(t):
    os.mkdir(t + "/src")
    image = safetensors_image(make_tensors(3))
    write_file(t + "/src/weights.safetensors", image)
    write_file(t + "/src/other.txt", b"not of the checkpoint")
    with Mount(t + "/src/weights.safetensors", t + "/mnt") as m:
        same("top", sorted(os.listdir(m.path)), [".unshard", "model.safetensors", "raw", "tensors", "tree"])
        same("model.safetensors", sha256(read_all(m / "model.safetensors")), sha256(image))


def test_several_files_are_directories_of_their_names(t):
    os.mkdir(t + "/src")
    for i in range(2):
        write_file(f"{t}/src/part{i}.safetensors", safetensors_image(make_tensors(("f", i))))
    write_file(t + "/src/notes.txt", b"notes")
    with Mount(t + "/src", t + "/mnt") as m:
        same("top", sorted(os.listdir(m.path)), ["notes.txt", "part0.safetensors", "part1.safetensors"])
        for i in range(2):
            raw = raw_tensors(m / f"part{i}.safetensors")
            same("tensors", {k: v[2] for k, v in raw.items()}, {k: v[2] for k, v in make_tensors(("f", i)).items()})


def test_names_that_loaders_ask_for(t):
    """diffusers wants its own file name, and both libraries that of a variant: a second link of the model's file."""
    tensors = {"a": ("F32", (2,), b"\1\2\3\4\5\6\7\10"), "b": ("U8", (3,), b"xyz")}
    stem = "diffusion_pytorch_model"
    shards = [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    whole = {"unet": f"{stem}.safetensors", "fp16": f"{stem}.fp16.safetensors", "text": "model.fp16.safetensors"}
    for name in (*whole, "set", "plain", "two", "more"):
        os.makedirs(f"{t}/src/{name}")
        write_file(f"{t}/src/{name}/config.json", b"{}")
    for name, file in whole.items():
        write_file(f"{t}/src/{name}/{file}", safetensors_image(tensors))
    for key, file in zip("ab", shards):
        write_file(f"{t}/src/set/{file}", safetensors_image({key: tensors[key]}))
    index = {"metadata": {}, "weight_map": dict(zip("ab", shards))}
    write_file(f"{t}/src/set/{stem}.safetensors.index.json", json.dumps(index).encode())
    write_file(f"{t}/src/plain/model.safetensors", safetensors_image(tensors))
    # Two models: the view never has the name of the one that it is not.
    write_file(f"{t}/src/two/model.safetensors", safetensors_image(tensors))
    write_file(f"{t}/src/two/{stem}.safetensors.index.json", json.dumps(index).encode())
    write_file(f"{t}/src/more/{stem}.safetensors", safetensors_image(tensors))
    write_file(f"{t}/src/more/model.safetensors.index.json", json.dumps(index).encode())
    for key, file in zip("ab", shards):
        for name in ("two", "more"):
            write_file(f"{t}/src/{name}/{file}", safetensors_image({key: ("U8", (1,), b"z")}))
    names = whole | {"set": f"{stem}.safetensors"}
    with Mount(t + "/src", t + "/mnt") as m:
        for name, file in names.items():
            same(name, [n for n in sorted(os.listdir(m / name)) if n.endswith("tensors")], sorted([file, "model.safetensors", "tensors"]))
            same(file + ": bytes", safetensors(read_all(m / f"{name}/{file}")), tensors)
            same(file + ": inode", os.stat(m / f"{name}/{file}").st_ino, os.stat(m / f"{name}/model.safetensors").st_ino)
        same("more", safetensors(read_all(m / f"more/{stem}.safetensors")), tensors)
        for name in ("plain", "two"):
            shown = [n for n in sorted(os.listdir(m / name)) if n.endswith(".safetensors") and n not in shards]
            same(name, shown, ["model.safetensors"])
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        # Loaders find what they would find on the disk, and no second name of it.
        for folder in (*names, "plain", "two", "more"):
            stored = sorted(os.listdir(f"{t}/src/{folder}"))
            same(f"{folder}, for writing", sorted(os.listdir(m / folder)), stored)
            for name in stored:
                same(f"{folder}/{name}, for writing", read_all(m / f"{folder}/{name}"), read_all(f"{t}/src/{folder}/{name}"))
            for name in {"model.safetensors", f"{stem}.safetensors"} - set(stored):
                fails(f"{folder}/{name}, for writing", errno.ENOENT, lambda folder=folder, name=name: os.stat(m / f"{folder}/{name}"))
            same(f"{folder}, by a view", bool(read_all(m / f"{folder}/raw/a")), True)


def test_views_that_are_asked_for(t):
    write_checkpoint(t + "/src", make_tensors(4))
    with Mount(t + "/src", t + "/mnt", "views=raw+model") as m:
        same("top", sorted(os.listdir(m.path)), [".unshard", "config.json", "model.safetensors", "raw"])
        fails("tensors", 2, lambda: os.listdir(m / "tensors"))


def test_trackers_give_latest(t):
    write_checkpoint(t + "/meg/iter_0000200", make_tensors(5))
    write_file(t + "/meg/latest_checkpointed_iteration.txt", b"200\n")
    write_checkpoint(t + "/rl/global_step_20/actor", make_tensors(5))
    write_file(t + "/rl/latest_checkpointed_iteration.txt", b"20")
    write_checkpoint(t + "/ds/global_step10", make_tensors(6))
    write_file(t + "/ds/latest", b"global_step10")
    write_checkpoint(t + "/ucp/global_step10_universal", make_tensors(6))
    write_file(t + "/ucp/latest_universal", b"global_step10_universal")
    for name, text in (("empty", b""), ("long", b"x" * 5000), ("lines", b"a\na"), ("up", b"../ds"), ("none", b"b")):
        os.makedirs(t + "/bad/" + name + "/a")
        write_file(t + "/bad/" + name + "/latest", text)
    write_file(t + "/meg/iter_0000200/notes.txt", b"n")
    with Mount(t, t + "-mnt") as m:
        same("meg", sorted(os.listdir(m / "meg")), [".unshard", "iter_0000200", "latest", "latest_checkpointed_iteration.txt"])
        same("link", os.readlink(m / "meg/latest"), "iter_0000200")
        same("link in .unshard", os.readlink(m / "meg/.unshard/latest"), "../iter_0000200")
        same("beside trackers", os.listdir(m / "meg/.unshard"), ["latest"])
        same("length of the link", os.lstat(m / "meg/latest").st_size, len("iter_0000200"))
        same("through it", read_all(m / "meg/.unshard/latest/notes.txt"), b"n")
        same("rl", os.readlink(m / "rl/latest"), "global_step_20")
        same("ds", sorted(os.listdir(m / "ds")), [".unshard", "global_step10", "latest"])
        same("the source's own", read_all(m / "ds/latest"), b"global_step10")
        same("ucp", os.readlink(m / "ucp/latest"), "global_step10_universal")
        for name in os.listdir(m / "bad"):
            same("no tracker: " + name, sorted(os.listdir(m / ("bad/" + name))), ["a", "latest"])
        same("ds link", os.readlink(m / "ds/.unshard/latest"), "../global_step10")
        with open(t + "/meg/latest_checkpointed_iteration.txt", "w") as f:
            f.write("999")  # a step that is not there
        os.sync()
        wait_for("the new step", PATIENCE, lambda: not os.path.lexists(m / "meg/latest"))
        fails("a step that is not there", 2, lambda: os.lstat(m / "meg/latest"))
    os.rmdir(m.path)


def test_attributes(t):
    tensors = make_tensors(7)
    write_checkpoint(t + "/src", tensors)
    os.chmod(t + "/src/model-00001-of-00002.safetensors", 0o640)
    os.chmod(t + "/src/model-00002-of-00002.safetensors", 0o644)
    key = next(iter(tensors))
    with Mount(t + "/src", t + "/mnt") as m:
        raw = m / ("raw/" + key)
        names = os.listxattr(raw)
        same("names", sorted(names), ["user.unshard." + n for n in ("chunks", "dtype", "key", "plan", "role", "shape")])
        same("key", os.getxattr(raw, "user.unshard.key"), key.encode())
        same("shape", os.getxattr(raw, "user.unshard.shape"), b"[64, 32]")
        same("dtype", os.getxattr(raw, "user.unshard.dtype"), b"F32")
        same("role", os.getxattr(raw, "user.unshard.role"), b"model")
        where = os.getxattr(raw, "user.unshard.plan").decode()
        assert where.startswith(f"unix:{m.dir}/cache/plan-{m.process.pid}.sock "), where
        fails("no such attribute", 61, lambda: os.getxattr(raw, "user.unshard.nothing"))
        fails("not ours", 61, lambda: os.getxattr(raw, "user.other"))
        fails("labels", errno.EOPNOTSUPP, lambda: os.getxattr(raw, "security.selinux"))
        fails("access lists", errno.EOPNOTSUPP, lambda: os.getxattr(raw, "system.posix_acl_access"))
        same("mode is of the shards it is in", os.stat(raw).st_mode & 0o777, 0o440)
        same("mode of the other shard", os.stat(m / ("raw/" + list(tensors)[1])).st_mode & 0o777, 0o444)
        newest = max(os.stat(t + f"/src/model-0000{i}-of-00002.safetensors").st_mtime_ns for i in (1, 2))
        assert os.stat(raw).st_mtime_ns <= newest
        same("directory", os.stat(m.path).st_mode & 0o222, 0)
        same("block size", os.stat(raw).st_blksize, 262144)
        st = os.statvfs(m.path)
        same("free", (st.f_bfree, st.f_namemax), (0, 255))
        assert st.f_blocks * st.f_frsize >= sum(len(b) for _, _, b in tensors.values())
    with Mount(t + "/src", t + "/mnt", "uid=1234,gid=2345,umask=0277") as m:
        st = os.stat(m.path)
        same("uid, gid, umask", (st.st_uid, st.st_gid, st.st_mode & 0o777), (1234, 2345, 0o500))
        if os.geteuid() == 0:
            st = os.stat(m / ("raw/" + key))
            same("of a file", (st.st_uid, st.st_gid, st.st_mode & 0o777), (1234, 2345, 0o400))
        else:
            fails("another's directory", errno.EACCES, lambda: os.stat(m / ("raw/" + key)))


def test_block_sizes(t):
    """`cat` and `cp` read large tensors in pieces of a MiB; where a reader seeks, and in small files, they stay smaller."""
    size = 64 << 20
    os.makedirs(t + "/src")
    shard = t + "/src/model.safetensors"
    image = safetensors_image({"small": ("U8", (8,), b"12345678"), "large": ("U8", (size,), bytes(size))})
    write_file(shard, image[:-size])
    os.truncate(shard, len(image))
    write_file(t + "/src/train.log", b"line\n")
    os.truncate(t + "/src/train.log", size)
    with Mount(t + "/src", t + "/mnt") as m:
        for name, want in (("raw/large", 1 << 20), ("tensors/large.npy", 1 << 20), ("raw/small", 1 << 18), ("train.log", 1 << 18)):
            same(name, os.stat(m / name).st_blksize, want)
            listed = [e.stat().st_blksize for e in os.scandir(os.path.dirname(m / name)) if e.path == m / name]
            same("listed " + name, listed, [want])


if __name__ == "__main__":
    main(globals(), seconds=1200)
