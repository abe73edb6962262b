"""Checkpoints of one rank for tests: saved, listed and read."""

from __future__ import annotations

import os

import torch

from meshwright.comm.mesh import Mesh
from meshwright.train import checkpoint, folders
from meshwright.train.checkpoint import Saver
from meshwright.train.parts import Part

TENSORS = {"model/a": torch.arange(6.0).view(2, 3), "exp_avg/a": torch.ones(3, dtype=torch.float64)}


def saver(folder, tensors=TENSORS, **options):
    parts = [Part.whole(name, tensor) for name, tensor in tensors.items()]
    return Saver(folder, Mesh.single(torch.device("cpu")), parts, **{"keep": 2, "background": False, **options})


def save(folder, step, tensors=TENSORS, **options):
    """Save and return where; raise what it ended with."""
    one = saver(folder, tensors, **options)
    one.save(step, {"step": step})
    ended = one.wait()
    if ended.error is not None:
        raise ended.error
    return ended.where


def content(folder, step):
    return checkpoint.load(folders.path(folder, step))[0]


def names(folder):
    return sorted(entry for entry in os.listdir(folder) if entry != folders.LATEST)
