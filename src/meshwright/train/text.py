"""From text to token files: found, tokenised once, split into training and held-out tokens, and kept beside the run."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.errors import UserError
from meshwright.spec.run import Data
from meshwright.train import tokenfile
from meshwright.train.tokenizer import Tokenizer, load_tokenizer

_HEAD = 8192  # a file with a NUL byte in its first 8 KB is binary
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class Prepared:
    """Token files, 1-D .npy of integers below the vocabulary, and the words they stand for.

    `key`, 64 bits, tells what they were made from: equal keys on one machine are equal files. With packing, of each
    also the file that says where its documents begin.
    """

    key: int
    train: Path
    held_out: Path | None
    tokenizer: str
    train_tokens: int
    held_out_tokens: int
    train_documents: Path | None = None
    held_out_documents: Path | None = None

    @property
    def files(self) -> list[Path]:
        """All of them."""
        found = (self.train, self.held_out, self.train_documents, self.held_out_documents)
        return [path for path in found if path is not None]

    def encode(self, text: str) -> list[int]:
        return load_tokenizer(self.tokenizer).encode(text).tolist()

    def decode(self, ids: list[int]) -> str:
        return load_tokenizer(self.tokenizer).decode(ids)


@dataclass(frozen=True)
class _File:
    """A file of the source: its name below the source's root, and what changes when its content does.

    A time of change and a number in the file system cannot be set as a time of modification can: copying a text over
    another of its size, times and all, changes them.
    """

    name: str
    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, path: Path, about: os.stat_result) -> Self:
        return cls(name, path, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)


def prepare(
    data: Data, vocab: int, folder: Path, *, check: bool = True, say: Callable[[str], None] = lambda text: None
) -> Prepared:
    """Tokenise `data` into files in `folder`, the subfolder of a run's `out` kept for this; reuse whole ones there.

    Held out are, of several files, every k-th in sorted order, k = round(1 / held_out); of one file, of a token file
    and of fewer than k files, the end. Files are named by what they were made from and put in place by a rename, so
    any number of processes may prepare the same data at once. Documents are separated by byte 0 or the tokenizer's
    end-of-text token. Memory: one file's tokens; where the end is held out, all tokens.

    With packing each file is a document, and the separator behind it its last token; of a token file the file beside it
    says where they begin (`tokenfile.starts_beside`).

    What is reused is read through, and made again where its content is damaged, which `say` is told; without `check`
    only its length is looked at.

    Raises UserError for data, tokenizer or vocabulary that do not fit, and where `folder` cannot be written.
    """
    if _is_tokens(data):
        return _from_tokens(data, vocab, folder, check, say)
    tokenizer = load_tokenizer(data.tokenizer)
    tokenizer.check(vocab)
    files = _find(data.path, folder)
    key = _key(data, vocab, tokenizer, files)
    train, held_out = _names(data, folder, key)
    if not _reusable(data, train, held_out, check, say):
        _tokenise(data, files, tokenizer, train, held_out)
    return _prepared(data, data.tokenizer, key, train, held_out)


def follow(data: Data, vocab: int, folder: Path, key: int) -> Prepared | None:
    """What another process prepared with `key`, whatever the source is by now; None where it is not in `folder`."""
    name = _tokenizer_name(data, vocab)
    train, held_out = _names(data, folder, key)
    if _is_tokens(data) and held_out is None:
        train = Path(data.path)
        there = all(path.exists() for path in _with_starts(data, train))
        found = there and _key(data, vocab, load_tokenizer(name), _tokens_of(data)) == key
        return _prepared(data, name, key, train, None) if found else None
    return _prepared(data, name, key, train, held_out) if _whole(data, train, held_out) else None


def digest(prepared: Prepared) -> int:
    """64 bits of what the token files hold, the same on every machine. Reads them through."""
    parts = [tokenfile.digest(path) for path in prepared.files]
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little", signed=True)


def _is_tokens(data: Data) -> bool:
    return data.path != "stdlib" and data.path.endswith(".npy")


def _tokenizer_name(data: Data, vocab: int) -> str:
    # Bytes are the default, and say nothing about ids in a file unless the vocabulary is that of bytes.
    return "ids" if _is_tokens(data) and data.tokenizer == "bytes" and vocab != 256 else data.tokenizer


# -- text -----------------------------------------------------------------------------------------------------------


def _find(path: str, folder: Path) -> list[_File]:
    """The source's text files in the order of their names. Raises UserError where there are none."""
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [file for file in _walk(root, _NOT_STDLIB, None) if file.name.endswith(".py")]
        if not found:
            raise UserError(f"data.path: stdlib: {root} holds no source text; name a text file or a folder")
        return found
    source = Path(path)
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise UserError(
            f"data.path: {path}: {_words(error)}; name stdlib, a text file, a folder of text files or a .npy token file"
        ) from None
    if stat.S_ISDIR(mode):
        return _find_below(source, folder)
    if not stat.S_ISREG(mode):
        raise UserError(f"data.path: {path} is neither a file nor a folder; copy its text to a file first")
    return [_single(source)]


