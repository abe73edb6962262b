"""Run files and overrides that are right: what they mean, and that a run survives being written and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.errors import UserError
from meshwright.spec.huggingface import load as load_config
from meshwright.spec.layout import Layout
from meshwright.spec.load import describe, dump_run, load_run
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Checkpoint, Data, LrSchedule, Optimizer, RunSpec


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_written_means_the_defaults(tmp_path: Path) -> None:
    for text in ("", "# only a comment\n", "---\n", "optimizer:\nmodel:\nlayout:\n", "\ufeff"):
        assert load_run(written(tmp_path, text)) == RunSpec()
    assert load_run(None) == RunSpec()


def test_the_documented_shape(tmp_path: Path) -> None:
    run = load_run(
        written(
            tmp_path,
            """
model: llama-tiny
data: {path: stdlib, seq_len: 256}
batch: {sequences: 32, micro: 4}
layout: {dp: 2, order: [dp, tp, cp, pp]}
optimizer: {lr: 1e-3, weight_decay: 0.1, betas: [0.9, 0.95], clip: null}
lr_schedule: {warmup: 20, decay: constant, decay_steps: 1_0}
checkpoint: {every: 50, keep: 2, resume: 50}
steps: 2e2
""",
        )
    )
    assert run == RunSpec(
        layout=Layout(dp=2, order=("dp", "tp", "cp", "pp")),
        optimizer=Optimizer(lr=1e-3, clip=None),
        lr_schedule=LrSchedule(decay="constant", decay_steps=10),
        checkpoint=Checkpoint(every=50, resume=50),
        steps=200,
    )


def test_overrides_apply_in_order_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "optimizer: {lr: 1e-3, clip: 2}\nlayout: {dp: 4}\n")
    run = load_run(path, ["optimizer.lr=3e-4", "steps=50", "steps=60", "layout={dp: 3}", "optimizer.betas=[0.8,0.9]"])
    assert run.optimizer == Optimizer(lr=3e-4, clip=2.0, betas=(0.8, 0.9))
    assert (run.steps, run.layout.dp) == (60, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1500e-3", 1.5), ("1500E-3", 1.5), ("+.5e1", 5.0), ("3", 3.0), ("1_000.5", 1000.5), ("2.25", 2.25),
        ("1e3", 1000.0),
        ("0x10", 16.0), ("010", 10.0),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float) -> None:
    assert load_run(None, [f"comm_timeout={text}"]).comm_timeout == value


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "1:30", "2026-01-01", "007", "1e-3", "true", "12"])
def test_text_is_what_was_typed(tmp_path: Path, text: str) -> None:
    """Words that YAML 1.1 reads as booleans, base-60 numbers and dates, and folders that look like numbers."""
    assert load_run(None, [f"out={text}"]).out == text
    assert load_run(written(tmp_path, f"out: {text}\n")).out == text


class TestModel:
    tiny = PRESETS["llama-tiny"]

    def test_preset(self) -> None:
        assert load_run(None, ["model=qwen3-8b"]).model == PRESETS["qwen3-8b"]

    def test_fields_over_a_preset(self, tmp_path: Path) -> None:
        expected = PRESETS["gpt2-tiny"].model_copy(update={"layers": 6})
        assert load_run(written(tmp_path, "model: {preset: gpt2-tiny, layers: 6}")).model == expected
        assert load_run(written(tmp_path, "model: gpt2-tiny"), ["model.layers=6"]).model == expected
        assert load_run(None, ["model=gpt2-tiny", "model.layers=6"]).model == expected
        assert load_run(None, ["model.preset=gpt2-tiny", "model.layers=6"]).model == expected

    def test_fields_alone_are_over_the_default(self, tmp_path: Path) -> None:
        expected = self.tiny.model_copy(update={"layers": 6})
        assert load_run(None, ["model.layers=6"]).model == expected
        assert load_run(written(tmp_path, "model: {layers: 6}")).model == expected

    def test_whole_model(self, tmp_path: Path) -> None:
        text = "model: {family: gpt2, vocab: 10, hidden: 8, layers: 1, heads: 2, max_seq: 300}"
        assert load_run(written(tmp_path, text)).model == ModelSpec(
            family="gpt2", vocab=10, hidden=8, layers=1, heads=2, max_seq=300
        )

    def test_an_override_replaces_the_files_model(self, tmp_path: Path) -> None:
        path = written(tmp_path, "model: {preset: gpt2-tiny, layers: 6, vocab: 300}")
        assert load_run(path, ["model=llama-tiny"]).model == self.tiny

    def test_rope_scaling_merges_unless_its_kind_is_given(self) -> None:
        published = PRESETS["llama3-405b"].rope_scaling
        assert published is not None
        run = load_run(None, ["model=llama3-405b", "model.rope_scaling.factor=4"])
        assert run.model.rope_scaling == published.model_copy(update={"factor": 4.0})
        run = load_run(None, ["model=llama3-405b", "model.rope_scaling={kind: linear, factor: 2}"])
        assert run.model.rope_scaling == RopeScaling(kind="linear", factor=2.0)
        assert load_run(None, ["model=llama3-405b", "model.rope_scaling=null"]).model.rope_scaling is None

    def test_config_json_is_found_beside_the_run_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 11, "n_positions": 512}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        there = tmp_path / "models"
        there.mkdir()
        (there / "config.json").write_text(json.dumps(config | no_dropout))
        expected = load_config(there)
        assert expected.layers == 3
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        for text in ("model: models/config.json", "model: {preset: models/config.json}", f"model: {there}"):
            assert load_run(written(tmp_path, text)).model == expected
        # On the command line paths are relative to where one is.
        assert load_run(None, ["model=../models/config.json", "model.layers=3"]).model == expected
        with pytest.raises(UserError, match=r"command line: model=models/config\.json: .*cannot be read"):
            load_run(written(tmp_path, ""), ["model=models/config.json"])


# -- writing ------------------------------------------------------------------------------------------------------

counts = st.integers(1, 2**31 - 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
parts = st.floats(0, 1, exclude_max=True)
texts = st.text(min_size=1).filter(lambda text: "\0" not in text) | st.sampled_from(
    ["yes", "null", "~", "1e-3", "0x1F", "1:30", "- a", "a: b", "#", " ", "'", "*a", "!!int 3", "=", "\x85", "a\nb"]
)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    heads, width = draw(st.integers(1, 64)), 2 * draw(st.integers(1, 64))
    common = {"vocab": draw(counts), "hidden": heads * width, "layers": draw(st.integers(1, 10_000)), "heads": heads}
    common |= {"max_seq": draw(counts), "norm_eps": draw(positive), "tied": draw(st.none() | st.booleans())}
    if draw(st.booleans()):
        return ModelSpec(family="gpt2", resid_dropout=draw(parts), **common)
    scaling = draw(st.none() | st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1, 1e6)))
    return ModelSpec(family="llama", ffn=draw(counts), rope_theta=draw(positive), rope_scaling=scaling, **common)


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    model = draw(models())
    return RunSpec(
        model=model,
        data=Data(path=draw(texts), tokenizer=draw(texts), seq_len=draw(st.integers(1, model.max_seq))),
        batch=Batch(sequences=draw(counts), micro=draw(counts)),
        layout=Layout(
            dp=draw(st.just("auto") | st.integers(1, 1_000_000)),
            order=tuple(draw(st.permutations(["tp", "cp", "dp", "pp"]))),
        ),
        optimizer=Optimizer(lr=draw(positive), betas=(draw(parts), draw(parts)), clip=draw(st.none() | positive)),
        checkpoint=Checkpoint(resume=draw(st.sampled_from(["auto", "never"]) | st.integers(0, 2**70))),
        steps=draw(st.integers(20, 2**31 - 1)),
        out=draw(texts),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=60)
@given(runs())
def test_a_run_survives_being_written_and_read(tmp_path_factory: pytest.TempPathFactory, run: RunSpec) -> None:
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(dump_run(run), encoding="utf-8", newline="")
    assert load_run(path) == run


def test_what_is_written_means_the_same_to_other_yaml_readers() -> None:
    run = RunSpec(out="yes", data=Data(path="1e-3", tokenizer="2026-01-01"))
    data = yaml.safe_load(dump_run(run))
    assert (data["out"], data["data"]["path"], data["data"]["tokenizer"]) == ("yes", "1e-3", "2026-01-01")


def test_the_list_of_fields_is_whole_and_its_defaults_load() -> None:
    rows = {row.name: row for row in describe()}
    data = yaml.safe_load(dump_run(RunSpec()))
    leaves = {f"{a}.{b}" for a, section in data.items() if isinstance(section, dict) for b in section}
    assert leaves | set(data) <= set(rows)
    assert all(row.description and row.takes for row in rows.values())
    settable = [row for row in rows.values() if row.default and not row.name.startswith("model.rope_scaling")]
    assert load_run(None, [f"{row.name}={row.default}" for row in settable if row.name != "model.family"]) == RunSpec()
