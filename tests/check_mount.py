#!/usr/bin/env python3
"""Compare mounted checkpoints with what the frameworks' own loaders gave.

    check_mount.py MOUNT EXPECTED.json [...]      exit 0 when every expected tensor is there under its own key, whole, in every view

MOUNT is a mount of the fixture itself, not of a folder that holds it. Sections other than `tensors` (copies, truth, objects) are not counted.

EXPECTED.json: {"path": the checkpoint's directory in the source (optional), "tensors": {KEY or PATH:KEY: {dtype, shape, sha256 of the
full little-endian C-order bytes}}}. PATH is a folder or file of the source; in a composite checkpoint PATH:KEY is the tensor KEY of that
part (or PATH/KEY where two parts hold the same KEY). Every directory under MOUNT with `.unshard/checkpoint.json` is a checkpoint; its
tensors are found by the xattr `user.unshard.key` of raw/. All views are read and held against each other: raw/, tensors/, tree/,
model.safetensors (or adapter_model.safetensors), optimizer/optimizer.safetensors. Needs Python >= 3.9.
"""
import ast
import collections
import hashlib
import json
import os
import struct
import sys

NPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<V2", "F8_E4M3": "|V1", "F8_E5M2": "|V1", "F8_E8M0": "|V1", "F8_E4M3FNUZ": "|V1", "F8_E5M2FNUZ": "|V1", "I64": "<i8", "I32": "<i4", "I16": "<i2",
       "I8": "|i1", "U8": "|u1", "BOOL": "|b1", "C64": "<c8", "C128": "<c16", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F4": "|u1", "C32": "<V4"}
NOT_IN_SAFETENSORS = {"C128", "C32"}
Tensor = collections.namedtuple("Tensor", "dtype shape sha256 role inode")


def sha(data):
    return hashlib.sha256(data).hexdigest()


def xattr(path, name):
    try:
        return os.getxattr(path, "user.unshard." + name).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def read_npy(path):
    """(shape, fortran_order, descr, data), by the definition of the format."""
    with open(path, "rb") as f:
        magic = f.read(8)
        if magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2):
            raise ValueError("no .npy of version 1 or 2")
        (n,) = struct.unpack("<H" if magic[6] == 1 else "<I", f.read(2 if magic[6] == 1 else 4))
        text = f.read(n)
        if f.tell() % 64 or not text.endswith(b"\n"):
            raise ValueError("the header is not padded to 64 bytes")
        header = ast.literal_eval(text.decode("latin-1"))
        return header["shape"], header["fortran_order"], header["descr"], f.read()


def read_safetensors(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(n))
        header.pop("__metadata__", None)
        for key, t in header.items():
            begin, end = t["data_offsets"]
            f.seek(8 + n + begin)
            yield key, (t["dtype"], tuple(t["shape"]), sha(f.read(end - begin)))


def walk(top):
    """os.walk, which takes what cannot be listed for empty."""
    def tell(e):
        raise e
    return os.walk(top, onerror=tell)


def files_under(folder, suffix=""):
    for root, _, names in walk(folder):
        for name in names:
            if name.endswith(suffix):
                yield os.path.join(root, name)


