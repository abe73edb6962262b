"""Schedules go into files and come back; a file that is wrong is told where."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import ScheduleError, make
from meshwright.schedule.files import KINDS, read, write

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import scrambled


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, seed):
    path = tmp_path_factory.mktemp("schedule") / "a.json"
    for schedule in (make("interleaved", 3, 5, 2), scrambled(seed)):
        write(schedule, path)
        assert read(path) == schedule


def test_people_can_read_it(tmp_path: Path):
    write(make("1f1b", 2, 1), tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == (
        "{\n"
        '  "format": "meshwright schedule 1",\n'
        '  "name": "1f1b",\n'
        '  "stages": [0, 1],\n'
        '  "micro_batches": 1,\n'
        '  "ranks": [\n'
        '    "0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP",\n'
        '    "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"\n'
        "  ]\n"
        "}\n"
    )


def test_its_words_are_those_of_torch():
    spec = importlib.util.find_spec("torch")  # read, not imported: that takes seconds
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "distributed" / "pipelining" / "schedules.py").read_text()
    for word in set(KINDS) - {"STEP"}:
        assert re.search(rf'^    [A-Z_]+ = "{word}"$', source, re.MULTILINE), word


def said(tmp_path: Path, content: object) -> str:
    path = tmp_path / "a.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ScheduleError) as error:
        read(path)
    start = f"{path}: "
    assert str(error.value).startswith(start)
    return str(error.value).removeprefix(start)


RIGHT = {
    "format": "meshwright schedule 1",
    "name": "mine",
    "stages": [0, 1],
    "micro_batches": 1,
    "ranks": ["0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": ["0F0 0GO0", ""]}, 'rank 0, action 1: "0GO0" is no action; write a stage, one of F, B, I, W, '),
        ({"ranks": ["0F0", "1F"]}, 'rank 1, action 0: "1F" is no action; it is of a micro-batch: 1F0'),
        ({"ranks": ["0F0 0STEP0"]}, 'rank 0, action 1: "0STEP0" is no action; it is of no micro-batch: 1STEP'),
        ({"ranks": ["F0"]}, 'rank 0, action 0: "F0" is no action; write a stage'),
        ({"ranks": ["0F-1"]}, 'rank 0, action 0: "0F-1" is no action'),
        ({"ranks": [["0F0"]]}, "ranks: not a list of texts"),
        ({"ranks": "0F0"}, "ranks: not a list of texts"),
        ({"stages": 2}, "stages: 2 is not a list of ranks"),
        ({"stages": [0, "1"]}, 'stages: [0, "1"] is not a list of ranks'),
        ({"stages": [0, 3]}, "stage 1 is on rank 3: there are lists for ranks 0 to 1"),
        ({"micro_batches": 0}, "micro_batches: 0 for 12 actions"),
        ({"micro_batches": 1.0}, "micro_batches: 1.0 for 12 actions"),
        ({"micro_batches": 10**15}, "micro_batches: 1000000000000000 for 12 actions"),
        ({"micro_batches": 2}, "rank 0, action 4 (reduce of stage 0) needs the backward of micro-batch 1 on stage 0"),
        ({"name": 3}, "name: 3 is not text"),
        ({"name": "a\nb"}, "is not text on one line"),
        ({"format": "meshwright schedule 2"}, 'its format is "meshwright schedule 2"; it has "format"'),
        ({"chunks": 2}, "chunks: no such field; a schedule has format, name, stages, micro_batches and ranks"),
        ({"ranks": [RIGHT["ranks"][0].replace("0SEND_F0 ", ""), RIGHT["ranks"][1]]},
         "rank 1 waits at action 0 (receive of micro-batch 0's activations from stage 0 on stage 1): nobody sends"),
    ],
)  # fmt: skip
def test_what_is_wrong(tmp_path: Path, change: dict[str, object], words: str):
    assert words in said(tmp_path, RIGHT | change)


def test_what_is_no_schedule(tmp_path: Path):
    for key in ("name", "stages", "micro_batches", "ranks"):
        assert f"{key} is missing" in said(tmp_path, {k: v for k, v in RIGHT.items() if k != key})
    assert "not a schedule; it has" in said(tmp_path, [1])
    assert "not a schedule; it has" in said(tmp_path, "{}")
    assert "line 2: not valid JSON" in said(tmp_path, '{"format": 1,\n oops}')
    assert "not a schedule: brackets" in said(tmp_path, "[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name, words in (("bytes", "not UTF-8 text"), ("none.json", "No such file"), (".", "Is a directory")):
        with pytest.raises(ScheduleError, match=words):
            read(tmp_path / name)


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(ScheduleError, match=r"none/a.json: cannot be written \(No such file or directory\)"):
        write(make("naive", 1, 1), tmp_path / "none" / "a.json")
