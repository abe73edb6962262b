"""Blocks compiled by torch.compile, each by itself (`compile: block`).

Only a block's own forward is compiled: the hooks of recompute and ZeRO stand around it and run as they are. Blocks
of one shape share the compiled code. Masks of dropout are left out: their 32-bit arithmetic wraps around, which the
compiler's C++ does not promise, and a changed mask is a changed run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from meshwright.model.dropout import Dropout
from meshwright.spec.errors import UserError


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device, backend: str = "inductor") -> None:
    """Compile the forward of each block in place, at its first call. Call this before hooks are attached.

    Raises UserError where the CPU has no C++ compiler for what torch generates.
    """
    compiler = os.environ.get("CXX", "")
    if backend == "inductor" and device.type == "cpu" and not any(map(shutil.which, (compiler, "g++", "clang++"))):
        raise UserError(
            "compile=block needs a C++ compiler on the CPU (g++ or clang++); install one, or use compile=none"
        )
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Dropout):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
