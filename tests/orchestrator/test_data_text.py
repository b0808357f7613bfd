"""Text with planted facts: what a sequence holds, what the identity follows, what is refused."""

import re
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from orchestrator.data.corpus import Part, load
from orchestrator.data.text import TextCorpus
from orchestrator.errors import InputError, one_line

SENTENCE = re.compile(r"The magic number for (\w+) is: (\d{4})\.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files of made-up prose, 10 kB each."""
    folder = tmp_path_factory.mktemp("prose")
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list(string.ascii_lowercase), size=n)) for n in draw.integers(2, 9, size=400)]
    for index in range(40):
        text = " ".join(draw.choice(words, size=1800))
        (folder / f"{index}.txt").write_text(re.sub(r"(.{60,70}) ", r"\1\n", text))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(folder: Path, cache: Path) -> TextCorpus:
    return TextCorpus(context=512, folders=(folder,), cache=cache)


def text(tokens: np.ndarray) -> str:
    return "".join("\0" if token == 256 else chr(token) for token in tokens)


def test_a_row_depends_on_seed_step_and_row_alone(corpus: TextCorpus) -> None:
    whole = corpus.batch(3, 17, range(8))
    assert whole.dtype == np.int64
    assert whole.shape == (8, 513)
    np.testing.assert_array_equal(
        np.concatenate([corpus.batch(3, 17, range(5)), corpus.batch(3, 17, range(5, 8))]), whole
    )
    for other in (corpus.batch(4, 17, range(8)), corpus.batch(3, 18, range(8)), corpus.batch(3, 17, range(8, 16))):
        assert (other != whole).any(1).all()
    np.testing.assert_array_equal(corpus.held_out(4), corpus.held_out(6)[:4])


def test_half_the_sequences_are_one_long_document(corpus: TextCorpus) -> None:
    rows = corpus.batch(0, 0, range(400))
    assert (rows[:, 0] == 256).all()
    documents = (rows == 256).sum(1)
    assert np.mean(documents == 1) == pytest.approx(0.5, abs=0.08)
    starts = [np.flatnonzero(row == 256) for row in rows[documents > 1]]
    lengths = np.concatenate([np.diff([*s, 513]) for s in starts])
    assert lengths.min() >= 512 // 8
    assert lengths.max() <= 512 // 2 + 512 // 8


def test_planted_facts_recur_with_the_same_number(corpus: TextCorpus) -> None:
    rows = corpus.batch(0, 1, range(200))
    planted = repeats = 0
    for row in rows:
        for document in text(row).split("\0"):
            number: dict[str, str] = {}
            for word, digits in SENTENCE.findall(document):
                planted += 1
                repeats += word in number
                assert number.setdefault(word, digits) == digits
    share = planted * len("\nThe magic number for bada is: 0000.\n") / rows.size
    assert 0.08 < share <= 0.25  # whole sentences, and two at least: below `planted`, most in short documents
    assert repeats / planted > 0.4


def test_nothing_is_planted_on_request(corpus: TextCorpus) -> None:
    plain = corpus.model_copy(update={"planted": 0.0})
    assert not SENTENCE.findall(text(plain.batch(0, 0, range(50)).ravel()))


@pytest.mark.parametrize("vocab_size", [257, 512])
def test_facts_stand_where_they_are_said_to(corpus: TextCorpus, vocab_size: int) -> None:
    data = corpus.model_copy(update={"vocab_size": vocab_size})
    facts = data.facts(24)
    assert facts.tokens.shape == (24, 513)
    assert facts.tokens.min() >= 0
    np.testing.assert_array_equal(facts.distance, facts.answer - facts.stated)
    assert (facts.length == 4).all()
    for document, answer, stated in zip(facts.document, facts.answer, facts.stated, strict=True):
        for place in (answer, stated):
            token = facts.tokens[document, place - 16 : place + 4]
            np.testing.assert_array_equal(token, facts.tokens[document, stated - 16 : stated + 4])
    if vocab_size == 257:
        answer = [
            text(row[place : place + 4]) for row, place in zip(facts.tokens[facts.document], facts.answer, strict=True)
        ]
        assert all(digits.isdigit() for digits in answer)
        found = SENTENCE.findall(text(facts.tokens.ravel()))
        assert len(found) == 2 * len(facts.answer)
        assert sorted(answer * 2) == sorted(digits for _, digits in found)
    counts = np.histogram(facts.distance, [0, 128.5, 256.5, 512])[0]
    assert (counts >= 5).all()


