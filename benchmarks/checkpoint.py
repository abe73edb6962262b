"""Saving and loading beside what plain safetensors takes for the same bytes, and how long training stands still.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 600] [--rounds 7] [--zero 3] [--folder DIR]

Every rank holds its shard of weights and moments (no gradients: they are not saved). In turn, after a barrier each:

    synchronous      save, training waits; flushed to the disk when it returns
    asynchronous     how long a caller who updates at once must wait (for a copy), and from there to the end of writing
    a step           a forward and backward alone, and under a copy and the writing, as in training; and how long the
                     caller stood still for the copy all the same, which is what the log tells
    save_file        safetensors.torch.save_file of the shard as one file a rank, as it is and with a flush after it
    load             checkpoint.read into the shard, checksums compared
    load_file        safetensors.torch.load_file and a copy into the shard (load_file alone only maps the file)

Seconds are those of the slowest rank, medians over the rounds; and rank 0's seconds of computing (its own and the
kernel's for it, all threads), which do not depend on who else uses the machine. Nothing is overwritten: what was there
is removed before the clock starts. Memory: how far the process grows (VmHWM) beyond what it held when its shard was
there and before it loaded, at the first load.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import race
from data_parallel import Tokens
from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train import checkpoint, folders, state
from meshwright.train.checkpoint import Saver
from meshwright.train.trainer import Trainer

BYTES_A_PARAMETER = 12  # a weight and two moments in float32


def run_of(ranks: int, zero: int, megabytes: int) -> RunSpec:
    """A Llama of 512 with as many layers as make `megabytes` in all."""
    model = ModelSpec(family="llama", vocab=4096, hidden=512, layers=1, heads=8, ffn=1408, max_seq=64)
    block, rest = 4 * 512**2 + 3 * 512 * 1408, 2 * 4096 * 512
    layers = max(1, -(-(megabytes * 10**6 // BYTES_A_PARAMETER - rest) // block))
    return RunSpec(
        model=model.model_copy(update={"layers": layers}),
        data=Data(seq_len=64),
        batch=Batch(sequences=4 * ranks, micro=4),
        layout=Layout(dp=ranks, zero=zero),
        device="cpu",
    )


def contest(rank: int, ranks: int, megabytes: int, rounds: int, zero: int, folder: str) -> None:
    run = run_of(ranks, zero, megabytes)
    mesh = Mesh.create(run.layout, device=torch.device("cpu"), timeout=600)
    trainer = Trainer(run, mesh)
    data = Tokens(run.model.vocab, run.batch.sequences, run.data.seq_len)
    saved, held = state.saved_parts(trainer), state.held_parts(trainer)
    size = torch.tensor([sum(part.tensor.nbytes for part in saved)], dtype=torch.int64)
    shard = sum(part.tensor.nbytes for part in held)
    dist.all_reduce(size)

    ours, plain = Path(folder) / "ours", Path(folder) / f"plain-{rank}.safetensors"
    waits = Saver(ours, mesh, saved, keep=1, background=False)
    goes_on = Saver(ours, mesh, saved, keep=1)
    tensors = {f"{part.name}@{part.box.offsets}": part.tensor for part in saved}
    times: dict[str, list[float]] = defaultdict(list)
    computing: dict[str, list[float]] = defaultdict(list)
    stalls: list[float] = []

    def take(name: str, work: Callable[[], object]) -> None:
        clear(name)
        began = time.process_time()
        times[name].append(race.timed(lambda: work() and None))
        computing[name].append(time.process_time() - began)

    def clear(name: str) -> None:
        if name.startswith("save_file"):
            plain.unlink(missing_ok=True)
        elif rank == 0 and name in ("synchronous", "asynchronous: stall", "a step beside a save"):
            shutil.rmtree(ours, ignore_errors=True)
        dist.barrier()

    def asynchronous() -> None:
        goes_on.save(1, {})
        goes_on.copied()

    def flushed() -> None:
        save_file(tensors, plain)
        descriptor = os.open(plain, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def synchronous() -> None:
        waits.save(1, {})
        ended = waits.wait()
        assert ended is not None and ended.error is None, ended

    def load_and_copy() -> None:
        for name, tensor in load_file(plain).items():
            tensors[name].copy_(tensor)

    def step() -> None:
        trainer.accumulate(data, 0)

    def saving_step() -> None:
        goes_on.save(1, {})
        trainer.accumulate(data, 0)
        goes_on.copied()
        assert goes_on._running is not None
        stalls.append(goes_on._running.stall)

    def finish() -> None:
        ended = goes_on.wait()
        assert ended is not None and ended.error is None, ended

    synchronous()
    growth = [0] * ranks
    dist.all_gather_object(growth, _growth_of_loading(folders.path(ours, 1), held))
    first = 0.0
    for number in range(rounds + 1):
        if number == 1:
            first = times["asynchronous: stall"][0]
            times.clear()  # the first round makes buffers, and the page cache
            computing.clear()
            stalls.clear()
        take("synchronous", synchronous)
        take("save_file", lambda: save_file(tensors, plain))
        take("asynchronous: stall", asynchronous)
        take("asynchronous: rest", finish)
        take("a step alone", step)
        take("a step beside a save", saving_step)
        finish()
        take("save_file, flushed", flushed)
        found = checkpoint.manifest_of(folders.path(ours, 1))
        take("load", lambda found=found: checkpoint.read(folders.path(ours, 1), held, found))
        take("load_file and copy", load_and_copy)

    if rank == 0:
        report(int(size), shard, run, ranks, times, computing, stalls, first, max(growth))
    dist.barrier()


def _growth_of_loading(where: Path, held: list) -> int:
    """Bytes by which this process's peak exceeds what it held before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    checkpoint.read(where, held)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def report(
    size: int,
    shard: int,
    run: RunSpec,
    ranks: int,
    times: dict,
    computing: dict,
    stalls: list,
    first: float,
    growth: int,
) -> None:
    median = {name: statistics.median(each) for name, each in times.items()}
    print(
        f"{size / 1e6:.0f} MB of weights and moments, dp={ranks}, zero={run.layout.zero}, {shard / 1e6:.0f} MB a shard"
    )
    for name, seconds in median.items():
        low, high = min(times[name]), max(times[name])
        busy = statistics.median(computing[name])
        print(
            f"  {name:22} {seconds:7.3f} s ({low:.3f} to {high:.3f})  {size / seconds / 1e9:6.2f} GB/s"
            f"   computing {busy:.3f} s"
        )

    def ratio(one: str, other: str) -> str:
        wall, busy = (
            statistics.median(a / b for a, b in zip(each[one], each[other], strict=True)) for each in (times, computing)
        )
        return f"{wall:.3f} (of computing {busy:.3f})"

    print(f"  stall / synchronous: {ratio('asynchronous: stall', 'synchronous')}; the first takes {first:.3f} s")
    stood = statistics.median(stall / whole for stall, whole in zip(stalls, times["synchronous"], strict=True))
    print(f"  stall with a forward and backward before the update / synchronous: {stood:.4f}")
    longer = statistics.median(
        (a - b) / c
        for a, b, c in zip(times["a step beside a save"], times["a step alone"], times["synchronous"], strict=True)
    )
    print(f"  what a step takes longer beside a save / synchronous: {longer:.3f}")
    print(f"  saving, throughput of save_file: {ratio('save_file', 'synchronous')}")
    print(f"  saving, throughput of save_file, flushed: {ratio('save_file, flushed', 'synchronous')}")
    print(f"  loading, throughput of load_file and copy: {ratio('load_file and copy', 'load')}")
    print(f"  memory while loading: {1 + growth / shard:.3f} of the shard ({growth / 1e6:.1f} MB beside it)")
    print(f"  load average {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--folder", help="on the disk in question; by default a temporary one")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder)
    try:
        race.start_ranks(options.ranks, contest, options.ranks, options.megabytes, options.rounds, options.zero, folder)
    finally:
        shutil.rmtree(folder)
