#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Replays docs/mistakes.md: each row's command, in the situation that the row is about, says what the row says it does.

    UNSHARD=build/cli/unshard tests/cli/mistakes.py            compares
    UNSHARD=build/cli/unshard tests/cli/mistakes.py --write    writes the rows anew (as root: else rows are missing)

A row whose situation cannot be had here (no root, a GPU that is there) is neither run nor compared, and counted as skipped.
"""
import contextlib
import ctypes
import functools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "mount"), str(ROOT / "tests" / "remote")]
from hub_server import HubServer  # noqa: E402
from mountlib import PATIENCE, UNSHARD, fresh_directory, is_mounted, unmount_hard, wait_for  # noqa: E402
from s3_server import S3Server, clean_env  # noqa: E402

PAGE = ROOT / "docs" / "mistakes.md"
DATA = ROOT / "tests" / "data"
HEAD = "| mistake | typed | answer | exit |\n|---|---|---|---|\n"
DROP = "--drop optimizer,other,objects"
TINY_DEV = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m {mode} /dev/fuse c 10 229"
AS_NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"


class Place:
    """What the rows find: a checkpoint `step`, copies of it with one fault each, servers, an environment."""

    def __init__(self, t, s3, hub):
        self.t, self.s3, self.hub = t, s3, hub
        self.env = {**clean_env(), "XDG_CACHE_HOME": t + "/cache", "LC_ALL": "C", "PATH": f"{t}/bin:{os.environ['PATH']}",
                    "TERM": "dumb"}
        fixture = DATA / "torch_dcp/dcp_fsdp2_adamw_2r"
        for name in ("step", "run/step100", "run/step200", "half", "miss", "junk", "locked"):
            shutil.copytree(fixture, f"{t}/{name}", copy_function=shutil.copyfile)
        os.remove(t + "/half/.metadata")
        os.remove(t + "/miss/__1_0.distcp")
        pathlib.Path(t + "/junk/.metadata").write_bytes(b"no pickle")
        os.chmod(t + "/locked/.metadata", 0)
        for name in ("mnt", "empty", "full", "bin", "keras"):
            os.mkdir(f"{t}/{name}")
        pathlib.Path(t + "/keras/model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
        for name, text in (("file", ""), ("full/notes.txt", ""), ("none.json", '{"rules": []}\n'),
                           ("seven.json", '{"unshard_map": 1, "rules": [{"from": "{name}", "role": "any", "split": {"axis": 0, "groups": 7, "parts": '
                                          '[{"to": "{name}.a"}, {"to": "{name}.b"}]}}]}\n'),
                           ("comma.json", '{"unshard_map": 1,\n "rules": [\n  {"from": "a", "to": "b",}\n ]}\n')):
            pathlib.Path(f"{t}/{name}").write_text(text, encoding="utf-8")
        os.symlink(UNSHARD, t + "/bin/unshard")

    def run(self, command, env=None):
        """`env`: what is other than in our own environment."""
        other = {k: v for k, v in (env or {}).items() if os.environ.get(k) != v}
        return subprocess.run(["/bin/bash", "-c", command], cwd=self.t, env={**self.env, **other}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=600, check=False)

    def shown(self, text):
        """Without what is another in each run."""
        text = text.replace(self.t, "/here").replace(UNSHARD, "unshard")
        text = re.sub(r"127\.0\.0\.1:(?!1\b)\d+", "HOST", text)
        text = re.sub(r"(resolved|no connection): .*? \((\d+ tr)", r"\1 (\2", text)  # libcurl's words differ
        text = re.sub(r"\d+ tr(y|ies), [0-9.]+ s", r"N tries, N s", text)
        text = re.sub(r"\(there are /[^)]*\)", "(there are /here/mnt)", text)  # others' mounts of ours too
        text = re.sub(r"\d+ bytes are needed, \d+ are free", "N bytes are needed, N are free", text)
        text = re.sub(r"^/bin/bash: line 1: ", "bash: ", text)
        text = re.sub(r"in use by \S+ \(pid \d+\)", "in use by PROGRAM (pid N)", text)
        return " / ".join(text.strip().splitlines())


# ---- situations ----

@contextlib.contextmanager
def plain(p):
    yield {}


@contextlib.contextmanager
def mounted(p):
    done = p.run("unshard mount step mnt")
    assert done.returncode == 0, done.stderr
    try:
        yield {}
    finally:
        unmount_hard(p.t + "/mnt")


@contextlib.contextmanager
def busy(p):
    with mounted(p):
        fd = os.open(p.t + "/mnt/model.safetensors", os.O_RDONLY)
        try:
            yield {}
        finally:
            os.close(fd)


@contextlib.contextmanager
def dead(p):
    with subprocess.Popen([UNSHARD, "mount", "step", "mnt", "-f"], cwd=p.t, env=p.env) as server:
        wait_for("the mount", PATIENCE, lambda: is_mounted(p.t + "/mnt"))
        os.stat(p.t + "/mnt")
        server.send_signal(signal.SIGKILL)
        server.wait()
        try:
            yield {}
        finally:
            unmount_hard(p.t + "/mnt")


@contextlib.contextmanager
def writable(p):
    done = p.run("unshard mount run mnt -o rw")
    assert done.returncode == 0, done.stderr
    try:
        yield {}
    finally:
        unmount_hard(p.t + "/mnt")


@contextlib.contextmanager
def incomplete(p):
    """The first half of a model has arrived in mnt/new, and the program that wrote it has ended."""
    source = tempfile.mkdtemp(prefix="saves", dir=p.t)
    done = p.run(f"unshard mount {source} mnt -o rw,save=hf && mkdir mnt/new")
    assert done.returncode == 0, done.stderr
    image = (DATA / "safetensors/hf_single_bf16/model.safetensors").read_bytes()
    pathlib.Path(p.t + "/mnt/new/model.safetensors").write_bytes(image[:len(image) // 2])
    try:
        yield {}
    finally:
        unmount_hard(p.t + "/mnt")


@contextlib.contextmanager
def bucket(p, **more):
    yield {**p.s3.env(), **more}


def keys(**more):
    return lambda p: bucket(p, **more)


@contextlib.contextmanager
def no_keys(p):
    yield p.s3.env(None)


@contextlib.contextmanager
def expired(p):
    p.s3.expired.add("AKIDTEST")
    yield p.s3.env()
    p.s3.expired.clear()


@contextlib.contextmanager
def hub(p):
    yield p.hub.env()


@contextlib.contextmanager
def private_hub(p):
    p.hub.token = "hf_right"
    yield {**p.hub.env(), "HF_TOKEN": ""}
    p.hub.token = None


def private(setup):
    """In mounts of its own, as root, and then the command as somebody else."""
    def wrap(command):
        return f"unshare -m /bin/bash -c {shlex.quote(f'{setup} && {AS_NOBODY} {command}')}"
    return wrap


def root_in(setup):
    return lambda command: f"unshare -m /bin/bash -c {shlex.quote(f'{setup} && {command}')}"


def has_own_mounts():
    """Not where / is no mount point (a bare chroot), or the kernel allows none."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def stranger(command):
    return f"{AS_NOBODY} {command}"


