"""Dropout whose mask is a function of (seed, step, place in the model, element of the global batch) alone; and torch's.

The same elements are dropped whatever micro-batches and ranks the batch was dealt to. A mask has one byte an
element, and is all that backward keeps. torch's own masks come from the state of its random generators instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.init import GOLDEN, mix64_, signed


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What masks depend on besides their place: the run's seed, the step, and each sequence's place in the batch.

    positions: where x [B, T, ...] has some tokens of longer sequences, their places among all `length` of them.
    """

    seed: int
    step: int
    rows: Tensor  # i64[B]
    positions: Tensor | None = None  # i64[T]
    length: int = 0


class Dropout(nn.Module):
    """Zeroes each element with probability p and divides the others by 1 − p (Srivastava et al. 2014).

    `place` tells this dropout from the others of the model. Does nothing in eval mode. `part` is (number, of how many)
    where x is one of equal parts, along the dimension behind the batch, of what is dropped from.
    """

    def __init__(self, p: float, place: int) -> None:
        super().__init__()
        self.p, self.place, self.part = p, place, (0, 1)

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        """x [B, ...]. Raises ValueError without a key where one is needed."""
        if not self.training or self.p == 0:
            return x
        if key is None:
            raise ValueError("dropout: training with dropout needs dropout=DropoutKey(seed, step, rows)")
        return torch.where(dropped(key, self.place, x.shape, self.p, self.part), 0.0, x).mul_(1 / (1 - self.p))


class TorchDropout(nn.Module):
    """torch's own dropout: which elements it drops depends on what its generator gave before, so on the layout too."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        return F.dropout(x, self.p, self.training)


def dropout(masks: str, p: float, place: int) -> Dropout | TorchDropout:
    """One dropout of a model by the run's option: "counter" or "torch"."""
    return Dropout(p, place) if masks == "counter" else TorchDropout(p)


def seed_torch(seed: int, step: int, rank: int, micro: int, stage: int = 0) -> None:
    """Set torch's generators, of all devices, to where a data rank's micro-batch begins on a stage of a pipeline; so a
    resumed run goes on with the masks that it would have had."""
    torch.manual_seed(_hash64(f"torch:{seed}:{step}:{rank}:{micro}" + f":{stage}" * (stage > 0)))


def dropped(key: DropoutKey, place: int, shape: torch.Size, p: float, part: tuple[int, int] = (0, 1)) -> Tensor:
    """Which elements of a tensor [B, ..., n] to drop: bool of its shape, true with probability p to 2⁻³².

    part: see Dropout; of 2 dimensions only (0, 1). With positions in the key, x is [B, T, n] or such a part of it.

    Each run of n elements along the last dimension has a 64-bit key, from its sequence's place in the global batch
    and its index in the sequence; its two halves key a 32-bit hash of the element's index, because 32-bit
    multiplications are the widest that CPUs vectorise well.
    """
    rows, (*middle, n) = key.rows, shape[1:]
    assert rows.shape == shape[:1] and n < 2**31
    runs = torch.Size(middle).numel()
    number, parts = part
    assert middle or parts == 1
    if key.positions is None:
        whole, inside = runs * parts, torch.arange(number * runs, (number + 1) * runs, device=rows.device)
    else:
        assert len(middle) == 1 and len(key.positions) == runs * parts, (shape, part, key.positions.shape)
        whole, inside = key.length, key.positions[number * runs : (number + 1) * runs]
    run_keys = rows[:, None] * whole + inside
    run_keys = mix64_(run_keys.mul_(signed(GOLDEN)).add_(_hash64(f"dropout:{key.seed}:{key.step}:{place}"))).view(-1, 1)
    # The hash begins with an xorshift of low ^ column, which is that of each, since both are linear over bits.
    low = _xorshift_(run_keys.to(torch.int32), 16)
    high = (run_keys >> 32).to(torch.int32)
    columns = torch.arange(n, device=rows.device, dtype=torch.int32).mul_(_signed32(0x9E3779B1))
    columns = _xorshift_(columns, 16)
    mask = torch.empty(len(run_keys), n, dtype=torch.bool, device=rows.device)
    below = min(round(p * 2**32), 2**32 - 1) - 2**31
    # Parts of a size that stays in a CPU's cache, in the same two buffers; an accelerator wants larger ones.
    part = 1 << 17 if rows.device.type == "cpu" else 1 << 24
    width = max(min(part, n), 1)
    height = max(min(part // width, len(mask)), 1)
    hashes, spare = torch.empty(2, height, width, dtype=torch.int32, device=rows.device)
    for top in range(0, len(mask), height):
        for left in range(0, n, width):
            out = mask[top : top + height, left : left + width]
            h, t = (buffer[: out.size(0), : out.size(1)] for buffer in (hashes, spare))
            torch.bitwise_xor(low[top : top + height], columns[left : left + width], out=h)
            h.mul_(_signed32(0x7FEB352D)).bitwise_xor_(high[top : top + height])
            _xorshift_(h, 15, t).mul_(_signed32(0x846CA68B))
            torch.lt(h, below, out=out)
    return mask.view(shape)


def _hash64(words: str) -> int:
    return signed(int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little"))


def _signed32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _xorshift_(z: Tensor, bits: int, spare: Tensor | None = None) -> Tensor:
    # torch shifts arithmetically: mask off the copies of the sign bit.
    shifted = torch.bitwise_right_shift(z, bits, out=spare)
    return z.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))
