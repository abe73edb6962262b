"""Peak memory of a rank at each ZeRO stage: predicted, and measured over its second step on the CPU.

    python benchmarks/memory.py [--ranks 2] [--precision fp32] [--accumulate 1] [--only NAME …]
    python benchmarks/memory.py --recompute [--ranks 2] [--only NAME …]

With --recompute, of each way to compute activations again; and FLOPs, of which nothing is measured here.

Measured are live storages (see meshwright.verify.peak), so the figures are exact and the same on every machine; the
workspace inside single operations and the libraries' own memory are not in them.
"""

from __future__ import annotations

import argparse

import torch

import race
from data_parallel import Tokens
from meshwright.cli.tables import recompute_words
from meshwright.comm.mesh import Mesh
from meshwright.predict.memory import memory
from meshwright.predict.modes import COMPARED
from meshwright.predict.report import predict
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Checkpoint, Data, RunSpec
from meshwright.train.trainer import Trainer
from meshwright.verify.peak import peak

CASES = {
    # name: (model, sequences a micro-batch, tokens a sequence)
    "deep": (ModelSpec(family="llama", vocab=256, hidden=128, layers=12, heads=4, ffn=344, max_seq=64), 1, 32),
    "large vocabulary": (
        ModelSpec(family="llama", vocab=8192, hidden=64, layers=12, heads=4, ffn=176, max_seq=64), 1, 32
    ),
    "many tokens": (ModelSpec(family="llama", vocab=256, hidden=64, layers=6, heads=4, ffn=176, max_seq=128), 4, 128),
    "gpt2": (ModelSpec(family="gpt2", vocab=2048, hidden=96, layers=8, heads=4, max_seq=128), 2, 128),
}  # fmt: skip
DEEP_CASES = {
    "llama": (ModelSpec(family="llama", vocab=256, hidden=64, layers=16, heads=4, ffn=176, max_seq=128), 4, 128),
    "gpt2": (ModelSpec(family="gpt2", vocab=256, hidden=64, layers=16, heads=4, max_seq=128), 4, 128),
}
"""For --recompute: deep, with enough tokens that activations count."""
STAGES = [{"zero": stage} for stage in range(4)]
WAYS = [{"zero": stage, **way} for way in COMPARED for stage in (0, 1, 3)]


def measure(rank: int, ranks: int, precision: str, accumulate: int, names: list[str], recompute: bool) -> None:
    for name in names:
        model, sequences, seq_len = (DEEP_CASES if recompute else CASES)[name]
        if rank == 0:
            print(f"{name}, {ranks} ranks, {precision}, {accumulate} micro-batch{'es' * (accumulate > 1)}")
            print(f"  {'recompute':34}stage    predicted     measured   measured/predicted   FLOPs computed again")
        for fields in WAYS if recompute else STAGES:
            # By default units of models so small are joined at stages 0 and 1, and reduced in larger buffers.
            layout = Layout.model_validate({"dp": ranks, "zero_join": 0, **fields})
            run = RunSpec.model_validate(
                {
                    "model": model,
                    "data": Data(seq_len=seq_len),
                    "batch": Batch(sequences=ranks * sequences * accumulate, micro=sequences),
                    "layout": layout,
                    "precision": precision,
                    "device": "cpu",
                    "checkpoint": Checkpoint(every=0),  # nothing is saved here, so no copy is held
                }
            )
            # A mesh of its own, because buffers for collectives are kept with it.
            trainer = Trainer(run, Mesh.create(run.layout, device=torch.device("cpu"), timeout=60))
            data = Tokens(model.vocab, run.batch.sequences, seq_len)

            def step(trainer: Trainer = trainer, data: Tokens = data) -> None:
                trainer.update(1, trainer.accumulate(data, 0))

            step()
            measured = peak(trainer, step).total
            trainer.sharded.settle()
            foretold = memory(run, layout, rank).total
            again = predict(run).flops.executed_per_step.recompute_share
            if rank == 0:
                words = f"  {recompute_words(layout):34}{layout.zero:5}"
                print(f"{words} {foretold:12,} {measured:12,}   {measured / foretold:18.4f}   {again:.1%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--recompute", action="store_true", help="each way to recompute, at stages 0, 1 and 3")
    parser.add_argument("--only", nargs="+", choices=dict.fromkeys([*CASES, *DEEP_CASES]))
    options = parser.parse_args()
    names = options.only or list(DEEP_CASES if options.recompute else CASES)
    race.start_ranks(
        options.ranks, measure, options.ranks, options.precision, options.accumulate, names, options.recompute
    )
