"""What may be taken from a trained model while it reads: heads, and the past of recurrent layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn

from model.limits import SoftmaxHeads, softmax_heads
from model.lm import LanguageModel
from model.mixers.attention import Attention
from model.mixers.heads import HeadWise
from model.mixers.mixer import Angles


@contextmanager
def ablated(
    model: LanguageModel, heads: Mapping[int, Sequence[int]], by: Literal["zero", "mean"] = "zero"
) -> Iterator[None]:
    """Within the context, the outputs of softmax heads are 0, or their mean over the batch and its tokens.

    heads: numbers by layer, as `model.limits.softmax_heads` counts them. Raises ValueError for one that is not there.
    """
    known = softmax_heads(model)
    with ExitStack() as hooks:
        for layer, numbers in heads.items():
            for number in numbers:
                part = next((part for part in known.get(layer, []) if number in part.heads), None)
                if part is None:
                    raise ValueError(f"heads: layer {layer} has no softmax head {number}; see softmax_heads")
                hooks.enter_context(_without(part, number, by))
        yield


@contextmanager
def _without(part: SoftmaxHeads, number: int, by: Literal["zero", "mean"]) -> Iterator[None]:
    width = part.mixer.head_dim
    own = slice((number - part.heads.start) * width, (number - part.heads.start + 1) * width)

    def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        joined = inputs[0].clone()
        joined[..., own] = 0 if by == "zero" else joined[..., own].mean((0, 1))
        return (joined,)

    hook = part.mixer.output.register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def forgetful(model: LanguageModel, window: int) -> Iterator[None]:
    """Within the context, recurrent layers know the last `window` tokens only, the current one counted: each position
    is read anew from an empty state that far back, at `window` times the cost. Softmax layers are left as they are.

    Raises ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"window: {window} is not positive; a window counts the current token, so give 1 or more")
    mixers = [mixer for mixer in _mixers(model) if not isinstance(mixer, Attention)]
    plain = [mixer.forward for mixer in mixers]
    try:
        for mixer, forward in zip(mixers, plain, strict=True):
            mixer.forward = _Restarted(forward, window)
        yield
    finally:
        for mixer in mixers:
            del mixer.forward  # the class's own shows again


class _Restarted:
    def __init__(self, forward: Callable[..., Tensor], window: int) -> None:
        self.mix, self.window = forward, window

    def __call__(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        batch, length, width = x_BTD.shape
        first = self.mix(x_BTD[:, : self.window], _first(angles, self.window))
        if length <= self.window:
            return first
        # Only distances between positions count, so that the first positions' angles serve every window.
        windows = x_BTD.unfold(1, self.window, 1)[:, 1:].transpose(2, 3).reshape(-1, self.window, width)
        last = self.mix(windows, _first(angles, self.window))[:, -1]
        return torch.cat([first, last.view(batch, length - self.window, width)], 1)


def _first(angles: Angles, length: int) -> Angles:
    return {width: (cos[:length], sin[:length]) for width, (cos, sin) in angles.items()}


def _mixers(model: LanguageModel) -> list[nn.Module]:
    """Every layer's mixer, and in place of those that share its heads, these."""
    mixers = [cast(nn.Module, block.mixer) for block in model.blocks]
    return [part for mixer in mixers for part in (mixer.parts if isinstance(mixer, HeadWise) else [mixer])]
