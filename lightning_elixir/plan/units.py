"""Bytes, seconds and shares as people write and read them."""

from __future__ import annotations

import math
import re

from lightning_elixir.errors import PlanError

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(?P<amount>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as `1048576`, `"40GiB"`, `"64 MiB"` or `"1.5GB"`.

    Raises:
        PlanError: Not a size, negative, or with an unknown unit.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise PlanError(f"a size must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size.lower()) if isinstance(size, str) else None
    if match is None or match["unit"] not in _UNITS:
        raise PlanError(f'a size must be bytes as an int or a string like "64MiB", "40GiB" or "1.5GB", got {size!r}')
    return int(float(match["amount"]) * _UNITS[match["unit"]])


def option_bytes(name: str, size: int | str | None) -> int | None:
    """What an option of that name was given as a size; None where it was not given.

    Raises:
        PlanError: As `parse_bytes`, naming the option.
    """
    try:
        return None if size is None else parse_bytes(size)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None


def check_fraction(name: str, value: object) -> None:
    """Raises `PlanError` unless an option's value is a number from 0 to 1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:  # type: ignore[operator]
        kind = "" if is_number else ", as an int or a float"
        raise PlanError(f"{name} must be between 0 and 1{kind}, got {value!r}")


def format_bytes(value: int, *, is_rounded_up: bool = False) -> str:
    """1536 -> "1.5 KiB"; rounded up where it is said what would be enough."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    if unit == "B":
        return f"{value} B"
    return f"{math.ceil(amount * 10) / 10 if is_rounded_up else amount:.1f} {unit}"


def format_seconds(value: float) -> str:
    """0.0123 -> "12.3 ms", 2.5 -> "2.50 s"; what rounding leaves of nothing is 0."""
    if value >= 0.9995:
        return f"{value:.2f} s" if value < 99.995 else f"{value:.0f} s"
    if value >= 0.9995e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us" if value >= 0.5e-9 else "0 s"
