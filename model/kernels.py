"""Which kernel computes attention: the only file that chooses one."""

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, window: int | None) -> Tensor:
    """Causal softmax attention, scores over sqrt(K); key j is visible to query i iff 0 <= i-j < window. [B, H, T, K]

    H query heads share G key heads in runs of H/G. window None sees every earlier token.
    """
    length = query_BHTK.shape[2]
    grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query_BHTK, key_BGTK, value_BGTK, is_causal=True, enable_gqa=grouped)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = ((distance >= 0) & (distance < window)).to(query_BHTK.device)
    return F.scaled_dot_product_attention(query_BHTK, key_BGTK, value_BGTK, attn_mask=mask, enable_gqa=grouped)
