#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The commands as scripts see them: what they print, their exit statuses, their one-line errors."""
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import PATIENCE, UNSHARD, main, make_tensors, read_all, same, sha256, write_checkpoint, write_file  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
DCP = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
DONE, NO, USAGE, SOURCE, ROOM = 0, 1, 2, 3, 5


class Cli:
    """Runs unshard with a cache directory of its own."""

    def __init__(self, t):
        self.cache = t + "/cache"

    def run(self, *args, status=DONE, text=True, **more):
        env = {**os.environ, "XDG_CACHE_HOME": self.cache, **more.pop("env", {})}
        done = subprocess.run([UNSHARD, *args], capture_output="stdout" not in more, text=text, timeout=600, env=env, **more)
        if done.returncode != status:
            raise AssertionError(f"{args}: status {done.returncode}, want {status}: {done.stderr}")
        return done

    def json(self, *args, **more):
        out = json.loads(self.run(*args, "--json", **more).stdout)
        same("schema", out["schema"], 1)
        return out

    def error(self, *args, status, words):
        """One line on stderr: unshard: WHAT: WHY (WHAT TO DO)."""
        err = self.run(*args, status=status).stderr
        same("lines of the error", len(err.splitlines()), 1)
        assert err.startswith("unshard: "), err
        for word in words:
            assert word in err, f"{args}: {err!r} does not say {word!r}"
        return err


def expected(fixture):
    with open(fixture + ".expected.json") as f:
        return json.load(f)["tensors"]


def damaged_copy(t, name="damaged"):
    """A DCP checkpoint with one byte of one tensor's data changed: (path, key, chunk)."""
    path = os.path.join(t, name)
    shutil.copytree(DCP, path)
    for root, _, files in os.walk(path):
        for f in files:
            os.chmod(os.path.join(root, f), 0o644)
    plan = Cli(t).json("plan", path, "model.emb.weight")
    chunk = plan["chunks"][0]
    with open(os.path.join(path, chunk["file"]), "r+b") as f:
        f.seek(chunk["byte"] + 5)
        byte = f.read(1)
        f.seek(chunk["byte"] + 5)
        f.write(bytes([byte[0] ^ 0x40]))
    return path, "model.emb.weight", chunk


def test_ls_lists_every_tensor(t):
    cli, want = Cli(t), expected(DCP)
    rows = {r["key"]: r for r in cli.json("ls", DCP)["tensors"]}
    same("keys", sorted(rows), sorted(want))
    for key, w in want.items():
        same(key, (rows[key]["dtype"], rows[key]["shape"]), (w["dtype"], w["shape"]))
    same("roles", {r["role"] for r in rows.values()}, {"model", "optimizer"})
    text = cli.run("ls", DCP, "-l").stdout.splitlines()
    same("rows", len(text), len(want))
    assert all(len(line.split()) >= 6 for line in text)


def test_ls_pattern(t):
    cli = Cli(t)
    rows = cli.json("ls", DCP, "model.layers.0.*")["tensors"]
    same("matches", sorted(r["key"] for r in rows), sorted(k for k in expected(DCP) if k.startswith("model.layers.0.")))
    cli.error("ls", DCP, "no.such.*", status=SOURCE, words=["no.such.*"])


def test_ls_of_a_tree(t):
    cli = Cli(t)
    for step in ("step10", "step9"):
        write_checkpoint(f"{t}/run/{step}", make_tensors(step))
    rows = cli.json("ls", t + "/run")["checkpoints"]
    same("checkpoints", [r["path"] for r in rows], ["step10", "step9"])
    same("tensors", {r["tensors"] for r in rows}, {6})
    cli.error("cat", t + "/run", "x", status=SOURCE, words=["2 checkpoints", "step10"])
    cli.error("ls", t + "/run/step10/none", status=SOURCE, words=["No such file"])
    os.mkdir(t + "/empty")
    cli.error("info", t + "/empty", status=SOURCE, words=["no checkpoint", "probe"])


