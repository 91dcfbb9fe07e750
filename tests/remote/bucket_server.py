# SPDX-License-Identifier: MIT
"""A small S3 server in memory, with multipart uploads, conditional writes and faults on purpose.

`with BucketServer() as s:` serves every bucket on a free port of the loopback device; s.env() is
what unshard needs to find it. s.fault(...) makes requests fail, s.log lists what came. Objects
are s.objects[key] = (bytes, tag), uploads s.uploads[id]. It is strict where S3 is: the sums of
bodies, parts in order, sizes, ids. A bucket called NAME--ZONE--x-s3 is a directory bucket (S3
Express): it takes a session's keys, the signed hash of a body and no MD5, and lists in no order.
"""
import base64
import hashlib
import http.server
import re
import socket
import struct
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape, unescape

KEY, SECRET = "test-key", "test-secret"
PART_LEAST = 5 << 20


class Fault:
    """The n-th to last request that matches gets this answer."""

    def __init__(self, method, pattern, how, first, count):
        self.method, self.pattern, self.how = method, re.compile(pattern), how
        self.first, self.left = first, count

    def strikes(self, method, target):
        if self.method not in (None, method) or not self.pattern.search(target) or self.left == 0:
            return None
        self.first -= 1
        if self.first >= 0:
            return None
        self.left -= 1
        return self.how


class Refused(Exception):
    def __init__(self, status, code, message=""):
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do(self):
        owner = self.server.owner
        length = int(self.headers.get("Content-Length") or 0)
        how = owner.strike(self.command, self.path)
        if how == "reset":
            return self.reset()
        if callable(how):  # e.g. kills the client, before or after the deed
            how = how()
            if how == "reset":
                return self.reset()
        body = self.rfile.read(length)
        if len(body) != length:
            self.close_connection = True
            return None
        try:
            if self.command in ("PUT", "POST") and not (self.headers.get("Content-Length") or "").isdigit():
                raise Refused(411, "MissingContentLength")
            if isinstance(how, int):
                raise Refused(how, {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}.get(how, "Error"))
            if how == "expired" or not owner.is_known(self.headers):
                raise Refused(400, "ExpiredToken")
            with owner.lock:
                status, headers, answer = owner.answer(self.command, self.path, self.headers, body)
        except Refused as e:
            status, headers = e.status, {}
            answer = f"<Error><Code>{e.code}</Code><Message>{escape(e.message)}</Message></Error>".encode()
        if how == "lost":  # it was done, but nobody hears of it
            return self.reset()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle(self):
        try:
            super().handle()
        except (ConnectionError, OSError, ValueError):
            pass

    def finish(self):
        try:
            super().finish()
        except (ConnectionError, OSError, ValueError):
            pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def process_request(self, request, client_address):
        with self.owner.lock:
            self.owner.open += 1
            self.owner.last = client_address
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.owner.lock:
                self.owner.open -= 1


