"""How a study gets done: cells, plan, ledger, fleet, training job, record, tracking."""
