"""RULER's thirteen tasks. Each makes an example of a size; the largest that fits a length in tokens is asked."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

from scipy.special import zeta

from analysis.ruler.text import NOISE, among, distinct, essay, essay_with, identifier, number, word
from orchestrator.errors import InputError


@dataclass(frozen=True)
class Sources:
    """Files that examples are made of. essay: of haystacks, None for text that ships with Python. squad, hotpot: the
    published JSON files of SQuAD and HotpotQA. length: of the examples in tokens, which word lists depend on."""

    length: int = 4096
    essay: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None


@dataclass(frozen=True)
class Example:
    """prompt ends where the answer begins; references: what the answer should hold."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """make(draw, size, sources): size counts sentences, words, needles, assignments or documents of the haystack, from
    `least` on. tokens: how many are generated. match: all references count by share, or any of them suffices."""

    make: Callable[[Random, int, Sources], Example]
    tokens: int
    least: int = 1
    match: Literal["all", "any"] = "all"


MAKERS = {"word": word, "number": number, "uuid": identifier}
PLURALS = {"number": "numbers", "uuid": "uuids"}


def needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {PLURALS[kind]} for {key} is: {value}."


def niah(
    draw: Random,
    size: int,
    sources: Sources,
    haystack: Literal["noise", "essay", "needles"],
    key: str,
    value: str,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Example:
    """Needles in a haystack of `size` noise sentences, essay words or other needles; `queries` keys are asked."""
    names = distinct(draw, keys + (size if haystack == "needles" else 0), MAKERS[key])
    told = {name: distinct(draw, values, MAKERS[value]) for name in names}
    needles = [needle(value, name, one) for name in names[:keys] for one in told[name]]
    draw.shuffle(needles)
    if haystack == "noise":
        text = "\n".join(among(draw, [NOISE] * size, needles))
    elif haystack == "essay":
        text = essay_with(draw, essay(sources.essay), size, needles)
    else:
        text = "\n".join(among(draw, [needle(value, name, told[name][0]) for name in names[keys:]], needles))
    asked = draw.sample(names[:keys], queries)
    several = queries * values > 1
    kind = PLURALS[value] if several else value
    listed = asked[0] if queries == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
    some, are = ("Some", "are all the") if several else ("A", "is the")
    prompt = (
        f"{some} special magic {kind} {'are' if several else 'is'} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {kind} afterwards.\n{text}\n"
        f"What {are} special magic {kind} for {listed} mentioned in the provided text? The special magic {kind} for "
        f"{listed} mentioned in the provided text {'are' if several else 'is'}"
    )
    return Example(prompt, tuple(one for name in asked for one in told[name]))


def variable_tracking(draw: Random, size: int, sources: Sources, hops: int = 4) -> Example:
    """One chain of `hops` assignments among `size` noise sentences; all names with the first value are asked."""
    example = _chain(draw, 5, hops)
    asked = _chain(draw, size, hops)
    return Example(f"{example.prompt} {' '.join(example.references)}\n\n{asked.prompt}", asked.references)


def _chain(draw: Random, size: int, hops: int) -> Example:
    names = distinct(draw, hops + 1, lambda d: "".join(d.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
    value = str(draw.randint(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(names))]
    text = "\n".join(among(draw, [NOISE] * size, chain))
    prompt = (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, {len(names)} variables are assigned the value {value}, "
        f"they are:"
    )
    return Example(prompt, tuple(names))


def common_words(draw: Random, size: int, sources: Sources) -> Example:
    """Ten words many times among `size` other words few times: 30 and 3, or 6 and 1 in lists of under 4096 tokens."""
    example = _word_list(draw, 20, 3, 1)
    asked = _word_list(draw, size, 30, 3) if sources.length >= 4096 else _word_list(draw, size, 6, 1)
    listed = " ".join(f"{i}. {name}" for i, name in enumerate(example.references, 1))
    return Example(f"{example.prompt} {listed}\n\n{asked.prompt}", asked.references)


def _word_list(draw: Random, size: int, often: int, seldom: int) -> Example:
    words = distinct(draw, 10 + size, word)
    listed = words[:10] * often + words[10:] * seldom
    draw.shuffle(listed)
    numbered = " ".join(f"{i}. {name}" for i, name in enumerate(listed, 1))
    prompt = (
        f"Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        f"that appear most often.\n{numbered}\nQuestion: What are the 10 most common words in the above list? Answer: "
        f"The top 10 words that appear most often in the list are:"
    )
    return Example(prompt, tuple(words[:10]))


def frequent_words(draw: Random, size: int, sources: Sources, alpha: float = 2.0) -> Example:
    """`size` coded words by a zeta law, the commonest of them written as dots; the next three are asked."""
    counts = zeta_counts(size, alpha)
    coded = distinct(draw, len(counts), lambda d: "".join(d.choices("abcdefghijklmnopqrstuvwxyz", k=6)))
    coded[0] = "...."
    text = [name for name, count in zip(coded, counts, strict=True) for _ in range(count)]
    draw.shuffle(text)
    prompt = (
        f"Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(text)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        f"'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        f"coded text above, the three most frequently appeared words are:"
    )
    return Example(prompt, tuple(coded[1:4]))


def zeta_counts(words: int, alpha: float = 2.0) -> list[int]:
    """int(n k^-α / ζ(α)) for ranks k = 1, 2, … until there is none."""
    counts: list[int] = []
    while count := int(words * (len(counts) + 1) ** -alpha / float(zeta(alpha))):
        counts.append(count)
    return counts


def question_answering(draw: Random, size: int, sources: Sources, which: Literal["squad", "hotpot"]) -> Example:
    """A question over `size` documents, those that answer it and others, from a published file."""
    path = getattr(sources, which)
    if path is None:
        raise InputError(f"Ruler.{which}: not given; name the published JSON file, or leave its task out")
    documents, questions = _questions(path, which)
    query, answers, needed = questions[draw.randrange(len(questions))]
    others = [i for i in range(len(documents)) if i not in needed]
    shown = list(needed) + draw.sample(others, max(0, min(size - len(needed), len(others))))
    draw.shuffle(shown)
    text = "\n\n".join(f"Document {i}:\n{documents[document]}" for i, document in enumerate(shown, 1))
    rule = "Only give me the answer and do not output any other words."
    prompt = (
        f"Answer the question based on the given documents. {rule}\n\nThe following are given documents.\n\n{text}\n\n"
        f"Answer the question based on the given documents. {rule}\n\nQuestion: {query} Answer:"
    )
    return Example(prompt, answers)


# What is asked, its answers, and which documents hold them.
Question = tuple[str, tuple[str, ...], tuple[int, ...]]


@cache
def _questions(path: Path, which: str) -> tuple[list[str], list[Question]]:
    """(documents, questions with their answers and the documents that hold them). Raises InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = _squad(content) if which == "squad" else _hotpot(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Ruler.{which}: {path} is not the published JSON file ({error}); give another") from None
    if not found[1]:
        raise InputError(f"Ruler.{which}: {path} has no question that can be answered; give another")
    return found


def _squad(content: dict[str, Any]) -> tuple[list[str], list[Question]]:
    passages = [passage for article in content["data"] for passage in article["paragraphs"]]
    documents = list(dict.fromkeys(passage["context"] for passage in passages))
    place = {text: i for i, text in enumerate(documents)}
    questions: list[Question] = [
        (qa["question"], tuple(answer["text"] for answer in qa["answers"]), (place[passage["context"]],))
        for passage in passages
        for qa in passage["qas"]
        if qa["answers"] and not qa.get("is_impossible")
    ]
    return documents, questions


def _hotpot(content: list[dict[str, Any]]) -> tuple[list[str], list[Question]]:
    place: dict[str, int] = {}
    questions: list[Question] = []
    for entry in content:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        needed = tuple(place.setdefault(text, len(place)) for text in texts)
        questions.append((entry["question"], (entry["answer"],), needed))
    return list(place), questions


TASKS: dict[str, Task] = {
    "niah_single_1": Task(partial(niah, haystack="noise", key="word", value="number"), 128),
    "niah_single_2": Task(partial(niah, haystack="essay", key="word", value="number"), 128),
    "niah_single_3": Task(partial(niah, haystack="essay", key="word", value="uuid"), 128),
    "niah_multikey_1": Task(partial(niah, haystack="essay", key="word", value="number", keys=4), 128),
    "niah_multikey_2": Task(partial(niah, haystack="needles", key="word", value="number"), 128),
    "niah_multikey_3": Task(partial(niah, haystack="needles", key="uuid", value="uuid"), 128),
    "niah_multivalue": Task(partial(niah, haystack="essay", key="word", value="number", values=4), 128),
    "niah_multiquery": Task(partial(niah, haystack="essay", key="word", value="number", keys=4, queries=4), 128),
    "vt": Task(variable_tracking, 30),
    "cwe": Task(common_words, 120),
    "fwe": Task(frequent_words, 50, least=100),
    "qa_1": Task(partial(question_answering, which="squad"), 32, match="any"),
    "qa_2": Task(partial(question_answering, which="hotpot"), 32, match="any"),
}


def fitting(task: str, seed: int, count: Callable[[str], int], sources: Sources) -> Example:
    """The largest example of a task whose prompt and answer take at most `sources.length` tokens; count: of a text.

    The same for every arm: it depends on its arguments alone. Raises InputError where the smallest does not fit.
    """
    rule = TASKS[task]

    def made(size: int) -> tuple[Example, bool]:
        example = rule.make(Random(f"{task}/{seed}"), size, sources)
        return example, count(example.prompt) + rule.tokens <= sources.length

    best, fits = made(rule.least)
    if not fits:
        need = count(best.prompt) + rule.tokens
        raise InputError(
            f"Ruler.lengths: {sources.length} has no room for {task}, which takes {need} tokens; give more"
        )
    low, high = rule.least, 2 * rule.least
    while high < sources.length and made(high)[1]:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if made(middle)[1] else (low, middle)
    return made(low)[0]


def score(answer: str, references: tuple[str, ...], match: Literal["all", "any"] = "all") -> float:
    """Share of the references found in the answer, or 100 where one is: 0 to 100, letters in any case."""
    found = [reference.lower() in answer.lower() for reference in references]
    return 100.0 * (any(found) if match == "any" else sum(found) / len(found))
