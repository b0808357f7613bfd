"""Which kernel computes attention and recurrences: the only file that chooses one, or imports a library of them.

All kernels of attention compute the same: softmax over scores/sqrt(K), where key j is visible to query i iff
0 <= i-j < window (the window counts the current token) or j < sinks and j <= i. A kernel that cannot honour a setting
refuses it and says why.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.config import Layer, ModelConfig
from model.local_attention import HALF, local_attention, visible

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None
try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla
except ImportError:
    chunk_gated_delta_rule = chunk_simple_gla = None

SOFTMAX = ("full", "swa")  # mixers whose kernel is one of KERNELS
SINK_WIDTH = 8  # what a learned sink adds to a head's width: half-precision kernels want multiples of 8


@dataclass(frozen=True)
class Setting:
    """What a kernel is asked for. device: its type. width: of a head.

    window: tokens a query sees, fewer than the sequence has, or None for all; sinks: first tokens it sees besides.
    """

    device: str
    dtype: torch.dtype
    width: int
    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class Kernel:
    """compute(query [B, H, T, K], key [B, G, T, K], value [B, G, T, K], window, sinks) → [B, H, T, K].

    refusal: why the kernel cannot do a setting, or None where it can.
    """

    compute: Callable[[Tensor, Tensor, Tensor, int | None, int], Tensor]
    refusal: Callable[[Setting], str | None]


def attend(
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    window: int | None,
    sinks: int = 0,
    kernel: str | None = None,
) -> Tensor:
    """Causal softmax attention, [B, H, T, K]; H query heads share G key heads in runs of H/G.

    window None sees every earlier token. kernel: a name of KERNELS, or None for the first that does not refuse.
    Raises ValueError where the named kernel refuses.
    """
    # Under autocast the values come in half precision, the normed and rotated queries and keys in float32.
    query_BHTK, key_BGTK = query_BHTK.to(value_BGTK.dtype), key_BGTK.to(value_BGTK.dtype)
    if window is not None and window >= query_BHTK.shape[2]:
        window = None
    setting = Setting(query_BHTK.device.type, query_BHTK.dtype, query_BHTK.shape[3], window, sinks)
    name, _ = choose(setting, kernel)
    return KERNELS[name].compute(query_BHTK, key_BGTK, value_BGTK, window, sinks)


def choose(setting: Setting, kernel: str | None = None) -> tuple[str, dict[str, str]]:
    """(the kernel of a setting, why each one before it refuses); as `attend` for `kernel` and its errors."""
    refused: dict[str, str] = {}
    for name, candidate in KERNELS.items():
        if kernel not in (None, name):
            continue
        reason = candidate.refusal(setting)
        if reason is None:
            return name, refused
        if kernel is not None:
            raise ValueError(f"kernel: {kernel} refuses, {reason}; leave the choice open or take another")
        refused[name] = reason
    raise ValueError(f"kernel: {kernel!r} is not known; choose from {', '.join(KERNELS)}")


def chosen(config: ModelConfig, device: str, dtype: torch.dtype) -> dict[str, tuple[str, dict[str, str]]]:
    """Pattern word → (kernel, why each one before it refuses) of a decoder's layers on its training sequences.

    Recurrent mixers have two: flash-linear-attention, and chunks in plain torch.
    """
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for layer in config.parts():
        window = layer.window if layer.window is not None and layer.window < config.context else None
        if layer.mixer in SOFTMAX:
            width = config.head_dim + (SINK_WIDTH if config.sink_logit else 0)
            sinks = layer.sinks + config.sink_logit
            found[layer.word] = choose(Setting(device, dtype, width, window, sinks))
        else:
            reason = fla_refusal(Setting(device, dtype, _key_width(config, layer)))
            found[layer.word] = ("fla", {}) if reason is None else ("chunks", {"fla": reason})
    return found


def _key_width(config: ModelConfig, layer: Layer) -> int:
    settings = layer.settings
    return getattr(settings, "d_state", None) or getattr(settings, "key_dim", None) or config.head_dim


def fla_refusal(setting: Setting) -> str | None:
    """Why flash-linear-attention cannot compute a recurrence with keys of a width, or None where it can."""
    if chunk_gated_delta_rule is None:
        return "not installed"
    if setting.device != "cuda" or setting.dtype not in HALF:
        return f"it needs bfloat16 or float16 on CUDA, not {setting.dtype} on {setting.device}"
    return f"keys {setting.width} wide are above 256" if setting.width > 256 else None


def fla_takes(key_BTHK: Tensor, value_BTHV: Tensor) -> bool:
    """Whether flash-linear-attention computes a recurrence with these; the values' type counts, as in `attend`."""
    setting = Setting(value_BTHV.device.type, value_BTHV.dtype, key_BTHK.shape[-1])
    return fla_refusal(setting) is None


