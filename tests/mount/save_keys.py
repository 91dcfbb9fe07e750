# SPDX-License-Identifier: MIT
"""Which tensor is meant by what was written into a checkpoint: names, types, and what came last."""
import errno
import json
import os
import pathlib
import shutil
import struct
import subprocess

from mountlib import UNSHARD, Mount, fails, main, read_all, safetensors_image, same, tensor_bytes, write_file

DATA = pathlib.Path(__file__).parent.parent / "data"
WRAPPED = "torch_dcp/dcp_fsdp2_adamw_3r_bf16"  # keys of the model begin with `model.`


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


def tensors_of(path):
    """{key: (dtype, shape, bytes)} as the command reads it."""
    done = subprocess.run([UNSHARD, "ls", path, "--json"], capture_output=True, text=True, check=True, timeout=60)
    return {t["key"]: (t["dtype"], t["shape"],
                       subprocess.run([UNSHARD, "cat", path, t["key"]], capture_output=True, check=True, timeout=60).stdout)
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


main(globals())
