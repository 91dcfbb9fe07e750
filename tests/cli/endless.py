#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A server whose directories have no end: what goes through a tree of it stops, says why, and has told what it found."""
import contextlib
import hashlib
import http.server
import json
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from commands import Cli, SOURCE  # noqa: E402
from mountlib import main, make_tensors, safetensors_image, same  # noqa: E402

DIRS, LEVELS = 4000, 64  # index/formats/walk.c
MODEL = safetensors_image(make_tensors(1))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.server.lock:
            self.server.asked += 1
        path = self.path.split("?")[0]
        if path.endswith("/"):
            names = self.server.names(path)
            return self.reply(200, "".join(f'<a href="{n}">{n}</a>' for n in names).encode(), "text/html")
        if path.endswith("/model.safetensors"):
            return self.reply_file(MODEL)
        self.reply(404, b"", "text/plain")

    do_HEAD = do_GET

    def reply(self, code, body, kind, *more):
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *more):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_file(self, data):
        etag = ("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        wanted = self.headers.get("Range")
        if not wanted:
            return self.reply(200, data, "application/octet-stream", etag, ("Accept-Ranges", "bytes"))
        first, last = wanted.removeprefix("bytes=").split("-")
        first, last = int(first), min(int(last or len(data) - 1), len(data) - 1)
        place = ("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.reply(206, data[first:last + 1], "application/octet-stream", etag, place)


@contextlib.contextmanager
def server(names):
    """`names` of a path that ends in a slash; directories' have one too."""
    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.daemon_threads, s.names, s.asked, s.lock = True, names, 0, threading.Lock()
    thread = threading.Thread(target=s.serve_forever)
    thread.start()
    s.url = f"http://127.0.0.1:{s.server_port}/top"
    try:
        yield s
    finally:
        s.shutdown()
        thread.join()
        s.server_close()


def test_directories_in_each_other(t):
    cli = Cli(t)
    with server(lambda path: ["a/"]) as s:
        for verb in ("ls", "info", "verify"):
            before = s.asked
            cli.error(verb, s.url, status=SOURCE, words=["a/a/a/", f"more than {LEVELS} directories in each other"])
            assert s.asked - before < 4 * LEVELS, s.asked - before


def test_directories_that_fork(t):
    cli = Cli(t)
    with server(lambda path: ["a/", "b/"]) as s:
        for verb in ("ls", "info", "verify"):
            before = s.asked
            cli.error(verb, s.url, status=SOURCE, words=[f"too many directories: after {DIRS}", "fewer below it"])
            assert DIRS <= s.asked - before < 4 * DIRS, s.asked - before


def test_what_is_found_before_is_told(t):
    """The first branch holds a checkpoint; for each that is found the walk goes on a bit."""
    cli = Cli(t)
    with server(lambda path: ["model.safetensors"] if path.endswith("/0/") else ["0/", "a/", "b/"] if path == "/top/" else ["a/", "b/"]) as s:
        done = cli.run("ls", s.url, "--json", status=SOURCE)
        same("found", [c["path"] for c in json.loads(done.stdout)["checkpoints"]], ["0"])
        assert f"after {DIRS + 100} there are more" in done.stderr, done.stderr


def test_directories_that_end(t):
    """As many as are allowed, and checkpoints behind all of them."""
    cli = Cli(t)
    wide = [f"d{i:04}/" for i in range(DIRS - 3)]
    with server(lambda path: wide + ["y/", "z/"] if path == "/top/" else ["model.safetensors"] if path in ("/top/y/", "/top/z/") else []) as s:
        out = json.loads(cli.run("ls", s.url, "--json").stdout)
        same("found", [c["path"] for c in out["checkpoints"]], ["y", "z"])
    with server(lambda path: ["a/"] if path.count("/") < LEVELS + 1 else ["model.safetensors"]) as s:
        out = json.loads(cli.run("ls", s.url, "--json").stdout)
        assert out["tensors"], out  # it stands for the tree


if __name__ == "__main__":
    main(globals())
