# SPDX-License-Identifier: MIT
"""Checkpoints of more files than a process may have open: by a mount and by commands."""
import json
import os
import pickle
import random
import resource
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import make_checkpoint as made
import make_metadata as torch_like
from mountlib import UNSHARD, Mount, main, may_open, read_all, same, safetensors_image, tensor_bytes, write_file

SHARDS = 2000
LIMIT = 256
FEW = ["prlimit", f"--nofile={LIMIT}:{LIMIT}"]
ROWS, COLUMNS = 4, 16  # of F32 numbers in a shard
PIECE = 4 * ROWS * COLUMNS
OURS = 2 * SHARDS  # files that the tests themselves may open: 1024 is what a user's shell has


def key_of(i):
    return f"model.layers.{i}.weight"


def hf_directory(path):
    """A tensor a shard. {key: bytes}"""
    os.makedirs(path)
    tensors, index = {}, {}
    for i in range(SHARDS):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        tensors[key_of(i)] = tensor_bytes(i, PIECE)
        index[key_of(i)] = name
        write_file(f"{path}/{name}", safetensors_image({key_of(i): ("F32", (ROWS, COLUMNS), tensors[key_of(i)])}))
    write_file(f"{path}/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": index}).encode())
    return tensors


def dcp_directory(path, tensors, shards):
    """Each tensor cut by rows over as many files of its own. {key: bytes}"""
    os.makedirs(path)
    want, meta, storage = {}, {}, {}
    properties = torch_like.Properties()
    properties.state = (torch_like.float32, torch_like.layout(), False, torch_like.MemFormat(0), False)
    for t in range(tensors):
        key, pieces, boxes = key_of(t), [], []
        for i in range(shards):
            name, offset = f"__{t * shards + i}_0.distcp", torch_like.Size((i * ROWS, 0))
            with open(f"{path}/{name}", "w+b") as f:
                at, length = made.write_blob(f, (ROWS, COLUMNS), False, made.CHUNK)
                f.seek(0)
                image = f.read()
            # The data's local header is the last one before it.
            begin = image.index(b"archive/data/0") - 30
            begin += 30 + 14 + int.from_bytes(image[begin + 28:begin + 30], "little")
            pieces.append(image[begin:begin + PIECE])
            boxes.append(torch_like.make(torch_like.Chunk, offsets=offset, sizes=torch_like.Size((ROWS, COLUMNS))))
            index = torch_like.make(torch_like.Index, fqn=key, index=i, offset=offset)
            storage[index] = torch_like.make(torch_like.StorageInfo, relative_path=name, offset=at, length=length)
        want[key] = b"".join(pieces)
        meta[key] = torch_like.make(torch_like.TensorStorage, properties=properties, size=torch_like.Size((shards * ROWS, COLUMNS)), chunks=boxes)
    whole = torch_like.make(torch_like.Metadata, state_dict_metadata=meta, planner_data={k: tuple(k.split(".")) for k in meta}, storage_data=storage,
                            version="1.0.0", storage_meta=torch_like.make(torch_like.StorageMeta, checkpoint_id="/c", save_id="1", load_id=None, modules=[]))
    with open(f"{path}/.metadata", "wb") as f:
        pickle.dump(whole, f, protocol=4)
    return want


def check_bounds(mount):
    server = mount.process.pid  # prlimit became it
    files = len(os.listdir(f"/proc/{server}/fd"))
    with open(f"/proc/{server}/maps") as f:
        maps = sum(1 for line in f if mount.source in line)  # of shards: a sanitizer has hundreds of its own
    same("the server's limit", resource.prlimit(server, resource.RLIMIT_NOFILE), (LIMIT, LIMIT))
    assert files < LIMIT, f"{files} files are open"
    assert maps < LIMIT, f"{maps} maps of shards"


def command(*args):
    done = subprocess.run([*FEW, UNSHARD, *args], capture_output=True, env={**os.environ, "XDG_CACHE_HOME": os.path.dirname(args[1]) + "/cache"})
    if done.returncode:
        raise AssertionError(f"unshard {' '.join(args)}: {done.returncode}: {done.stderr.decode()}")
    return done.stdout


def check_open_together(mount, want):
    """All tensors open at once, read by turns."""
    files = {key: os.open(mount / f"raw/{key}", os.O_RDONLY) for key in want}
    check_bounds(mount)
    for key in random.Random(1).sample(sorted(want), len(want)):
        at = len(want[key]) // 3
        same(key, os.pread(files[key], 100, at), want[key][at:at + 100])
    check_bounds(mount)
    for key, fd in files.items():
        same(key, os.pread(fd, len(want[key]), 0), want[key])
        os.close(fd)
    check_bounds(mount)


def test_a_tensor_a_shard(t):
    """2,000 tensors in as many shards."""
    may_open(OURS)
    want = hf_directory(f"{t}/source")
    with Mount(f"{t}/source", f"{t}/m", wrapper=FEW) as m:
        image = read_all(m / "model.safetensors")
        same("model.safetensors", image[int.from_bytes(image[:8], "little") + 8:], b"".join(want[key] for key in sorted(want)))
        check_open_together(m, want)


def test_tensors_over_many_shards(t):
    """Ten tensors in 200 files each, all of them open at once."""
    may_open(OURS)
    want = dcp_directory(f"{t}/source", 10, 200)
    with Mount(f"{t}/source", f"{t}/m", wrapper=FEW) as m:
        check_open_together(m, want)


def test_a_tensor_over_all_shards(t):
    """One tensor in 2,000 files, read in one piece and by eight readers at once."""
    may_open(OURS)
    want = dcp_directory(f"{t}/source", 1, SHARDS)[key_of(0)]
    with Mount(f"{t}/source", f"{t}/m", wrapper=FEW) as m:
        path = m / f"raw/{key_of(0)}"
        same("the tensor", read_all(path), want)
        readers = [subprocess.Popen(["dd", f"if={path}", "bs=1M", "iflag=direct", "status=none"], stdout=subprocess.PIPE) for _ in range(8)]
        for reader in readers:
            same("a reader", reader.communicate()[0], want)
            same("its status", reader.returncode, 0)
        check_bounds(m)


def test_commands(t):
    may_open(OURS)
    tensors = hf_directory(f"{t}/hf")
    cut = dcp_directory(f"{t}/dcp", 1, SHARDS)[key_of(0)]
    same("cat of one of many", command("cat", f"{t}/hf", key_of(7)), tensors[key_of(7)])
    same("cat of one in many", command("cat", f"{t}/dcp", key_of(0)), cut)
    for name, key, want in ("hf", key_of(0), tensors[key_of(0)]), ("dcp", key_of(0).removeprefix("model."), cut):
        command("verify", f"{t}/{name}", "--deep")
        command("convert", f"{t}/{name}", f"{t}/{name}-out", "--to", "hf")
        same(f"{name}, converted", command("cat", f"{t}/{name}-out", key), want)


def test_many_open_files_of_a_mount_for_writing(t):
    """What programs have open comes first: descriptors that the server keeps of other names are closed for them."""
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw", wrapper=FEW) as m:
        for i in range(LIMIT):
            os.mkdir(m / f"dir{i}")
        fds = [os.open(m / f"dir{i}", os.O_RDONLY) for i in range(LIMIT // 2, LIMIT // 2 + 70)]
        fds += [os.open(m / f"dir{i}/file", os.O_RDWR | os.O_CREAT) for i in range(80)]
        os.mkdir(m / "dir0/sub")
        for fd in fds:
            os.close(fd)
        same("names", len(os.listdir(m.path)), LIMIT)


if __name__ == "__main__":
    main(globals())
