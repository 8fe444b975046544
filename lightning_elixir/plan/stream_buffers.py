"""Device memory through which streamed updates run: what the plan counts and the runtime takes."""

from __future__ import annotations

NUM_SLOTS = 3
"""Pieces under way: one goes up, one is updated, one comes back."""

SLOT_BYTES = 64 * 1024**2
"""What one piece may take on the device: 4 Mi parameters with an fp32 master, states and 16-bit gradients. More
was no faster on an H200; less kept its host busy with issuing pieces."""

SCRATCH_BYTES = 32 * 1024**2
"""For the arithmetic on a piece."""

STREAM_BYTES = NUM_SLOTS * SLOT_BYTES + SCRATCH_BYTES
"""Held during a step that streams, when activations are gone. Where the device does not have them, the runtime halves
slots and scratch until they fit."""
