"""What a designer of hybrids may choose: NoPE on the full layers by window, 1:1 or 1:3, layers or heads in turn.

After arXiv 2606.15378: a small window with NoPE on the full layers alone does best. Its extension of the context from
16K to 32K after training is left out: no kind of job continues a training at another length.
paper_design_laptop.py is the same study at a laptop's scale.
"""

from analysis.measures.longppl import LongPPL
from analysis.measures.recall import RecallByDistance
from analysis.measures.validation import ValidationLoss
from experiments.paper import PAPER, Scale
from orchestrator.finding import Difference, EndLevel, Finding, SpeedRatio
from orchestrator.study import Arm, Question, Study


def study_at(scale: Scale) -> Study:
    small = scale.hybrid(scale.windows[0])
    rope, nope = ([scale.hybrid(window, without) for window in scale.windows] for without in (False, True))
    sparse = Arm(name=f"{small.name}-3-to-1", pattern=f"{small.name} {small.name} {small.name} full")
    heads = Arm(name=f"{small.name}-heads", pattern=f"{small.name}+full")
    return Study(
        name=f"paper_design{scale.suffix}",
        arms=[*rope, *nope, sparse, heads],
        sizes=[scale.size],
        budgets=[scale.budget],
        seeds=scale.repeats,
        data={"recall": scale.data},
        recipe=scale.recipe,
        backbone=scale.backbone,
        measures=[ValidationLoss(documents=32), RecallByDistance(edges=scale.windows), LongPPL(documents=16)],
        machine=scale.machine_of(scale.size),
        question=Question(capability=scale.capability, reference=small.name),
        findings=[
            *(
                Finding(
                    claim=f"NoPE on the full layers brings recall earlier with a window of {window}",
                    statistic=SpeedRatio(arm=without.name, against=with_rope.name),
                    below=1,
                    paper="S5, about 100B tokens, window 128: RULER-NIAH 46.13 to 52.88, LongBench 65.91 to 82.31"
                    if window == scale.windows[0]
                    else None,
                )
                for window, with_rope, without in zip(scale.windows, rope, nope, strict=True)
            ),
            Finding(
                claim="NoPE on the full layers brings recall earlier, over the three windows",
                statistic=SpeedRatio(arm=tuple(arm.name for arm in nope), against=tuple(arm.name for arm in rope)),
                below=1,
            ),
            Finding(
                claim="NoPE on the full layers leaves the loss of the smallest window where it is, within 0.02",
                statistic=Difference(metric="validation/loss", arm=nope[0].name, against=small.name),
                above=-0.02,
                below=0.02,
                paper="short average 41.31 to 41.32",
            ),
            Finding(
                claim="One full layer in four instead of two needs more tokens",
                statistic=SpeedRatio(arm=sparse.name, against=small.name),
                above=1,
            ),
            Finding(
                claim="One full layer in four ends at the same level within 5 points",
                statistic=EndLevel(arm=sparse.name, against=small.name),
                above=-0.05,
                below=0.05,
            ),
            Finding(
                claim="Sharing heads of a layer takes the tokens that layers in turn take, within a fifth",
                statistic=SpeedRatio(arm=heads.name, against=small.name),
                above=0.83,
                below=1.2,
            ),
        ],
        notes=[*scale.notes, "Claims without a figure of the paper are this study's own."],
    )


study = study_at(PAPER)
