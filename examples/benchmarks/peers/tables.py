"""From the results of all systems to one table: pure. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peers.jobs import Job
from peers.limit import Limit, least_traffic, limit_of, own_traffic, rates_from, resident_numel

REFERENCE = "plain"
"""Whose losses and whose speed the others are held against."""

SAME_ARITHMETIC = ("plain", "elixir", "elixir_manual", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")
"""16-bit parameters and gradients beside an fp32 master: only the order of roundings differs, in Adam, in norms, in
sums over ranks, and in operators that add up in any order."""
SAME_FIRST = ("elixir", "elixir_manual")
"""The first loss, before any update, is plain's to the bit."""
SAME_TOLERANCE = 2e-3
"""Largest relative difference of any loss between those."""
OTHER_TOLERANCE = 1e-2
"""The same for autocast over fp32 parameters, whose residual stream is fp32."""
SAME_BITS = (("elixir", "elixir_manual"),)
"""Equal to the bit in every loss where operators are deterministic (`--deterministic`, or the CPU)."""

_SHOWN = 150


@dataclass(frozen=True)
class Agreement:
    """How the losses of a system compare with the reference's."""

    worst: float
    """Largest relative difference of any step; nan where one is no number."""
    is_first_equal: bool
    is_bitwise: bool
    """All of them."""
    does_agree: bool

    def __str__(self) -> str:
        if self.is_bitwise:
            return "bitwise"
        return f"{'within' if self.does_agree else 'OFF BY'} {self.worst:.1e}"


def agreement(system: str, losses: Sequence[float], reference: Sequence[float], *, is_one_rank: bool) -> Agreement:
    """Compare step by step, as far as both went.

    Args:
        system: Sets the tolerance.
        is_one_rank: Sums over ranks round in any order, also before the first update.
    """
    differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, reference, strict=False)]
    if not differences or any(not math.isfinite(x) for x in differences):
        return Agreement(math.nan, False, False, False)
    worst = max(differences)
    is_first_equal = losses[0] == reference[0]
    tolerance = SAME_TOLERANCE if system in SAME_ARITHMETIC else OTHER_TOLERANCE
    does_agree = worst <= tolerance and (is_first_equal or not (system in SAME_FIRST and is_one_rank))
    return Agreement(worst, is_first_equal, worst == 0.0, does_agree)


def model_tflops(num_parameters: int, tokens: int, seconds: float) -> float:
    """6NT: two operations for each parameter and token in forward and four in backward; what checkpointing computes
    again, and attention's own, are not counted."""
    return 6 * num_parameters * tokens / seconds / 1e12


def physical_limit(job: Job, plain: Mapping[str, Any] | None, hardware: Mapping[str, Any] | None) -> Limit | None:
    """The step that nobody can beat under the ordinary offloading scheme.

    Computing takes what plain PyTorch's forward and backward take, and the update of what stays on the device as long
    as plain's; activations are those that plain was seen to take. None where plain did not run or nothing was
    measured, and for other optimizers than AdamW.
    """
    if plain is None or "forward_backward_s" not in plain or hardware is None or job.optimizer != "adamw":
        return None
    total = job.shape.num_parameters
    resident = resident_numel(total, job.gpu_limit_bytes, plain["activation_bytes"], job.ranks)
    compute_s = plain["forward_backward_s"] + plain["update_s"] * resident / total / job.ranks
    return limit_of(compute_s, least_traffic(total - resident, job.ranks), rates_from(hardware))


def unlike(job: Job, other: Mapping[str, Any]) -> list[str]:
    """Fields of another job's JSON for which the reference of that one is none for this one."""
    mine = asdict(job)
    names = ("shape", "batch", "precision", "clip", "optimizer", "device", "lr", "weight_decay", "seed")
    theirs = {"optimizer": Job.optimizer, **other}  # files from before there were others
    return [name for name in names if mine[name] != theirs.get(name)]


