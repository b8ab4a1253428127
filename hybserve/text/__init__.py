"""The text role: everything between a client's words and the model's token ids, both ways.

    tokenize     the model's tokenizer files, checked, and encoding
    chat         conversations to text by the chat template
    anchors      places of a conversation that are worth a checkpoint
    prepare      checks of every prompt; short texts encoded on the spot
    jobs/worker  the process that renders templates and encodes long texts, and the hold on it
    detokenize   ids back to text, one token at a time
    stop         stop strings across token borders
    request      what the tokens of one request become on the way out
    lookups      questions that generate nothing: tokenize, detokenize, render, flush
    core         the role without its sockets: messages in, messages out
    main         the role's process

The loop of the role serves all running streams, so nothing long happens on it: a short text is encoded on the spot, a
template or a long text goes to the worker, where a clock and a memory limit bound it.
"""
