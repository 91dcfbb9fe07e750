#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Holds docs/security.md against the tree: check_security_table.py SOURCE_ROOT | --self-test.

Each of the fifteen rules has its row; each row names what enforces it and the tests that prove it, as
`FILE::NAME`; each of these is there, and a test in C is one that its program runs.
"""
import pathlib
import re
import sys

RULES = 15
PLACE = re.compile(r"`([\w./-]+\.(?:c|h|py))::(\w+)`")


def rows_of(text):
    """The cells of each table's row, without heads."""
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 4 and cells[3] != "proved by":
            yield cells


def is_test(path):
    return path.startswith("tests/")


def why_not(root, path, name):
    """What is wrong with a place, or None."""
    try:
        text = (root / path).read_text(encoding="utf-8")
    except OSError:
        return "no such file"
    if path.endswith(".py"):
        return None if re.search(rf"^def {name}\(", text, re.M) else "no such function"
    if not re.search(rf"^(?:\w[\w *]*[ *])?{name}\(|^enum \{{.*\b{name}\b", text, re.M):
        return "no such function"
    in_list = rf"\b\w+\([^()]*\b{name}\b|[{{,=]\s*{name}\b"
    if is_test(path) and re.search(r"\bcmocka_\w+\(", text) and not re.search(in_list, text):
        return "no program runs it"
    return None


def check(root, text):
    """All that is wrong with the page, and how many places it names."""
    wrong, places, rules = [], 0, []
    for cells in rows_of(text):
        what = f"rule {cells[0]}" if cells[0].isdigit() else cells[0]
        if cells[0].isdigit():
            rules.append(int(cells[0]))
        for cell in cells[2:]:
            found = PLACE.findall(cell)
            places += len(found)
            wrong += [f"{what}: {path}::{name}: {why}" for path, name in found if (why := why_not(root, path, name))]
            if "`" in PLACE.sub("", cell):
                wrong.append(f"{what}: this is no FILE::NAME: {PLACE.sub('', cell)}")
        tests = [path for path, _ in PLACE.findall(cells[3]) if is_test(path)]
        if not tests and cells[3] != "see below":
            wrong.append(f"{what}: no test")
    if rules != list(range(1, RULES + 1)):
        wrong.append(f"rules {rules}, not 1 to {RULES}")
    return wrong, places


def self_test(root):
    """Each change of the page that must be noticed is."""
    text = (root / "docs" / "security.md").read_text(encoding="utf-8")
    changes = {  # what is written instead: the words of the complaint
        ("test_not_an_archive`", "test_an_archive`"): "no such function",
        ("tests/unit/test_zip.c", "tests/unit/test_zap.c"): "no such file",
        ("test_zip.c::test_names_refused", "test_zip.c::expect_refused"): "no program runs it",
        ("index/cover.c::cover_check", "index/cover.c::cover"): "no such function",
        ("| 7 |", "| 8 |"): "not 1 to 15",
        ("`tests/unit/test_pickle.c::test_key_bombs`", "by thought"): "no test",
        ("`tests/unit/test_pickle.c::test_key_bombs`", "`test_key_bombs`"): "no FILE::NAME",
    }
    unseen = [old for (old, new), words in changes.items()
              if old not in text or not any(words in w for w in check(root, text.replace(old, new, 1))[0])]
    for old in unseen:
        print(f"self-test: a change of {old} is not noticed")
    return 1 if unseen else 0


def main(args):
    if args == ["--self-test"]:
        return self_test(pathlib.Path(__file__).resolve().parents[1])
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(args[0])
    wrong, places = check(root, (root / "docs" / "security.md").read_text(encoding="utf-8"))
    print("\n".join([*wrong, f"{places} places, {len(wrong)} faults"]))
    return 1 if wrong or places == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
