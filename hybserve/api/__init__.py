"""The HTTP front: OpenAI's completions and chat over one link to the text role.

A request passes ``protocol`` (deadlines and size limits of a connection), ``front`` (path folding, keys, one error
shape, one log line), ``routes``, ``body`` and ``jsonbody`` (strict JSON), ``schema`` (an ``Order``, every value in
range), ``bridge`` (uids, queues, the link) and ``generation`` (whole answers and streams).

What clients meet beyond OpenAI's own description:

* Unknown fields are ignored and listed in ``x-hybserve-ignored``; fields that would change the answer and are not
  there yet are refused (400 ``unsupported_parameter``) unless they have the value that asks for nothing.
* ``null`` is absent. Integers are JSON integers within 64 bits, never ``1.0`` or ``true``; a key must not stand twice.
* A temperature below 0.0001 is greedy; ``top_k`` of -1, 0 or beyond the vocabulary is off; negative seeds are folded
  into 63 bits. ``max_tokens`` absent: 16 for completions, the rest of the context for chat.
* ``usage`` in a stream comes only when asked for, as a last chunk without choices; with ``continuous_usage_stats``
  every chunk but the one with ``finish_reason`` carries the counts so far.
* ``return_token_ids``: ``prompt_token_ids`` stands once, at the top; with several prompts in the first choice of each.
* ``POST …/render`` behind both generating routes takes the same body and generates nothing: the text, the ids, and
  which prefix of them is cached. ``POST /flush_cache`` is the admin's.
* Top-level ``hybserve`` beside ``usage`` tells what the cache did and where the time went.
"""
