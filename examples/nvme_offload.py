"""GPT-2 small trained on the CPU, with Adam's moments in memory and on a disk: the same losses, less memory.

Each run is a process of its own, so that what it holds can be told. Takes about a minute; `--quick` some seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_elixir import HybridAdam

MIB = 2**20
TOLERANCE = 0.1  # of what is expected


def main() -> int:
    options = parse()
    if options.fraction is not None:
        print(json.dumps(train(options)))
        return 0
    in_memory, on_disk = run(options, 0.0), run(options, 1.0)
    states, buffers = on_disk["nvme_bytes"], on_disk["buffer_bytes"]
    expected, saved = states - buffers, in_memory["resident_bytes"] - on_disk["resident_bytes"]
    are_equal = in_memory["losses"] == on_disk["losses"]
    is_down = abs(saved - expected) <= TOLERANCE * expected
    print(f"{in_memory['num_params']:,} parameters, {len(in_memory['losses'])} steps")
    for name, found in (("in memory", in_memory), ("on disk", on_disk)):
        losses = " ".join(f"{float.fromhex(loss):.6f}" for loss in found["losses"])
        resident = f"{found['resident_bytes'] / MIB:.0f} MiB resident, last update {found['update_s']:.2f} s"
        print(f"moments {name:>9}: {resident}, losses {losses}")
    print(f"losses: {'equal to the last bit' if are_equal else 'NOT EQUAL'}")
    parts = f"{states / MIB:.0f} MiB of moments without {buffers / MIB:.0f} MiB of buffers"
    verdict = "as expected" if is_down else "NOT AS EXPECTED"
    print(f"resident memory: {saved / MIB:.0f} MiB less; expected {expected / MIB:.0f} MiB, {parts}: {verdict}")
    return 0 if are_equal and is_down else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to offload to; default: a folder for temporary files")
    parser.add_argument("--backend", default="direct", help="direct or tensornvme")
    parser.add_argument("--fraction", type=float, help="one run with this share of the moments on disk, as JSON")
    return parser.parse_args()


def run(options: argparse.Namespace, fraction: float) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--fraction", str(fraction), "--steps", str(options.steps)]
    command += ["--backend", options.backend, *(["--quick"] if options.quick else [])]
    command += ["--folder", options.folder] if options.folder else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(1)
    config = GPT2Config(use_cache=False)
    if options.quick:
        config = GPT2Config(
            n_layer=4, n_embd=384, n_head=6, vocab_size=16384, bos_token_id=0, eos_token_id=0, use_cache=False
        )
    model = GPT2LMHeadModel(config)
    optimizer = HybridAdam(
        model.parameters(),
        lr=1e-4,
        weight_decay=0.1,
        nvme_offload_fraction=options.fraction,
        nvme_offload_dir=options.folder,
        nvme_backend=options.backend,
    )
    losses, update_s = [], 0.0
    for _ in range(options.steps):
        tokens = torch.randint(config.vocab_size, (1, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        begin_s = time.perf_counter()
        optimizer.step()
        update_s = time.perf_counter() - begin_s
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        del loss
    return {
        "losses": losses,
        "update_s": update_s,
        "resident_bytes": resident_bytes(),
        "nvme_bytes": optimizer.nvme_bytes,
        "buffer_bytes": optimizer.nvme_buffer_bytes,
        "num_params": sum(p.numel() for p in model.parameters()),
    }


def resident_bytes() -> int:
    """Without what is free in the allocator: by chance much or little."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not every system has glibc
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main())
