# SPDX-License-Identifier: MIT
"""Answers that no sane server gives: what a mount makes of them is the bytes that were asked for, or an error with words."""
import email.utils
import errno
import http.server
import os
import re
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import Mount, errno_name, main, read_all, safetensors_image, same, tensor_bytes  # noqa: E402

SIZE = 200 << 10  # more than what is fetched with a header
ENV = {**os.environ, "UNSHARD_HTTP_TRIES": "2", "UNSHARD_HTTP_STALL": "30", "UNSHARD_HTTP_DEADLINE": "60"}


class Odd(http.server.ThreadingHTTPServer):
    """A page with links to files, each `data[name]`, whose answers have the headers of told(name, method, range)."""
    daemon_threads = True

    def __init__(self, page, data, told):
        super().__init__(("127.0.0.1", 0), Handler)
        self.page, self.data, self.told, self.log = page, data, told, []

    def handle_error(self, request, client_address):
        pass  # a client that had enough

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/run"
        return self

    def __exit__(self, *exc):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, headers, body):
        self.send_response_only(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        name = self.path.rsplit("/", 1)[1]
        self.server.log.append((self.command, name))
        if self.path == "/run/":
            return self.answer(200, {"Content-Type": "text/html"}, self.server.page.encode())
        if name not in self.server.data:
            return self.answer(404, {}, b"")
        data = self.server.data[name]
        m = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        told = self.server.told(name, self.command, m and int(m[1]))
        if not m:
            return self.answer(200, told, data)
        first, last = int(m[1]), min(int(m[2]), len(data) - 1)
        return self.answer(206, {"Content-Range": f"bytes {first}-{last}/{len(data)}", **told}, data[first:last + 1])

    do_HEAD = do_GET


def image(seed):
    return safetensors_image({"w": ("U8", (SIZE,), tensor_bytes(seed, SIZE))})


def date(seconds):
    return email.utils.formatdate(seconds, usegmt=True)


def read(path):
    try:
        return read_all(path)
    except OSError as e:
        return errno_name(e.errno)


def test_an_empty_etag_is_none(t):
    """It would be the same for any two objects: what else is told counts."""
    files, times = {"model.safetensors": image("old")}, [1700000000]

    def told(*_):
        return {"ETag": "", "Last-Modified": date(times[0])}

    with Odd('<a href="model.safetensors">', files, told) as server, Mount(server.url, t + "/mnt", "refresh=600", env=ENV) as m:
        with open(m / "raw/w", "rb", buffering=0) as f:
            same("its beginning", f.read(100), tensor_bytes("old", SIZE)[:100])
            files["model.safetensors"] = image("new")
            times[0] += 60
            f.seek(SIZE // 2)
            try:
                got = f.read(SIZE // 4)
                assert False, f"{len(got)} bytes of " + ("the new" if got == tensor_bytes("new", SIZE)[SIZE // 2:][:len(got)] else "an") + " object"
            except OSError as e:
                assert e.errno in (errno.EIO, errno.ESTALE), errno_name(e.errno)


def test_answers_that_tell_nothing_later(t):
    """The first ones tell who they are, those for the tensor's bytes do not, and are of another object."""
    files = {"model.safetensors": image("old")}

    for kind, tells in {"ETag": {"ETag": '"old"', "Last-Modified": date(1700000000)}, "weak ETag": {"ETag": 'W/"old"', "Last-Modified": date(1700000000)},
                        "time": {"Last-Modified": date(1700000000)}}.items():
        def told(name, method, first, tells=tells):
            if first:  # not the header of the file
                files["model.safetensors"] = image("new")
                return {}
            return tells

        files["model.safetensors"] = image("old")
        with Odd('<a href="model.safetensors">', files, told) as server, Mount(server.url, f"{t}/{kind[0]}", "refresh=600", env=ENV) as m:
            same(f"{kind}: a read", read(m / "raw/w"), "EIO")
            assert "may be of another object" in m.messages(), m.messages()


def test_a_file_that_a_page_names_many_times(t):
    files = {"model.safetensors": image("one")}
    page = '<a href="model.safetensors">' * 500 + '<a href="gone">' * 500

    with Odd(page, files, lambda *_: {"ETag": '"a"'}) as server, Mount(server.url, t + "/mnt", "refresh=600", env=ENV) as m:
        assert read(m / "raw/w") == tensor_bytes("one", SIZE), "other bytes"
        asked = [name for method, name in server.log if method == "HEAD"]
        assert asked.count("model.safetensors") < 10 and asked.count("gone") < 10, f"{len(asked)} questions"
        assert m.messages().count("gone is left out") < 10, "a line each time"


main(globals())
