# SPDX-License-Identifier: MIT
"""Which tensor is meant by what was written into a checkpoint: names, types, and what came last."""
import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import shutil
import struct
import subprocess
import zipfile

from editlib import PAUSES, fsync, pause
from mountlib import UNSHARD, Mount, fails, main, read_all, safetensors_image, same, tensor_bytes, write_file

DATA = pathlib.Path(__file__).parent.parent / "data"
WRAPPED = "torch_dcp/dcp_fsdp2_adamw_3r_bf16"  # keys of the model begin with `model.`


def publish(m, step="step"):
    fsync(m / step)


def tensors_of(path):
    """{key: (dtype, shape, bytes)} as the command reads it."""
    done = subprocess.run([UNSHARD, "ls", path, "--json"], capture_output=True, text=True, check=True, timeout=600)
    return {t["key"]: (t["dtype"], t["shape"],
                       subprocess.run([UNSHARD, "cat", path, t["key"]], capture_output=True, check=True, timeout=600).stdout)
            for t in json.loads(done.stdout)["tensors"]}


def in_image(image):
    """The same of a safetensors file."""
    size, = struct.unpack("<Q", image[:8])
    header = json.loads(image[8:8 + size])
    header.pop("__metadata__", None)
    data = image[8 + size:]
    return {key: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for key, t in header.items()}


def npy(descr, shape, data, fortran=False):
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def test_a_new_tensor_beside_wrapped_ones(t):
    """What comes with all of the model is called as they are, also when those were written over before it."""
    shutil.copytree(DATA / WRAPPED, t + "/run/step")
    before = tensors_of(t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        model = in_image(read_all(m / "step/model.safetensors"))
        model["zz.new"] = ("F32", [2], b"abcdefgh")
        write_file(m / "step/model.safetensors", safetensors_image(model))
        publish(m)
        same("in the view", in_image(read_all(m / "step/model.safetensors")), model)
    same("stored", tensors_of(t + "/run/step"), {**before, "model.zz.new": ("F32", [2], b"abcdefgh")})


def test_one_tensor_by_two_names(t):
    """A file that brings a tensor twice, once without its wrapper and once with it, is refused."""
    shutil.copytree(DATA / WRAPPED, t + "/run/step")
    before = tensors_of(t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        model = in_image(read_all(m / "step/model.safetensors"))
        model["model.tiny"] = ("F32", [2], b"abcdefgh")
        fails("writing it", errno.EINVAL, lambda: write_and_sync(m / "step", safetensors_image(model)))
        assert "model.tiny" in m.messages(), m.messages()
        os.unlink(m / "step/model.safetensors")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), before)


def write_and_sync(step, image):
    """Whatever is told first."""
    with open(step + "/model.safetensors", "wb") as f:
        f.write(image)
    fsync(step)


def f4_of(t, image):
    """What becomes of F4 [4, 16] when tensors/w.npy is written so."""
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({"w": ("F4", [4, 16], tensor_bytes("w", 32))}))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        with open(m / "step/tensors/w.npy", "wb") as f:
            f.write(image)
        publish(m)
    return tensors_of(t + "/run/step")["w"]


def test_packed_elements_in_order_of_columns(t):
    """Bytes of F4 that come column by column lie row by row afterwards."""
    rows = [tensor_bytes(i, 8) for i in range(4)]
    columns = bytes(row[i] for i in range(8) for row in rows)
    same("w", f4_of(t, npy("|u1", (4, 8), columns, fortran=True)), ("F4", [4, 16], b"".join(rows)))


def test_bytes_of_another_shape_are_not_packed(t):
    """As many bytes in another shape are what they say, not the tensor that was there."""
    data = tensor_bytes("new", 32)
    same("w", f4_of(t, npy("|u1", (8, 4), data)), ("U8", [8, 4], data))


def test_packed_elements_that_are_said(t):
    """user.unshard.dtype tells what |u1 is, of new tensors and of those that are there."""
    data = tensor_bytes("new", 24)
    said = {"new": ((4, 6), "F4", ("F4", [4, 12], data)), "six": ((4, 6), "F6_E2M3", ("F6_E2M3", [4, 8], data)),
            "was": ((4, 6), "U8", ("U8", [4, 6], data)), "odd": ((6, 4), "F6_E3M2", None)}
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({"was": ("F4", [4, 12], tensor_bytes("w", 24))}))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        def put(name, shape, dtype):
            with open(m / f"step/tensors/{name}.npy", "wb") as f:
                os.setxattr(f.fileno(), "user.unshard.dtype", dtype.encode())
                f.write(npy("|u1", shape, data))
            publish(m)
        for name, (shape, dtype, want) in said.items():
            if want:
                put(name, shape, dtype)
            else:
                fails("rows of 4 bytes as F6", errno.EINVAL, lambda shape=shape, dtype=dtype: put("odd", shape, dtype))
                os.unlink(m / "step/tensors/odd.npy")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {name: want for name, (_, _, want) in said.items() if want})


OLD, NEW = (("F32", [2], data) for data in (b"12345678", b"abcdefgh"))


def run_with_two(t):
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({"a": OLD, "b": OLD}))
    return Mount(t + "/run", t + "/mnt", "rw,save=hf")


def test_removed_after_it_was_written(t):
    """A tensor that is removed when all of the model was written is not in what is published."""
    with run_with_two(t) as m:
        write_file(m / "step/model.safetensors", safetensors_image({"a": NEW, "b": NEW}))
        os.unlink(m / "step/tensors/b.npy")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW})


def test_written_after_it_was_removed(t):
    with run_with_two(t) as m:
        os.unlink(m / "step/tensors/b.npy")
        write_file(m / "step/model.safetensors", safetensors_image({"a": NEW, "b": NEW}))
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW, "b": NEW})


