# SPDX-License-Identifier: MIT
"""Which tensor is meant by what was written into a checkpoint: names, types, and what came last."""
import errno
import json
import mmap
import os
import pathlib
import shutil
import struct
import subprocess
import zipfile

from mountlib import UNSHARD, Mount, fails, main, read_all, safetensors_image, same, tensor_bytes, write_file

DATA = pathlib.Path(__file__).parent.parent / "data"
WRAPPED = "torch_dcp/dcp_fsdp2_adamw_3r_bf16"  # keys of the model begin with `model.`


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


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
    with Mount(t + "/run", t + "/mnt", "rw") as m:
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
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        model = in_image(read_all(m / "step/model.safetensors"))
        model["model.tiny"] = ("F32", [2], b"abcdefgh")
        write_file(m / "step/model.safetensors", safetensors_image(model))
        fails("publication", errno.EINVAL, lambda: publish(m))
        same("its reason", "model.tiny twice" in m.messages(), True)
        os.unlink(m / "step/model.safetensors")
    same("stored", tensors_of(t + "/run/step"), before)


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
        for name, (shape, dtype, _) in said.items():
            with open(m / f"step/tensors/{name}.npy", "wb") as f:
                f.write(npy("|u1", shape, data))
            os.setxattr(m / f"step/tensors/{name}.npy", "user.unshard.dtype", dtype.encode())
        fails("rows of 4 bytes as F6", errno.EINVAL, lambda: publish(m))
        os.unlink(m / "step/tensors/odd.npy")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {name: want for name, (_, _, want) in said.items() if want})


OLD, NEW = (("F32", [2], data) for data in (b"12345678", b"abcdefgh"))


def run_with_two(t):
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({"a": OLD, "b": OLD}))
    return Mount(t + "/run", t + "/mnt", "rw")


def test_removed_after_it_was_written(t):
    """A tensor that is removed when all of the model was written is not in what is published."""
    with run_with_two(t) as m:
        write_file(m / "step/model.safetensors", safetensors_image({"a": NEW, "b": NEW}))
        os.unlink(m / "step/tensors/b.npy")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW})


def test_removed_while_a_child_has_it_open(t):
    """The close counts of who wrote it, not that of a child which had the file too and ends later."""
    with run_with_two(t) as m:
        fd = os.open(m / "step/model.safetensors", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, safetensors_image({"a": NEW, "b": NEW}))
        inherited = os.dup(fd)
        os.close(fd)
        os.unlink(m / "step/tensors/b.npy")
        os.close(inherited)
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW})


def test_written_again_after_a_close(t):
    """What is written after one of its closes, here through a mapping, is closed later."""
    image = safetensors_image({"a": NEW, "b": NEW})
    with run_with_two(t) as m:
        fd = os.open(m / "step/model.safetensors", os.O_RDWR | os.O_TRUNC)
        os.write(fd, safetensors_image({"a": NEW, "b": OLD}))
        with mmap.mmap(fd, len(image)) as mapped:
            os.close(fd)
            os.unlink(m / "step/tensors/b.npy")
            mapped[-8:] = image[-8:]
            mapped.flush()
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW, "b": NEW})


def test_written_after_it_was_removed(t):
    with run_with_two(t) as m:
        os.unlink(m / "step/tensors/b.npy")
        write_file(m / "step/model.safetensors", safetensors_image({"a": NEW, "b": NEW}))
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW, "b": NEW})


def test_a_link_is_as_new_as_its_file(t):
    """A file that was written beside its name and then linked to it came after what was closed before it."""
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.makedirs(m / "step/tensors")
        write_file(m / "step/model.safetensors", safetensors_image({"a": OLD}))
        with open(m / "step/tensors/a.part", "wb") as f:
            f.write(npy("<f4", (2,), NEW[2]))
        os.link(m / "step/tensors/a.part", m / "step/tensors/a.npy")
        os.unlink(m / "step/tensors/a.part")
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"a": NEW})


