# SPDX-License-Identifier: MIT
"""Checkpoints in buckets: fixtures through s3://, odd keys, long listings, regions, and every place that keys come from."""
import base64
import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, UNSHARD, Mount, check_mount, fails, main, make_tensors, read_all, safetensors_image, same, wait_for, write_checkpoint, write_file  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(ROOT / "remote"))

from key_server import KeyServer  # noqa: E402
from s3_server import S3Server, clean_env  # noqa: E402

FIXTURES = ("torch_dcp/dcp_fsdp2_adamw_2r", "hf_dcp/hfdcp_row_5", "zarr/zarr2_arrays", "megatron/mcore05_zarr_tp2_pp2_flat", "torch_file/composer_like",
            "safetensors/hf_sharded_f32")


def unshard(env, *args, status=0):
    done = subprocess.run([UNSHARD, *args], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    if done.returncode != status:
        raise AssertionError(f"unshard {args}: status {done.returncode}\n{done.stderr.decode()}")
    return done


def bucket_with_one(t, name="b"):
    """A bucket with one small checkpoint, `run`; its tensors."""
    tensors = make_tensors("s3")
    write_checkpoint(f"{t}/root/{name}/run", tensors)
    return tensors


def cat_one(env, url, tensors, **more):
    key = next(iter(tensors))
    same("cat", unshard(env, "cat", url, key, **more).stdout, tensors[key][2])


def test_fixtures(t):
    with S3Server(DATA) as s3:
        for i, name in enumerate(FIXTURES):
            bucket, _, prefix = name.partition("/")
            with Mount(f"s3://{bucket}/{prefix}", f"{t}/mnt{i}", env=s3.env()) as m:
                check_mount(m.path, DATA / (name + ".expected.json"))
        same("refusals", {c for c in s3.codes if c}, set())


def test_commands(t):
    source = str(DATA / "torch_dcp/dcp_fsdp2_adamw_2r")
    with S3Server(DATA) as s3:
        env, url = s3.env(), "s3://torch_dcp/dcp_fsdp2_adamw_2r"
        local = {verb: unshard(env, verb, source, "--json").stdout for verb in ("ls", "info")}
        same("ls", json.loads(unshard(env, "ls", url, "--json").stdout)["tensors"], json.loads(local["ls"])["tensors"])
        info, want = (json.loads(text) for text in (unshard(env, "info", url, "--json").stdout, local["info"]))
        same("format", info["format"], want["format"])
        same("cat", unshard(env, "cat", url, "model.head.weight").stdout, unshard(env, "cat", source, "model.head.weight").stdout)
        same("a bucket's root", b"dcp_fsdp2_adamw_2r" in unshard(env, "ls", "s3://torch_dcp").stdout, True)


def test_one_object(t):
    tensors = make_tensors("one")
    os.makedirs(t + "/root/b/d")
    write_file(t + "/root/b/d/model.safetensors", safetensors_image(tensors))
    write_file(t + "/root/b/top.safetensors", safetensors_image(tensors))
    with S3Server(t + "/root") as s3:
        cat_one(s3.env(), "s3://b/d/model.safetensors", tensors)
        cat_one(s3.env(), "s3://b/top.safetensors", tensors)
        done = unshard(s3.env(), "ls", "s3://b/d/none", status=3)
        assert b"no such object or prefix" in done.stderr, done.stderr
        done = unshard(s3.env(), "ls", "s3://nothing/x", status=3)
        assert b"no such bucket" in done.stderr, done.stderr


ODD = ("a b+c%20d&e=f", "\u00e9\u4e2d\U0001f600", "q?x#y;z", "(~)!*'@:$,", "tab\there", "new\nline", "<&\"'>")


def test_odd_keys(t):
    tensors = make_tensors("odd", count=2)
    for name in ODD:
        write_checkpoint(f"{t}/root/b/{name}", tensors)
        write_file(f"{t}/root/b/{name}/note {name}.txt", name.encode())
    with S3Server(t + "/root") as s3, Mount("s3://b", t + "/mnt", env=s3.env()) as m:
        same("names", set(os.listdir(m.path)), set(ODD))
        for name in ODD:
            key = next(iter(tensors))
            same(name, read_all(f"{m.path}/{name}/raw/{key}"), tensors[key][2])
            same(name + ": note", read_all(f"{m.path}/{name}/note {name}.txt"), name.encode())
        cat_one(s3.env(), "s3://b/" + ODD[0], tensors)
        same("refusals", {c for c in s3.codes if c}, set())


def test_long_listing(t):
    tensors = bucket_with_one(t)
    for i in range(1500):
        write_file(f"{t}/root/b/run/note-{i:05}.txt", b"%d" % i)
    with S3Server(t + "/root") as s3, Mount("s3://b/run", t + "/mnt", env=s3.env()) as m:
        notes = [n for n in os.listdir(m.path) if n.startswith("note-")]
        same("notes", sorted(notes), [f"note-{i:05}.txt" for i in range(1500)])
        same("the last", read_all(m / "note-01499.txt"), b"1499")
        pages = len(s3.log("continuation-token"))
        assert pages >= 1, f"{pages} pages that go on"
        key = list(tensors)[-1]
        same("tensor", read_all(f"{m.path}/raw/{key}"), tensors[key][2])


def test_round_trips_of_a_bucket(t):
    """The listing, which tells whether it is there at all, and the bytes (the first time with the header before them)."""
    tensors = make_tensors("trips", count=3, rows=4096)
    write_checkpoint(t + "/root/b/run", tensors)
    with S3Server(t + "/root") as s3:
        def measured(turn, cache):
            before = len(s3.log())
            with Mount("s3://b/run", f"{t}/mnt-{turn}", f"cache_dir={t}/{cache},cache_size=0", env=s3.env()) as m:
                for key, (_, _, data) in tensors.items():
                    with open(m / f"raw/{key}", "rb", buffering=0) as f:
                        same(key, f.read(16), data[:16])
                    if key == next(iter(tensors)):
                        asked = [r["path"] for r in s3.log()[before:]]
            print(f"# {turn}: {asked}")
            return len(asked) == 2 and "list-type" in asked[0] and "list-type" not in asked[1]

        # What was asked is asked again where a machine takes seconds to go on.
        measured("cold", "cache")
        assert any(measured(f"warm{i}", "cache") for i in range(4)), s3.log()


def test_replaced_objects(t):
    """Who has them open gets the old bytes or an error, and who opens them later the new ones: tensors and side files."""
    old, new = make_tensors("old", rows=8192), make_tensors("new", rows=8192)
    key = next(iter(old))
    write_checkpoint(t + "/root/b/run", old)
    write_file(t + "/root/b/run/notes.bin", b"o" * 3_000_000)
    with S3Server(t + "/root") as s3, Mount("s3://b", t + "/mnt", "refresh=1,cache_size=0", env=s3.env()) as m:
        with open(m / "run/notes.bin", "rb", buffering=0) as note, open(f"{m.path}/run/raw/{key}", "rb", buffering=0) as raw:
            same("note", note.read(10), b"o" * 10)
            same("tensor", raw.read(10), old[key][2][:10])
            write_checkpoint(t + "/root/b/run", new)
            write_file(t + "/root/b/run/notes.bin", b"n" * 3_000_000)
            note.seek(2_900_000)
            fails("the rest of the note", errno.ESTALE, lambda: note.read(10))
            raw.seek(900_000)
            try:
                same("the rest of the tensor", raw.read(10), old[key][2][900_000:900_010])
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO), e
        wait_for("the new tensor", PATIENCE, lambda: reads_as(f"{m.path}/run/raw/{key}", new[key][2]))
        wait_for("the new note", PATIENCE, lambda: reads_as(m / "run/notes.bin", b"n" * 3_000_000))