def summary(
    job: Job,
    results: Mapping[str, Mapping[str, Any]],
    hardware: Mapping[str, Any] | None,
    reference: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What follows from the raw results: by system, and the limit.

    Args:
        reference: What plain gave in an earlier run, where it is not among the results. Its losses count with one rank
            only, since several see other tokens.
    """
    plain = results.get(REFERENCE) or reference
    limit = physical_limit(job, plain, hardware)
    ran = {name: r for name, r in results.items() if "median_step_s" in r}
    known = dict(ran)
    if plain is not None and "median_step_s" in plain and job.ranks == 1:
        known[REFERENCE] = plain
    reference_name = REFERENCE if REFERENCE in known else next(iter(ran), None)
    rows: dict[str, Any] = {}
    for name, result in ran.items():
        seconds = result["median_step_s"]
        row: dict[str, Any] = {
            "tokens_per_s": job.tokens / seconds,
            "tflops_6nt_per_gpu": model_tflops(job.shape.num_parameters, job.tokens, seconds) / job.ranks,
        }
        if plain is not None and "median_step_s" in plain:
            row["times_plain"] = plain["median_step_s"] / seconds
        if limit is not None:
            row["of_limit"] = limit.seconds / seconds
        if reference_name is not None:
            found = agreement(name, result["losses"], known[reference_name]["losses"], is_one_rank=job.ranks == 1)
            row["losses"] = {"against": reference_name, **asdict(found), "text": str(found)}
        if "updated_numel" in result and hardware is not None and limit is not None:
            moved = own_traffic(result["h2d_bytes"], result["d2h_bytes"], result["updated_numel"], job.ranks)
            own = limit_of(limit.compute_s, moved, rates_from(hardware))
            row["own_limit"] = {**asdict(own), "seconds": own.seconds, "binding": own.binding}
        rows[name] = row
    for one, other in SAME_BITS:
        if one in ran and other in ran:
            rows[other]["is_bitwise_" + one] = ran[one]["losses"] == ran[other]["losses"]
    return {
        "limit": None if limit is None else {**asdict(limit), "seconds": limit.seconds, "binding": limit.binding},
        "systems": rows,
    }


def disagreements(job: Job, found: Mapping[str, Any]) -> list[str]:
    """Sentences about losses that are not what they should be."""
    lines = []
    for name, row in found["systems"].items():
        losses = row.get("losses")
        if losses is not None and not losses["does_agree"]:
            lines.append(f"{name}: losses are {losses['text']} against {losses['against']}")
        for key, value in row.items():
            if key.startswith("is_bitwise_") and not value and (job.is_deterministic or job.device == "cpu"):
                lines.append(f"{name}: losses are not those of {key.removeprefix('is_bitwise_')} to the bit")
    return lines


def in_billions(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e7 else f"{number:,}"


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def table(job: Job, results: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """Markdown lines."""
    shape, limit = job.shape, found["limit"]
    gpu = (
        "no GPU limit"
        if job.gpu_limit_bytes is None
        else f"GPU limited to {_gib(job.gpu_limit_bytes)} GiB (plain: not)"
    )
    lines = [
        f"{in_billions(shape.num_parameters)} parameters, {job.batch} x {shape.seq} tokens on each of {job.ranks} "
        f"rank(s), {job.precision}, {'clipped to ' + str(job.clip) if job.clip else 'no clipping'}, {gpu}; "
        f"medians of {job.steps} steps after {job.warmup}",
    ]
    if limit is not None:
        parts = ", ".join(
            f"{name} {limit[key]:.3f} s"
            for name, key in (("compute", "compute_s"), ("H2D", "h2d_s"), ("D2H", "d2h_s"), ("host memory", "host_s"))
        )
        lines.append(f"physical limit {limit['seconds']:.3f} s, set by {limit['binding']} ({parts})")
    lines += [
        "",
        "| system | step s | x plain | tokens/s | TFLOP/s (6NT) | of the limit | GPU GiB (reserved) | host GiB "
        "| waiting s | losses |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if "median_step_s" not in result:
            why = str(result.get("error") or result.get("unsupported") or "?").strip().splitlines()
            shown = (why[-1] if why else "?")[:_SHOWN].replace("|", "/")
            lines.append(f"| {name} | {shown} | | | | | | | | |")
            continue
        row = found["systems"][name]
        ratio, of_limit = row.get("times_plain"), row.get("of_limit")
        waiting = result.get("exposed_wait_s")
        host = max((result.get(k) or 0 for k in ("peak_rss_bytes", "peak_host_used_bytes")), default=0)
        peaks = _gib(result.get("peak_gpu_allocated_bytes"))
        reserved = _gib(result.get("peak_gpu_reserved_bytes"))
        cells = [
            name,
            f"{result['median_step_s']:.3f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tflops_6nt_per_gpu']:.1f}",
            "" if of_limit is None else f"{of_limit:.2f}",
            f"{peaks} ({reserved})" if peaks else "",
            _gib(host),
            "" if waiting is None else f"{waiting:.3f}",
            row["losses"]["text"] if "losses" in row else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
