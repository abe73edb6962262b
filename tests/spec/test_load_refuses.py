"""Run files and overrides that are wrong: where it was written, what is wrong, what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.load import load_run


def refusal(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_run(file, overrides)
    text = str(caught.value)
    for jargon in ("pydantic", "http", "Input should", "Traceback", "[type="):
        assert jargon not in text
    return text


# What is on the command line, and what the refusal must say beside it.
OVERRIDES = [
    # names
    ("optimizer.lrr=1e-3", "no such field; did you mean optimizer.lr?"),
    ("lr=1e-3", "did you mean optimizer.lr?"),
    ("learning_rate=1e-3", "did you mean optimizer.lr?"),
    ("layot.dp=2", "did you mean layout.dp?"),
    ("layout.hidden=2", "did you mean model.hidden?"),
    ("every=5", "did you mean validation.every or checkpoint.every?"),
    ("model.num_hidden_layers=2", "did you mean model.layers?"),
    ("model.rope_scaling.fator=2", "did you mean model.rope_scaling.factor?"),
    ("Steps=3", "did you mean steps?"),
    ("quux=3", "a run has model, data, batch"),
    ("layout.quux=3", "layout has dp, tp, cp"),
    # form
    ("=3", "not key=value"),
    ("layout..dp=3", "not key=value"),
    ("layout.dp", "not key=value"),
    ("optimizer.betas=[0.9", "not valid YAML"),
    ("optimizer={lr: 1, lr: 2}", "lr stands twice"),
    # values
    ("layout.dp=x", '"x" is not a whole number above 0 and at most 1000000 or auto'),
    ("layout.dp=0", "0 is not a whole number above 0 and at most 1000000 or auto"),
    ("layout.dp=100000000", "100000000 is not a whole number above 0 and at most 1000000 or auto"),
    ("model.layers=100000", "100000 is not a whole number above 0 and at most 10000"),
    ("model.hidden=1e12", "1000000000000 is not a whole number above 0 and below 2^31"),
    ("comm_timeout=0.5", "0.5 is not a number of at least 1 and at most 31536000"),
    ("comm_timeout=1e9", "1000000000 is not a number of at least 1 and at most 31536000"),
    ("model=", "command line: model=: empty; give a value, or leave model out for its default"),
    ("batch=null", "command line: batch=null: empty; give a value, or leave batch out for its default"),
    ("layout.dp=true", "true is not a whole number"),
    ("steps=2.5", "2.5 is not a whole number above 0"),
    ("steps='4'", '"4" is not a whole number'),
    ("steps=", "empty; give a whole number"),
    ("steps=1e12", "1000000000000 is not a whole number above 0 and below 2^31"),
    ("steps=" + "9" * 5000, "too long for a number"),
    ("layout=4", "4 is not a section with dp, tp"),
    ("layout.sp=yes", '"yes" is not true or false'),
    ("optimizer.lr=.nan", "not a finite number"),
    ("optimizer.lr=-1", "-1 is not a number above 0"),
    ("optimizer.betas=[0.9]", "[0.9] is not a list of 2, each a number of at least 0 and below 1"),
    ("optimizer.betas=[0.9, 1.5]", "1.5 in [0.9, 1.5] is not a number of at least 0 and below 1"),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "[0.9, 0.9, 0.9] is not a list of 2, each a number of at least 0 and below 1"),
    (
        "layout={recompute: selective, recompute_keep: [atention]}",
        '"atention" in ["atention"] is not linear, attention,',
    ),
    ("layout={recompute: selective, recompute_keep: [atention]}", "did you mean attention?"),
    ("optimizer.clip=none", '"none" is not a number above 0 or null'),
    ("precision=fp8", '"fp8" is not fp32, bf16, fp16 or float64'),
    ("precision=fp64", '"fp64" is not fp32, bf16, fp16 or float64; did you mean float64?'),
    ("precision=float32", "did you mean fp32?"),
    ("precision=torch.bfloat16", "did you mean bf16?"),
    ("precision=half", "did you mean fp16?"),
    ("precision=flaot64", "did you mean float64?"),
    ("grad_dtype=bfloat16", '"bfloat16" is not auto, fp32, bf16 or fp16; did you mean bf16?'),
    ("layout.recompute=selectiv", "did you mean selective?"),
    ("checkpoint.resume=nevr", "did you mean never?"),
    ("grad_dtype=bf16", "grad_dtype=bf16 does not go with precision=fp32; use auto or fp32"),
    ("layout.zero_shard=2", "zero_shard belongs to zero=1, 2 or 3"),
    ("layout={zero: 2, zero_gather: step}", "zero_gather=step belongs to zero=3; leave it out"),
    ("layout={zero: 2, zero_join: 5}", "zero_join=5 belongs to zero=0 or 1; at zero=2 units are never joined"),
    ("layout.zero_join=-1", "-1 is not a whole number of at least 0"),
    ("checkpoint.resume=maybe", '"maybe" is not auto, never or a whole number of at least 0'),
    ("out=''", '"" is not text that is not empty'),
    ("out=!!python/object:os.system x", "means nothing here"),
    ("seed=-1", "-1 is not a whole number of at least 0 and below 2^63"),
    # what does not go together
    ("layout.ep=2", "layout: ep=2 is not available yet; use ep=1"),
    ("layout.pp_schedule=gpipe", 'layout: pp_schedule="gpipe" goes beside pipeline ranks; use pp=2 or more'),
    ("layout.pp_chunks=2", "layout: pp_chunks=2 goes beside pipeline ranks; use pp=2 or more"),
    ("layout={pp: 2, pp_schedule: gpip}", "pp_schedule=gpip: no such schedule; did you mean gpipe?"),
    ("layout={pp: 2, pp_schedule: interleaved}", "gives each rank several stages; use pp_chunks=2 or more, or 1f1b"),
    ("layout={pp: 2, pp_chunks: 2}", "pp_chunks=2 belongs to pp_schedule=interleaved; leave it out"),
    ("layout.pp=8", "layout.pp=8 makes 8 stages, and the model has 4 blocks, one at least for each; use pp=2 or pp=4"),
    ("layout={pp: 2, pp_split: [1, 2]}", "layout.pp_split=[1, 2] deals out 3 blocks, and the model has 4"),
    ("layout={pp: 2, pp_split: [1, 1, 2]}", "pp_split=[1, 1, 2] is for 3 stages, and pp=2 makes 2"),
    ("layout.cp_method=rsa", "layout: cp_method=rsa goes beside context ranks; use cp=2 or more"),
    ("layout.cp_order=striped", "layout: cp_order=striped goes beside context ranks; use cp=2 or more"),
    ("layout={cp: 4, cp_ulysses: 2}", "cp_ulysses=2 belongs to cp_method=usp; leave it out"),
    ("layout={cp: 4, cp_method: usp}", "both 2 or more; use cp_ulysses=2, cp_method=ring or ulysses"),
    (
        "layout={cp: 4, cp_method: usp, cp_ulysses: 3}",
        "cp=4 = cp_ulysses × ring, both 2 or more; use cp_ulysses=2",
    ),
    ("layout.sp=true", "layout: sp=true goes beside tensor ranks; use tp=2 or more, or sp=false"),
    ("layout.tp=3", "layout.tp=3 does not divide 4 heads; use 1, 2 or 4"),
    ("layout.tp=8", "layout.tp=8 does not divide 4 heads; use 1, 2 or 4"),
    ("layout.recompute=all", '"all" is not none, full or selective'),
    ("layout.recompute_every=2", "recompute_every=2 belongs to recompute=full; leave it out"),
    ("layout={recompute: selective, recompute_keep: []}", "recompute_keep=[] keeps nothing"),
    ("layout.schedule=1f1b", "no such field; did you mean layout.pp_schedule?"),
    ("layout.order=[tp,tp,dp,pp]", "order must name each of tp, cp, dp, pp once"),
    ("model={heads: 3, kv_heads: 3}", "heads=3 does not divide hidden=160"),
    ("model.kv_heads=3", "kv_heads=3 does not divide heads=4; use one of [1, 2, 4]"),
    ("model.resid_dropout=0.1", "llama has no resid_dropout; leave it out"),
    ("lr_schedule={decay: constant, warmup: 100, decay_steps: 150}", "use steps=250 or more"),
    ("lr_schedule.decay=constant", "needs decay_steps"),
    # the model
    ("model=gpt2-tinny", "no preset or file gpt2-tinny; did you mean gpt2-tiny? presets are llama-tiny"),
    ("model=nowhere/config.json", "cannot be read"),
    ("model=3", "3 is not a preset"),
    ("model.family=gpt2", "also needs vocab, hidden, layers, heads, max_seq"),
    ("model={preset: llama-tiny, family: gpt2}", '"llama-tiny" is of family llama'),
    ("model.rope_scaling.factor=2", "model.rope_scaling.kind is missing; give linear, dynamic, yarn or llama3"),
]


@pytest.mark.parametrize(("override", "right"), OVERRIDES, ids=lambda v: str(v)[:40])
def test_override(override: str, right: str) -> None:
    told = refusal(override)
    assert told.startswith(f"command line: {override if len(override) < 100 else 'steps='}")
    assert right in told
    assert "mistakes" not in told


def test_a_proofs_precision_has_no_narrower_reduction() -> None:
    with pytest.raises(UserError, match="reduce_dtype does not go with precision=float64"):
        load_run(None, ["precision=float64", "reduce_dtype=fp32"])


@pytest.mark.parametrize(
    ("blamed", "others"),
    [
        ("layout.recompute_every=2", "out=elsewhere"),  # leave it out
        ("model.resid_dropout=0.1", "out=elsewhere"),
        ("lr_schedule.decay_steps=7", "steps=90"),  # the cosine spans all steps
    ],
)
def test_a_field_whose_name_is_a_word_of_the_message_is_not_blamed(blamed: str, others: str) -> None:
    assert refusal(others, blamed).startswith(f"command line: {blamed}: ")


# A run file, the line on which it is wrong, and what the refusal must say.
FILES = [
    ("steps: 3\noptimizer:\n  lr: 1e-3\n  lrr: 2\n", 4, "optimizer.lrr: no such field; did you mean optimizer.lr?"),
    ("seed: 1\nlr: 1e-3\n", 2, "lr: no such field; did you mean optimizer.lr?"),
    ("optimizer.lr: 3\n", 1, "optimizer.lr: no such field; write it as optimizer: {lr: …}"),
    ("true: 3\n", 1, "true: no such field"),
    ("steps: 3\nsteps: 4\n", 2, "steps stands twice (RUN line 1 has it too); keep one"),
    (
        "optimizer:\n  betas:\n    - 0.9\n    - 2\n",
        4,
        "optimizer.betas: 2 in [0.9, 2] is not a number of at least 0 and below 1",
    ),
    ("steps: 30\nlayout:\n  ep: 2\n", 3, "layout: ep=2 is not available yet"),
    ("model:\n  hidden: 101\n", 2, "model: heads=4 does not divide hidden=101"),
    ("model:\n  preset: gpt2-tiny\n  qk_norm: true\n", 3, "model: gpt2 has no qk_norm; leave it out"),
    ("steps:\nseed: 1", 1, "steps: empty; give a whole number"),
    ("seed: 1\nmodel: gpt2-tinny\n", 2, "model: no preset or file gpt2-tinny; did you mean gpt2-tiny?"),
    ("steps: 3\n[a, b]: 3\n", 2, "a list or section stands where a field's name belongs"),
    ("steps: 3\nseed: [1\nout: x\n", 3, "not valid YAML"),
    ("optimizer:\n\tlr: 3\n", 2, "indent with spaces, not tabs"),
    ("steps: 3\n---\nsteps: 4\n", 2, "not valid YAML"),
    ("seed: 1\nout: a\x07b\n", 2, "character"),
    ("seed: 1\nout: !secret x\n", 2, "the tag !secret means nothing here"),
    ('seed: 1\nout: "a\\0b"\n', 2, "zero character"),
    ("optimizer: &a\n  lr: *a\n", 1, "inside its own anchor"),
]


@pytest.mark.parametrize(("text", "line", "right"), FILES, ids=range(len(FILES)))
def test_file(tmp_path: Path, text: str, line: int, right: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    told = refusal(file=path)
    assert told.startswith(f"{path} line {line}: ")
    assert right.replace("RUN", str(path)) in told


@pytest.mark.parametrize(
    ("content", "right"),
    [
        (b"out: caf\xe9\n", "not UTF-8 text (byte 8 is 0xe9)"),
        (b"- a\n- b\n", "holds no fields"),
        (b"hello", "holds no fields"),
        (b"[" * 1200, "nested too deeply"),
    ],
)
def test_no_run_file(tmp_path: Path, content: bytes, right: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    told = refusal(file=path)
    assert told.startswith(str(path))
    assert right in told


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refusal(file=tmp_path / "none.yaml")
    assert "is a folder, not a run file; name a YAML file" in refusal(file=tmp_path)
    (tmp_path / "run.yaml").touch()
    assert refusal(file=tmp_path).endswith(f"use {tmp_path / 'run.yaml'}")


def test_several_mistakes_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 0\noptimizer: {lr: x}\n")
    head, *lines = refusal("seed=-1", file=path).splitlines()
    assert head == "3 mistakes:"
    assert {line.split(": ")[0].strip() for line in lines} == {f"{path} line 1", f"{path} line 2", "command line"}
    assert refusal("a.b", "lrr=3", "steps.=4").startswith("2 mistakes:")


def test_places_of_all_fields_that_do_not_go_together(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nmodel: gpt2-tiny\ndata:\n  seq_len: 4096\n")
    told = refusal(file=path)
    assert told.startswith(f"{path} line 4")
    assert "use data.seq_len=1024 or less, or model.max_seq=4096" in told
    assert refusal("model=gpt2-tiny", "data.seq_len=5000").startswith(
        "command line: data.seq_len=5000 model=gpt2-tiny: "
    )


def test_dropout_that_came_with_a_config_says_what_to_write(tmp_path: Path) -> None:
    """GPT-2's published config.json has attention dropout, which the default attention refuses."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2"}')
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\nmodel: config.json\n")
    for told, where in (
        (refusal(file=path), f"{path} line 2: "),
        (refusal(f"model={config}"), f"command line: model={config}: "),
    ):
        assert told.startswith(f"{where}model.attn_dropout=0.1 cannot be had with attention=sdpa")
        assert "write attention=explicit to keep the masks alike in every layout, dropout=torch to let torch" in told
        assert "or model.attn_dropout=0 to train without it" in told
    assert load_run(path, ["model.attn_dropout=0"]).model.resid_dropout == 0.1
    for way in ("attention=explicit", "dropout=torch"):
        assert load_run(path, [way]).model.attn_dropout == 0.1