def reads_as(path, want):
    try:
        return read_all(path) == want
    except OSError:
        return False


def test_virtual_host(t):
    tensors = bucket_with_one(t, "bucket")
    write_file(t + "/config", b"[default]\ns3 =\n  addressing_style = virtual\n")
    with S3Server(t + "/root") as s3:
        env = s3.env(AWS_CONFIG_FILE=t + "/config", AWS_ENDPOINT_URL_S3=s3.url.replace("127.0.0.1", "localhost"))
        cat_one(env, "s3://bucket/run", tensors)
        hosts = {r["headers"]["Host"].split(":")[0] for r in s3.log()}
        same("hosts", hosts, {"bucket.localhost"})


def test_region(t):
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3:
        s3.region = "eu-test-7"
        cat_one(s3.env(AWS_REGION="us-west-2"), "s3://b/run", tensors)
        same("refusals", [c for c in s3.codes if c], ["AuthorizationHeaderMalformed"])
        s3.codes.clear()
        cat_one(s3.env(AWS_DEFAULT_REGION="eu-test-7"), "s3://b/run", tensors)
        same("refusals", [c for c in s3.codes if c], [])


def test_public_and_private(t):
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3:
        done = unshard(s3.env(None), "ls", "s3://b/run", status=5)
        assert b"AWS_PROFILE" in done.stderr and b"\n" not in done.stderr.strip(), done.stderr
        s3.public = True
        cat_one(s3.env(None), "s3://b/run", tensors)
        cat_one(s3.env(AWS_NO_SIGN_REQUEST="1"), "s3://b/run", tensors)
        s3.public = False
        wrong = s3.env(AWS_SECRET_ACCESS_KEY="not-the-secret-key")
        done = unshard(wrong, "ls", "s3://b/run", status=5)
        assert b"SignatureDoesNotMatch" in done.stderr and b"not-the-secret-key" not in done.stderr, done.stderr


