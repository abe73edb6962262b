"""Quantities as people write them: 4M tokens, 4Mi, 15T, 80GB, 900 GB/s, 400 Gb/s, 989 TFLOP/s, 5 us.

k, M, G, T, P and E are powers of ten, Ki, Mi, Gi, Ti, Pi and Ei powers of two; B is 10⁹ of what is counted. Case
matters where it tells two things apart: b is a bit, B a byte, and m would be a thousandth, so "4m" is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal

from meshwright.spec.errors import UserError

TEN = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
TWO = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGTPE", 1)}
_NUMBER = re.compile(r"([-+]?(?:[0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?) *(.*)")


_PREFIXES = "k, M, G, T, P, E (10³ to 10¹⁸)"
_BINARY = "Ki, Mi, Gi, Ti, Pi, Ei (2¹⁰ to 2⁶⁰)"


@dataclass(frozen=True)
class Unit:
    """What a quantity may end in: `scales` by suffix, in the unit that the program computes with.

    what: a quantity of it in words. known: the suffixes in words. examples: what is right. Also stands beside a field's
    type, as in Annotated[float, BYTES]: text is then understood where it stands in a file.
    """

    what: str
    known: str
    examples: tuple[str, ...]
    scales: dict[str, Decimal] = field(hash=False)

    def __call__(self, text: str) -> float:
        """The number that `text` is. Whole ones are ints, exactly. Raises UserError."""
        parts = _NUMBER.fullmatch(text.strip())
        example = " or ".join(self.examples)
        if parts is None:
            raise UserError(f"{text!r} is no {self.what}; write, for example, {example}")
        number, suffix = Decimal(re.sub("[_,]", "", parts[1])), parts[2].replace("μ", "µ")
        scale = self.scales.get(suffix)
        if scale is None:
            near = [known for known in self.scales if known.lower() == suffix.lower()]
            right = f"{parts[1]}{near[0]}" if near else example
            raise UserError(f"{text!r} is no {self.what}: {suffix} is none of {self.known}; write {right}")
        value = number * scale
        return int(value) if value == value.to_integral_value() else float(value)


def _scales(*units: str, per: int = 1, two: bool = True) -> dict[str, Decimal]:
    """Scales by prefix and unit, where `per` of the unit make one of what is computed with."""
    prefixes = TEN | (TWO if two else {})
    return {prefix + unit: Decimal(scale) / per for unit in units for prefix, scale in prefixes.items()}


COUNT = Unit(
    "number",
    f"{_PREFIXES}, B (10⁹), {_BINARY}",
    ("4M (4·10⁶)", "4Mi (4·2²⁰)"),
    _scales("") | {"B": Decimal(10**9)},
)
BYTES = Unit(
    "size", f"B and, before it, {_PREFIXES}, {_BINARY}", ("80GB (10⁹ bytes each)", "80GiB (2³⁰ each)"), _scales("B", "")
)
RATE = Unit(
    "rate",
    f"B/s and b/s (bits) and, before them, {_PREFIXES}",
    ("900GB/s", "400Gb/s (bits)"),
    _scales("B/s", "") | _scales("b/s", per=8, two=False),
)
FLOPS = Unit(
    "rate of FLOPs",
    f"FLOP/s and, before it, {_PREFIXES}",
    ("989T", "989 TFLOP/s"),
    _scales("", "FLOP/s", "FLOPS", two=False),
)
SECONDS = Unit(
    "time",
    "s, ms, us, ns",
    ("5us", "0.000005"),
    {"": Decimal(1), "s": Decimal(1)}
    | {suffix: Decimal(scale) for suffix, scale in (("ms", "1e-3"), ("us", "1e-6"), ("µs", "1e-6"), ("ns", "1e-9"))},
)


def whole(text: str, unit: Unit = COUNT) -> int:
    """As `unit(text)`, of what there is no half of, and 1 or more. Raises UserError."""
    value = unit(text)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{text!r} is no {unit.what} of 1 or more without a fraction; write, for example, 1")
    return value
