# SPDX-License-Identifier: MIT
"""What a mount for writing shows: the names of the disk, views by name, and how a view gives way to a file of its name."""
import errno
import mmap
import os
import pwd
import shutil
import socket
import stat
import subprocess

from storagelib import fixture, fixtures, lay, names_below, short
from editlib import fsync, tensors_of, umount, write
from mountlib import PATIENCE, UNSHARD, Mount, Skip, fails, main, make_tensors, read_all, safetensors_image, same, wait_for, write_checkpoint, write_file

DCP = fixture("torch_dcp", "dcp_fsdp2_adamw_2r")


def listing(path):
    return sorted(os.listdir(path))


def test_listings_are_the_disks(t):
    """Every fixture: names, kinds, sizes, modes, links; nothing is lifted, hidden or added."""
    count = 0
    for path in fixtures():
        lay(path, f"{t}/run/{short(path)}")
        count += 1
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        same("names", names_below(m.path), names_below(t + "/run"))
        for folder, dirs, files, fd in os.fwalk(m.path):
            for name in dirs + files:
                a = os.stat(name, dir_fd=fd, follow_symlinks=False)
                b = os.lstat(os.path.join(t + "/run", os.path.relpath(folder, m.path), name))
                for field in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
                    same(f"{folder}/{name}: {field}", getattr(a, field), getattr(b, field))
        umount(m)
    print(f"# {count} fixtures", flush=True)


def test_views_by_name(t):
    """The same bytes as in a mount for reading, where the disk has no such name."""
    found = 0
    for path in (DCP, fixture("safetensors", "hf_sharded_f32"), fixture("torch_file", "hf_bin_sharded"), fixture("megatron", "mcore018_torch_dist_commonpt")):
        lay(path, f"{t}/run/{short(path)}")
    with Mount(t + "/run", t + "/ro") as ro, Mount(t + "/run", t + "/mnt", "rw") as m:
        for step in listing(t + "/run"):
            for view in ("tensors", "raw"):
                same(f"{step}/{view}", listing(m / f"{step}/{view}"), listing(ro / f"{step}/{view}"))
                for name in listing(ro / f"{step}/{view}"):
                    same(f"{step}/{view}/{name}", read_all(m / f"{step}/{view}/{name}"), read_all(ro / f"{step}/{view}/{name}"))
                    found += 1
            same(f"{step}/tree", names_below(m / f"{step}/tree"), names_below(ro / f"{step}/tree"))
            for name in ("checkpoint.json", "objects.json"):
                assert read_all(m / f"{step}/.unshard/{name}").startswith(b"{"), name
        umount(m)
    assert found > 100, found


def test_model_safetensors_is_made_up_where_a_loader_finds_nothing_else(t):
    """With a *.safetensors, a pytorch_model*.bin or an index of theirs there is none, so that a loader loads what it would from the disk."""
    write_checkpoint(t + "/run/hf", make_tensors(1))
    lay(fixture("torch_file", "hf_bin_sharded"), t + "/run/bin")
    lay(DCP, t + "/run/dcp")
    lay(DCP, t + "/run/dcp-and-adapter")
    write_file(t + "/run/dcp-and-adapter/adapter_model.safetensors", safetensors_image(make_tensors(2)))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for name, there in (("hf", False), ("bin", False), ("dcp", True), ("dcp-and-adapter", False)):
            same(name, os.path.exists(m / f"{name}/model.safetensors"), there)
        os.rename(t + "/run/dcp-and-adapter/adapter_model.safetensors", t + "/run/other")
        umount(m)


def test_names_of_the_source_win(t):
    lay(DCP, t + "/run/step")
    os.mkdir(t + "/run/step/raw")
    write_file(t + "/run/step/raw/mine", b"mine")
    write_file(t + "/run/step/tensors", b"a file")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        same("raw", listing(m / "step/raw"), ["mine"])
        same("tensors", read_all(m / "step/tensors"), b"a file")
        write(m / "step/raw/more", b"more")
        same("as on a disk", read_all(t + "/run/step/raw/more"), b"more")
        assert listing(m / "step/tree"), "tree/ is nobody's, so it is a view"
        umount(m)


