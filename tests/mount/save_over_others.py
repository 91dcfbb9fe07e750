# SPDX-License-Identifier: MIT
"""Models that are saved into a directory that is there, with others at work in it, and what lies in it that is no plain file."""
import errno
import os
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, Skip, fails, main, make_tensors, read_all, same, write_checkpoint, write_file  # noqa: E402
from save_over import image, save_file  # noqa: E402
from save_whole import fsync  # noqa: E402

SET = "rw,save=dcp:ranks=2"  # several files: the directory is exchanged


def test_directories_come_and_go_while_others_are_published(t):
    """Who makes a stage waits for who publishes one, and never the other way round as well."""
    names = [f"run{i}" for i in range(4)]
    for name in names:
        os.makedirs(f"{t}/src/{name}")
    rounds, errors = {}, []

    def save(m, name, end):
        try:
            while time.monotonic() < end:
                save_file(m / name + "/model.safetensors", image(1))
                fsync(m / name)
                shutil.rmtree(m / name)
                os.mkdir(m / name)
                fsync(m / name)
                rounds[name] = rounds.get(name, 0) + 1
        except OSError as e:
            errors.append(f"{name}: {e}")

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        threads = [threading.Thread(target=save, args=(m, name, time.monotonic() + 4), daemon=True) for name in names]
        for x in threads:
            x.start()
        for x in threads:
            x.join(PATIENCE)
        stuck = any(x.is_alive() for x in threads)
        if stuck:
            m.process.kill()  # else this waits as well
        assert not stuck, "they wait for each other"
        same("errors", errors, [])
        assert len(rounds) == len(names), rounds


def test_what_is_mounted_below_is_not_emptied(t):
    """A volume for logs in the directory: with the directory that was there it would go."""
    os.makedirs(t + "/src/run/logs")
    os.makedirs(t + "/volume")
    write_file(t + "/volume/events", b"of the volume")
    if subprocess.run(["mount", "--bind", t + "/volume", t + "/src/run/logs"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("no right to mount")
    try:
        with Mount(t + "/src", t + "/mnt", SET) as m:
            write_checkpoint(m / "run", make_tensors(1))
            fails("a set", errno.EROFS, lambda: fsync(m / "run"))
            assert "logs: a file system is mounted there" in m.messages(), m.messages()
        same("the volume", read_all(t + "/volume/events"), b"of the volume")
        same("shown there", read_all(t + "/src/run/logs/events"), b"of the volume")
    finally:
        subprocess.run(["umount", "-l", t + "/src/run/logs"], check=False)


def test_the_root_of_a_file_system_is_refused(t):
    """What is staged beside it lies on another one: told when the name is made, not when all is written."""
    os.makedirs(t + "/src")
    if subprocess.run(["mount", "-t", "tmpfs", "none", t + "/src"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("no right to mount")
    try:
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            fails("a copy", errno.EROFS, lambda: open(m / "model.safetensors", "wb"))
            fails("a saver", errno.EROFS, lambda: save_file(m / "model.safetensors", image(1)))
            os.mkdir(m / "run")
            save_file(m / "run/model.safetensors", image(1))
            fsync(m / "run")
        same("a directory of it", read_all(t + "/src/run/model.safetensors"), image(1))
    finally:
        subprocess.run(["umount", "-l", t + "/src"], check=False)


if __name__ == "__main__":
    main(globals())
