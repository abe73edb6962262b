"""Between text and token ids: bytes, a tokenizer.json, or ids that stand for themselves."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.errors import UserError

# The names that published tokenizers give the token between two documents.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")


class Tokenizer(ABC):
    """`size`: ids are below it. `separator`: the id between two documents. `fingerprint`: changes with the ids."""

    size: int
    separator: int | None
    fingerprint: str

    @abstractmethod
    def check(self, vocab: int) -> None:
        """Raise UserError where a model of `vocab` ids cannot take all of these."""

    @abstractmethod
    def encode_bytes(self, content: bytes) -> NDArray[np.integer]:
        """The ids of a document's bytes, integers [T]. Raises UnicodeDecodeError where it needs UTF-8 and has none."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; ids that stand for none are left out."""

    def encode(self, text: str) -> NDArray[np.integer]:
        """The ids of `text`, integers [T]."""
        return self.encode_bytes(text.encode("utf-8", errors="replace"))


class Bytes(Tokenizer):
    """Each byte is a token. Text has no byte 0, so that one separates documents."""

    size = 256
    separator = 0
    fingerprint = "bytes"

    def check(self, vocab: int) -> None:
        if vocab < self.size:
            raise UserError(
                f"data.tokenizer: bytes has 256 tokens, {256 - vocab} more than model.vocab={vocab}; "
                "use model.vocab=256 or more"
            )

    def encode_bytes(self, content: bytes) -> NDArray[np.integer]:
        return np.frombuffer(content, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class Ids(Tokenizer):
    """For token files whose tokenizer is not known: the text of a token is its number."""

    size = 2**32
    separator = None
    fingerprint = "ids"

    def check(self, vocab: int) -> None:
        pass

    def encode_bytes(self, content: bytes) -> NDArray[np.integer]:
        """The numbers among the words of `content`; a text without any still gives one token, 0, to begin with."""
        return np.array([int(word) for word in content.split() if word.isdigit()] or [0])

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class File(Tokenizer):
    """A tokenizer.json, as the `tokenizers` library writes it. Adds no special tokens, never truncates or pads."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.tokenizer: {path}: {(error.strerror or str(error)).lower()}; "
                "use bytes, or the path of a tokenizer.json"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"data.tokenizer: {path} is not a tokenizer that can be read ({error}); "
                "use a tokenizer.json as the tokenizers library saves it"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._path = path
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.fingerprint = hashlib.sha256(content).hexdigest()
        ends = (self._tokenizer.token_to_id(name) for name in END_OF_TEXT)
        self.separator = next((end for end in ends if end is not None), None)
        if not self.size:
            raise UserError(f"data.tokenizer: {path} has no tokens; use one that was trained")

    def check(self, vocab: int) -> None:
        if vocab < self.size:
            raise UserError(
                f"data.tokenizer: {self._path} has {self.size} tokens, {self.size - vocab} more than "
                f"model.vocab={vocab}; use model.vocab={self.size} or more"
            )

    def encode_bytes(self, content: bytes) -> NDArray[np.integer]:
        text = content.decode("utf-8")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode([token for token in ids if token < self.size]))


@functools.lru_cache(maxsize=4)
def _from_file(path: str, size: int, mtime_ns: int) -> File:
    return File(Path(path))


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `ids`, or the tokenizer.json at the path `name`. Raises UserError where that cannot be read."""
    if name == "bytes":
        return Bytes()
    if name == "ids":
        return Ids()
    try:
        about = Path(name).stat()
    except OSError:
        return File(Path(name))  # which says what is wrong
    return _from_file(name, about.st_size, about.st_mtime_ns)