class Checkpoint:
    """One checkpoint directory of the mount, every view read once; `problems` says where the views disagree."""

    def __init__(self, path):
        self.path, self.tensors, self.problems = path, {}, []
        for f in files_under(os.path.join(path, "raw")):
            self.read_raw(f)
        inodes = {}
        for view in ("tensors", "tree"):
            seen = {}
            for f in files_under(os.path.join(path, view), ".npy"):
                seen[self.check_npy(f)] = os.stat(f).st_ino
            lacking = sorted(set(self.tensors) - set(seen))
            if lacking:
                self.problems.append(f"{path}/{view} lacks {lacking[:3]} ({len(lacking)})")
            for key, inode in seen.items():
                if inodes.setdefault(key, inode) != inode:
                    self.problems.append(f"{path}: tensors/ and tree/ of {key} are different inodes")
        whole = [os.path.join(path, n) for n in ("model.safetensors", "adapter_model.safetensors")]
        self.check_whole(whole[1] if os.path.exists(whole[1]) and not os.path.exists(whole[0]) else whole[0], "model")
        self.check_whole(os.path.join(path, "optimizer", "optimizer.safetensors"), "optimizer")

    def read_raw(self, f):
        key, dtype, shape, role = (xattr(f, n) for n in ("key", "dtype", "shape", "role"))
        if None in (key, dtype, shape, role):
            self.problems.append(f"{f}: an xattr of key, dtype, shape, role is missing")
            return
        try:
            with open(f, "rb") as h:
                data = h.read()
        except OSError as e:
            self.problems.append(f"{f}: {e.strerror}")
            return
        if len(data) != os.stat(f).st_size:
            self.problems.append(f"{f}: st_size {os.stat(f).st_size}, read {len(data)}")
        self.tensors[key] = Tensor(dtype, tuple(json.loads(shape)), sha(data), role, os.stat(f).st_ino)

    def check_npy(self, f):
        key = xattr(f, "key")
        want = self.tensors.get(key)
        if want is None:
            self.problems.append(f"{f}: key {key!r} is not in raw/")
            return key
        try:
            shape, fortran, dtype, data = read_npy(f)
        except (OSError, ValueError, KeyError, SyntaxError) as e:
            self.problems.append(f"{f}: {e}")
            return key
        shaped = shape == want.shape or (want.dtype == "F4" and shape[:-1] == want.shape[:-1])
        if not shaped or fortran or NPY.get(want.dtype) != dtype or sha(data) != want.sha256:
            self.problems.append(f"{f}: {dtype} {shape} differs from raw/ {want.dtype} {want.shape}")
        return key

    def check_whole(self, f, role):
        """The one file of a role holds each of its tensors once, under its key or the end of it."""
        want = {k: (t.dtype, t.shape, t.sha256) for k, t in self.tensors.items() if t.role == role and t.dtype not in NOT_IN_SAFETENSORS}
        if not os.path.exists(f):
            if want:
                self.problems.append(f"{f} is missing; {len(want)} tensors have role {role}")
            return
        got = dict(read_safetensors(f))
        if len(got) != len(want):
            self.problems.append(f"{f}: {len(got)} tensors, role {role} has {len(want)}")
        for name, t in got.items():
            if not any((key == name or key.endswith("." + name) or key.endswith("/" + name)) and want[key] == t for key in ([name] if name in want else want)):
                self.problems.append(f"{f}: {name} {t[0]} {list(t[1])} is not the tensor of that name")


def candidates(key, base, found, mount):
    """(checkpoint, key) pairs under which an expected key may stand."""
    for c in found:
        rel = os.path.relpath(c.path, mount)
        rel = "" if rel == "." else rel
        if base is None or rel == base or rel.startswith(base + "/") or not base:
            yield c, key
        head, colon, tail = key.partition(":")
        while colon:
            if head == rel or not rel or head.startswith(rel + "/"):
                part = head[len(rel):].strip("/")
                yield c, tail
                yield c, part + "/" + tail
                yield c, part + ":" + tail
            more, colon, rest = tail.partition(":")
            head, tail = head + ":" + more, rest


def main(mount, expected_files):
    found = [Checkpoint(root) for root, _, _ in walk(mount) if os.path.exists(os.path.join(root, ".unshard", "checkpoint.json"))]
    problems = [p for c in found for p in c.problems]
    total = exact = 0
    for path in expected_files:
        with open(path) as f:
            expected = json.load(f)
        base = expected.get("path")
        for key, t in expected["tensors"].items():
            total += 1
            want = (t["dtype"], tuple(t["shape"]), t["sha256"])
            here = [c.tensors[k] for c, k in candidates(key, base, found, mount) if k in c.tensors]
            if any(h[:3] == want for h in here):
                exact += 1
            else:
                print("wrong:" if here else "missing:", key, want[0], list(want[1]), "; the mount has " + "; ".join(f"{h.dtype} {list(h.shape)}" for h in here[:3]) if here else "")
    for p in problems[:40]:
        print("view:", p)
    print(f"{len(found)} checkpoints, {exact} of {total} expected tensors exact, {len(problems)} problems between views")
    return 0 if found and total and exact == total and not problems else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1].rstrip("/"), sys.argv[2:]))
