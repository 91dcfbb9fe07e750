# SPDX-License-Identifier: MIT
"""A mount for as long as a `with` lasts, and the end of those that outlive theirs."""
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
    """`unshard mount` of a source; `server` is the process that answers, `mounted_in` how long the command took."""

    def __init__(self, binary, source, cache, options=""):
        self.binary, self.path = str(binary), tempfile.mkdtemp(prefix="mnt-", dir=pathlib.Path(cache).parent)
        begin = time.monotonic()
        p = subprocess.run([self.binary, "mount", str(source), self.path, "-o", f"cache_dir={cache}{options}"],
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