def test_views_are_listed_where_asked_for(t):
    lay(DCP, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,views=tensors+raw") as m:
        same("listed", listing(m / "step"), sorted([*os.listdir(t + "/run/step"), "raw", "tensors"]))
        umount(m)


def test_no_views_without_the_completing_file(t):
    lay(DCP, t + "/run/step")
    os.rename(t + "/run/step/.metadata", t + "/run/metadata")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for view in ("tensors", "tree", "raw", "model.safetensors", "optimizer"):
            fails(view, errno.ENOENT, lambda view=view: os.stat(m / f"step/{view}"))
        os.rename(m / "metadata", m / "step/.metadata")
        assert listing(m / "step/raw"), "now it is whole"
        umount(m)


def test_keep_files_is_taken_and_io_uring_is_not(t):
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,keep_files") as m:
        umount(m)
    done = subprocess.run([UNSHARD, "mount", t + "/run", t + "/mnt", "-o", "io_uring"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "io_uring" in done.stderr, done


# ---- a view gives way ----

def with_dcp(t, options="rw"):
    shutil.rmtree(t + "/run", ignore_errors=True)
    lay(DCP, t + "/run/step")
    return Mount(t + "/run", t + "/mnt", options)


IMAGE = safetensors_image(make_tensors(1))


def test_a_view_that_is_read_only(t):
    """Without save=: what would change it in place is EROFS, what would make a second name of it EEXIST."""
    with with_dcp(t) as m:
        path = m / "step/model.safetensors"
        before = read_all(path)
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_CREAT):
            fails(f"open {flags:#o}", errno.EROFS, lambda flags=flags: os.open(path, flags, 0o644))
        for what, call in {"truncated": lambda: os.truncate(path, 0), "unlinked": lambda: os.unlink(path)}.items():
            try:
                call()
                raise AssertionError(f"a view was {what}")
            except OSError as e:  # as what is read-only, or as what the disk has not
                assert e.errno in (errno.EROFS, errno.ENOENT), e
        write_file(t + "/run/step/other", b"x")
        for what, call in {"O_EXCL": lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "mkdir": lambda: os.mkdir(path),
                           "mkdir optimizer": lambda: os.mkdir(m / "step/optimizer"), "link": lambda: os.link(m / "step/other", path),
                           "symlink": lambda: os.symlink("other", path)}.items():
            fails(what, errno.EEXIST, call)
        same("as it was", read_all(path), before)
        same("on the disk", os.path.exists(t + "/run/step/model.safetensors"), False)
        umount(m)


def test_a_file_is_made_in_place_of_a_view(t):
    """open with O_CREAT|O_TRUNC, and rename onto the name: storage; who has the view open keeps it."""
    def created(m):
        write(m / "step/model.safetensors", IMAGE)

    def renamed(m):
        write_file(m / "step/model.safetensors", IMAGE)

    for how in created, renamed:
        with with_dcp(t) as m:
            path = m / "step/model.safetensors"
            before = read_all(path)
            with open(path, "rb", buffering=0) as view:
                with mmap.mmap(view.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    how(m)
                    same("storage", read_all(t + "/run/step/model.safetensors"), IMAGE)
                    same("by its name", read_all(path), IMAGE)
                    same("the handle", view.read(), before)
                    same("the mapping", mapped[:], before)
            with open(path, "r+b") as f:
                f.write(IMAGE[:100])
            same("listed", "model.safetensors" in os.listdir(m / "step"), True)
            os.unlink(path)
            same("and then the view is there again", os.path.exists(path), True)
            same("not on the disk", os.path.exists(t + "/run/step/model.safetensors"), False)
            umount(m)


def test_a_directory_is_made_in_place_of_a_view(t):
    """optimizer/: a first file in it."""
    with with_dcp(t) as m:
        assert listing(m / "step/optimizer") == ["optimizer.safetensors"], listing(m / "step/optimizer")
        fails("in place", errno.EROFS, lambda: open(m / "step/optimizer/optimizer.safetensors", "r+b"))
        write(m / "step/optimizer/rank0.pt", b"rank 0")
        same("storage", names_below(t + "/run/step/optimizer"), ["rank0.pt"])
        same("listed", listing(m / "step/optimizer"), ["rank0.pt"])
        write(m / "step/optimizer/rank1.pt", b"rank 1")
        shutil.rmtree(m / "step/optimizer")
        same("gone", os.path.exists(t + "/run/step/optimizer"), False)
        umount(m)


def test_cp_over_a_view(t):
    """Programs that save over a checkpoint of another format."""
    with with_dcp(t) as m:
        write_file(t + "/image", IMAGE)
        shutil.copyfile(t + "/image", m / "step/model.safetensors")
        same("copyfile", read_all(t + "/run/step/model.safetensors"), IMAGE)
        umount(m)


def test_handles_stay_what_they_are(t):
    """A storage handle and a view handle, whatever the directory becomes."""
    lay(DCP, t + "/run/step")
    os.rename(t + "/run/step/.metadata", t + "/run/metadata")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        with open(m / "step/__0_0.distcp", "r+b", buffering=0) as shard:
            os.rename(m / "metadata", m / "step/.metadata")
            name = listing(m / "step/raw")[0]
            with open(m / f"step/raw/{name}", "rb", buffering=0) as view:
                data = read_all(m / f"step/raw/{name}")
                os.rename(m / "step/.metadata", m / "metadata")
                shard.seek(0, os.SEEK_END)
                shard.write(b"more")
                assert read_all(t + "/run/step/__0_0.distcp").endswith(b"more")
                try:
                    same("the view", view.read(), data)
                except OSError as e:
                    assert e.errno in (errno.ESTALE, errno.EIO), e
        umount(m)


def test_unshard_stores_nothing(t):
    lay(DCP, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for step in ("step/", ""):
            for name in ("counters.json", "last-error"):
                os.stat(m / f"{step}.unshard/{name}")
        before = names_below(t + "/run")
        write(m / "step/.unshard/anything", b"nothing of it is kept")
        same("on the disk", names_below(t + "/run"), before)
        subprocess.run(["cp", "-r", m / "step/.unshard", t + "/copy"], check=True)
        umount(m)
    same("on the disk", names_below(t + "/run"), before)


# ---- names that others have had ----

def test_another_checkpoint_gets_the_name(t):
    """What had it before was read just now; from then on the name is the other one's."""
    first, second, third = make_tensors(1), make_tensors(2, count=3), make_tensors(3, count=5, rows=8)

    def reads(tensors, where):
        same("names", listing(where + "/raw"), sorted(tensors))
        for key, (_, _, data) in tensors.items():
            same(f"{where}: {key}", read_all(f"{where}/raw/{key}"), data)

    write_checkpoint(t + "/run/step1", first)
    write_checkpoint(t + "/run/other/step1", third)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        reads(first, m / "step1")
        os.rename(m / "step1", m / "old1")
        os.mkdir(m / "step1")
        write(m / "step1/model.safetensors", safetensors_image(second))
        reads(second, m / "step1")
        os.rename(m / "step1", m / "old2")
        os.rename(m / "other/step1", m / "step1")
        reads(third, m / "step1")
        for name, tensors in (("a", first), ("b", second)):
            os.makedirs(m / f"{name}/step1")
            write(m / f"{name}/step1/model.safetensors", safetensors_image(tensors))
        reads(first, m / "a/step1")
        os.rename(m / "a", m / "c")
        os.rename(m / "b", m / "a")
        reads(second, m / "a/step1")
        umount(m)


def test_a_listing_begins_again(t):
    """rewinddir(3): names that came since are listed; in a checkpoint and beside it."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for path in (m / "step1", m.path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                before = os.listdir(fd)
                write_file(f"{path}/note.txt", b"x")
                same("names", sorted(os.listdir(fd)), sorted([*before, "note.txt"]))  # of the same open directory
                os.unlink(f"{path}/note.txt")
                same("names again", sorted(os.listdir(fd)), sorted(before))
            finally:
                os.close(fd)
        umount(m)


def test_a_file_that_others_have_made_just_now_is_opened(t):
    """It was looked for in vain a moment ago: who opens it without O_EXCL gets it, whoever came first."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for i in range(50):
            name = f"run/log{i}"
            assert not os.path.exists(m / name)
            write_file(t + "/src/" + name, b"theirs ")
            with open(m / name, "ab") as f:
                f.write(b"ours")
            same(name, read_all(t + "/src/" + name), b"theirs ours")
            fails("alone", errno.EEXIST, lambda path=m / name: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        umount(m)


def test_an_overlay(t):
    """A source of two layers: what is copied up when it is written stays one file for all who have it open, and edits work."""
    tensors = make_tensors(1)
    key = next(iter(tensors))
    write_checkpoint(t + "/lower/step1", tensors)
    write_file(t + "/lower/log", b"one ")
    for name in "upper", "work", "run":
        os.mkdir(f"{t}/{name}")
    options = f"lowerdir={t}/lower,upperdir={t}/upper,workdir={t}/work"
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, t + "/run"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Skip("no overlay: " + done.stderr)
    try:
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            with open(m / "log", "ab", buffering=0) as f:
                f.write(b"two ")
                with open(m / "log", "ab", buffering=0) as g:
                    g.write(b"three ")
                f.write(b"four")
            same("log", read_all(t + "/run/log"), b"one two three four")
            data = bytes(reversed(tensors[key][2]))
            write(m / f"step1/raw/{key}", data)
            fsync(m / "step1")
            same("edited", tensors_of(t + "/run/step1")[key][2], data)
            shutil.move(m / "step1", m / "step2")
            same("moved", tensors_of(t + "/run/step2")[key][2], data)
            shutil.rmtree(m / "step2")
            same("removed", listing(t + "/run"), ["log"])
            umount(m)
    finally:
        subprocess.run(["umount", "-l", t + "/run"], check=True)


# ---- what is refused, rights ----

def test_what_no_checkpoint_needs(t):
    """fifos, devices and foreign attributes: ENOTSUP."""
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/file", b"x")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fails("fifo", errno.ENOTSUP, lambda: os.mkfifo(m / "step/fifo"))
        if os.geteuid() == 0:
            fails("device", errno.ENOTSUP, lambda: os.mknod(m / "step/null", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
        fails("setxattr", errno.ENOTSUP, lambda: os.setxattr(m / "step/file", "user.other", b"1"))
        fails("getxattr", errno.ENODATA, lambda: os.getxattr(m / "step/file", "user.other"))
        fails("link out of the source", errno.EXDEV, lambda: os.link(t + "/run/step/file", m / "step/link"))
        umount(m)
    same("names", names_below(t + "/run"), ["step", "step/file"])


def test_staging_names_are_ours(t):
    os.makedirs(t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for what, call in {"mkdir": os.mkdir, "create": lambda p: write(p, b""), "symlink": lambda p: os.symlink("x", p)}.items():
            fails(what, errno.EACCES, lambda call=call: call(m / "step/.unshard-staging-x"))
        umount(m)


def test_links(t):
    lay(DCP, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.symlink("step", m / "latest")
        same("its target", (os.readlink(m / "latest"), os.readlink(t + "/run/latest")), ("step", "step"))
        same("listed", listing(m / "latest"), listing(t + "/run/step"))
        assert listing(m / "latest/raw") == listing(m / "step/raw")
        os.link(m / "step/.metadata", m / "step/second")
        same("one file", os.stat(m / "step/second").st_ino == os.stat(m / "step/.metadata").st_ino, True)
        same("two names", (os.stat(m / "step/second").st_nlink, os.stat(t + "/run/step/second").st_nlink), (2, 2))
        umount(m)


def as_user(user, call):
    """call() in a child of another user: its errno, 0 for none."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.umask(0o022)
            call()
            os._exit(0)
        except OSError as e:
            os._exit(e.errno)
        except BaseException:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_rights_are_the_disks(t):
    """What another user may do is what the kernel would say on the source, call by call; what is made is theirs."""
    if os.geteuid() != 0:
        raise Skip("takes root")
    user = pwd.getpwnam("nobody")
    os.chmod(t, 0o755)
    for what in "plain", "run":
        os.makedirs(f"{t}/{what}/open")
        os.chmod(f"{t}/{what}/open", 0o777)
        os.makedirs(f"{t}/{what}/sticky")
        os.chmod(f"{t}/{what}/sticky", 0o1777)
        os.makedirs(f"{t}/{what}/closed")
        for folder in "open", "sticky", "closed":
            write_file(f"{t}/{what}/{folder}/root.bin", b"root's")
        write_file(f"{t}/{what}/open/theirs", b"theirs")
        os.chown(f"{t}/{what}/open/theirs", user.pw_uid, user.pw_gid)
        write_file(f"{t}/{what}/open/secret", b"secret")
        os.chmod(f"{t}/{what}/open/secret", 0o600)
        os.makedirs(f"{t}/{what}/group")
        os.chown(f"{t}/{what}/group", 0, user.pw_gid)
        os.chmod(f"{t}/{what}/group", 0o2770)

    calls = {
        "create": lambda at: write(at + "/open/new", b"new"), "create in closed": lambda at: write(at + "/closed/new", b"new"),
        "write root's": lambda at: write(at + "/open/root.bin", b"no"), "write theirs": lambda at: write(at + "/open/theirs", b"yes"),
        "read a secret": lambda at: read_all(at + "/open/secret"), "unlink root's": lambda at: os.unlink(at + "/sticky/root.bin"),
        "rename over root's": lambda at: os.rename(at + "/open/theirs", at + "/open/root.bin"), "mkdir": lambda at: os.mkdir(at + "/open/dir"),
        "create in its group": lambda at: write(at + "/group/new", b"new"), "chmod root's": lambda at: os.chmod(at + "/open/secret", 0o666),
        "chown": lambda at: os.chown(at + "/open/new", 0, 0), "truncate root's": lambda at: os.truncate(at + "/closed/root.bin", 0),
        "utime root's": lambda at: os.utime(at + "/closed/root.bin", (1, 1)), "symlink": lambda at: os.symlink("new", at + "/open/link"),
        "link root's": lambda at: os.link(at + "/open/new", at + "/sticky/link"), "rmdir": lambda at: os.rmdir(at + "/open/dir"),
        "unlink in closed": lambda at: os.unlink(at + "/closed/root.bin"),
    }
    with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
        for what, call in calls.items():
            same(what, as_user(user, lambda call=call: call(m.path)), as_user(user, lambda call=call: call(t + "/plain")))
        umount(m)
    same("names", names_below(t + "/run"), names_below(t + "/plain"))
    for name in names_below(t + "/plain"):
        a, b = os.lstat(f"{t}/run/{name}"), os.lstat(f"{t}/plain/{name}")
        same(name, (oct(a.st_mode), a.st_uid, a.st_gid, a.st_size), (oct(b.st_mode), b.st_uid, b.st_gid, b.st_size))


def test_options_of_owners_are_for_views(t):
    if os.geteuid() != 0:
        raise Skip("takes root")
    lay(DCP, t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,uid=12,gid=13,umask=077") as m:
        view, stored = os.stat(f"{m.path}/step/raw/{listing(m / 'step/raw')[0]}"), os.stat(m / "step/.metadata")
        same("a view", (view.st_uid, view.st_gid, view.st_mode & 0o077), (12, 13, 0))
        on_disk = os.stat(t + "/run/step/.metadata")
        same("a file", (stored.st_uid, stored.st_gid, stored.st_mode), (on_disk.st_uid, on_disk.st_gid, on_disk.st_mode))
        write(m / "step/new", b"")
        same("a new file", os.stat(t + "/run/step/new").st_mode & 0o777, 0o644)
        umount(m)


def test_sockets_and_links_that_are_there(t):
    os.mkdir(t + "/run")
    with socket.socket(socket.AF_UNIX) as s:
        os.chdir(t + "/run")
        s.bind("socket")
        os.chdir("/")
    os.symlink("/etc", t + "/run/out")
    os.mkfifo(t + "/run/fifo")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        same("listed", listing(m.path), ["fifo", "out", "socket"])
        for name in listing(m.path):
            same(name, os.lstat(m / name).st_mode, os.lstat(t + "/run/" + name).st_mode)
            os.unlink(m / name)
        umount(m)
    same("removed", os.listdir(t + "/run"), [])


def shows(path):
    try:
        return read_all(path)
    except OSError:
        return None


def test_a_broken_tensor_gives_eio(t):
    """A shard that is gone: its tensors are EIO, the others are served, storage is the disk."""
    write_checkpoint(t + "/run/step", make_tensors(1), shards=2)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        whole = {n: read_all(m / f"step/raw/{n}") for n in listing(m / "step/raw")}
        path = t + "/run/step/model-00001-of-00002.safetensors"
        data = read_all(path)
        os.truncate(path, len(data) - 4)
        fsync(m / "step/config.json")
        broken = 0
        for name, want in whole.items():
            try:
                same(name, read_all(m / f"step/raw/{name}"), want)
            except OSError as e:
                same(name, errno.errorcode[e.errno], "EIO")
                broken += 1
        assert broken, "none is broken"
        write_file(m / "step/model-00001-of-00002.safetensors", data)
        wait_for("mended", PATIENCE, lambda: all(shows(m / f"step/raw/{n}") == data for n, data in whole.items()))
        umount(m)
    same("tensors", tensors_of(t + "/run/step"), make_tensors(1))


if __name__ == "__main__":
    main(globals())
