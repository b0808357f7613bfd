"""paper_design.py on a laptop of two cores, in less than an hour."""

from experiments.paper import LAPTOP
from experiments.paper_design import study_at

study = study_at(LAPTOP)
