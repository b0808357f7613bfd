"""Every token mixer by the name a pattern uses."""

from torch import nn

from model.mixers.attention import Attention

MIXERS: dict[str, type[nn.Module]] = {
    "full": Attention,
    "swa": Attention,
}
