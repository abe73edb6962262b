"""Published and measured step times, as runs on clusters: what accuracy.py predicts, and fit.py fits a third of.

Each table says what its source leaves open and what is assumed in its place. FOLDER has one CSV file a table, whose
lines that begin with # are about its source.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.spec.cluster import Cluster, Link
from meshwright.spec.devices import KINDS
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

Row = dict[str, str]
GBIT = 1e9 / 8


@dataclass(frozen=True)
class Case:
    """One row: what ran where, and the seconds of its step. group: rows that differ in layout alone share it."""

    name: str
    run: RunSpec
    cluster: Cluster
    seconds: float
    group: str = ""

    @property
    def layout(self) -> Layout:
        return self.run.layout.resolve(None)


@dataclass(frozen=True)
class Table:
    """A table of step times. calculon: its mean absolute error there, with its own system files, in percent."""

    name: str
    file: str
    source: str
    assumed: str
    read: Callable[[Row], Case | None]
    calculon: float | None = None
    fits: bool = True  # whether a third of its rows is fitted
    keep: Callable[[Row], bool] = field(default=lambda row: True)

    def cases(self, folder: Path) -> list[tuple[Case, bool]]:
        """All rows, and whether each is fitted."""
        with (folder / self.file).open() as file:
            every = [row for row in csv.DictReader(line for line in file if not line.startswith("#")) if self.keep(row)]
        fitted = fitted_rows(every) if self.fits else set()
        read = ((self.read(row), place in fitted) for place, row in enumerate(every))
        return [(case, chosen) for case, chosen in read if case is not None]


def fitted_rows(rows: list[Row]) -> set[int]:
    """Places of the rows that are fitted: every third, from the third on, in the order of their text's SHA-256."""
    order = sorted(range(len(rows)), key=lambda at: hashlib.sha256("|".join(rows[at].values()).encode()).hexdigest())
    return set(order[2::3])


# -- what rows are made of -------------------------------------------------------------------------------------------


def gpt(hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float = 0.1) -> ModelSpec:
    return ModelSpec(
        family="gpt2", vocab=vocab, hidden=hidden, layers=layers, heads=heads, max_seq=seq, embd_dropout=dropout,
        attn_dropout=dropout, resid_dropout=dropout,
    )  # fmt: skip