# ---- where keys come from ----

def let_in(t, s3, env, tensors, by, url="s3://b/run"):
    """A cat works, and all its requests are signed with this key."""
    before = len(s3.log())
    cat_one(env, url, tensors)
    signed = {r["headers"].get("Authorization", "").partition("Credential=")[2].partition("/")[0] for r in s3.log()[before:]}
    same("signed by", signed, {by})


def test_profiles_and_process(t):
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3:
        s3.credentials = {"AKIDFILE": ("file-secret", None), "AKIDPROCESS": ("process-secret", "process/token=="),
                          "AKIDTWO": ("two-secret", None)}
        write_file(t + "/credentials", b"[default]\naws_access_key_id = AKIDFILE\naws_secret_access_key = file-secret\n")
        write_file(t + "/keys.json", json.dumps({"Version": 1, "AccessKeyId": "AKIDPROCESS", "SecretAccessKey": "process-secret",
                                                 "SessionToken": "process/token=="}).encode())
        write_file(t + "/config", f"[profile two]\naws_access_key_id = AKIDTWO\naws_secret_access_key = two-secret\n"
                                  f"region = eu-x\nendpoint_url = {s3.url}\n"
                                  f"[profile run]\ncredential_process = cat '{t}/keys.json'\nservices = here\n"
                                  f"[services here]\ns3 =\n  endpoint_url = {s3.url}\n".encode())
        files = {"AWS_CONFIG_FILE": t + "/config", "AWS_SHARED_CREDENTIALS_FILE": t + "/credentials"}
        let_in(t, s3, s3.env(None, **files), tensors, "AKIDFILE")
        let_in(t, s3, clean_env(AWS_PROFILE="two", **files), tensors, "AKIDTWO")
        assert any("/eu-x/s3/" in r["headers"].get("Authorization", "") for r in s3.log()), "the profile's region"
        let_in(t, s3, clean_env(AWS_PROFILE="run", **files), tensors, "AKIDPROCESS")


def test_keys_of_machines(t):
    tensors = bucket_with_one(t)
    write_file(t + "/identity", b"identity\n")
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        s3.credentials["AKIDROLE"] = ("role-secret", "role/token+=")
        keys.issue("AKIDROLE", "role-secret", "role/token+=")
        let_in(t, s3, s3.env(None, **keys.instance_env()), tensors, "AKIDROLE")
        same("instance", [(m, p) for m, p, _ in keys.log[:2]],
             [("PUT", "/latest/api/token"), ("GET", "/latest/meta-data/iam/security-credentials/")])
        let_in(t, s3, s3.env(None, **keys.container_env()), tensors, "AKIDROLE")
        write_file(t + "/token", b"container-secret\n")
        let_in(t, s3, s3.env(None, **{**keys.container_env(), "AWS_CONTAINER_AUTHORIZATION_TOKEN": "wrong",
                                      "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": t + "/token"}), tensors, "AKIDROLE")
        keys.log.clear()
        let_in(t, s3, s3.env(None, **keys.identity_env(t + "/identity")), tensors, "AKIDROLE")
        same("token service", [p for _, p, _ in keys.log], ["/"])
        assert "Authorization" not in keys.log[0][2]
        same("role", keys.log[0][2]["form"]["RoleArn"], "arn:aws:iam::1:role/r")