def test_ls_of_a_tree_with_files_that_cannot_be_read(t):
    """A file that the disk refuses this user, one that is cut: the other checkpoints are listed, and these with the reason."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    os.chmod(t, 0o755)
    for step in ("step1", "step2", "step3", "step4"):
        write_checkpoint(f"{t}/run/{step}", make_tensors(step), shards=1)
    name = "model-00001-of-00001.safetensors"
    os.unlink(t + "/run/step2/model.safetensors.index.json")
    os.chmod(f"{t}/run/step2/{name}", 0)
    os.truncate(f"{t}/run/step3/{name}", 20)
    done = subprocess.run([*user, UNSHARD, "ls", t + "/run", "--json", "-o", "index=memory"], capture_output=True, text=True, check=False)
    same("status", (done.returncode, done.stderr), (DONE, ""))
    rows = {r["path"]: r for r in json.loads(done.stdout)["checkpoints"]}
    same("listed", sorted(rows), ["step1", "step2", "step3", "step4"])
    same("whole", [(rows[step]["tensors"], rows[step]["faults"]) for step in ("step1", "step4")], [(6, 0), (6, 0)])
    same("refused", rows["step2"].get("error"), f"step2/{name}: Permission denied")
    same("cut", rows["step3"]["faults"], 6)


def test_parts_are_no_checkpoints_of_a_tree(t):
    """Arrays and groups of zarr, which the mount hides below the checkpoint that they make up."""
    cli = Cli(t)
    whole = ("zarr/zarr2_group_consolidated", "zarr/zarr3_arrays", "orbax/orbax_zarr2", "orbax/orbax_zarr3",
             "megatron/mcore012_zarr_tp2_dp2_flat")
    for path in whole:
        shutil.copytree(os.path.join(DATA, path), os.path.join(t, "run", os.path.basename(path)))
    names = sorted(map(os.path.basename, whole))
    same("ls", [r["path"] for r in cli.json("ls", t + "/run")["checkpoints"]], names)
    same("verify", sorted(line.split(":")[0] for line in cli.run("verify", t + "/run").stdout.splitlines()), names)


def test_info(t):
    cli = Cli(t)
    info = cli.json("info", DCP)
    same("format", info["format"], "torch-dcp")
    same("tensors", len(info["tensors"]), len(expected(DCP)))
    same("topology", info["topology"]["ranks"], 2)
    text = cli.run("info", DCP).stdout
    assert "torch-dcp" in text and "PyTorch" in text
    write_checkpoint(t + "/hf", make_tensors(1))
    write_file(t + "/hf/tokenizer.json", b"{}")
    text = cli.run("info", t + "/hf").stdout
    assert "tokenizer.json" in text and "model-00001" not in text, text


def test_cat_gives_the_frameworks_bytes(t):
    cli = Cli(t)
    for name in ("dcp_fsdp2_adamw_2r", "dcp_layouts", "dcp_zstd_2r", "dcp_mesh_2x2"):
        fixture = os.path.join(DATA, "torch_dcp", name)
        for key, want in list(expected(fixture).items())[:8]:
            same(f"{name}: {key}", sha256(cli.run("cat", fixture, key, text=False).stdout), want["sha256"])


def test_cat_npy(t):
    cli = Cli(t)
    bare = cli.run("cat", DCP, "model.emb.weight", text=False).stdout
    npy = cli.run("cat", DCP, "model.emb.weight", "--npy", text=False).stdout
    same("magic", npy[:8], b"\x93NUMPY\x01\x00")
    same("the rest", npy[-len(bare):], bare)
    same("alignment", (len(npy) - len(bare)) % 64, 0)
    assert b"'shape': (53, 37)" in npy[:200], npy[:200]


def test_cat_errors(t):
    cli = Cli(t)
    cli.error("cat", DCP, "no.such", status=SOURCE, words=["no tensor no.such", "unshard ls"])
    cli.error("cat", DCP, status=USAGE, words=["wrong number of arguments", "usage:"])
    with open("/dev/full", "w") as full:
        done = cli.run("cat", DCP, "model.emb.weight", status=ROOM, stdout=full, stderr=subprocess.PIPE)
    assert "No space left" in done.stderr, done.stderr


def test_a_full_disk_is_told(t):
    """Of output that fits a buffer, and of output that does not."""
    cli = Cli(t)
    for args in (["formats"], ["ls", DCP], ["ls", DCP, "-l", "--json"], ["info", DCP], ["plan", DCP, "model.emb.weight"],
                 ["verify", DCP], ["stats", DCP],
                 ["diff", DCP, DCP]):
        with open("/dev/full", "w") as full:
            done = cli.run(*args, status=ROOM, stdout=full, stderr=subprocess.PIPE)
        assert "standard output: No space left" in done.stderr, (args, done.stderr)


def test_a_closed_pipe_ends_it_quietly(t):
    env = {**os.environ, "XDG_CACHE_HOME": t + "/cache"}
    with subprocess.Popen([UNSHARD, "ls", DCP, "-l"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
                          preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL)) as p:
        p.stdout.close()
        same("words", p.stderr.read(), b"")
        same("status", p.wait(PATIENCE), -signal.SIGPIPE)


def test_plan_covers_the_tensor(t):
    cli = Cli(t)
    for key, want in expected(DCP).items():
        plan = cli.json("plan", DCP, key)
        same("shape", plan["shape"], want["shape"])
        volume = 0
        for c in plan["chunks"]:
            n = 1
            for size in c["size"]:
                n *= size
            volume += n
            assert os.path.exists(os.path.join(DCP, c["file"])), c
        total = 1
        for d in want["shape"]:
            total *= d
        same(key, volume, total)
    assert "of 2 chunks" in cli.run("plan", DCP, "model.emb.weight").stdout


def test_verify_whole(t):
    cli = Cli(t)
    assert "whole" in cli.run("verify", DCP).stdout
    assert "every byte" in cli.run("verify", DCP, "--deep").stdout
    same("damaged", cli.json("verify", DCP, "--deep")["damaged"], 0)


def test_verify_of_a_value_all_over(t):
    """An array of 2^52 bytes that is nowhere stored is looked at by its value."""
    cli = Cli(t)
    os.makedirs(t + "/run/a")
    for fill, nans in (("0.0", 0), ('"NaN"', 2**50)):
        with open(t + "/run/a/.zarray", "w", encoding="utf-8") as f:
            f.write('{"zarr_format": 2, "shape": [%d], "chunks": [%d], "dtype": "<f4", "compressor": null, "fill_value": %s, "order": "C", "filters": null}' % (2**50, 2**50, fill))
        said = cli.run("verify", t + "/run", "--deep").stdout
        assert (f"{nans:,} NaN" in said or str(nans) in said) if nans else "NaN" not in said, said


def test_verify_missing_and_short_shards(t):
    cli = Cli(t)
    tensors = make_tensors(1)
    write_checkpoint(t + "/hf", tensors)
    os.remove(t + "/hf/model-00002-of-00002.safetensors")
    out = cli.run("verify", t + "/hf", status=NO).stdout
    lost = list(tensors)[1::2]
    lines = out.splitlines()
    first = ", ".join(sorted(lost)[:3])
    same("one line for one cause", lines[0], f"damaged  {len(lost)} tensors: model-00002-of-00002.safetensors is missing ({first}{', ...' if len(lost) > 3 else ''})")
    same("the file", lines[1], "lost     missing-file: model-00002-of-00002.safetensors is missing")
    same("lines", len(lines), 3)
    assert lines[-1].endswith(f"{len(lost)} damaged, 1 lost"), out
    same("each with -v", cli.run("verify", "-v", t + "/hf", status=NO).stdout.count("damaged  "), len(lost))
    told = cli.run("info", t + "/hf").stdout
    same("info", told.count("\ndamaged  "), 1)
    same("each with -v", cli.run("info", "-v", t + "/hf").stdout.count("\ndamaged  "), len(lost))
    shutil.copytree(DCP, t + "/dcp")
    os.chmod(t + "/dcp/__1_0.distcp", 0o644)
    os.truncate(t + "/dcp/__1_0.distcp", 1000)
    found = cli.json("verify", t + "/dcp", status=NO)
    assert found["damaged"] > 0 and any("__1_0.distcp ends at byte 1000" in f.get("damage", "") for f in found["findings"]), found
    bad = next(f["key"] for f in found["findings"] if "ends at byte" in f.get("damage", ""))
    cli.error("cat", t + "/dcp", bad, status=SOURCE, words=["__1_0.distcp"])


def test_verify_deep_finds_one_changed_byte(t):
    cli = Cli(t)
    path, _, chunk = damaged_copy(t)
    cli.run("verify", path)
    out = cli.run("verify", path, "--deep", status=NO).stdout
    assert "CRC-32" in out and chunk["file"] in out, out
    assert cli.json("verify", path, "--deep", status=NO)["damaged"] == 1


def records(path):
    """[(name, byte, size)] of what a zip archive stores as it is."""
    with zipfile.ZipFile(path) as z, open(path, "rb") as f:
        out = []
        for i in z.infolist():
            f.seek(i.header_offset + 26)
            name, extra = struct.unpack("<HH", f.read(4))
            if i.compress_type == zipfile.ZIP_STORED and i.file_size:
                out.append((i.filename, i.header_offset + 30 + name + extra, i.file_size))
        return out


def flip(path, at):
    """Changes one byte, and that is what undoes it, too."""
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 0x10]))


def test_verify_deep_finds_a_changed_byte_of_each_record(t):
    """The first byte, one amid and the last of every storage of torch.save files: with tensors of their own, shared, in parts of flat ones."""
    cli = Cli(t)
    for number, name in enumerate(("torch_file/pt_zip_views", "torch_file/hf_bin_single_tied", "torch_file/pt_zip_big_endian", "npz/stored.npz", "deepspeed/z0_fp32_w2")):
        path, source = f"{t}/{number}", os.path.join(DATA, name)
        if os.path.isdir(source):
            shutil.copytree(source, path)
        else:
            os.mkdir(path)
            shutil.copy(source, path)
        for root, _, files in os.walk(path):
            for f in files:
                os.chmod(os.path.join(root, f), 0o644)
        same(name, cli.json("verify", path, "--deep")["damaged"], 0)
        files = [os.path.join(root, f) for root, _, names in os.walk(path) for f in names if zipfile.is_zipfile(os.path.join(root, f))]
        assert files, name
        for file in files:
            for record, at, size in records(file):
                if record.endswith(("data.pkl", "byteorder")):
                    continue  # those a scan looks into
                for place in sorted({0, size // 2, size - 1}):
                    flip(file, at + place)
                    out = cli.run("verify", path, "--deep", status=NO).stdout
                    assert f"{os.path.basename(file)}, record {record} at byte {at}: its CRC-32" in out and "damaged  1 of " in out, (record, place, out)
                    flip(file, at + place)
        same(name, cli.json("verify", path, "--deep")["damaged"], 0)


def test_verify_deep_without_crcs(t):
    """torch.save with save.compute_crc32 off: no record has its CRC, and that is no damage. One that has not is."""
    cli = Cli(t)
    shutil.copytree(os.path.join(DATA, "torch_file", "module"), t + "/module")
    file = next(os.path.join(root, f) for root, _, names in os.walk(t + "/module") for f in names if zipfile.is_zipfile(os.path.join(root, f)))
    os.chmod(file, 0o644)
    with zipfile.ZipFile(file) as z:
        entries = [(i.filename, z.start_dir) for i in z.infolist()]
    with open(file, "r+b") as f:
        data = bytearray(f.read())
        at = entries[0][1]
        for _ in entries:
            data[at + 16] ^= 1
            at += 46 + sum(struct.unpack("<HHH", data[at + 28:at + 34]))
        f.seek(0)
        f.write(data)
    out = cli.run("verify", t + "/module", "--deep").stdout
    assert re.search(r"note +none of \d+ CRCs holds", out), out
    data[entries[0][1] + 16] ^= 1
    write_file(file, bytes(data))
    assert "CRCs do not hold" in cli.run("verify", t + "/module", "--deep", status=NO).stdout


def test_verify_compares_full_copies(t):
    """Shards are shown; full files beside them are held against them."""
    cli = Cli(t)
    # torch's consolidation wrote the 0-d tensor as zeros
    path = os.path.join(DATA, "hf_dcp", "hfdcp_scalar_2r")
    out = cli.run("verify", path, status=NO).stdout
    assert "damaged  scale: the shards and the full copy in" in out and "2 compared, 1 differ" in out, out
    found = cli.json("verify", path, status=NO)
    same("findings", [f["key"] for f in found["findings"]], ["scale"])
    path = os.path.join(DATA, "nemo_automodel", "nemo_tied_consolidated", "epoch_0_step_2")
    assert "full copies of 20 tensors: 20 compared, 0 differ" in cli.run("verify", path, "--deep").stdout
    # one byte of a large tensor: only --deep reads it
    shutil.copytree(path, t + "/epoch_0_step_2")
    copy = t + "/epoch_0_step_2/model/consolidated/model-00001-of-00001.safetensors"
    os.chmod(os.path.dirname(copy), 0o755)
    os.chmod(copy, 0o644)
    with open(copy, "r+b") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        at = f.tell() + header["model.embed_tokens.weight"]["data_offsets"][0] + 5
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    cli.run("verify", t + "/epoch_0_step_2")
    assert "differ from byte 5 on" in cli.run("verify", t + "/epoch_0_step_2", "--deep", status=NO).stdout


def test_verify_tells_what_a_scan_lost(t):
    cli = Cli(t)
    shutil.copytree(os.path.join(DATA, "nemo_automodel", "nemo_full_dcp", "epoch_0_step_2"), t + "/epoch_0_step_2")
    os.chmod(t + "/epoch_0_step_2/optim", 0o755)
    os.chmod(t + "/epoch_0_step_2/optim/.metadata", 0o644)
    write_file(t + "/epoch_0_step_2/optim/.metadata", b"no pickle")
    out = cli.run("verify", t + "/epoch_0_step_2", status=NO).stdout
    assert "damaged  damaged-part: optim: " in out, out


def test_verify_counts_nan_and_inf(t):
    cli = Cli(t)
    tensors = {"w": ("F32", (4,), bytes.fromhex("0000c07f 0000807f 000080ff 0000803f"))}
    write_checkpoint(t + "/hf", tensors, shards=1)
    out = cli.run("verify", t + "/hf", "--deep").stdout
    assert "w: 1 NaN, 2 Inf" in out, out


def test_verify_counts_nan_where_it_checks_sums(t):
    """What is read once for both: items and archives, whole, cut by rows and by columns, of all types and at each end."""
    cli = Cli(t)
    nan = {"F32": "0000c07f", "F16": "007e", "BF16": "c07f", "F64": "000000000000f87f"}
    tensors = {}
    for dtype, bits in nan.items():
        one, size = bytes.fromhex(bits), len(bits) // 2
        for rows, columns, at in ((64, 96, (0,)), (64, 96, (64 * 96 - 1,)), (64, 96, (95, 96, 5000)), (700, 1100, (262143, 262144, 524288, 769999))):
            data = bytearray(rows * columns * size)
            for i in at:
                data[i * size:(i + 1) * size] = one
            tensors[f"{dtype}.{rows}.{'.'.join(map(str, at))}"] = (dtype, (rows, columns), bytes(data))
    write_checkpoint(t + "/hf", tensors, shards=1)
    want = {key: len(key.split(".")) - 2 for key in tensors}
    for name, options in (("hf", None), ("rows", ("--to", "dcp", "--mesh", "4x1")), ("mesh", ("--to", "dcp", "--mesh", "2x2")), ("model.pt", ("--to", "pt"))):
        if options:
            cli.run("convert", t + "/hf", f"{t}/{name}", *options)
        found = cli.json("verify", f"{t}/{name}", "--deep")
        same(name, {f["key"]: f["nan"] for f in found["findings"]}, want)
        same(name, found["damaged"], 0)


def test_stats_of_every_type(t):
    """What numpy says of the same numbers."""
    cli = Cli(t)
    tensors = {
        "f32": ("F32", (4,), struct.pack("<4f", 1, -2, 0, 4)),
        "nan": ("F32", (4,), bytes.fromhex("0000c07f 0000807f 000080ff 0000803f")),
        "i64": ("I64", (2,), struct.pack("<2q", -(1 << 62) - 1, (1 << 62) + 1)),
        "u8": ("U8", (2, 2), bytes([0, 255, 7, 8])),
        "bool": ("BOOL", (3,), bytes([1, 0, 1])),
        "e4m3": ("F8_E4M3", (3,), bytes([0x3a, 0xc5, 0x7f])),
        "none": ("F16", (0,), b""),
    }
    write_checkpoint(t + "/hf", tensors, shards=1)
    out = cli.json("stats", t + "/hf")
    rows = {r["key"]: r for r in out["tensors"]}
    same("keys", sorted(rows), sorted(tensors))
    f = rows["f32"]
    same("f32", (f["numbers"], f["min"], f["max"], f["mean"], f["zero"], f["nan"]), (4, -2, 4, 0.75, 1, 0))
    assert abs(f["std"] - 2.165063509461097) < 1e-14, f
    same("its histogram", sum(f["histogram"]["counts"]), 4)
    n = rows["nan"]
    same("nan", (n["numbers"], n["nan"], n["inf"], n["min"], n["max"], n["std"]), (4, 1, 2, 1, 1, 0))
    same("i64", (rows["i64"]["min"], rows["i64"]["max"]), (-(1 << 62) - 1, (1 << 62) + 1))
    same("u8", (rows["u8"]["max"], rows["u8"]["mean"], rows["u8"]["shape"]), (255, 67.5, [2, 2]))
    same("bool", (rows["bool"]["zero"], rows["bool"]["max"]), (1, 1))
    same("e4m3", (rows["e4m3"]["min"], rows["e4m3"]["max"], rows["e4m3"]["nan"]), (-3.25, 1.25, 1))
    same("none", (rows["none"]["numbers"], "min" in rows["none"]), (0, False))
    total = out["total"]
    same("total", (total["tensors"], total["numbers"], total["nan"], total["inf"], total["damaged"]), (7, 20, 2, 2, 0))


def test_stats_text_and_pattern(t):
    cli = Cli(t)
    text = cli.run("stats", DCP, "model.emb.*").stdout.splitlines()
    same("lines: head, tensor, total", len(text), 3)
    same("head", text[0].split(), ["key", "dtype", "shape", "min", "max", "mean", "std", "zero"])
    assert text[1].startswith("model.emb.weight  F32 ") and "\x1b" not in "".join(text), text
    cli.error("stats", DCP, "no.such.*", status=SOURCE, words=["no tensor matches no.such.*", "unshard ls"])
    one = cli.run("stats", DCP, "-o", "jobs=1", "--json").stdout
    same("on one thread and on many", cli.run("stats", DCP, "-o", "jobs=7", "--json").stdout, one)
    for jobs in ("0", "-1", "4x", "many", "1025", "99999999999"):
        cli.error("stats", DCP, "-o", "jobs=" + jobs, status=USAGE, words=["jobs=" + jobs])
        cli.error("diff", DCP, DCP, "--jobs", jobs, status=USAGE, words=["--jobs " + jobs, "1 to 1024"])


def test_stats_of_what_is_damaged(t):
    cli = Cli(t)
    write_checkpoint(t + "/hf", make_tensors(1))
    os.remove(t + "/hf/model-00002-of-00002.safetensors")
    done = cli.run("stats", t + "/hf", status=SOURCE)
    assert "damaged: " in done.stdout and "tensors cannot be read" in done.stderr, done
    out = json.loads(cli.run("stats", t + "/hf", "--json", status=SOURCE).stdout)
    assert 0 < out["total"]["damaged"] < out["total"]["tensors"], out["total"]
    same("damaged rows", sum("damage" in r for r in out["tensors"]), out["total"]["damaged"])


def test_diff_of_the_same(t):
    cli = Cli(t)
    same("words", cli.run("diff", DCP, DCP).stdout, "54 tensors identical; 16 objects equal\n")
    same("quiet", cli.run("diff", DCP, DCP, "-q").stdout, "")
    out = cli.json("diff", DCP, DCP)
    same("rows", (out["tensors"], out["objects"]), ([], []))
    same("totals", (out["totals"]["identical"], out["totals"]["objects-equal"]), (54, 16))
    for name in ("torch_dcp/dcp_layouts", "safetensors/hf_safetensors_dtypes", "olmo_core/" + sorted(
            f for f in os.listdir(os.path.join(DATA, "olmo_core")) if not f.endswith(".json"))[0]):
        path = os.path.join(DATA, name)
        cli.run("diff", path, path)


def test_diff_with_an_export(t):
    """Another format and the names that its framework gives: the model is the same, the rest is only in A."""
    cli = Cli(t)
    cli.run("convert", DCP, t + "/hf", "--to", "hf", "--drop", "optimizer,other,objects")
    model = sum(r["role"] == "model" for r in cli.json("ls", DCP)["tensors"])
    out = cli.json("diff", DCP, t + "/hf", status=NO)
    same("totals", (out["totals"]["identical"], out["totals"]["only-a"], out["totals"]["only-b"]), (model, 54 - model, 0))
    same("states", {r["state"] for r in out["tensors"]}, {"only-a"})
    same("objects", len(out["objects"]), 16)
    same("words", cli.run("diff", DCP, t + "/hf", "--drop", "optimizer,other,objects").stdout, f"{model} tensors identical\n")
    # its names and the keys both choose
    for pattern in ("layers.0.*", "model.layers.0.*"):
        same(pattern, cli.run("diff", DCP, t + "/hf", "--only", pattern, "--drop", "optimizer").stdout.split()[0], "4")
    cli.run("convert", DCP, t + "/bf16", "--to", "hf", "--drop", "optimizer,other,objects", "--dtype", "bf16")
    args = ["diff", DCP, t + "/bf16", "--drop", "optimizer,other,objects"]
    same("types", {r["state"] for r in cli.json(*args, status=NO)["tensors"]}, {"dtype"})
    cli.run(*args, "--values", status=NO)
    cli.run(*args, "--values", "--rtol", "0.004", "-o", "jobs=3")
    row = next(r for r in cli.json(*args, "--values", "--rtol", "0.004")["tensors"] if r["name"] == "freqs")
    same("equal", (row["state"], row["key_a"], row["key_b"], row["outside"]), ("equal", "model.freqs", "freqs", 0))
    assert row["differing"] == 8 and 0.0015 < row["max_abs"] < 0.0016, row


def test_diff_with_keys_that_keep_the_wrapper(t):
    """A .npz holds the keys and no wrapper, so that no name of its model's tensors is one of the source's: the keys are."""
    cli = Cli(t)
    cli.run("convert", DCP, t + "/npz", "--to", "npz", "--drop", "objects")
    for a, b in ((DCP, t + "/npz"), (t + "/npz", DCP)):
        same("words", cli.run("diff", a, b, "--drop", "objects").stdout, "54 tensors identical\n")
    cli.run("convert", DCP, t + "/less", "--to", "npz", "--drop", "objects", "--only", "model.layers.*")
    out = cli.json("diff", DCP, t + "/less", "--drop", "optimizer,objects", status=NO)["totals"]
    met = len(cli.json("ls", t + "/less")["tensors"])
    assert 0 < met < 15, met
    same("totals", (out["identical"], out["only-a"], out["only-b"]), (met, 15 - met, 0))


def test_diff_finds_one_changed_element(t):
    cli = Cli(t)
    path, key, chunk = damaged_copy(t)
    out = cli.json("diff", DCP, path, status=NO)
    same("rows", len(out["tensors"]), 1)
    row = out["tensors"][0]
    width = out["tensors"][0]["shape_a"][1]
    at = [chunk["start"][0], chunk["start"][1] + 1]
    same("where", (row["key_a"], row["first_at"], row["first"]), (key, at, at[0] * width + at[1]))
    same("how many", (row["differing"], row["outside"], row["nonfinite"], row["elements"]), (1, 1, 0, 53 * 37))
    whole = [struct.unpack(f"<{53 * 37}f", cli.run("cat", p, key, text=False).stdout) for p in (DCP, path)]
    a, b = (w[row["first"]] for w in whole)
    same("the distance", row["max_abs"], abs(a - b))
    same("as rel", row["max_rel"], abs(a - b) / abs(b))
    same("the values", [struct.pack("<f", float(row["value_" + s])) for s in "ab"], [struct.pack("<f", v) for v in (a, b)])
    text = cli.run("diff", DCP, path, status=NO).stdout
    assert "differs      emb.weight" in text and f"first at {at}" in text and "1 of 1961 elements" in text, text
    cli.run("diff", DCP, path, "--atol", str(abs(a - b) * 1.01))
    cli.run("diff", DCP, path, "--atol", str(abs(a - b) * 0.99), status=NO)


def test_diff_of_shapes_types_and_special_values(t):
    cli = Cli(t)
    a = {
        "only.a": ("U8", (1,), b"\x01"),
        "shape": ("U8", (2, 1), b"\x01\x02"),
        "zero": ("F32", (2,), struct.pack("<2f", 0.0, 1)),
        "nan": ("F32", (2,), bytes.fromhex("0000c07f 0000803f")),
        "long": ("I64", (1,), struct.pack("<q", (1 << 53) + 1)),
        "same": ("BOOL", (2,), b"\x01\x00"),
    }
    b = {
        "only.b": ("U8", (1,), b"\x01"),
        "shape": ("U8", (1, 2), b"\x01\x02"),
        "zero": ("F32", (2,), struct.pack("<2f", -0.0, 1)),
        "nan": ("F32", (2,), bytes.fromhex("0100c07f 0000807f")),
        "long": ("I64", (1,), struct.pack("<q", 1 << 53)),
        "same": ("BOOL", (2,), b"\x01\x00"),
    }
    write_checkpoint(t + "/a", a, shards=1)
    write_checkpoint(t + "/b", b, shards=1)

    def rows(*args):
        out = cli.json("diff", t + "/a", t + "/b", *args, status=NO)
        return {r["name"]: r for r in out["tensors"]}

    bits = rows()
    same("states", {k: r["state"] for k, r in bits.items()},
         {"only.a": "only-a", "only.b": "only-b", "shape": "shape", "zero": "differs", "nan": "differs", "long": "differs"})
    same("bits", [bits[k]["outside"] for k in ("zero", "nan", "long")], [1, 2, 1])
    same("distance", [bits[k]["max_abs"] for k in ("zero", "nan", "long")], [0, 0, 1])
    values = rows("--values")
    assert "zero" not in values, values
    same("NaN meets NaN; 1 meets Inf", (values["nan"]["outside"], values["nan"]["nonfinite"]), (1, 1))
    same("long", values["long"]["outside"], 1)
    assert "nan, nan in other bits" in cli.run("diff", t + "/a", t + "/b", "--only", "nan", status=NO).stdout
    same("close", rows("--rtol", "0", "--atol", "1")["long"]["state"], "equal")


def test_diff_of_objects(t):
    cli = Cli(t)
    other = os.path.join(DATA, "torch_dcp", "dcp_plain_dtypes_objects")
    same("of itself", cli.run("diff", other, other).stdout, "44 tensors identical; 30 objects equal\n")
    out = cli.json("diff", DCP, other, "--drop", "model,optimizer,other", status=NO)
    same("tensors", out["tensors"], [])
    same("objects", (out["totals"]["objects-only-a"], out["totals"]["objects-only-b"], len(out["objects"])), (16, 30, 46))
    flat = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_3r_bf16")
    states = {o["state"] for o in cli.json("diff", DCP, flat, status=NO)["objects"]}
    assert states <= {"differs", "only-a", "only-b"}, states


def test_diff_and_stats_of_many_tensors(t):
    """More than are open at once."""
    cli = Cli(t)
    tensors = {f"t{i:04}": ("U8", (2,), bytes([i % 251, 7])) for i in range(700)}
    write_checkpoint(t + "/a", tensors, shards=1)
    tensors["t0300"] = ("U8", (2,), bytes([300 % 251, 9]))
    write_checkpoint(t + "/b", tensors, shards=1)
    out = cli.json("diff", t + "/a", t + "/b", status=NO)
    same("rows", [(r["name"], r["first_at"], r["max_abs"]) for r in out["tensors"]], [("t0300", [1], 2)])
    same("identical", out["totals"]["identical"], 699)
    rows = cli.json("stats", t + "/b")["tensors"]
    same("stats", [(r["key"], r["mean"] * 2) for r in rows],
         [(f"t{i:04}", i % 251 + (9 if i == 300 else 7)) for i in range(700)])


def test_diff_through_a_map(t):
    """Both are seen through it; names that it does not know stay."""
    cli = Cli(t)
    ckpt, map_, hf = mapped_checkpoint(t)
    options = ["-o", f"map={map_},hf={hf}"]
    cli.run("convert", ckpt, t + "/export", "--to", "hf", "--map", map_, "--hf", hf)
    cli.run("diff", ckpt, t + "/export", status=NO)
    same("words", cli.run("diff", ckpt, t + "/export", *options).stdout.split(";")[0], "2 tensors identical")
    same("as options", cli.run("diff", ckpt, t + "/export", "--map", map_, "--hf", hf).stdout.split(";")[0], "2 tensors identical")


def test_diff_errors(t):
    cli = Cli(t)
    write_checkpoint(t + "/hf", make_tensors(1))
    shutil.copytree(t + "/hf", t + "/torn")
    os.remove(t + "/torn/model-00002-of-00002.safetensors")
    done = cli.run("diff", t + "/hf", t + "/torn", status=SOURCE)
    assert "damaged " in done.stdout and ": in B: " in done.stdout and "were not compared" in done.stderr, done
    cli.error("diff", DCP, status=USAGE, words=["wrong number of arguments"])
    cli.error("diff", DCP, t + "/none", status=SOURCE, words=["none"])
    cli.error("diff", DCP, DCP, "--rtol", "-1", status=USAGE, words=["--rtol=-1"])
    cli.error("diff", DCP, DCP, "--atol", "x", status=USAGE, words=["--atol=x"])
    cli.error("diff", DCP, DCP, "--drop", "everything", status=USAGE, words=["--drop=everything", "optimizer"])
    cli.error("diff", DCP, DCP, "--to", "hf", status=USAGE, words=["takes no --to"])
    cli.error("ls", DCP, "--rtol", "1", status=USAGE, words=["takes no --rtol"])
    cli.error("diff", DCP, DCP, "--only", "no.such", status=SOURCE, words=["no tensor of either matches"])


def test_an_unreadable_checkpoint(t):
    cli = Cli(t)
    os.mkdir(t + "/bad")
    write_file(t + "/bad/model.safetensors", b"\xff" * 64)
    cli.error("ls", t + "/bad", status=SOURCE, words=["model.safetensors"])
    assert "unreadable" in cli.run("verify", t + "/bad", status=NO).stdout
    assert "unreadable" not in cli.run("ls", os.path.dirname(DCP)).stdout


def test_a_refusal_has_one_hint(t):
    """Who is told that a version is not supported is not told to get the file anew."""
    cli = Cli(t)
    os.mkdir(t + "/new")
    write_file(t + "/new/metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 2}')
    write_file(t + "/new/.metadata", b"")
    for command in ("ls", "info"):
        said = cli.run(command, t + "/new", status=SOURCE).stderr
        assert said.endswith("is not known (version 1 is supported)\n"), said


def test_probe_and_formats(t):
    cli = Cli(t)
    bids = cli.json("probe", DCP)
    same("driver", bids["driver"], "torch_dcp")
    assert max(b["score"] for b in bids["bids"]) >= 60
    assert "-> a checkpoint" in cli.run("probe", DCP).stdout
    formats = cli.json("formats")["formats"]
    names = {f["name"] for f in formats}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/man/unshard-formats.7.scd")) as page:
        told = set(re.findall(r"\*([a-z_0-9-]+)\*", page.read()))
    same("not in unshard-formats(7)", sorted((names | {w for f in formats for w in f["to"]}) - told), [])
    same("maps", cli.json("formats")["maps"], ["hf-to-megatron", "hf-to-olmo", "llama-to-hf", "megatron-to-hf", "olmo-to-hf", "torchtitan-to-hf"])
    assert "llama-to-hf, megatron-to-hf, olmo-to-hf, torchtitan-to-hf" in cli.run("formats").stdout
    assert {"safetensors", "torch_dcp"} <= names, names
    assert cli.run("version").stdout.startswith("unshard ")


def test_buffers_that_a_module_does_not_save_are_no_weights(t):
    """register_buffer(persistent=False) in a module pickled whole: state_dict() leaves it out, model.safetensors too."""
    cli = Cli(t)
    for name in ("module_unsaved", "module_unsaved_p4"):  # a call of set with a list, and a set
        tensors = cli.json("info", f"{DATA}/torch_file/{name}")["tensors"]
        same(name, {x["key"]: x["role"] for x in tensors}, {"w": "model", "rope.scale": "model", "rope.inv_freq": "other"})


def test_what_no_driver_reads_has_a_name(t):
    """Each row of index/formats/unread.c: `info` and `probe` say what the file is and what to do."""
    cli = Cli(t)
    kinds = (
        ("m.keras", b"PK\3\4", "Keras"), ("m.h5", b"\x89HDF\r\n\x1a\n", "HDF5"), ("any", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("saved_model.pb", b"\x08\x01", "SavedModel"), ("ckpt-1.data-00000-of-00001", b"", "tf.train.load_checkpoint"),
        ("m.onnx", b"\x08\x08", "ONNX"), ("m.pdparams", b"\x80\x04", "PaddlePaddle"), ("m.pdopt", b"\x80\x04", "PaddlePaddle"),
        ("m.eqx", b"\x93NUMPY", "Equinox"), ("m.mlmodel", b"\x08\x05", "Core ML"), ("m.tflite", b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
        ("ggml-model.bin", b"lmgg", "GGML"), ("a.bin", b"fmgg", "GGML"), ("b.bin", b"tjgg", "GGML"),
        ("model.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("model.safetensors.gz", b"\x1f\x8b\x08", "gzip"), ("m.zst", b"\x28\xb5\x2f\xfd", "zstd"), ("m.xz", b"\xfd7zXZ\0", "xz"),
        ("m.bz2", b"BZh9", "bzip2"), ("m.7z", b"7z\xbc\xaf\x27\x1c", "7-Zip"), ("m.tar", bytes(257) + b"ustar", "archive of tar"),
        ("m.zip", b"PK\3\4", "archive of zip"), ("params.pkl", b"\x80\x04}.", "pickle"), ("params.pickle", b"\x80\x04}.", "pickle"),
    )
    for i, (name, head, word) in enumerate(kinds):
        place = f"{t}/{i}"
        os.mkdir(place)
        write_file(f"{place}/{name}", head)
        for source in (place, f"{place}/{name}"):
            cli.error("info", source, status=SOURCE, words=["no checkpoint that a driver recognises", f"{name} is ", word])
        shown = cli.run("probe", place).stdout
        assert f"{name} is " in shown and word in shown and "-> a plain directory" in shown, shown
    os.makedirs(t + "/core/M.mlpackage")
    cli.error("info", t + "/core", status=SOURCE, words=["M.mlpackage is a model of Core ML"])
    os.mkdir(t + "/none")
    for name, head in (("m.onnx", b"\x89"), ("m.txt", b"PK\3\4"), ("m.tar", bytes(257) + b"usta"), ("m.keras", b"PK")):
        write_file(f"{t}/none/{name}", head)
    assert " is " not in cli.run("probe", t + "/none").stdout
    cli.error("info", t + "/none", status=SOURCE, words=["(`unshard probe"])
    shutil.copytree(DCP, t + "/run/step1")
    write_file(t + "/run/logs.gz", b"\x1f\x8b\x08")
    assert "torch-dcp" in cli.run("info", t + "/run").stdout  # the only one stands for the run
    shutil.copytree(DCP, t + "/run/step2")
    cli.error("info", t + "/run", status=SOURCE, words=["a tree with 2 checkpoints"])


def test_maps_have_their_way_back(t):
    """To Hugging Face's names and back, by convert: seen through the first map again it is the same model."""
    cli = Cli(t)
    cases = (
        ("megatron/bridge_moe_ep2", "megatron-to-hf", "hf-to-megatron",
         {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24, "vocab_size": 46, "num_experts": 4}),
        ("olmo_core/step100", "olmo-to-hf", "hf-to-olmo", {}),
    )
    for source, there, back, config in cases:
        hf = t + "/" + there
        os.makedirs(hf)
        write_file(hf + "/config.json", json.dumps(config).encode())
        source = os.path.join(DATA, source)
        drop = ["--drop", "optimizer,other,objects"]
        cli.run("convert", source, t + "/to-" + there, "--to", "hf", "--map", there, "--hf", hf, *drop)
        cli.run("convert", t + "/to-" + there, t + "/" + back, "--to", "dcp", "--ranks", "2", "--map", back, "--hf", hf, *drop)
        mapped = f"map={there},hf={hf}"
        model = [x["key"] for x in cli.json("ls", source, "-o", mapped)["tensors"] if x["role"] == "model"]
        assert len(model) > 20 and all(k.startswith(("model.", "lm_head.")) for k in model), model
        same("keys", sorted(x["key"] for x in cli.json("ls", t + "/" + back, "-o", mapped)["tensors"]), sorted(model))
        for key in model:
            got = [cli.run("cat", where, key, "-o", mapped, text=False).stdout for where in (source, t + "/" + back)]
            assert got[0] and got[0] == got[1], key
    keys = {x["key"] for x in cli.json("ls", t + "/hf-to-megatron")["tensors"]}
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in keys, keys  # as megatron.core calls it in front of experts


