"""Training steps of two hybrids against the nearest models of `transformers`: `python -m experiments.bench_hybrids`.

Forward, loss, backward and a fused AdamW step in float32, one step of each in turn on one thread, in processor time.
Same widths, depths, heads and layer kinds. Gemma 3 has more norms and a GELU; Qwen3-Next gates its full attention, so
it has 4% more parameters here. Skipped where transformers is not installed. Exits 1 where a ratio is below its bar.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig
from model.lm import build
from model.mixers.table import parse_pattern

BAR = 1.5
VOCABULARY, TOKENS, WIDTH, FF, DEPTH, HEADS, KV_HEADS, HEAD, WINDOW = 1024, 2048, 256, 640, 4, 4, 2, 64, 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FF, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "tie_word_embeddings": False,
    "max_position_embeddings": TOKENS, "pad_token_id": 0, "attn_implementation": "sdpa",
}  # fmt: skip


def gemma() -> nn.Module:
    """Window and full attention in turn."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * (DEPTH // 2)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=kinds))


def qwen() -> nn.Module:
    """Gated DeltaNet and full attention in turn, every MLP dense."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS}
    linear |= {"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD}
    kinds = ["linear_attention", "full_attention"] * (DEPTH // 2)
    dense = {"mlp_only_layers": list(range(DEPTH)), "num_experts": 0}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **linear, **dense, layer_types=kinds))


def ours(pattern: str) -> nn.Module:
    layers = parse_pattern(pattern, DEPTH, "rope")
    return build(ModelConfig(VOCABULARY, TOKENS, WIDTH, HEADS, KV_HEADS, HEAD, FF, layers, qk_norm=1.0), 0)


def compare(name: str, pattern: str, other: nn.Module, rounds: int) -> bool:
    """Prints median times and the median ratio of a round; whether it meets the bar."""
    model = ours(pattern)
    forms: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
        (model, model),
        (other.train(), lambda tokens: other(input_ids=tokens, use_cache=False).logits),
    ]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True) for module, _ in forms]
    times = []
    for _ in range(rounds + 1):
        tokens, row = torch.randint(1, VOCABULARY, (1, TOKENS)), []
        for (_, logits), optimizer in zip(forms, optimizers, strict=True):
            began = time.process_time()
            optimizer.zero_grad()
            F.cross_entropy(logits(tokens)[0, :-1].float(), tokens[0, 1:]).backward()
            optimizer.step()
            row.append(time.process_time() - began)
        times.append(row)
    ratio = statistics.median(row[1] / row[0] for row in times[1:])
    mine, theirs = (1e3 * statistics.median(column) for column in zip(*times[1:], strict=True))
    sizes = [sum(p.numel() for p in module.parameters()) / 1e6 for module, _ in forms]
    print(
        f"{pattern}, T={TOKENS}: {name} ({sizes[1]:.2f}M parameters) {theirs:.0f} ms, ours ({sizes[0]:.2f}M) "
        f"{mine:.0f} ms, ratio {ratio:.2f} (bar {BAR:g})"
    )
    return ratio >= BAR


def main(rounds: Annotated[int, typer.Option(help="steps of each model, in turn")] = 5) -> None:
    """Each model's median step, and how many times as long as ours the other takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        others = [("Gemma 3", f"swa-{WINDOW} full", gemma()), ("Qwen3-Next", "gdn full", qwen())]
    except ImportError as error:
        print(f"hybrids against transformers: skipped, {error}")
        return
    met = [compare(name, pattern, other, rounds) for name, pattern, other in others]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    typer.run(main)
