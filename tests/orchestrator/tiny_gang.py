"""A job small enough to train in a second, and a gang of processes that trains it.

As a process of its own: `python tiny_gang.py RANK WORKERS PORT JSON`, JSON a list of changes to `tiny_task`, each a job
that this process takes part in, one after another; it prints a JSON list of outcomes.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from model.config import ModelConfig  # noqa: E402
from model.lm import LanguageModel  # noqa: E402
from model.mixers.table import parse_pattern  # noqa: E402
from orchestrator.data.stream import Data, FactSet  # noqa: E402
from orchestrator.identity import of_data  # noqa: E402
from orchestrator.measure import Measurement  # noqa: E402
from orchestrator.recipe import Recipe  # noqa: E402
from orchestrator.training.task import Task  # noqa: E402


@dataclass(frozen=True)
class Counting:
    """Sequences that count upwards from anywhere, some tokens replaced by noise: learnt within tens of steps."""

    vocab_size: int = 32
    context: int = 32
    chance: float = 1 / 32

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        pass

    def batch(self, seed: int, step: int, rows: range) -> np.ndarray:
        return np.stack([self._row(seed, step, row) for row in rows])

    def held_out(self, documents: int) -> np.ndarray:
        return np.stack([self._row(10**6, 0, row) for row in range(documents)])

    def facts(self, documents: int) -> FactSet:
        raise NotImplementedError

    def _row(self, seed: int, step: int, row: int) -> np.ndarray:
        draw = np.random.default_rng([seed, step, row])
        tokens = (draw.integers(self.vocab_size) + np.arange(self.context + 1)) % self.vocab_size
        noise = draw.integers(self.vocab_size, size=tokens.size)
        return np.where(draw.random(tokens.size) < 0.1, noise, tokens)


@dataclass(frozen=True)
class HeldOutLoss:
    name: str = "validation"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        assert not model.training and not torch.is_grad_enabled()
        tokens = torch.from_numpy(data.held_out(2))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
        return Measurement({f"{self.name}/loss": loss}, [{"document": 0, "loss": loss}])


MODEL = ModelConfig(
    vocab_size=32,
    context=32,
    d_model=16,
    n_heads=2,
    n_kv_heads=2,
    head_dim=8,
    d_ff=40,
    layers=parse_pattern("swa-8 full", 2, "rope"),
    mlp="relu2",
    qk_norm=1.5,
    key_shift=True,
)


def tiny_task(folder: Path | str, *, recipe: dict[str, Any] | None = None, **changes: Any) -> Task:
    """A task of 12 steps: measured at 4, 8 and 12, checkpointed at 6 and 12."""
    task = Task(
        kind="train",
        job_id="tiny",
        cell_id="tiny",
        folder=Path(folder),
        model=MODEL,
        data=Counting(),
        data_identity=of_data(Counting()),
        recipe=Recipe(**{"learning_rate": 0.02, "batch_size": 4, "warmup_steps": 2, **(recipe or {})}),
        seed=0,
        steps=12,
        measures=(("heldout-1", HeldOutLoss()),),
        evaluate_at=(4, 8, 12),
        checkpoint_at=(6, 12),
        log_every=1,
    )
    return replace(task, **changes)


def gang(changes: list[dict[str, Any]], workers: int) -> list[subprocess.Popen[str]]:
    """Starts a gang of processes that trains one job after another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    arguments = [[__file__, str(rank), str(workers), str(port), json.dumps(changes)] for rank in range(workers)]
    return [
        subprocess.Popen([sys.executable, *line], env=environment, text=True, stdout=-1, stderr=-1)
        for line in arguments
    ]


def outcomes(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The outcomes as rank 0 saw them, once all ranks have ended well."""
    ended = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), [errors[-3000:] for _, errors in ended]
    return json.loads(ended[0][0].splitlines()[-1])


def main(rank: int, workers: int, port: int, changes: list[dict[str, Any]]) -> None:
    from orchestrator.training import engine, job

    answers: list[dict[str, Any]] = []
    for number, change in enumerate(changes):
        task = tiny_task(**change)
        if rank >= task.workers:
            continue
        engine.start_process_group(rank, task.workers, port + number)
        try:
            answers.append(asdict(job.run(task, rank, lambda: False)))
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
        finally:
            engine.end_process_group()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