def header(path):
    data = read_all(path)
    return sorted(k for k in json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]]) if k != "__metadata__")


def test_names_are_the_modules_own(t):
    """Without the saver's wrapper and what wrappers of modules left inside; what is beside the wrapper is not the model."""
    cli = Cli(t)
    data = os.path.join(DATA, "wrapped_names")
    own = ["a.module", "layers.0.b", "layers.0.w", "norm"]
    for name in ("beside.pt", "dcp"):
        cli.run("convert", f"{data}/{name}", f"{t}/{name}", "--to", "hf", "--drop", "optimizer,other,objects")
        same(name, header(f"{t}/{name}/model.safetensors"), own)
        roles = {x["key"]: x["role"] for x in cli.json("ls", f"{data}/{name}")["tensors"]}
        same("roles", {k: r for k, r in roles.items() if not k.startswith(("model.", "optim"))},
             {k: "other" for k in roles if not k.startswith(("model.", "optim"))})
        assert "step" in roles and any(k.startswith("ema.") for k in roles), roles
        assert not cli.json("info", f"{data}/{name}")["warnings"]
    done = cli.run("diff", f"{data}/beside.pt", t + "/dcp", "--drop", "optimizer,other,objects").stdout
    assert "only in" not in done, done
    cli.run("convert", data + "/collide.pt", t + "/kept", "--to", "hf")
    same("names that would collide", header(t + "/kept/model.safetensors"), ["model.module.x", "model.module.y", "model.x"])
    same("the warning", [w["code"] for w in cli.json("info", data + "/collide.pt")["warnings"]], ["prefix-kept"])


