"""RULER: what its texts hold, that they fit, how answers are scored, and what a reader of the text scores."""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from analysis.measures import ruler
from analysis.measures.ruler import Ruler, examples
from analysis.ruler.tasks import TASKS, Sources, fitting, needle, score, zeta_counts
from analysis.ruler.text import DEPTHS, NOISE, among, identifier, number
from model.config import ModelConfig
from model.lm import build
from model.mixers.table import parse_pattern
from orchestrator.data.recall import RecallLanguage
from orchestrator.data.text import TextCorpus
from orchestrator.errors import InputError

QA = ("qa_1", "qa_2")
IN_TEXT = [name for name in TASKS if name not in QA]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# haystack words, keys and values, how many of each are asked for
SHAPES = {
    "niah_single_1": (r"[a-z]+", r"\d{7}", 1),
    "niah_single_2": (r"[a-z]+", r"\d{7}", 1),
    "niah_single_3": (r"[a-z]+", UUID, 1),
    "niah_multikey_1": (r"[a-z]+", r"\d{7}", 1),
    "niah_multikey_2": (r"[a-z]+", r"\d{7}", 1),
    "niah_multikey_3": (UUID, UUID, 1),
    "niah_multivalue": (r"[a-z]+", r"\d{7}", 4),
    "niah_multiquery": (r"[a-z]+", r"\d{7}", 4),
}


def words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture
def questions(tmp_path: Path) -> Sources:
    """Files of the published forms, with words of their own."""
    paragraphs = [
        {
            "context": f"The capital of land {i} is town {i}, where people live.",
            "qas": [
                {"question": f"Capital of land {i}?", "answers": [{"text": f"town {i}"}, {"text": f"Town {i}"}]},
                {"question": "Unknown?", "answers": [], "is_impossible": True},
            ],
        }
        for i in range(40)
    ]
    squad, hotpot = tmp_path / "squad.json", tmp_path / "hotpot.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    pairs = [
        {
            "question": f"Where was {i} born?",
            "answer": f"place {i}",
            "context": [[f"Person {i}", [f"{i} came from ", f"place {i}."]], [f"Other {i}", ["Nothing."]]],
        }
        for i in range(40)
    ]
    hotpot.write_text(json.dumps(pairs))
    return Sources(600, squad=squad, hotpot=hotpot)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [600, 2100])
def test_examples_fill_their_length_and_no_more(task, length, questions):
    sources = Sources(length, squad=questions.squad, hotpot=questions.hotpot)
    for seed in range(3):
        example = fitting(task, seed, words, sources)
        taken = words(example.prompt) + TASKS[task].tokens
        assert taken <= length
        if task not in QA:  # their documents may run out
            assert taken > length - 130, "one more of what the haystack is made of would not fit"
        assert example == fitting(task, seed, words, sources)
    assert fitting(task, 0, words, sources) != fitting(task, 1, words, sources)


@pytest.mark.parametrize("task", SHAPES)
def test_needles_are_told_once_and_asked(task):
    key, value, asked = SHAPES[task]
    example = fitting(task, 5, words, Sources(1200))
    told = re.findall(rf"One of the special magic (?:numbers|uuids) for ({key}) is: ({value})\.", example.prompt)
    assert len(set(told)) == len(told)
    found = {name: {v for k, v in told if k == name} for name, _ in told}
    query = example.prompt.rpartition("What ")[2]
    wanted = {name for name in found if re.search(rf"\b{name}\b", query)}
    assert len(example.references) == asked
    assert set(example.references) == set().union(*(found[name] for name in wanted))
    assert all(example.prompt.count(reference) == 1 for reference in example.references)
    if "multikey_2" not in task and "multikey_3" not in task:
        keys, values = (4 if task in ("niah_multikey_1", "niah_multiquery") else 1), (4 if "value" in task else 1)
        assert (len(found), len(told)) == (keys, keys * values)
    else:
        assert len(told) > 10, "the haystack is needles too"


def test_a_needle_as_published():
    assert needle("number", "bada", "1234567") == "One of the special magic numbers for bada is: 1234567."
    draw = Random(0)
    assert all(re.fullmatch(r"[1-9]\d{6}", number(draw)) for _ in range(50))
    assert all(re.fullmatch(UUID, identifier(draw)) for _ in range(50))
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1], len(DEPTHS)) == (0, 3, 100, 40)
    assert list(DEPTHS) == np.round(np.linspace(0, 100, 40)).astype(int).tolist()


def test_needles_keep_their_order_among_the_others():
    for seed in range(20):
        mixed = among(Random(seed), ["a", "b"], ["1", "2", "3", "4"])
        assert [x for x in mixed if x in "ab"] == ["a", "b"]
        assert [x for x in mixed if x in "1234"] == ["1", "2", "3", "4"]


def test_variables_of_one_chain_with_an_example():
    example = fitting("vt", 1, words, Sources(900))
    first, second = example.prompt.split("\n\n", 2)[1:]
    assert len(example.references) == 5 and all(re.fullmatch(r"[A-Z]{5}", name) for name in example.references)
    chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", second)
    assert [name for name, _ in chain] == list(example.references)
    assert [value for _, value in chain[1:]] == list(example.references[:-1])
    assert first.count("VAR ") == 9 and NOISE in second
    assert all(name not in first for name in example.references)


@pytest.mark.parametrize(("length", "often", "seldom"), [(1500, 6, 1), (5000, 30, 3)])
def test_common_words_are_told_as_often_as_published(length, often, seldom):
    example = fitting("cwe", 2, words, Sources(length))
    listed = Counter(re.findall(r"\d+\. ([a-z]+)", example.prompt.rpartition("Below is")[2]))
    assert {name for name, n in listed.items() if n == often} == set(example.references)
    assert len(example.references) == 10
    assert set(listed.values()) == {often, seldom}


