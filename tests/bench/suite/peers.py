# SPDX-License-Identifier: MIT
"""The Python environment of the peers: made once from requirements.txt, or taken as it is."""
import hashlib
import pathlib
import shutil
import subprocess
import sys

from suite.workloads import HERE, ROOT

SHOWN = ("torch", "safetensors", "transformers", "fastsafetensors", "runai-model-streamer", "ai2-olmo-core", "deepspeed", "tensorstore")


def say(words):
    print(words, file=sys.stderr, flush=True)


def requirements():
    """[(lines, options)]: the second file is installed without what it asks for."""
    return [(HERE / "requirements.txt", ()), (HERE / "frameworks.txt", ("--no-deps",))]


def make(venv):
    """Returns whether all of it was installed."""
    shutil.rmtree(venv.parent, ignore_errors=True)
    venv.parent.mkdir(parents=True)
    pip = [str(venv / "bin/pip"), "install", "-q", "--no-input", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, stdout=subprocess.DEVNULL)
        for file, options in requirements():
            subprocess.run([*pip, *options, "-r", str(file)], check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as e:
        say(f"The peers could not be installed ({e}): going on without them.")
        return False
    return True


def find(given=None):
    """The Python that has them, or None. One that is made is kept for as long as the requirements stay the same."""
    if given:
        return str(pathlib.Path(given).absolute() / "bin/python")
    text = b"".join(file.read_bytes() for file, _ in requirements()) + sys.version.encode()
    venv = ROOT / "build-bench" / "venv" / hashlib.sha256(text).hexdigest()[:16]
    if not (venv / "complete").exists():
        say("Installing the peers (torch and others, some GiB) into build-bench/venv; --no-peers goes without.")
        if not make(venv):
            return None
        (venv / "complete").touch()
    return str(venv / "bin/python")


def versions(python):
    """What is installed of them, as words."""
    if not python:
        return ""
    code = ("import sys\nfrom importlib import metadata\n"
            "for n in sys.argv[1:]:\n try: print(n, metadata.version(n))\n except metadata.PackageNotFoundError: pass")
    p = subprocess.run([python, "-c", code, *SHOWN], stdout=subprocess.PIPE, check=False)
    return ", ".join(p.stdout.decode().splitlines())
