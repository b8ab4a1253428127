"""The role that computes: one runner per rank owns the weights and the byte pools, and obeys plans.

It decides nothing. A frame brings sequences and one plan; the plan names every page, slot, copy and token, and the
answer says what was sampled. Plans are executed strictly in order, in one of two ways:

    torch forms (CPU)     a plan is computed when its result is collected
    Triton forms (GPU)    a plan is put on the device when it comes, behind the one that runs; collecting waits for it

    main      Runner (submit, collect) and build_runner        sequences     what is remembered of running sequences
    inputs    plan -> packed tokens, positions, KV locations   device_pools  the two byte pools and their typed views
                                                               memory        planned against really allocated bytes
    torch forms                                                Triton forms
    execute   one step: forward, logits, sampling, exports     device        one step: before, body, head
    sampler   logits -> tokens and log-probabilities           graphs        captured graphs by the room they have
    copies    state and page copies inside the pools           staging       a plan as words in the device's buffer
                                                               sampling      rows that want more than the argmax
"""
