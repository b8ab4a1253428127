"""The parent process: order of start, supervision of the roles, orderly end.

Every role is started as ``python -m hybserve.launch PARENT ROLE`` (a fresh interpreter, never a fork) and waits for its
start arguments, one JSON document over standard input; descriptors are inherited, a socketpair per link. The engine's
process comes first of all, because its imports take longest. Meanwhile ``serve`` checks configuration and plan, binds
the listening socket, and starts the others; the engine loads nothing before it is told to, and ends if it is not.

What a role is given, and owes:

* ``run`` of ``api.main`` and ``text.main`` get ``AsyncChannel``s, ``run`` of ``scheduler.main`` a ``Channel``, made
  over the inherited sockets. Every role also gets ``control``, its link to the parent: it sends ToLaunch messages
  (Loading while it starts, Ready once, a Heartbeat at least every second, Fatal before it gives up) and may receive
  FromLaunch ones. ``Drain`` goes to api alone: be not ready at once, refuse new requests, let running ones finish for
  ``server.drain_timeout`` seconds, end the rest with an error event, return. ``Stop``: end what is open with an error
  event and return now. Returning is exit code 0; a HybserveError that escapes becomes Fatal with its exit code.
* Death of the parent needs no care: every role has PR_SET_PDEATHSIG and a thread that ends the process when the
  control link breaks. SIGTERM and SIGINT are ignored in roles: only the parent decides.
* Death of a neighbour is ChannelClosed on the link to it: text and api then end every request in flight with one
  typed error, refuse new ones with 503 ``engine_unhealthy``, and stay until they are told to stop.
"""