def test_weights_chooses_between_deepspeeds_copies(t):
    cli = Cli(t)
    fixture = os.path.join(DATA, "deepspeed", "z2_bf16_aligned_rr_w2")
    roles = {o: {x["key"]: x["role"] for x in cli.json("ls", fixture, "-o", "weights=" + o)["tensors"]} for o in ("master", "module")}
    pairs = [k for k in roles["master"] if "module." + k in roles["master"] and roles["master"][k] == "model"]
    assert len(pairs) > 5, pairs
    same("keys", set(roles["master"]), set(roles["module"]))
    for key in pairs:
        same(key, (roles["module"][key], roles["module"]["module." + key]), ("other", "model"))
        same(key, roles["master"]["module." + key], "other")
    cli.error("ls", fixture, "-o", "weights=both", status=USAGE, words=["-o"])


def test_what_is_not_known_is_refused_by_name(t):
    cli = Cli(t)
    os.mkdir(t + "/mnt")
    for option, words in {"gpu=x": ["gpu=x", "number"], "gpu=-1": ["gpu=-1"], "gpu=0x": ["gpu=0x"], "save=hf": ["rw"], "rw,save=nothing": ["save=nothing", "hf"], "rw,save=hf:what=1": ["what"],
                          "rw,save=hf:max_shard_size=x": ["max_shard_size"]}.items():
        cli.error("mount", DCP, t + "/mnt", "-o", option, status=USAGE, words=words)
    for url in ("ftp://host/x",):
        cli.error("ls", url, status=USAGE, words=[url.split("/")[0], "no such kind"])
        if os.access("/dev/fuse", os.R_OK | os.W_OK):  # else that is told first
            cli.error("mount", url, t + "/mnt", status=USAGE, words=[url.split("/")[0], "no such kind"])