def test_instance_behind_a_proxy(t):
    """What only this machine may know is not asked for by way of a proxy."""
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        s3.credentials["AKIDROLE"] = ("role-secret", "role-token")
        keys.issue("AKIDROLE", "role-secret", "role-token")
        near = keys.url.replace("127.0.0.1", "localhost")
        env = s3.env(None, **keys.instance_env(), http_proxy="http://127.0.0.1:9", no_proxy="127.0.0.1")
        let_in(t, s3, {**env, "AWS_EC2_METADATA_SERVICE_ENDPOINT": near}, tensors, "AKIDROLE")
        far = s3.env(None, http_proxy="http://127.0.0.1:9", no_proxy="nowhere", UNSHARD_HTTP_TRIES="1", AWS_NO_SIGN_REQUEST="1")
        unshard(far, "ls", "s3://b/run", status=3)  # so the proxy is one


def test_what_is_refused_by_name(t):
    for url, status, why in (("s3://arn:aws:s3::1:accesspoint/a.mrap", 2, b"ARN"), ("s3://arn:aws:s3-outposts:eu-1:1:outpost/a", 2, b"ARN"),
                             ("s3://arn:aws:s3:eu-1:1:accesspoint", 2, b"ARN"), ("s3://arn:aws:s3:eu-1:1:accesspoint/a.b/x", 2, b"ARN"), ("s3://", 3, b"no bucket's name"),
                             ("s3://b--x-s3/run", 3, b"no directory bucket's name"), ("s3://b----x-s3", 3, b"no directory bucket's name"), ("s3://a..b/x", 3, b"no bucket's name"),
                             ("s3://B@d/x", 3, b"no bucket's name")):
        done = unshard(clean_env(), "ls", url, status=status)
        assert why in done.stderr, done.stderr
    for endpoint in ("ftp://x", "http://u:p@x", "http://"):
        done = unshard(clean_env(AWS_ENDPOINT_URL=endpoint), "ls", "s3://b/x", status=3)
        assert b"endpoint must be" in done.stderr, done.stderr


def test_access_point(t):
    """By its ARN: the host is made of its name and account, its region is the one that signs."""
    tensors = bucket_with_one(t, "ap-123456789012")
    with S3Server(t + "/root") as s3:
        s3.region = "eu-9"
        env = s3.env(AWS_ENDPOINT_URL_S3=s3.url.replace("127.0.0.1", "localhost"), AWS_REGION="us-1")
        for form in ("accesspoint/ap", "accesspoint:ap"):
            cat_one(env, f"s3://arn:aws:s3:eu-9:123456789012:{form}/run", tensors)
        same("refusals", {c for c in s3.codes if c}, set())
        with Mount("s3://arn:aws:s3:eu-9:123456789012:accesspoint/ap", t + "/mnt", env=env) as m:
            key = next(iter(tensors))
            same("raw", read_all(f"{m.path}/run/raw/{key}"), tensors[key][2])


# ---- directory buckets ----

EXPRESS = "runs--usw2-az1--x-s3"


def test_directory_bucket(t):
    """By the keys of a session that the user's own make, in the region that the name tells; names come in no order."""
    tensors = bucket_with_one(t, EXPRESS)
    for i in range(30):
        write_checkpoint(f"{t}/root/{EXPRESS}/many/step{i}", make_tensors(i, count=1))
    with S3Server(t + "/root") as s3:
        s3.region, s3.page_keys = "us-west-2", 4
        s3.credentials["AKIDROLE"] = ("role-secret", "role-token")
        for id in ("AKIDTEST", "AKIDROLE"):
            s3.sessions.clear()
            cat_one(s3.env(id, AWS_REGION="eu-1"), f"s3://{EXPRESS}/run", tensors)
            same("refusals", {c for c in s3.codes if c}, set())
            same("sessions", len(s3.sessions[EXPRESS]), 1)
        with Mount(f"s3://{EXPRESS}", t + "/mnt", env=s3.env("AKIDROLE")) as m:
            same("listed", sorted(os.listdir(m / "many")), sorted(f"step{i}" for i in range(30)))
            for key, (_, _, data) in make_tensors(7, count=1).items():
                same(key, read_all(m / f"many/step7/raw/{key}"), data)
        same("refusals", {c for c in s3.codes if c}, set())