def _find_below(source: Path, folder: Path) -> list[_File]:
    out = folder.resolve().parent
    if source.resolve() == out:
        raise UserError(
            f"data.path: {source} is also the run's folder, whose files change while it runs; "
            "give the text a folder of its own, or set out to another"
        )
    found = _walk(source, {"__pycache__"}, out)
    if not found:
        raise UserError(
            f"data.path: {source} holds no text file that can be read and is not empty (binary files are passed over); "
            "name a folder with text"
        )
    return found


def _walk(root: Path, left_out: set[str], out: Path | None) -> list[_File]:
    """Regular, readable, non-empty text files below `root`, sorted by name, without folders named in `left_out`.

    Nor `out`, the run's own folder: its files change between one rank's look and the next one's.
    """
    found = []
    for here, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and (Path(here) / name).resolve() != out]
        for name in names:
            path = Path(here) / name
            try:
                about = path.stat()
                # Only regular files are opened: a pipe would block.
                if not stat.S_ISREG(about.st_mode) or not about.st_size or _binary(path):
                    continue
            except OSError:
                continue
            found.append(_File.of(path.relative_to(root).as_posix(), path, about))
    return sorted(found, key=lambda file: file.name)


def _single(path: Path) -> _File:
    try:
        about, binary = path.stat(), _binary(path)
    except OSError as error:
        raise UserError(f"data.path: {path}: {_words(error)}; name a text file that can be read") from None
    if not about.st_size:
        raise UserError(f"data.path: {path} is empty; name a file with text")
    if binary:
        raise UserError(f"data.path: {path} is not text, it has NUL bytes; name a text file, or token ids as .npy")
    return _File.of(path.name, path, about)


def _binary(path: Path) -> bool:
    with path.open("rb") as stream:
        return b"\0" in stream.read(_HEAD)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _tokenise(data: Data, files: Sequence[_File], tokenizer: Tokenizer, train: Path, held: Path | None) -> None:
    """Write `files` as tokens to `train`, and the held-out part of them to `held`."""
    dtype = tokenfile.smallest(tokenizer.size - 1)
    if held is None:
        _write(data, train, _documents(files, tokenizer), dtype)
        return
    # Beyond one half it is the training files that are every k-th.
    rest = data.held_out > 0.5
    k = round(1 / (1 - data.held_out if rest else data.held_out))
    if len(files) < max(k, 2):
        documents = [part.astype(dtype) for part in _documents(files, tokenizer)]
        starts = _starts([len(part) for part in documents])
        _cut(data, np.concatenate(documents), starts, train, held, dtype)
        return
    chosen = [(index % k == k - 1) != rest for index in range(len(files))]
    for path, wanted in ((held, True), (train, False)):
        part = [file for file, out in zip(files, chosen, strict=True) if out == wanted]
        _write(data, path, _documents(part, tokenizer), dtype)


