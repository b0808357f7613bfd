"""Real text with planted facts: sentences stated in one place of a document and said again in another."""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from orchestrator.data.corpus import Corpus, Part, load
from orchestrator.data.draws import Space, generator, log_uniform
from orchestrator.data.stream import FactSet
from orchestrator.errors import InputError

_NEW = 0.25  # of the planted sentences, those that state a new fact; the rest say an earlier one again
_MOST_FACTS = 1024  # a document, of the 4900 words
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstv" for vowel in "aeiou"]


class TextCorpus(BaseModel):
    """Sequences of context + 1 tokens from text files; each document in one opens with the separator token.

    Half the sequences are one long document, a window of one file. The other half is packed with short documents:
    passages of context/8 to context/2 tokens, log-uniform, each from a file of its own.

    folders: files, or folders searched for `suffixes`, from where the study file lies; none for the source and
    documentation of the running Python.
    vocab_size: 257 for bytes and the separator; more for a byte-level BPE trained on the text, digits kept apart.
    planted: the most of a document's tokens in planted sentences, of which it has none or at least two; a quarter of
    them state a new fact, the others repeat one stated before in the same document, often a recent one.
    digits: of the number, each a token.
    cache: folder of the tokenised text; None for ~/.cache/gridlaw.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    context: int = Field(default=1024, ge=64)
    folders: tuple[Path, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")
    vocab_size: int = Field(default=257, ge=257, le=65536)
    planted: float = Field(default=0.25, ge=0, le=0.5)
    sentence: str = "The magic number for {word} is: {number}."
    digits: int = Field(default=4, ge=1, le=9)
    cache: Path | None = None

    @field_validator("folders", mode="before")
    @classmethod
    def _resolve(cls, folders: Any) -> Any:
        if isinstance(folders, str | Path):
            folders = (folders,)
        # Workers run in other folders: a relative path would mean another place there.
        return tuple(Path(folder).expanduser().resolve() for folder in folders)

    @field_validator("cache", mode="before")
    @classmethod
    def _resolve_cache(cls, cache: Any) -> Any:
        return Path(cache).expanduser().resolve() if isinstance(cache, str | Path) else cache

    @field_validator("sentence")
    @classmethod
    def _has_both_blanks(cls, sentence: str) -> str:
        try:
            blanks = [blank[1:] for blank in string.Formatter().parse(sentence) if blank[1] is not None]
        except ValueError:
            blanks = []
        if blanks != [("word", "", None), ("number", "", None)]:
            raise ValueError(
                f'{sentence!r} cannot be planted; write {{word}}, then {{number}}, such as "{{word}} = {{number}}"'
            )
        return sentence

    @property
    def chance(self) -> float:
        """Of guessing all digits of an answer."""
        return 10.0**-self.digits

    @property
    def fact_distances(self) -> tuple[int, int]:
        return 1, self.context - 2  # the nearest depends on how the sentence is cut into tokens

    def identity(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", exclude={"folders", "suffixes", "cache"})
        return {"text": self._corpus().digest, **fields}

    def check(self) -> None:
        """Reads and tokenises the text where the cache lacks it. Raises InputError: no text, too little, no cache."""
        corpus = self._corpus()
        sentence = len(self._sentence(corpus, "bada", 0))
        if self.context < 8 * sentence:
            raise InputError(
                f"context: {self.context} has no room for facts of {sentence} tokens; give at least {8 * sentence} "
                f"or a shorter sentence"
            )
        for name, part in (("training", corpus.training), ("held-out", corpus.held_out)):
            longest = int(np.diff(part.starts).max())
            if longest <= self.context:
                raise InputError(
                    f"context: {self.context} is longer than the longest {name} text of {longest} tokens; "
                    f"lower it or add longer files to folders"
                )

    def batch(self, seed: int, step: int, rows: range) -> np.ndarray:
        """Rows of the training batch of a step: int64 [len(rows), T+1]."""
        return self._sequences("training", seed, step, rows)

    def held_out(self, documents: int) -> np.ndarray:
        """Sequences like the training ones from files never trained on: int64 [documents, T+1]."""
        return self._sequences("held out", 0, 0, range(documents))

    def facts(self, documents: int) -> FactSet:
        """Long documents from files never trained on; planted facts, each stated once and asked once, fill two fifths.

        Distances run from one sentence to the context less two, every second one uniform, the others log-uniform.
        """
        corpus = self._corpus()
        rows, answers = [], []
        for row in range(documents):
            draw = generator("facts", 0, row=row)
            taken: set[str] = set()
            sentences = [self._sentence(corpus, *_fact(draw, self.digits, taken)) for _ in range(12)]
            room = np.cumsum([2 * len(sentence) for sentence in sentences]) <= 0.4 * self.context
            placed = _place(draw, [s for s, fits in zip(sentences, room, strict=True) if fits], self.context + 1)
            document = np.full(self.context + 1, -1, dtype=np.int64)
            for sentence, stated, asked in placed:
                document[stated : stated + len(sentence)] = document[asked : asked + len(sentence)] = sentence
                answer = len(sentence) - len(corpus.encode(self._end())) - self.digits
                answers.append((row, asked + answer, stated + answer))
            free = document < 0
            document[free] = self._passage(draw, corpus.separator, corpus.held_out, int(free.sum()))
            rows.append(document)
        document_, answer_, stated_ = np.array(sorted(answers), dtype=np.int64).reshape(-1, 3).T
        return FactSet(
            tokens=np.array(rows, dtype=np.int64).reshape(-1, self.context + 1),
            document=document_,
            answer=answer_,
            stated=stated_,
            distance=answer_ - stated_,
            length=np.full_like(answer_, self.digits),
        )

    def prompt(self, text: str) -> np.ndarray:
        """A text as a document begins: int64, the separator first."""
        corpus = self._corpus()
        return np.array([corpus.separator, *corpus.encode(text)], dtype=np.int64)

    def text(self, tokens: np.ndarray) -> str:
        """What tokens say."""
        return self._corpus().decode(tokens.tolist())

    def needle(
        self, row: int, length: int, depth: float, others: int, choices: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(held-out text with one planted sentence at a depth, 0 first and 1 last, and `others` elsewhere, then the
        sentence again up to its number: int64 [length], the number's digits: int64). choices: how many numbers it may
        be, which then differ in the last digit alone; any by default. The same for every arm; raises InputError where
        the sentences do not fit."""
        corpus, draw = self._corpus(), generator("needle", 0, row=row)
        taken: set[str] = set()
        (word, number), *facts = [_fact(draw, self.digits, taken) for _ in range(others + 1)]
        if choices is not None:
            number = int(draw.integers(choices))
        told, *rest = [self._sentence(corpus, *fact) for fact in ((word, number), *facts)]
        end = len(corpus.encode(self._end()))
        stem, answer = told[: -end - self.digits], told[-end - self.digits : -end]
        room = length - len(stem) - len(told) - sum(map(len, rest))
        if room < others + 2:
            raise InputError(f"others: {others} sentences do not fit {length} tokens; give fewer or a greater length")
        text = self._passage(draw, corpus.separator, corpus.held_out, room)
        places = [1 + round(depth * (room - 1)), *draw.integers(1, room, size=others, endpoint=True)]
        return np.concatenate([_with_sentences(text, places, [told, *rest]), stem]), answer

    def bytes_of(self, tokens: np.ndarray) -> int:
        """Bytes of text that the tokens stand for; a separator counts as one."""
        return int(self._corpus().token_bytes[tokens].sum())

    def _corpus(self) -> Corpus:
        return load(self.folders, self.suffixes, self.vocab_size, self.cache)

    def _sequences(self, space: Space, seed: int, step: int, rows: range) -> np.ndarray:
        corpus = self._corpus()
        part = corpus.training if space == "training" else corpus.held_out
        sequences = np.empty((len(rows), self.context + 1), dtype=np.int64)
        for sequence, row in zip(sequences, rows, strict=True):
            draw = generator(space, seed, step, row)
            start = 0
            for length in _lengths(draw, self.context):
                sequence[start : start + length] = self._document(draw, corpus, part, length)
                start += length
        return sequences

    def _document(self, draw: np.random.Generator, corpus: Corpus, part: Part, length: int) -> np.ndarray:
        """int64 [length]: a passage with planted sentences at uniformly drawn places."""
        budget = self.planted * length
        sentences: list[np.ndarray] = []
        for fact in _recurring_facts(draw, self.digits):
            sentence = self._sentence(corpus, *fact)
            budget -= len(sentence)
            if budget < 0:
                break
            sentences.append(sentence)
        if len(sentences) == 1:  # a statement that nothing asks for
            sentences = []
        text = self._passage(draw, corpus.separator, part, length - sum(map(len, sentences)))
        places = np.sort(draw.integers(1, len(text), size=len(sentences), endpoint=True))
        return _with_sentences(text, places.tolist(), sentences)

    def _passage(self, draw: np.random.Generator, separator: int, part: Part, length: int) -> np.ndarray:
        """int64 [length]: the separator, then consecutive tokens of one file."""
        return np.concatenate([[separator], part.window(draw.random(), length - 1)])

    def _sentence(self, corpus: Corpus, word: str, number: int) -> np.ndarray:
        """int64: a planted sentence on a line of its own. Blanks are encoded apart, so that digits stay tokens."""
        before = self.sentence[: self.sentence.index("{number}")].format(word=word)
        digits = (corpus.encode(digit)[0] for digit in f"{number:0{self.digits}d}")
        return np.array([*corpus.encode("\n" + before), *digits, *corpus.encode(self._end())], dtype=np.int64)

    def _end(self) -> str:
        return self.sentence[self.sentence.index("{number}") + len("{number}") :].format() + "\n"


