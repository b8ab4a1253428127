"""The role that computes: one runner per rank owns the weights and the byte pools, and obeys plans.

It decides nothing. A frame brings sequences and one plan; the plan names every page, slot, copy and token, and the
answer says what was sampled. Frames are executed strictly in order, when they are collected: on this backend the
device is synchronous.

    main      Runner (submit, collect) and build_runner        sequences     what is remembered of running sequences
    execute   one step: forward, logits of wanted positions    inputs        plan -> packed tokens and StepContext
    sampler   logits -> tokens and log-probabilities           device_pools  the two byte pools and their typed views
    copies    state and page copies inside the pools           memory        planned against really allocated bytes
"""
