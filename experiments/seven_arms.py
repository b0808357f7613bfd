"""Seven ways to mix tokens at equal parameters: who finds facts again, and after how many tokens? On a laptop.

Full attention alone, and full attention in turn with each of six efficient mixers: windows of three widths, Lightning
attention, Mamba-2, Gated DeltaNet (the arms of arXiv 2606.15378, at about 143,000 parameters). The paper's windows of
128, 512 and 2048 tokens are 8, 32 and 128 here, as its texts of 16,384 tokens are 256.
"""

from analysis.measures.recall import RecallByDistance
from analysis.measures.retrieval_heads import RetrievalHeads
from analysis.measures.validation import ValidationLoss
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Backbone, Evaluations, Question, Size, Study

STEPS = 900
TOKENS_A_STEP = 8 * 256

study = Study(
    name="seven_arms",
    arms=[
        Arm(name="full", pattern="full"),
        *(
            Arm(name=mixer, pattern=f"{mixer} full")
            for mixer in ("swa-8", "swa-32", "swa-128", "lightning", "mamba2", "gdn")
        ),
    ],
    sizes=[Size(name="tiny", d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=128)],
    budgets=[STEPS * TOKENS_A_STEP],
    seeds=[0, 1],
    data={"recall": RecallLanguage(context=256, g_min=4)},
    recipe=Recipe(learning_rate=0.02, adam_learning_rate=5e-3, batch_size=8, warmup_steps=10, decay_fraction=0.3),
    backbone=Backbone(
        mlp="relu2",
        norm_gain=False,
        qk_norm=1.5,
        key_shift=True,
        # Heads and states as wide as the attention heads are; the MLPs beside them make up for the parameters.
        mixers={"mamba2": {"head_dim": 16, "d_state": 16}},
        match_parameters=True,
    ),
    measures=[ValidationLoss(), RecallByDistance(), RetrievalHeads()],
    evaluations=Evaluations(every_tokens=60 * TOKENS_A_STEP, checkpoints=6),
    question=Question(capability="recall/accuracy/beyond-128", reference="full"),
    notes=[
        "Key shift: every softmax layer adds a learned multiple of the previous token's key to each key. Without it "
        "these small models learnt no recall in 4.9 M tokens; the paper's models have no such shift.",
        "Two seeds an arm show directions, not intervals worth relying on; give more seeds for those.",
        "All arms train at one learning rate, chosen for attention: the recurrent mixers may want another.",
        "Trained and asked at one length (256 tokens): nothing is said about longer texts than those trained on.",
        "The held-out facts are each stated once and asked once, three in four at distances drawn uniformly and one in "
        "four log-uniformly, so that the nearest bucket is populated too; chance is 1/32.",
    ],
)
