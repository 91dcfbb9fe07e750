#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What people see: `info`, `ls`, `stats` and progress on terminals of 120, 80 and 40 columns, by a pty.

The captures are exact: tests/cli/captures/NAME.COLUMNS holds what is on the screen, without colours. `--write` makes them
anew; read the difference before it is committed.
"""
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
import unicodedata

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "mount"))
from mountlib import PATIENCE, UNSHARD, main, make_tensors, same, write_checkpoint, write_file  # noqa: E402

DATA = os.environ.get("TEST_DATA", os.path.join(HERE, "..", "data"))
CAPTURES = os.path.join(HERE, "captures")
WIDTHS = (120, 80, 40)
UTF8 = {"LC_ALL": "C.UTF-8"}
WRITE = False

SETTINGS = ("COLUMNS", "NO_COLOR", "LANG", "LC_CTYPE", "LC_ALL", "TERM")


def environment(t, **more):
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    return {**env, "XDG_CACHE_HOME": t + "/cache", "TERM": "xterm-256color", **UTF8, **more}


def on_terminal(t, columns, *args, status=0, cwd=None, stdout=None, read=None, **env):
    """Runs it with standard output and error on a terminal (or with stdout elsewhere, which read() empties)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    process = subprocess.Popen([UNSHARD, *args], stdin=subprocess.DEVNULL, stdout=stdout or theirs, stderr=theirs, cwd=cwd,
                               env=environment(t, **env))
    os.close(theirs)
    shown = []

    def collect():
        try:
            while data := os.read(ours, 1 << 16):
                shown.append(data)
        except OSError:  # EIO: nobody has the other side any more
            pass

    reader = threading.Thread(target=collect)
    reader.start()
    if read:
        read(process)
    same(f"status of {args}", process.wait(600), status)
    reader.join(PATIENCE)
    os.close(ours)
    return b"".join(shown).decode().replace("\r\n", "\n")


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def columns_of(line):
    """As a terminal counts them."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def check_fits(name, text, columns):
    for line in without_colours(text).splitlines():
        if columns_of(line) > columns:
            raise AssertionError(f"{name}: {columns_of(line)} columns on {columns}: {line!r}")


def run_directory(t):
    """Two steps of four ranks, a model of Hugging Face's, and one with a shard that is gone, by names that are always the same."""
    run = t + "/run7"
    shutil.copytree(os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r"), run + "/step100")
    shutil.copytree(os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r"), run + "/step200")
    shutil.copytree(os.path.join(DATA, "safetensors", "hf_single_bf16"), run + "/export")
    write_file(run + "/export/tokenizer.json", b"{}")
    shutil.copytree(os.path.join(DATA, "megatron", "bridge_moe_ep2"), run + "/iter")
    damaged = make_tensors(1)
    write_checkpoint(run + "/damaged", damaged)
    os.remove(run + "/damaged/model-00002-of-00002.safetensors")
    odd = {"weights": ("F32", (4,), struct.pack("<4f", 1, float("nan"), 0, float("inf"))),
           "empty": ("F16", (0,), b""), "ids": ("I64", (2, 2), struct.pack("<4q", 0, 50256, 3, 4))}
    write_checkpoint(run + "/odd", odd, shards=1)
    return run


CAPTURED = {
    "info": ("info", "step200"), "info-megatron": ("info", "iter"), "info-damaged": ("info", "damaged"), "info-export": ("info", "export"),
    "ls": ("ls", "step200", "model.*"), "ls-long": ("ls", "step200", "*head*", "-l"), "ls-damaged": ("ls", "damaged"), "ls-tree": ("ls", "."),
    "stats": ("stats", "step200", "model.*"), "stats-odd": ("stats", "odd"), "stats-damaged": ("stats", "damaged"),
}
STATUS = {"stats-damaged": 3}


def test_captures(t):
    run = run_directory(t)
    for name, args in CAPTURED.items():
        for columns in WIDTHS:
            text = on_terminal(t, columns, *args, status=STATUS.get(name, 0), cwd=run)
            check_fits(name, text.split("unshard: ")[0], columns)
            same(f"{name}: without colours by NO_COLOR", on_terminal(t, columns, *args, status=STATUS.get(name, 0), cwd=run, NO_COLOR="1"),
                 without_colours(text))
            path = os.path.join(CAPTURES, f"{name}.{columns}")
            if WRITE:
                write_file(path, without_colours(text).encode())
            with open(path, encoding="utf-8") as f:
                same(f"{name} on {columns} columns", without_colours(text), f.read())
            assert not re.search(" $", without_colours(text), re.M), f"{name}: spaces at the end of a line"


def test_who_gets_colours(t):
    run = run_directory(t)
    for args in (["info", run + "/step200"], ["ls", run + "/step200"], ["stats", run + "/step200", "*head*"], ["verify", run + "/step200"], ["ls", run]):
        def shown(*more, args=args, **env):
            return on_terminal(t, 80, *args, *more, **env)
        piped = subprocess.run([UNSHARD, *args], capture_output=True, text=True, timeout=600, env=environment(t), check=True).stdout
        assert "\x1b" not in piped, piped
        assert "\x1b[" in shown() and "\x1b[" in shown("--color=auto"), args
        for plain in (shown(NO_COLOR="1"), shown("--color=never"), shown("--color", "never")):
            same("the same words", plain, without_colours(shown()))
        same("NO_COLOR is empty: it is not set", shown(NO_COLOR=""), shown())
        same("a dumb terminal is a pipe", shown(TERM="dumb"), piped)
        same("without TERM", shown(TERM=""), piped)
        always = subprocess.run([UNSHARD, *args, "--color=always"], capture_output=True, text=True, timeout=600, check=True,
                                env=environment(t, NO_COLOR="1", COLUMNS="80")).stdout
        same("--color=always in a pipe", always, shown())
    done = subprocess.run([UNSHARD, "ls", run, "--color=some"], capture_output=True, text=True, timeout=600, env=environment(t))
    same("status", done.returncode, 2)
    same("words", done.stderr, "unshard: --color some: no value of this option (there are auto, always and never)\n")


def test_json_is_the_same_everywhere(t):
    run = run_directory(t)
    for args in (["info", "step200"], ["ls", "step200"], ["ls", "."], ["stats", "step200", "*head*"]):
        piped = subprocess.run([UNSHARD, *args, "--json"], capture_output=True, text=True, timeout=600, env=environment(t), cwd=run, check=True).stdout
        same(f"{args}", on_terminal(t, 40, *args, "--json", cwd=run), piped)


def test_columns_in_the_environment_go_first(t):
    run = run_directory(t)
    same("as on 40", on_terminal(t, 120, "ls", "step200", cwd=run, COLUMNS="40"), on_terminal(t, 40, "ls", "step200", cwd=run))
    same("nonsense", on_terminal(t, 120, "ls", "step200", cwd=run, COLUMNS="x"), on_terminal(t, 120, "ls", "step200", cwd=run))


HOSTILE = ["a\x1b[31mred", "line\nbreak", "bell\x07", "del\x7f", "c1\u009b31m", "turned\u202eeman", "hidden\u200b", "\u2028line", "ключ", "重み", "e\u0301"]


def test_names_cannot_harm_a_terminal(t):
    write_checkpoint(t + "/hf", {k: ("F32", (1,), struct.pack("<f", i)) for i, k in enumerate(HOSTILE)}, shards=1)
    for args in (["ls", t + "/hf"], ["ls", t + "/hf", "-l"], ["stats", t + "/hf"], ["info", t + "/hf"]):
        for columns in (200, 40):
            plain = on_terminal(t, columns, *args, NO_COLOR="1")
            bad = [c for c in plain if c != "\n" and (unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp"))]
            same(f"{args} on {columns}: control characters", bad, [])
            check_fits(args, plain, columns)
            ascii_only = on_terminal(t, columns, *args, NO_COLOR="1", LC_ALL="C")
            assert ascii_only.isascii(), ascii_only
            check_fits(args, ascii_only, columns)
    text = on_terminal(t, 200, "ls", t + "/hf", NO_COLOR="1")
    for word in ("a%1B[31mred", "line%0Abreak", "c1%C2%9B31m", "turned%E2%80%AEeman", "ключ", "重み", "e\u0301"):
        assert word in text, f"{word!r} is not in {text}"
    rows = text.splitlines()[1:-1]
    same("columns where dtypes stand", {columns_of(row[:row.index("F32")]) for row in rows}, {columns_of(rows[0][:rows[0].index("F32")])})
    assert "%D0%BA" in on_terminal(t, 200, "ls", t + "/hf", NO_COLOR="1", LC_ALL="C")


def test_locales(t):
    run = run_directory(t)

    def bars(**env):
        return "█" in on_terminal(t, 120, "stats", run + "/step200", "*head*", LC_ALL="", **env)
    same("LANG", (bars(LANG="en_US.UTF-8"), bars(LANG="de_DE.utf8"), bars(LANG="de_DE"), bars()), (True, True, False, False))
    same("LC_CTYPE goes first", (bars(LANG="C", LC_CTYPE="C.UTF-8"), bars(LANG="C.UTF-8", LC_CTYPE="C")), (True, False))
    assert "#" in on_terminal(t, 120, "stats", run + "/step200", "*head*", LC_ALL="C"), "no bars in ASCII"


# ---- progress ----

def big_checkpoint(t, mib):
    write_checkpoint(t + "/big", {"w": ("U8", (mib << 20,), bytes(mib << 20))}, shards=1)
    return t + "/big"


def slow_reader(seconds):
    """Empties the pipe in that time, so that what writes into it takes as long."""
    def read(process):
        pipe = process.stdout
        for _ in range(20):
            pipe.read(1 << 20)
            time.sleep(seconds / 20)
        pipe.read()
        pipe.close()
    return read


def drawings(shown):
    """The lines that were drawn over each other."""
    return [without_colours(line) for line in shown.replace("\x1b[K", "").split("\r") if line]


def test_progress_of_a_tensor_that_is_read_slowly(t):
    source = big_checkpoint(t, 32)
    rate = r"\d+(\.\d+)? [KMG]?i?B/s"
    want = {
        120: rf"cat w  +\d+%  [━─]+  [\d.]+ [KM]?i?B of 32\.0 MiB  {rate}  (\d+ s left|finishing|\? left)",
        80: rf"cat w  +\d+%  [━─]+  [\d.]+ [KM]?i?B of 32\.0 MiB  {rate}  (\d+ s left|finishing|\? left)",
        40: rf"cat w  +\d+%  {rate}  (\d+ s left|finishing|\? left)",
    }
    for columns in WIDTHS:
        shown = on_terminal(t, columns, "cat", source, "w", stdout=subprocess.PIPE, read=slow_reader(2.0))
        lines = drawings(shown)
        assert len(lines) >= 5, shown
        for line in lines:
            assert columns_of(line) < columns, f"{columns_of(line)} columns on {columns}: {line!r}"
            assert re.fullmatch(want[columns], line), f"on {columns}: {line!r}"
        assert shown.endswith("\r\x1b[K"), f"not taken away: {shown[-80:]!r}"
        percents = [int(re.search(r"(\d+)%", line)[1]) for line in lines]
        same("it goes up", percents, sorted(percents))
    shown = on_terminal(t, 80, "cat", source, "w", stdout=subprocess.PIPE, read=slow_reader(1.0), LC_ALL="C", NO_COLOR="1")
    assert "#" in shown and shown.isascii() and "\x1b[3" not in shown, shown


def test_no_progress_where_nobody_looks(t):
    source = big_checkpoint(t, 32)
    for more, env in ((["-q"], {}), ([], {"TERM": "dumb"})):
        same(f"{more} {env}", on_terminal(t, 80, "cat", source, "w", *more, stdout=subprocess.PIPE, read=slow_reader(1.0), **env), "")
    # What is quick: on a machine with much else to do not each time.
    shown = [on_terminal(t, 80, "cat", source, "w", stdout=subprocess.PIPE, read=slow_reader(0)) for _ in range(2)]
    while "" not in shown and len(shown) < 20:
        shown.append(on_terminal(t, 80, "cat", source, "w", stdout=subprocess.PIPE, read=slow_reader(0)))
    assert "" in shown, shown


# ---- completion ----

def completed(*words):
    """What bash would offer for the last word."""
    script = f'source {HERE}/../../docs/unshard.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() {{ :; }}; _unshard "$1"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script, "bash", UNSHARD, *words], capture_output=True, text=True, timeout=600, check=True)
    return done.stdout.split()


def listed(*words):
    return subprocess.run([UNSHARD, "--complete", *words], capture_output=True, text=True, timeout=600, check=True).stdout.split()


def test_completion(t):
    usage = subprocess.run([UNSHARD, "--help"], capture_output=True, text=True, timeout=600, check=True).stdout
    verbs = re.findall(r"^  unshard (\w+)", usage, re.M)
    same("commands", sorted(listed()), sorted(verbs))
    same("co", completed("co"), ["convert"])
    same("ls --co", completed("ls", "--co"), ["--color"])
    same("ls --color n", completed("ls", "--color", "n"), ["never"])
    same("ls --color=n", completed("ls", "--color", "=", "n"), ["never"])
    same("convert --to d", sorted(completed("convert", "a", "b", "--to", "d")), ["dcp", "dcp-hf"])
    same("mount -o ro,map", completed("mount", "a", "-o", "ro,map"), ["ro,map="])
    assert "allow_other" in listed("mount", "-o") and "allow_other" not in listed("ls", "-o")
    for verb in verbs:
        for option in listed(verb):
            done = subprocess.run([UNSHARD, verb, option + "=x" if option.startswith("--") else option], capture_output=True, text=True, timeout=600,
                                  stdin=subprocess.DEVNULL, env=environment(t), cwd=t)
            assert "takes no -" not in done.stderr and "no such option" not in done.stderr, (verb, option, done.stderr)
    for option in ("--to", "--mesh", "--deep"):
        assert option not in listed("ls"), listed("ls")


if __name__ == "__main__":
    if "--write" in sys.argv:
        sys.argv.remove("--write")
        WRITE = True
    main(globals())
