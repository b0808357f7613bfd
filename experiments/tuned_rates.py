"""Does the learning rate that suits full attention suit a window of 8? Minutes on a laptop.

Each arm is tuned at two sizes, by eight trials each. The third size takes the law LR(N) of its arm, as one too large
to tune would. Then every cell trains at a rate of its own, and no arm is judged at one that suits another.
"""

from analysis.measures.validation import ValidationLoss
from orchestrator.data.text import TextCorpus
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Backbone, Evaluations, Size, Study, Tuning

TOKENS_A_STEP = 4 * 320


def size(name: str, d_model: int) -> Size:
    return Size(
        name=name, d_model=d_model, n_layers=2, n_heads=d_model // 16, n_kv_heads=d_model // 16, head_dim=16,
        d_ff=2 * d_model,
    )  # fmt: skip


study = Study(
    name="tuned_rates",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full")],
    sizes=[size("d32", 32), size("d64", 64), size("d128", 128)],
    budgets=[200 * TOKENS_A_STEP],
    seeds=[0],
    data={"text": TextCorpus(folders=(), context=320, vocab_size=257)},
    recipe=Recipe(learning_rate=0.02, adam_learning_rate=5e-3, batch_size=4),
    backbone=Backbone(mlp="relu2", norm_gain=False, qk_norm=1.5, key_shift=True),
    tuning=Tuning(low=1e-3, high=0.2, trials=8, budget=100 * TOKENS_A_STEP, sizes=("d32", "d64")),
    measures=[ValidationLoss(documents=64)],
    evaluations=Evaluations(every_tokens=50 * TOKENS_A_STEP, checkpoints=2),
    notes=[
        "AdamW's rate, for embeddings, head and gains, is a quarter of Muon's throughout: the two are tuned as one.",
        "Trials are half as long as the cells: a rate that suits a short training can be high for a long one.",
        "Two tuned sizes fix a line and leave nothing to judge it by: the interval of the third size's rate comes from "
        "the intervals of the two alone.",
    ],
)
