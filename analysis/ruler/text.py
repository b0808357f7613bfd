"""What RULER's texts are made of: words, numbers, haystacks, and needles at drawn places."""

import re
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

from orchestrator.errors import InputError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # percent of an essay: round(linspace(0, 100, 40))
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstvwz" for vowel in "aeiou"]


def number(draw: Random) -> str:
    """Seven digits, the first not 0."""
    return str(draw.randint(1_000_000, 9_999_999))


def identifier(draw: Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def word(draw: Random) -> str:
    """A made-up word of two to four syllables: 41 million of them, and none to be found in a corpus."""
    return "".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))


def distinct(draw: Random, count: int, make: Callable[[Random], str]) -> list[str]:
    """`count` different draws."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)


@cache
def essay(path: Path | None) -> tuple[str, ...]:
    """The words of a text: of a file or of all .txt files of a folder, in order of their names; by default the language
    reference that ships with Python. Raises InputError where there are none."""
    if path is None:
        from pydoc_data.topics import topics

        text = " ".join(topics[name] for name in sorted(topics))
    else:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        try:
            text = " ".join(file.read_text(encoding="utf-8") for file in files)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"Ruler.essay: {path} cannot be read ({error}); give UTF-8 text") from None
    words = tuple(text.split())
    if not words:
        raise InputError(f"Ruler.essay: {path} holds no text; give a .txt file or a folder of them")
    return words


def essay_with(draw: Random, words: Sequence[str], size: int, needles: Sequence[str]) -> str:
    """`size` words of the essay, again from its start where it is shorter, with the needles in order behind the
    sentences that are nearest to depths drawn for them."""
    text = " ".join(words[i % len(words)] for i in range(size))
    sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]
    depths = sorted(draw.choice(DEPTHS) for _ in needles)
    return " ".join(_inserted(sentences, [round(depth / 100 * len(sentences)) for depth in depths], needles))


def among(draw: Random, others: Sequence[str], needles: Sequence[str]) -> list[str]:
    """The others with the needles at drawn places between them, both in their order."""
    return _inserted(others, sorted(draw.randint(0, len(others)) for _ in needles), needles)


def _inserted(others: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    mixed = list(others)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        mixed.insert(place, needle)
    return mixed
