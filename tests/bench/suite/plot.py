# SPDX-License-Identifier: MIT
"""Small SVG pictures: bars of ratios with their goals, and curves on logarithmic axes. Legible on light and dark pages."""
import html
import math

from suite import rows

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f } .quiet { fill: #6e7781 } .title { font-weight: 600; font-size: 14px }
.axis { stroke: #8c959f; stroke-width: 1 } .grid { stroke: #8c959f; stroke-width: .5; opacity: .4 } .goal { stroke: #cf222e; stroke-width: 2.5 }
.c0 { fill: #0969da; stroke: #0969da } .c1 { fill: #bc4c00; stroke: #bc4c00 } .c2 { fill: #1a7f37; stroke: #1a7f37 } .c3 { fill: #8250df; stroke: #8250df }
.line { fill: none; stroke-width: 2 } .short { fill: #bc4c00 } .met { fill: #0969da }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .quiet { fill: #9198a1 } .goal { stroke: #ff7b72 } .short { fill: #f0883e } .met { fill: #58a6ff }
.c0 { fill: #58a6ff; stroke: #58a6ff } .c1 { fill: #f0883e; stroke: #f0883e } .c2 { fill: #3fb950; stroke: #3fb950 } .c3 { fill: #bc8cff; stroke: #bc8cff } .line { fill: none } }
.line { fill: none }
</style>"""


def text(x, y, words, style="", anchor="start"):
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}" text-anchor="{anchor}">{html.escape(words)}</text>'


def line(x1, y1, x2, y2, style):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def svg(width, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">', STYLE, *parts, "</svg>", ""])


# ---- bars ----

LEFT, BAR, PITCH, WIDTH = 400, 11, 20, 860
DECADE = 160  # a ratio of ten is as wide


def bar_x(ratio, low):
    return LEFT + DECADE * (math.log10(max(ratio, low)) - math.log10(low))


def bars(title, items):
    """One bar a row, from the lowest ratio on a logarithmic axis; a red tick is the goal."""
    low = min(0.1, *(10 ** math.floor(math.log10(r.value)) for r in items if r.value > 0))
    high = max(1, *(v for r in items for v in (r.value, r.goal or 0)))
    width = max(WIDTH, round(bar_x(high, low)) + 60)
    bottom = 50 + PITCH * len(items)
    parts = [text(12, 22, title + ": ratio to the floor or the peer, medians", "title"), text(LEFT, 40, "goal: red tick", "quiet")]
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        x = bar_x(10.0 ** power, low)
        if x <= width - 20:
            parts += [line(x, 46, x, bottom, "axis" if power == 0 else "grid"), text(x, bottom + 16, f"{10.0 ** power:g}", "quiet", "middle")]
    for i, r in enumerate(items):
        y, end = 50 + PITCH * i, bar_x(r.value, low)
        missed = r.goal is not None and not r.reaches(r.goal)
        name = r.work if len(r.work) <= 58 else r.work[:57] + "…"
        parts += [text(LEFT - 8, y + 11, name, "", "end"),
                  f'<rect x="{LEFT}" y="{y + 2}" width="{max(end - LEFT, 1):.1f}" height="{BAR}" class="{"short" if missed else "met"}"/>']
        if r.goal is not None:
            parts.append(line(bar_x(r.goal, low), y, bar_x(r.goal, low), y + BAR + 4, "goal"))
        parts.append(text(max(end, bar_x(r.goal, low) if r.goal else 0) + 6, y + 11, f"{r.value:.2f}" + (" (less is better)" if r.better == rows.LOWER else ""), "quiet"))
    return svg(width, bottom + 28, parts)


# ---- curves ----

PANEL_WIDTH, PANEL_HEIGHT, ACROSS = 400, 250, 2


def decades(values):
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    return (low, high) if high > low else (low, low + 1)


def panel(curve, left, top):
    points = [p for line_ in curve.lines.values() for p in line_ if p[0] > 0 and p[1] > 0]
    if not points:
        return []
    (x0, x1), (y0, y1) = decades([p[0] for p in points]), decades([p[1] for p in points])
    inner = (left + 62, top + 44, PANEL_WIDTH - 90, PANEL_HEIGHT - 100)

    def place(p):
        return (inner[0] + inner[2] * (math.log10(p[0]) - x0) / (x1 - x0), inner[1] + inner[3] * (1 - (math.log10(p[1]) - y0) / (y1 - y0)))

    parts = [text(left + 12, top + 20, curve.title, "title"), text(left + 12, top + 36, f"{curve.unit} by {curve.size}", "quiet")]
    for power in range(x0, x1 + 1):
        x = place((10.0 ** power, 10.0 ** y0))[0]
        parts += [line(x, inner[1], x, inner[1] + inner[3], "grid"), text(x, inner[1] + inner[3] + 15, f"{10.0 ** power:g}", "quiet", "middle")]
    for power in range(y0, y1 + 1):
        y = place((10.0 ** x0, 10.0 ** power))[1]
        parts += [line(inner[0], y, inner[0] + inner[2], y, "grid"), text(inner[0] - 6, y + 4, f"{10.0 ** power:g}", "quiet", "end")]
    for i, (name, values) in enumerate(curve.lines.items()):
        at = [place(p) for p in values if p[0] > 0 and p[1] > 0]
        parts.append(f'<polyline class="line c{i % 4}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="c{i % 4}"/>' for x, y in at]
        parts.append(f'<rect x="{left + 62 + 160 * (i % 2)}" y="{top + PANEL_HEIGHT - 34 + 16 * (i // 2)}" width="9" height="9" class="c{i % 4}"/>')
        parts.append(text(left + 76 + 160 * (i % 2), top + PANEL_HEIGHT - 25 + 16 * (i // 2), name))
    return parts


def curves(items):
    """A panel a curve, two in a row."""
    parts = [p for i, c in enumerate(items) for p in panel(c, PANEL_WIDTH * (i % ACROSS), PANEL_HEIGHT * (i // ACROSS))]
    return svg(PANEL_WIDTH * min(ACROSS, len(items)), PANEL_HEIGHT * -(-len(items) // ACROSS), parts)
