# SPDX-License-Identifier: MIT
"""Checkpoints behind a web server: the same bytes through the mount as from the disk, and what that costs."""
import os
import pathlib
import shutil
import subprocess
import sys

from mountlib import UNSHARD, Mount, main, same

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(ROOT / "remote"))

from fault_server import Server  # noqa: E402

FIXTURES = ("torch_dcp/dcp_async_2r", "torch_dcp/dcp_mesh_2x2", "hf_dcp/hfdcp_row_5", "safetensors/hf_sharded_f32",
            "safetensors/hf_peft_lora", "torch_file", "zarr", "megatron")


def check(mount, expected):
    done = subprocess.run([sys.executable, str(ROOT / "check_mount.py"), str(mount), str(expected)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def some_fixtures():
    """(source, expected) of the fixtures above; of a family its first two."""
    for name in FIXTURES:
        path = DATA / name
        for source in [path] if path.with_name(path.name + ".expected.json").exists() else sorted(
                p for p in path.iterdir() if (path / (p.name + ".expected.json")).exists())[:2]:
            yield source, source.with_name(source.name + ".expected.json")


def test_fixtures_by_listing_pages(t):
    with Server(DATA) as server:
        for i, (source, expected) in enumerate(some_fixtures()):
            slash = "/" if source.is_dir() else ""
            with Mount(f"{server.url}/{source.relative_to(DATA)}{slash}", f"{t}/mnt{i}") as m:
                check(m.path, expected)


def test_fixtures_by_manifest(t):
    source = DATA / "torch_dcp/dcp_mesh_2x2"
    shutil.copytree(source, t + "/src")
    subprocess.run([UNSHARD, "manifest", t + "/src"], check=True)
    with Server(t) as server:
        server.set("pages", False)
        with Mount(server.url + "/src", t + "/mnt") as m:
            check(m.path, str(source) + ".expected.json")
            assert "unshard-manifest.json" not in os.listdir(m.path)


if __name__ == "__main__":
    main(globals())