def test_what_is_not_built_yet_is_refused_by_name(t):
    cli = Cli(t)
    os.mkdir(t + "/mnt")
    later = "does not have it yet"
    for command in ("browse", "serve", "report", "warm", "follow", "thin", "map"):
        cli.error(command, DCP, status=USAGE, words=[f"unshard: {command}: ", later])
    for option in ("dequant", "dequant=bf16", "lora=adapter@0.5", "mean=other@0.5", "fill=base"):
        cli.error("mount", DCP, t + "/mnt", "-o", "ro," + option, status=USAGE, words=[f"-o {option}: ", later])
        cli.error("ls", DCP, "-o", option, status=USAGE, words=[f"-o {option}: ", later])
    cli.error("convert", DCP, t + "/out", "--to", "hf", "--quant", "fp8", status=USAGE, words=["--quant: ", later])
    cli.error("verify", DCP, "--like", DCP, status=USAGE, words=["--like: ", later])
    assert "dequant" not in cli.run("--complete", "mount", "-o").stdout


def test_codes_are_not_cast(t):
    """dtype= on a quantised model would give the codes without their scales; known by config.json or by names and types."""
    cli = Cli(t)
    os.mkdir(t + "/mnt")
    plain = {"a.weight": ("F8_E4M3", (2, 2), bytes(range(4))), "b.weight": ("BF16", (2,), bytes(4))}
    scaled = {**plain, "a.weight_scale_inv": ("F32", (1,), struct.pack("<f", 2))}
    write_checkpoint(t + "/plain", plain)
    write_checkpoint(t + "/scaled", scaled, config=False)
    write_checkpoint(t + "/told", plain)
    write_file(t + "/told/config.json", b'{"model_type": "llama", "x": NaN, "quantization_config": {"quant_method": "fp8"}}')
    cli.run("convert", t + "/plain", t + "/out", "--to", "hf", "--dtype", "bf16")
    for name, words in (("scaled", ["a.weight_scale_inv"]), ("told", ["quantization_config of config.json: fp8"])):
        words = ["dtype=: the model is quantised", "dequant=", *words]
        cli.error("ls", f"{t}/{name}", "-o", "dtype=bf16", status=SOURCE, words=words)
        cli.error("convert", f"{t}/{name}", f"{t}/out-{name}", "--to", "hf", "--dtype", "bf16", status=SOURCE, words=words)
        assert not os.path.exists(f"{t}/out-{name}")
        if os.access("/dev/fuse", os.R_OK | os.W_OK):
            cli.error("mount", f"{t}/{name}", t + "/mnt", "-o", "dtype=bf16", status=SOURCE, words=words)
        cli.run("convert", f"{t}/{name}", f"{t}/as-is-{name}", "--to", "hf")


