# SPDX-License-Identifier: MIT
"""Changing tensors of checkpoints of every format that takes changes: only their bytes differ afterwards."""
import errno
import json
import os
import pathlib
import re
import shutil
import subprocess

from editlib import fsync
from mountlib import UNSHARD, Mount, fails, main, npy_image, read_all, same, sha256

DATA = pathlib.Path(__file__).parent.parent / "data"
# One or more fixtures of each format that can be changed: what they have in common is the way they are written.
FIXTURES = {
    "hf-safetensors": ["safetensors/hf_sharded_f32", "safetensors/hf_single_bf16", "safetensors/hf_tied_sharded"],
    "hf-peft": ["safetensors/hf_peft_lora"],
    "torch-dcp": ["torch_dcp/dcp_fsdp2_adamw_3r_bf16", "torch_dcp/dcp_mesh_2x2", "torch_dcp/dcp_threads3_2r",
                  "torch_dcp/dcp_file_per_item_2r", "torch_dcp/dcp_sharded_tensor_3r", "torch_dcp/dcp_layouts"],
    "torch-dcp-safetensors": ["torch_dcp/dcp_safetensors_fmt"],
    "hf-dcp-sharded": ["hf_dcp/hfdcp_fsdp2_3r", "hf_dcp/hfdcp_grid_4"],
    "megatron-torch-dist": ["megatron/mcore019_fullyparallel_integrity_hint", "megatron/mcore012_torch_dist_flat_tp2_dp2",
                            "megatron/mcore018_torch_dist_commonpt", "megatron/bridge_moe_ep2"],
    "megatron-zarr": ["megatron/mcore05_zarr_tp2_pp2_flat"],
    "olmo-core-v0": ["olmo_v0/v01-tp-w2", "olmo_v0/v01-torchfsdp-w4"],
    "olmo-core-v0-legacy": ["olmo_v0/v00-may7-plain-w3"],
    "olmo-core-step": ["olmo_core/step9", "olmo_core/step100"],
    "olmo-core-dcp": ["torch_dcp/v30-odd-unflat-w3"],
    "torch-file": ["torch_file/pt_zip_align4096", "torch_file/pt_legacy_proto4", "torch_file/pt_zip_big_endian",
                   "torch_file/pt_torch231"],
    "hf-bin": ["torch_file/hf_bin_sharded"],
    "hf-trainer": ["hf_trainer/trainer_llama_adamw/checkpoint-2"],
    "lightning-dcp": ["lightning/trainer_two_optimizers"],
    "lightning-fabric-dcp": ["lightning/fabric_fsdp2_3r_bf16"],
    "accelerate-fsdp": ["hf_trainer/accelerate_fsdp2_sharded_2r"],
    "composer": ["dcp_trainers/composer_2r"],
}


def unshard(*args, ok=(0,)):
    done = subprocess.run([UNSHARD, *map(str, args)], capture_output=True, text=True, timeout=600)
    assert done.returncode in ok, done
    return done


def described(path):
    """What each tensor is; not the file that it comes from, which a save may change."""
    rows = json.loads(unshard("ls", path, "--json").stdout)["tensors"]
    return {t["key"]: {k: v for k, v in t.items() if k != "origin"} for t in rows}


def files_of(path):
    return {str(f.relative_to(path)): f for f in sorted(pathlib.Path(path).rglob("*")) if f.is_file()}


def flipped(data):
    """Other bytes in every element; a bool stays one."""
    return bytes(b ^ 1 for b in data)


def raw_of(mount):
    names = sorted(os.listdir(f"{mount}/raw"))
    return {n: read_all(f"{mount}/raw/{n}") for n in names}


def publish(m):
    fsync(m / "step")


# Of views into one storage those that share it with nobody; transposed, strided and conjugated ones among them.
OWN = {"torch_file/pt_zip_align4096": ["cl", "conj", "perm"], "torch_file/pt_torch231": ["f8", "t"]}


