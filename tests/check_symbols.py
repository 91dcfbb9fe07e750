# SPDX-License-Identifier: MIT
"""Our global names are not those of a library: check_symbols.py FILE... | --self-test CC...

A function of a program that has the name of one of its libraries' takes that one's place in
the library too. The linker tells: it puts such a name into the program's dynamic table,
where no other name of ours is. A library of ours has the names of its version there.
"""
import os
import subprocess
import sys
import tempfile

OURS = "@@UNSHARD_"


def taken(path):
    """Names that `path` defines for others, and should not."""
    table = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in table.splitlines()]
    kinds = [line.split()[-2] for line in table.splitlines()]
    # Data of libc that the program has a copy of is named with libc's version.
    return sorted(n for n, k in zip(names, kinds) if k != "A" and OURS not in n and "@" not in n and not n.startswith("__"))


def self_test(cc):
    """A program with a name of zlib's is found, one without is not."""
    with tempfile.TemporaryDirectory() as folder:
        for text, wanted in (("int mine(void) { return 0; } ", []), ("unsigned long crc32(void) { return 0; } ", ["crc32"])):
            source, program = os.path.join(folder, "a.c"), os.path.join(folder, "a")
            with open(source, "w", encoding="ascii") as f:
                f.write("const char *zlibVersion(void); " + text + "int main(void) { return !zlibVersion(); }\n")
            subprocess.run([*cc, "-w", source, "-o", program, "-lz"], check=True)
            if taken(program) != wanted:
                sys.exit(f"of {text!r} this was found: {taken(program)}")


if sys.argv[1] == "--self-test":
    self_test(sys.argv[2:])
    sys.exit(0)
bad = {path: names for path in sys.argv[1:] if (names := taken(path))}
for path, names in bad.items():
    print(f"{path} has names of its libraries: {', '.join(names)}")
sys.exit(1 if bad else 0)
