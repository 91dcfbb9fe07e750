# SPDX-License-Identifier: MIT
"""moto's S3 server in a process of its own: a reader that maps a file of ours waits with Python's lock held.

Prints its port, then a line of JSON for each request that did not come from boto3: [method, target, signed as botocore would].
"""
import json
import logging
import sys
import threading

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import moto.server
import werkzeug.serving

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDMOTO", "AWS_SECRET_ACCESS_KEY": "moto/secret+=", "AWS_SESSION_TOKEN": "moto+token/=="}


def expected_signature(environ):
    """Of the headers that the client says it signed."""
    headers = {k[5:].replace("_", "-").lower(): v for k, v in environ.items() if k.startswith("HTTP_")}
    names = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    url = f"http://{headers['host']}{environ['REQUEST_URI']}"
    request = botocore.awsrequest.AWSRequest(environ["REQUEST_METHOD"], url, {n: headers[n] for n in names})
    request.context["timestamp"] = headers["x-amz-date"]
    signer = botocore.auth.S3SigV4Auth(botocore.credentials.Credentials(*KEYS.values()), "s3", "us-east-1")
    return signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)


class Checked:
    def __init__(self, app):
        self.app, self.lock = app, threading.Lock()

    def __call__(self, environ, start_response):
        if "Boto" not in environ.get("HTTP_USER_AGENT", ""):
            given = environ.get("HTTP_AUTHORIZATION", "")
            good = bool(given) and given.endswith("Signature=" + expected_signature(environ))
            with self.lock:
                print(json.dumps([environ["REQUEST_METHOD"], environ["REQUEST_URI"], good]), flush=True)
        return self.app(environ, start_response)


def main():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Checked(moto.server.DomainDispatcherApplication(moto.server.create_backend_app))
    server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