def choose(fixture, want, shown):
    """Names in raw/ of tensors that are changed; pickles in tensors of bytes are left alone."""
    if fixture in OWN:
        return OWN[fixture]
    names = [n for n in want if want[n] and not (shown.get(n, {}).get("dtype") == "U8" and "olmo_v0" in fixture)]
    return [n for i, n in enumerate(names) if i % 3 == 1] or names[:1]


def change_and_compare(t, fixture, expected_format):
    run = f"{t}/{fixture.replace('/', '-')}"
    shutil.copytree(DATA / fixture, f"{run}/step")
    return change_and_compare_copy(run, fixture, expected_format)


def change_and_compare_copy(run, fixture, expected_format):
    shown = described(f"{run}/step")
    same("format", json.loads(unshard("info", f"{run}/step", "--json").stdout)["format"], expected_format)
    before = {n: (f.read_bytes(), f.stat().st_ino, f.stat().st_mode) for n, f in files_of(f"{run}/step").items()}
    os.mkdir(f"{run}-kept")  # no other file gets the numbers of these
    for i, f in enumerate(files_of(f"{run}/step").values()):
        os.link(f, f"{run}-kept/{i}")
    was = unshard("verify", f"{run}/step", "--deep", ok=(0, 1)).returncode
    with Mount(run, f"{run}-mnt", "rw") as m:
        want = raw_of(m / "step")
        objects = read_all(m / "step/.unshard/objects.json")
        changed = choose(fixture, want, shown)
        for name in changed:
            want[name] = flipped(want[name])
            with open(m / f"step/raw/{name}", "r+b") as f:
                f.write(want[name])
        publish(m)
        same("tensors, in the mount", raw_of(m / "step"), want)
        same("objects", read_all(m / "step/.unshard/objects.json"), objects)
    same("tensors described", described(f"{run}/step"), shown)
    after = files_of(f"{run}/step")
    same("files", sorted(after), sorted(before))
    touched = [n for n, f in after.items() if f.read_bytes() != before[n][0]]
    assert touched, "no file has changed"
    for name, f in after.items():
        data, ino, mode = before[name]
        same(f"{name}: size", f.stat().st_size, len(data))
        same(f"{name}: mode", oct(f.stat().st_mode), oct(mode))
        same(f"{name}: is another file", f.stat().st_ino != ino, name in touched)
    with Mount(run, f"{run}-mnt") as m:
        same("tensors, read anew", raw_of(m / "step"), want)
    same("verify", unshard("verify", f"{run}/step", "--deep", ok=(0, 1)).returncode, was)
    return run, before, after, touched


def test_every_format(t):
    failed = []
    for expected_format, fixtures in FIXTURES.items():
        for fixture in fixtures:
            try:
                change_and_compare(t, fixture, expected_format)
            except Exception as e:
                print(f"# {fixture}: {e!r}", flush=True)
                failed.append(fixture)
    same("failed", failed, [])


# Formats that a writer makes anew: tensors come and go; the others keep their boxes (of zarr and olmo they are as asked for).
REWRITTEN = {"torch_dcp/dcp_mesh_2x2": True, "torch_dcp/dcp_threads3_2r": True, "torch_dcp/dcp_fsdp2_adamw_3r_bf16": True,
             "megatron/mcore018_torch_dist_commonpt": True, "olmo_core/step9": True, "olmo_core/step100": True,
             "safetensors/hf_sharded_f32": False, "hf_dcp/hfdcp_fsdp2_3r": False, "olmo_v0/v01-plain-w4": False,
             "megatron/mcore012_zarr_tp2_dp2_flat": False}


def boxes(path, key):
    """Which box is in whose file, as `unshard plan` has it, by rank."""
    lines = unshard("plan", path, key).stdout.splitlines()[1:]
    found = []
    for line in lines:
        if line.startswith("  origin "):
            continue  # the file of the first of them, which a save may change
        box, _, place = line.partition("  from ")
        rank = re.search(r"__(\d+)_\d+\.distcp", place)
        found.append((box, rank and rank.group(1)))
    return sorted(found)


