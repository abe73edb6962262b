"""A short run over a real text, epoch's end and padded last sample included, is the same in every layout."""

from __future__ import annotations
import __future__

from pathlib import Path

import pytest

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, RunSpec
from meshwright.train.data import Dataset
from meshwright.train.text import prepare
from meshwright.verify.compare import compare_tensors
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.worker import collect

STEPS, SEQUENCES, SEQ_LEN = 9, 11, 64


def run_of(dp: int) -> RunSpec:
    return RunSpec(
        model=ModelSpec(family="llama", vocab=256, hidden=16, layers=2, heads=2, ffn=24, max_seq=SEQ_LEN),
        data=Data(path=__future__.__file__, seq_len=SEQ_LEN),  # 5 kB of text, most of it prose
        batch=Batch(sequences=SEQUENCES, micro=2),
        layout=Layout(dp=dp),
        precision="float64",
        steps=STEPS,
        lr_schedule=LrSchedule(warmup=3),
    )


def trained(mesh, run: RunSpec, tokens: Path) -> Evidence:
    return collect(run, mesh, Dataset(tokens, SEQ_LEN, run.seed), STEPS)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    run = run_of(1)
    return prepare(run.data, run.model.vocab, tmp_path_factory.mktemp("data")).train


@pytest.fixture(scope="module")
def alone(ranks, tokens) -> Evidence:
    (evidence,) = ranks.run(1, trained, run_of(1), tokens)
    return evidence


def test_the_run_is_what_these_tests_mean(tokens, alone):
    samples = len(Dataset(tokens, SEQ_LEN, 1))
    assert samples < STEPS * SEQUENCES < 2 * samples
    assert sorted(set(alone.tokens))[-1] == SEQUENCES * SEQ_LEN > min(alone.tokens)  # the padded sample came by
    assert alone.losses[-1] < alone.losses[0]


def test_one_rank_is_one_device(tokens, alone):
    run = run_of(1)
    report = judge(run, STEPS, [alone], reference(run, Dataset(tokens, SEQ_LEN, run.seed), STEPS))
    assert report.passed, report.findings


@pytest.mark.parametrize("dp", [2, 3])  # 11 sequences: parts of 6 and 5, and of 4, 4 and 3
def test_more_ranks_are_one_rank(ranks, tokens, alone, dp):
    found = ranks.run(dp, trained, run_of(dp), tokens)
    comparisons = compare_tensors(found, alone, 1e-10)
    assert {c.kind for c in comparisons} == {"gradient", "exp_avg", "exp_avg_sq", "parameter"}
    assert [c for c in comparisons if not c.passed] == []
    for evidence in found:
        assert evidence.losses == pytest.approx(alone.losses, rel=1e-10)
        assert evidence.tokens == alone.tokens
