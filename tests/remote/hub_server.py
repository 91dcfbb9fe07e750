# SPDX-License-Identifier: MIT
"""A double of the Hugging Face Hub: repositories of files, their trees in pages, large files by a redirection elsewhere.

    with HubServer() as hub: hub.add("org/repo", folder); env=hub.env(); hub.log, hub.store_log

A repository is a list of commits, each a {path: bytes}; branches name one. GET /api/KIND/REPO/revision/REV,
/api/KIND/REPO/tree/REV[/DIR] with a cursor in Link, /REPO/resolve/REV/PATH. Files of more than `large` bytes are on a second
server (another port is another host for a client), behind a URL that holds for `seconds`; that server calls it a fault when
anybody shows it the Hub's token. What the Hub answers was written down after huggingface_hub 0.34 and the Hub's own pages.
"""
import email.utils
import hashlib
import http.server
import json
import pathlib
import re
import threading
import time
import urllib.parse

from s3_server import clean_env

KINDS = {"models": "", "datasets": "datasets/", "spaces": "spaces/"}
TREE = re.compile(r"/api/(models|datasets|spaces)/((?:[^/]+/)?[^/]+)/(revision|tree)/([^/]+)(?:/([^/]*))?")
FILE = re.compile(r"/(datasets/|spaces/|)((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)")


class Base(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_bytes(self, data, etag, **headers):
        """All of it, or the range that is asked for."""
        if self.headers.get("If-Match") not in (None, etag):
            return self.answer(412)
        m = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not m:
            return self.answer(200, data, ETag=etag, **headers)
        first, end = int(m[1]), min(int(m[2]) + 1, len(data))
        return self.answer(206, data[first:end], ETag=etag, Content_Range=f"bytes {first}-{end - 1}/{len(data)}", **headers)


class HubHandler(Base):
    def do_GET(self):
        hub = self.server.hub
        url = urllib.parse.urlsplit(self.path)
        hub.log.append((self.command, self.path, self.headers.get("Authorization")))
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, b'{"error":"Invalid username or password."}', X_Error_Code="RepoNotFound")
        m = TREE.fullmatch(url.path)
        if m:
            kind, repo, what, revision, folder = m.groups()
            commit = hub.commit(kind, repo, urllib.parse.unquote(revision))
            if commit is None:
                return self.answer(404, b'{"error":"Invalid rev id"}', X_Error_Code="RevisionNotFound")
            if what == "revision":
                return self.answer_json({"id": repo, "sha": commit.sha, "lastModified": "2024-02-29T12:34:56.000Z",
                                         "siblings": [{"rfilename": name} for name in [*commit.files, *hub.more_files]]})
            return self.answer_tree(commit, urllib.parse.unquote(folder or ""), urllib.parse.parse_qs(url.query))
        m = FILE.fullmatch(url.path)
        if not m:
            return self.answer(404)
        kind = next(k for k, v in KINDS.items() if v == m[1])
        commit = hub.commit(kind, m[2], urllib.parse.unquote(m[3]))
        data = commit and commit.files.get(urllib.parse.unquote(m[4]))
        if data is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        if len(data) <= hub.large:
            return self.answer_bytes(data, f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit.sha)
        return self.answer(302, Location=hub.place(data), X_Linked_Size=str(len(data)), X_Repo_Commit=commit.sha,
                           X_Linked_ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    do_HEAD = do_GET

    def answer_json(self, value, **headers):
        return self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def answer_tree(self, commit, folder, query):
        entries = commit.tree(folder, self.server.hub.large)
        if entries is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        start = int(query.get("cursor", ["0"])[0])
        page, headers = entries[start:start + self.server.hub.page], {}
        if start + len(page) < len(entries):
            path = urllib.parse.urlsplit(self.path).path
            headers["Link"] = f'<{self.server.hub.next_url or self.server.hub.url}{path}?recursive=false&cursor={start + len(page)}>; rel="next"'
        return self.answer_json(page, **headers)


class StoreHandler(Base):
    def do_GET(self):
        hub = self.server.hub
        hub.store_log.append((self.command, self.path, self.headers.get("Authorization")))
        if self.headers.get("Authorization"):
            return self.answer(400, b"only one auth mechanism allowed")
        name, _, until = self.path.lstrip("/").partition("?until=")
        if float(until or 0) < time.time():
            return self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        data = hub.blobs.get(name)
        if data is None:
            return self.answer(404)
        return self.answer_bytes(data, f'"{name[:32]}"', Last_Modified=email.utils.formatdate(1700000000, usegmt=True))

    do_HEAD = do_GET


class Commit:
    def __init__(self, files):
        self.files = dict(files)
        text = repr(sorted((k, hashlib.sha256(v).hexdigest()) for k, v in self.files.items()))
        self.sha = hashlib.sha1(text.encode()).hexdigest()

    def tree(self, folder, large):
        """The entries directly in a folder; None: there is no such one."""
        top = folder + "/" if folder else ""
        found = {}
        for path, data in self.files.items():
            if not path.startswith(top):
                continue
            name, slash, _ = path[len(top):].partition("/")
            if slash:
                found[name] = {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": top + name}
                continue
            found[name] = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
            if len(data) > large:
                found[name]["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return [found[n] for n in sorted(found)] if found or not folder else None


class HubServer:
    def __init__(self, token=None, large=4096, page=50, seconds=3600):
        self.token, self.large, self.page, self.seconds = token, large, page, seconds
        self.more_files = []  # named with a revision, and in no tree
        self.next_url = None  # where the next page is said to be, if not here
        self.repos, self.blobs, self.log, self.store_log = {}, {}, [], []
        self.servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), h) for h in (HubHandler, StoreHandler)]
        for s in self.servers:
            s.hub, s.daemon_threads = self, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.servers[0].server_address[1]}"

    def __enter__(self):
        for s in self.servers:
            threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        for s in self.servers:
            s.shutdown()
            s.server_close()

    def env(self, **more):
        """The environment of a client of this Hub; without the token."""
        return clean_env(HF_ENDPOINT=self.url, **more)

    def add(self, repo, files, kind="models", branch="main"):
        """A commit of a folder's files, or of {path: bytes}; the branch names it from now on. Returns its hash."""
        if isinstance(files, (str, pathlib.Path)):
            top = pathlib.Path(files)
            files = {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}
        commit = Commit(files)
        self.repos.setdefault((kind, repo), {}).update({branch: commit, commit.sha: commit})
        return commit.sha

    def commit(self, kind, repo, revision):
        return self.repos.get((kind, repo), {}).get(revision)

    def place(self, data):
        """Where a large file is, for a while."""
        name = hashlib.sha256(data).hexdigest()
        self.blobs[name] = data
        return f"http://127.0.0.1:{self.servers[1].server_address[1]}/{name}?until={time.time() + self.seconds}"
