# SPDX-License-Identifier: MIT
"""Writes a text file as a C array: embed.py INPUT OUTPUT NAME."""
import sys

source, target, name = sys.argv[1:]
with open(source, "rb") as f:
    data = f.read() + b"\0"
rows = [data[i : i + 16] for i in range(0, len(data), 16)]
with open(target, "w", encoding="ascii") as f:
    f.write(f"static const char {name}[] = {{\n")
    for row in rows:
        f.write("    " + ", ".join(str(b) for b in row) + ",\n")
    f.write("};\n")
