"""Documents packed into one sequence: each is computed as if it were alone."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_inside(documents: Tensor) -> Tensor:
    """documents i64[B, T], ascending, the document of each position -> positions i64[B, T], from 0 in each of them."""
    places = torch.arange(documents.size(-1), device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return places - torch.where(begins, places, 0).cummax(-1).values
