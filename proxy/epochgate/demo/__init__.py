"""`epochgate demo`: the incident of a spliced stream, first without the proxy and then with it.

server     the faulty MCP server: its stream buffer outlives its sessions
client     an ordinary MCP client: resumes after a cut, starts over on a 404
stage      `epochgate serve` as a process of its own
page       what is printed, in 80 columns
play       the acts, and whether they showed what they claim
"""
