# SPDX-License-Identifier: MIT
"""Checkpoints behind a web server: the same bytes through the mount as from the disk, and what that costs."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

from mountlib import (PATIENCE, UNSHARD, Mount, check_mount, main, make_tensors, read_all, safetensors_image, same, write_checkpoint,
                      write_file)

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(ROOT / "remote"))

from fault_server import Server  # noqa: E402

FIXTURES = ("torch_dcp/dcp_async_2r", "torch_dcp/dcp_mesh_2x2", "hf_dcp/hfdcp_row_5", "safetensors/hf_sharded_f32",
            "safetensors/hf_peft_lora", "torch_file", "zarr", "megatron")


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
                check_mount(m.path, expected)


def test_fixtures_by_manifest(t):
    source = DATA / "torch_dcp/dcp_mesh_2x2"
    shutil.copytree(source, t + "/src")
    subprocess.run([UNSHARD, "manifest", "-q", t + "/src"], check=True)
    with Server(t) as server:
        server.set("pages", False)
        with Mount(server.url + "/src", t + "/mnt") as m:
            check_mount(m.path, str(source) + ".expected.json")
            assert "unshard-manifest.json" not in os.listdir(m.path)


ODD = ("a b", "per%25cent", "100%", "plus+", "q?x=1", "hash#1", "amp&amp;", "quo'te\"s", "col:on", "ключ", "semi;colon", "[x]")


def test_odd_names_are_the_same(t):
    for name in ODD:
        os.makedirs(f"{t}/src/dir {name}")
        with open(f"{t}/src/dir {name}/{name}", "w", encoding="utf-8") as f:
            f.write(name)
    for how in ("pages", "manifest"):
        if how == "manifest":
            subprocess.run([UNSHARD, "manifest", "-q", t + "/src"], check=True)
        with Server(t + "/src") as server, Mount(server.url, f"{t}/mnt-{how}") as m:
            same(how, sorted(os.listdir(m.path)), sorted("dir " + n for n in ODD))
            for name in ODD:
                same(name, os.listdir(m / f"dir {name}"), [name])
                same(name, read_all(m / f"dir {name}/{name}").decode(), name)
                same(name, os.stat(m / f"dir {name}/{name}").st_size, len(name.encode()))


def test_one_file_is_a_source(t):
    tensors = make_tensors(3)
    os.mkdir(t + "/src")
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    write_file(t + "/src/other.txt", b"not shown")
    with Server(t + "/src") as server, Mount(server.url + "/model.safetensors", t + "/mnt") as m:
        assert "other.txt" not in os.listdir(m.path)
        same("byte for byte", read_all(m / "model.safetensors"), read_all(t + "/src/model.safetensors"))
        assert not server.log("other.txt")


def test_a_root_is_called_as_its_directory(t):
    """Steps and formats are told by the names of directories: with and without a slash behind the URL, in escapes."""
    for name in ("step42", "run 7 step_43"):
        shutil.copytree(DATA / "torch_dcp/dcp_fsdp2_adamw_2r", f"{t}/src/{name}")
    with Server(t + "/src") as server:
        for url, step in (("/step42", 42), ("/step42/", 42), ("/run%207%20step_43/", 43)):
            done = subprocess.run([UNSHARD, "info", "--json", server.url + url], check=True, capture_output=True)
            same(url, json.loads(done.stdout)["step"], step)


def test_a_url_that_is_signed_for_get(t):
    """As S3's presigned ones: HEAD is refused, the query lets GET in."""
    tensors = make_tensors("signed", count=2)
    key = sorted(tensors)[0]
    os.makedirs(t + "/src/run")
    write_file(t + "/src/run/model.safetensors", safetensors_image(tensors))
    with Server(t + "/src") as server:
        server.fault("status", times=-1, method="HEAD", status=403)
        done = subprocess.run([UNSHARD, "cat", server.url + "/run/model.safetensors?X-Amz-Signature=s", key], check=True, capture_output=True)
        same("cat", done.stdout, tensors[key][2])
        assert all("X-Amz-Signature=s" in r["path"] for r in server.log()), server.log()
        done = subprocess.run([UNSHARD, "ls", server.url + "/run/none"], capture_output=True, check=False)
        assert done.returncode == 3 and b"HTTP 404" in done.stderr, done


