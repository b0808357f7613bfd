"""Real text, byte by byte: does a window of 64 delay finding a number again that was told hundreds of bytes before?

To study your own text, name its files or folders in `folders`; without any, it is what ships with the running Python.
Sentences with numbers are planted in it, so that recall by distance is measured on text no evaluator has to judge.
"""

from analysis.measures.recall import RecallByDistance
from analysis.measures.validation import ValidationLoss
from orchestrator.data.text import TextCorpus
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Backbone, Evaluations, Question, Size, Study

STEPS = 300
TOKENS_A_STEP = 8 * 512

study = Study(
    name="own_text",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa-64", pattern="swa-64 full")],
    sizes=[Size(name="small", d_model=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=256)],
    budgets=[STEPS * TOKENS_A_STEP],
    seeds=[0, 1],
    data={"text": TextCorpus(folders=(), context=512, vocab_size=257)},
    recipe=Recipe(learning_rate=0.02, adam_learning_rate=5e-3, batch_size=8),
    backbone=Backbone(mlp="relu2", norm_gain=False, qk_norm=1.5, key_shift=True),
    # A planted sentence is about 40 bytes, so no answer is nearer than that; 64 is the window.
    measures=[ValidationLoss(documents=32), RecallByDistance(documents=32, edges=(64, 256))],
    evaluations=Evaluations(every_tokens=50 * TOKENS_A_STEP, checkpoints=3),
    question=Question(capability="recall/accuracy/beyond-256", reference="full"),
    notes=[
        "A budget for a first look, a few minutes: recall of four digits need not appear in it.",
        "Key shift: every softmax layer adds a learned multiple of the previous token's key to each key.",
    ],
)
