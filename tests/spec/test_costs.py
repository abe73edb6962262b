"""Files of what a model's parts cost: read, written, refused in words; and what stages follow from them."""

from __future__ import annotations

import json
import re

import pytest

from meshwright.predict.stages import stages_of
from meshwright.spec.costs import Costs, read, write
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import load_run
from meshwright.spec.model import ModelSpec
from meshwright.verify.small import small_layout

SPEC = ModelSpec(family="llama", vocab=64, hidden=8, layers=8, heads=2, ffn=16, max_seq=32)


def split(path, costs, **layout):
    write(costs, path)
    return [len(stage.blocks) for stage in stages_of(SPEC, Layout(dp=1, pp_split=str(path), **layout), 16)]


@pytest.mark.parametrize("costs", [Costs(0.5, 1.0, 0.25, "von Hand"), Costs(0, (1.0, 2.0), 3)])
def test_what_is_written_is_read(tmp_path, costs):
    write(costs, tmp_path / "costs.json")
    assert read(tmp_path / "costs.json") == costs


def test_the_dearest_stage_is_as_cheap_as_can_be(tmp_path):
    """A head as dear as three blocks, an embedding as dear as one; then blocks that differ."""
    assert split(tmp_path / "a.json", Costs(0.0, 1.0, 0.0), pp=2) == [4, 4]
    assert split(tmp_path / "b.json", Costs(1.0, 1.0, 3.0), pp=2) == [5, 3]
    assert split(tmp_path / "c.json", Costs(0.0, (7.0, *(1.0,) * 7), 0.0), pp=2) == [1, 7]
    interleaved = {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2}
    assert split(tmp_path / "d.json", Costs(0.0, 1.0, 2.0), **interleaved) == [2, 2, 3, 1]


HEAD = '{"format": "meshwright costs 1", '
BAD = {
    "not JSON": "{",
    'no file of costs; it has "format": "meshwright costs 1"': '{"format": 1}',
    "tail: no such field": HEAD + '"embedding": 0, "block": 1, "head": 0, "tail": 1}',
    "head: null is no number of seconds": HEAD + '"embedding": 0, "block": 1}',
    "block[1]: -1 is no number of seconds": HEAD + '"embedding": 0, "block": [1, -1], "head": 0}',
    "embedding: NaN is no number of seconds": HEAD + '"embedding": NaN, "block": 1, "head": 0}',
    "block: 0; blocks cost something": HEAD + '"embedding": 0, "block": 0, "head": 0}',
    "block: []; blocks cost something": HEAD + '"embedding": 0, "block": [], "head": 0}',
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_no_file_of_costs_is_refused(tmp_path, said):
    (tmp_path / "costs.json").write_text(BAD[said])
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/costs.json: {said}")):
        read(tmp_path / "costs.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/none.json: cannot be read (No such file")):
        read(tmp_path / "none.json")


def test_costs_of_another_model_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"costs\.json: it has the costs of 3 blocks, and the model has 8"):
        split(tmp_path / "costs.json", Costs(0.0, (1.0, 1.0, 1.0), 0.0), pp=2)


def test_a_misspelt_way_is_no_file():
    with pytest.raises(UserError, match="pp_split=flop: no such way; did you mean flops"):
        load_run(None, ["layout={pp: 2, pp_split: flop}"])


def test_a_small_model_for_a_proof_is_as_uneven(tmp_path):
    """Whose blocks are fewer than the file's."""
    write(Costs(0.0, (*(1.0,) * 7, 7.0), 0.0), tmp_path / "costs.json")
    layout = Layout(dp=1, pp=2, pp_split=str(tmp_path / "costs.json"), zero_join=0)
    small = SPEC.model_copy(update={"layers": 3})
    assert small_layout(layout, SPEC, small).pp_split == (2, 1)


def test_the_file_is_plain_json(tmp_path):
    write(Costs(0.5, 1.0, 0.25), tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text())["block"] == 1.0
