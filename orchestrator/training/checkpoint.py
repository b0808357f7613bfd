"""Checkpoints on disk: written beside their place, proven by a manifest, then moved there in one rename.

    checkpoints/step-00000900/weights.safetensors   the model's parameters, by name
                              optimizer-0.pt        optimizer state: of rank 0 at ZeRO stage 0, one a rank above it
                              MANIFEST.json         step, workers, zero_stage, sha256 of each file above
                              COMMITTED             empty, written last

Only the newest two keep the optimizer's state, so that a damaged newest one costs one interval and no more; older ones
keep the weights for measures to come. A finished job keeps one state or none. All of this is plain data: nothing is
unpickled but tensors and numbers.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from model.lm import LanguageModel

WEIGHTS, MANIFEST, MARKER = "weights.safetensors", "MANIFEST.json", "COMMITTED"
KEEP_OPTIMIZER_STATES = 2


class NoWholeCheckpoint(RuntimeError):
    """Checkpoints exist and none of them can be resumed from. Starting over silently would hide the damage."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. resumable: it holds the optimizer's state too."""

    folder: Path
    step: int
    workers: int
    zero_stage: int
    resumable: bool


def commit(
    root: Path,
    step: int,
    model: LanguageModel,
    optimizer_state: dict[str, Any],
    *,
    rank: int,
    workers: int,
    zero_stage: int,
    keep: Collection[int],
) -> None:
    """Commits the state after `step` steps; called by every rank. Earlier steps not in `keep` are then removed."""
    partial = root / f".partial-{step:08d}"
    if rank == 0:
        _discard_partial(root)
        partial.mkdir(parents=True)
    _wait(workers)
    try:
        if rank == 0:
            weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
            (partial / WEIGHTS).write_bytes(safetensors.torch.save(weights))
        if rank == 0 or zero_stage > 0:
            # Both libraries' own writers turn a full disk into errors of theirs; through bytes it stays an OSError.
            state = io.BytesIO()
            torch.save(optimizer_state, state)
            (partial / f"optimizer-{rank}.pt").write_bytes(state.getbuffer())
        _wait(workers)
        if rank == 0:
            _seal(partial, {"step": step, "workers": workers, "zero_stage": zero_stage})
            place = root / f"step-{step:08d}"
            if place.exists():  # a damaged one that a resume has gone past
                shutil.rmtree(place)
            partial.rename(place)
            _sync(root)
            _retire(root, step, keep)
    except OSError:
        _discard_partial(root)
        raise
    _wait(workers)


def latest_committed(root: Path, end: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and resumable, and what was skipped: "step-00000900 skipped: marker missing".

    end: a step at which weights alone will do, for nothing is left to train. None only where no checkpoint was ever
    committed. Raises NoWholeCheckpoint where there are some and none will do.
    """
    skipped = []
    folders = _folders(root)
    for folder in reversed(folders):
        try:
            checkpoint = verify(folder)
        except ValueError as error:
            skipped.append(f"{folder.name} skipped: {error}")
            continue
        if checkpoint.resumable or checkpoint.step == end:
            return checkpoint, skipped
        skipped.append(f"{folder.name} skipped: weights only")
    if folders:
        raise NoWholeCheckpoint(
            f"{root}: no checkpoint to resume from ({'; '.join(skipped)}); restore one, or delete the folder to train "
            f"from step 0"
        )
    return None, []


def adopt(root: Path, other: Path, keep: Collection[int]) -> None:
    """Makes `root`, which must not exist yet, hold another job's newest checkpoint and those of the steps to keep.

    Files are linked where the file system can: a branch costs no disk for what its trunk holds. All of it or nothing.
    Raises NoWholeCheckpoint where the other job's newest one is damaged.
    """
    folders = _folders(other)
    try:
        if not folders or not verify(folders[-1]).resumable:
            raise ValueError("no optimizer state")
    except ValueError as error:
        raise NoWholeCheckpoint(f"{other}: the last checkpoint of the trunk is not whole ({error})") from None
    partial = root.with_name(".adopting")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for folder in folders:
        if folder is folders[-1] or int(folder.name.removeprefix("step-")) in keep:
            shutil.copytree(folder, partial / folder.name, copy_function=_link)
    partial.rename(root)
    _sync(root.parent)


def committed(root: Path) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first, resumable or not."""
    whole = []
    for folder in _folders(root):
        try:
            whole.append(verify(folder))
        except ValueError:
            continue
    return whole


def verify(folder: Path) -> Checkpoint:
    """The checkpoint of a folder, every file read against its sha256. Raises ValueError saying what is wrong."""
    if not (folder / MARKER).exists():
        raise ValueError("marker missing")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        checkpoint = Checkpoint(
            folder,
            manifest["step"],
            manifest["workers"],
            manifest["zero_stage"],
            any(name.startswith("optimizer-") for name in files),
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError("manifest damaged") from None
    for name, expected in files.items():
        path = folder / name
        if not path.exists():
            raise ValueError(f"{name} missing")
        if path.stat().st_size < expected["bytes"]:
            raise ValueError(f"{name} truncated")
        if _digest(path) != expected["sha256"]:
            raise ValueError(f"{name} altered")
    return checkpoint


def load_weights(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Copies the stored weights into the model. Raises ValueError where names or shapes differ."""
    stored = safetensors.torch.load_file(checkpoint.folder / WEIGHTS)
    parameters = dict(model.named_parameters())
    if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in stored.items()}:
        raise ValueError(f"{checkpoint.folder}: its weights are of another model shape; delete it or restore the model")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])


def load_optimizer_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The optimizer state for a rank: the one replica at stage 0, the rank's own share above it."""
    shard = rank if checkpoint.zero_stage > 0 else 0
    return torch.load(checkpoint.folder / f"optimizer-{shard}.pt", map_location="cpu", weights_only=True)


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"))


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"sha256": _digest(path), "bytes": path.stat().st_size}
    _write(folder / MANIFEST, json.dumps({**facts, "files": files}, indent=1))
    _write(folder / MARKER, "")
    _sync(folder)


def _retire(root: Path, newest: int, keep: Collection[int]) -> None:
    """Removes passed steps that need not stay, and all but the newest optimizer states."""
    for folder in _folders(root):
        step = int(folder.name.removeprefix("step-"))
        if step > newest or (step < newest and step not in keep):  # a later one is damaged: the resume went past it
            shutil.rmtree(folder)
    drop_optimizer_states(root, KEEP_OPTIMIZER_STATES)


def drop_optimizer_states(root: Path, keep: int) -> None:
    """Removes the optimizer state of all but the newest `keep` checkpoints; their weights stay."""
    folders = _folders(root)
    for folder in folders[: max(0, len(folders) - keep)]:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except (OSError, ValueError):
            continue  # damaged: left as it is, for whoever looks into it
        files: dict[str, Any] = manifest["files"]
        states = [name for name in files if name.startswith("optimizer-")]
        if states:
            manifest["files"] = {name: entry for name, entry in files.items() if name not in states}
            _write(folder / ".manifest", json.dumps(manifest, indent=1))
            (folder / ".manifest").replace(folder / MANIFEST)
            for name in states:
                (folder / name).unlink(missing_ok=True)


def _link(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, place)


def _discard_partial(root: Path) -> None:
    for partial in root.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _wait(workers: int) -> None:
    if workers > 1:
        dist.barrier()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
