#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""One tensor has several names: what is written by one of them is not undone by who changes a few bytes by another (decision 043)."""
import errno
import itertools
import json
import mmap
import os
import pathlib
import shutil
import struct
import subprocess

from mountlib import Mount, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, tensor_bytes, \
    write_checkpoint, write_file

DATA = pathlib.Path(__file__).parent.parent / "data"
KEY = "model.layers.0.mlp.weight"  # F32
OTHER = "model.layers.1.mlp.weight"
SHAPE, BYTES = (64, 32), 64 * 32 * 4
VIEWS = {"raw": f"raw/{KEY}", "tensors": f"tensors/{KEY}.npy", "tree": "tree/model/layers/0/mlp/weight.npy", "model": "model.safetensors"}


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


def mounted(t):
    write_checkpoint(t + "/run/step", make_tensors(1))
    return Mount(t + "/run", t + "/mnt", "rw")


def at(path, key=KEY):
    """Where in the file of a view the tensor's bytes begin."""
    if not path.endswith("model.safetensors"):
        return os.stat(path).st_size - BYTES
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        return 8 + size + json.loads(f.read(size))[key]["data_offsets"][0]


def patch(path, data=b"patched!", key=KEY):
    """A few bytes at the tensor's end."""
    end = at(path, key) + BYTES
    with open(path, "r+b") as f:
        f.seek(end - len(data))
        f.write(data)


def whole(path, tensors):
    """All of it anew, as np.save and save_file do."""
    name = os.path.relpath(path).rsplit("/step/", 1)[-1]
    image = safetensors_image(tensors) if name == "model.safetensors" else tensors[KEY][2] if name.startswith("raw/") \
        else npy_image("<f4", SHAPE, tensors[KEY][2])
    with open(path, "wb") as f:
        f.write(image)


def patched(tensors, data=b"patched!"):
    dtype, shape, old = tensors[KEY]
    return {**tensors, KEY: (dtype, shape, old[:-len(data)] + data)}


def last_error(m):
    return read_all(m / "step/.unshard/last-error").decode()


def pairs():
    """Of tree/ and tensors/, one file by two names, the second is no other view."""
    return [(a, b) for a, b in itertools.permutations(VIEWS, 2) if {a, b} != {"tree", "tensors"}]


def test_each_view_after_each_other(t):
    """np.save by one name, a few bytes by another: refused until the first is published, and nothing of either is lost."""
    new = {key: (dtype, shape, tensor_bytes("new" + key, len(data))) for key, (dtype, shape, data) in make_tensors(1).items()}
    for i, (first, second) in enumerate(pairs()):
        one, two = (f"{{}}/step/{VIEWS[v]}" for v in (first, second))
        with mounted(f"{t}/{i}") as m:
            one, two = one.format(m.path), two.format(m.path)
            before = read_all(two)
            if first == "tree":
                patch(one)
                want = patched(make_tensors(1))
            else:
                whole(one, new)
                want = {**make_tensors(1), KEY: new[KEY]} if first != "model" else new
            shown = read_all(one)
            fails(f"{second} after {first}", errno.EBUSY, lambda path=two: open(path, "r+b"))
            what = VIEWS["tensors"] if first == "tree" else VIEWS[first]
            name = VIEWS["tensors"] if second == "tree" else VIEWS[second]
            assert f"step/{name}: {what}, of the same tensors, was written" in last_error(m), last_error(m)
            same(f"{first} is shown", read_all(one), shown)
            same(f"{second} is shown as it was", read_all(two), before)
            assert "(publish that first (sync DIR)" in last_error(m), last_error(m)
            subprocess.run(["sync", f"{m.path}/step"], check=True)
            same(f"{first}, published", stored(f"{t}/{i}/run/step"), want)
            patch(two, b"and more")
            publish(m)
        same(f"{first}, then {second}", stored(f"{t}/{i}/run/step"), patched(want, b"and more"))


