"""Line charts as plain SVG: one panel for each series, over the same time."""

from __future__ import annotations

import html
from dataclasses import dataclass

_LEFT, _WIDTH, _RIGHT, _PANEL, _TOP, _GAP = 110, 640, 20, 90, 40, 26
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'
_LINE, _GRID, _INK = "#1a6f5f", "#d5dbe1", "#1d2733"


@dataclass(frozen=True, slots=True)
class Series:
    """One panel: its values at the times of the chart. `marks`: lines that are drawn across, with what they say."""

    name: str
    values: list[float]
    marks: tuple[tuple[float, str], ...] = ()


def chart(title: str, minutes: list[float], series: list[Series], spans: list[tuple[float, float, str]]) -> str:
    """All panels; `spans` are from, to (minutes) and label of the parts that are compared."""
    height = _TOP + len(series) * (_PANEL + _GAP) + 20
    width = _LEFT + _WIDTH + _RIGHT
    end = max(minutes[-1], 1e-9)

    def x(minute: float) -> float:
        return _LEFT + minute / end * _WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {_FONT}>',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-weight="600" fill="{_INK}">{html.escape(title)}</text>',
    ]
    bottom = _TOP + len(series) * (_PANEL + _GAP) - _GAP
    for begin, stop, label in spans:
        parts += [
            (
                f'<rect x="{x(begin):.1f}" y="{_TOP}" width="{x(stop) - x(begin):.1f}" height="{bottom - _TOP}" '
                'fill="#1a6f5f" fill-opacity="0.06"/>'
            ),
            (
                f'<text x="{(x(begin) + x(stop)) / 2:.1f}" y="{bottom + 32}" text-anchor="middle" fill="{_INK}">'
                f"{html.escape(label)}</text>"
            ),
        ]
    for number, one in enumerate(series):
        parts += _panel(one, minutes, x, _TOP + number * (_PANEL + _GAP))
    for tick in range(6):
        minute = end * tick / 5
        parts.append(
            f'<text x="{x(minute):.1f}" y="{bottom + 16}" text-anchor="middle" fill="{_INK}">{minute:.3g} min</text>'
        )
    parts.append("</svg>\n")
    return "\n".join(parts)


def _panel(one: Series, minutes: list[float], x, top: float) -> list[str]:
    most = max([*one.values, *(value for value, _ in one.marks)]) * 1.05 or 1.0

    def y(value: float) -> float:
        return top + _PANEL - value / most * _PANEL

    points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in zip(minutes, one.values, strict=True))
    parts = [
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{_GRID}"/>'
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" fill="{_INK}">{value:,.0f}</text>'
        for value in (0, most / 1.05)
    ]
    for value, label in one.marks:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#9aa7b5" '
            f'stroke-dasharray="4 3"/><text x="{_LEFT + _WIDTH - 4}" y="{y(value) - 4:.1f}" text-anchor="end" '
            f'fill="{_INK}">{html.escape(label)}</text>'
        )
    return [
        *parts,
        f'<text x="8" y="{top + _PANEL / 2:.1f}" fill="{_INK}">{html.escape(one.name)}</text>',
        f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>',
    ]
