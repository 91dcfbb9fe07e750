#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A small web server for tests: files in ranges, with the faults that real stores have.

    fault_server.py ROOT [--port N] [--delay SECONDS] [--rate BYTES_A_SECOND]

prints "port N" and serves ROOT: files with ETag, Last-Modified, ranges and If-Match, directories as a page of links,
and (ListObjectsV2) /BUCKET?list-type=2&prefix=... as XML. In a test: `with Server(root) as s`, s.url, s.fault(...),
s.log. A process of its own takes POST /-/fault (the arguments of fault() as JSON), /-/clear and /-/set {"delay", "rate"};
GET /-/log gives the requests.
"""
import argparse
import email.utils
import hashlib
import html
import http.server
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse

PIECE = 64 << 10
SENT = 256 << 10  # of a body at a time, where nothing is to go wrong
BURST = 0.01  # seconds of the rate that late threads may catch up on
PAGE_KEYS = 1000  # of one answer of ListObjectsV2


class Fault:
    """What happens to the next `times` requests (-1: to all) whose method and path match."""

    KINDS = {"status", "reset", "cut", "stall", "short", "wrong_range", "ignore_range", "no_etag", "skew", "redirect",
             "long", "garbage", "slow", "untold"}

    def __init__(self, kind, times=1, match="", method="GET", **more):
        if kind not in self.KINDS:
            raise ValueError(kind)
        self.kind, self.times, self.method, self.more = kind, times, method, more
        self.match = re.compile(match)
        self.used = 0

    def takes(self, method, path):
        return self.times != 0 and self.match.search(path) and self.method in ("*", method)

    def __getattr__(self, name):
        return self.more.get(name)


class Rate:
    """Bytes a second of all connections together."""

    def __init__(self, rate):
        self.rate, self.lock, self.free_at = rate, threading.Lock(), 0.0
        self.piece = max(1 << 10, min(SENT, int(rate) // 20)) if rate else SENT  # a slow link has no bursts

    def wait(self, n):
        if not self.rate:
            return
        with self.lock:
            now = time.monotonic()
            start = max(now - BURST, self.free_at)
            self.free_at = start + n / self.rate
        time.sleep(max(0.0, self.free_at - now))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    # ---- answers ----

    def send(self, status, headers=None, body=b"", **log):
        self.note(status, len(body), **log)
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error_xml(self, status, code, headers=None):
        body = f"<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>".encode()
        self.send(status, {"Content-Type": "application/xml", **(headers or {})}, body)

    def note(self, status, sent, **more):
        entry = {"method": self.command, "path": self.path, "range": self.headers.get("Range"), "status": status,
                 "bytes": sent, "at": time.monotonic(), "headers": dict(self.headers), **more}
        with self.server.lock:
            self.server.requests.append(entry)

    def reset(self):
        """Ends the connection so that the other side sees a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    # ---- requests ----

    def do_GET(self):
        if self.path.startswith("/-/"):
            return self.control()
        self.server.arrived(self.command, self.path)
        time.sleep(self.server.delay)
        fault = self.server.take_fault(self.command, self.path)
        if fault and self.fails_early(fault):
            return None
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path, errors="surrogateescape")
        if "list-type" in urllib.parse.parse_qs(url.query):
            return self.send_keys(path, urllib.parse.parse_qs(url.query, keep_blank_values=True))
        local = os.path.join(self.server.root, path.lstrip("/"))
        if not os.path.realpath(local).startswith(os.path.realpath(self.server.root)):
            return self.send_error_xml(404, "NoSuchKey")
        if os.path.isdir(local):
            return self.send_directory(local, url)
        try:
            with open(local, "rb") as f:
                return self.send_file(f, fault)
        except (FileNotFoundError, NotADirectoryError):
            return self.send_error_xml(404, "NoSuchKey")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return None

    do_HEAD = do_GET

    def do_POST(self):
        return self.control() if self.path.startswith("/-/") else self.send_error_xml(405, "MethodNotAllowed")

    def control(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = self.path[3:]
        if what == "fault":
            self.server.fault(**json.loads(body))
        elif what == "clear":
            self.server.clear()
        elif what == "set":
            for name, value in json.loads(body).items():
                self.server.set(name, value)
        elif what == "log":
            with self.server.lock:
                return self.answer_control(json.dumps(self.server.requests).encode())
        return self.answer_control(b"{}")

    def answer_control(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fails_early(self, fault):
        """Faults that come before the file is looked at. True: answered."""
        if fault.kind == "status":
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            self.send_error_xml(fault.status or 503, fault.code or "SlowDown", headers)
        elif fault.kind == "reset":
            self.note(0, 0)
            self.reset()
        elif fault.kind == "garbage":
            self.note(0, 0)
            self.wfile.write(b"\x00\x01 this is not HTTP\r\n\r\n")
            self.close_connection = True
        elif fault.kind == "skew":
            date = email.utils.formatdate(time.time() + fault.seconds, usegmt=True)
            self.server.date = date
            self.send_error_xml(403, "RequestTimeTooSkewed")
            self.server.date = None
        elif fault.kind == "redirect":
            self.send(fault.status or 302, {"Location": fault.location or self.path})
        elif fault.kind == "stall" and not fault.after:
            self.note(0, 0)
            self.hang(fault)
        else:
            return False
        return True

    def hang(self, fault):
        """Says nothing for so long, or until the server ends."""
        self.server.ending.wait(fault.seconds or 3600)
        self.close_connection = True

    def date_time_string(self, timestamp=None):
        return self.server.date or super().date_time_string(timestamp)

    # ---- files ----

    def range_of(self, size):
        """(first, last + 1, True) of a Range header; without one all of it."""
        m = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not m:
            return 0, size, False
        return int(m[1]), min(size, int(m[2]) + 1 if m[2] else size), True

    def send_file(self, f, fault):
        st = os.fstat(f.fileno())
        etag = self.server.etag(st)
        wanted = self.headers.get("If-Match")
        if wanted and wanted not in (etag, "*"):
            return self.send_error_xml(412, "PreconditionFailed")
        first, end, partial = self.range_of(st.st_size)
        if partial and first >= st.st_size:
            return self.send_error_xml(416, "InvalidRange")
        kind = fault.kind if fault else None
        if kind == "ignore_range":
            first, end, partial = 0, st.st_size, False
        headers = {"Last-Modified": email.utils.formatdate(st.st_mtime, usegmt=True), "ETag": etag,
                   "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if kind in ("no_etag", "untold"):
            del headers["ETag"]
        if kind == "untold":
            del headers["Last-Modified"]
        length = end - first
        if partial:
            moved = 1 if kind == "wrong_range" else 0
            headers["Content-Range"] = f"bytes {first + moved}-{end - 1 + moved}/{st.st_size}"
        if kind == "short":
            length = max(0, length - (fault.bytes or 1))
        elif kind == "long":
            length += fault.bytes or 1
        self.note(206 if partial else 200, length if self.command == "GET" else 0)
        self.send_response(206 if partial else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "GET":
            self.send_bytes(f, first, length, fault)
        return None

    def send_whole(self, f, at, length):
        """Without a copy of ours, so that benchmarks measure the other side."""
        self.wfile.flush()
        while length > 0:
            piece = min(length, self.server.pace.piece)
            self.server.pace.wait(piece)
            sent = os.sendfile(self.connection.fileno(), f.fileno(), at, piece)
            if not sent:
                raise ConnectionResetError
            at, length = at + sent, length - sent

    def send_bytes(self, f, at, length, fault):
        if not fault:
            return self.send_whole(f, at, length)
        kind = fault.kind
        stop = min(length, fault.after or 0) if kind in ("cut", "stall") else length
        f.seek(at)
        while stop > 0:
            piece = f.read(min(stop, 1 if kind == "slow" else PIECE, self.server.pace.piece))
            piece = piece or b"\0" * min(stop, PIECE)  # more than there is: a body that is too long
            if kind == "slow":
                time.sleep(fault.seconds or 1)
            self.server.pace.wait(len(piece))
            self.wfile.write(piece)
            stop -= len(piece)
        if kind == "cut":
            self.wfile.flush()
            self.reset()
        elif kind == "stall":
            self.wfile.flush()
            self.hang(fault)
        return None

    # ---- directories ----

    def send_directory(self, local, url):
        if not url.path.endswith("/"):
            return self.send(301, {"Location": url.path + "/" + ("?" + url.query if url.query else "")})
        if not self.server.pages:
            return self.send_error_xml(403, "AccessDenied")
        rows = []
        for name in sorted(os.listdir(local)):
            slash = "/" if os.path.isdir(os.path.join(local, name)) else ""
            link = urllib.parse.quote("./" + name if ":" in name else name, errors="surrogateescape") + slash
            rows.append(f'<li><a href="{html.escape(link)}">{html.escape(name, quote=True)}</a></li>')
        page = '<html><a href="?C=N;O=D">Name</a> <a href="../">up</a>' + "\n".join(rows) + "</html>"
        return self.send(200, {"Content-Type": "text/html; charset=utf-8"}, page.encode("utf-8", "surrogateescape"))

    def in_order(self, bucket, rows):
        """The order in which a page shows its rows."""
        return rows

    def send_keys(self, path, query):
        """ListObjectsV2 as far as stores need it: prefix, delimiter, continuation-token, max-keys."""
        bucket = path.strip("/")
        top = os.path.join(self.server.root, bucket)
        if not os.path.isdir(top):
            return self.send_error_xml(404, "NoSuchBucket")
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("continuation-token", [""])[0]
        most = min(int(query.get("max-keys", [PAGE_KEYS])[0]), self.server.page_keys)
        rows, seen = [], set()
        for key, st in self.server.keys(top):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix):]
            if delimiter and delimiter in rest:
                common = prefix + rest[:rest.index(delimiter) + 1]
                if common not in seen:
                    seen.add(common)
                    rows.append((common, None))
            else:
                rows.append((key, st))
        rows = [r for r in rows if r[0] > after]
        cut, rows = len(rows) > most, rows[:most]
        body = ['<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">',
                f"<Name>{bucket}</Name><Prefix>{html.escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>",
                f"<IsTruncated>{'true' if cut else 'false'}</IsTruncated>"]
        if query.get("encoding-type") == ["url"]:
            body.append("<EncodingType>url</EncodingType>")
        if cut:
            body.append(f"<NextContinuationToken>{html.escape(rows[-1][0])}</NextContinuationToken>")
        quote = urllib.parse.quote if query.get("encoding-type") == ["url"] else html.escape
        for key, st in self.in_order(bucket, rows):
            if st is None:
                body.append(f"<CommonPrefixes><Prefix>{quote(key)}</Prefix></CommonPrefixes>")
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(st.st_mtime))
            body.append(f"<Contents><Key>{quote(key)}</Key><LastModified>{when}</LastModified>"
                        f"<ETag>{html.escape(self.server.etag(st))}</ETag><Size>{st.st_size}</Size></Contents>")
        body.append("</ListBucketResult>")
        return self.send(200, {"Content-Type": "application/xml"}, "".join(body).encode())


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root, port=0, delay=0.0, rate=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.root, self.delay, self.pace = str(root), delay, Rate(rate)
        self.lock, self.ending = threading.Lock(), threading.Event()
        self.requests, self.faults, self.date = [], [], None
        self.pages, self.page_keys = True, PAGE_KEYS
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.ending.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # clients that go away are what this server is for

    def arrived(self, method, path):
        """Before anything is done about it; a test may put another function here, which may wait."""

    def etag(self, st):
        return '"' + hashlib.md5(f"{st.st_ino} {st.st_size} {st.st_mtime_ns}".encode()).hexdigest() + '"'

    def keys(self, top):
        found = []
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, top), os.stat(path)))
        return sorted(found, key=lambda f: f[0])

    def fault(self, kind, times=1, match="", method="GET", **more):
        fault = Fault(kind, times, match, method, **more)
        with self.lock:
            self.faults.append(fault)
        return fault

    def clear(self):
        with self.lock:
            self.faults.clear()

    def set(self, name, value):
        if name == "rate":
            self.pace = Rate(value)
        elif name in ("delay", "pages", "page_keys"):
            setattr(self, name, value)
        else:
            raise ValueError(name)

    def take_fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                if fault.takes(method, path):
                    fault.times -= fault.times > 0
                    fault.used += 1
                    return fault
        return None

    def log(self, match="", method=None):
        """The requests whose path matches."""
        with self.lock:
            return [r for r in self.requests if re.search(match, r["path"]) and method in (None, r["method"])]

    def forget(self):
        with self.lock:
            self.requests.clear()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0)
    a = parser.parse_args()
    with Server(a.root, a.port, a.delay, a.rate) as server:
        print("port", server.server_address[1], flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.exit(0)


if __name__ == "__main__":
    main()