def rounds(server):
    """Requests one after the other: those that ask files what they are go out at once, and so do the first two."""
    asked = [r for r in server.log() if r["method"] == "GET" and not r["path"].endswith("unshard-manifest.json")]
    return len(asked) + bool(server.log("", "HEAD"))


def test_round_trips_to_the_first_byte(t):
    tensors = make_tensors(5, count=4, rows=4096, cols=64)  # larger than what comes with a header
    os.mkdir(t + "/src")
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", t + "/src/dcp")

    def measured(server, where, name):
        server.forget()
        with Mount(server.url + where, name) as m:
            keys = sorted(os.listdir(m / "raw"))
            with open(m / f"raw/{keys[0]}", "rb") as f:
                assert f.read(1)
            cold = rounds(server)
            server.forget()
            with open(m / f"raw/{keys[-1]}", "rb") as f:
                assert f.read(1)
            print(f"# {where}: {cold} round trips to the first byte, {rounds(server)} to one of another tensor")
            return cold <= 6 and rounds(server) <= 2

    with Server(t + "/src") as server:
        for where in ("/", "/dcp/"):
            assert in_few(lambda i, w=where: measured(server, w, f"{t}/mnt{i}{w}")), server.log()


def in_few(attempt):
    """Is attempt(number) true once? What was asked is asked again where a machine takes seconds to go on."""
    return any(attempt(i) for i in range(4))


def test_round_trips_of_a_mount_whose_index_is_there(t):
    """Its directory, the files' sizes (a web server's page has none), and the bytes."""
    tensors = make_tensors(5, count=4, rows=4096, cols=64)
    write_checkpoint(t + "/src/hf", tensors, shards=2)
    shutil.copytree(DATA / "torch_dcp/dcp_minimal_handmade", t + "/src/dcp")
    with Server(t + "/src") as server:
        def measured(where, turn):
            with Mount(server.url + where, f"{t}/{where.strip('/')}-{turn}", f"cache_dir={t}/cache,cache_size=0") as m:
                server.forget()
                key = sorted(os.listdir(m / "raw"))[0]
                with open(m / f"raw/{key}", "rb", buffering=0) as f:
                    assert len(f.read(1)) == 1
            data = [r["path"] for r in server.log("", "GET")]
            return len(set(data)) == 1 and rounds(server) <= 3  # a header and its bytes may be two requests, made at once

        for where in ("/hf/", "/dcp/"):
            measured(where, "cold")
            assert in_few(lambda i, w=where: measured(w, f"warm{i}")), f"{where}: {server.log()}"


class Flights:
    """Which HEADs of files a server gets before it answers with the page: it waits for so many, or a while."""

    def __init__(self, server, page, most):
        self.server, self.page, self.most = server, page, most
        self.before, self.after, self.answered, self.changed = [], [], False, threading.Condition()
        server.arrived = self.arrived

    def arrived(self, method, path):
        with self.changed:
            if method == "HEAD" and path.rpartition("/")[2]:
                (self.after if self.answered else self.before).append(path)
                self.changed.notify_all()
            elif method == "GET" and path.endswith(self.page) and not self.answered:
                self.changed.wait_for(lambda: len(self.before) >= self.most, PATIENCE if self.most else 0)
                self.answered = True


