"""A drawing of few shapes, written as SVG: the same drawing gives the same bytes.

Owns the form: a light card of its own, so that it reads in light and dark, and text as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

CARD, INK, FAINT = "#f8f7f4", "#2b2f36", "#8a8f98"
COLORS = {"R": "#9fb4cc", "R'": "#dfae47", "C": "#c4573f"}
"""Of the steps of plans; computing is warm, reusing is cold."""
SEEN, OTHER, UNSEEN = "#5f7f9f", "#dfae47", "#e4e2dc"
FONT = "ui-sans-serif, system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Drawing:
    """Shapes on a card.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        title: Stands at the top, and is read out.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []
        self.rect(0, 0, width, height, CARD, rounding=8)
        self.text(40, 32, title, size=15, bold=True)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, rounding: float = 0
    ) -> None:
        """Add a filled rectangle."""
        round_ = f' rx="{rounding:g}"' if rounding else ""
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
            f'{round_} fill="{fill}"/>'
        )

    def squares(self, places: Sequence[tuple[float, float]], size: float, fill: str) -> None:
        """Add squares of one color, each by its upper left corner."""
        side = _n(size)
        path = "".join(f"M{_n(x)} {_n(y)}h{side}v{side}h-{side}z" for x, y in places)
        if path:
            self._shapes.append(f'<path d="{path}" fill="{fill}"/>')

    def line(
        self, x: float, y: float, x2: float, y2: float, *, color: str = FAINT, width: float = 1
    ) -> None:
        """Add a straight line."""
        self._shapes.append(
            f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x2)}" y2="{_n(y2)}" '
            f'stroke="{color}" stroke-width="{width:g}"/>'
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str = "none") -> None:
        """Add a circle, filled or as an outline."""
        stroke = f' stroke="{FAINT}"' if fill == "none" else ""
        self._shapes.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{stroke}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: float = 12,
        bold: bool = False,
    ) -> None:
        """Add text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size:g}" text-anchor="{anchor}"'
            f"{weight}>{escape(text)}</text>"
        )

    def to_svg(self) -> str:
        """Return the drawing as SVG."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" '
            f"aria-label={quoteattr(self.title)} font-family={quoteattr(FONT)} "
            f'fill="{INK}">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self._shapes, "</svg>\n"])


def _n(value: float) -> str:
    """A number with one digit behind the point, if it needs one."""
    return f"{round(value, 1):g}"