def test_wrong_usage(t):
    cli = Cli(t)
    cli.error("lss", DCP, status=USAGE, words=["no such command"])
    cli.error("ls", DCP, "--deep", status=USAGE, words=["--deep"])
    cli.error("ls", "--nonsense", DCP, status=USAGE, words=["--nonsense: no such option"])
    cli.error("mount", DCP, t, "-o", "alow_other", status=USAGE, words=["no such option", "allow_other"])
    cli.error("mount", DCP, t, "-o", "prefix=some", status=USAGE, words=["prefix=some", "auto"])
    assert "Exit status" in cli.run("--help").stdout


def test_each_command_and_option_is_told(t):
    """By the manual page, and by --help of the command."""
    cli = Cli(t)
    page = (pathlib.Path(__file__).resolve().parent.parent.parent / "docs/man/unshard.1.scd").read_text()
    common = {"-o", "--json", "--color", "-q", "--quiet", "-v", "--verbose", "--cache-dir", "--index-memory"}
    for command in cli.run("--complete").stdout.split():
        told = cli.run(command, "--help").stdout
        assert command in ("mount", "umount") or f"*{command}*" in page or f"*{command}* |" in page or command in ("formats", "version"), command
        assert f"*unshard {command}*" in page or command == "version", command
        for option in cli.run("--complete", command).stdout.split():
            assert f" {option}" in told, f"{command} --help does not tell {option}"
            if option.startswith("--") and option not in common | {"--long", "--foreground"}:
                assert option in page, f"unshard(1) does not tell {option} of {command}"