def test_files_that_were_there_are_asked_along_with_the_page(t):
    """The page (or the manifest) and the HEADs of what it named last time go out at once; then the bytes."""
    tensors = make_tensors(5, count=4, rows=4096, cols=64)
    for how in ("pages", "manifest"):
        write_checkpoint(f"{t}/{how}/hf", tensors, shards=2)
        if how == "manifest":
            subprocess.run([UNSHARD, "manifest", "-q", f"{t}/{how}/hf"], check=True)
        with Server(f"{t}/{how}") as server:
            def measured(turn, cache, key, early):
                server.forget()
                flights = Flights(server, "/hf/", early)
                with Mount(server.url + "/hf/", f"{t}/{how}/{turn}", f"cache_dir={t}/{how}/{cache}") as m:
                    with open(m / f"raw/{key}", "rb", buffering=0) as f:
                        same(key, f.read(16), tensors[key][2][:16])
                print(f"# {how}, {turn}: {len(flights.before)} asked before the page was there, {len(flights.after)} then")
                return len(flights.before) == early and len(flights.after) == 4 - early

            assert in_few(lambda i: measured(f"cold{i}", f"cache{i}", sorted(tensors)[0], 0)), server.log()
            assert in_few(lambda i: measured(f"warm{i}", "cache0", sorted(tensors)[-1 - i % 3], 4) and len(server.log(r"safetensors$", "GET")) == 1), \
                server.log()


def test_files_that_were_there_and_are_others_now(t):
    """What a server had last time is only a hint: files that went, came, changed or do not answer are as they are."""
    old, new = make_tensors("old", count=4, rows=4096, cols=64), make_tensors("new", count=5, rows=4096, cols=64)

    def check_mount(server, name, tensors):
        with Mount(server.url + "/hf/", f"{t}/{name}", f"cache_dir={t}/cache") as m:
            same(name, sorted(os.listdir(m / "raw")), sorted(tensors))
            for key, (_, _, data) in tensors.items():
                same(f"{name}: {key}", read_all(m / f"raw/{key}"), data)
            return sorted(os.listdir(m.path))

    write_checkpoint(t + "/src/hf", old, shards=3)
    write_file(t + "/src/hf/gone.txt", b"gone")
    with Server(t + "/src") as server:
        assert "gone.txt" in check_mount(server, "first", old)
        shutil.rmtree(t + "/src/hf")
        write_checkpoint(t + "/src/hf", new, shards=2)
        write_file(t + "/src/hf/come.txt", b"come")
        shown = check_mount(server, "second", new)
        assert "come.txt" in shown and "gone.txt" not in shown, shown
        for kind, times in (("reset", 3), ("stall", 1)):
            server.forget()
            fault = server.fault(kind, times=times, method="HEAD", match=r"00001-of|come")
            same(kind, check_mount(server, kind, new), shown)
            same(f"{kind}s", fault.used, times)
            server.clear()


def test_what_files_told_at_the_start_does_not_come_back(t):
    """A mount that nobody looks at for a while has asked the root's files; once others are there that is over."""
    write_checkpoint(t + "/src/run/hf", make_tensors("early", count=2))
    write_file(t + "/src/run/note", b"old bytes")
    subprocess.run([UNSHARD, "manifest", "-q", t + "/src/run"], check=True)
    with Server(t + "/src") as server:
        server.set("pages", False)
        with Mount(server.url + "/run", t + "/first", f"cache_dir={t}/cache") as m:
            same("first", read_all(m / "note"), b"old bytes")
        with Mount(server.url + "/run", t + "/second", f"cache_dir={t}/cache,refresh=2") as m:
            time.sleep(3)  # longer than what came along with the opening counts
            write_file(t + "/src/run/note", b"new bytes, and more")
            for _ in range(12):
                os.listdir(m / "hf")
                same("second", read_all(m / "note"), b"new bytes, and more")
                time.sleep(0.25)


def test_one_tensor_moves_little_more_than_its_bytes(t):
    tensors = make_tensors(6, count=20, rows=1024, cols=1024)
    write_checkpoint(t + "/src", tensors, shards=4)
    with Server(t + "/src") as server, Mount(server.url, t + "/mnt") as m:
        key, (_, _, data) = list(tensors.items())[3]
        same(key, read_all(m / f"raw/{key}"), data)
        moved = sum(r["bytes"] for r in server.log() if r["method"] == "GET")
        print(f"# a tensor of {len(data)} bytes moved {moved}")
        assert moved <= len(data) + (1 << 20), [(r["path"], r["range"], r["bytes"]) for r in server.log()]


if __name__ == "__main__":
    main(globals())