def test_a_copy_of_wrapped_tensors(t):
    """cp -r brings each tensor as part of the model and by its whole key: one, also of types that .npy does not tell."""
    shutil.copytree(DATA / WRAPPED, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        model = in_image(read_all(m / "step/model.safetensors"))
        model["eight"] = ("F8_E4M3", [2, 4], b"12345678")
        write_file(m / "step/model.safetensors", safetensors_image(model))
        publish(m)
        subprocess.run(["cp", "-r", m / "step", m / "copy"], check=True)
        publish(m)
    same("copy", tensors_of(t + "/run/copy"), tensors_of(t + "/run/step"))


def test_a_copy_of_what_composer_wraps(t):
    """Its wrapper has two parts, `state.model.`."""
    shutil.copytree(DATA / "dcp_trainers/composer_2r", t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        subprocess.run(["cp", "-r", m / "step", m / "copy"], check=True)
        publish(m)
    same("copy", tensors_of(t + "/run/copy"), tensors_of(t + "/run/step"))


def test_a_name_and_the_same_behind_a_wrapper(t):
    """DeepSpeed's NAME is the fp32 master, module.NAME the copy: of one type and shape they are still two tensors."""
    shutil.copytree(DATA / "deepspeed/moe_z1_ep1_ep2_w2", t + "/run/step")
    want = {}
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        for view in ("tensors", "tree"):
            os.makedirs(m / f"copy/{view}")
            subprocess.run(["cp", m / "step/model.safetensors", m / "copy"], check=True)
            subprocess.run(["cp", "-r", m / f"step/{view}", m / "copy"], check=True)
            for name in os.listdir(m / "step/raw"):
                key = os.getxattr(m / f"step/raw/{name}", "user.unshard.key").decode()
                want[key] = read_all(m / f"step/raw/{name}")
            publish(m)
            same(view, {k: v[2] for k, v in tensors_of(t + "/run/copy").items()}, want)
            shutil.rmtree(m / "copy")
    same("two", {"emb.weight", "module.emb.weight"} <= set(want), True)


def test_hidden_names_of_the_tree_are_not_listed(t):
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image({key: OLD for key in ("c", "x.a", "x.b")}))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.unlink(m / "step/tree/c.npy")
        os.unlink(m / "step/tree/x/a.npy")
        same("tree", os.listdir(m / "step/tree"), ["x"])
        same("tree/x", os.listdir(m / "step/tree/x"), ["b.npy"])
        same("looked up", os.path.exists(m / "step/tree/x/a.npy"), False)
        os.unlink(m / "step/tree/x/b.npy")
        os.rmdir(m / "step/tree/x")
        same("tree, emptied", os.listdir(m / "step/tree"), [])
        same("tensors", sorted(os.listdir(m / "step/tensors")), ["c.npy", "x.a.npy", "x.b.npy"])
    same("stored", tensors_of(t + "/run/step"), {key: OLD for key in ("c", "x.a", "x.b")})


def test_names_that_are_cut(t):
    """A tensor whose name does not fit is written, copied and removed by the name that it has."""
    keys = {"part." + "x" * 300: OLD, "y" * 253: OLD, "z/" * 90: OLD, "short": OLD}
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", safetensors_image(keys))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        subprocess.run(["cp", "-r", m / "step", m / "copy"], check=True)
        publish(m)
        same("copy", tensors_of(t + "/run/copy"), keys)
        names = sorted(os.listdir(m / "step/tensors"), key=len)[1:]
        for name in names:
            with open(m / f"step/tensors/{name}", "wb") as f:
                f.write(npy("<f4", (2,), NEW[2]))
        publish(m)
        same("written", tensors_of(t + "/run/step"), {key: OLD if key == "short" else NEW for key in keys})
        for name in names:
            os.unlink(m / f"step/tensors/{name}")
        publish(m)
    same("removed", tensors_of(t + "/run/step"), {"short": OLD})


def test_objects_that_are_not_copied_are_told(t):
    """.unshard/ is a view: cp -r brings no objects into a new checkpoint, and that is said."""
    shutil.copytree(DATA / WRAPPED, t + "/run/step")
    os.makedirs(t + "/run/plain")
    write_file(t + "/run/plain/model.safetensors", safetensors_image({"a": OLD}))
    for name, told in (("plain", False), ("step", True)):
        with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
            subprocess.run(["cp", "-r", m / name, m / "copy"], check=True)
            publish(m)
            said = read_all(m / "copy/.unshard/last-error")
            same(name, b"none of the objects" in said and b"unshard convert" in said, told)
        shutil.rmtree(t + "/run/copy")


def test_what_no_safetensors_file_can_name_stays(t):
    """Who replaces model.safetensors had no way to bring such a tensor along."""
    with zipfile.ZipFile(t + "/a.npz", "w") as z:
        for key in ("__metadata__", "a"):
            z.writestr(key + ".npy", npy("<f4", (2,), OLD[2]))
    os.mkdir(t + "/run")
    subprocess.run([UNSHARD, "convert", t + "/a.npz", t + "/run/step", "--to", "dcp"], check=True)
    longer = ("F32", [3], NEW[2] + b"\0\0\0\0")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        write_file(m / "step/model.safetensors", safetensors_image({"a": longer}))
        publish(m)
    same("stored", tensors_of(t + "/run/step"), {"__metadata__": OLD, "a": longer})


main(globals())
