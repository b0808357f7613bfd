"""The GPU's benchmark: its figures on a CPU at small size, its arms everywhere, and what a GPU must give."""

from dataclasses import replace

import pytest
import torch

from experiments import bench_gpu
from model import cost
from orchestrator.training.engine import end_process_group, start_process_group


@pytest.fixture(autouse=True)
def one_worker():
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


@pytest.mark.parametrize("size", ["S1", "S4"])
def test_arms_have_equal_parameters(size: str) -> None:
    full = cost.parameters(bench_gpu.model_of("full", size)).non_embedding
    for arm in bench_gpu.ARMS:
        assert cost.parameters(bench_gpu.model_of(arm, size)).non_embedding == pytest.approx(full, rel=0.01), arm


@pytest.mark.parametrize("recompute", [False, True])
def test_figures_follow_from_one_another(recompute: bool) -> None:
    config = bench_gpu.model_of("swa-128", "S1", context=64)
    config = replace(config, vocab_size=256, layers=config.layers[:2])
    told = bench_gpu.measure(config, torch.device("cpu"), 2, 2, recompute)
    assert told["flops_per_second"] / told["tokens_per_second"] == pytest.approx(cost.training_flops(config, 1))
    assert told["kernels"] == {"swa-128": "causal", "full": "causal"}
    assert bench_gpu.peak_of(torch.device("cpu"))[0] > 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_arm_trains_at_16384_tokens() -> None:
    found = list(bench_gpu.rows(torch.device("cuda"), ["S1", "S4"], 1, 5, recompute=True))
    assert len(found) == 14
    assert all(0 < row["mfu"] < 1 and row["tokens_per_second"] > 0 for row in found), found
