"""A checkpoint is whole or it is not used, and what was skipped is said."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.lm import LanguageModel, build
from model.mixers.table import parse_pattern
from orchestrator.training import checkpoint
from orchestrator.training.checkpoint import NoWholeCheckpoint, committed, latest_committed, load_weights, verify

CONFIG = ModelConfig(32, 32, 16, 2, 2, 8, 32, parse_pattern("full", 1, "rope"))


def commit(root: Path, step: int, model: LanguageModel, keep: tuple[int, ...] = (1, 2, 3, 4)) -> None:
    state = {"step": step, "momentum": torch.full((3,), float(step))}
    checkpoint.commit(root, step, model, state, rank=0, workers=1, zero_stage=0, keep=keep)


def truncate(folder: Path) -> None:
    os.truncate(folder / "optimizer-0.pt", 10)


def alter(folder: Path) -> None:
    path = folder / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def unmark(folder: Path) -> None:
    (folder / "COMMITTED").unlink()


def lose(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


def empty_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").write_text("")


def test_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = build(CONFIG, 3)
    commit(tmp_path, 2, model)
    found, skipped = latest_committed(tmp_path)
    assert found and (found.step, found.workers, found.zero_stage, skipped) == (2, 1, 0, [])
    other = build(CONFIG, 4)
    load_weights(found, other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(checkpoint.load_optimizer_state(found, 0)["momentum"], torch.full((3,), 2.0))


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    config = ModelConfig(32, 32, 16, 2, 2, 8, 32, parse_pattern("full", 1, "rope"), tied_embeddings=True)
    model, other = build(config, 3), build(config, 4)
    commit(tmp_path, 1, model)
    load_weights(committed(tmp_path)[0], other)
    assert torch.equal(model.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "optimizer-0.pt truncated"),
        (alter, "weights.safetensors altered"),
        (unmark, "marker missing"),
        (lose, "weights.safetensors missing"),
        (empty_manifest, "manifest damaged"),
    ],
)
def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    model = build(CONFIG, 0)
    for step in (1, 2, 3):
        commit(tmp_path, step, model)
    damage(tmp_path / "step-00000003")
    found, skipped = latest_committed(tmp_path)
    assert found and found.step == 2
    assert skipped == [f"step-00000003 skipped: {said}"]
    # Going on from 2 must not leave the damaged one ahead of what follows.
    commit(tmp_path, 3, model)
    found, skipped = latest_committed(tmp_path)
    assert found and (found.step, skipped) == (3, [])


def test_never_from_step_0_where_checkpoints_are_damaged(tmp_path: Path) -> None:
    assert latest_committed(tmp_path / "none") == (None, [])
    model = build(CONFIG, 0)
    commit(tmp_path, 1, model)
    commit(tmp_path, 2, model)
    truncate(tmp_path / "step-00000001")
    unmark(tmp_path / "step-00000002")
    with pytest.raises(
        NoWholeCheckpoint, match=r"step-00000002 skipped: marker missing; step-00000001 skipped: .*truncated"
    ):
        latest_committed(tmp_path)


def test_a_full_disk_leaves_the_earlier_one(tmp_path: Path) -> None:
    """The limit on file size stands in for the disk's end: the same write fails half-way, with a like error."""
    model = build(CONFIG, 0)
    commit(tmp_path, 1, model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            commit(tmp_path, 2, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]
    found, _ = latest_committed(tmp_path)
    assert found and found.step == 1


def test_all_kept_steps_stay_and_the_newest_two_can_be_resumed(tmp_path: Path) -> None:
    model = build(CONFIG, 0)
    for step in range(1, 8):
        commit(tmp_path, step, model, keep=(1, 2, 4, 7))
    stored = committed(tmp_path)
    assert [(found.step, found.resumable) for found in stored] == [(1, False), (2, False), (4, True), (7, True)]
    assert not (tmp_path / "step-00000001" / "optimizer-0.pt").exists()
    assert json.loads((tmp_path / "step-00000007" / "MANIFEST.json").read_text())["step"] == 7
    assert verify(tmp_path / "step-00000001").step == 1


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    commit(tmp_path, 1, build(CONFIG, 0))
    wider = ModelConfig(32, 32, 32, 2, 2, 8, 32, parse_pattern("full", 1, "rope"))
    with pytest.raises(ValueError, match="another model shape"):
        load_weights(committed(tmp_path)[0], build(wider, 0))


def test_nothing_is_unpickled_but_tensors(tmp_path: Path) -> None:
    commit(tmp_path, 1, build(CONFIG, 0))
    found = committed(tmp_path)[0]
    torch.save({"code": Path}, found.folder / "optimizer-0.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.load_optimizer_state(found, 0)