def test_directory_bucket_without_rights(t):
    bucket_with_one(t, EXPRESS)
    with S3Server(t + "/root") as s3:
        done = unshard(s3.env(None), "ls", f"s3://{EXPRESS}/run", status=5)
        assert b"no credentials were found" in done.stderr, done.stderr
        s3.credentials["AKIDOTHER"] = ("another", None)
        done = unshard(s3.env("AKIDOTHER", AWS_SECRET_ACCESS_KEY="wrong"), "ls", f"s3://{EXPRESS}/run", status=5)
        assert b"CreateSession says 403 SignatureDoesNotMatch" in done.stderr and b"AWS_SECRET_ACCESS_KEY" in done.stderr, done.stderr
        for url, why in ((f"s3://{EXPRESS}/none", b"no such object or prefix"), ("s3://none--usw2-az1--x-s3", b"no such bucket")):
            done = unshard(s3.env(), "ls", url, status=3)
            assert why in done.stderr, done.stderr


def test_sessions_end(t):
    """They are made anew before their time is over, and when the store refuses one; nobody notices."""
    tensors = bucket_with_one(t, EXPRESS)
    with S3Server(t + "/root") as s3:
        s3.session_seconds = 3
        with Mount(f"s3://{EXPRESS}", t + "/mnt", "cache_size=0,refresh=1", env=s3.env()) as m:
            first, *_, last = tensors
            same("before", read_all(m / f"run/raw/{first}"), tensors[first][2])
            wait_for("new sessions", PATIENCE, lambda: os.listdir(m.path) and len(s3.sessions[EXPRESS]) > 2, 0.3)
            same("refusals before", {c for c in s3.codes if c}, set())
            with s3.lock:
                short, s3.session_seconds = len(s3.sessions[EXPRESS]), 300

            def is_long():
                os.listdir(m.path)
                used = [re.search(r"Credential=SESSION(\d+)/", r["headers"]["Authorization"]) for r in s3.log()]
                return int([u for u in used if u][-1][1]) >= short  # the last request may be one that asks for a session
            wait_for("a long session", PATIENCE, is_long, 0.3)
            time.sleep(4.1)  # younger keys count as just made
            s3.expired.update(s3.sessions[EXPRESS])
            write_checkpoint(f"{t}/root/{EXPRESS}/later", make_tensors("later"))
            wait_for("what came later", PATIENCE, lambda: os.path.isdir(m / "later"))
            same("after", read_all(m / f"run/raw/{last}"), tensors[last][2])
            same("refusals after", {c for c in s3.codes if c}, {"ExpiredToken"})


# ---- keys of the user's own ----

