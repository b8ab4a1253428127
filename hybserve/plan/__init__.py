"""The only authority over bytes: every pool on every rank is sized here, before any weight is loaded.

    spec + deployment + memory facts
      └─ sizing   frame (ranks, dtypes, device) → shape (the four numbers) → pages and slots
           ├─ layout   bytes of a page and of a slot, cell by cell; the runner's views are made from the same figures
           ├─ costs    bytes of a step: activations, scan scratch, logits, workspaces
           └─ floors   the minimum that lets every admitted request finish
      └─ edits    where it does not fit: the smallest changes that would, each verified by sizing again
      └─ planner  → result.Plan, frozen;  report: for people, for scripts

Stated numbers are demand: they are kept or refused. Defaulted ones are lowered to what fits, rung by rung, and every
number that nobody stated is listed with its reason. What lies above the floors is retention, split between KV and
checkpoints so that the retained tokens have a checkpoint at every ``cache.checkpoint_every``.
"""
