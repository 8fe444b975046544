"""What several pictures use."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_elixir.report.markup import Markup, element, joined


def swatch(*classes: str) -> Markup:
    """A small square in a colour, for legends; two classes: the upper and the lower half."""
    if len(classes) == 2:
        halves = [
            element("rect", class_=classes[0], x=1, y=1, width=12, height=6),
            element("rect", class_=classes[1], x=1, y=7, width=12, height=6),
        ]
    else:
        halves = [element("rect", class_=classes[0], x=1, y=1, width=12, height=12)]
    return element("svg", *halves, class_="swatch", viewBox="0 0 14 14", aria_hidden="true")


def legend(items: Sequence[tuple[Markup, str]]) -> Markup:
    return element("ul", *(element("li", mark, text) for mark, text in items), class_="legend")


def hatch() -> Markup:
    """The pattern of waiting, which is told apart without colour too; once a page."""
    pattern = element(
        "pattern",
        element("rect", width=6, height=6),
        element("path", d="M-1 1L1 -1M0 6L6 0M5 7L7 5"),
        id="hatch",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
    )
    svg = element("svg", element("defs", pattern), width=0, height=0, aria_hidden="true", style="position:absolute")
    return joined([svg])