def test_held_out_text_is_not_trained_on(corpus: TextCorpus, folder: Path, cache: Path) -> None:
    parts = load((folder,), corpus.suffixes, 257, cache)
    share = len(parts.held_out.tokens) / (len(parts.held_out.tokens) + len(parts.training.tokens))
    assert 0.04 < share < 0.12
    training = text(parts.training.tokens)
    for start, end in zip(parts.held_out.starts, parts.held_out.starts[1:], strict=False):
        assert text(parts.held_out.tokens[start:end])[:200] not in training
    assert text(corpus.model_copy(update={"planted": 0.0}).facts(2).tokens[0])[1:40] not in training


def test_windows_stay_inside_a_document() -> None:
    part = Part(np.arange(16, dtype=np.uint16), np.array([0, 3, 4, 9, 16]))
    found = {tuple(part.window(u, 4).tolist()) for u in np.linspace(0, 1, 200, endpoint=False)}
    assert found == {(s, s + 1, s + 2, s + 3) for s in (4, 5, 9, 10, 11, 12)}


def test_bpe_writes_the_same_text_in_fewer_tokens(
    corpus: TextCorpus, folder: Path, cache: Path, tmp_path: Path
) -> None:
    bpe = corpus.model_copy(update={"vocab_size": 512})
    parts, plain = (load((folder,), corpus.suffixes, size, cache) for size in (512, 257))
    assert len(parts.training.tokens) < 0.8 * len(plain.training.tokens)
    assert bpe.bytes_of(parts.held_out.tokens) == len(plain.held_out.tokens)
    assert bpe.batch(0, 0, range(4)).max() < 512
    again = load((folder,), corpus.suffixes, 512, tmp_path)
    np.testing.assert_array_equal(again.training.tokens, parts.training.tokens)


def test_identity_follows_content_not_place(corpus: TextCorpus, folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in folder.iterdir():
        (moved / f"renamed-{path.name}").write_bytes(path.read_bytes())
    same = TextCorpus(context=512, folders=(moved,), cache=tmp_path)
    assert same.identity() == corpus.identity()
    np.testing.assert_array_equal(same.batch(0, 0, range(2)), corpus.batch(0, 0, range(2)))
    (moved / "renamed-0.txt").write_text("another text\n")
    load.cache_clear()
    assert same.identity() != corpus.identity()
    assert str(tmp_path) not in str(same.identity())


def test_workers_that_start_at_once_share_the_cache(folder: Path, tmp_path: Path) -> None:
    script = "import sys; from orchestrator.data.text import TextCorpus as C; "
    script += "print(C(context=512, folders=(sys.argv[1],), cache=sys.argv[2]).batch(0, 0, range(2)).sum())"
    command = [sys.executable, "-c", script, str(folder), str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    sums = {worker.communicate(timeout=60)[0] for worker in workers}
    assert all(worker.returncode == 0 for worker in workers)
    assert len(sums) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_the_standard_library_is_there_by_default(cache: Path) -> None:
    data = TextCorpus(context=1024, cache=cache)
    data.check()
    assert data.batch(0, 0, range(2)).shape == (2, 1025)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"folders": "nowhere"}, ["folders", "nowhere", "does not exist"]),
        ({"suffixes": (".docx",)}, ["folders", "0 bytes", ".docx"]),
        ({"context": 256}, ["context: 256", "give at least 296"]),
        ({"context": 16384}, ["context: 16384", "longest", "lower it"]),
    ],
)
def test_check_refuses_in_one_line(
    corpus: TextCorpus, folder: Path, fields: dict[str, object], words: list[str]
) -> None:
    data = TextCorpus(**{"folders": folder, "cache": corpus.cache, **fields})  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        data.check()
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sentence": "{number} is {word}"}, ["sentence", "{number} is {word}", "write {word}, then {number}"]),
        ({"vocab_size": 100}, ["vocab_size", "100", "257"]),
        ({"folder": "x"}, ["folder", "did you mean folders"]),
    ],
)
def test_fields_are_refused_in_one_line(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        TextCorpus(**fields)  # type: ignore[arg-type]
    assert all(word in one_line(refused.value) for word in words), one_line(refused.value)
