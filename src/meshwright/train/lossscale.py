"""The factor that lifts float16's gradients out of its underflow (Micikevicius et al. 2018), found while training.

A step whose gradients overflow is skipped and halves the scale; after a long run of good ones it doubles. Every rank
sees the same sums, so all hold the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

START = 2.0**6
"""The loss is a sum over tokens: at 1,024 tokens in a micro-batch this is what 2¹⁶ is to a mean."""
FLOOR = 2.0**-16  # many tokens' gradients summed in float16 may need less than 1
GROWTH_INTERVAL = 2000  # good steps before the scale is doubled


@dataclass
class LossScale:
    """value: multiply the loss by it. dynamic: whether it moves; for other precisions it is 1 and stays."""

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(START, True) if precision == "fp16" else cls()

    def after(self, finite: bool) -> bool:
        """Take note of a step; returns whether the scale was lowered."""
        if not self.dynamic:
            return False
        if finite:
            self.good_steps += 1
            if self.good_steps == GROWTH_INTERVAL:
                self.value, self.good_steps = self.value * 2, 0
            return False
        self.good_steps = 0
        if self.value <= FLOOR:
            return False
        self.value /= 2
        return True
