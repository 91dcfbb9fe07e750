#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Who may read what: user by user and place by place, what the disk lets them read against what mounts do.

A tensor is readable on the disk when every file that it is made of is, with all directories and links on the way: each is
opened there, as that user. A mount that gives more is wrong. What it gives less is wrong too, but where the rights of
several files differ, or an ACL is what grants. The tables are printed. Needs root; with `acl` it tries ACLs.
"""
import ctypes
import errno
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "remote"))
import mountlib  # noqa: E402
from fault_server import Server  # noqa: E402
from mountlib import PATIENCE, Mount, Skip, UNSHARD, main, make_tensors, read_all, same, safetensors_image, wait_for, write_checkpoint, write_file  # noqa: E402

DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
GROUP = 61300
# name: uid, gid, supplementary groups
USERS = {
    "root": (0, 0, ()),
    "owner": (65534, 65534, ()),  # one that has a name, which fusermount3 asks for
    "mate": (61202, 61202, (61900, GROUP)),  # in the group by a supplementary one
    "member": (61203, GROUP, ()),  # by its own
    "stranger": (61204, 61204, ()),
    "barred": (61205, 61205, ()),  # whom ACLs deny
    "guest": (61206, 61206, ()),  # whom only ACLs let in
}
TENSORS_EACH = 12  # of a checkpoint: it is the files that matter


def has_acl():
    """Here and now: not every file system has them."""
    if not shutil.which("setfacl"):
        return False
    with tempfile.NamedTemporaryFile() as f:
        return subprocess.run(["setfacl", "-m", "u:1:r", f.name], stderr=subprocess.DEVNULL, check=False).returncode == 0


HAS_ACL = has_acl()


def as_user(name, what, *args):
    """what(*args) in a process of this user: what it returned."""
    uid, gid, groups = USERS[name]
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(PATIENCE)
            os.close(ours)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            data = pickle.dumps(what(*args))
            with os.fdopen(theirs, "wb") as f:
                f.write(data)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours, "rb") as f:
        data = f.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"{name}: {what.__name__} ended with {status:#x}"
    return pickle.loads(data)


def readable(paths):
    """Those that can be opened and read: {path: bytes}; others by their errno."""
    out = {}
    for path in paths:
        try:
            with open(path, "rb") as f:
                out[path] = f.read()
        except OSError as e:
            out[path] = e.errno
    return out


def opened(paths):
    return {path for path, got in readable(paths).items() if isinstance(got, bytes)}


# ---- places ----

def acl(rule, *paths):
    subprocess.run(["setfacl", "-m", rule, *paths], check=True)


def below(path, dirs):
    return [os.path.join(d, name) for d, subs, files in os.walk(path) for name in (subs if dirs else files)]


def modes(path, files, dirs):
    for p in below(path, False):
        if not os.path.islink(p):
            os.chmod(p, files)
    for p in [path, *below(path, True)]:
        os.chmod(p, dirs)


def own(path, uid, gid):
    for p in [path, *below(path, True), *below(path, False)]:
        os.lchown(p, uid, gid)


class Places:
    """Checkpoints below `root`, each with rights of its own: {name: (directory of the checkpoint, may the mount give less?)}."""

    def __init__(self, t):
        self.root, self.away, self.all = t + "/src", t + "/away", {}
        os.makedirs(self.root)
        os.makedirs(self.away)
        os.chmod(self.root, 0o755)
        os.chmod(self.away, 0o755)

    def add(self, name, fixture="torch_dcp/dcp_fsdp2_adamw_2r", less=False, at=None, below=""):
        where = f"{self.root}/{at or name}"
        shutil.copytree(f"{DATA}/{fixture}", where)
        own(where, 0, 0)
        modes(where, 0o644, 0o755)
        self.all[name] = ((at or name) + below, less)
        return where

    def link(self, name, text, less=False):
        where = f"{self.root}/{name}"
        os.makedirs(where, exist_ok=True)
        os.symlink(text, where + "/model.safetensors")
        self.all[name] = (name, less)

    def make(self):
        self.by_modes()
        self.by_parts()
        self.by_links()
        if HAS_ACL:
            self.by_acls()

    def by_modes(self):
        self.add("all may")
        os.chmod(self.add("directory 0700"), 0o700)
        os.chmod(self.add("directory 0711"), 0o711)
        os.chmod(self.add("a shard 0600", less=True) + "/__1_0.distcp", 0o600)
        os.chmod(self.add("metadata 0600", less=True) + "/.metadata", 0o600)
        self.add("in a directory 0700", at="middle/closed/step")
        os.chmod(self.root + "/middle/closed", 0o700)
        self.add("in a group's directory", at="groups/step")
        own(self.root + "/groups", 0, GROUP)
        own(self.root + "/groups/step", 0, 0)
        os.chmod(self.root + "/groups", 0o750)
        path = self.add("the group's")
        own(path, 0, GROUP)
        modes(path, 0o640, 0o750)
        path = self.add("not the group's")
        own(path, 0, GROUP)
        modes(path, 0o604, 0o705)
        path = self.add("the owner's")
        own(path, USERS["owner"][0], USERS["owner"][1])
        modes(path, 0o400, 0o700)
        path = self.add("of two owners", less=True)
        os.chown(path + "/__0_0.distcp", *USERS["owner"][:2])
        os.chmod(path + "/__0_0.distcp", 0o600)
        path = f"{self.root}/set"
        write_checkpoint(path, make_tensors(5), shards=3)
        os.chmod(path + "/model-00002-of-00003.safetensors", 0o600)
        self.all["a set, a shard 0600"] = ("set", True)

        path = f"{self.root}/numbered"
        write_checkpoint(path, make_tensors(7), shards=3)
        os.unlink(path + "/model.safetensors.index.json")
        os.chmod(path + "/model-00001-of-00003.safetensors", 0o600)
        self.all["no index, the first 0600"] = ("numbered", False)

    def by_parts(self):
        path = self.add("nemo, model/ 0700", "nemo_automodel/nemo_full_recipe_safetensors", less=True)
        self.closed = [d for d in below(path, True) if os.path.basename(d) == "model"]
        step = os.path.relpath(os.path.dirname(self.closed[0]), self.root)
        self.all["nemo, model/ 0700"] = (step, True)
        for d in self.closed:
            os.chmod(d, 0o700)
        path = self.add("zarr, arrays 0700", "zarr/zarr2_arrays")
        for d in below(path, True):
            os.chmod(d, 0o700)
        path = self.add("zarr, an array 0700", "zarr/zarr3_arrays", less=True)
        os.chmod(sorted(os.path.dirname(f) for f in below(path, False) if "/c/" in f)[0], 0o700)
        path = self.add("zarr, a chunk 0600", "zarr/zarr3_arrays", less=True)
        os.chmod(sorted(f for f in below(path, False) if "/c/" in f)[0], 0o600)
        path = self.add("mean of ranks, one 0600", "deepspeed/tp2_mean_z2_fp32_w4", less=True)
        self.rank = sorted(f for f in below(path, False) if "mp_rank_01" in f)
        for f in self.rank:
            os.chmod(f, 0o600)

    def by_links(self):
        hidden, open_ = self.root + "/hidden", self.root + "/open"
        for d in hidden, open_, self.away + "/hidden":
            os.makedirs(d)
            write_file(d + "/m.safetensors", safetensors_image(make_tensors(6)))
        os.chmod(hidden, 0o700)
        os.chmod(self.away + "/hidden", 0o700)
        self.all["hidden"] = ("hidden", False)
        self.link("link to what all may", "../open/m.safetensors")
        self.link("link into hidden", "../hidden/m.safetensors")
        self.link("link through hidden", "../hidden/../open/m.safetensors")
        self.link("absolute link into hidden", self.root + "/hidden/m.safetensors")
        self.link("link out of the source", self.away + "/hidden/m.safetensors")
        os.symlink("hidden", self.root + "/hop")
        self.link("link by a link", "../hop/m.safetensors")
        os.symlink(self.root + "/directory 0700", self.root + "/linked directory")

    def by_acls(self):
        path = self.add("ACL bars from shards")
        acl(f"u:{USERS['barred'][0]}:---", path + "/__0_0.distcp", path + "/__1_0.distcp")
        path = self.add("ACL bars from a shard")
        acl(f"u:{USERS['barred'][0]}:---", path + "/__1_0.distcp")
        path = self.add("ACL bars from the directory")
        acl(f"u:{USERS['barred'][0]}:---", path)
        path = self.add("ACL bars above", at="acls/step")
        acl(f"u:{USERS['barred'][0]}:---", self.root + "/acls")
        path = self.add("ACL bars a group")
        acl(f"g:{GROUP}:---", path)
        path = self.add("ACL lets in", less=True)
        modes(path, 0o600, 0o700)
        acl(f"u:{USERS['guest'][0]}:r", *below(path, False))
        acl(f"u:{USERS['guest'][0]}:rx", path)
        path = self.add("ACL lets in, masked", less=True)
        modes(path, 0o600, 0o700)
        acl(f"u:{USERS['guest'][0]}:r,m::---", *below(path, False))
        acl(f"u:{USERS['guest'][0]}:rx", path)


# ---- what the disk allows ----

def command(*args):
    done = subprocess.run([UNSHARD, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


SUMS = (17, 18)  # chunks that are added to what other ranks have (index/chunk.h)


PLANS = {}  # of checkpoints with the same files, which are asked about once


def plan_of(source):
    """{key: (role, files relative to the checkpoint, is it made of what other ranks have too)}."""
    found = below(source, False)
    known = tuple(sorted((os.path.relpath(f, source), os.path.getsize(f)) for f in found))
    if known not in PLANS:
        follow = ("-o", "follow_symlinks")
        rows = command("ls", source, "--json", *follow)["tensors"]
        PLANS[known] = {}
        for row in rows:
            chunks = command("plan", source, row["key"], "--json", *follow)["chunks"]
            PLANS[known][row["key"]] = (row["role"], {c["file"] for c in chunks}, any(c["encoding"] in SUMS for c in chunks))
    return PLANS[known]


class Checkpoint:
    """A place's tensors and the files that each is made of: as `unshard plan` of root has it, and what tells how."""

    def __init__(self, places, name):
        self.name, (self.dir, self.less) = name, places.all[name]
        self.source = source = f"{places.root}/{self.dir}"
        plan = plan_of(source)
        self.files, self.all = {}, set(below(source, False))
        for key, (_, files, is_sum) in plan.items():
            self.files[key] = {os.path.join(source, f) for f in files}
            if is_sum:
                self.files[key] |= {f for f in self.all if f.endswith("_states.pt")}
            told = {os.path.dirname(f) + "/.metadata" for f in self.files[key]}
            self.files[key] |= told & self.all
        keys = list(plan)
        self.some = keys[:: max(1, len(keys) // TENSORS_EACH)]
        self.stored = set().union(*self.files.values())
        self.model = set().union(*[self.files[k] for k in keys if plan[k][0] == "model"])

    def names(self, writing=False):
        """What a mount calls them below the checkpoint: {name: (files, may it be less?)}."""
        out = {}
        for key in self.some:
            name = key.replace("/", "%2F")
            out[f"raw/{name}"] = (self.files[key], self.less)
            out[f"tensors/{name}.npy"] = (self.files[key], self.less)
        if self.model:
            out["model.safetensors"] = (self.model, self.less)
        out[".unshard/objects.json"] = (self.stored, True)
        out[".unshard/checkpoint.json"] = (self.stored, True)
        return self.over_stored(out) if writing else out

    def over_stored(self, views):
        """For writing: names of the disk win over views, and where weights are stored no model.safetensors is made up."""
        stored = os.listdir(self.source)
        out = {name: x for name, x in views.items() if name.split("/")[0] not in stored}
        if any(n.endswith((".safetensors", ".safetensors.index.json")) or n.startswith("pytorch_model") for n in stored):
            out.pop("model.safetensors", None)
        if "model.safetensors" in stored:
            out["model.safetensors"] = ({self.source + "/model.safetensors"}, self.less)
        return out


def survey(t):
    places = Places(t)
    places.make()
    checkpoints = [Checkpoint(places, name) for name in places.all]
    stranger = as_user("stranger", opened, [places.root + "/all may/__0_0.distcp"])
    if not stranger:
        raise Skip("others may not search the directories above TMPDIR")
    return places, checkpoints


def check(what, where, checkpoints, users, bytes_of=None, writing=False):
    """The table of one mount, and what is wrong in it."""
    wrong, lines = [], []
    for c in checkpoints:
        names = c.names(writing)
        for user in users:
            on_disk = as_user(user, opened, sorted(c.all | c.stored))
            got = as_user(user, readable, [f"{where}/{c.dir}/{name}" for name in names])
            disk = {name for name, (files, _) in names.items() if files <= on_disk}
            mount = {name for name in names if isinstance(got[f"{where}/{c.dir}/{name}"], bytes)}
            lines.append((c.name, user, tally(disk), tally(mount)))
            wrong += [f"{c.name}, {user}: {name}: the disk refuses it, the mount gives it" for name in sorted(mount - disk)]
            wrong += [f"{c.name}, {user}: {name}: the disk gives it, the mount says {errno.errorcode.get(got[f'{where}/{c.dir}/{name}'])}"
                      for name in sorted(disk - mount) if not names[name][1] and not (c.less and user != "root")]
            for name in mount:
                if bytes_of is not None:
                    same(f"{c.name}, {user}: {name}", got[f"{where}/{c.dir}/{name}"], bytes_of.setdefault((c.name, name), got[f"{where}/{c.dir}/{name}"]))
    print(f"# {what}: of tensors, views and reports, how many the disk allows and how many the mount gave")
    for name, user, disk, mount in lines:
        print(f"#   {name:28} {user:9} {disk:9} {mount:9}{'' if disk == mount else ' less'}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong[:40])


def tally(names):
    tensors = sum(n.startswith(("raw/", "tensors/")) for n in names)
    return f"{tensors}+{sum(n.endswith('.safetensors') for n in names)}+{sum(n.startswith('.unshard') for n in names)}"


# ---- mounts ----

def test_a_mount_for_reading(t):
    places, checkpoints = survey(t)
    with Mount(places.root, t + "/mnt", "allow_other,follow_symlinks") as m:
        seen = {}
        check("ro, others first", m.path, checkpoints, [u for u in USERS if u != "root"], seen)
        check("ro, root first", m.path, checkpoints, USERS, seen)
        listings(m, places)
        assert "may not read it" not in m.messages(), "others fill the log with what they may not read"


def test_a_mount_for_writing(t):
    places, checkpoints = survey(t)
    with Mount(places.root, t + "/mnt", "rw,allow_other,follow_symlinks") as m:
        check("rw", m.path, [c for c in checkpoints if not c.dir.endswith(".safetensors")], USERS, writing=True)


def test_copies_for_the_kernel(t):
    """Of what root has read the kernel has pages and a copy in the cache: others get neither."""
    places, checkpoints = survey(t)
    with Mount(places.root, t + "/mnt", "allow_other,follow_symlinks,materialize=64M") as m:
        for c in checkpoints:
            for name in c.names():
                read_all(f"{m.path}/{c.dir}/{name}")
        check("ro, copies", m.path, checkpoints, USERS)


def test_owner_and_modes_that_are_made_up(t):
    """uid=, gid= and umask= say what is shown; they let nobody read what the disk does not."""
    places, checkpoints = survey(t)
    uid = USERS["stranger"][0]
    with Mount(places.root, t + "/mnt", f"allow_other,follow_symlinks,uid={uid},gid={GROUP},umask=0") as m:
        same("shown", os.stat(m / "directory 0700").st_uid, uid)
        check("ro, uid= and gid=", m.path, [c for c in checkpoints if "0700" in c.name or "link" in c.name], ["stranger", "member"])


def mount_namespace(t):
    """Where another user may mount, and share that: of ours alone, with a device and an fuse.conf of their own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what, *args):
        if what(*args) != 0:
            raise Skip(f"no mount namespace: {os.strerror(ctypes.get_errno())}")

    if not os.path.exists("/etc/fuse.conf") or not shutil.which("fusermount3") or not shutil.which("setpriv"):
        raise Skip("needs fusermount3, its /etc/fuse.conf, and setpriv")
    try:
        os.mknod(t + "/fuse", 0o666 | stat.S_IFCHR, os.makedev(10, 229))
        os.chmod(t + "/fuse", 0o666)
    except OSError as e:
        raise Skip(f"cannot make a device: {e}")
    write_file(t + "/fuse.conf", b"user_allow_other\n")
    call(libc.unshare, 0x20000)  # CLONE_NEWNS
    call(libc.mount, b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC, MS_PRIVATE
    for ours, theirs in ("/fuse", b"/dev/fuse"), ("/fuse.conf", b"/etc/fuse.conf"):
        call(libc.mount, (t + ours).encode(), theirs, None, 0x1000, None)  # MS_BIND


def test_a_server_that_is_not_root(t):
    """It cannot be others: modes decide, of every directory on the way, and an ACL that is in the way grants nothing."""
    mount_namespace(t)
    places, checkpoints = survey(t)
    uid, gid, _ = USERS["owner"]
    for path in places.root, places.away, *below(places.root, True), *below(places.root, False), *below(places.away, True), *below(places.away, False):
        if os.lstat(path).st_uid == 0:
            os.lchown(path, uid, os.lstat(path).st_gid or gid)
    for c in checkpoints:
        c.less = c.less or c.name.startswith("ACL")
    os.makedirs(t + "/mine")
    os.chown(t + "/mine", uid, gid)
    os.makedirs(t + "/mine/mnt")
    os.chown(t + "/mine/mnt", uid, gid)
    wrapper = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    env = {**os.environ, "HOME": t + "/mine"}
    mountlib.UNSHARD = shutil.copy(UNSHARD, t)  # a clone below /root is root's alone
    try:
        with Mount(places.root, t + "/mine/mnt", "allow_other,follow_symlinks", wrapper=wrapper, env=env) as m:
            check("ro, a user's", m.path, checkpoints, USERS)
    finally:
        mountlib.UNSHARD = UNSHARD


def listings(m, places):
    """Of directories that the caller may not list, here or on the disk, no names are given."""
    def names(path):
        try:
            return sorted(os.listdir(path))
        except OSError as e:
            return errno.errorcode[e.errno]

    for name in ["directory 0700", "middle/closed"] + (["ACL bars from the directory"] if HAS_ACL else []):
        same(f"{name} of the disk", as_user("barred", names, f"{places.root}/{name}"), "EACCES")
        same(f"{name}", as_user("barred", names, f"{m.path}/{name}"), "EACCES")
        for view in "tensors", "raw", "tree":
            same(f"{name}/{view}", as_user("barred", names, f"{m.path}/{name}/{view}"), "EACCES")
    same("names that metadata tell", as_user("stranger", names, f"{m.path}/metadata 0600/raw"), "EACCES")
    step = places.all["nemo, model/ 0700"][0]
    ours = {"model.safetensors", "tensors", "tree", "raw", "optimizer", ".unshard"}
    lifted = set(os.listdir(f"{m.path}/{step}")) - ours - set(os.listdir(f"{places.root}/{step}"))
    assert lifted, "no file of model/ is shown above it: nothing is tried"
    same("what root sees", lifted & set(names(f"{m.path}/{step}")), lifted)
    same("lifted from where it is closed", lifted & set(as_user("stranger", names, f"{m.path}/{step}")), set())
    for n in lifted:
        same(f"lifted {n}", as_user("stranger", readable, [f"{m.path}/{step}/{n}"])[f"{m.path}/{step}/{n}"], errno.EACCES)


def flip(path):
    """Another bit in each byte of what a torch file stores, behind its CRCs' backs."""
    with zipfile.ZipFile(path) as z, open(path, "r+b") as f:
        for member in z.infolist():
            if "/data/" in member.filename and member.compress_type == zipfile.ZIP_STORED:
                f.seek(member.header_offset + 26)
                name, extra = (int.from_bytes(f.read(2), "little") for _ in range(2))
                at = member.header_offset + 30 + name + extra
                f.seek(at)
                data = bytes(b ^ 1 for b in f.read(member.file_size))
                f.seek(at)
                f.write(data)


def test_the_mean_of_ranks(t):
    """Some tensors are made of what other files hold, too, which their plan does not name: found by changing these."""
    places = Places(t)
    places.by_parts()
    where = places.all["mean of ranks, one 0600"][0]
    shutil.copytree(f"{places.root}/{where}", t + "/changed")
    for f in places.rank:
        flip(f.replace(f"{places.root}/{where}", t + "/changed"))

    def tensors(source):
        with Mount(source, t + "/look") as w:
            return {os.path.basename(p): data for p, data in readable([w / f"raw/{name}" for name in os.listdir(w / "raw")]).items()}

    before, after = tensors(f"{places.root}/{where}"), tensors(t + "/changed")
    same("keys", set(after), set(before))
    depends = {name for name in before if before[name] != after[name]}
    assert depends and depends != set(before), (len(depends), len(before))
    with Mount(places.root, t + "/mnt", "allow_other") as m:
        got = {os.path.basename(p) for p in as_user("stranger", opened, [m / f"{where}/raw/{name}" for name in before])}
        same("given", got & depends, set())
        assert got, "none at all is given"
        print(f"# {len(depends)} of {len(before)} tensors change with one rank's files, {len(got)} are given")


def test_archives(t):
    """What lies in an archive is as readable as the archive."""
    os.makedirs(t + "/src/deep")
    os.makedirs(t + "/src/link")
    for name, mode, gid in ("open", 0o644, 0), ("group", 0o640, GROUP), ("closed", 0o600, 0), ("barred", 0o644, 0), ("deep/it", 0o644, 0):
        path = f"{t}/src/{name}.nemo"
        shutil.copy(f"{DATA}/nemo/nemo_{'gz' if name == 'group' else 'plain'}/tiny.nemo", path)
        os.chown(path, 0, gid)
        os.chmod(path, mode)
    os.chmod(t + "/src/deep", 0o700)
    os.symlink("../deep/it.nemo", t + "/src/link/it.nemo")
    if HAS_ACL:
        acl(f"u:{USERS['barred'][0]}:---", t + "/src/barred.nemo")
    with Mount(t + "/src", t + "/mnt", "allow_other") as m:
        for name in "open.nemo", "group.nemo", "closed.nemo", "barred.nemo", "link/it.nemo":
            top = os.path.dirname(m / name) if name.startswith("link") else m / name
            inside = [*below(top + "/raw", False), top + "/model.safetensors", top + "/model_config.yaml", top + "/.unshard/objects.json"]
            for user in [u for u in USERS if u != "root"] + list(USERS):
                disk = as_user(user, opened, [f"{t}/src/{name}"])
                same(f"{name}, {user}", as_user(user, opened, inside), set(inside) if disk else set())


def test_rights_that_are_taken_away(t):
    """From the next second on; who has it open keeps it."""
    places = Places(t)
    places.add("all may")
    dir_, path = places.root + "/all may", "all may/raw/model.emb.weight"
    with Mount(places.root, t + "/mnt", "allow_other") as m:
        assert as_user("stranger", opened, [m / path])
        start, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setgroups(())
            os.setresgid(*[USERS["stranger"][1]] * 3)
            os.setresuid(*[USERS["stranger"][0]] * 3)
            fd = os.open(m / path, os.O_RDONLY)
            os.write(end, b"x")
            time.sleep(0.1)
            while os.path.exists(t + "/kept"):
                time.sleep(0.02)
            os._exit(0 if len(os.pread(fd, 100, 4000)) == 100 else 1)
        write_file(t + "/kept", b"")
        os.read(start, 1)
        os.chmod(dir_ + "/__0_0.distcp", 0o600)
        wait_for("the end of what was remembered", PATIENCE, lambda: not as_user("stranger", opened, [m / path]))
        os.unlink(t + "/kept")
        same("who has it open", os.waitpid(pid, 0)[1], 0)
        os.chmod(dir_ + "/__0_0.distcp", 0o644)
        wait_for("it comes back", PATIENCE, lambda: as_user("stranger", opened, [m / path]))


def test_a_file_that_is_swapped(t):
    """Its own file in the place of another's, while it asks: what was judged is what is read."""
    os.makedirs(t + "/src/run")
    os.makedirs(t + "/src/hidden")
    secret, mine = safetensors_image(make_tensors(1)), safetensors_image(make_tensors(2))
    write_file(t + "/src/hidden/m.safetensors", secret)
    os.chmod(t + "/src/hidden", 0o700)
    write_file(t + "/src/run/mine", mine)
    os.symlink("../hidden/m.safetensors", t + "/src/run/model.safetensors")
    os.chown(t + "/src/run", *USERS["stranger"][:2])
    key = next(iter(make_tensors(1)))
    theirs = make_tensors(1)[key][2]
    with Mount(t + "/src", t + "/mnt", "allow_other") as m:
        read_all(m / f"run/raw/{key}")  # of root: it is scanned, and its shard is open
        pid = os.fork()
        if pid == 0:
            while True:
                for text in "mine", "../hidden/m.safetensors":
                    os.symlink(text, t + "/src/run/next")
                    os.rename(t + "/src/run/next", t + "/src/run/model.safetensors")
        try:
            given = 0
            for _ in range(600):
                got = as_user("stranger", readable, [m / f"run/raw/{key}", m / "run/model.safetensors"])
                data = got[m / f"run/raw/{key}"]
                given += isinstance(data, bytes)
                assert data != theirs, "the file that may not be read was given"
                assert got[m / "run/model.safetensors"] != secret, "the file that may not be read was given"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(f"# its own file was given {given} times of 600")


def laid_over(t, source):
    """Which files of hf= a stranger can read, as their rights change."""
    for name, mode in ("config.json", 0o644), ("tokenizer.json", 0o600):
        write_file(f"{t}/hf/{name}", b"{}\n")
        os.chmod(f"{t}/hf/{name}", mode)
    os.chmod(t + "/hf", 0o755)

    def given(m):
        return {os.path.basename(p) for p in as_user("stranger", opened, [m / "step/config.json", m / "step/tokenizer.json"])}

    with Mount(source, t + "/mnt", f"allow_other,hf={t}/hf") as m:
        same("by modes", given(m), {"config.json"})
        if HAS_ACL:
            acl(f"u:{USERS['stranger'][0]}:---", t + "/hf/config.json")
            same("an ACL", given(m), set())
            subprocess.run(["setfacl", "-b", t + "/hf/config.json"], check=True)
            os.chmod(t + "/hf/config.json", 0o644)
            same("again", given(m), {"config.json"})
        os.chmod(t + "/hf", 0o700)
        same("a closed directory", given(m), set())


def test_files_laid_over(t):
    """Also over what comes from a server: they are files of this machine."""
    os.makedirs(t + "/hf")
    write_checkpoint(t + "/src/step", make_tensors(1), config=False)
    laid_over(t, t + "/src")
    with Server(t + "/src") as s:
        laid_over(t, s.url)


def answer(path):
    """What the service of plans says to a question that is none; or an errno."""
    with socket.socket(socket.AF_UNIX) as c:
        c.settimeout(PATIENCE)
        try:
            c.connect(path)
            c.sendall(bytes(24))
            return c.recv(100)
        except OSError as e:
            return e.errno


def test_sockets_and_caches(t):
    """Plans name shards and are had by the server's user alone; nothing in the cache is others' to look at."""
    places = Places(t)
    where = places.add("all may")
    old = os.umask(0)
    try:
        with Mount(places.root, t + "/mnt", "allow_other,materialize=64M") as m:
            os.umask(0o022)
            read_all(m / "all may/raw/model.emb.weight")
            read_all(m / "all may/.unshard/objects.json")
            plan = os.getxattr(m / "all may/raw/model.emb.weight", "user.unshard.plan").decode()
            place = plan.removeprefix("unix:").rsplit(" ", 1)[0]
            same("socket", oct(os.stat(place).st_mode), oct(0o140600))
            same("who may not call", as_user("stranger", answer, place), errno.EACCES)
            os.chmod(os.path.dirname(place), 0o755)
            os.chmod(place, 0o666)
            assert not isinstance(as_user("stranger", answer, place), bytes) or not as_user("stranger", answer, place), "an answer"
            assert as_user("root", answer, place), "not even root gets an answer: nothing is tried"
            cache = m.dir + "/cache"
            found = [cache, *below(cache, True), *below(cache, False)]
            assert len(found) > 3, found
            for path in found:
                if path not in (place, os.path.dirname(place)):
                    same(path, os.lstat(path).st_mode & 0o077, 0)
    finally:
        os.umask(old)
    assert os.path.isdir(where)


def test_a_cache_behind_anothers_link(t):
    write_checkpoint(t + "/src", make_tensors(1))
    os.makedirs(t + "/cache", mode=0o700)
    os.symlink(t + "/cache", t + "/link")
    run = [UNSHARD, "ls", t + "/src", "-o", f"cache_dir={t}/link"]
    same("root's own", subprocess.run(run, capture_output=True, check=False).returncode, 0)
    os.lchown(t + "/link", *USERS["stranger"][:2])
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 5 and f"user {USERS['stranger'][0]} made this link" in done.stderr, done


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root: it asks as several users")
        sys.exit(77)
    main(globals())