def has_cuda():
    try:
        ctypes.CDLL("libcuda.so.1")
        return True
    except OSError:
        return False


# The mistake, what is typed, and: `at`, the situation; `by`, how it is run (then root is needed); `unless`, when not.
ROWS = [
    ("**Mounting**",),
    ("a typing mistake in the command", "unshard mont step mnt"),
    ("the mount point is forgotten", "unshard mount step"),
    ("the mount point is not there", "unshard mount step nowhere"),
    ("the mount point is a file", "unshard mount step file"),
    ("the source is not there", "unshard mount nostep mnt"),
    ("the mount point lies in the source", "unshard mount . mnt"),
    ("mounted already", "unshard mount step mnt", {"at": mounted}),
    ("the server of a mount was killed, and it is mounted again", "unshard mount step mnt", {"at": dead}),
    ("the same, and somebody looks", "ls mnt", {"at": dead}),
    ("a typing mistake in an option", "unshard mount step mnt -o alow_other"),
    ("a value that the option has not", "unshard mount step mnt -o cache_size=lots"),
    ("an option of other commands", "unshard mount step mnt --map olmo-to-hf"),
    ("an option that is not built yet", "unshard mount step mnt -o dequant=bf16"),
    ("saving, and not `rw`", "unshard mount step mnt -o save=dcp"),
    ("a format that is not written", "unshard mount step mnt -o rw,save=dpc"),
    ("an option of older versions", "unshard mount step mnt -o io_uring"),
    ("`save=` without ranks", "unshard mount step mnt -o rw,save=dcp:ranks=0"),
    ("a view that there is not", "unshard mount step mnt -o views=tensor"),
    ("no FUSE in the kernel or the container", "unshard mount step mnt", {"by": root_in(TINY_DEV.format(mode=666) + " && rm /dev/fuse")}),
    ("/dev/fuse is for root alone", "unshard mount step mnt", {"by": private(TINY_DEV.format(mode=600))}),
    ("fuse3 is not installed, and who mounts is not root", "unshard mount step mnt",
     {"by": private(TINY_DEV.format(mode=666) + " && mount --bind /dev/null /usr/bin/fusermount3")}),
    ("`allow_other`, and /etc/fuse.conf says nothing", "unshard mount step mnt -o allow_other",
     {"by": private(TINY_DEV.format(mode=666) + " && mount --bind /dev/null /etc/fuse.conf")}),
    ("a file is still open at umount", "unshard umount mnt", {"at": busy}),
    ("umount of what is not mounted", "unshard umount empty", {"at": mounted}),
    ("an option of umount(8)", "unshard umount -l mnt"),
    ("**Reading**",),
    ("no checkpoint there", "unshard info empty"),
    ("a file of a kind that is not read", "unshard info keras"),
    ("a run, where one checkpoint is meant", "unshard cat run model.emb.weight"),
    ("a save that is not finished, or copied with `*`", "unshard info half"),
    ("the same, verified", "unshard verify half"),
    ("a shard is missing", "unshard cat miss model.emb.weight"),
    ("the metadata is damaged", "unshard info junk"),
    ("a checkpoint of somebody else", "unshard ls locked -o index=memory", {"by": stranger}),
    ("a typing mistake in a key", "unshard cat step model.emb.weiht"),
    ("half a key", "unshard cat step head.weight"),
    ("a pattern that is only a part", "unshard ls step layers"),
    ("a pattern with a typing mistake", "unshard stats step 'model.had.*'"),
    ("a typing mistake in an option", "unshard ls step --jsno"),
    ("an option of another command", "unshard ls step --deep"),
    ("an option of mount alone", "unshard ls step -o allow_other"),
    ("a cache directory that cannot be", "unshard ls step -o cache_dir=/proc/cache"),
    ("no GPU", "unshard load step --device cuda:0", {"unless": has_cuda}),
    ("a device that there is not", "unshard load step --device gpu0"),
    ("writing into a mount for reading", "touch mnt/new", {"at": mounted}),
    ("changing a tensor there", "echo 1 > mnt/raw/model.emb.weight", {"at": mounted}),
    ("looking into the mount of somebody else", "ls mnt", {"at": mounted, "by": stranger}),
    ("**Saving**",),
    ("changing a view in place that `save=` is needed for", "dd if=file of=mnt/step100/model.safetensors conv=notrunc status=none", {"at": writable}),
    ("a link to a file outside of the source", "ln -s /etc/hostname mnt/name", {"at": writable}),
    ("an attribute that is not ours", "setfattr -n user.note -v x mnt/step100", {"at": writable, "unless": lambda: not shutil.which("setfattr")}),
    ("a file that is no safetensors file", "echo these are not tensors > mnt/new/model.safetensors", {"at": incomplete}),
    ("fsync of a directory in which a save is incomplete", "sync mnt/new", {"at": incomplete}),
    ("its directory is removed", "rm -r mnt/new", {"at": incomplete}),
    ("the mount ends while a save is incomplete", "unshard umount mnt", {"at": incomplete}),
    ("**Maps and casts**",),
    ("a map that there is not", "unshard ls step -o map=megatron-to-fh"),
    ("a comma too many in a map", "unshard ls step -o map=comma.json"),
    ("a map that does not fit the checkpoint", "unshard ls step -o map=seven.json"),
    ("a JSON file that is no map", "unshard ls step -o map=none.json"),
    ("a type that nothing is cast to", "unshard convert step out --to hf --dtype int4"),
    ("**Converting**",),
    ("a format that is not written", "unshard convert step out --to dpc"),
    ("no format", "unshard convert step out"),
    ("the option's value is forgotten", "unshard convert step out --to"),
    ("no ranks", "unshard convert step out --to dcp --ranks 0"),
    ("a mesh of one number", "unshard convert step out --to dcp --mesh 4"),
    ("a size that is none", "unshard convert step out --to hf --max-shard-size 5X"),
    ("ranks of a format that has none", f"unshard convert step out --to npz --ranks 2 {DROP}"),
    ("what the format cannot hold", "unshard convert step out --to hf"),
    ("a role that there is not", "unshard convert step out --to hf --drop optimiser"),
    ("nothing is left", f"unshard convert step out --to hf --only 'layers.*' {DROP}"),
    ("the target is there", f"unshard convert step full --to hf {DROP}"),
    ("the directory above the target is not there", f"unshard convert step no/out --to hf {DROP}"),
    ("the target is on a disk without room", f"unshard convert step small/out --to hf {DROP}",
     {"by": root_in("mkdir small && mount -t tmpfs -o size=16k none small")}),
    ("the target's directory is not ours", f"unshard convert step out --to hf {DROP} -o index=memory", {"by": stranger}),
    ("a target that cannot be written to", f"unshard convert step hf://org/name --to hf {DROP}"),
    ("a part that there is not", "unshard convert step out --to dcp --part 3/2"),
    ("**Remote sources**",),
    ("a kind of URL that there is not", "unshard info ftp://host/step"),
    ("a slash too few", "unshard info s3:/bucket/step"),
    ("a name that there is not", "unshard info https://no-such-host.invalid/step", {"env": {"UNSHARD_HTTP_TRIES": "1", "RES_OPTIONS": "timeout:1 attempts:1"}}),
    ("nobody answers there", "unshard info http://127.0.0.1:1/step", {"env": {"UNSHARD_HTTP_TRIES": "1"}}),
    ("no keys of S3", "unshard info s3://torch_dcp/dcp_fsdp2_adamw_2r", {"at": no_keys}),
    ("a wrong secret", "unshard info s3://torch_dcp/dcp_fsdp2_adamw_2r", {"at": keys(AWS_SECRET_ACCESS_KEY="wrong")}),
    ("keys of another store", "unshard info s3://torch_dcp/dcp_fsdp2_adamw_2r", {"at": keys(AWS_ACCESS_KEY_ID="AKIDOTHER")}),
    ("keys that are too old", "unshard info s3://torch_dcp/dcp_fsdp2_adamw_2r", {"at": expired}),
    ("a profile that there is not", "unshard info s3://torch_dcp/dcp_fsdp2_adamw_2r", {"at": no_keys, "env": {"AWS_PROFILE": "prod"}}),
    ("a bucket that there is not", "unshard info s3://torch_dpc/step", {"at": bucket}),
    ("nothing below that prefix", "unshard info s3://torch_dcp/step", {"at": bucket}),
    ("a revision that there is not", "unshard info hf://org/model@v9", {"at": hub}),
    ("a private repository, and no token", "unshard info hf://org/model", {"at": private_hub}),
    ("a file that the repository has not", "unshard info hf://org/model/step", {"at": hub}),
]


