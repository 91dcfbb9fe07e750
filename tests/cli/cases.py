#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Small inputs that were rebuilt from public reports, each with what is right for it.

    cases.py [commands | mounts] [NAME ...]      UNSHARD: the program

tests/cases/cases.json has one object per input: `name` (its folder), `why`, and `checks`. Kinds of checks:

    argv               a command: its exit status (`exit`: a number, or "not 0"), what it must say, what it must never say
    tensors            what `ls --json` lists and `cat` gives: key, dtype, shape, SHA-256; `of`: which path of the input
    mount              the input mounted: `loadable` are the files that a loader of all *.safetensors reads, `same_file` are
                       bytes, `contains` are words in files, `expected` is a table for check_mount.py, or a refusal in words

`chmod` and `as` of a case change its copy's modes and who runs the program. The inputs are copied: nothing is written beside them.
"""
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
INPUTS = os.path.join(HERE, "..", "cases")
CHECK_MOUNT = os.path.join(HERE, "..", "check_mount.py")
UNSHARD = os.path.abspath(os.environ["UNSHARD"])
SECONDS = 120  # of one command; all take less than one
NOBODY = 65534
SKIPPED = 77


class Wrong(Exception):
    """A check that does not hold, in words."""


class Input:
    """A case's copy, and the program run on it."""

    def __init__(self, case, place):
        self.case, self.place, self.made = case, place, 0
        self.path = os.path.join(place, "src")
        shutil.copytree(os.path.join(INPUTS, case["name"]), self.path, symlinks=True)
        for below, mode in case.get("chmod", {}).items():
            os.chmod(os.path.join(self.path, below), int(mode, 8))
        self.env = {**os.environ, "XDG_CACHE_HOME": os.path.join(place, "cache"), "LC_ALL": "C.UTF-8"}

    def fill(self, text):
        self.made += "{out}" in text
        return text.format(src=self.path, out=os.path.join(self.place, f"out{self.made}"), checkpoints=os.path.join(INPUTS, "checkpoints"))

    def run(self, *words):
        command = [UNSHARD, *(self.fill(w) for w in words)]
        if self.case.get("as") == "nobody":
            command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command, "-o", "index=memory"]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=self.env, check=False)
        return done.returncode, done.stdout, (done.stdout + done.stderr).decode("utf-8", "replace")


def options_of(check):
    return [word for o in check.get("options", []) for word in ("-o", o)]


def check_command(given, check):
    status, _, said = given.run(*check["argv"])
    wanted = check.get("exit", 0)
    ended = 0 < status <= 128 if wanted == "not 0" else status == wanted
    if not ended:
        raise Wrong(f"exit status {status}, not {wanted}: {said[-400:]}")
    if not re.search(check.get("says", ""), said, re.I | re.S):
        raise Wrong(f"does not say {check['says']!r}: {said[-400:]}")
    if "never" in check and re.search(check["never"], said, re.I | re.S):
        raise Wrong(f"says {check['never']!r}: {said[-400:]}")


def listed(given, check):
    status, out, said = given.run("ls", check.get("of", "{src}"), "--json", *options_of(check))
    if status:
        raise Wrong(f"ls: exit status {status}: {said[-400:]}")
    table = json.loads(out).get("tensors")
    if table is None:
        raise Wrong("ls: it is no checkpoint")
    rows = {row["key"]: row for row in table}
    if check.get("only_model"):
        rows = {key: row for key, row in rows.items() if row["role"] == "model"}
    return {key: row for key, row in rows.items() if key in check["tensors"]} if check.get("at_least") else rows


def check_tensors(given, check):
    rows, wanted = listed(given, check), check["tensors"]
    if rows.keys() != wanted.keys():
        raise Wrong(f"missing {sorted(wanted.keys() - rows.keys())[:5]}, too many {sorted(rows.keys() - wanted.keys())[:5]}")
    for key, (dtype, shape, digest) in wanted.items():
        if [rows[key]["dtype"], rows[key]["shape"]] != [dtype, shape]:
            raise Wrong(f"{key} is {rows[key]['dtype']} {rows[key]['shape']}, not {dtype} {shape}")
        status, data, said = given.run("cat", *options_of(check), "--", check.get("of", "{src}"), key)
        if status or hashlib.sha256(data).hexdigest() != digest:
            raise Wrong(f"{key}: its {len(data)} bytes are others {said[-200:] if status else ''}")


def loaded_by_glob(mount):
    """What vLLM and SGLang read: all *.safetensors, but for those that the index does not name."""
    names = {os.path.basename(p) for p in glob.glob(mount + "/*.safetensors")}
    index = mount + "/model.safetensors.index.json"
    if os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            names &= set(json.load(f)["weight_map"].values())
    return sorted(names)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def check_mounted(given, check, mount):
    if "expected" in check:
        done = subprocess.run([sys.executable, CHECK_MOUNT, mount, given.fill(check["expected"])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(f"check_mount.py: {(done.stdout + done.stderr)[-400:]}")
    if "loadable" in check and loaded_by_glob(mount) != check["loadable"]:
        raise Wrong(f"loaders read {loaded_by_glob(mount)}, not {check['loadable']}")
    for name, source in check.get("same_file", {}).items():
        if not os.path.exists(f"{mount}/{name}") or read(f"{mount}/{name}") != read(given.fill(source)):
            raise Wrong(f"{name} is not {source}, byte for byte")
    for name, words in check.get("contains", {}).items():
        if not re.search(words, read(f"{mount}/{name}").decode()):
            raise Wrong(f"{name} has nothing of {words!r}")


def check_mount(given, check):
    mount = os.path.join(given.place, "mnt")
    os.makedirs(mount, exist_ok=True)
    options = options_of({"options": [given.fill(o) for o in check.get("options", [])]})
    status, _, said = given.run("mount", check["mount"], mount, *options)
    if status and check.get("or_refused") and said.strip():
        return
    if status:
        raise Wrong(f"mount: exit status {status}: {said[-400:]}")
    try:
        check_mounted(given, check, mount)
    finally:
        given.run("umount", mount)


KINDS = {"argv": check_command, "tensors": check_tensors, "mount": check_mount}


def kind_of(check):
    return next(kind for kind in KINDS if kind in check)


def run_case(case, mounts, scratch):
    """Why it is wrong, None where it is right, False where nothing of it could be checked here."""
    checks = [c for c in case["checks"] if (kind_of(c) == "mount") == mounts]
    if not checks or (case.get("as") and os.getuid() != 0):
        return False
    place = tempfile.mkdtemp(dir=scratch)
    os.chmod(place, 0o755)
    given = Input(case, place)
    try:
        for check in checks:
            KINDS[kind_of(check)](given, check)
    except Wrong as e:
        return str(e)
    return None


def main():
    what = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in ("commands", "mounts") else None
    names = sys.argv[1 + bool(what):]
    if what == "mounts" and not os.path.exists("/dev/fuse"):
        print("1..0 # SKIP there is no /dev/fuse")
        sys.exit(SKIPPED)
    with open(os.path.join(INPUTS, "cases.json"), encoding="utf-8") as f:
        cases = [c for c in json.load(f) if not names or c["name"] in names]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ufs-cases-") as scratch:
        os.chmod(scratch, 0o755)
        for case in cases:
            for mounts in [False, True] if what is None else [what == "mounts"]:
                why = run_case(case, mounts, scratch)
                if why is False:
                    continue
                failed += why is not None
                print(f"{'not ok' if why else 'ok'} - {case['name']}", flush=True)
                if why:
                    print(f"# {case['why']}\n# {why}".replace("\n", "\n# "))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
