"""Text and token files become training and held-out tokens, or an error in words."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.run import Data
from meshwright.train import tokenfile
from meshwright.train.text import Prepared, digest, follow, prepare


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run" / "data"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("abcdefghij" * 20)
    return path


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder of ten text files, "0" .. "9", each its own name four times, and what is to be passed over."""
    root = tmp_path / "shelf"
    (root / "sub").mkdir(parents=True)
    for index in range(10):
        (root / ("sub" if index % 2 else ".") / f"{index}.txt").write_text(str(index) * 4)
    (root / "image.bin").write_bytes(b"ab\0cd")
    (root / "empty.txt").touch()
    (root / "gone.txt").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words a, b, c and an end of text; set to truncate and pad, which must not happen to training text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_truncation(2)
    made.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def tokens(path: Path | None) -> list[int]:
    assert path is not None
    return np.load(path).tolist()


def data(path: object, **fields: object) -> Data:
    return Data(**{"path": str(path), "seq_len": 4, **fields})


def refused(*words: str) -> object:
    """The error names the field, what is wrong and what would be right, and holds `words`."""
    parts = "".join(f"(?=.*{word})" for word in words)
    return pytest.raises(UserError, match=f"^{parts}[a-z_.]+: .+; .+")


# -- what comes out -------------------------------------------------------------------------------------------------


def test_one_file_is_held_out_at_its_end(book: Path, out: Path) -> None:
    made = prepare(data(book, held_out=0.1), 256, out)
    whole = list(book.read_bytes())
    assert (tokens(made.train), tokens(made.held_out)) == (whole[:180], whole[180:])
    assert (made.train_tokens, made.held_out_tokens) == (180, 20)
    assert np.load(made.train).dtype == np.uint8


def test_nothing_held_out(book: Path, out: Path) -> None:
    made = prepare(data(book, held_out=0), 256, out)
    assert (made.held_out, made.held_out_tokens, made.train_tokens) == (None, 0, 200)


def test_every_kth_file_is_held_out(shelf: Path, out: Path) -> None:
    made = prepare(data(shelf, held_out=0.2), 256, out)
    held, train = bytes(tokens(made.held_out)), bytes(tokens(made.train))
    # Sorted: 0 2 4 6 8 sub/1 sub/3 sub/5 sub/7 sub/9, and k is 5.
    assert held.split(b"\0") == [b"8888", b"9999"]
    assert train.split(b"\0") == [name * 4 for name in (b"0", b"2", b"4", b"6", b"1", b"3", b"5", b"7")]


def test_more_than_half_is_held_out(shelf: Path, out: Path) -> None:
    made = prepare(data(shelf, held_out=0.8), 256, out)
    assert bytes(tokens(made.train)).split(b"\0") == [b"8888", b"9999"]


def test_fewer_files_than_k_are_cut_like_one(shelf: Path, out: Path) -> None:
    made = prepare(data(shelf, held_out=0.05), 256, out)
    assert (made.train_tokens, made.held_out_tokens) == (47, 2)
    assert bytes(tokens(made.held_out)) == b"99"


