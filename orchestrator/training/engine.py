"""The one file that knows DeepSpeed: process groups, the engine, what must be agreed between ranks."""

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from model.lm import LanguageModel
from orchestrator.errors import InputError
from orchestrator.recipe import Recipe, check_recipe
from orchestrator.training.optimizers import MuonAdamW, MuonWatch, parameter_groups, set_rates

deepspeed_logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.* is deprecated")  # DeepSpeed's call, not ours
# Its shared-memory collectives are compiled at first use (40 s) and break when world sizes alternate in one process.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

JOIN_TIMEOUT = timedelta(seconds=60)
# Ranks wait for rank 0's measures inside a collective; a rank that died closes its connection and is seen at once.
COLLECTIVE_TIMEOUT = timedelta(hours=12)
# No weight of a language model at work comes near this; float32 squares of activations overflow soon after.
LARGEST_WEIGHT = 1e4

T = TypeVar("T")


class PortTaken(RuntimeError):
    """The rendezvous port belongs to another process: take another one and start again."""


def start_process_group(rank: int, world: int, port: int, address: str = "127.0.0.1") -> None:
    """Joins this process to the gang of one job. Raises PortTaken on rank 0 where the port is in use.

    One worker needs no port and opens none.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(rank)),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    backend = deepspeed.get_accelerator().communication_backend_name()
    backend = "gloo" if deepspeed.get_accelerator().device_name() == "cpu" else backend
    store: dist.Store
    if world == 1:
        store = dist.HashStore()
    else:
        try:
            store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=JOIN_TIMEOUT)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
                raise PortTaken(f"port {port} on {address}: address already in use") from error
            raise
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, dist_init_required=False)


def end_process_group() -> None:
    """Leaves the gang, so that the same process can join another of any size."""
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()  # torch's own would leave DeepSpeed holding groups of the finished job
    elif dist.is_initialized():
        dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None  # else the next job would go on with this one's backend and world size


def from_first_rank(produce: Callable[[], T], workers: int) -> T:
    """What `produce` returns on rank 0, on every rank; what it raises there, on every rank too."""
    if workers == 1:
        return produce()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = produce()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def rows_of(rank: int, batch_size: int, workers: int, micro_batch: int | None) -> tuple[range, int]:
    """A rank's contiguous rows of the global batch and how many it puts through at once. Raises InputError."""
    if batch_size % workers:
        raise InputError(f"batch_size: {batch_size} is not a multiple of {workers} workers; change one of them")
    share = batch_size // workers
    micro = share if micro_batch is None else min(micro_batch, share)
    if micro < 1 or share % micro:
        raise InputError(f"micro_batch: {micro_batch} does not divide a worker's {share} sequences; choose a divisor")
    return range(rank * share, (rank + 1) * share), micro


