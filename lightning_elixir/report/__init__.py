"""One plan as a page: what it does to memory and time, and what a real run made of it."""

from __future__ import annotations

from lightning_elixir.report.data import Measured, ReportData
from lightning_elixir.report.page import render_report

__all__ = ["Measured", "ReportData", "render_report"]
