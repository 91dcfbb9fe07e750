# SPDX-License-Identifier: MIT
"""UFS_READERS changes with each source that decides what an index says: check_readers.py ROOT."""
import os
import shutil
import subprocess
import sys
import tempfile

root = sys.argv[1]


def readers(tree):
    """The text of the header that index/readers.py makes of a tree."""
    header, depfile = os.path.join(tree, "readers.h"), os.path.join(tree, "readers.d")
    subprocess.run([sys.executable, os.path.join(root, "index/readers.py"), tree, header, depfile], check=True)
    with open(header, encoding="ascii") as f, open(depfile, encoding="utf-8") as d:
        return f.read(), d.read()


with tempfile.TemporaryDirectory() as tree:
    for room in ("base", "remote", "index", "maps", "cli"):
        shutil.copytree(os.path.join(root, room), os.path.join(tree, room))
    before, inputs = readers(tree)
    assert readers(tree)[0] == before
    for name in ("base/json.c", "remote/tar.c", "index/schema.sql", "index/formats/dcp/dcp_fold.c", "maps/olmo-to-hf.json", "cli/cmd_version.c"):
        with open(os.path.join(tree, name), "a", encoding="utf-8") as f:
            f.write("\n")
        now = readers(tree)[0]
        counts = not name.startswith("cli/")
        assert (now != before) == counts, name
        assert (os.path.join(tree, name) in inputs) == counts, name
        before = now
    os.rename(os.path.join(tree, "index/grid.c"), os.path.join(tree, "index/other.c"))
    assert readers(tree)[0] != before
