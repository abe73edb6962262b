"""What the parts of a model take, as measured: the right parts, in the run's own terms."""

from __future__ import annotations

import pytest
import torch

from meshwright.cli.main import run as command
from meshwright.predict.flops import counted
from meshwright.spec.costs import read
from meshwright.spec.load import load_run
from meshwright.train import costs

FIELDS = ["data.seq_len=16", "batch={sequences: 4, micro: 2}", "device=cpu"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_part_is_computed_whole_and_alone(monkeypatch, family, recompute):
    """Counted in FLOPs instead of seconds: embedding nothing, a block and the head what is predicted of them."""
    from torch.utils.flop_counter import FlopCounterMode

    fields = [f"model={{family: {family}, vocab: 64, hidden: 16, layers: 3, heads: 2, ffn: 24, max_seq: 32}}"]
    run = load_run(None, [*fields, *FIELDS, f"layout.recompute={recompute}", "attention=explicit"])

    def counts(part, device):
        with FlopCounterMode(display=False) as counter:
            part()
        return float(counter.get_total_flops())

    monkeypatch.setattr(costs, "_timed", counts)
    found = costs.measure(run, torch.device("cpu"), rounds=1)
    one = run.model.model_copy(update={"layers": 1})
    layout = run.layout.model_copy(update={"dp": 1})
    total = counted(one, batch=2, seq=16, attention="explicit", layout=layout)
    head = 3 * 2 * 2 * 16 * 16 * 64
    assert (found.embedding, found.head) == (0, head)
    assert found.block == total.total - head


def test_dropout_needs_nothing_beside_the_run():
    fields = ["model={family: gpt2, vocab: 64, hidden: 16, layers: 3, heads: 2, max_seq: 32, resid_dropout: 0.1}"]
    found = costs.measure(load_run(None, [*fields, *FIELDS, "precision=bf16"]), torch.device("cpu"), rounds=1)
    assert found.block > 0 and found.embedding > 0 and found.head > 0


def test_the_command_writes_what_a_pipeline_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fields = ["model={layers: 3, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}", *FIELDS]
    assert command(["costs", *fields, "-o", "mine.json"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("embedding ") and "layout.pp_split=mine.json" in said.err
    assert read(tmp_path / "mine.json").of.startswith("llama, blocks of 16, 2 × 16 tokens, fp32")
    assert command(["predict", *fields, "layout.pp=2", "layout.dp=1", "layout.pp_split=mine.json", "-v"]) == 0
    assert "split by mine.json" in capsys.readouterr().out
    assert command(["costs", *fields, "-o", "nowhere/mine.json"]) == 2
    assert "nowhere/mine.json: cannot be written" in capsys.readouterr().err
