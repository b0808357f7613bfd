"""Text written from states equals text written by reading everything again for each token."""

import pytest
import torch

from model.config import ModelConfig
from model.generate import generate
from model.lm import build
from model.mixers.table import parse_pattern

torch.set_num_threads(1)


@pytest.mark.parametrize("pattern", ["swa-5 full", "gdn lightning", "mamba2 swa-3+full"])
@torch.no_grad()
def test_greedy_text_is_that_of_the_whole_model(pattern):
    layers = parse_pattern(pattern, 2, "rope", {"mamba2": {"head_dim": 16, "d_state": 8}})
    model = build(ModelConfig(23, 32, 32, 4, 4, 8, 48, layers), 0).double()
    for index, parameter in enumerate(model.parameters()):
        if parameter.unique().numel() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    prompts = [torch.randint(0, 23, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 9, 4, 17, 4)]
    for prompt, text in zip(prompts, generate(model, prompts, 7, batch=2), strict=True):
        whole = prompt
        for _ in range(7):
            whole = torch.cat([whole, model(whole[None])[0, -1:].argmax(-1)])
        assert torch.equal(text, whole[len(prompt) :])
    assert generate(model, [], 3) == []