@contextlib.contextmanager
def copies(t, save="dcp"):
    """A mount for reading, and one for saving beside it."""
    os.makedirs(t + "/to", exist_ok=True)
    with Mount(t + "/run", t + "/ro") as ro, Mount(t + "/to", t + "/mnt", "rw,save=" + save) as m:
        yield ro, m


def test_a_copy_of_wrapped_tensors(t):
    """cp -r brings each tensor as part of the model and by its whole key: one, also of types that .npy does not tell."""
    shutil.copytree(DATA / WRAPPED, t + "/run/step")
    with copies(t) as (ro, m):
        subprocess.run(["cp", "-r", ro / "step", m / "copy"], check=True)
        publish(m, "copy")
    same("copy", tensors_of(t + "/to/copy"), tensors_of(t + "/run/step"))


def test_a_copy_of_what_composer_wraps(t):
    """Its wrapper has two parts, `state.model.`."""
    shutil.copytree(DATA / "dcp_trainers/composer_2r", t + "/run/step")
    with copies(t) as (ro, m):
        subprocess.run(["cp", "-r", ro / "step", m / "copy"], check=True)
        publish(m, "copy")
    same("copy", tensors_of(t + "/to/copy"), tensors_of(t + "/run/step"))


def test_a_name_and_the_same_behind_a_wrapper(t):
    """DeepSpeed's NAME is the fp32 master, module.NAME the copy: of one type and shape they are still two tensors."""
    shutil.copytree(DATA / "deepspeed/moe_z1_ep1_ep2_w2", t + "/run/step")
    want = {}
    with copies(t) as (ro, m):
        for view in ("tensors", "tree"):
            os.makedirs(m / f"by-{view}/{view}")
            subprocess.run(["cp", ro / "step/model.safetensors", m / f"by-{view}"], check=True)
            subprocess.run(["cp", "-r", ro / f"step/{view}", m / f"by-{view}"], check=True)
            for name in os.listdir(ro / "step/raw"):
                key = os.getxattr(ro / f"step/raw/{name}", "user.unshard.key").decode()
                want[key] = read_all(ro / f"step/raw/{name}")
            publish(m, f"by-{view}")
            same(view, {k: v[2] for k, v in tensors_of(f"{t}/to/by-{view}").items()}, want)
    same("two", {"emb.weight", "module.emb.weight"} <= set(want), True)
    with copies(t) as (ro, m):
        jobs = [(first, seconds) for first in ("emb.weight", "module.emb.weight", "") for seconds in PAUSES]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            for done in [pool.submit(copy_with_pauses, ro, m / f"{first}-{seconds}", first, seconds) for first, seconds in jobs]:
                done.result()
        for first, seconds in jobs:
            publish(m, f"{first}-{seconds}")
            same(f"{first!r} first, pause {seconds}", {k: v[2] for k, v in tensors_of(f"{t}/to/{first}-{seconds}").items()}, want)


def copy_with_pauses(ro, to, first, seconds):
    """The whole file, one of its arrays, the other ones, with what is there published in between."""
    os.makedirs(to + "/tensors")
    shutil.copyfile(ro / "step/model.safetensors", to + "/model.safetensors")
    names = sorted(os.listdir(ro / "step/tensors"), key=lambda name: name != first + ".npy")
    for i, name in enumerate(names):
        if i < 2:
            pause(seconds)
        shutil.copyfile(ro / f"step/tensors/{name}", f"{to}/tensors/{name}")


def test_removed_names_are_not_listed(t):
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({key: OLD for key in ("c", "x.a", "x.b")}))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.unlink(m / "step/tree/x/a.npy")
        same("tree/x", os.listdir(m / "step/tree/x"), ["b.npy"])
        same("looked up", os.path.exists(m / "step/tree/x/a.npy"), False)
        publish(m)
        same("tensors", sorted(os.listdir(m / "step/tensors")), ["c.npy", "x.b.npy"])
    same("stored", tensors_of(t + "/run/step"), {key: OLD for key in ("c", "x.b")})


def test_names_that_are_cut(t):
    """A tensor whose name does not fit is written, copied and removed by the name that it has."""
    keys = {"part." + "x" * 300: OLD, "y" * 253: OLD, "z/" * 90: OLD, "short": OLD}
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image(keys))
    with copies(t, "hf") as (ro, m):
        subprocess.run(["cp", "-r", ro / "step", m / "copy"], check=True)
        publish(m, "copy")
        same("copy", tensors_of(t + "/to/copy"), keys)
        names = sorted(os.listdir(m / "copy/tensors"), key=len)[1:]
        for name in names:
            with open(m / f"copy/tensors/{name}", "wb") as f:
                f.write(npy("<f4", (2,), NEW[2]))
        publish(m, "copy")
        same("written", tensors_of(t + "/to/copy"), {key: OLD if key == "short" else NEW for key in keys})
        for name in names:
            os.unlink(m / f"copy/tensors/{name}")
        publish(m, "copy")
    same("removed", tensors_of(t + "/to/copy"), {"short": OLD})


def test_what_no_safetensors_file_can_name_stays(t):
    """Who replaces model.safetensors had no way to bring such a tensor along."""
    with zipfile.ZipFile(t + "/a.npz", "w") as z:
        for key in ("__metadata__", "a"):
            z.writestr(key + ".npy", npy("<f4", (2,), OLD[2]))
    os.mkdir(t + "/run")
    subprocess.run([UNSHARD, "convert", t + "/a.npz", t + "/run/step", "--to", "dcp"], check=True)
    longer = ("F32", [3], NEW[2] + b"\0\0\0\0")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        write_file(m / "step/model.safetensors", safetensors_image({"a": longer}))
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"__metadata__": OLD, "a": longer})


main(globals())
