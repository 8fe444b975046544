"""What an engine tells of itself, for people."""

from __future__ import annotations

from dataclasses import fields, replace

from lightning_elixir.runtime.stats import Stats


def test_printed_figures_have_units_and_fields_stay_numbers() -> None:
    nothing = Stats(**{f.name: {} if f.name == "held_bytes" else 0 for f in fields(Stats)})
    assert str(nothing) == "nothing was counted yet"
    held = {"cpu_param": 3 * 2**20, "replica": 0}
    stats = replace(nothing, fetches=12_000, h2d_bytes=2**21, held_bytes=held, compute_s=0.25, exposed_wait_s=None)
    assert str(stats).splitlines() == [
        "fetches: 12,000",
        "h2d_bytes: 2.0 MiB",
        "held_bytes: cpu_param 3.0 MiB",
        "compute_s: 250 ms",
    ]
    assert stats.as_dict()["h2d_bytes"] == 2**21
