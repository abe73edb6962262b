"""Step times that others published, within the errors that docs/accuracy.md states; what is assumed where they are
silent is said in benchmarks/published.py."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from meshwright.predict.cost.operators import Shard
from meshwright.predict.cost.parts import Parts
from meshwright.predict.cost.step import step_time
from meshwright.schedule import make
from meshwright.schedule.timeline import simulate
from meshwright.spec.cluster import Cluster, Link
from meshwright.spec.devices import KINDS
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec


def gpt(hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float, tied: bool = True) -> ModelSpec:
    return ModelSpec(
        family="gpt2", vocab=vocab, hidden=hidden, layers=layers, heads=heads, max_seq=seq, tied=tied,
        embd_dropout=dropout, attn_dropout=dropout, resid_dropout=dropout,
    )  # fmt: skip


def nodes_of_eight(kind: str, devices: int, stack: str, network: float) -> Cluster:
    inner = KINDS[kind].inner
    links = [Link(name=inner.name, devices=8, bandwidth=inner.bandwidth, latency=inner.latency)]
    if devices > 8:
        links.append(Link(name="network", devices=devices, bandwidth=network, latency=5e-6))
    return Cluster(device=KINDS[kind].device, nodes=devices // 8, per_node=8, links=tuple(links), stack=stack)


def run_of(model: ModelSpec, batch: int, micro: int, layout: dict[str, Any], **fields: Any) -> RunSpec:
    data = {"seq_len": model.max_seq}
    sizes = {"sequences": batch, "micro": micro}
    return RunSpec.model_validate(
        {"model": model.model_dump(), "data": data, "batch": sizes, "layout": layout} | fields
    )


def executed(model: ModelSpec, batch: int, passes: int) -> float:
    """Narayanan et al. 2021, equation 3: FLOPs of a step with four passes over the blocks, or three."""
    s, n, h, v = model.max_seq, model.layers, model.hidden, model.vocab
    return 24 * passes * batch * s * n * h * h * (1 + s / (6 * h) + v / (4 * passes * n * h))


# Narayanan et al. 2021 (arXiv 2104.04473), table 1, and rows of table 2 without ZeRO; settings from Megatron-LM's
# examples/academic_paper_scripts/sc21. Width, layers, heads, tp, pp, dp, batch, micro-batch, chunks, TFLOP/s a device.
TABLE_1 = (
    (2304, 24, 24, 1, 1, 32, 512, 16, 1, 137),
    (3072, 30, 32, 2, 1, 32, 512, 16, 1, 138),
    (4096, 36, 32, 4, 1, 32, 512, 16, 1, 142),
    (6144, 40, 48, 8, 1, 32, 1024, 8, 1, 135),
    (8192, 48, 64, 8, 2, 32, 1536, 4, 1, 138),
    (10240, 60, 80, 8, 4, 32, 1792, 2, 3, 140),
    (12288, 80, 96, 8, 8, 24, 2304, 2, 2, 148),
    (16384, 96, 128, 8, 16, 15, 2160, 1, 2, 155),
    (20480, 105, 128, 8, 35, 9, 2520, 1, 3, 163),
    (25600, 128, 160, 8, 64, 6, 3072, 1, 1, 163),
)
TABLE_2 = (
    (12288, 96, 96, 8, 12, 8, 1536, 1, 1, 149),
    (12288, 96, 96, 8, 12, 16, 1536, 1, 1, 141),
    (20480, 105, 128, 8, 35, 4, 2240, 1, 1, 167),
    (20480, 105, 128, 8, 35, 8, 2240, 1, 1, 159),
)


@pytest.mark.parametrize(("table", "limit"), [(TABLE_1, 0.06), (TABLE_2, 0.03)], ids=["table 1", "table 2"])
def test_megatron_lm_of_2021(table: tuple[tuple[int, ...], ...], limit: float) -> None:
    errors = []
    for hidden, layers, heads, tp, pp, dp, batch, micro, chunks, rate in table:
        model = gpt(hidden, layers, heads, 51200, 2048, 0.1)
        layout: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "recompute": "full"}
        layout |= {"pp_split": "layers"} if pp > 1 else {}
        layout |= {"pp_schedule": "interleaved", "pp_chunks": chunks} if chunks > 1 else {}
        run = run_of(model, batch, micro, layout, precision="fp16", grad_dtype="fp16", attention="explicit")
        devices = tp * pp * dp
        found = step_time(run, run.layout, nodes_of_eight("a100-80", devices, "megatron-2021", 25e9))
        errors.append(found.seconds / (executed(model, batch, 4) / (devices * rate * 1e12)) - 1)
    assert mean(map(abs, errors)) < limit
    assert max(map(abs, errors)) < 0.12


# Megatron-LM's README, images/model_table.png of July 2024 (Megatron-Core 0.8), H100. Width, layers, heads, tp, pp,
# batch, TFLOP/s a device of the model; 48 data ranks, 4,096 tokens, 131,072 words.
CORE = (
    (2048, 24, 16, 1, 1, 192, 408.8),
    (4096, 30, 32, 2, 1, 192, 465.9),
    (6144, 32, 48, 4, 1, 192, 489.1),
    (7168, 48, 56, 8, 1, 192, 459.6),
    (8192, 84, 64, 8, 2, 384, 419.7),
    (10240, 92, 80, 8, 4, 768, 420.5),
    (12288, 96, 96, 8, 6, 1152, 432.8),
    (16384, 96, 128, 8, 8, 1536, 474.4),
    (18432, 112, 144, 8, 16, 3072, 459.9),
)


def test_megatron_core_on_h100() -> None:
    errors = []
    for hidden, layers, heads, tp, pp, batch, rate in CORE:
        model = gpt(hidden, layers, heads, 131072, 4096, 0.0, tied=False)
        layout: dict[str, Any] = {"tp": tp, "pp": pp, "dp": 48, "sp": tp > 1, "zero": 1}
        if pp > 1:
            each = layers // pp
            chunks = each if each < 16 or each % 2 else each // 2
            layout |= {"pp_split": "layers", "pp_schedule": "interleaved", "pp_chunks": chunks}
        run = run_of(model, batch, batch // 48 if pp == 1 else 1, layout, precision="bf16")
        devices = tp * pp * 48
        found = step_time(run, run.layout, nodes_of_eight("h100", devices, "megatron-core", 50e9))
        errors.append(found.seconds / (executed(model, batch, 3) / (devices * rate * 1e12)) - 1)
    assert mean(map(abs, errors)) < 0.05


def test_one_layer_of_22b() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 4: 7.7 and 11.9 ms forward and backward, with sequence
    parallelism 7.2 and 11.8, and 19.5 with full recompute; eight A100, four sequences."""
    cluster = nodes_of_eight("a100-80", 8, "megatron-2021", 25e9)
    parts = Parts(gpt(6144, 48, 64, 51200, 2048, 0.1), 2048, "fp16", cluster, attention="explicit")
    plain = Shard(tp=8, micro=4)
    for shard, forward, backward in (
        (plain, 7.7, 11.9),
        (plain._replace(sp=True), 7.2, 11.8),
        (plain._replace(recompute="full"), 7.7, 19.5),
    ):
        found = parts.block(shard)
        assert 1e3 * found.forward == pytest.approx(forward, rel=0.1)
        assert 1e3 * (found.backward + found.recompute) == pytest.approx(backward, rel=0.1)


@pytest.mark.parametrize(
    ("ranks", "micros", "over", "published"),
    [(4, 32, (2, 1), 3.4), (8, 32, (2, 1), 6.3), (8, 32, (2, 32), 3.3)],
)
def test_throughput_of_gpipe(ranks: int, micros: int, over: tuple[int, int], published: float) -> None:
    """Huang et al. 2019 (arXiv 1811.06965), tables 2 and 3: Transformer-48 and -24, over two devices."""

    def rate(ranks: int, micros: int) -> float:
        return ranks * micros / simulate(make("gpipe", ranks, micros)).length

    assert rate(ranks, micros) / rate(*over) == pytest.approx(published, rel=0.1)
