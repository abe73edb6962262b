"""`meshwright predict` prints what `predict` foretells: to people as tables, to programs as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.common import in_bytes
from meshwright.cli.main import run
from meshwright.cli.tables import flops, size
from meshwright.predict.activations import total
from meshwright.predict.peak import saved
from meshwright.predict.report import predict
from meshwright.spec.load import load_run


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["predict", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json_is_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nbatch: {sequences: 6}\n")
    found = json.loads(printed(capsys, "--json", str(file), "data.seq_len=128", "--ranks", "3"))
    expected = predict(load_run(file, ["data.seq_len=128"]), 3).to_dict()
    assert found == json.loads(json.dumps(expected))
    assert (found["ranks"], found["parameters"]["total"]) == (3, 124_439_808)


def test_context_ranks_are_named_with_how_they_attend(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "layout={cp: 4, dp: 1, cp_method: usp, cp_ulysses: 2, cp_order: striped, zero: 1}")
    assert "cp=4, usp of 2 in striped parts, zero=1: 4 ranks" in out
    assert "Traffic of a step on rank 0" in out and re.search(r"reduce_scatter over cp\s+\(zero.reduce\)", out)
    assert re.search(r"all_to_all +cp.inner +cp.ulysses.qkv", out) and re.search(r"shift +cp.outer +cp.ring.kv", out)


def test_tables_hold_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout.dp=3", "batch.sequences=2", "layout.zero_join=0"]
    out = printed(capsys, *words)
    foretold = predict(load_run(None, words))
    lines = [line.split() for line in out.splitlines()]
    for name, number in foretold.memory.categories.items():
        assert [*name.split(), f"{number:,}"] in [line[: len(name.split()) + 1] for line in lines]
    copy = foretold.memory.host["checkpoint copy"]
    assert copy > 0 and ["checkpoint", "copy,", "on", "the", "host", f"{copy:,}"] in [line[:6] for line in lines]
    for row in foretold.traffic:
        assert [row.key.operation, row.key.axis, row.key.reason, row.key.phase, str(row.count)] in [
            x[:5] for x in lines
        ]
    assert f"{foretold.parameters.total:,}" in out
    assert "blocks.0 to blocks.3, each" in out
    assert "data ranks 2 to 2 have no sequence of the batch's 2; batch.sequences=3 or more" in out
    assert not any("…" in line for line in out.splitlines())


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert "blocks." not in printed(capsys, "-q", "layout.zero_join=0")
    assert "blocks.2 " in printed(capsys, "-v", "layout.zero_join=0")


def test_joined_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert "embedding..head 1,220,000" in " ".join(printed(capsys).split())
    deep = printed(capsys, "model.layers=12", "layout.zero_join=500000").split()
    assert "blocks.2..blocks.3 to blocks.8..blocks.9, each 568,960 blocks.10..head" in " ".join(deep)


LLAMA = ["model=llama3-8b", "data.seq_len=4096", "batch.micro=1", "precision=bf16", "layout.zero=3", "--ranks", "64"]


def test_modes_of_recompute_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *LLAMA, "--recompute", "--capacity", "80GB", "--json"))["recompute"]
    out = printed(capsys, *LLAMA, "--recompute", "--capacity", "80GB")
    lines = [re.split(r"  +", line.strip()) for line in out[out.index("Recompute,") :].splitlines()]
    names = [
        "none (this run)",
        "full",
        "full every sqrt = 6",
        "selective keep linear",
        "selective keep linear attention",
    ]
    for name, mode in zip(names, found, strict=True):
        figures = [size(mode[key]) for key in ("kept", "peak", "states")]
        micro = mode["fit"]["largest_micro"]
        assert [name, *figures, f"{mode['recompute_share']:.1%}", "yes", f"{micro}"] in lines
    assert not any("…" in line for line in out.splitlines())


def test_a_capacity_is_compared_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    held = predict(load_run(None, [])).memory.total
    for capacity, words in (
        (held, "yes: 0 B to spare of"),
        (held - 1, "no: 1 B more than"),
        (1, "no batch.micro does"),
    ):
        assert words in printed(capsys, "-q", "--capacity", f"{capacity}B")
        found = json.loads(printed(capsys, "--json", "--capacity", f"{capacity}B"))["capacity"]
        assert (found["capacity"], found["fits"]) == (capacity, capacity >= held)
        assert found["largest_micro"] == {held: 4, held - 1: 3, 1: 0}[capacity]
    assert "fits" not in printed(capsys, "-q")


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("24.5 GB", 24_500_000_000), ("1TiB", 2**40), ("7B", 7)],
)
def test_capacities(text: str, number: int) -> None:
    assert in_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "right"),
    [("24", "24GB"), ("24.5", "24.5GB"), ("24gb", "24GB"), *((t, "80GB") for t in ("GB", "0GB", "-1GB", "80GX", ""))],
)
def test_no_capacity(text: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", f"--capacity={text}"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"'{text}' is no size; write {right} (10⁹ bytes each) or {right[:-2]}GiB" in err


def test_recompute_is_in_the_layouts_words(capsys: pytest.CaptureFixture[str]) -> None:
    for fields, words in (
        ({}, "dp=2: 2 ranks"),
        ({"recompute": "full"}, "dp=2, recompute full: 2 ranks"),
        ({"recompute": "full", "recompute_every": "sqrt"}, "dp=2, recompute full every sqrt: 2 ranks"),
        ({"recompute": "selective", "zero": 1}, "dp=2, zero=1, recompute selective keep linear: 2 ranks"),
    ):
        out = printed(capsys, *(f"layout.{name}={value}" for name, value in fields.items()))
        assert words in out
        assert ("computed again" in out) == ("recompute" in fields)


def test_verbose_lists_what_is_kept_for_backward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2-tiny", "model.attn_dropout=0.1", "attention=explicit", "precision=bf16", "device=cpu"]
    lines = [line.split() for line in printed(capsys, "-v", *words).splitlines()]
    run_ = load_run(None, words)
    rows = saved(run_, run_.layout, run_.batch.micro)
    first = [row for row in rows if row.where.startswith("transformer.h.0.")]
    for row in first:
        assert [row.where, *row.what.split(), f"{row.bytes:,}"] in [line[:-2] for line in lines], row
    assert ["layers", "0", "to", "3,", "each", f"{total(first):,}"] in [line[:6] for line in lines]
    assert ["all", f"{total(rows):,}"] in [line[:2] for line in lines]
    assert sum(line[:1] == ["transformer.h.1.mlp"] for line in lines) == 0


def test_verbose_lists_what_regions_keep_under_their_last_block(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "-v", "model.layers=5", "layout.recompute=full", "layout.recompute_every=2")
    (line,) = (line.split() for line in out.splitlines() if line.startswith("model.layers.1 "))
    assert line[1:3] == ["residual", "stream"]
    assert "layers 1, 3, 4, each" in out


def test_layers_that_differ_stand_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The first layer of a model with a window has the mask that all share."""
    out = printed(capsys, "-v", "model.window=8")
    assert "layer 0 " in out and "layers 1 to 3, each" in out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("layout.zero=1 layout.dp=4 layout.zero_shard=2", "dp=4, zero=1, zero_shard=2: 4 ranks, fp32 "),
        ("layout.zero=3 layout.zero_gather=step", "dp=2, zero=3, zero_gather=step: 2 ranks"),
        ("layout.zero=3 layout.zero_ahead=0", "dp=2, zero=3, zero_ahead=0: 2 ranks"),
        ("layout.zero=3 layout.zero_join=0", "dp=2, zero=3: 2 ranks"),  # where nothing is joined anyway
        ("layout.zero_join=0", "dp=2, zero_join=0: 2 ranks"),
        ("layout.offload=activations device=cuda", "dp=2, offload=activations: 2 ranks"),
        ("precision=bf16 grad_dtype=bf16", "dp=2: 2 ranks, bf16, grad_dtype=bf16 "),
        ("reduce_dtype=bf16", "dp=2: 2 ranks, fp32, reduce_dtype=bf16 "),
    ],
)
def test_what_was_asked_for_is_in_the_layouts_words(
    capsys: pytest.CaptureFixture[str], fields: str, words: str
) -> None:
    assert f"layout   {words}" in printed(capsys, "-q", *fields.split())


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ("", None),
        (
            "model=llama2-7b",
            "data.seq_len=256 is the default, for the demo; this model takes sequences of up to 4,096",
        ),
        ("model=llama2-7b data.path=book.txt", "data.seq_len=256 is the default"),
        ("model=llama2-7b data.seq_len=256", None),
        ("model=llama2-7b data={seq_len: 256}", None),
        ("model=gpt2 model.max_seq=512", None),
        ("layout.zero=3", None),
        ("layout.zero=3 layout.dp=1", "layout.zero=3 shards nothing: there is 1 data rank"),
        ("layout.zero=2 layout.zero_shard=1", "layout.zero=2 shards nothing: zero_shard=1 leaves each data rank by"),
    ],
)
def test_notes_say_what_was_perhaps_not_meant(
    capsys: pytest.CaptureFixture[str], fields: str, note: str | None
) -> None:
    out = printed(capsys, "-q", *re.split(r" (?=\w+[.=])", fields) if fields else [])
    assert ("note " in out) == (note is not None)
    assert note is None or note in out


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "traffic  none" in printed(capsys, "--ranks", "1")


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999_999_999, "1 GB"), (2.5e20, "250 EB")],
)
def test_sizes_are_decimal(number: float, words: str) -> None:
    assert size(number) == words
    assert flops(number) == words.replace("B", "FLOPs")


def test_a_way_to_recompute_that_the_run_may_not_have_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--recompute", "model=gpt2-tiny", "model.attn_dropout=0.1", "device=cpu")
    assert "keep linear attention" in printed(capsys, *words, "attention=explicit", "dropout=torch")
    torch_drops = printed(capsys, *words, "attention=sdpa", "dropout=torch")
    assert "selective keep linear" in torch_drops and "keep linear attention" not in torch_drops