@functools.cache
def has_gnu_ls():
    """Others (Ubuntu's from 25.10 on) tell of errors in words of their own."""
    return "GNU" in subprocess.run(["ls", "--version"], capture_output=True, text=True, check=False).stdout


def replay(p, mistake, typed, how):
    """The row as it is here, or None: it cannot be had."""
    by = how.get("by")
    if typed.startswith("ls ") and not has_gnu_ls():
        return None
    if (by and os.geteuid() != 0) or (by not in (None, stranger) and not has_own_mounts()) or how.get("unless", lambda: False)():
        return None
    with how.get("at", plain)(p) as env:
        done = p.run(by(typed) if by else typed, {**env, **how.get("env", {})})
    for name in ("out", "mnt"):
        assert name == "mnt" or not os.path.exists(f"{p.t}/{name}"), f"{typed}: made {name}"
    answer = p.shown(done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1, f"{typed}: {done.stderr!r}"
    assert not typed.startswith("unshard") or answer.startswith("unshard: "), f"{mistake}: {answer}"
    cells = (mistake, f"`{typed}`", f"`` {answer} ``" if "`" in answer else f"`{answer}`", str(done.returncode))
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def replay_all(t):
    with S3Server(DATA) as s3, HubServer() as repositories:
        repositories.add("org/model", DATA / "safetensors/hf_sharded_f32")
        p = Place(t, s3, repositories)
        os.chmod(t, 0o755)
        for row in ROWS:
            yield f"| {row[0]} | | | |" if len(row) == 1 else replay(p, row[0], row[1], row[2] if len(row) > 2 else {})


def main():
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        print("1..0 # SKIP no /dev/fuse")
        sys.exit(77)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEAD)
    table, _, after = rest.partition("\n\n")
    with fresh_directory() as t:
        rows = list(replay_all(t))
    if "--write" in sys.argv:
        if None in rows:
            sys.exit("a row cannot be had here: nothing is written")
        PAGE.write_text(before + HEAD + "\n".join(rows) + "\n\n" + after, encoding="utf-8")
        return
    want = table.splitlines()
    print(f"1..{len(rows)}")
    failed = len(want) != len(rows)
    if failed:
        print(f"# docs/mistakes.md has {len(want)} rows, this test {len(rows)}: run it with --write")
    for row, wanted in zip(rows, want):
        name = wanted.split("|")[2].strip().strip("`") or wanted.split("|")[1].strip(" *")
        if row is None:
            print(f"ok - {name} # SKIP cannot be had here")
        elif row == wanted:
            print(f"ok - {name}")
        else:
            failed = True
            print(f"# got  {row}\n# want {wanted}\nnot ok - {name}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
