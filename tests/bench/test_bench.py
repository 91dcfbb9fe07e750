#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The benchmark suite runs and its report says what was measured: test_bench.py UNSHARD. No figure is judged here."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

from suite import plot, report
from suite.rows import LOWER, Curve, Row, after

BENCH = pathlib.Path(__file__).resolve().parent / "bench.py"
UNSHARD = sys.argv.pop(1) if len(sys.argv) > 1 else ""


def mounts_below(folder):
    return [line for line in pathlib.Path("/proc/mounts").read_text().splitlines() if str(folder) in line]


class Verdicts(unittest.TestCase):
    def test_by_goal_and_lab(self):
        for value, words in ((0.6, "met"), (0.59, "above the lab's figure"), (0.5, "short")):
            self.assertEqual(Row("w", value=value, goal=0.6, lab=0.51).verdict(), words)
        for value, words in ((1.15, "met"), (1.16, "short")):
            self.assertEqual(Row("w", value=value, goal=1.15, better=LOWER).verdict(), words)

    def test_beside_a_bare_server(self):
        for value, words in ((0.6, "met"), (0.51, "above the lab's figure"), (0.4, "short, above a bare server"), (0.3, "short, as a bare server is"), (0.27, "short")):
            self.assertEqual(Row("w", value=value, goal=0.6, lab=0.51, bare=0.3).verdict(), words)
        self.assertEqual(Row("w", value=0.3, goal=0.6, bare=0.3, cpu=(100, 200), cpu_goal=1.5).verdict(), "short, as a bare server is; CPU 2.0 times, not 1.5")

    def test_what_else_was_promised(self):
        self.assertEqual(Row("w", value=1, goal=0.6, cpu=(100, 151), cpu_goal=1.5).verdict(), "met; CPU 1.5 times, not 1.5")
        self.assertEqual(Row("w", value=1, goal=0.6, cpu=(100, 150), cpu_goal=1.5).verdict(), "met")
        self.assertEqual(Row("w", value=1, goal=0.6, rss=65, rss_goal=64).verdict(), "met; 65 MiB resident, not 64")

    def test_of_what_did_not_run(self):
        self.assertEqual(Row("w", note="no torch").verdict(), "left out: no torch")
        self.assertEqual(Row("w", value=1, goal=0.5, error="status 3").verdict(), "failed: status 3")

    def test_of_curves(self):
        for shape, grown, words in (("straight", 50.0, ": straight"), ("straight", 150.0, ": not straight"), ("flat", 1.2, ": flat"), ("flat", 2.0, ": not flat"), ("", 2.0, "")):
            curve = Curve("t", "chunks", "s", {"a": [(10, 1.0), (1000, grown)]}, shape)
            self.assertEqual(curve.verdict(), f"a × {grown:g} while the size × 100{words}")


class Earlier(unittest.TestCase):
    def test_figures_stand_beside_and_what_was_not_measured_stays(self):
        earlier = [Row("a", "cat", 0.5, workload="x"), Row("gone", value=1, workload="x"), Row("b", value=2, workload="y"), Curve("t", "n", "s", {}, workload="y")]
        items = after(earlier, [Row("a", "cat", 0.6, workload="x"), Row("new", value=3, workload="x")], {"x"})
        self.assertEqual([(getattr(i, "work", "curve"), getattr(i, "value", None), getattr(i, "before", None)) for i in items],
                         [("a", 0.6, 0.5), ("new", 3, None), ("b", 2, None), ("curve", None, None)])


class Reports(unittest.TestCase):
    ITEMS = [Row("a | b", "cat", 0.5, 0.6, goal=0.6, lab=0.51, family="reads"), Row("c", note="no torch", family="reads"), Row("d", value=12.0, unit="ms", family="reads"),
             Curve("t", "chunks", "s", {"a": [(10, 1.0), (1000, 50.0)], "b": [(10, 2.0)]}, family="scaling")]

    def test_page_keeps_what_people_wrote(self):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "page.md"
            page.write_text("By hand.\n" + report.MARK + "old\n", encoding="utf-8")
            report.write(page, "a machine", self.ITEMS)
            text = page.read_text(encoding="utf-8")
            self.assertTrue(text.startswith("By hand.\n" + report.MARK))
            for words in ("a machine", "| a \\| b | cat |", "left out: no torch", "12 ms", "(page/reads.svg)", "(page/scaling-curves.svg)", "| 1,000 | 50 |  |"):
                self.assertIn(words, text)
            self.assertNotIn("old", text)
            self.assertEqual(sorted(p.name for p in (page.parent / "page").iterdir()), ["reads.svg", "scaling-curves.svg"])

    def test_pictures_are_small_and_well_formed(self):
        many = [Row(f"workload <{i}>", value=0.01 * (i + 1), goal=0.5, family="reads") for i in range(60)]
        for picture in (plot.bars("Reads & more", many), plot.curves([self.ITEMS[3]] * 12)):
            xml.dom.minidom.parseString(picture)
            self.assertLess(len(picture), 30 << 10)


@unittest.skipUnless(UNSHARD and os.access("/dev/fuse", os.R_OK | os.W_OK), "no binary, or /dev/fuse is not to be had")
class Suite(unittest.TestCase):
    def bench(self, folder, *arguments):
        p = subprocess.run([sys.executable, str(BENCH), "--unshard", UNSHARD, "--no-peers", "--quick", "--json", f"{folder}/out.json", *arguments],
                           env={**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        return p, json.loads(pathlib.Path(folder, "out.json").read_text(encoding="utf-8"))["rows"]

    def test_a_workload_from_end_to_end(self):
        with tempfile.TemporaryDirectory() as folder:
            p, rows = self.bench(folder, "--only", "contiguous", "--write", f"{folder}/page.md")
            self.assertEqual(p.returncode, 0, p.stderr.decode())
            self.assertEqual([r["work"] for r in rows], ["contiguous: cat", "contiguous: pread 1 MiB", "contiguous: mapped, first touch", "contiguous: mapped, again"])
            for r in rows:
                self.assertGreater(r["value"], 0)
                self.assertGreater(min(r["cpu"]), 0)
                self.assertEqual((r["error"], r["rounds"]), ("", 2))
                self.assertGreater(r["bare"], 0)
                self.assertIn(r["work"], p.stdout.decode())
                self.assertIn(f"| {r['work']} |", pathlib.Path(folder, "page.md").read_text(encoding="utf-8"))

    def test_a_limit_ends_a_workload_and_its_mounts(self):
        for limit in 0.7, 0.35, 0.17, 0.08:  # of these, the first that a quick machine does not keep to
            with self.subTest(limit), tempfile.TemporaryDirectory() as folder:
                p, rows = self.bench(folder, "--only", "contiguous,dim-0", "--limit", str(limit))
                self.assertEqual(mounts_below(folder), [])
                self.assertEqual([f for f in os.listdir(folder) if f != "out.json"], [])
                verdicts = [r["verdict"] for r in rows if r["error"]]
                if len(verdicts) == 2:
                    break
        self.assertEqual((p.returncode, verdicts), (1, [f"failed: it took more than its limit of {limit:g} s"] * 2))

    def test_a_failure_is_a_row(self):
        global UNSHARD
        with tempfile.TemporaryDirectory() as folder:
            binary, UNSHARD = UNSHARD, "/bin/false"
            try:
                p, rows = self.bench(folder, "--only", "contiguous")
            finally:
                UNSHARD = binary
            self.assertEqual((p.returncode, [r["verdict"] for r in rows]), (1, ["failed: unshard mount: status 1"]))


if __name__ == "__main__":
    unittest.main()
