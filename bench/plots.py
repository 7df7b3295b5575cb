"""Bar charts as plain SVG: medians, with the range of the rounds as a line."""

from __future__ import annotations

import html
import statistics

_ROW, _LABEL, _WIDTH, _VALUE, _TOP = 26, 150, 460, 120, 34
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'
_CUT = 5
_OURS, _OTHERS, _RANGE = "#1a6f5f", "#9aa7b5", "#3b4754"


def bars(title: str, unit: str, rows: dict[str, list[float]]) -> str:
    """One chart: a bar for each name, shortest first. Bars beyond a few times ours are cut."""
    medians = {name: statistics.median(figures) for name, figures in rows.items() if figures}
    names = sorted(medians, key=medians.__getitem__)
    top = min(max(medians.values()), _CUT * medians.get("epochgate", max(medians.values())))
    height = _TOP + _ROW * len(names) + 10
    width = _LABEL + _WIDTH + _VALUE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {_FONT}>',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-weight="600" fill="#1d2733">{html.escape(title)} ({html.escape(unit)})</text>',
    ]
    for row, name in enumerate(names):
        y = _TOP + row * _ROW
        length = min(medians[name] / top, 1) * _WIDTH if top else 0
        color = _OURS if name.startswith("epochgate") else _OTHERS
        cut = " \u2192" if medians[name] > top else ""
        low, high = (min(value / top, 1) * _WIDTH if top else 0 for value in (min(rows[name]), max(rows[name])))
        end = _LABEL + max(length, high) + 6
        parts += [
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end" fill="#1d2733">{html.escape(name)}</text>',
            f'<rect x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="16" fill="{color}"/>',
            f'<line x1="{_LABEL + low:.1f}" x2="{_LABEL + high:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="{_RANGE}"/>',
            f'<text x="{end:.1f}" y="{y + 15}" fill="#1d2733">{short(medians[name])}{cut}</text>',
        ]
    parts.append("</svg>\n")
    return "\n".join(parts)


def short(value: float) -> str:
    """Three figures that count, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