def test_two_names_of_one_file(t):
    """tree/ and tensors/ show one file: what is changed by either is there by both."""
    with mounted(t) as m:
        patch(f"{m.path}/step/{VIEWS['tree']}", b"12345678")
        patch(f"{m.path}/step/{VIEWS['tensors']}", b"ABCD")
        for name in "tree", "tensors":
            same(name, read_all(f"{m.path}/step/{VIEWS[name]}")[-8:], b"1234ABCD")
        publish(m)
    same("stored", stored(t + "/run/step"), patched(make_tensors(1), b"1234ABCD"))


def test_a_view_that_is_older_is_not_changed(t):
    """Opened again, a view has what it had: not what came by another name since."""
    with mounted(t) as m:
        raw, npy = (f"{m.path}/step/{VIEWS[v]}" for v in ("raw", "tensors"))
        patch(raw, b"older")
        whole(npy, new := patched(make_tensors(1), b"newer"))
        fails("raw/ again", errno.EBUSY, lambda: open(raw, "r+b"))
        fails("a part of it", errno.EBUSY, lambda: os.truncate(f"{m.path}/step/model.safetensors", 100))
        patch(npy, b"newest!")
        publish(m)
    same("stored", stored(t + "/run/step"), patched(new, b"newest!"))


def test_all_new_bytes_are_the_last_word(t):
    """Who writes all of a view needs nothing of the others: the last close counts."""
    new = [patched(make_tensors(1), word) for word in (b"one", b"two", b"three", b"four", b"five")]
    with mounted(t) as m:
        raw, npy, model = (f"{m.path}/step/{VIEWS[v]}" for v in ("raw", "tensors", "model"))
        patch(raw, b"none")
        whole(npy, new[0])
        whole(raw, new[1])
        write_file(npy, npy_image("<f4", SHAPE, new[2][KEY][2]))
        whole(model, new[3])
        write_file(raw, new[4][KEY][2])
        patch(raw, b"six")
        publish(m)
    same("stored", stored(t + "/run/step"), patched(new[4], b"six"))


def test_other_tensors_are_not_asked(t):
    with mounted(t) as m:
        patch(m / f"step/raw/{KEY}", b"one")
        write_file(m / "step/tensors/new.npy", npy_image("<f4", SHAPE, make_tensors(2)[KEY][2]))
        with open(m / f"step/tensors/{OTHER}.npy", "r+b") as f:
            f.seek(-3, os.SEEK_END)
            f.write(b"two")
        with open(m / "step/tensors/new.npy", "r+b") as f:
            f.seek(-5, os.SEEK_END)
            f.write(b"three")
        publish(m)
    want = patched(make_tensors(1), b"one")
    want[OTHER] = (*want[OTHER][:2], want[OTHER][2][:-3] + b"two")
    want["new"] = ("F32", SHAPE, make_tensors(2)[KEY][2][:-5] + b"three")
    same("stored", stored(t + "/run/step"), want)