class BucketServer:
    def __init__(self, bucket="bucket", part_least=PART_LEAST, conditional=True):
        self.bucket, self.part_least, self.conditional = bucket, part_least, conditional
        self.objects, self.uploads, self.log, self.faults, self.history = {}, {}, [], [], []
        self.endless = False  # lists of uploads go on, and always at the same place
        self.keys, self.open, self.last = {KEY}, 0, None  # connections, and whose was the last one
        self.directory, self.sessions = bucket.endswith("--x-s3"), 0
        self.copies = True  # by itself
        self.old_sessions = False  # are they good as well as the newest, as AWS's are until they end?
        self.customer_key = None  # in base64: under which all objects lie
        self.lock, self.ids, self.delay = threading.RLock(), 0, 0
        self.httpd = Server(("127.0.0.1", 0), Handler)
        self.httpd.owner = self

    def __enter__(self):
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.httpd.shutdown()
        self.httpd.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def env(self):
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null",
                "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}

    def fault(self, how, method=None, pattern="", first=0, count=1):
        """`how`: a status; "reset" (before it is done), "lost" (after), "expired"; or a function that gives one."""
        with self.lock:
            self.faults.append(Fault(method, pattern, how, first, count))

    def strike(self, method, target):
        if self.delay:
            time.sleep(self.delay)
        with self.lock:
            self.log.append((method, target))
            for f in self.faults:
                how = f.strikes(method, target)
                if how:
                    return how
        return None

    def is_known(self, headers):
        found = re.search(r"Credential=([^/]+)/", headers.get("Authorization", ""))
        if found and "x-amz-s3session-token" in headers:
            good = [f"session{n}" for n in range(1 if self.old_sessions else self.sessions, self.sessions + 1)]
            return found.group(1) == headers["x-amz-s3session-token"] and found.group(1) in good
        return bool(found) and found.group(1) in self.keys

    def wait_idle(self):
        """Until what a client that died has sent is done with."""
        with socket.create_connection(self.httpd.server_address) as ours:  # those that came before are taken before
            while self.last != ours.getsockname():
                time.sleep(0.01)
        while self.open:
            time.sleep(0.01)

    def tree(self, prefix):
        """{name below prefix: bytes}"""
        with self.lock:
            return {k[len(prefix):]: v[0] for k, v in self.objects.items() if k.startswith(prefix)}

    # ---- requests ----

    def answer(self, method, target, headers, body):
        path, _, query = target.partition("?")
        q = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        if bucket != self.bucket:
            raise Refused(404, "NoSuchBucket")
        md5 = headers.get("Content-MD5")
        if md5 and base64.b64decode(md5) != hashlib.md5(body).digest():
            raise Refused(400, "BadDigest")
        sha = headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if self.directory and (md5 or sha == "UNSIGNED-PAYLOAD"):
            raise Refused(400, "InvalidRequest", "the sum of a directory bucket is the hash that is signed")
        by_session = "x-amz-s3session-token" in headers
        if by_session != (self.directory and query != "session="):
            raise Refused(403, "AccessDenied", "by a session, or not by one")
        if sha != "UNSIGNED-PAYLOAD" and sha != hashlib.sha256(body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch")
        if headers.get("x-amz-server-side-encryption-customer-key") != (self.customer_key if key and method != "DELETE" else None):
            raise Refused(400, "InvalidRequest", "the object's key")
        if not key:
            return self.of_bucket(method, q)
        if "uploadId" in q or "uploads" in q:
            return self.of_upload(method, key, q, headers, body)
        return self.of_object(method, key, headers, body)

    def of_bucket(self, method, q):
        if method == "HEAD":
            return 200, {"x-amz-bucket-region": "us-east-1"}, b""
        if "session" in q and self.directory:
            return self.make_session()
        if self.directory and q.get("prefix", "")[-1:] not in ("", "/"):
            raise Refused(400, "InvalidRequest", "a prefix ends in a slash")
        if "uploads" in q:
            return self.list_uploads(q)
        return self.list_objects(q)

    def make_session(self):
        """Only the newest is good."""
        self.sessions += 1
        name = f"session{self.sessions}"
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
        return 200, {}, (f"<CreateSessionResult><Credentials><AccessKeyId>{name}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
                         f"<SessionToken>{name}</SessionToken><Expiration>{until}</Expiration></Credentials></CreateSessionResult>").encode()

    def list_objects(self, q):
        prefix, delimiter, after = q.get("prefix", ""), q.get("delimiter"), q.get("continuation-token", "")
        most, rows, seen, last = int(q.get("max-keys", 1000)), [], set(), ""
        truncated = False
        for key in sorted(self.objects):
            if not key.startswith(prefix) or key <= after:
                continue
            rest = key[len(prefix):]
            common = delimiter and delimiter in rest and prefix + rest.split(delimiter)[0] + delimiter
            if common and (common in seen or common <= after):
                last = key
                continue
            if len(rows) == most:
                truncated = True
                break
            name = urllib.parse.quote(common or key, safe="/")
            if common:
                seen.add(common)
                rows.append(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
            else:
                data = self.objects[key][0]
                rows.append(f"<Contents><Key>{name}</Key><LastModified>2026-11-20T10:00:00.000Z</LastModified>"
                            f"<ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag><Size>{len(data)}</Size></Contents>")
            last = key
        if self.directory:
            rows.reverse()
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if truncated else ""
        text = (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{self.bucket}</Name><Prefix>{urllib.parse.quote(prefix, safe='/')}</Prefix>"
                f"<EncodingType>url</EncodingType><KeyCount>{len(rows)}</KeyCount>"
                f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>")
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def list_uploads(self, q):
        rows = "".join(f"<Upload><Key>{escape(u['key'])}</Key><UploadId>{i}</UploadId></Upload>"
                       for i, u in sorted(self.uploads.items()) if u["key"].startswith(q.get("prefix", "")))
        more = "true</IsTruncated><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>i</NextUploadIdMarker>" if self.endless else \
            "false</IsTruncated>"
        return 200, {}, f"<ListMultipartUploadsResult><IsTruncated>{more}{rows}</ListMultipartUploadsResult>".encode()

    def appear(self, key, data, tag, headers):
        if headers.get("If-None-Match") and not self.conditional:
            raise Refused(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
        if headers.get("If-None-Match") == "*" and key in self.objects:
            raise Refused(412, "PreconditionFailed")
        self.objects[key] = (data, tag)
        self.history.append(key)

    def of_object(self, method, key, headers, body):
        if method == "PUT" and "x-amz-copy-source" in headers:
            return self.copy_object(key, headers)
        if method == "PUT":
            self.appear(key, body, headers.get("x-amz-meta-unshard-save"), headers)
            return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b""
        if key not in self.objects:
            raise Refused(404, "NoSuchKey")
        data, tag = self.objects[key]
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        out = {"ETag": etag, "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"}
        if tag:
            out["x-amz-meta-unshard-save"] = tag
        if headers.get("If-Match") not in (None, etag):
            raise Refused(412, "PreconditionFailed")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if method == "GET" and wanted:
            first, last = int(wanted.group(1)), min(int(wanted.group(2)), len(data) - 1)
            if first >= len(data):
                raise Refused(416, "InvalidRange")
            out["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return 206, out, data[first:last + 1]
        if method == "HEAD":
            out["Content-Length"] = str(len(data))
        return 200, out, data

    def copy_object(self, key, headers):
        bucket, _, source = urllib.parse.unquote(headers["x-amz-copy-source"]).lstrip("/").partition("/")
        if bucket != self.bucket or source not in self.objects:
            raise Refused(404, "NoSuchKey")
        data, tag = self.objects[source]
        if not self.copies:
            raise Refused(501, "NotImplemented")
        self.appear(key, data, tag, headers)
        return 200, {}, f"<CopyObjectResult><ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag></CopyObjectResult>".encode()

    def of_upload(self, method, key, q, headers, body):
        if method == "POST" and "uploads" in q:
            self.ids += 1
            self.uploads[f"id.{self.ids}"] = {"key": key, "tag": headers.get("x-amz-meta-unshard-save"), "parts": {}}
            return 200, {}, (f"<InitiateMultipartUploadResult><Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key>"
                             f"<UploadId>id.{self.ids}</UploadId></InitiateMultipartUploadResult>").encode()
        up = self.uploads.get(q.get("uploadId"))
        if not up or up["key"] != key:
            raise Refused(404, "NoSuchUpload")
        if method == "PUT":
            number = int(q["partNumber"])
            if not 1 <= number <= 10000:
                raise Refused(400, "InvalidArgument")
            up["parts"][number] = body
            return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        if method == "GET":
            return self.list_parts(up, q)
        if method == "DELETE":
            del self.uploads[q["uploadId"]]
            return 204, {}, b""
        return self.complete(key, up, q["uploadId"], headers, body)

    def list_parts(self, up, q):
        marker, most = int(q.get("part-number-marker", 0)), 7  # pages are short, so that there are several
        numbers = [n for n in sorted(up["parts"]) if n > marker]
        rows = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{hashlib.md5(up['parts'][n]).hexdigest()}&quot;</ETag>"
                       f"<Size>{len(up['parts'][n])}</Size></Part>" for n in numbers[:most])
        more = f"<NextPartNumberMarker>{numbers[most - 1]}</NextPartNumberMarker>" if len(numbers) > most else ""
        text = f"<ListPartsResult>{more}<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{rows}</ListPartsResult>"
        return 200, {}, text.encode()

    def complete(self, key, up, name, headers, body):
        asked = [(int(n), unescape(e, {"&quot;": '"'}).strip('"')) for n, e in re.findall(
            r"<Part><PartNumber>(\d+)</PartNumber><ETag>([^<]*)</ETag></Part>", body.decode())]
        if not asked or [n for n, _ in asked] != sorted({n for n, _ in asked}):
            raise Refused(400, "InvalidPartOrder")
        for n, etag in asked:
            if n not in up["parts"] or hashlib.md5(up["parts"][n]).hexdigest() != etag:
                raise Refused(400, "InvalidPart")
            if n != asked[-1][0] and len(up["parts"][n]) < self.part_least:
                raise Refused(400, "EntityTooSmall")
        self.appear(key, b"".join(up["parts"][n] for n, _ in asked), up["tag"], headers)
        del self.uploads[name]
        return 200, {}, b"<CompleteMultipartUploadResult><ETag>&quot;x&quot;</ETag></CompleteMultipartUploadResult>"