def test_customer_key(t):
    """It goes with what asks for objects and with nothing else, signed, and never where others listen."""
    tensors, key = bucket_with_one(t), bytes(range(32))
    write_file(t + "/raw", key)
    write_file(t + "/text", base64.b64encode(key) + b"\n")
    with S3Server(t + "/root") as s3:
        s3.customer_key = key
        for name in ("/raw", "/text"):
            cat_one(s3.env(UNSHARD_CUSTOMER_KEY=t + name), "s3://b/run", tensors)
        unshard(s3.env(UNSHARD_CUSTOMER_KEY=t + "/raw"), "info", "s3://b/run/" + min(n for n in os.listdir(t + "/root/b/run") if "safetensors" in n))
        same("refusals", {c for c in s3.codes if c}, set())
        done = unshard(s3.env(XDG_CACHE_HOME=t + "/cache"), "cat", "s3://b/run", next(iter(tensors)), status=3)
        assert b"UNSHARD_CUSTOMER_KEY" in done.stderr, done.stderr
        s3.public = True
        cat_one(s3.env(None, AWS_NO_SIGN_REQUEST="1", UNSHARD_CUSTOMER_KEY=t + "/raw"), "s3://b/run", tensors)
        cat_one(clean_env(STORAGE_EMULATOR_HOST=s3.url, UNSHARD_CUSTOMER_KEY=t + "/raw"), "gs://b/run", tensors)
    for content in (b"", b"k" * 31, b"k" * 33, base64.b64encode(key)[:-2], base64.b64encode(key + b"k"), b"!" * 43 + b"="):
        write_file(t + "/bad", content)
        done = unshard(clean_env(UNSHARD_CUSTOMER_KEY=t + "/bad"), "ls", "s3://b/run", status=3)
        assert b"is no key" in done.stderr, (content, done.stderr)
    done = unshard(clean_env(UNSHARD_CUSTOMER_KEY=t + "/none"), "ls", "s3://b/run", status=3)
    assert b"/none: No such file" in done.stderr, done.stderr
    done = unshard(clean_env(UNSHARD_CUSTOMER_KEY=t + "/raw", AWS_ENDPOINT_URL="http://far.example"), "ls", "s3://b/run", status=5)
    assert b"would be told to all on the way" in done.stderr, done.stderr


# ---- sign-ins that are left to the aws command ----

def test_sign_in_refused(t):
    """A profile with AWS SSO or a role is refused with the way around it, and that way works."""
    tensors = bucket_with_one(t)
    write_file(t + "/keys.json", json.dumps({"Version": 1, "AccessKeyId": "AKIDROLE", "SecretAccessKey": "role-secret",
                                             "SessionToken": "role-token"}).encode())
    write_file(t + "/aws", f"#!/bin/sh\n[ \"$*\" = 'configure export-credentials --profile me' ] && cat {t}/keys.json\n".encode())
    os.chmod(t + "/aws", 0o755)
    for setting in (b"sso_session = s\nsso_account_id = 1\nsso_role_name = r\n[sso-session s]\nsso_start_url = https://start\n",
                    b"role_arn = arn:r\nsource_profile = keys\n[profile keys]\naws_access_key_id = K\naws_secret_access_key = s\n"):
        with S3Server(t + "/root") as s3:
            s3.credentials["AKIDROLE"] = ("role-secret", "role-token")
            s3.public = True
            env = s3.env(None, AWS_PROFILE="me", AWS_CONFIG_FILE=t + "/config", PATH=t + ":" + os.environ["PATH"])
            write_file(t + "/config", b"[profile me]\n" + setting)
            done = unshard(env, "ls", "s3://b/run", status=5)
            hint = re.search(rb"credential_process = (aws [a-z -]+)", done.stderr)
            assert b"profile me has" in done.stderr and hint, done.stderr
            same("no request", len(s3.log()), 0)
            write_file(t + "/config", b"[profile me]\n" + setting + b"[profile too]\n" + hint[0] + b"\n")
            let_in(t, s3, {**env, "AWS_PROFILE": "too"}, tensors, "AKIDROLE")


def test_keys_that_expire(t):
    """Under a mount: the store calls them expired, new ones are fetched, nobody notices."""
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        for n in ("1", "2"):
            s3.credentials["AKID" + n] = ("secret" + n, "token" + n)
            keys.issue("AKID" + n, "secret" + n, "token" + n)
        with Mount("s3://b", t + "/mnt", "cache_size=0,refresh=1", env=s3.env(None, **keys.instance_env())) as m:
            first, *_, last = tensors
            same("before", read_all(f"{m.path}/run/raw/{first}"), tensors[first][2])
            same("refusals before", {c for c in s3.codes if c}, set())
            time.sleep(2.1)  # younger keys count as just fetched
            s3.expired.add("AKID1")
            write_checkpoint(t + "/root/b/later", make_tensors("later"))
            wait_for("what came later", PATIENCE, lambda: os.path.isdir(m / "later"))
            same("refusals after", {c for c in s3.codes if c}, {"ExpiredToken"})
            for key, (_, _, data) in make_tensors("later").items():
                same(key, read_all(f"{m.path}/later/raw/{key}"), data)
            same("after", read_all(f"{m.path}/run/raw/{last}"), tensors[last][2])
            signed = s3.log()[-1]["headers"]["Authorization"]
            assert "Credential=AKID2/" in signed, signed


