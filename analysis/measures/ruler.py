"""RULER on a checkpoint: thirteen tasks at several lengths, answered by generating (arXiv 2404.06654)."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from analysis.ruler.tasks import TASKS, Example, Sources, fitting, score
from model.generate import generate
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.data.text import TextCorpus
from orchestrator.errors import InputError
from orchestrator.measure import Measurement

NEEDS_FILES = {"qa_1": "squad", "qa_2": "hotpot"}


class Ruler(BaseModel):
    """ruler/TASK/LENGTH and their mean ruler/LENGTH, in [0, 1]: RULER's score over 100. Text data only.

    lengths: tokens of prompt and answer together. examples: of each task and length. essay: a .txt file, or a folder of
    them, for haystacks; None for the language reference that ships with Python. squad, hotpot: the published JSON files
    of qa_1 and qa_2, which are left out without them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lengths: tuple[int, ...] = (1024,)
    tasks: tuple[str, ...] = tuple(name for name in TASKS if name not in NEEDS_FILES)
    examples: int = Field(default=20, gt=0)
    essay: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            if task not in TASKS:
                raise ValueError(f"{task!r} is no task of RULER; choose from {', '.join(TASKS)}")
        return tasks

    @field_validator("lengths")
    @classmethod
    def _positive(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"{lengths} are no lengths; give tokens, such as (1024, 4096)")
        return lengths

    @property
    def name(self) -> str:
        return "ruler"

    def identity(self) -> dict[str, Any]:
        files = {name: _digest(path) for name in ("essay", "squad", "hotpot") if (path := getattr(self, name))}
        return {**self.model_dump(mode="json", exclude={"essay", "squad", "hotpot"}), "files": files}

    def capabilities(self, data: Data) -> tuple[str, ...]:
        each = tuple(f"ruler/{task}/{length}" for length in self.lengths for task in self.tasks)
        return (*each, *(f"ruler/{length}" for length in self.lengths)) if isinstance(data, TextCorpus) else ()

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        if not isinstance(data, TextCorpus):
            raise InputError(f"Ruler: asks in words, which {type(data).__name__} does not have; use TextCorpus")
        metrics: dict[str, float] = {}
        table = []
        for length in self.lengths:
            scores = {task: self._score(model, data, task, length) for task in self.tasks}
            metrics |= {f"ruler/{task}/{length}": value / 100 for task, value in scores.items()}
            metrics[f"ruler/{length}"] = float(np.mean(list(scores.values()))) / 100
            table += [{"task": task, "length": length, "score": value} for task, value in scores.items()]
        return Measurement(metrics, table)

    def _score(self, model: LanguageModel, data: TextCorpus, task: str, length: int) -> float:
        asked = examples(data, task, self.examples, Sources(length, self.essay, self.squad, self.hotpot))
        prompts = [torch.from_numpy(data.prompt(example.prompt)) for example in asked]
        answers = generate(model, prompts, TASKS[task].tokens)
        told = [data.text(answer.cpu().numpy()) for answer in answers]
        match = TASKS[task].match
        return float(np.mean([score(a, e.references, match) for a, e in zip(told, asked, strict=True)]))


@cache
def examples(data: TextCorpus, task: str, count: int, sources: Sources) -> tuple[Example, ...]:
    """The first `count` examples of a task: the same for every arm and checkpoint, made once a process."""
    return tuple(fitting(task, seed, lambda text: len(data.prompt(text)), sources) for seed in range(count))


def _digest(path: Path) -> str:
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