def test_stdlib_is_source_without_its_tests(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tmp_path / "lib"
    for name in ("os.py", "json/tool.py", "notes.txt", "test/a.py", "json/tests/b.py", "site-packages/c.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    made = prepare(data("stdlib", held_out=0), 256, out)
    assert bytes(tokens(made.train)) == b"# json/tool.py\0# os.py"


def test_bytes_round_trip() -> None:
    made = Prepared(0, Path(), None, "bytes", 0, 0)
    assert made.decode(made.encode("hé ≠ 日")) == "hé ≠ 日"
    assert made.encode("é") == [0xC3, 0xA9]
    assert made.decode([104, 300, 105, 0xC3]) == "hi\N{REPLACEMENT CHARACTER}"  # ids that no byte has are left out


def test_tokenizer_file(tokenizer: Path, tmp_path: Path, out: Path) -> None:
    root = tmp_path / "words"
    root.mkdir()
    (root / "1").write_text("a b c a b c")
    (root / "2").write_text("c z")
    made = prepare(data(root, held_out=0, tokenizer=str(tokenizer)), 300, out)
    assert tokens(made.train) == [0, 1, 2, 0, 1, 2, 4, 2, 3]
    assert (made.encode("b a"), made.decode([1, 0, 299])) == ([1, 0], "b a")


def test_the_runs_own_folder_is_no_source(book: Path) -> None:
    root = book.parent
    (root / "work" / "run").mkdir(parents=True)
    (root / "work" / "text").write_text("some text here")
    out = root / "work" / "run" / "data"
    before = prepare(data(root / "work", held_out=0), 256, out)
    (root / "work" / "run" / "metrics.jsonl").write_text("{}")
    assert prepare(data(root / "work", held_out=0), 256, out) == before
    with refused("run's folder"):
        prepare(data(root / "work" / "run"), 256, out)


# -- token files ----------------------------------------------------------------------------------------------------


def test_token_file_is_used_as_it_is(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(50, dtype=">i4"))
    made = prepare(data(path, held_out=0), 50, out)
    assert (made.train, made.train_tokens) == (path, 50)
    assert (made.encode("7 x 9"), made.encode("def "), made.decode([3, 4])) == ([7, 9], [0], "3 4")
    with refused("token id 49", "model.vocab=49"):  # what was checked for one vocabulary is checked for another
        prepare(data(path, held_out=0), 49, out)


def test_token_file_is_cut(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenfile, "CHUNK", 7)
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(300, 400, dtype=np.int64))
    made = prepare(data(path, held_out=0.1), 400, out)
    assert tokens(made.train) + tokens(made.held_out) == list(range(300, 400))
    assert np.load(made.train).dtype == np.uint16
    assert made.held_out_tokens == 10


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros(30), "float64"),
        (np.zeros(30, dtype=bool), "bool"),
        (np.zeros((5, 6), dtype=np.uint8), "2 dimensions"),
        (np.array(3), "0 dimensions"),
        (np.zeros(0, dtype=np.uint8), "no tokens"),
        (np.array([1, -1] * 9), "token id -1"),
        (np.array([1, 300] * 9), "use model.vocab=301 or more"),
        (np.array([print] * 9), "pickled"),
    ],
)
@pytest.mark.parametrize("held_out", [0, 0.5])
def test_token_files_that_are_none(array: np.ndarray, word: str, held_out: float, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, array)
    with refused("data.path", word):
        prepare(data(path, held_out=held_out), 256, out)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "empty"), (b"abc" * 50, "not a whole"), (pickle.dumps([1]), "not a whole"), (b"PK\3\4" * 9, "not a whole")],
)
def test_token_files_that_are_something_else(content: bytes, word: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with refused("data.path", word):
        prepare(data(path), 256, out)


@pytest.mark.parametrize(("left", "word"), [(9, "not a whole"), (100, "not a whole"), (140, "holds 6 of 50 tokens")])
def test_truncated_token_file(left: int, word: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(50, dtype=np.uint16))
    os.truncate(path, left)
    with refused("data.path", word):
        prepare(data(path), 256, out)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_sources_that_are_none(tmp_path: Path, shelf: Path, out: Path) -> None:
    (tmp_path / "void").mkdir()
    for path, word in (
        (tmp_path / "missing", "no such file"),
        (tmp_path / "missing.npy", "no such file"),
        (shelf / "empty.txt", "empty"),
        (shelf / "image.bin", "not text"),
        (shelf / "pipe", "neither"),
        (tmp_path / "void", "no text file"),
    ):
        with refused("data.path", word):
            prepare(data(path), 256, out)


def test_an_unreadable_file(book: Path, shelf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = {"book.txt", "0.txt"}
    plain = Path.open

    def guarded(path: Path, *args: object, **kwargs: object) -> object:
        if path.name in closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", guarded)
    with refused("data.path", "permission denied"):
        prepare(data(book), 256, out)
    made = prepare(data(shelf, held_out=0), 256, out)
    assert bytes(tokens(made.train)).startswith(b"2222\0")


def test_too_few_tokens(book: Path, out: Path) -> None:
    with refused("180 tokens", "data.seq_len=179 or less"):
        prepare(data(book, held_out=0.1, seq_len=180), 256, out)
    assert prepare(data(book, held_out=0.1, seq_len=179), 256, out).train_tokens == 180
    with refused("data.held_out", "1 tokens"):
        prepare(data(book, held_out=0.005), 256, out)


def test_tokenizers_that_do_not_fit(book: Path, tokenizer: Path, tmp_path: Path, out: Path) -> None:
    with refused("data.tokenizer", "56 more"):
        prepare(data(book), 200, out)
    with refused("data.tokenizer", "5 tokens, 1 more"):
        prepare(data(book, tokenizer=str(tokenizer)), 4, out)
    with refused("data.tokenizer", "no such file"):
        prepare(data(book, tokenizer=str(tmp_path / "none.json")), 256, out)
    with refused("data.tokenizer", "directory"):
        prepare(data(book, tokenizer=str(tmp_path)), 256, out)
    with refused("data.tokenizer", "not a tokenizer"):
        prepare(data(book, tokenizer=str(book)), 256, out)


def test_text_that_is_not_utf8(shelf: Path, tokenizer: Path, out: Path) -> None:
    """Only bytes take it: a tokenizer would be trained on replacement characters, and nobody told."""
    latin = shelf / "3.txt"
    latin.write_bytes("a café".encode("latin-1"))
    for path in (latin, shelf):
        with refused("data.path", "3.txt is not UTF-8", "byte 5"):
            prepare(data(path, tokenizer=str(tokenizer), held_out=0), 300, out)
    assert list(out.iterdir()) == []
    assert tokens(prepare(data(latin, held_out=0), 256, out).train)[-1] == 0xE9


def test_a_folder_that_cannot_be_written(book: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("out", "cannot be written"):
        prepare(data(book), 256, tmp_path / "file" / "data")


def test_a_full_disk_leaves_no_file(book: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("out", "no space left"):
        prepare(data(book), 256, out)
    assert list(out.iterdir()) == []


# -- where documents begin ------------------------------------------------------------------------------------------


def packed(path: object, **fields: object) -> Data:
    return data(path, packing="documents", **fields)


def test_each_file_is_a_document_that_ends_with_its_separator(shelf: Path, out: Path) -> None:
    made = prepare(packed(shelf, held_out=0), 256, out)
    assert tokens(made.train_documents) == list(range(0, 50, 5))
    assert made.held_out_documents is None
    made = prepare(packed(shelf, held_out=0.2), 256, out)
    assert tokens(made.train_documents) == list(range(0, 40, 5)) and len(tokens(made.train)) == 39
    assert tokens(made.held_out_documents) == [0, 5]


def test_a_document_that_the_held_out_end_parts_is_two(shelf: Path, out: Path) -> None:
    made = prepare(packed(shelf, held_out=0.05), 256, out)  # the last 2 of 49 tokens
    assert tokens(made.train_documents) == list(range(0, 50, 5)) and tokens(made.held_out_documents) == [0]


def test_one_file_is_one_document(book: Path, out: Path) -> None:
    made = prepare(packed(book, held_out=0.1), 256, out)
    assert tokens(made.train_documents) == tokens(made.held_out_documents) == [0]


def test_without_packing_nothing_is_beside_the_tokens(shelf: Path, out: Path) -> None:
    """And the tokens are the same, so that a run may change its mind."""
    plain, made = (prepare(asked, 256, out) for asked in (data(shelf, held_out=0.2), packed(shelf, held_out=0.2)))
    assert plain.train_documents is None and plain.files == [plain.train, plain.held_out]
    assert (plain.key, plain.train) == (made.key, made.train) and len(made.files) == 4
    assert follow(packed(shelf, held_out=0.2), 256, out, made.key) == made
    assert digest(plain) != digest(made)


def test_damaged_beginnings_are_mended(shelf: Path, out: Path) -> None:
    made = prepare(packed(shelf, held_out=0.2), 256, out)
    assert made.train_documents is not None
    whole, said = made.train_documents.read_bytes(), list[str]()
    made.train_documents.write_bytes(whole[:-10] + b"!" + whole[-9:])
    assert prepare(packed(shelf, held_out=0.2), 256, out, say=said.append) == made
    assert len(said) == 1 and made.train_documents.read_bytes() == whole
    made.train_documents.unlink()
    assert follow(packed(shelf, held_out=0.2), 256, out, made.key) is None
    assert prepare(packed(shelf, held_out=0.2), 256, out) == made and made.train_documents.exists()


@pytest.mark.parametrize("held_out", [0, 0.1])
def test_a_token_file_brings_its_documents(tmp_path: Path, out: Path, held_out: float) -> None:
    path, beside = tmp_path / "ids.npy", tmp_path / "ids-documents.npy"
    np.save(path, np.arange(50, dtype=np.uint8))
    with refused("ids-documents.npy", "packing=none"):
        prepare(packed(path, held_out=held_out), 50, out)
    for wrong in ([1, 4], [0, 4, 4], [0, 50], [0, 9, 7]):
        np.save(beside, np.array(wrong))
        with refused("ids-documents.npy must hold", "50"):
            prepare(packed(path, held_out=held_out), 50, out)
    np.save(beside, np.array([0, 7, 46], dtype=np.uint16))
    made = prepare(packed(path, held_out=held_out), 50, out)
    if held_out:
        assert tokens(made.train_documents) == [0, 7] and tokens(made.held_out_documents) == [0, 1]
    else:
        assert (made.train_documents, made.held_out_documents) == (beside, None)
    assert follow(packed(path, held_out=held_out), 50, out, made.key) == made
    np.save(beside, np.array([0, 8, 46], dtype=np.uint16))
    assert prepare(packed(path, held_out=held_out), 50, out).key != made.key


# -- files kept -----------------------------------------------------------------------------------------------------


def test_files_are_reused_and_remade(book: Path, out: Path, tokenizer: Path) -> None:
    first = prepare(data(book), 256, out)
    made_at = first.train.stat().st_mtime_ns
    assert prepare(data(book), 256, out) == first
    assert first.train.stat().st_mtime_ns == made_at
    os.truncate(first.train, first.train.stat().st_size - 1)  # half a file, as no rename of ours leaves it
    assert prepare(data(book), 256, out) == first
    assert len(tokens(first.train)) == 190
    book.write_text("0123456789" * 30)
    names = {prepare(data(book), 256, out).train, first.train}
    names.add(prepare(data(book, held_out=0.5), 256, out).train)
    names.add(prepare(data(book), 257, out).train)
    book.write_text("a b c a b c")
    names.add(prepare(data(book, held_out=0), 256, out).train)
    names.add(prepare(data(book, held_out=0, tokenizer=str(tokenizer)), 256, out).train)
    assert len(names) == 6


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_damage_of_equal_length_is_told_and_mended(book: Path, tmp_path: Path, out: Path, source: str) -> None:
    np.save(tmp_path / "ids.npy", np.arange(200, dtype=np.uint8))
    asked = data(book if source == "text" else tmp_path / "ids.npy", held_out=0.1)
    first = prepare(asked, 256, out)
    for file in (first.train, first.held_out):
        assert file is not None
        whole = file.read_bytes()
        for place in (len(whole) - 1, len(whole) - 10):  # the sum itself, and the last tokens but a few
            said: list[str] = []
            damaged = bytearray(whole)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            assert prepare(asked, 256, out, check=False, say=said.append) == first and said == []
            assert prepare(asked, 256, out, say=said.append) == first
            assert said == [f"warning: {file} is damaged: its content is not what was written; it is made again"]
            assert file.read_bytes() == whole
    assert prepare(asked, 256, out, say=said.append) == first and len(said) == 1


def put_over(path: Path, content: bytes, how: str) -> None:
    """Other content of the same size under the same time, as copies that keep times make it."""
    about = path.stat()
    assert len(content) == about.st_size
    target = path.with_name("other") if how == "renamed" else path
    target.write_bytes(content)
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
    target.replace(path)
    assert path.stat().st_mtime_ns == about.st_mtime_ns


@pytest.mark.parametrize("how", ["renamed", "written over"])
def test_a_text_of_the_same_size_and_time_is_another(book: Path, shelf: Path, out: Path, how: str) -> None:
    for asked, file in ((data(book), book), (data(shelf), shelf / "2.txt")):
        first = prepare(asked, 256, out)
        put_over(file, b"z" * file.stat().st_size, how)
        second = prepare(asked, 256, out)
        assert second.key != first.key and tokens(second.train) != tokens(first.train)


@pytest.mark.parametrize("how", ["renamed", "written over"])
def test_a_token_file_of_the_same_size_and_time_is_looked_at_again(tmp_path: Path, out: Path, how: str) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(50, dtype=np.uint8))
    prepare(data(path, held_out=0), 50, out)
    put_over(path, path.read_bytes()[:-1] + b"\xff", how)
    with refused("token id 255"):
        prepare(data(path, held_out=0), 50, out)


def test_only_old_files_aside_are_cleared(book: Path, out: Path) -> None:
    out.mkdir(parents=True)
    old, new = out / ".writing-1", out / ".writing-2"
    for path, age in ((old, 9000), (new, 0)):
        path.touch()
        written = path.stat().st_mtime - age
        os.utime(path, (written, written))
    prepare(data(book), 256, out)
    assert (old.exists(), new.exists()) == (False, True)


def test_many_at_once(shelf: Path, out: Path) -> None:
    made: list[Prepared] = []
    threads = [
        threading.Thread(target=lambda: made.append(prepare(data(shelf, held_out=0.2), 256, out))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(made)) == 1
    assert sorted(path.name for path in out.iterdir()) == sorted([made[0].train.name, made[0].held_out.name])


def test_neither_text_nor_bigrams_need_torch() -> None:
    code = "import sys, meshwright.train.text, meshwright.train.bigram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_smallest() -> None:
    assert [tokenfile.smallest(n).name for n in (255, 256, 65535, 65536)] == ["uint8", "uint16", "uint16", "uint32"]
