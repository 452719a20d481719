"""Badges of measured numbers, as flat SVG: a label on grey, a value on a colour."""

from __future__ import annotations

from html import escape

GOOD, PLAIN = "#2e7d32", "#0072b2"
_NARROW, _WIDE = set("fijlrt.,:;|!'()[] "), set("mwMW%@")


def _width(text: str) -> int:
    """Pixels of a text in Verdana of 11 px, roughly."""
    return round(sum(4.5 if c in _NARROW else 9.5 if c in _WIDE else 7.0 for c in text)) + 10


def badge(label: str, value: str, colour: str = PLAIN) -> str:
    """The SVG."""
    left, right = _width(label), _width(value)
    whole, middle = left + right, left + right / 2
    words = escape(f"{label}: {value}")
    text = 'fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img" aria-label="{words}">'
        f"<title>{words}</title>"
        f'<rect width="{whole}" height="20" rx="3" fill="#555"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="{colour}"/>'
        f'<g {text}><text x="{left / 2:g}" y="14">{escape(label)}</text>'
        f'<text x="{middle:g}" y="14">{escape(value)}</text></g></svg>\n'
    )
