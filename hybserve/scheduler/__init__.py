"""The scheduler role: decides which tokens the next step computes and who holds which page and slot. No torch.

    request    a request and its choices (sequences)       queues     the total order, and who waits
    admission  who is refused, what letting in takes       chunking   where a prefill chunk ends
    running    who is on the device and holds what         step       the next StepPlan, column by column
    prefix     what is reused, exported and published
    settle     what came back, as columns                  books      ledger of requests, metrics
    integrity  every promise recounted                     scheduler  all of it together, pure: no I/O
    loop       settle n-1, plan and launch n+1, wait for n main       the role: heartbeat, stop, loss

One total order (priority, arrival, uid, choice) rules admission, page growth and parking: pages are dealt from its
front, sequences are parked from its end, and nothing that waits is passed by what stands behind it. So the first in
the order always has what it needs, ends in bounded time, and the next becomes the first.
"""
