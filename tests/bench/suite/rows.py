# SPDX-License-Identifier: MIT
"""What a workload hands back: rows with a verdict, and curves."""
import dataclasses
import typing

HIGHER, LOWER = "higher", "lower"
NOISE = 0.95  # two medians of the same run that are as near to each other say nothing


@dataclasses.dataclass
class Row:
    """One figure beside what it is measured against. `value` is compared with `goal` and `lab`, which may lack."""
    work: str
    against: str = ""
    value: typing.Optional[float] = None
    best: typing.Optional[float] = None
    unit: str = ""                # after value, best, goal and lab; empty: a ratio
    better: str = HIGHER
    goal: typing.Optional[float] = None
    lab: typing.Optional[float] = None
    bare: typing.Optional[float] = None      # what a server that only answers has in value's place, in the same rounds
    theirs: str = ""              # the floor's or the peer's own figure, with its unit
    ours: str = ""
    cpu: typing.Optional[typing.Tuple[float, float]] = None  # µs/MiB: floor, and ours with the server
    cpu_goal: typing.Optional[float] = None  # ours / floor, at most
    rss: typing.Optional[float] = None       # MiB at the peak of our process
    rss_goal: typing.Optional[float] = None
    rounds: int = 0
    load: typing.Optional[float] = None      # load average when it began
    note: str = ""                # why it was left out
    error: str = ""               # why it failed
    family: str = ""
    workload: str = ""
    before: typing.Optional[float] = None    # value in an earlier run

    def reaches(self, bound):
        return self.value >= bound if self.better == HIGHER else self.value <= bound

    def verdict(self):
        """met | above the lab's figure | short, as a bare server is | short, above a bare server | short | left out: … | failed: …;
        empty where nothing was promised"""
        if self.error:
            return "failed: " + self.error
        if self.value is None:
            return "left out: " + self.note
        missed = []
        if self.cpu and self.cpu_goal and self.cpu[1] > self.cpu_goal * self.cpu[0]:
            missed.append(f"CPU {self.cpu[1] / self.cpu[0]:.1f} times, not {self.cpu_goal:g}")
        if self.rss is not None and self.rss_goal and self.rss > self.rss_goal:
            missed.append(f"{self.rss:.0f} MiB resident, not {self.rss_goal:g}")
        if self.goal is None:
            return "; ".join(missed) or ("met" if self.rss_goal else "")
        if self.reaches(self.goal):
            return "; ".join(["met", *missed])
        if self.lab is not None and self.reaches(self.lab):
            return "; ".join(["above the lab's figure", *missed])
        return "; ".join(["short" + self.beside_bare(), *missed])

    def beside_bare(self):
        if self.bare is None or self.value < NOISE * self.bare:
            return ""
        return ", above a bare server" if self.value * NOISE > self.bare else ", as a bare server is"


FLAT, STRAIGHT = "flat", "straight"


@dataclasses.dataclass
class Curve:
    """Figures against a size: points are (size, value) by the name of a line; both axes are logarithmic."""
    title: str
    size: str                     # what the size counts
    unit: str
    lines: typing.Dict[str, typing.List[typing.Tuple[float, float]]]
    shape: str = STRAIGHT         # FLAT: should not grow; STRAIGHT: at most with the size; empty: nothing is promised
    family: str = ""
    workload: str = ""
    load: typing.Optional[float] = None

    def verdict(self):
        """How each line grew from its first to its last point, and whether that is more than it may (a third is noise)."""
        parts = []
        for name, points in self.lines.items():
            if len(points) < 2 or points[0][1] <= 0:
                continue
            grown, size = points[-1][1] / points[0][1], points[-1][0] / points[0][0]
            bound = {FLAT: 1, STRAIGHT: size}.get(self.shape)
            words = "" if bound is None else f": {self.shape}" if grown <= bound * 4 / 3 else f": not {self.shape}"
            parts.append(f"{name} × {grown:.3g} while the size × {size:.6g}{words}")
        return "; ".join(parts)


def to_json(item):
    return {"kind": type(item).__name__.lower(), **dataclasses.asdict(item), "verdict": item.verdict()}


def from_json(data):
    kind = {"row": Row, "curve": Curve}[data["kind"]]
    return kind(**{f.name: data[f.name] for f in dataclasses.fields(kind) if f.name in data})


def after(earlier, items, measured):
    """`items` with the earlier figures beside theirs, and what the earlier run has of workloads that are not in `measured`."""
    known = {(r.workload, r.work, r.against): r for r in earlier if isinstance(r, Row)}
    for r in items:
        if isinstance(r, Row) and (r.workload, r.work, r.against) in known:
            r.before = known[r.workload, r.work, r.against].value
    return items + [r for r in earlier if r.workload not in measured]
