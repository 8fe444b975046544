"""HTML and SVG as strings: everything from outside is escaped here, and nowhere else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str | Markup, **attributes: str | float | int | None) -> Markup:
    """`<tag attributes>children</tag>`, with plain strings escaped.

    Args:
        tag: Name of the element.
        children: `Markup` goes in as it is, other strings are escaped.
        attributes: `class_` is `class`, other underscores become hyphens; None leaves one out.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, (int, float)) else html.escape(value, quote=True)
            parts.append(f' {name.rstrip("_").replace("_", "-")}="{shown}"')
    inner = "".join(child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    if not inner and tag in ("rect", "line", "path", "circle", "polyline", "use", "meta"):
        return Markup("".join(parts) + ("/>" if tag != "meta" else ">"))
    return Markup("".join(parts) + f">{inner}</{tag}>")


def joined(items: Iterable[Markup]) -> Markup:
    return Markup("".join(items))


def number(value: float) -> str:
    """A coordinate to a hundredth, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms"; what rounding leaves of nothing is 0."""
    seconds = 0.0 if abs(seconds) < 0.5e-9 else seconds
    for unit, scale, limit in (("us", 1e6, 0.9995e-3), ("ms", 1e3, 0.9995)):
        if abs(seconds) < limit:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_amount(value: float) -> str:
    """12345.6 -> "12,346", 1.234 -> "1.23"."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else _three_digits(value)


def format_count(count: int) -> str:
    """1_240_000_000 -> "1.24 billion"."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:,}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:,.{digits}f}"


def byte_ticks(top: int) -> list[tuple[int, str]]:
    """About five round (bytes, label) from 0 to `top`."""
    unit, name = next(
        ((1024**power, name) for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")) if top >= 1024**power),
        (1, "B"),
    )
    step = _round_step(top / unit)
    return [(int(i * step * unit), f"{i * step:g} {name}") for i in range(int(top / unit / step) + 1)]


def time_ticks(end_s: float) -> list[tuple[float, str]]:
    """About six round (seconds, label) from 0 to `end_s`."""
    scale, name = next(
        ((scale, name) for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if end_s >= scale), (1e-9, "ns")
    )
    step = _round_step(end_s / scale)
    return [(i * step * scale, f"{i * step:g} {name}") for i in range(int(end_s / scale / step + 1e-9) + 1)]


def _round_step(top: float) -> float:
    """The step of 1, 2 or 5 times a power of ten that divides `top` into four to ten."""
    rough = max(top, 1e-12) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