def test_keys_that_soon_expire(t):
    """Keys of a short life are renewed before the store refuses any."""
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        for n in range(30):
            s3.credentials[f"AKID{n}"] = (f"secret{n}", f"token{n}")
            keys.issue(f"AKID{n}", f"secret{n}", f"token{n}", seconds=3)
        with Mount("s3://b", t + "/mnt", "refresh=1", env=s3.env(None, **keys.instance_env())) as m:
            wait_for("new keys", PATIENCE, lambda: os.listdir(m.path) and len(keys.next) <= 28, 0.3)
            key = next(iter(tensors))
            same("at the end", read_all(f"{m.path}/run/raw/{key}"), tensors[key][2])
        same("refusals", {c for c in s3.codes if c}, set())


# ---- gs:// ----

def test_google(t):
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        s3.credentials["GOOG1"] = ("hmac-secret", None)
        hmac = clean_env(STORAGE_EMULATOR_HOST=s3.url, GS_ACCESS_KEY_ID="GOOG1", GS_SECRET_ACCESS_KEY="hmac-secret")
        let_in(t, s3, hmac, tensors, "GOOG1", "gs://b/run")
        with Mount("gs://b/run", t + "/mnt", env=hmac) as m:
            key = next(iter(tensors))
            same("raw", read_all(f"{m.path}/raw/{key}"), tensors[key][2])
        s3.bearer = "google-token"
        cat_one(clean_env(STORAGE_EMULATOR_HOST=s3.url, GOOGLE_OAUTH_ACCESS_TOKEN="google-token"), "gs://b/run", tensors)
        done = unshard(clean_env(STORAGE_EMULATOR_HOST=s3.url, GOOGLE_OAUTH_ACCESS_TOKEN="old-token"), "ls", "gs://b/run", status=5)
        assert b"old-token" not in done.stderr, done.stderr
        keys.issue("", "", "google-token")
        instance = clean_env(STORAGE_EMULATOR_HOST=s3.url, GCE_METADATA_HOST=keys.url[7:], NO_GCE_CHECK="false")
        cat_one(instance, "gs://b/run", tensors)
        same("asked", keys.log[0][1], "/computeMetadata/v1/instance/service-accounts/default/token")


