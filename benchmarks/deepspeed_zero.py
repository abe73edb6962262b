"""Our ZeRO stages beside DeepSpeed's, on the CPU, in one process group.

    python3 -m venv ENV
    ENV/bin/pip install torch==2.13.0
    ENV/bin/pip install deepspeed==0.19.8 ninja numpy pydantic pyyaml

    python benchmarks/deepspeed_zero.py --python ENV/bin/python [--ranks 2] [--rounds 20] [--only CASE/STAGE …]

DeepSpeed wants an environment of its own, and a C++ compiler: its kernels are compiled at their first use, minutes.
`--python` is that environment's interpreter, which imports Meshwright from this checkout. The ranks of both
contestants are the same processes, one thread each, and their steps alternate.

Both train the same plain model from the same weights on the same tokens in float32: forward, backward, gradients
averaged over the ranks, clipping by global norm, AdamW that decays matrices only. That they do is shown first: the
losses of the first steps of each must agree, and the gradient norms where DeepSpeed tells them (from stage 1 on). Our
step also sums the loss over the ranks.

DeepSpeed has what was fastest for it of a few settings tried, see `settings`.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import race
from data_parallel import CASES, Tokens, ours
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.batch import part
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train.lr import lr_at
from meshwright.train.trainer import Trainer

STEPS = 5
"""Steps whose losses and gradient norms must agree."""

TOLERANCE = 1e-4
"""Relative difference allowed between them: sums are taken in different orders."""

BUCKET = 2_000_000
"""Elements that DeepSpeed reduces at once: a fifth of the larger model. Its default is more than the whole of it, with
which nothing is reduced before backward ends."""


def settings(run: RunSpec) -> dict[str, Any]:
    """What looked fastest for DeepSpeed of what was tried: a few rounds of the larger model, on a busy machine.

    Stages 1 and 2 (the combination was tried at stage 1 only): reducing during backward, in buckets, and from the
    gradients themselves, was faster than its defaults; one reduction a destination made little difference. Stage 3:
    vectors stay whole on every rank and matrices do not, as transformers' "auto" has it (its default, as fast, would
    leave all of the smaller model whole); it keeps what it has gathered from forward to backward, which ours does not.
    The linear layer that it would put in torch's place, ours included, is left out. No clear difference was seen
    between its own Adam for CPUs and torch's fused one.
    """
    stage = run.layout.zero
    if stage == 0:
        return {"stage": 0}
    if stage < 3:
        return {"stage": stage, "overlap_comm": True, "contiguous_gradients": False, "reduce_bucket_size": BUCKET}
    return {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 10 * run.model.hidden,
        "memory_efficient_linear": False,
    }


Measured = tuple[float, float | None]  # mean loss over all ranks, gradient norm before clipping if there is one


class Peer:
    """DeepSpeed's engine around the plain model."""

    def __init__(self, run: RunSpec, rank: int, ranks: int, data: Tokens) -> None:
        import deepspeed

        model = build(run.model)
        initialise_(model, run.seed)
        linear = torch.nn.functional.linear
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_adamw(run, list(model.parameters())),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": run.batch.micro,
                "gradient_clipping": run.optimizer.clip or 0.0,
                "zero_optimization": settings(run),
                "zero_allow_untested_optimizer": True,
            },
        )
        assert torch.nn.functional.linear is linear, "DeepSpeed has replaced what our side computes with"
        self.data = data
        self.mine = part(run.batch.sequences, ranks, rank)
        self.ranks = ranks

    def step(self) -> torch.Tensor:
        tokens, targets = self.data.batch(torch.arange(self.mine.start, self.mine.stop))
        loss = self.engine(tokens, targets) / targets.numel()
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def measured_step(self) -> Measured:
        loss = self.step()
        dist.all_reduce(loss)
        norm = self.engine.get_global_grad_norm()  # none at stage 0, which clips, but does not say by what
        return float(loss) / self.ranks, None if norm is None else float(norm)


def _adamw(run: RunSpec, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    options = run.optimizer
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr_at(run, run.lr_schedule.warmup), betas=options.betas, eps=options.eps, fused=True,
    )  # fmt: skip