def test_frequent_words_follow_a_zeta_law():
    assert zeta_counts(100)[:5] == [60, 15, 6, 3, 2]
    example = fitting("fwe", 2, words, Sources(900))
    text = example.prompt.partition("coded words. ")[2].rpartition("\nQuestion")[0]
    counts = Counter(text.split())
    ranked = [name for name, _ in counts.most_common(4)]
    assert ranked[0] == "...." and ranked[1:] == list(example.references)
    assert any(zeta_counts(n) == sorted(counts.values(), reverse=True) for n in range(100, 1000))
    assert all(re.fullmatch(r"[a-z]{6}", name) for name in example.references)


def test_questions_are_answered_by_their_documents(questions):
    for task in QA:
        example = fitting(task, 3, words, questions)
        question = re.search(r"Question: .*?(\d+)", example.prompt)[1]
        assert any(reference in example.prompt for reference in example.references)
        assert all(question in reference for reference in example.references)
        assert example.prompt.count("Document ") > 3
    for name, task in (("squad", "qa_1"), ("hotpot", "qa_2")):
        with pytest.raises(InputError, match=rf"Ruler\.{name}: not given"):
            fitting(task, 0, words, Sources(600))
        broken = questions.squad.with_name("broken.json")
        broken.write_text("[1]")
        with pytest.raises(InputError, match=r"broken\.json is not the published JSON file"):
            fitting(task, 0, words, Sources(600, squad=broken, hotpot=broken))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"Ruler\.lengths: 100 has no room for vt, which takes \d+ tokens; give more"):
        fitting("vt", 0, words, Sources(100))


@pytest.mark.parametrize(
    ("answer", "references", "match", "expected"),
    [
        ("12 and 34", ("12", "99"), "all", 50.0),
        ("12 and 34", ("12", "99"), "any", 100.0),
        ("512", ("12",), "all", 100.0),
        ("It is ABCDE.", ("abcde",), "all", 100.0),
        ("", ("1",), "any", 0.0),
    ],
)
def test_scores(answer, references, match, expected):
    assert score(answer, references, match) == expected


def read_answer(prompt: str) -> str:
    """What one who reads the text would answer, from the prompt alone."""
    if "special magic" in prompt:
        query = prompt.rpartition("What ")[2]
        told = re.findall(r"special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", prompt)
        return ", ".join(value for name, value in told if re.search(rf"\b{name}\b", query))
    if "VAR " in prompt:
        *_, last = prompt.split("Memorize and track")
        known = {re.search(r"assigned the value (\d+)", last)[1]}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", last):
            known |= {name} if value in known else set()
        return " ".join(known)
    if "numbered list" in prompt:
        listed = Counter(re.findall(r"\d+\. ([a-z]+)", prompt.rpartition("Below is")[2]))
        return " ".join(name for name, _ in listed.most_common(10))
    if "coded text" in prompt:
        text = prompt.partition("coded words. ")[2].rpartition("\nQuestion")[0]
        return " ".join(name for name, _ in Counter(text.split()).most_common(4)[1:])
    question = re.search(r"Question: .*?(\d+)", prompt)[1]
    return re.search(rf"(?:town|place) {question}\b", prompt)[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TextCorpus:
    folder = tmp_path_factory.mktemp("text")
    lines = "".join(f"Line {i} says that {i * i} is the square of {i}, as anybody can see.\n" for i in range(12_000))
    (folder / "a.txt").write_text(lines)
    return TextCorpus(context=1024, folders=(folder,), cache=folder / "cache")


def test_a_reader_scores_all_and_an_untrained_model_nothing(text, questions, monkeypatch):
    config = ModelConfig(text.vocab_size, 1024, 16, 2, 2, 8, 32, parse_pattern("swa-8 gdn", 2, "rope"))
    model = build(config, 0)
    measure = Ruler(lengths=(2600,), tasks=tuple(TASKS), examples=2, squad=questions.squad, hotpot=questions.hotpot)
    with torch.no_grad():
        model.head.weight.zero_()
        nothing = Ruler(lengths=(1500,), tasks=("niah_single_1", "vt"), examples=2)(model, text).metrics
    assert nothing == {"ruler/niah_single_1/1500": 0.0, "ruler/vt/1500": 0.0, "ruler/1500": 0.0}

    def oracle(model, prompts, tokens):
        return [torch.from_numpy(text.prompt(read_answer(text.text(prompt.numpy())))[1:]) for prompt in prompts]

    monkeypatch.setattr(ruler, "generate", oracle)
    told = measure(model, text)
    assert told.metrics == {**{f"ruler/{task}/2600": 1.0 for task in TASKS}, "ruler/2600": 1.0}
    assert {row["score"] for row in told.rows} == {100.0} and len(told.rows) == 13
    assert examples(text, "vt", 2, Sources(2600, None, questions.squad, questions.hotpot)) is examples(
        text, "vt", 2, Sources(2600, None, questions.squad, questions.hotpot)
    )


def test_the_measure_says_what_it_needs(text, tmp_path):
    with pytest.raises(ValueError, match="'niah' is no task of RULER"):
        Ruler(tasks=("niah",))
    with pytest.raises(InputError, match="RecallLanguage does not have; use TextCorpus"):
        Ruler()(None, RecallLanguage())
    assert Ruler().capabilities(RecallLanguage()) == ()
    assert "ruler/vt/1024" in Ruler().capabilities(text)
    essay = tmp_path / "essay.txt"
    essay.write_text("One sentence. Another one.")
    assert Ruler(essay=essay).identity() != Ruler().identity()
    assert "One sentence." in fitting("niah_single_2", 0, words, Sources(400, essay=essay)).prompt