def _with_sentences(text: np.ndarray, places: list[int], sentences: list[np.ndarray]) -> np.ndarray:
    """The text with each sentence before the token at its place."""
    order = np.argsort(places, kind="stable")
    pieces = np.split(text, [places[i] for i in order])
    return np.concatenate(
        [pieces[0], *(x for i, piece in zip(order, pieces[1:], strict=True) for x in (sentences[i], piece))]
    )


def _lengths(draw: np.random.Generator, context: int) -> list[int]:
    """Tokens of the documents of one sequence: one long one, or short ones that fill it."""
    left, lengths = context + 1, []
    if draw.random() < 0.5:
        return [left]
    while left:
        length = int(log_uniform(draw.random(), context / 8, context / 2))
        # A rest below the shortest document goes to the last one.
        length = left if left - length < context / 8 else length
        lengths.append(length)
        left -= length
    return lengths


def _fact(draw: np.random.Generator, digits: int, taken: set[str]) -> tuple[str, int]:
    """(word, number): a word of two syllables, added to `taken` and new to it; a uniform number."""
    while True:
        syllables = draw.integers(len(_SYLLABLES), size=2)
        word = _SYLLABLES[syllables[0]] + _SYLLABLES[syllables[1]]
        if word not in taken:
            taken.add(word)
            return word, int(draw.integers(10**digits))


