"""`meshwright schedule` draws a timeline in letters, as a picture and as a trace, with its figures beside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.cli.main import run
from meshwright.cli.timelines import drawn
from meshwright.cli.traces import trace
from meshwright.schedule import check, make
from meshwright.schedule.files import read
from meshwright.schedule.timeline import Timeline, simulate


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["schedule", *words]) == 0
    return capsys.readouterr().out


def lines(timeline: Timeline, width: int = 120) -> list[str]:
    return [text.plain for text in drawn(timeline, width)]


# -- in letters -----------------------------------------------------------------------------------------------------


def test_gpipe_of_four(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "gpipe", "--stages", "4", "--micro-batches", "4")
    assert out.splitlines()[:5] == [
        "rank 0 F0 F1 F2 F3 ···························B0    B1    B2    B3    ",
        "rank 1 ···F0 F1 F2 F3 ··················B0    B1    B2    B3    ······",
        "rank 2 ······F0 F1 F2 F3 ·········B0    B1    B2    B3    ············",
        "rank 3 ·········F0 F1 F2 F3 B0    B1    B2    B3    ··················",
        "F forward; B backward; · waiting; numbers are micro-batches",
    ]
    said = [line.split(maxsplit=1) for line in out.splitlines()[6:]]
    figures = {name: words.strip() for name, words in said}
    assert figures["schedule"] == "gpipe, 4 ranks, 4 micro-batches; proven: no rank waits for ever"
    assert figures["length"] == "21, of which a rank computes 12"
    assert figures["bubble"] == (
        "42.9% of all ranks' time is waiting; (p − 1)/(m + p − 1) = 42.9% where messages take no time"
    )
    assert figures["held"] == "micro-batches at most: 4 on stages 0 to 3"
    assert figures["buffers"] == "at most 3 of activations and 3 of gradients wait to be used on a rank"
    assert "at once" not in figures


def test_simulated_and_closed_form_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "interleaved", "--stages", "4", "--micro-batches", "8", "--chunks", "2", "--send", "0.5")
    bubble = simulate(make("interleaved", 4, 8, 2), send=0.5).bubble
    assert bubble > 0.16
    assert f"{bubble:.1%} of all ranks' time is waiting; (p − 1)/(v·m + p − 1) = 15.8%" in out
    assert "micro-batches at most: 8, 8, 7, 5, 4, 4, 3, 1 on stages 0 to 7" in out
    assert "8 + 3, 7 + 4 on the stages of rank 0, which holds most" in out
    out = printed(capsys, "interleaved", "--stages", "4", "--micro-batches", "2", "--chunks", "2")
    assert "55.6% of all ranks' time is waiting; 1 − v·m/(v·p + m − 1) = 55.6%" in out


def test_many_numbers_are_told_as_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "1f1b", "--stages", "20", "--micro-batches", "40")
    assert "micro-batches at most: 1 to 20 on stages 0 to 19" in out


def test_a_long_timeline_goes_on_below() -> None:
    timeline = simulate(make("1f1b", 2, 12))
    found = lines(timeline, 46)
    panels = [found[start : start + 2] for start in range(0, len(found) - 1, 3)]
    assert found[2] == "from 13 on" and found[5] == "from 26 on"
    whole = ["".join(panel[rank].removeprefix(f"rank {rank} ") for panel in panels) for rank in (0, 1)]
    assert [whole] == [[line.removeprefix(f"rank {rank} ") for rank, line in enumerate(lines(timeline, 130)[:2])]]
    assert all(len(line) <= 46 for line in found[:-1])


def test_a_far_too_long_one_shows_what_ranks_do_in_the_middle_of_each_column() -> None:
    found = lines(simulate(make("gpipe", 2, 300)), 50)
    assert found[0] == "rank 0 " + "F" * 14 + "B" * 29
    assert found[1] == "rank 1 " + "F" * 14 + "B" * 29
    assert found[-1].endswith("too narrow to show every action (--out draws them)")
    assert all(len(line) <= 50 for line in found[:-1])


def test_stages_of_a_rank_have_letters() -> None:
    found = lines(simulate(make("interleaved", 2, 2, 2)))
    assert found[0].startswith("rank 0 F0a F1a F0b F1b ")
    assert "a, b … a rank's first, second … stage" in found[-1]


def test_colours_are_only_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(**options: object) -> str:
        terminal = Console(width=60, force_terminal=True, **options)
        with terminal.capture() as capture:
            for line in drawn(simulate(make("1f1b", 2, 2)), 60):
                terminal.print(line)
        return capture.get()

    assert "\x1b[30;46mF0 " in ends(color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "46m" not in ends(color_system="standard")


def test_backward_in_parts_and_no_time_at_all() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
    from pipelines import listed

    parts = listed([0], 1, "0F0 0I0 0W0 0REDUCE_GRAD 0STEP")
    assert lines(simulate(parts)) == [
        "rank 0 F0 I0 W0 ",
        "F forward; I backward for the input; W backward for the weights; · waiting; numbers are micro-batches",
    ]
    assert lines(simulate(parts, forward=0, backward=0)) == []


# -- for programs ---------------------------------------------------------------------------------------------------


def test_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--stages", "3", "--micro-batches", "5", "--chunks", "2", "--forward", "3", "--send", "0.25"]
    found = json.loads(printed(capsys, "interleaved", *words, "--json"))
    schedule = make("interleaved", 3, 5, 2)
    timeline, checked = simulate(schedule, forward=3, send=0.25), check(schedule)
    assert found == {
        "name": "interleaved",
        "ranks": 3,
        "stages": [0, 1, 2, 0, 1, 2],
        "micro_batches": 5,
        "length": timeline.length,
        "busy": list(timeline.busy),
        "bubble": timeline.bubble,
        "closed_form": 2 / 12,
        "held": list(checked.held),
        "held_at_once": [[list(counts) for counts in each] for each in checked.together],
        "posted": [posted._asdict() for posted in checked.posted],
    }


def test_a_saved_schedule_is_drawn_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    first = printed(capsys, "1f1b", "--stages", "3", "--micro-batches", "4", "--save", str(file))
    assert read(file) == make("1f1b", 3, 4)
    again = printed(capsys, str(file))
    assert again.splitlines()[:5] == first.splitlines()[:5]
    assert "33.3% of all ranks' time is waiting\n" in again.replace("  ", "") and "(p − 1)" not in again
    assert json.loads(printed(capsys, str(file), "--json"))["closed_form"] is None


def test_a_trace_has_each_action_on_a_thread_by_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    words = ["interleaved", "--stages", "2", "--micro-batches", "4", "--chunks", "2", "--send", "0.5"]
    printed(capsys, *words, "--out", str(out))
    found = json.loads(out.read_text())
    timeline = simulate(make("interleaved", 2, 4, 2), send=0.5)
    assert found == json.loads(json.dumps(trace(timeline)))
    assert found["otherData"]["unit of time"] == "1 ms"
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(map(len, (*timeline.ranks, *timeline.beside)))
    first = timeline.ranks[0][1]
    assert {"name": "F1a", "cat": "forward", "pid": 1, "tid": 1, "ts": first.start * 1000, "dur": 1000.0} == {
        key: value for key, value in spans[1].items() if key not in ("args", "ph")
    }
    threads = defaultdict(list)
    for event in spans:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert all(one[1] <= other[0] for times in threads.values() for one, other in pairwise(sorted(times)))
    names = {event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0", "rank 1", "computing", "activations to rank 1", "gradients to rank 0", "reductions"} <= names


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / name
    assert run(["schedule", "1f1b", "--stages", "2", "--micro-batches", "3", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("rank 0 F0 F1 ") and said.err == f"drawn {out}\n"
    if name == "a.png":
        assert out.read_bytes().startswith(b"\x89PNG")
    else:
        text = out.read_text()
        assert all(f"<!-- {word} -->" in text for word in ("F0", "B2", "rank 1", "forward", "backward", "waiting"))
        assert "<!-- 1f1b: 2 ranks, 3 micro-batches, bubble 25.0% -->" in text


# -- refused --------------------------------------------------------------------------------------------------------

ONE = ["1f1b", "--stages", "2", "--micro-batches", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpip", "--stages", "2", "--micro-batches", "2"], "gpip: no such schedule; did you mean gpipe?"),
        (["1f1b"], "--stages and --micro-batches missing; write 1f1b --stages 4 --micro-batches 8"),
        (["1f1b", "--stages", "2"], "command line: --micro-batches missing"),
        (["1f1b", "--stages", "0", "--micro-batches", "2"], "0 pipeline ranks; use 1 or more"),
        (["1f1b", "--stages", "two", "--micro-batches", "2"], "'two' is not a valid integer"),
        (["interleaved", "--stages", "2", "--micro-batches", "2"], "1 chunk a rank; use 2 or more, or 1f1b"),
        ([*ONE, "--chunks", "2"], "2 chunks a rank; use 1, or interleaved for 2 or more"),
        ([*ONE, "--forward", "-1"], "forward: -1.0 is no duration; use 0 or more"),
        ([*ONE, "--out", "a.pdf"], "--out a.pdf: name a picture, .svg or .png, or a trace, .json"),
        ([*ONE, "--out", "none/a.json"], "--out none/a.json: cannot be written (No such file or directory)"),
        ([*ONE, "--out", "none/a.svg"], "--out none/a.svg: cannot be written (No such file or directory)"),
        ([*ONE, "--save", "none/a.json"], "none/a.json: cannot be written (No such file or directory)"),
        ([*ONE, "--save", "a.json", "--out", "a.json"], "both would write a.json; name two files"),
        (["none.json"], "none.json: cannot be read (No such file or directory)"),
        (["mine.json", "--stages", "2"], "--stages: mine.json says that itself; leave it out"),
        (["mine.json"], "mine.json: rank 0 waits at action 0"),
        ([], "Missing argument 'NAME|FILE'"),
    ],
)
def test_wrong_input(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(
        '{"format": "meshwright schedule 1", "name": "mine", "stages": [0, 1], "micro_batches": 1, "ranks":'
        '["0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP", "1RECV_F0 1F0 1B0 1REDUCE_GRAD 1STEP"]}'
    )
    assert run(["schedule", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def test_a_picture_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "meshwright.cli.charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["schedule", *ONE, "--out", str(tmp_path / "a.svg")]) == 2
    assert "pip install 'meshwright[draw]', or name a trace, .json" in capsys.readouterr().err
    assert run(["schedule", *ONE, "--out", str(tmp_path / "a.json")]) == 0


def test_it_starts_without_torch_and_draws_without_matplotlib() -> None:
    code = (
        "import sys; from meshwright.cli.main import run; code = run(['schedule', '1f1b', '--stages', '2', "
        "'--micro-batches', '2']); sys.exit(code or bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