def our_measured_step(run: RunSpec, mesh: Mesh, data: Tokens) -> Callable[[], Measured]:
    """The step that `ours` makes, with what is to agree."""
    trainer = Trainer(run, mesh)

    def step() -> Measured:
        totals = trainer.accumulate(data, 0)
        update = trainer.update(run.lr_schedule.warmup, totals)
        return totals.loss, update.grad_norm

    return step


def agreement(ours_: Callable[[], Measured], theirs: Callable[[], Measured]) -> tuple[list[float], list[float], float]:
    """Losses of both, and the largest relative difference between their losses or gradient norms."""
    us = [ours_() for _ in range(STEPS)]
    them = [theirs() for _ in range(STEPS)]
    pairs = [pair for one, other in zip(us, them, strict=True) for pair in zip(one, other, strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None]
    return [loss for loss, _ in us], [loss for loss, _ in them], max(differences)


def contest(rank: int, ranks: int, rounds: int, only: list[str]) -> None:
    _join(rank, ranks)
    for name, (model, sequences, seq_len) in CASES.items():
        for stage in range(4):
            if only and f"{name}/{stage}" not in only and name not in only:
                continue
            run = RunSpec(
                model=model,
                data=Data(seq_len=seq_len),
                batch=Batch(sequences=sequences * ranks, micro=sequences),
                layout=Layout(dp=ranks, zero=stage),
            )
            one_stage(run, rank, ranks, rounds, name)
            gc.collect()


def one_stage(run: RunSpec, rank: int, ranks: int, rounds: int, name: str) -> None:
    mesh = Mesh.create(run.layout, device=torch.device("cpu"), timeout=600)
    data = Tokens(run.model.vocab, run.batch.sequences, run.data.seq_len)
    theirs = Peer(run, rank, ranks, data)
    agreed = agreement(our_measured_step(run, mesh, data), theirs.measured_step)
    if agreed[2] > TOLERANCE:
        raise RuntimeError(f"{name}, stage {run.layout.zero}: not the same training, {agreed}")
    result = race.race({"DeepSpeed": theirs.step, "meshwright": ours(run, mesh, data)}, rounds)
    if rank == 0:
        report(name, run, result, agreed)
    theirs.engine.destroy()


def _join(rank: int, ranks: int) -> None:
    """Let DeepSpeed take part in the group that is there. It names its shared memory after address and port."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getppid()),
    }
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def report(name: str, run: RunSpec, result: race.Result, agreed: tuple[list[float], list[float], float]) -> None:
    size = sum(p.numel() for p in build(run.model, device="meta").parameters())
    us, them, difference = agreed
    median, low, high = result.ratios["meshwright"]
    tokens = run.batch.micro * run.data.seq_len
    print(f"{name}, stage {run.layout.zero}: {size / 1e6:.1f} M parameters, {tokens} tokens a rank, dp={run.layout.dp}")
    for contestant, losses in (("DeepSpeed", them), ("meshwright", us)):
        print(f"  {contestant:12} {result.milliseconds[contestant]:8.1f} ms a step (median); first losses "
              + " ".join(f"{loss:.6f}" for loss in losses))  # fmt: skip
    compared = "losses and gradient norms" if run.layout.zero else "losses"
    print(f"  {compared} of {STEPS} steps agree: largest relative difference {difference:.1e}")
    print(f"  meshwright / DeepSpeed: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  controls: DeepSpeed with itself {result.itself:.3f}, contention {result.contention:.2f}", flush=True)


def in_environment(python: Path, *arguments: str) -> int:
    """This script in DeepSpeed's environment, with the checkout that it is in."""
    here = Path(__file__).resolve()
    environment = os.environ | {
        "PYTHONPATH": str(here.parents[1] / "src"),
        "PATH": os.pathsep.join((str(python.absolute().parent), os.environ["PATH"])),  # where DeepSpeed finds ninja
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_LOG_LEVEL": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    return subprocess.run([str(python.absolute()), str(here), *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="interpreter of DeepSpeed's environment; default: this one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE/STAGE", help="communication/3, for instance")
    options = parser.parse_args()
    if options.python is not None:
        rest = [f"--ranks={options.ranks}", f"--rounds={options.rounds}", "--only", *options.only]
        sys.exit(in_environment(options.python, *rest))
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds, options.only)