def _recurring_facts(draw: np.random.Generator, digits: int) -> Iterator[tuple[str, int]]:
    """Facts of one document in the order they are told: new ones, and earlier ones with log-uniform recency."""
    taken: set[str] = set()
    told: list[tuple[str, int]] = []  # the latest last
    while True:
        if not told or (draw.random() < _NEW and len(told) < _MOST_FACTS):
            fact = _fact(draw, digits, taken)
        else:
            fact = told.pop(-int(log_uniform(draw.random(), 1, len(told) + 1)))
        told.append(fact)
        yield fact


def _place(draw: np.random.Generator, sentences: list[np.ndarray], length: int) -> list[tuple[np.ndarray, int, int]]:
    """(sentence, stated, asked): first tokens of its two places in a document of `length` tokens; none overlap."""
    free = np.ones(length, dtype=bool)
    free[0] = False  # the separator's place
    placed = []
    for index, sentence in enumerate(sentences):
        size = len(sentence)
        while True:
            u = draw.random()
            longest = length - 1 - size
            apart = int(log_uniform(u, size, longest + 1) if index % 2 else size + u * (longest + 1 - size))
            # fits[p]: the sentence can start at p.
            fits = np.convolve(free, np.ones(size, dtype=int), "valid") == size
            places = np.flatnonzero(fits[: len(fits) - apart] & fits[apart:])
            if places.size:
                break
        stated = int(draw.choice(places))
        for start in (stated, stated + apart):
            free[start : start + size] = False
        placed.append((sentence, stated, stated + apart))
    return placed
