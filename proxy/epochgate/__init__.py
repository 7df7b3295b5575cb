"""epochgate: a reverse proxy for MCP over Streamable HTTP that lets no spliced stream through.

The house:

    guard/     decides: SSE framing, records, the verdict on a resume, refusals. No I/O, no clock.
    relay/     moves bytes: connections to both sides, one request at a time, held streams.
    ledger/    remembers: where records live between requests, restarts and replicas.
    admin/     the second listener: health, metrics, what was decided and why.
    workers/   several processes that serve, and the one that supervises them.
    probe/     `epochgate probe`: asks a server what it can promise.
    demo/      `epochgate demo`: the incident, with and without the proxy.
    settings   every key of the configuration and its default.
    errors     every exception, and whose fault it is.
    cli        the verbs.
"""

__version__ = "0.1.0"
