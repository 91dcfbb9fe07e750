# SPDX-License-Identifier: MIT
"""Writes device code as an aligned C array: embed_code.py INPUT OUTPUT NAME."""
import sys

source, target, name = sys.argv[1:]
with open(source, "rb") as f:
    data = f.read()
rows = [data[i : i + 16] for i in range(0, len(data), 16)]
with open(target, "w", encoding="ascii") as f:
    f.write(f"extern const unsigned char {name}[];\n")
    f.write(f"const unsigned char {name}[] __attribute__((aligned(16))) = {{\n")
    for row in rows:
        f.write("    " + ", ".join(str(b) for b in row) + ",\n")
    f.write("};\n")