def in_object(name):
    return re.sub(r"^\w+\.distcp:", "DISTCP:", name)


def without_files(text):
    return json.loads(re.sub(rb'"\w+\.distcp:', b'"DISTCP:', text))


def add_and_remove(t, fixture, keeps_boxes):
    run = f"{t}/{fixture.replace('/', '-')}"
    shutil.copytree(DATA / fixture, f"{run}/step")
    shown = described(f"{run}/step")
    some = sorted(k for k in shown if in_object(k) == k)
    cut = {k: boxes(f"{run}/step", k) for k in (some[::max(1, len(some) // 5)] if keeps_boxes else [])}
    with Mount(run, f"{run}-mnt", "rw") as m:
        want = raw_of(m / "step")
        objects = read_all(m / "step/.unshard/objects.json")
        models = sorted(k for k, d in shown.items() if d["role"] == "model" and k in want)
        gone, prefix = models[-1], models[-1].rpartition(".")[0] or models[-1]
        new = f"{prefix}.new_one"
        os.unlink(m / f"step/tensors/{gone}.npy")
        with open(m / f"step/tensors/{new}.npy", "wb") as f:
            f.write(npy_image("<f4", (6, 4), bytes(range(96))))
        publish(m)
        del want[gone]
        want[new] = bytes(range(96))
        got = raw_of(m / "step")
        # tensors inside of objects are named by the file in which the object stands, which may be another one
        same("names not there", sorted(set(map(in_object, want)) - set(map(in_object, got))), [])
        same("names more than that", sorted(set(map(in_object, got)) - set(map(in_object, want))), [])
        same("tensors", {in_object(n): d for n, d in got.items()}, {in_object(n): d for n, d in want.items()})
        same("objects", without_files(read_all(m / "step/.unshard/objects.json")), without_files(objects))
    after = described(f"{run}/step")
    for key, d in shown.items():
        if key != gone and in_object(key) == key:
            same(key, {**after[key], "chunks": 0}, {**d, "chunks": 0})
            if key in cut:
                same(f"{key}: boxes", boxes(f"{run}/step", key), cut[key])
    unshard("verify", f"{run}/step", "--deep")


def test_tensors_come_and_go(t):
    failed = []
    for fixture, keeps_boxes in REWRITTEN.items():
        try:
            add_and_remove(t, fixture, keeps_boxes)
        except Exception as e:
            print(f"# {fixture}: {e!r}", flush=True)
            failed.append(fixture)
    same("failed", failed, [])


def test_integrity_is_made_anew(t):
    run, before, after, touched = change_and_compare(t, "megatron/mcore019_fullyparallel_integrity_hint", "megatron-torch-dist")
    said = json.loads(after["integrity.json"].read_bytes())
    assert "integrity.json" in touched
    for name, f in after.items():
        if name in said["files"]:
            same(f"digest of {name}", sha256(f.read_bytes()), said["files"][name])
    same("files with a digest", sorted(said["files"]), sorted(json.loads(before["integrity.json"][0])["files"]))


def test_bytes_that_are_the_same_change_nothing(t):
    run = t + "/run"
    shutil.copytree(DATA / "torch_dcp/dcp_mesh_2x2", f"{run}/step")
    before = {n: f.stat().st_ino for n, f in files_of(f"{run}/step").items()}
    with Mount(run, t + "/mnt", "rw") as m:
        for name in os.listdir(m / "step/raw"):
            data = read_all(m / f"step/raw/{name}")
            with open(m / f"step/raw/{name}", "wb") as f:
                f.write(data)
        publish(m)
    same("files", {n: f.stat().st_ino for n, f in files_of(f"{run}/step").items()}, before)


def refused(m, fixture, change, why):
    """What cannot be published says why, and changes nothing."""
    before = {n: f.read_bytes() for n, f in files_of(m.source + "/step").items()}
    change(m / "step")
    fails(f"{fixture}: publication", errno.EINVAL, lambda: publish(m))
    said = read_all(m / "step/.unshard/last-error").decode() + m.messages()
    assert why in said, (fixture, said)
    same(f"{fixture}: files", {n: f.read_bytes() for n, f in files_of(m.source + "/step").items()}, before)


def flip_raw(name):
    def change(step):
        data = read_all(f"{step}/raw/{name}")
        with open(f"{step}/raw/{name}", "r+b") as f:
            f.write(flipped(data))
    return change


def remove(name):
    return lambda step: os.unlink(f"{step}/tensors/{name}.npy")


def test_what_cannot_be_changed_is_refused(t):
    cases = [("torch_file/pt_zip_align4096", flip_raw("step"), "share bytes with others"),
             ("torch_file/pt_zip_align4096", flip_raw("expanded"), "several of its elements are stored as one"),
             ("torch_file/pt_torch231", remove("f8"), "none is added, removed or given another shape")]
    for i, (fixture, change, why) in enumerate(cases):
        run = f"{t}/{i}"
        shutil.copytree(DATA / fixture, f"{run}/step")
        with Mount(run, f"{t}/{i}-mnt", "rw") as m:
            refused(m, fixture, change, why)


def test_nemo(t):
    """An archive is left alone; the same, unpacked, can be changed."""
    os.makedirs(t + "/run/step")
    shutil.copy(DATA / "nemo/nemo_dist/tiny.nemo", t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        name = os.listdir(m / "step/raw")[0]
        if os.stat(m / f"step/raw/{name}").st_mode & 0o200 or os.geteuid() == 0:
            fails("raw", errno.EROFS, lambda: open(m / f"step/raw/{name}", "r+b"))
            assert "archive" in m.messages(), m.messages()
        else:
            fails("raw", errno.EACCES, lambda: open(m / f"step/raw/{name}", "r+b"))
    shutil.rmtree(t + "/run")
    os.makedirs(t + "/run/step")
    subprocess.run(["tar", "-xf", DATA / "nemo/nemo_dist/tiny.nemo", "-C", t + "/run/step"], check=True)
    change_and_compare_copy(t + "/run", "nemo", "nemo-dist")


def test_a_new_tensor_is_refused_at_once(t):
    shutil.copytree(DATA / "torch_file/pt_torch231", t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fails("a new tensor", errno.EROFS, lambda: open(m / "step/tensors/new.npy", "wb"))
        with open(m / "step/notes.txt", "w") as f:
            f.write("n")
        publish(m)
    same("notes", read_all(t + "/run/step/notes.txt"), b"n")


def test_formats_that_are_not_written_say_so_at_once(t):
    for i, fixture in enumerate(["deepspeed/z1_elastic_w2", "gguf/gguf_plain", "verl/verl_fsdp2_4r_bf16", "llama/llama_mp2"]):
        run = f"{t}/{i}"
        shutil.copytree(DATA / fixture, f"{run}/step")
        with Mount(run, f"{t}/{i}-mnt", "rw") as m:
            step = m / "step"
            name = sorted(os.listdir(f"{step}/raw"))[0]
            fails(f"{fixture}: raw", errno.EROFS, lambda: open(f"{step}/raw/{name}", "r+b"))
            fails(f"{fixture}: a new tensor", errno.EROFS, lambda: open(f"{step}/tensors/new.npy", "wb"))
            with open(f"{step}/notes.txt", "w") as f:
                f.write("a side file is the disk's")
            fails(f"{fixture}: unlink", errno.EROFS, lambda: os.unlink(f"{step}/tensors/{name}.npy"))
            assert "cannot be changed" in m.messages() and "unshard convert" in m.messages(), m.messages()


if __name__ == "__main__":
    main(globals(), 500)
