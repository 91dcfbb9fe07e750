#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""`unshard cache`: what lies in the cache directory, its limit, and clearing it."""
import glob
import os
import sqlite3
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from commands import DCP, Cli, SOURCE, USAGE  # noqa: E402
from mountlib import main, make_tensors, same, write_checkpoint, write_file  # noqa: E402

GIB = 1 << 30


def taken(path):
    """What du says."""
    return sum(os.lstat(os.path.join(d, f)).st_blocks * 512 for d, _, files in os.walk(path) for f in files + ["."])


def test_an_empty_one(t):
    cli = Cli(t)
    out = cli.json("cache")
    same("directory", out["directory"], t + "/cache/unshardfs")
    same("blocks", out["blocks"], {"limit": 8 * GIB, "bytes": 0, "valid": 0, "blocks": 0, "read_only": False, "sources": []})
    same("indexes", out["indexes"], [])
    same("decoded", out["decoded"], {"pieces": 0, "bytes": 0})
    assert not os.path.exists(t + "/cache/unshardfs/blocks"), "looking made it"


def test_indexes_are_listed_and_cleared(t):
    cli = Cli(t)
    write_checkpoint(t + "/one", make_tensors(1))
    for source in (t + "/one", DCP):
        cli.run("ls", source)
    rows = {r["source"]: r for r in cli.json("cache", "list")["indexes"]}
    same("sources", sorted(rows), sorted([t + "/one", DCP]))
    for row in rows.values():
        files = glob.glob(os.path.join(t, "cache/unshardfs/index", row["file"]) + "*")
        same("bytes", row["bytes"], sum(os.lstat(path).st_blocks * 512 for path in files))
        same("in use", row["in_use"], False)
    text = cli.run("cache").stdout
    assert t + "/one" in text and DCP in text and "indexes: 2," in text, text
    out = cli.json("cache", "clear")
    same("cleared", (out["indexes"], out["in_use"]), (2, 0))
    same("left", cli.json("cache")["indexes"], [])
    cli.run("ls", DCP)
    same("made anew", len(cli.json("cache")["indexes"]), 1)


def test_an_index_in_use_stays(t):
    cli = Cli(t)
    write_checkpoint(t + "/one", make_tensors(1))
    cli.run("ls", t + "/one")
    row = cli.json("cache")["indexes"][0]
    db = sqlite3.connect(os.path.join(t, "cache/unshardfs/index", row["file"]))
    if db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":  # not on disks of the network
        db.execute("SELECT count(*) FROM source").fetchone()
        same("in use", cli.json("cache")["indexes"][0]["in_use"], True)
        out = cli.json("cache", "clear")
        same("cleared", (out["indexes"], out["in_use"]), (0, 1))
    db.close()
    same("in use", cli.json("cache")["indexes"][0]["in_use"], False)
    same("cleared", cli.json("cache", "clear")["indexes"], 1)


def test_a_damaged_index_is_shown(t):
    cli = Cli(t)
    cli.run("ls", DCP)
    row = cli.json("cache")["indexes"][0]
    write_file(os.path.join(t, "cache/unshardfs/index", row["file"]), b"no database at all" * 300)
    same("source", cli.json("cache")["indexes"][0]["source"], None)
    assert "(damaged)" in cli.run("cache").stdout
    same("cleared", cli.json("cache", "clear")["indexes"], 1)


def test_the_limit(t):
    cli = Cli(t)
    same("at first", cli.json("cache", "limit")["limit"], 8 * GIB)
    same("set", cli.json("cache", "limit", "20G")["limit"], 20 * GIB)
    same("kept", cli.json("cache", "limit")["limit"], 20 * GIB)
    same("shown", cli.json("cache")["blocks"]["limit"], 20 * GIB)
    assert cli.run("cache", "limit").stdout == "20.0 GiB\n"
    assert taken(t + "/cache/unshardfs/blocks") < 100 << 10, "a limit takes no room"
    same("smaller", cli.json("cache", "limit", "4M")["limit"], 4 << 20)
    for size in ("1M", "0", "many", ""):
        cli.error("cache", "limit", size, status=USAGE, words=["4M"])
    cli.error("cache", "nonsense", status=USAGE, words=["nonsense", "clear"])
    cli.error("cache", "list", "more", status=USAGE, words=["more"])


def test_a_directory_of_ones_own(t):
    cli = Cli(t)
    same("limit", cli.json("cache", "limit", "30M", "-o", f"cache_dir={t}/other")["limit"], 30 << 20)
    same("limit", cli.json("cache", "-o", f"cache_dir={t}/other")["blocks"]["limit"], 30 << 20)
    same("the usual one", cli.json("cache")["blocks"]["limit"], 8 * GIB)
    write_file(t + "/file", b"")
    cli.error("cache", "-o", f"cache_dir={t}/file", status=SOURCE, words=["file"])


if __name__ == "__main__":
    main(globals())
