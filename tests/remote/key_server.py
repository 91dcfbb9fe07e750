# SPDX-License-Identifier: MIT
"""Doubles of the places that hand out keys: AWS's token service, a container's and an instance's endpoint, Google's.

    with KeyServer() as k: k.issue("ID", "secret", "token", seconds=900); env.update(k.instance_env()); k.log

Each answers as the real one does (botocore 1.44's utils.py, the AWS and Google Cloud documentation); the next keys are
taken from the front of `k.next`, the last ones stay.
"""
import http.server
import json
import threading
import time
import urllib.parse

ROLE = "/latest/meta-data/iam/security-credentials/"


class KeyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body="", **headers):
        body = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.server.owner.log.append(("PUT", self.path, dict(self.headers)))
        if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return self.answer(400)
        return self.answer(200, "instance-session")

    def do_GET(self):
        owner = self.server.owner
        owner.log.append(("GET", self.path, dict(self.headers)))
        if self.path.startswith("/latest/"):
            if self.headers.get("X-aws-ec2-metadata-token") != "instance-session":
                return self.answer(401)
            if self.path == ROLE:
                return self.answer(200, "my role\n")
            return self.answer(200, owner.json("Token", Code="Success")) if self.path == ROLE + "my%20role" else self.answer(404)
        if self.path == "/container?id=1":
            if self.headers.get("Authorization") != "container-secret":
                return self.answer(403, '{"message":"no"}')
            return self.answer(200, owner.json("Token"))
        if self.path == "/subject":
            return self.answer(200, json.dumps({"id": owner.subject})) if self.headers.get("X-Who") == "me" else self.answer(403)
        if self.path == "/computeMetadata/v1/instance/service-accounts/default/token":
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.answer(403)
            keys = owner.take()
            return self.answer(200, json.dumps({"access_token": keys["token"], "expires_in": keys["seconds"],
                                                "token_type": "Bearer"}), Metadata_Flavor="Google")
        return self.answer(404)

    def google_token(self, form):
        """Google's token servers: each kind of grant with what it has to prove."""
        owner, kind = self.server.owner, form.get("grant_type", "")
        good = {"refresh_token": lambda: (form["client_id"], form["client_secret"], form["refresh_token"]) == ("client", "client-secret", owner.refresh),
                "urn:ietf:params:oauth:grant-type:jwt-bearer": lambda: owner.check_assertion(form["assertion"]),
                "urn:ietf:params:oauth:grant-type:token-exchange": lambda: (form["subject_token"], form["audience"]) == (owner.subject, "//pool")}
        if kind not in good or not good[kind]():
            return self.answer(400, '{"error":"invalid_grant","error_description":"Bad"}')
        return self.answer(200, json.dumps({"access_token": owner.take()["token"], "expires_in": 3600, "token_type": "Bearer"}))

    def act_as(self, asked):
        """IAM's service for credentials: generateAccessToken."""
        owner = self.server.owner
        if self.headers.get("Authorization") != "Bearer source-token" or asked["lifetime"] != "3600s" or not asked["scope"]:
            return self.answer(403, '{"error":{"code":403,"status":"PERMISSION_DENIED"}}')
        keys = owner.take()
        return self.answer(200, json.dumps({"accessToken": keys["token"], "expireTime": keys["until"]}))

    def do_POST(self):
        owner = self.server.owner
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["Content-Type"] == "application/json":
            owner.log.append(("POST", self.path, {**dict(self.headers), "json": json.loads(body)}))
            return self.act_as(json.loads(body)) if self.path.endswith(":generateAccessToken") else self.answer(404)
        form = dict(urllib.parse.parse_qsl(body))
        owner.log.append(("POST", self.path, {**dict(self.headers), "form": form}))
        if self.path == "/google":
            return self.google_token(form)
        action = form.get("Action")
        if action == "AssumeRoleWithWebIdentity" and form.get("WebIdentityToken") != "identity":
            return self.answer(400, "<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>")
        keys = owner.take()
        fields = (("AccessKeyId", keys["id"]), ("SecretAccessKey", keys["secret"]), ("SessionToken", keys["token"]),
                  ("Expiration", keys["until"]))
        text = "".join(f"<{n}>{v}</{n}>" for n, v in fields)
        return self.answer(200, f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result>'
                                f"<Credentials>{text}</Credentials></{action}Result></{action}Response>")


class KeyServer:
    def __init__(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), KeyHandler)
        self.server.owner, self.server.daemon_threads = self, True
        self.next, self.log, self.lock = [], [], threading.Lock()
        self.refresh, self.subject = "refresh-1", "subject-1"
        self.check_assertion = lambda text: False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()

    def issue(self, key_id, secret, token, seconds=3600):
        self.next.append({"id": key_id, "secret": secret, "token": token, "seconds": seconds})

    def take(self):
        with self.lock:
            keys = self.next.pop(0) if len(self.next) > 1 else self.next[0]
        return {**keys, "until": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + keys["seconds"]))}

    def json(self, token_name, **more):
        keys = self.take()
        return json.dumps({"AccessKeyId": keys["id"], "SecretAccessKey": keys["secret"], token_name: keys["token"],
                           "Expiration": keys["until"], **more})

    def instance_env(self):
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url + "/", "AWS_EC2_METADATA_DISABLED": "false"}

    def container_env(self):
        return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": self.url + "/container?id=1",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN": "container-secret"}

    def identity_env(self, token_file):
        return {"AWS_WEB_IDENTITY_TOKEN_FILE": token_file, "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
                "AWS_ENDPOINT_URL_STS": self.url}