def test_steps_that_are_groups_of_zarr(t):
    """Side by side they are a run's steps, also those of version 3, and no one checkpoint that hides the others."""
    cli = Cli(t)
    for group in ("zarr2_group_consolidated", "zarr3_group_consolidated"):
        for step in ("step1", "step2"):
            shutil.copytree(f"{DATA}/zarr/{group}", f"{t}/{group}/{step}")
        shutil.copytree(DCP, f"{t}/{group}/step3")
        same(group, [c["path"] for c in cli.json("ls", f"{t}/{group}")["checkpoints"]], ["step1", "step2", "step3"])


def test_odd_keys_are_safe_to_print(t):
    cli = Cli(t)
    keys = ["a\x1b[31mb", "line\nbreak", "tab\t", "per%cent", "ключ", ""]
    write_checkpoint(t + "/hf", {k: ("U8", (1,), bytes([i])) for i, k in enumerate(keys)}, shards=1)
    out = cli.run("ls", t + "/hf").stdout
    same("lines", len(out.splitlines()), len(keys))
    assert "\x1b" not in out and "%1B" in out and "%0A" in out and "ключ" in out, out
    same("keys", sorted(r["key"] for r in cli.json("ls", t + "/hf")["tensors"]), sorted(keys))
    same("cat", cli.run("cat", t + "/hf", "line\nbreak", text=False).stdout, b"\x01")


