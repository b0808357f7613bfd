"""What a worker is handed and what it hands back: plain data, picklable, complete."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.config import ModelConfig
from orchestrator.data.stream import Data
from orchestrator.measure import Measure
from orchestrator.recipe import Recipe

SAVE_EVERY_S = 30.0  # of work that a kill may cost


@dataclass(frozen=True)
class Task:
    """One job for one gang.

    kind: "train" trains a cell from its last committed checkpoint (or from step 0) to `steps`, measuring on the way;
    "trunk" what several budgets share and "tune" a trial of a learning rate, in the same way; "measure" runs `measures`
    on the stored checkpoints of `folder`, training nothing.
    folder: jobs/<id>. data_identity: of the data the cell's identity counts on, `identity.of_data` when it was planned.
    schedule_steps: the length the learning rate's schedule is laid out for, None for `steps`.
    evaluate_at, checkpoint_at: steps completed, ascending, in 1..steps; measures run at both.
    micro_batch: sequences a worker puts through at once; None for all of its share. recompute: layers run again in the
    backward pass instead of keeping their activations. log_every: steps.
    trunk: folder of the finished trunk that a job without checkpoints of its own starts from. keep_state: whether the
    newest optimizer state stays once the job is finished. note: what the record's first event of the attempt says
    beside where it starts.
    """

    kind: Literal["train", "trunk", "tune", "measure"]
    job_id: str
    cell_id: str
    folder: Path
    model: ModelConfig
    data: Data
    data_identity: dict[str, Any]
    recipe: Recipe
    seed: int
    steps: int
    measures: tuple[tuple[str, Measure], ...]  # (measurement identity, measure)
    evaluate_at: tuple[int, ...]
    checkpoint_at: tuple[int, ...]
    workers: int = 1
    zero_stage: int = 0
    micro_batch: int | None = None
    threads: int = 1
    recompute: bool = False
    log_every: int = 10
    schedule_steps: int | None = None
    trunk: Path | None = None
    keep_state: bool = True
    note: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended where it ended by itself.

    "stopped" means asked to stop and checkpointed. busy_s: seconds spent in training steps and measures, this attempt.
    """

    state: Literal["finished", "diverged", "stopped"]
    cause: str | None
    tokens: int
    busy_s: float
    train_s: float
    measure_s: float
