# SPDX-License-Identifier: MIT
"""The fault server with a strict S3 face: signatures are computed anew, regions and expired keys refused as S3 does.

    with S3Server(root) as s: ... env=s.env(), s.credentials["ID"] = (secret, token), s.expired.add("ID"), s.region = "eu-1"

Buckets are the folders of root. Path style, and virtual-host style for Host: BUCKET.localhost:PORT. The signature's rules are
written down here for the second time, after AWS's documentation and not after our signer.

A folder called NAME--ZONE--x-s3 is a directory bucket (S3 Express): its requests are signed with the keys of a session that
CreateSession made for it, for the service s3express; prefixes of listings end in a slash, and names come in no order.
"""
import base64
import hashlib
import hmac
import os
import re
import time
import urllib.parse

from fault_server import Handler, Server

EMPTY = hashlib.sha256(b"").hexdigest()
DIRECTORY = re.compile(r".{3,}--[a-z0-9-]+--x-s3")
FORM = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([^/,]+)/([^/,]+)/aws4_request, ?"
                  r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})")


def quoted(text):
    return urllib.parse.quote(urllib.parse.unquote_to_bytes(text), safe="-_.~")


def signature(method, target, headers, names, scope, secret):
    path, _, query = target.partition("?")
    pairs = sorted((quoted(p.partition("=")[0]), quoted(p.partition("=")[2])) for p in query.split("&") if p)
    canonical = "\n".join([method, path, "&".join(f"{a}={b}" for a, b in pairs),
                           *(f"{n}:{' '.join(headers[n].split())}" for n in names), "", ";".join(names),
                           headers["x-amz-content-sha256"]])
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], "/".join(scope),
                      hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for part in (*scope, text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


class S3Handler(Handler):
    def do_GET(self):
        s3 = self.server
        if self.path.startswith("/-/"):
            return super().do_GET()
        refusal = self.refusal({k.lower(): v for k, v in self.headers.items()})
        s3.codes.append(refusal)
        told = {"x-amz-bucket-region": s3.region} if s3.region else {}
        bucket, _, key = self.named()
        if refusal:
            status = {"ExpiredToken": 400, "InvalidToken": 400, "AuthorizationHeaderMalformed": 400,
                      "AuthenticationRequired": 401}.get(refusal, 403)
            return self.send_error_xml(status, refusal, told)
        host = self.headers["Host"].split(":")[0]
        if host.endswith(".localhost"):
            self.path = "/" + host[:-len(".localhost")] + self.path
        if not os.path.isdir(os.path.join(s3.root, bucket)):
            return self.send_error_xml(404, "NoSuchBucket")
        if not key and self.command == "HEAD":
            return self.send(200, told)
        if DIRECTORY.fullmatch(bucket) and not key:
            query = urllib.parse.parse_qs(self.path.partition("?")[2], keep_blank_values=True)
            if "session" in query:
                return self.send(200, {"Content-Type": "application/xml"}, s3.make_session(bucket))
            if query.get("prefix", [""])[0][-1:] not in ("", "/") or query.get("delimiter", ["/"]) != ["/"]:
                return self.send_error_xml(400, "InvalidRequest")
        if not s3.has_key(self.headers, bool(key)):
            return self.send_error_xml(400, "InvalidRequest")
        if key and os.path.isdir(os.path.join(s3.root, bucket, urllib.parse.unquote(key))):
            return self.send_error_xml(404, "NoSuchKey")  # no folders in a bucket
        return super().do_GET()

    do_HEAD = do_GET

    def named(self):
        """(bucket, "/", key), as the request has them."""
        host, path = self.headers["Host"].split(":")[0], self.path.partition("?")[0]
        if host.endswith(".localhost"):
            return host[:-len(".localhost")], "/", path.lstrip("/")
        return path.lstrip("/").partition("/")

    def in_order(self, bucket, rows):
        return rows[::-1] if DIRECTORY.fullmatch(bucket) else rows

    def refusal(self, headers):
        """The code of S3's error, or None."""
        s3, given = self.server, headers.get("authorization")
        if given is None:
            return None if s3.public else "AccessDenied"
        if given.startswith("Bearer "):
            return None if s3.bearer and given == "Bearer " + s3.bearer else "AuthenticationRequired"
        m = FORM.fullmatch(given)
        if not m:
            return "AuthorizationHeaderMalformed"
        key_id, date, region, service, names, got = m.groups()
        bucket, _, key = self.named()
        directory = bool(DIRECTORY.fullmatch(bucket))
        of_session = directory and (key or self.path.partition("?")[2] not in ("session", "session="))
        known = s3.sessions.get(bucket, {}) if of_session else s3.credentials
        if key_id not in known:
            return "InvalidAccessKeyId"
        secret, token = known[key_id]
        names = names.split(";")
        if names != sorted(names) or "host" not in names or any(n not in names for n in headers if n.startswith("x-amz-")):
            return "AccessDenied"
        if (s3.region and region != s3.region) or service != ("s3express" if directory else "s3"):
            return "AuthorizationHeaderMalformed"
        if headers["x-amz-content-sha256"] != EMPTY or not headers["x-amz-date"].startswith(date):
            return "AccessDenied"
        if signature(self.command, self.path, headers, names, (date, region, service, "aws4_request"), secret) != got:
            return "SignatureDoesNotMatch"
        if headers.get("x-amz-s3session-token" if of_session else "x-amz-security-token") != token:
            return "InvalidToken"
        if of_session and "x-amz-security-token" in headers:
            return "InvalidToken"
        return "ExpiredToken" if key_id in s3.expired else None


class S3Server(Server):
    """`credentials`: {id: (secret, token or None)}; `expired`: ids; `region`: the bucket's, None: any; `codes`: what each
    request was refused with, None: let in; `public`: who comes without a signature is let in; `bearer`: a token that Google would have given;
    `sessions`: {bucket: {id: (secret, token)}} of directory buckets, each for `session_seconds`."""

    def __init__(self, root, **more):
        super().__init__(root, **more)
        self.RequestHandlerClass = S3Handler
        self.credentials, self.expired, self.codes = {"AKIDTEST": ("secret/+=", None)}, set(), []
        self.region, self.public, self.bearer = None, False, None
        self.sessions, self.session_seconds = {}, 300
        self.customer_key = None  # under which all objects lie

    def has_key(self, headers, wanted):
        """Whether the key of the objects came where one is asked for, and nowhere else."""
        name = "x-amz-server-side-encryption-customer-"
        got = [headers.get(name + n) for n in ("algorithm", "key", "key-MD5")]
        google = [headers.get("x-goog-encryption-" + n) for n in ("algorithm", "key", "key-sha256")]
        if not wanted or not self.customer_key:
            return not any(got + google)
        text, md5 = base64.b64encode(self.customer_key).decode(), hashlib.md5(self.customer_key).digest()
        sha = hashlib.sha256(self.customer_key).digest()
        return got == ["AES256", text, base64.b64encode(md5).decode()] or google == ["AES256", text, base64.b64encode(sha).decode()]

    def make_session(self, bucket):
        """The answer to CreateSession."""
        with self.lock:
            made = self.sessions.setdefault(bucket, {})
            name = f"SESSION{len(made)}"
            made[name] = (f"session-secret{len(made)}", f"session-token{len(made)}+/=")
            secret, token = made[name]
            until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.session_seconds))
        return ('<?xml version="1.0" encoding="UTF-8"?><CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>'
                f"<SessionToken>{token}</SessionToken><SecretAccessKey>{secret}</SecretAccessKey><AccessKeyId>{name}</AccessKeyId>"
                f"<Expiration>{until}</Expiration></Credentials></CreateSessionResult>").encode()

    def env(self, key_id="AKIDTEST", **more):
        """The environment of a client that has these keys (None: none) and no other settings."""
        env = clean_env(AWS_ENDPOINT_URL_S3=self.url)
        if key_id:
            secret, token = self.credentials[key_id]
            env.update(AWS_ACCESS_KEY_ID=key_id, AWS_SECRET_ACCESS_KEY=secret)
            if token:
                env["AWS_SESSION_TOKEN"] = token
        env.update(more)
        return env


def clean_env(**more):
    """Ours without what tells clients of clouds who they are: no files, no instance to ask."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HF_", "GOOGLE_", "GS_", "CLOUDSDK_"))}
    env.update(AWS_CONFIG_FILE="/dev/null", AWS_SHARED_CREDENTIALS_FILE="/dev/null", AWS_EC2_METADATA_DISABLED="true",
               NO_GCE_CHECK="true", HF_TOKEN_PATH="/dev/null", NO_PROXY="*")
    env.update(more)
    return env