class _Loss(nn.Module):
    """What DeepSpeed wraps: its engine calls `forward`, and that must give the loss."""

    def __init__(self, model: LanguageModel, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self._precision, self._z_loss = recipe.precision, recipe.z_loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(what is minimised, the cross-entropy alone)."""
        half = self._precision == "bfloat16"
        with torch.autocast(tokens_BT.device.type, torch.bfloat16) if half else nullcontext():
            minimised, cross_entropy = self.model.objective(tokens_BT, targets_BT, self._z_loss)
        return minimised, cross_entropy.detach()


class Engine:
    """A model under DeepSpeed at ZeRO stage 0, 1 or 2, stepped by a whole batch at a time.

    Weights, gradients and optimizer state stay float32; "bfloat16" runs the forward pass under autocast. group_sizes:
    elements of each parameter by optimizer group, in the order of the flat tensors that stages 1 and 2 share out.
    Raises InputError where recipe, workers and micro-batch do not go together, and `step` raises RuntimeError where
    Muon turns out not to orthogonalise.
    """

    def __init__(
        self,
        model: LanguageModel,
        recipe: Recipe,
        *,
        rank: int = 0,
        workers: int = 1,
        zero_stage: int = 0,
        micro_batch: int | None = None,
        recompute: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if zero_stage not in (0, 1, 2):
            raise InputError(f"machine.zero_stage: {zero_stage} is not built; choose 0, 1 or 2")
        check_recipe(recipe, zero_stage)
        self.model = model
        model.recompute = recompute
        self.rows, self._micro_batch = rows_of(rank, recipe.batch_size, workers, micro_batch)
        self._zero_stage = zero_stage
        self._workers = workers
        self._device = torch.device(device)
        self.fault: str | None = None  # what made the last step unsound on this rank
        config = {
            "train_batch_size": recipe.batch_size,
            "train_micro_batch_size_per_gpu": self._micro_batch,
            "gradient_accumulation_steps": len(self.rows) // self._micro_batch,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": recipe.clip or 0.0,  # DeepSpeed's default is 1.0
            "steps_per_print": None,
        }
        optimizer = _optimizer(model, recipe, zero_stage)
        # Before DeepSpeed puts flat shares in their place. Its Muon sorts a group's parameters: this is their order.
        self.group_sizes = [[parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups]
        self._engine, *_ = deepspeed.initialize(model=_Loss(model, recipe), optimizer=optimizer, config=config)
        self._watch = MuonWatch(model, recipe) if recipe.optimizer == "muon" else None

    def step(self, batch_BT1: np.ndarray, factor: float) -> float:
        """One optimizer step on this rank's rows at `factor` of the peak rates; the loss of those rows, in nats."""
        set_rates(self._engine.optimizer, factor)
        batch = torch.from_numpy(batch_BT1).to(self._device)
        total = 0.0
        # Compiling DeepSpeed's Newton-Schulz takes a minute a process for matrices too small to gain by it.
        eager = torch.compiler.set_stance("force_eager") if self._zero_stage > 0 else nullcontext()
        with eager:
            for rows in batch.split(self._micro_batch):
                minimised, loss = self._engine(rows[:, :-1], rows[:, 1:])
                self._engine.backward(minimised)
                self._engine.step()
                total += loss.item() * len(rows)
        self.fault = self._find_fault()
        if self._watch and self.fault is None and self._watch.is_convinced(factor):
            self._watch = None
        return total / len(batch)

    def agree(self, loss: float, stop: bool, save: bool) -> tuple[float, bool, bool, bool]:
        """The last step as all ranks see it: mean loss, whether loss, gradients and weights are sound, stop, save.

        Above stage 0 DeepSpeed skips a step with non-finite gradients and at stage 0 it writes them into the weights;
        both are unsound here. stop and save are true where any rank says so.
        """
        told = torch.tensor([loss / self._workers, self.fault is not None, stop, save], dtype=torch.float64)
        if self._workers > 1:
            told = told.to(self._device)
            dist.all_reduce(told)
        mean, unsound, stops, saves = told.tolist()
        return mean, unsound == 0 and np.isfinite(mean).item(), stops > 0, saves > 0

    @torch.no_grad()
    def _find_fault(self) -> str | None:
        if not self._engine.was_step_applied():
            return "non-finite gradients"
        largest = torch.stack(torch._foreach_norm(list(self.model.parameters()), float("inf"))).max().item()
        if not np.isfinite(largest):
            return "non-finite weights"
        return f"a weight beyond {LARGEST_WEIGHT:g}" if largest > LARGEST_WEIGHT else None

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's optimizer state, plain tensors and numbers. Above stage 0 the rank's share of it."""
        return self._stepper().state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._stepper().load_state_dict(state)

    def close(self) -> None:
        self._engine.destroy()

    def _stepper(self) -> torch.optim.Optimizer:
        return self._engine.optimizer.optimizer if self._zero_stage > 0 else self._engine.optimizer


def _optimizer(model: LanguageModel, recipe: Recipe, zero_stage: int) -> torch.optim.Optimizer:
    groups = parameter_groups(model, recipe)
    if zero_stage == 0 or recipe.optimizer == "adamw":
        return MuonAdamW(groups)
    # Above stage 0 an optimizer sees flat shares, no matrices: DeepSpeed orthogonalises in its own gradient path, for
    # parameters marked one by one. "standard" is torch.optim.Muon's iteration; its default runs another one in float16.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
        if group["use_muon"]:
            group["ns_method"] = "standard"
    return MuonWithAuxAdam(groups)