def test_roles_are_apart(t):
    """The file of the model is changed beside tensors of the optimizer, and not beside its own; so is the optimizer's."""
    shutil.copytree(DATA / "torch_dcp/dcp_fsdp2_adamw_3r_bf16", t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        names = os.listdir(m / "step/raw")
        state = next(n for n in sorted(names) if n.startswith("optim") and n.endswith("exp_avg"))
        model = next(n for n in sorted(names) if n.startswith("model."))
        files = {"m": m / "step/model.safetensors", "o": m / "step/optimizer/optimizer.safetensors"}

        def touch(path, n=1):
            with open(path, "r+b") as f:
                f.seek(-n, os.SEEK_END)
                last = f.read(n)
                f.seek(-n, os.SEEK_END)
                f.write(bytes(b ^ 1 for b in last))

        touch(m / f"step/raw/{state}")
        touch(files["m"])
        fails("the optimizer's file", errno.EBUSY, lambda: open(files["o"], "r+b"))
        fails("a tensor of the model", errno.EBUSY, lambda: open(m / f"step/raw/{model}", "r+b"))
        fails("the same, to write it", errno.EBUSY, lambda: os.open(m / f"step/tensors/{model}.npy", os.O_WRONLY | os.O_APPEND))
        publish(m)
        touch(files["o"])
        touch(m / f"step/raw/{model}")
        fails("an optimizer's tensor", errno.EBUSY, lambda: open(m / f"step/raw/{state}", "r+b"))
        publish(m)


def test_begun_before_and_closed_after(t):
    """Whoever had a view open when another came whole would undo that: publication tells it, and changes nothing."""
    for how in "write", "mapping":
        place = f"{t}/{how}"
        with mounted(place) as m:
            raw, npy = (f"{m.path}/step/{VIEWS[v]}" for v in ("raw", "tensors"))
            f = open(raw, "r+b", buffering=0)
            fails("tensors/ beside it", errno.EBUSY, lambda path=npy: open(path, "r+b"))
            whole(npy, new := patched(make_tensors(1), b"new bytes"))
            if how == "write":
                f.write(b"begins so")
            else:
                with mmap.mmap(f.fileno(), BYTES) as view:
                    view[:9] = b"begins so"
            f.close()
            fails("publication", errno.EINVAL, lambda mnt=m: publish(mnt))
            said = f"raw/{KEY}: it began with older bytes of tensor {KEY}, and would undo tensors/{KEY}.npy"
            assert said in last_error(m), last_error(m)
            same("source", stored(place + "/run/step"), make_tensors(1))
            whole(npy, new)
            publish(m)
        same("stored", stored(place + "/run/step"), new)


def test_opened_and_not_written(t):
    """A view that was opened to be written, and was not, undoes nothing."""
    with mounted(t) as m:
        raw, npy, model = (f"{m.path}/step/{VIEWS[v]}" for v in ("raw", "tensors", "model"))
        open(npy, "r+b").close()
        with open(raw, "r+b") as f, open(m / f"step/raw/{OTHER}", "r+b"):
            whole(npy, new := patched(make_tensors(1), b"new bytes"))
            same("what it began with", f.read(), make_tensors(1)[KEY][2])
        fails("older bytes", errno.EBUSY, lambda: open(raw, "r+b"))
        publish(m)
        same("stored", stored(t + "/run/step"), new)
        with open(model, "r+b"):
            os.unlink(m / f"step/tensors/{KEY}.npy")
        publish(m)
    same("removed", stored(t + "/run/step"), {k: v for k, v in new.items() if k != KEY})


def test_a_tensor_that_was_removed(t):
    """It does not come back by a view in which it still stands."""
    with mounted(t) as m:
        raw, npy, model = (f"{m.path}/step/{VIEWS[v]}" for v in ("raw", "tensors", "model"))
        held = open(model, "r+b", buffering=0)
        os.unlink(npy)
        fails("raw", errno.EBUSY, lambda: open(raw, "r+b"))
        assert f"tensors/{KEY}.npy, of the same tensors, was removed" in last_error(m), last_error(m)
        held.seek(at(model, OTHER))
        held.write(b"x")
        held.close()
        fails("publication", errno.EINVAL, lambda: publish(m))
        assert f"model.safetensors: it began with older bytes of tensor {KEY}, and would undo its removal" in last_error(m), last_error(m)
        os.unlink(model)
        publish(m)
    same("removed", stored(t + "/run/step"), {k: v for k, v in make_tensors(1).items() if k != KEY})


def test_a_file_of_any_name(t):
    """What other safetensors files bring is known when they are read: at the publication."""
    with mounted(t) as m:
        new = make_tensors(3)[KEY]
        write_file(m / "step/extra.safetensors", safetensors_image({KEY: new}))
        patch(m / f"step/raw/{KEY}")
        fails("publication", errno.EINVAL, lambda: publish(m))
        assert "would undo extra.safetensors" in last_error(m), last_error(m)
        os.unlink(m / f"step/raw/{KEY}")
        publish(m)
    same("stored", stored(t + "/run/step"), {**make_tensors(1), KEY: new})


if __name__ == "__main__":
    main(globals())