def fla_linear_attention(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `model.mixers.chunks.chunked_linear_attention` gives, by flash-linear-attention's simple_gla."""
    ratio = v_BTHV.shape[2] // k_BTGK.shape[2]
    # It knows no shared keys.
    q, k = (x.to(v_BTHV.dtype).repeat_interleave(ratio, 2) if ratio > 1 else x for x in (q_BTGK, k_BTGK))
    # Its default scale is 1/sqrt(K): the queries here are scaled already.
    return chunk_simple_gla(
        q.to(v_BTHV.dtype), k.to(v_BTHV.dtype), v_BTHV, g_BTH.float(),
        scale=1.0, initial_state=state_BHKV, output_final_state=True,
    )  # fmt: skip


def fla_gated_delta_rule(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `model.mixers.gated_deltanet.chunked_gated_delta_rule` gives, by flash-linear-attention."""
    q, k, beta = (x.to(v_BTHV.dtype) for x in (q_BTHK, k_BTHK, beta_BTH))
    return chunk_gated_delta_rule(
        q, k, v_BTHV, g_BTH.float(), beta, scale=1.0, initial_state=state_BHKV, output_final_state=True
    )


def _flash_refusal(setting: Setting) -> str | None:
    if flash_attn_func is None:
        return "not installed"
    if setting.device != "cuda" or setting.dtype not in HALF:
        return f"it needs bfloat16 or float16 on CUDA, not {setting.dtype} on {setting.device}"
    if setting.width > 256:
        return f"head_dim {setting.width} is above 256"
    return "it has no sinks" if setting.sinks and setting.window is not None else None


def _flash(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    # Its window is a distance, both ends included: (w-1, 0) is the w of this file.
    reach = (-1, -1) if window is None else (window - 1, 0)
    return flash_attn_func(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=True, window_size=reach
    ).transpose(1, 2)


def _causal_refusal(setting: Setting) -> str | None:
    return None if setting.window is None else f"it has no window, and {setting.window} is shorter than the sequence"


def _causal(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _flex_refusal(setting: Setting) -> str | None:
    if setting.device != "cuda":
        return f"its backward pass needs CUDA, not {setting.device}"
    if setting.dtype not in (*HALF, torch.float32):
        return f"it needs bfloat16, float16 or float32, not {setting.dtype}"
    return f"head_dim {setting.width} is below 16" if setting.width < 16 else None


def _flex(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    mask = block_mask(query.shape[2], window, sinks, query.device)
    return _compiled_flex()(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Uncompiled it forms the T×T scores.
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=16)
def block_mask(length: int, window: int | None, sinks: int, device: torch.device) -> BlockMask:
    """What a query sees, in the blocks FlexAttention skips by. Kept: making one forms a T×T mask."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        past = query >= key
        return past if window is None else past & ((query - key < window) | (key < sinks))

    return create_block_mask(seen, None, None, length, length, device=device)


def _blocks_refusal(setting: Setting) -> str | None:
    return None if setting.window is not None else "it needs a window shorter than the sequence"


def _blocks(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    assert window is not None
    return local_attention(query, key, value, window, sinks)


def _masked(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    position = torch.arange(query.shape[2], device=query.device)
    grouped = query.shape[1] != key.shape[1]
    mask = visible(position, position, window, sinks)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


KERNELS = {
    "flash-attn": Kernel(_flash, _flash_refusal),
    "causal": Kernel(_causal, _causal_refusal),
    "flex": Kernel(_flex, _flex_refusal),
    "blocks": Kernel(_blocks, _blocks_refusal),
    # Honours everything, at the cost of a full T×T product: for limits set at evaluation, never chosen for training.
    "masked": Kernel(_masked, lambda setting: None),
}
