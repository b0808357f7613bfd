"""Text files as tokens: read, split by content into training and held-out text, tokenised once, mapped from disk."""

import functools
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.errors import InputError

_RULES = 1  # raise when the same files would be split or tokenised differently
_HELD_OUT = 0.05  # of the bytes
_LEAST_BYTES = 100_000
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BYTES = 257  # vocabulary of bytes and the separator
_SEPARATOR = "<|document|>"
_REMEMBERED = 256  # characters of the longest text whose tokens are kept


@dataclass(frozen=True)
class Part:
    """Documents end to end. tokens: uint16 [all]; starts: int64 [documents + 1], the last the number of tokens."""

    tokens: np.ndarray
    starts: np.ndarray

    def window(self, uniform: float, length: int) -> np.ndarray:
        """`length` consecutive tokens of one document, every such stretch as likely; uniform in [0, 1)."""
        ends = np.cumsum(np.maximum(np.diff(self.starts) - length + 1, 0))
        chosen = int(uniform * ends[-1])
        document = int(np.searchsorted(ends, chosen, side="right"))
        start = int(self.starts[document + 1]) - length - (int(ends[document]) - 1 - chosen)
        return self.tokens[start : start + length]


@dataclass(frozen=True)
class Corpus:
    """digest: of the text itself. token_bytes: int64 [vocabulary], bytes of text of each token.

    encode: short text to token ids, remembered, because planted sentences repeat their words. decode: token ids to
    text, separators left out, bytes that are no UTF-8 replaced.
    """

    digest: str
    training: Part
    held_out: Part
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    separator: int
    token_bytes: np.ndarray


@functools.lru_cache(maxsize=8)
def load(folders: tuple[Path, ...], suffixes: tuple[str, ...], vocab_size: int, cache: Path | None) -> Corpus:
    """The text of files and folders as tokens: the standard library's where none is given.

    Files are cut at line ends where they exceed 1/64 of all bytes (never below 16 KiB), ordered by the SHA-256 of their
    content, and the first 5% of the bytes held out. Raises InputError where text or cache cannot be had.
    """
    files = _read(folders, suffixes)
    digest = hashlib.sha256(b"".join(sorted(hashlib.sha256(text).digest() for text in files))).hexdigest()[:16]
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gridlaw"
    folder = cache / f"text-{digest}-{vocab_size}-{_RULES}"
    if not folder.exists():
        try:
            _tokenise(files, vocab_size, folder)
        except OSError as error:
            raise InputError(f"cache: {cache} cannot be written ({error.strerror}); give another folder") from None
    part = {
        name: Part(np.load(folder / f"{name}.npy", mmap_mode="r"), np.load(folder / f"{name}_starts.npy"))
        for name in ("training", "held_out")
    }
    encode, decode, separator, token_bytes = _codec(folder / "tokenizer.json")

    @functools.lru_cache(maxsize=16384)
    def remembered(text: str) -> tuple[int, ...]:
        return tuple(encode(text))

    def encoded(text: str) -> tuple[int, ...]:
        return remembered(text) if len(text) <= _REMEMBERED else tuple(encode(text))

    return Corpus(digest, part["training"], part["held_out"], encoded, decode, separator, token_bytes)


def _read(folders: tuple[Path, ...], suffixes: tuple[str, ...]) -> list[bytes]:
    """Contents of the text files, each content once, in the order of their digests."""
    texts: dict[bytes, bytes] = {}
    for folder in folders or (Path(sysconfig.get_path("stdlib")),):
        if not folder.exists():
            raise InputError(f"folders: {folder} does not exist; give folders or files of text")
        for path in [folder] if folder.is_file() else _walk(folder, suffixes):
            try:
                text = path.read_bytes()
                text.decode()
            except UnicodeDecodeError:
                continue
            except OSError as error:
                raise InputError(f"folders: {path} cannot be read ({error.strerror}); mend its permissions") from None
            texts[hashlib.sha256(text).digest()] = text
    size = sum(map(len, texts.values()))
    if size < _LEAST_BYTES:
        where = ", ".join(map(str, folders)) or "the standard library"
        raise InputError(
            f"folders: {where} hold {size} bytes of UTF-8 text in {', '.join(suffixes)} files; "
            f"{_LEAST_BYTES} are the least to train on, so name other folders or suffixes"
        )
    return [texts[key] for key in sorted(texts)]


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterable[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        yield from (Path(parent, name) for name in files if name.endswith(suffixes))


def _tokenise(files: list[bytes], vocab_size: int, folder: Path) -> None:
    """Writes the folder in one step: another worker that does the same meanwhile neither sees half of it nor fails."""
    training, held_out = _split(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    try:
        if vocab_size == _BYTES:
            (draft / "tokenizer.json").write_text("null")
        else:
            _train_bpe(training, vocab_size).save(str(draft / "tokenizer.json"))
        encode, *_ = _codec(draft / "tokenizer.json")
        for name, texts in (("training", training), ("held_out", held_out)):
            tokens = [np.array(encode(text.decode()), dtype=np.uint16) for text in texts]
            np.save(draft / f"{name}.npy", np.concatenate(tokens))
            np.save(draft / f"{name}_starts.npy", np.cumsum([0, *map(len, tokens)]))
        os.rename(draft, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _split(files: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """(training, held-out) documents; no document is in both."""
    total = sum(map(len, files))
    longest = max(16 * 1024, total // 64)
    documents = {hashlib.sha256(part).digest(): part for text in files for part in _cut(text, longest)}
    ordered = [documents[key] for key in sorted(documents)]
    before = np.cumsum([0, *map(len, ordered)])[:-1]
    held_out = int(np.searchsorted(before, _HELD_OUT * total))
    return ordered[held_out:], ordered[:held_out]


def _cut(text: bytes, longest: int) -> Iterable[bytes]:
    """Pieces of at most `longest` bytes that end with a line, or with a character where a line is longer."""
    while len(text) > longest:
        end = text.rfind(b"\n", 0, longest) + 1 or longest
        while end < len(text) and text[end] & 0xC0 == 0x80:  # never inside a UTF-8 character
            end -= 1
        yield text[:end]
        text = text[end:]
    if text:
        yield text


def _train_bpe(texts: list[bytes], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer


def _codec(path: Path) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str], int, np.ndarray]:
    """(encode, decode, separator, bytes of each token) of a tokenizer file; "null" stands for bytes."""
    if json.loads(path.read_bytes()) is None:

        def text_of(tokens: Sequence[int]) -> str:
            return bytes(token for token in tokens if token < _BYTES - 1).decode(errors="replace")

        return lambda text: list(text.encode()), text_of, _BYTES - 1, np.ones(_BYTES, dtype=np.int64)
    tokenizer = Tokenizer.from_file(str(path))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    # A byte-level token writes each of its bytes as one character.
    lengths = np.ones(len(vocabulary), dtype=np.int64)
    for token, index in vocabulary.items():
        lengths[index] = 1 if token == _SEPARATOR else len(token)
    return (
        lambda text: tokenizer.encode(text).ids,
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        vocabulary[_SEPARATOR],
        lengths,
    )
