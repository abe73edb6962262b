"""Why a layout is not the first: where its time goes beside the best's, line by line, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.predict.plan.answer import Choice

WORDS = {
    "compute": "forward and backward",
    "recompute": "computing activations again",
    "optimizer": "the update",
    "bubble": "waiting for other stages",
    "host": "waiting for kernels to be issued",
    "cores": "sharing cores",
    "tp": "sums over tensor ranks",
    "cp": "attention over context ranks",
    "pp": "messages between stages",
    "zero.gather": "gathering parameters",
    "zero.reduce": "reducing gradients",
    "zero.publish": "gathering new parameters",
    "step": "sums once a step",
}
"""What the lines of `StepTime` are."""


@dataclass(frozen=True)
class Line:
    """One line of two layouts: seconds, or bytes, of this one and of the first."""

    name: str
    what: str
    this: float
    first: float

    @property
    def more(self) -> float:
        return self.this - self.first


def time_lines(choice: Choice, first: Choice) -> list[Line]:
    """Every line of a step's time, of either."""
    names = [*choice.time.lines, *(name for name in first.time.lines if name not in choice.time.lines)]
    return [
        Line(name, WORDS.get(name, name), choice.time.lines.get(name, 0.0), first.time.lines.get(name, 0.0))
        for name in names
    ]


def memory_lines(choice: Choice, first: Choice) -> list[Line]:
    """Every category of the fullest rank's memory."""
    return [Line(name, name, held, first.held.get(name, 0)) for name, held in choice.held.items()]


def why_not(choice: Choice, first: Choice) -> str:
    """In a sentence why `choice` is not the first."""
    if not choice.fits:
        over = choice.needed - choice.capacity
        fullest = max(choice.held, key=lambda name: choice.held[name])
        return f"it does not fit: {over / 1e9:.3g} GB too much, most of it {fullest}"
    if choice.layout == first.layout and choice.micro == first.micro:
        return "it is the first"
    slower = choice.time.seconds / first.time.seconds - 1
    lines = sorted(time_lines(choice, first), key=lambda line: -line.more)
    dear = [line for line in lines if line.more > 0.1 * (choice.time.seconds - first.time.seconds)][:3]
    cheap = [line for line in reversed(lines) if -line.more > 0.1 * (choice.time.seconds - first.time.seconds)][:2]
    words = f"it takes {slower:.1%} longer"
    if dear:
        words += ": more for " + ", ".join(f"{line.what} ({line.more:+.3g} s)" for line in dear)
    if cheap:
        words += "; less for " + ", ".join(f"{line.what} ({line.more:+.3g} s)" for line in cheap)
    return words
