"""A run written for other trainers: its model, batch and layout in their options, one file a trainer.

Only options that exist there are written. What a trainer does otherwise, or does not have, is said in comments above
them, so that nobody takes the figures of one for those of the other. Data, learning rates and everything else that a
layout says nothing of are left to whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.convert.trainers import deepspeed, megatron, nanotron, torchtitan
from meshwright.spec.run import RunSpec

TRAINERS: dict[str, Callable[[RunSpec], str]] = {
    "megatron": megatron.written,
    "torchtitan": torchtitan.written,
    "deepspeed": deepspeed.written,
    "nanotron": nanotron.written,
}
"""By name, what writes a run (its layout resolved) as text for it."""
