# SPDX-License-Identifier: MIT
"""A mount for the length of a `with`, and the fixtures of tests/data: for the tests in Python."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
EXPECTED = ".expected.json"
SECONDS = 600  # no command of ours takes longer on what the tests mount, on any machine

for name in [n for n in os.environ if n.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
    del os.environ[name]  # the servers of tests are here


def unshard():
    """The binary: $UNSHARD, or the newest that a build folder of the tree holds."""
    if os.environ.get("UNSHARD"):
        return os.path.abspath(os.environ["UNSHARD"])
    built = sorted(ROOT.glob("build*/cli/unshard"), key=lambda p: p.stat().st_mtime)
    if not built:
        raise SystemExit("no unshard binary: ./bootstrap build makes one, or set UNSHARD")
    return str(built[-1])


def can_mount():
    return os.access("/dev/fuse", os.R_OK | os.W_OK) and (os.geteuid() == 0 or bool(shutil.which("fusermount3")))


def run(*args, check=True, **kw):
    """One unshard command, its output as text."""
    done = subprocess.run([unshard(), *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=SECONDS, text=kw.pop("text", True), **kw)
    if check and done.returncode:
        raise AssertionError(f"unshard {' '.join(map(str, args))}: status {done.returncode}\n{done.stderr}")
    return done


def is_mounted(path):
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as f:
        return any(line.split()[1] == str(path) for line in f)


@contextlib.contextmanager
def mounted(source, *options):
    """Mounts source on a new folder, with an index of its own, and gives its path."""
    with tempfile.TemporaryDirectory(prefix="unshardfs-test-") as scratch:
        mnt = pathlib.Path(scratch) / "mnt"
        mnt.mkdir()
        run("mount", source, mnt, "-o", ",".join(["cache_dir=" + scratch + "/cache", *options]))
        try:
            yield mnt
        finally:
            gone = run("umount", mnt, check=False)
            if is_mounted(mnt):  # a file of it is still open or mapped
                subprocess.run(["umount", "-l", str(mnt)], stderr=subprocess.DEVNULL, check=False)
                raise AssertionError(f"{mnt}: still mounted after `unshard umount`: {gone.stderr}")


def fixtures(*formats):
    """(name, checkpoint, [expected files]) of each fixture of these formats (all that are read), by name."""
    formats = formats or [f["name"] for f in json.loads(run("formats", "--json").stdout)["formats"]] + ["dcp_trainers"]
    found = {}
    for expected in sorted(e for f in formats for e in (DATA / f).glob("*" + EXPECTED)):
        name = expected.name[:-len(EXPECTED)]
        while name and not (expected.parent / name).exists():  # NAME.PART.expected.json
            name = name.rpartition(".")[0]
        if not name:
            raise AssertionError(f"{expected}: no such fixture")
        found.setdefault((name, expected.parent), []).append(expected)
    return [(name, folder / name, found[name, folder]) for name, folder in sorted(found)]
