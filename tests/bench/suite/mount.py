# SPDX-License-Identifier: MIT
"""A mount for as long as a `with` lasts, of ours or of a bare server, and the end of those that outlive theirs."""
import os
import pathlib
import subprocess
import tempfile
import time

from suite.measure import Failed, failure


def is_running(pid):
    """A process that has ended stays in /proc where the one that should bury it does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Mount:
    """`unshard mount` of a source; `server` is the process that answers, `mounted_in` how long the command took.

    as_user: a command that its own follows, as another user.
    """

    def __init__(self, binary, source, cache, options="", as_user=()):
        self.binary, self.path = str(binary), tempfile.mkdtemp(prefix="mnt-", dir=pathlib.Path(cache).parent)
        if as_user:
            os.chmod(self.path, 0o777)
        begin = time.monotonic()
        p = subprocess.run([*as_user, self.binary, "mount", str(source), self.path, "-o", f"cache_dir={cache}{options}"],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.mounted_in = time.monotonic() - begin
        if p.returncode:
            os.rmdir(self.path)
            raise failure(["unshard mount"], p.returncode, p.stdout)
        self.server = self.find_server()

    def find_server(self):
        for proc in pathlib.Path("/proc").iterdir():
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0") if proc.name.isdigit() else []
            except OSError:
                continue
            if self.path.encode() in words and b"mount" in words:
                return int(proc.name)
        raise Failed("the server of the mount is not to be found")

    def __truediv__(self, name):
        return pathlib.Path(self.path) / name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([self.binary, "umount", self.path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if os.path.ismount(self.path):
            subprocess.run(["fusermount3", "-uz", self.path], check=False)
        while is_running(self.server):  # it may have something to put away
            time.sleep(0.002)
        os.rmdir(self.path)


class BareServer:
    """A mount of bench_server, `program`: its file is `path`. ranges: [(file, offset, bytes)], as bench_reader has them.

    Where a mount of ours asks for mapped files in larger pieces (root's, decision 020), so does this one; and it has a session of its own,
    as daemons have: the kernel's scheduler takes sessions for groups, and one that was the reader's would be a quarter quicker.
    """

    def __init__(self, program, work, ranges, row=0, read_ahead_kb=1024):
        self.folder = tempfile.mkdtemp(prefix="bare-", dir=work)
        self.path = pathlib.Path(self.folder) / "bytes"
        self.process = subprocess.Popen([str(program), self.folder, str(row), *(":".join(map(str, r)) for r in ranges)], stderr=subprocess.PIPE,
                                        start_new_session=True)
        self.server = self.process.pid
        while not os.path.ismount(self.folder):
            if self.process.poll() is not None:
                raise failure([program], self.process.returncode, self.process.stderr.read())
            time.sleep(0.002)
        device = os.stat(self.folder).st_dev
        try:
            pathlib.Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").write_text(str(read_ahead_kb))
        except OSError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if subprocess.run(["fusermount3", "-u", self.folder], stderr=subprocess.DEVNULL, check=False).returncode:
            subprocess.run(["umount", "-l", self.folder], stderr=subprocess.DEVNULL, check=False)
        self.process.stderr.close()
        self.process.wait()
        os.rmdir(self.folder)


def unmount_below(folder):
    """How many mounts were left below a folder; they are gone now."""
    left = 0
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        where = line.split()[1]
        if where.startswith(str(folder) + "/"):
            left += 1
            if subprocess.run(["fusermount3", "-uz", where], stderr=subprocess.DEVNULL, check=False).returncode:
                subprocess.run(["umount", "-l", where], stderr=subprocess.DEVNULL, check=False)
    return left