def unpadded(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def google_check(t, keys):
    """Is this an assertion by the key of t, as RFC 7523 and Google want it?"""
    def check(assertion):
        signed, _, signature = assertion.rpartition(".")
        head, claims = (json.loads(unpadded(part)) for part in signed.split("."))
        write_file(t + "/signed", signed.encode())
        write_file(t + "/signature", unpadded(signature))
        subprocess.run(["openssl", "dgst", "-sha256", "-verify", t + "/public.pem", "-signature", t + "/signature", t + "/signed"], check=True, capture_output=True)
        same("head", head, {"alg": "RS256", "typ": "JWT", "kid": "k1"})
        assert claims["iss"] == "me@project" and claims["aud"] == "https://oauth2.googleapis.com/token" and claims["exp"] - claims["iat"] == 3600 and "devstorage" in claims["scope"], claims
        return abs(claims["iat"] - time.time()) < 60
    keys.check_assertion = check


def google_file(t, **fields):
    write_file(t + "/google.json", json.dumps(fields).encode())
    return t + "/google.json"


def test_google_accounts(t):
    """Files of credentials: each kind's request is held against what Google's servers want."""
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        s3.bearer, url = "google-token", keys.url + "/google"
        keys.issue("", "", "google-token")
        env = clean_env(STORAGE_EMULATOR_HOST=s3.url, GOOGLE_APPLICATION_CREDENTIALS=t + "/google.json")
        subprocess.run(["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", t + "/key.pem"], check=True, capture_output=True)
        subprocess.run(["openssl", "pkey", "-in", t + "/key.pem", "-pubout", "-out", t + "/public.pem"], check=True, capture_output=True)
        google_check(t, keys)
        service = {"type": "service_account", "client_email": "me@project", "private_key": read_all(t + "/key.pem").decode(), "private_key_id": "k1", "token_uri": url}
        google_file(t, **service)
        cat_one(env, "gs://b/run", tensors)
        user = {"type": "authorized_user", "client_id": "client", "client_secret": "client-secret", "refresh_token": "refresh-1", "token_uri": url}
        google_file(t, **user)
        cat_one(env, "gs://b/run", tensors)
        act = keys.url + "/v1/projects/-/serviceAccounts/x:generateAccessToken"
        keys.next.insert(0, {"id": "", "secret": "", "token": "source-token", "seconds": 3600})
        google_file(t, type="impersonated_service_account", service_account_impersonation_url=act, source_credentials=user, delegates=["d"])
        cat_one(env, "gs://b/run", tensors)
        same("delegates", keys.log[-1][2]["json"]["delegates"], ["d"])
        write_file(t + "/subject", b"subject-1\n")
        other = {"type": "external_account", "audience": "//pool", "subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": url}
        google_file(t, **other, credential_source={"file": t + "/subject"})
        cat_one(env, "gs://b/run", tensors)
        keys.next.insert(0, {"id": "", "secret": "", "token": "source-token", "seconds": 3600})
        google_file(t, **other, service_account_impersonation_url=act, credential_source={
            "url": keys.url + "/subject", "headers": {"X-Who": "me"}, "format": {"type": "json", "subject_token_field_name": "id"}})
        cat_one(env, "gs://b/run", tensors)


def test_google_accounts_refused(t):
    bucket_with_one(t)
    with S3Server(t + "/root") as s3, KeyServer() as keys:
        s3.bearer = "google-token"
        env = clean_env(STORAGE_EMULATOR_HOST=s3.url, GOOGLE_APPLICATION_CREDENTIALS=t + "/google.json")
        user = {"type": "authorized_user", "client_id": "client", "client_secret": "hush-1", "refresh_token": "hush-2", "token_uri": keys.url + "/google"}
        for fields, status, why in (
                (user, 5, b"400 invalid_grant (gcloud auth application-default login)"), ({**user, "refresh_token": ""}, 3, b"no refresh_token"),
                ({**user, "token_uri": "http://example.com/token"}, 5, b"not https"), ({"type": "gdch_service_account"}, 2, b"not read"),
                ({"type": "service_account", "client_email": "e", "private_key": "hush", "token_uri": keys.url + "/google"}, 3, b"no key of RSA"),
                ({"type": "external_account", "audience": "a", "subject_token_type": "s", "token_url": keys.url, "credential_source": {"environment_id": "aws1"}}, 2, b"AWS")):
            google_file(t, **fields)
            done = unshard(env, "ls", "gs://b/run", status=status)
            assert why in done.stderr and b"hush" not in done.stderr, done.stderr
        os.remove(t + "/google.json")
        assert b"google.json: No such file" in unshard(env, "ls", "gs://b/run", status=3).stderr
        s3.public = True
        unshard(clean_env(STORAGE_EMULATOR_HOST=s3.url, GOOGLE_APPLICATION_CREDENTIALS=t + "/google.json", GS_NO_SIGN_REQUEST="YES"), "ls", "gs://b/run")


def test_no_secret_shows(t):
    """Neither in what is mounted, nor in messages, nor where programs look at mounts."""
    tensors = bucket_with_one(t)
    with S3Server(t + "/root") as s3:
        s3.credentials["AKIDHUSH"] = ("hush-secret", "hush-token")
        env = s3.env("AKIDHUSH", UNSHARD_LOG="debug")
        with Mount("s3://b/run", t + "/mnt", env=env) as m:
            same("read", read_all(f"{m.path}/raw/{next(iter(tensors))}"), tensors[next(iter(tensors))][2])
            seen = read_all("/proc/self/mountinfo") + read_all(f"/proc/{m.process.pid}/cmdline") + read_all(m / ".unshard/checkpoint.json")
            s3.expired.add("AKIDHUSH")
            unshard({**env, "XDG_CACHE_HOME": t + "/other"}, "cat", "s3://b/run", "no-such-key", status=3)
            seen += m.messages().encode()
        for secret in (b"hush-secret", b"hush-token", b"Signature="):
            assert secret not in seen, secret


if __name__ == "__main__":
    main(globals())