def test_without_a_cache_directory(t):
    """Nobody is kept from reading by a cache that cannot be; one that was asked for must be there."""
    cli = Cli(t)
    write_file(t + "/cache", b"a file where the cache directory should be")
    want = expected(DCP)["model.emb.weight"]["sha256"]
    done = cli.run("cat", DCP, "model.emb.weight", text=False)
    same("bytes", sha256(done.stdout), want)
    same("words", done.stderr, b"")
    done = cli.run("cat", DCP, "model.emb.weight", "-v", text=False)
    assert b"the index is kept in memory: " in done.stderr, done.stderr
    cli.error("ls", DCP, "-o", f"cache_dir={t}/cache", status=SOURCE, words=["cache"])
    cli.run("ls", DCP, "-o", f"index=memory,cache_dir={t}/other")
    same("index=memory writes nothing", os.path.exists(t + "/other"), False)


def test_a_change_is_seen(t):
    cli = Cli(t)
    write_checkpoint(t + "/hf", make_tensors(1))
    one = make_tensors(1)["model.layers.0.mlp.weight"][2]
    same("before", cli.run("cat", t + "/hf", "model.layers.0.mlp.weight", text=False).stdout, one)
    write_checkpoint(t + "/hf", make_tensors(2))
    two = make_tensors(2)["model.layers.0.mlp.weight"][2]
    assert one != two
    same("after", cli.run("cat", t + "/hf", "model.layers.0.mlp.weight", text=False).stdout, two)
    same("in the file", read_all(t + "/hf/model-00001-of-00002.safetensors").count(two), 1)


def mapped_checkpoint(t):
    """(checkpoint, map, folder with config.json): w [4, 2] in F32 becomes a [1, 2] and b [3, 2]."""
    data = struct.pack("<8f", *range(8))
    write_checkpoint(t + "/ckpt", {"w": ("F32", (4, 2), data)}, shards=1)
    os.mkdir(t + "/hf")
    write_file(t + "/hf/config.json", b'{"rows": 1}')
    rule = {"from": "w", "split": {"parts": [{"to": "a", "rows": "config.rows"}, {"to": "b", "rows": "dim - config.rows"}]}}
    write_file(t + "/map.json", json.dumps({"unshard_map": 1, "rules": [rule]}).encode())
    return t + "/ckpt", t + "/map.json", t + "/hf"


def test_commands_with_a_map(t):
    cli = Cli(t)
    ckpt, map_, hf = mapped_checkpoint(t)
    options = ["-o", f"map={map_},hf={hf}"]
    rows = {r["key"]: (r["dtype"], r["shape"]) for r in cli.json("ls", ckpt, *options)["tensors"]}
    same("ls", rows, {"a": ("F32", [1, 2]), "b": ("F32", [3, 2])})
    same("cat", cli.run("cat", ckpt, "b", *options, text=False).stdout, struct.pack("<6f", *range(2, 8)))
    same("cat --npy", cli.run("cat", ckpt, "b", "--npy", *options, text=False).stdout[-24:], struct.pack("<6f", *range(2, 8)))
    same("without", [r["key"] for r in cli.json("ls", ckpt)["tensors"]], ["w"])
    plan = cli.json("plan", ckpt, "b", *options)
    same("plan", (plan["shape"], plan["bytes"], len(plan["chunks"])), ([3, 2], 24, 1))
    same("verify", cli.json("verify", ckpt, "--deep", *options)["findings"], [])
    same("info", cli.json("info", ckpt, *options)["warnings"], [])


def test_commands_with_a_dtype(t):
    cli = Cli(t)
    ckpt, map_, hf = mapped_checkpoint(t)
    same("ls", cli.json("ls", ckpt, "-o", "dtype=bf16")["tensors"][0]["dtype"], "BF16")
    want = b"".join(struct.pack("<f", v)[2:] for v in range(8))
    same("cat", cli.run("cat", ckpt, "w", "-o", "dtype=BF16", text=False).stdout, want)
    both = ["-o", f"map={map_},hf={hf},dtype=F64"]
    same("both", cli.run("cat", ckpt, "b", *both, text=False).stdout, struct.pack("<6d", *range(2, 8)))
    plan = cli.json("plan", ckpt, "b", *both)
    same("plan", (plan["dtype"], plan["stored"], plan["bytes"]), ("F64", "F32", 48))
    same("verify", cli.json("verify", ckpt, "--deep", *both)["findings"], [])


def test_verify_with_a_map_beside_copies(t):
    """A full copy holds the tensors without the map: turned ones do not differ from it."""
    cli, copies = Cli(t), os.path.join(DATA, "nemo_automodel", "nemo_tied_consolidated")
    rule = {"from": "{key...}", "ops": [{"transpose": []}], "to": "{key}"}
    write_file(t + "/map.json", json.dumps({"unshard_map": 1, "rules": [rule]}).encode())
    cli.run("verify", copies, "--deep")
    cli.run("verify", copies, "--deep", "-o", f"map={t}/map.json")


def test_errors_of_maps(t):
    cli = Cli(t)
    ckpt, map_, hf = mapped_checkpoint(t)
    cli.error("ls", ckpt, "-o", "map=megatron-to-hg", status=SOURCE,
              words=["map megatron-to-hg: there is no such file, and no map of that name", "megatron-to-hf", "olmo-to-hf"])
    cli.error("ls", ckpt, "-o", "dtype=int8", status=USAGE, words=["dtype=int8: no type to cast to", "BF16"])
    cli.error("ls", ckpt, "-o", f"map={map_},hf={t}/nowhere", status=SOURCE, words=["nowhere"])
    cli.error("ls", ckpt, "-o", f"map={t}", status=SOURCE, words=["no regular file"])
    write_file(t + "/bad.json", b'{"unshard_map": 1, "rules": [{"from": "a"}]}')
    cli.error("ls", ckpt, "-o", f"map={t}/bad.json", status=SOURCE, words=["bad.json: rule 1: ", 'one of "to"'])
    cli.error("ls", ckpt, "-o", f"map={map_}", status=SOURCE, words=["config.json has no rows"])
    write_file(hf + "/config.json", b'{"rows": 5}')
    cli.error("ls", ckpt, "-o", f"map={map_},hf={hf}", status=SOURCE, words=["rule 1: tensor w: part 1 has 5 elements of groups of 4"])


if __name__ == "__main__":
    main(globals())
