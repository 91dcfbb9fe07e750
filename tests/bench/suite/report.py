# SPDX-License-Identifier: MIT
"""Rows as a table for a terminal and as pages of Markdown."""
import datetime
import os
import pathlib
import platform
import subprocess

from suite import plot, rows
from suite.workloads import FAMILIES

MARK = "<!-- measured -->\n"


def figure(value, unit=""):
    if value is None:
        return ""
    if unit in ("", "×"):
        return f"{value:.2f}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def bound(row):
    if row.goal is None:
        return ""
    return f"{'≥' if row.better == rows.HIGHER else '≤'} {figure(row.goal, row.unit)}"


def result(row):
    """median (best)"""
    if row.value is None:
        return ""
    return figure(row.value, row.unit) + (f" ({figure(row.best, row.unit)})" if row.best is not None else "")


def processor(row):
    return f"{row.cpu[0]:.0f} → {row.cpu[1]:.0f}" if row.cpu else ""


COLUMNS = (
    ("work", lambda r: r.work),
    ("floor or peer", lambda r: r.against),
    ("its figure", lambda r: r.theirs),
    ("ours", lambda r: r.ours),
    ("goal", bound),
    ("lab", lambda r: figure(r.lab, r.unit)),
    ("bare server", lambda r: figure(r.bare, r.unit)),
    ("before", lambda r: figure(r.before, r.unit)),
    ("median (best)", result),
    ("CPU µs/MiB", processor),
    ("RSS MiB", lambda r: f"{r.rss:.0f}" if r.rss is not None else ""),
    ("load", lambda r: f"{r.load:.1f}" if r.load is not None else ""),
    ("verdict", lambda r: r.verdict()),
)


def cells(items):
    """The header and the rows as text, without the columns that all of them leave empty."""
    table = [[name for name, _ in COLUMNS]] + [[" ".join(text(r).split()) for _, text in COLUMNS] for r in items]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in table[1:])]
    return [[line[i] for i in used] for line in table]


def aligned(table):
    width = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, width)).rstrip() for line in table]


def markdown_table(table):
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    return [lines[0], "|" + "---|" * len(table[0]), *lines[1:]]


def curve_table(curve):
    """A line a size, a column a line of the curve."""
    sizes = sorted({x for points in curve.lines.values() for x, _ in points})
    by_line = [dict(points) for points in curve.lines.values()]
    return [[curve.size, *(f"{name}, {curve.unit}" for name in curve.lines)],
            *([f"{x:,.0f}", *(f"{points[x]:.4g}" if x in points else "" for points in by_line)] for x in sizes)]


def of_family(items, family):
    mine = [i for i in items if i.family == family]
    return [i for i in mine if isinstance(i, rows.Row)], [i for i in mine if isinstance(i, rows.Curve)]


def terminal(items):
    lines = []
    for family, title in FAMILIES.items():
        plain, curves = of_family(items, family)
        if plain or curves:
            lines += ["", title, ""]
        if plain:
            lines += aligned(cells(plain))
        for curve in curves:
            lines += ["", curve.title, *aligned(curve_table(curve)), curve.verdict()]
    return "\n".join(lines)


def markdown(head, items, plots):
    """The measured part of the page. plots: the folder of the pictures, beside the page."""
    lines = [head, ""]
    for family, title in FAMILIES.items():
        plain, curves = of_family(items, family)
        if not (plain or curves):
            continue
        lines += [f"## {title}", ""]
        if any(r.value is not None and not r.unit for r in plain):
            lines += [f"![{title}: ratios beside their goals]({plots}/{family}.svg)", ""]
        if plain:
            lines += [*markdown_table(cells(plain)), ""]
        if curves:
            lines += [f"![{title}: curves]({plots}/{family}-curves.svg)", ""]
        for curve in curves:
            lines += [f"**{curve.title}**: {curve.verdict()}.", "", *markdown_table(curve_table(curve)), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page, head, items):
    """Replaces what stands below the mark of the page, and draws the pictures of the families that were measured."""
    page = pathlib.Path(page)
    pictures = page.parent / page.stem
    pictures.mkdir(parents=True, exist_ok=True)
    for family, title in FAMILIES.items():
        plain, curves = of_family(items, family)
        ratios = [r for r in plain if r.value is not None and not r.unit]
        if ratios:
            (pictures / f"{family}.svg").write_text(plot.bars(title, ratios), encoding="utf-8")
        if curves:
            (pictures / f"{family}-curves.svg").write_text(plot.curves(curves), encoding="utf-8")
    before = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else ""
    page.write_text(before + MARK + "\n" + markdown(head, items, pictures.name), encoding="utf-8")


def first_line(command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout.decode().splitlines()[0]
    except (OSError, IndexError):
        return ""


def machine(work, binary, peers, quick):
    """What the figures were taken on, in one paragraph."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")), platform.machine())
    memory = int(next(line.split()[1] for line in open("/proc/meminfo", encoding="utf-8") if line.startswith("MemTotal"))) / (1 << 20)
    system = subprocess.run(["df", "--output=fstype", str(work)], stdout=subprocess.PIPE, check=False).stdout.decode().split()[-1]
    return (f"{datetime.date.today()}: {len(os.sched_getaffinity(0))} cores ({cpu}), {memory:.0f} GiB, Linux {platform.release()}, files on {system}, "
            f"{first_line([binary, 'version'])}, {first_line(['fusermount3', '--version'])}, {'root' if os.geteuid() == 0 else 'no root'}; "
            f"load average {os.getloadavg()[0]:.1f} at the start. " + (f"Peers: {peers}." if peers else "Peers were left out.") +
            (" A quick run, of an eighth of the sizes and two rounds: its figures say only that it runs." if quick else ""))