def test_attention_that_draws_its_masks_is_not_kept_while_those_behind_it_are_drawn_again() -> None:
    words = ["model=gpt2-tiny", "model.attn_dropout=0.1", "dropout=torch", "layout.recompute=selective"]
    assert load_run(None, words).layout.recompute_keep == ("linear",)
    told = refusal(*words, "layout.recompute_keep=[linear, attention]")
    assert told.endswith("leave attention out of it, or use attention=explicit")
    load_run(None, [*words, "layout.recompute_keep=[linear, attention]", "attention=explicit"])


def test_an_override_without_effect() -> None:
    told = refusal("model.layers=2", "model=gpt2-tiny")
    assert told == "command line: model.layers=2: has no effect, model=gpt2-tiny after it replaces it; put it last"


def test_an_override_into_what_is_no_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("layout: 4\n")
    told = refusal("layout.dp=2", file=path)
    assert told == f"command line: layout.dp=2: layout is 4 ({path} line 1), not a section"


def test_bytes_that_are_no_text() -> None:
    assert refusal("out=a\udce9b") == "command line: out: not UTF-8 text"


def test_documents_and_frequencies_of_a_length() -> None:
    scaled = "model.rope_scaling={kind: dynamic, factor: 2, original_max_seq: 64}"
    told = refusal(scaled, "data.packing=documents")
    assert "data.packing=documents does not go with dynamic rope_scaling" in told and "use data.packing=none" in told