def _write(data: Data, path: Path, documents: Iterable[NDArray[np.integer]], dtype: np.dtype) -> None:
    """Write `documents`, each a document's tokens, to `path`, and with packing beside it where they begin."""
    lengths = []

    def parts() -> Iterator[NDArray[np.integer]]:
        for part in documents:
            lengths.append(len(part))
            yield part

    tokenfile.write(path, parts(), dtype)
    for beside in _starts_files(data, path):
        tokenfile.write(beside, [_starts(lengths)], np.dtype(np.int64))


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Where documents of these lengths begin, one after the other; those without a token are none."""
    full = np.array([length for length in lengths if length], dtype=np.int64)
    return np.cumsum(full) - full


def _documents(files: Sequence[_File], tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """The tokens of each file, and behind all but the last the separator."""
    for index, file in enumerate(files):
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise UserError(f"data.path: {file.path}: {_words(error)}; remove it or make it readable") from None
        try:
            tokens = tokenizer.encode_bytes(content)
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.path: {file.path} is not UTF-8 text, byte {error.start} cannot be read; "
                "convert it, leave it out, or use data.tokenizer=bytes"
            ) from None
        if tokenizer.separator is not None and index < len(files) - 1:
            tokens = np.append(tokens, np.array([tokenizer.separator], dtype=tokens.dtype))
        yield tokens


# -- token files ----------------------------------------------------------------------------------------------------


def _from_tokens(data: Data, vocab: int, folder: Path, check: bool, say: Callable[[str], None]) -> Prepared:
    """Tokens that someone else made: used as they are with nothing held out, else cut in two."""
    name = _tokenizer_name(data, vocab)
    tokenizer = load_tokenizer(name)
    source = Path(data.path)
    tokens = tokenfile.open_tokens(source)
    starts = None
    for beside in _starts_files(data, source):
        starts = tokenfile.open_starts(beside, len(tokens))
    key = _key(data, vocab, tokenizer, _tokens_of(data))
    train, held_out = _names(data, folder, key)
    if held_out is None:
        # The ids of a long file are read through once, not by each rank: an empty file says that they fit.
        checked = train.with_name(train.name.replace("-train", "-checked"))
        if not checked.exists():
            _check_ids(data.path, tokens, vocab)
            tokenfile.write(checked, [], np.dtype(np.uint8))
        return _prepared(data, name, key, source, None)
    if not _reusable(data, train, held_out, check, say):
        _check_ids(data.path, tokens, vocab)
        _cut(data, tokens, starts, train, held_out, tokenfile.smallest(vocab - 1))
    return _prepared(data, name, key, train, held_out)


def _tokens_of(data: Data) -> list[_File]:
    """The token file that a user named, and with packing the one beside it."""
    return [_File.of(path.name, path, path.stat()) for path in _with_starts(data, Path(data.path))]


def _check_ids(path: str, tokens: NDArray[np.integer], vocab: int) -> None:
    low, high = tokenfile.extremes(tokens)
    if low < 0:
        raise UserError(f"data.path: {path} has the token id {low}; ids are 0 and above")
    if high >= vocab:
        raise UserError(
            f"data.path: {path} has the token id {high}, outside model.vocab={vocab}; "
            f"use model.vocab={high + 1} or more"
        )


def _cut(
    data: Data,
    tokens: NDArray[np.integer],
    starts: NDArray[np.integer] | None,
    train: Path,
    held: Path,
    dtype: np.dtype,
) -> None:
    """Write the last `held_out` part of `tokens` to `held` and what is before it to `train`; with packing where
    documents begin in each, of which the cut may part one."""
    cut = len(tokens) - round(len(tokens) * data.held_out)
    tokenfile.write(held, tokenfile.chunks(tokens[cut:]), dtype)
    tokenfile.write(train, tokenfile.chunks(tokens[:cut]), dtype)
    for path, low, high in ((held, cut, len(tokens)), (train, 0, cut)):
        for beside in _starts_files(data, path):
            assert starts is not None
            inside = np.asarray(starts[(starts > low) & (starts < high)], dtype=np.int64) - low
            first = [np.zeros(min(high - low, 1), dtype=np.int64)]
            tokenfile.write(beside, [*first, inside], np.dtype(np.int64))


# -- files kept -----------------------------------------------------------------------------------------------------


def _key(data: Data, vocab: int, tokenizer: Tokenizer, files: Sequence[_File]) -> int:
    """64 bits that change with anything the token files are made from."""
    source = data.path if data.path == "stdlib" else str(Path(data.path).resolve())
    listed = [[file.name, file.size, file.mtime_ns, file.ctime_ns, file.inode] for file in files]
    made_from = json.dumps([source, vocab, data.held_out, tokenizer.fingerprint, listed])
    found = hashlib.sha256(made_from.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(found[:8], "big", signed=True)


def _names(data: Data, folder: Path, key: int) -> tuple[Path, Path | None]:
    """The names of the token files of `key`."""
    name = key.to_bytes(8, "big", signed=True).hex()
    return folder / f"{name}-train.npy", folder / f"{name}-held-out.npy" if data.held_out else None


def _starts_files(data: Data, tokens: Path) -> list[Path]:
    """With packing the file beside `tokens` that says where documents begin."""
    return [tokenfile.starts_beside(tokens)] if data.packing == "documents" else []


def _with_starts(data: Data, *tokens: Path | None) -> list[Path]:
    """The token files that there are, and those beside them."""
    there = [path for path in tokens if path is not None]
    return there + [beside for path in there for beside in _starts_files(data, path)]


def _whole(data: Data, train: Path, held_out: Path | None) -> bool:
    return all(tokenfile.is_whole(path) for path in _with_starts(data, train, held_out))


def _reusable(data: Data, train: Path, held_out: Path | None, check: bool, say: Callable[[str], None]) -> bool:
    if not _whole(data, train, held_out):
        return False
    damaged = [path for path in _with_starts(data, train, held_out) if check and not tokenfile.is_sound(path)]
    for path in damaged:
        say(f"warning: {path} is damaged: its content is not what was written; it is made again")
    return not damaged


def _prepared(data: Data, tokenizer: str, key: int, train: Path, held_out: Path | None) -> Prepared:
    """Raise UserError where there are too few tokens to train on or to validate with."""
    train_tokens = tokenfile.length(train)
    held_out_tokens = tokenfile.length(held_out) if held_out else 0
    if train_tokens < data.seq_len + 1:
        shorter = f"use data.seq_len={train_tokens - 1} or less, or " if train_tokens > 1 else "use "
        raise UserError(
            f"data.path: {data.path} has {train_tokens} tokens to train on, a sequence takes "
            f"data.seq_len+1={data.seq_len + 1}; {shorter}a longer text"
        )
    if held_out is not None and held_out_tokens < 2:
        raise UserError(
            f"data.held_out: {data.held_out} of {data.path} is {held_out_tokens} tokens, validation takes 2 or more; "
            "use a larger part or a longer text, or data.held_out=0"
        )
    beside = [next(iter(_starts_files(data, path)), None) if path else None for path in (train, held_out)]
    return Prepared(key, train, held_out, tokenizer, train_tokens, held_out_tokens, *beside)
