# SPDX-License-Identifier: MIT
"""Repositories of the Hugging Face Hub through hf://: revisions, large files elsewhere, pages, tokens, names."""
import json
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import UNSHARD, Mount, check_mount, main, make_tensors, read_all, safetensors_image, same, write_checkpoint  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(ROOT / "remote"))

from hub_server import HubServer  # noqa: E402


def unshard(env, *args, status=0):
    done = subprocess.run([UNSHARD, *args], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    if done.returncode != status:
        raise AssertionError(f"unshard {args}: status {done.returncode}\n{done.stderr.decode()}")
    return done


def test_fixtures(t):
    with HubServer() as hub:
        for i, name in enumerate(("safetensors/hf_sharded_f32", "hf_dcp/hfdcp_row_5", "torch_dcp/dcp_fsdp2_adamw_2r")):
            hub.add("org/model", DATA / name, branch=f"v{i}")
            with Mount(f"hf://org/model@v{i}", f"{t}/mnt{i}", env=hub.env()) as m:
                check_mount(m.path, DATA / (name + ".expected.json"))
        assert hub.store_log, "no file was large"


def test_a_branch_that_moves(t):
    """What is mounted stays the commit that the branch named; a later mount sees the new one."""
    old, new = make_tensors("old"), make_tensors("new")
    key = next(iter(old))
    with HubServer(large=1000) as hub:
        hub.add("o/m", {"model.safetensors": safetensors_image(old), "config.json": b"{}"})
        with Mount("hf://o/m", t + "/mnt", "refresh=1", env=hub.env()) as m:
            same("before", read_all(f"{m.path}/raw/{key}"), old[key][2])
            sha = hub.add("o/m", {"model.safetensors": safetensors_image(new), "config.json": b"{}"})
            same("after", read_all(f"{m.path}/model.safetensors"), safetensors_image(old))
        same("later", unshard(hub.env(), "cat", "hf://o/m", key).stdout, new[key][2])
        same("by commit", unshard(hub.env(), "cat", f"hf://o/m@{sha}", key).stdout, new[key][2])
        done = unshard(hub.env(), "ls", "hf://o/m@nothing", status=3)
        assert b"nothing" in done.stderr, done.stderr


def test_a_repository_of_many_files(t):
    """What tells a revision's commit names every file of it."""
    with HubServer() as hub:
        hub.add("org/model", DATA / "safetensors/hf_sharded_f32")
        hub.more_files = [f"checkpoints/step{i % 7}/model/ocdbt.process_{i % 64}/d/{i:032x}-and-what-else-orbax-puts-into-a-name-of-its-own"
                          for i in range(70000)]
        assert b"F32" in unshard(hub.env(), "ls", "hf://org/model").stdout


def test_a_commit_is_listed_once(t):
    with HubServer() as hub:
        hub.add("org/model", DATA / "safetensors/hf_sharded_f32")
        with Mount("hf://org/model", t + "/mnt", "refresh=1", env=hub.env()) as m:
            for _ in range(6):
                os.listdir(m.path)
                time.sleep(0.5)
            trees = [path for _, path, _ in hub.log if "/tree/" in path]
            same("listings", len(trees), len(set(trees)))


def test_a_root_is_called_as_its_directory(t):
    with HubServer() as hub:
        hub.add("org/run-step7", DATA / "torch_dcp/dcp_fsdp2_adamw_2r")
        for url in ("hf://org/run-step7", "hf://org/run-step7@main"):
            same(url, json.loads(unshard(hub.env(), "info", "--json", url).stdout)["step"], 7)


def test_names_of_all_kinds(t):
    tensors = make_tensors("kinds", count=2)
    key, image = next(iter(tensors)), safetensors_image(tensors)
    files = {"a b/s+t#1/\u00e9.safetensors": image, "a b/other.txt": b"x"}
    with HubServer(large=1000) as hub:
        for kind, url in (("models", "hf://o/m"), ("datasets", "hf://datasets/o/m"), ("spaces", "hf://spaces/o/m")):
            hub.add("o/m", files, kind=kind)
            hub.add("o/m", files, kind=kind, branch="refs/pr/3")
            hub.add("o/m", files, kind=kind, branch="feature/x")
            for revision in ("", "@refs/pr/3", "@feature%2Fx"):
                for path in ("a b/s+t#1", "a b/s+t#1/\u00e9.safetensors"):
                    same(url, unshard(hub.env(), "cat", f"{url}{revision}/{path}", key).stdout, tensors[key][2])
        hub.add("gpt2", files)
        same("an old name", unshard(hub.env(), "cat", "hf://gpt2@main/a b/s+t#1", key).stdout, tensors[key][2])
        done = unshard(hub.env(), "ls", "hf://gpt2@main/a b/s+t#1", "none", status=3)
        assert b"hf://gpt2@main/a b/s+t#1: no tensor" in done.stderr, done.stderr
        done = unshard(hub.env(), "ls", "hf://o/m/none", status=3)
        assert b"there is no none in it" in done.stderr, done.stderr


def test_pages(t):
    tensors = make_tensors("pages")
    write_checkpoint(t + "/src", tensors, shards=3)
    files = {p.name: p.read_bytes() for p in pathlib.Path(t + "/src").iterdir()}
    files.update({f"notes-{i:04}.txt": b"%d" % i for i in range(345)})
    with HubServer() as hub:
        hub.add("o/m", files)
        with Mount("hf://o/m", t + "/mnt", env=hub.env()) as m:
            same("notes", sum(n.startswith("notes-") for n in os.listdir(m.path)), 345)
            same("the last", read_all(m / "notes-0344.txt"), b"344")
            for key in tensors:
                same(key, read_all(f"{m.path}/raw/{key}"), tensors[key][2])
        assert sum("cursor=" in path for _, path, _ in hub.log) >= 6


def test_a_page_that_is_elsewhere(t):
    """Another host could say anything of what is in there: it is not asked. A mirror that passes on the Hub's link has the page itself."""
    files = {"model.safetensors": safetensors_image(make_tensors("elsewhere"))}
    with HubServer(page=1) as hub, HubServer(page=1) as other:
        for server in (hub, other):
            server.add("o/name", dict(files, **{"config.json": b"{}"}))
        unshard(hub.env(), "ls", "hf://o/name")
        other.log.clear()
        listed = unshard(hub.env(), "ls", "hf://o/name").stdout
        for url in (other.url, hub.url + ".invalid", hub.url.replace("://", "://127.0.0.1@")):
            hub.next_url = url
            same(url, unshard(hub.env(), "ls", "hf://o/name").stdout, listed)
        for url in (other.url + "/mirror", other.url + "/api/models/o/another/tree/main?x=", "ftp:", other.url.replace("http:", "")):
            hub.next_url = url
            done = unshard(hub.env(), "ls", "hf://o/name", status=3)
            assert b"on another host" in done.stderr, done.stderr
        same("requests to the other one", other.log, [])


def test_tokens(t):
    """The token opens the repository, and never leaves for the place where large files are."""
    tensors = make_tensors("token")
    key = next(iter(tensors))
    with HubServer(token="hf_hush", large=1000) as hub:
        hub.add("o/private", {"model.safetensors": safetensors_image(tensors)})
        done = unshard(hub.env(), "ls", "hf://o/private", status=5)
        assert b"HF_TOKEN" in done.stderr, done.stderr
        done = unshard(hub.env(HF_TOKEN="hf_wrong"), "ls", "hf://o/private", status=5)
        assert b"hf_wrong" not in done.stderr, done.stderr
        same("cat", unshard(hub.env(HF_TOKEN="hf_hush"), "cat", "hf://o/private", key).stdout, tensors[key][2])
        with open(t + "/token", "w") as f:
            f.write("hf_hush\n")
        hub.store_log.clear()
        with Mount("hf://o/private", t + "/mnt", env=hub.env(HF_TOKEN_PATH=t + "/token", UNSHARD_LOG="debug")) as m:
            same("raw", read_all(f"{m.path}/raw/{key}"), tensors[key][2])
            assert "hf_hush" not in m.messages()
        assert hub.store_log and not any(auth for _, _, auth in hub.store_log), hub.store_log
        assert all(auth == "Bearer hf_hush" for _, path, auth in hub.log[-3:]), hub.log[-3:]
        done = unshard(hub.env(HF_TOKEN="hf_hush", HF_HUB_OFFLINE="1"), "ls", "hf://o/private", status=5)
        assert b"HF_HUB_OFFLINE" in done.stderr, done.stderr


def test_links_that_end(t):
    """The place of a large file is good for a moment only; the next read is sent to a new one."""
    import time

    tensors = make_tensors("moment")
    with HubServer(large=1000, seconds=1) as hub:
        hub.add("o/m", {"model.safetensors": safetensors_image(tensors)})
        with Mount("hf://o/m", t + "/mnt", env=hub.env()) as m:
            for key in tensors:
                same(key, read_all(f"{m.path}/raw/{key}"), tensors[key][2])
                time.sleep(0.6)


if __name__ == "__main__":
    main(globals())