def padded(vocab: int, tp: int) -> int:
    """Words as Megatron-LM fills them up."""
    return -(-vocab // (128 * tp)) * 128 * tp


def cluster(kind: str, devices: int, stack: str, network: float) -> Cluster:
    """Nodes of 8 devices. network: bytes/s of each device's part of its node's adapters."""
    found = KINDS[kind]
    inner, outer = found.inner, found.outer
    nodes, per_node = -(-devices // 8), min(devices, 8)
    links = [Link(name=inner.name, devices=8, bandwidth=inner.bandwidth, latency=inner.latency)]
    if nodes > 1:
        links.append(Link(name=outer.name, devices=8 * nodes, bandwidth=network, latency=outer.latency))
    return Cluster(device=found.device, nodes=nodes, per_node=per_node, links=tuple(links), stack=stack)


def run(model: ModelSpec, seq: int, batch: int, micro: int, layout: dict[str, Any], **fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": model.model_dump(),
            "data": {"seq_len": seq},
            "batch": {"sequences": batch, "micro": micro},
            "layout": layout,
        }
        | fields
    )


def megatron(
    row: Row, *, model: ModelSpec, micro: int, tp: int, dp: int, pp: int, chunks: int = 1, zero: int = 0
) -> RunSpec:
    """Megatron-LM of 2020 and 2021: fp16, attention written out, dropout, whole layers computed again."""
    layout: dict[str, Any] = {"tp": tp, "dp": dp, "pp": pp, "recompute": "full", "zero": zero}
    if pp > 1:
        layout["pp_split"] = "layers"
    if chunks > 1:
        layout |= {"pp_schedule": "interleaved", "pp_chunks": chunks}
    batch = int(row["global_batch"])
    return run(model, model.max_seq, batch, micro, layout, precision="fp16", grad_dtype="fp16", attention="explicit")


def hardware_flops(model: ModelSpec, batch: int) -> float:
    """Narayanan et al. 2021, equation 3: those of a step with every forward computed twice."""
    b, s, n, h, v = batch, model.max_seq, model.layers, model.hidden, model.vocab
    return 96 * b * s * n * h * h * (1 + s / (6 * h) + v / (16 * n * h))


def narrow(row: Row, *names: str) -> Iterator[int]:
    for name in names:
        yield int(float(row[name]))


# -- tables ----------------------------------------------------------------------------------------------------------


def _narayanan_1(row: Row) -> Case:
    hidden, layers, heads, vocab, seq, tp, dp, pp, micro, chunks, gpus = narrow(
        row, "hidden", "layers", "heads", "vocab", "seq", "tp", "dp", "pp", "micro_batch", "virtual_stages", "gpus"
    )
    model = gpt(hidden, layers, heads, vocab, seq)
    return Case(
        f"{row['params_b']}B tp={tp} pp={pp}×{chunks} dp={dp}",
        megatron(row, model=model, micro=micro, tp=tp, dp=dp, pp=pp, chunks=chunks),
        cluster("a100-80", gpus, "megatron-2021", 200 * GBIT),
        hardware_flops(model, int(row["global_batch"])) / (gpus * float(row["tflops_per_gpu"]) * 1e12),
    )


def _narayanan_2(row: Row) -> Case:
    big = row["params_b"] == "529.6"
    model = gpt(20480, 105, 128, 51200, 2048) if big else gpt(12288, 96, 96, 51200, 2048)
    gpus, micro, parallel = narrow(row, "gpus", "micro_batch", "model_parallel")
    zero3 = row["scheme"] == "ZeRO-3"
    tp, pp = (1, 1) if zero3 else (8, parallel // 8)
    return Case(
        f"{row['scheme']} {row['params_b']}B, {gpus} devices",
        megatron(row, model=model, micro=micro, tp=tp, dp=gpus // (tp * pp), pp=pp, zero=3 * zero3),
        cluster("a100-80", gpus, "deepspeed-2021" if zero3 else "megatron-2021", 200 * GBIT),
        hardware_flops(model, int(row["global_batch"])) / (gpus * float(row["tflops_per_gpu"]) * 1e12),
    )


def _january(row: Row) -> Case:
    """What the README of January 2021 leaves open is taken from table 1 of the paper."""
    hidden, layers, heads, parallel, gpus = narrow(row, "hidden", "layers", "heads", "model_parallel", "gpus")
    model = gpt(hidden, layers, heads, 51200, 2048)
    tp = min(parallel, 8)
    pp, dp = parallel // tp, gpus // parallel
    micro = {1: 16, 2: 16, 4: 16, 8: 8, 16: 4, 32: 2, 64: 2}.get(parallel, 1)
    return Case(
        f"{row['params_b']}B tp={tp} pp={pp} dp={dp}",
        megatron(row, model=model, micro=micro, tp=tp, dp=dp, pp=pp),
        cluster("a100-80", gpus, "megatron-2021", 200 * GBIT),
        hardware_flops(model, int(row["global_batch"])) / (gpus * float(row["tflops_per_gpu"]) * 1e12),
    )


def _tensor_scaling(row: Row) -> Case:
    hidden, layers, heads, tp, gpus, batch = narrow(row, "hidden", "layers", "heads", "tp", "gpus", "global_batch")
    model = gpt(hidden, layers, heads, padded(50257, tp), 1024)
    dp = gpus // tp
    kind = {"V100": "v100", "A100": "a100-40"}[row["gpu"]]
    return Case(
        f"{row['case']} {row['gpu']} tp={tp} dp={dp}",
        megatron(row, model=model, micro=batch // dp, tp=tp, dp=dp, pp=1),
        cluster(kind, gpus, "megatron-2021", 200 * GBIT),
        float(row["iter_time_ms"]) / 1e3,
    )


def _vtrain(network: float) -> Callable[[Row], Case]:
    def read(row: Row) -> Case:
        hidden, layers, heads, seq, tp, dp, pp, micro, gpus, batch = narrow(
            row, "hidden", "layers", "heads", "seq", "tp", "dp", "pp", "micro_batch", "gpus", "global_batch"
        )
        model = gpt(hidden, layers, heads, padded(50257, tp), seq)
        return Case(
            f"h={hidden} L={layers} B={batch}/{micro} tp={tp} dp={dp} pp={pp}",
            megatron(row, model=model, micro=micro, tp=tp, dp=dp, pp=pp),
            cluster("a100-80", gpus, "megatron-2021", network),
            float(row["iter_time_ms"]) / 1e3,
            f"{hidden} {layers} {heads} {seq} {gpus} {batch}",
        )

    return read


def _megatron_core(row: Row) -> Case:
    hidden, layers, heads, vocab, seq, tp, dp, pp, gpus, batch = narrow(
        row, "hidden", "layers", "heads", "vocab", "seq", "tp", "dp", "pp", "gpus", "global_batch"
    )
    model = gpt(hidden, layers, heads, vocab, seq, dropout=0.0).model_copy(update={"tied": False})
    layout: dict[str, Any] = {"tp": tp, "dp": dp, "pp": pp, "sp": tp > 1, "zero": 1}
    if pp > 1:
        per = layers // pp
        chunks = per if per < 16 or per % 2 else per // 2
        layout |= {"pp_split": "layers", "pp_schedule": "interleaved", "pp_chunks": chunks}
    b, s, n, h, v = batch, seq, layers, hidden, vocab
    needed = 72 * b * s * n * h * h * (1 + s / (6 * h) + v / (12 * n * h))
    return Case(
        f"{row['model']} tp={tp} pp={pp} dp={dp}",
        run(model, seq, batch, batch // dp if pp == 1 else 1, layout, precision="bf16"),
        cluster("h100", gpus, "megatron-core", 400 * GBIT),
        needed / (gpus * float(row["tflops_per_gpu"]) * 1e12),
    )


_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip


def _mosaic(row: Row) -> Case:
    hidden, layers, heads = _MPT[row["Model"]]
    seq, gpus, micro, batch = narrow(row, "SeqLen (T)", "# GPUs", "MicroBatchSize", "GlobalBatchSize")
    model = gpt(hidden, layers, heads, 50368, seq, dropout=0.0)
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["Sharding Strategy"]]
    layout = {"dp": gpus, "zero": zero, "recompute": "full" if row["Activation Checkpointing"] == "True" else "none"}
    kind, network = {"h100_80gb": ("h100", 400), "a100_80gb": ("a100-80", 200), "a100_40gb": ("a100-40", 200)}[
        row["GPU"]
    ]
    return Case(
        f"{row['GPU']} {row['Model']} T={seq} B={batch}/{micro} {gpus} devices",
        run(model, seq, batch, micro, layout, precision="bf16"),
        cluster(kind, gpus, "fsdp", network * GBIT),
        float(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"]),
    )


TABLES = (
    Table(
        "Megatron-LM 2021, table 1", "megatron2021_table1.csv",
        "Narayanan et al. 2021, arXiv 2104.04473, table 1; settings from Megatron-LM's examples/academic_paper_scripts",
        "step times from the table's FLOP/s by its equation 3", _narayanan_1, 12.0,
    ),
    Table(
        "vTrain, several nodes", "vtrain_groundtruth_multi.csv",
        "github.com/VIA-Research/vTrain, data/ground_truth_multi.csv: measured, 8 A100 and 800 Gb/s a node",
        "dropout 0.1, as Megatron-LM's default", _vtrain(100 * GBIT), 16.4,
    ),
    Table(
        "vTrain, one node", "vtrain_groundtruth_single.csv",
        "github.com/VIA-Research/vTrain, data/ground_truth_single.csv: measured, up to 8 A100",
        "dropout 0.1, as Megatron-LM's default", _vtrain(100 * GBIT), 38.8,
    ),
    Table(
        "Megatron-Core, H100", "megatron_core_r0.8_h100.csv",
        "Megatron-LM's README, images/model_table.png (July 2024, Megatron-Core 0.8)",
        "micro-batches of one sequence, without a pipeline of all that a rank has; nothing computed again, sequence "
        "parallelism, sharded optimizer states, chunks of one or two layers: the source states none of these",
        _megatron_core, 28.5,
    ),
    Table(
        "Megatron-LM 2020, tensor parallelism", "megatron_2020_tp_scaling.csv",
        "Megatron-LM's repository of September 2020, images/tables.tex",
        "1,024 tokens and full recompute, which the table does not state", _tensor_scaling, fits=False,
    ),
    Table(
        "Megatron-LM, January 2021", "megatron_jan2021_readme.csv",
        "Megatron-LM's README of January 2021, images/cases_jan2021.png",
        "eight tensor ranks at most, the rest pipeline ranks without chunks, and micro-batches as in table 1", _january,
        fits=False,
    ),
    Table(
        "Megatron-LM 2021, table 2, without ZeRO", "megatron2021_table2_zero3.csv",
        "Narayanan et al. 2021, arXiv 2104.04473, table 2", "no chunks", _narayanan_2, fits=False,
        keep=lambda row: row["scheme"] == "PTD-P",
    ),
    Table(
        "Megatron-LM 2021, table 2, ZeRO 3", "megatron2021_table2_zero3.csv",
        "Narayanan et al. 2021, arXiv 2104.04473, table 2", "nothing", _narayanan_2,
        keep=lambda row: row["scheme"] == "ZeRO-3",
    ),
    Table(
        "MPT, FSDP", "mosaic_mpt_fsdp.csv",
        "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0)",
        "an adapter a device: 400 Gb/s beside an H100, 200 Gb/s beside an A100", _mosaic,
        keep=lambda row: row["Activation CPUOffload"] == "False",
    ),
)  # fmt: skip
