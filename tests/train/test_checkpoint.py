"""What is saved is what was there, and comes back. One rank; two are in test_checkpoint_ranks.py."""

from __future__ import annotations

import time

import pytest
import torch
from tests.train.saving import TENSORS, content, names, save, saver

from meshwright.train import checkpoint, tensorfile
from meshwright.train.checkpoint import Newest, Saver


@pytest.mark.parametrize("background", [True, False])
def test_round_trip(tmp_path, background):
    flat = torch.arange(10.0)
    views = TENSORS | {"model/view": flat[2:8].view(2, 3), "model/turned": flat[:4].view(2, 2).t(), "n": flat[3]}
    where = save(tmp_path, 50, views, background=background)
    found, meta = checkpoint.load(where)
    assert meta == {"step": 50}
    assert set(found) == set(views)
    for name, tensor in views.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """The copy, not what training has made of the tensors since; the next save uses the same buffers."""
    write = tensorfile.write

    def late(*args):
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(tensorfile, "write", late)
    weights = torch.zeros(5)
    one = saver(tmp_path, {"w": weights}, background=True, keep=3)
    began = time.perf_counter()
    assert one.save(1, {}) is None
    assert one.poll() is None and time.perf_counter() - began < 0.3
    one.copied()
    weights.fill_(7)
    first = one.save(2, {})
    staged = one._staged[0].tensor.data_ptr()
    one.copied()
    weights.fill_(9)
    second = one.wait()
    assert (first.step, second.step, first.error, second.error) == (1, 2, None, None)
    assert first.seconds > 0.3 and first.stall > 0.2, "the second waited for the first to end"
    assert content(tmp_path, 1)["w"].tolist() == [0] * 5 and content(tmp_path, 2)["w"].tolist() == [7] * 5
    one.save(3, {}, background=False)
    assert one.poll().step == 3 and one._staged[0].tensor.data_ptr() == staged
    assert content(tmp_path, 3)["w"].tolist() == [9] * 5
    assert one.poll() is None and one.wait() is None


def test_what_is_being_copied_is_waited_for_before_it_changes(tmp_path, monkeypatch):
    copy = Saver._copy

    def slowly(self):
        time.sleep(0.2)
        copy(self)

    monkeypatch.setattr(Saver, "_copy", slowly)
    weights = torch.zeros(5)
    one = saver(tmp_path, {"w": weights}, background=True)
    began = time.perf_counter()
    one.save(1, {})
    assert time.perf_counter() - began < 0.2, "training goes on"
    one.copied()
    assert time.perf_counter() - began > 0.2
    weights.fill_(7)
    ended = one.wait()
    assert ended.stall > 0.1 and content(tmp_path, 1)["w"].tolist() == [0] * 5
    one.copied()  # nothing is under way


def test_who_waits_in_any_case_needs_no_copy(tmp_path):
    one = saver(tmp_path, background=True)
    one.save(1, {}, background=False)
    assert one.wait().error is None and one._staged is None


def test_nothing_saved(tmp_path):
    assert checkpoint.newest(tmp_path / "none") == Newest(None, ())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model/a", "exp_avg/a"])
def test_what_is_not_finite_pushes_nothing_out(tmp_path, name, bad):
    save(tmp_path, 10, keep=1)
    worthless = {key: tensor.clone() for key, tensor in TENSORS.items()}
    worthless[name].view(-1)[-2] = bad
    worthless |= {"count": torch.ones(1, dtype=torch.int64)}
    for step in (10, 20):
        with pytest.raises(checkpoint.NotFinite, match=f"^{name} is not finite$"):
            save(tmp_path, step, worthless, keep=1)
        assert names(tmp_path) == ["step-00000010"]
        assert checkpoint.newest(tmp_path) == Newest(10, ())


def test_large_numbers_are_finite_though_their_sum_is_not(tmp_path):
    large = {"w": torch.full((5,), 3e38), "half": torch.full((9,), 6e4, dtype=torch.float16)}
    save(tmp_path, 10, large)
    assert torch.equal(content(tmp_path, 10)["w"], large["w"])
    large["half"][7] = float("-inf")
    with pytest.raises(checkpoint.NotFinite, match=r"^half is not finite$"):
        save(tmp_path, 20, large)
