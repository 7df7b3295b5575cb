"""Call one tool of an MCP server, and never trust a resumed stream that may belong to another session.

    python guarded_client.py http://127.0.0.1:3000/mcp NAME '{"some": "arguments"}'

A cut stream is resumed with `Last-Event-ID`. Each event of the resumed stream must carry the session epoch that was
captured at `initialize`, and the next event id; else the call is started over in a new session.
"""

# ruff: noqa: INP001, T201  a script that prints

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import aiohttp
from aiohttp_sse_client.client import READY_STATE_CONNECTING, EventSource, MessageEvent

from epochgate.guard.epoch import SessionEpoch, StreamResumeDivergence, validate_resumed_event

VERSION = "2025-11-25"
CALL = 2  # the JSON-RPC id of the call


class StreamCutError(Exception):
    """The stream ended before the response."""


async def accept_both(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """aiohttp-sse-client asks for streams only, but an MCP server wants to be offered JSON as well."""
    if request.method == "POST":
        request.headers["Accept"] = "application/json, text/event-stream"
    return await handler(request)


def connect(
    http: aiohttp.ClientSession, url: str, method: str, headers: dict[str, str], message: Any = None
) -> EventSource:
    """One connection. The client library would reconnect by itself, and repeat a POST: `stop` keeps it from that."""

    def stop() -> None:
        if source.ready_state == READY_STATE_CONNECTING:
            raise StreamCutError

    source = EventSource(
        url, {"method": method}, session=http, max_connect_retry=0, on_error=stop, headers=dict(headers), json=message
    )
    return source


def epoch_of(message: dict[str, Any]) -> dict[str, Any]:
    """The `_meta` of a message, wherever it stands."""
    for holder in (message.get("params"), message.get("result"), message):
        if isinstance(holder, dict) and "_meta" in holder:
            return holder["_meta"]
    return {}


async def initialize(http: aiohttp.ClientSession, url: str) -> SessionEpoch:
    """Open a session, and capture its epoch."""
    client = {"name": "guarded-client", "version": "1"}
    params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    async with http.post(url, json=message) as response:
        response.raise_for_status()
        text = await response.text()
        if response.content_type == "text/event-stream":
            text = next(line[5:] for line in text.splitlines() if line.startswith("data:") and line[5:].strip())
        session = SessionEpoch(response.headers["Mcp-Session-Id"], epoch_of(json.loads(text)).get("session_epoch"))
    headers = {"Mcp-Session-Id": session.session_id, "MCP-Protocol-Version": VERSION}
    async with http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers):
        return session


async def call(http: aiohttp.ClientSession, url: str, name: str, arguments: Any, pause: float) -> dict[str, Any]:
    """Call a tool in a new session and follow its stream over any number of cuts; returns the response.

    Raises:
        StreamResumeDivergence: the resumed stream does not provably belong to the session.
        ConnectionError: the server refused the call or the resume.
    """
    session = await initialize(http, url)
    headers = {"Mcp-Session-Id": session.session_id, "MCP-Protocol-Version": VERSION}
    params = {"name": name, "arguments": arguments, "_meta": {"progressToken": "progress"}}
    message = {"jsonrpc": "2.0", "id": CALL, "method": "tools/call", "params": params}
    source = connect(http, url, "POST", headers, message)
    cursor = ""  # the id of the last event that was accepted
    resumed = False
    while True:
        try:
            async with source:
                async for event in source:
                    if event.data:
                        received = json.loads(event.data)
                        if resumed:
                            validate_resumed_event(session, as_mapping(event, received), cursor)
                        if received.get("id") == CALL and received.get("method") is None:
                            return received
                        print(f"event: {event.data}")
                    if event.data or not resumed:  # an empty event of a resumed stream moves no cursor
                        cursor = event.last_event_id
        except (StreamCutError, aiohttp.ClientError):
            if not cursor:
                raise
        await asyncio.sleep(pause)
        print("the stream was cut; resuming")
        resumed = True
        source = connect(http, url, "GET", headers | {"Last-Event-ID": cursor})


def as_mapping(event: MessageEvent, message: dict[str, Any]) -> dict[str, Any]:
    """An event as the guard reads it."""
    return {"id": event.last_event_id, "_meta": epoch_of(message)}


async def main() -> int:
    """Call the tool, from the start again where a resume cannot be trusted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("tool")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before a resume")
    options = parser.parse_args()
    async with aiohttp.ClientSession(middlewares=[accept_both]) as http:
        for _ in range(3):
            try:
                response = await call(http, options.url, options.tool, options.arguments, options.pause)
            except StreamResumeDivergence as divergence:
                print(f"starting over: {divergence}")
            except ConnectionError:
                print("starting over: the server refused to resume")
            else:
                print(f"response: {json.dumps(response)}")
                return 0
    print("gave up after three sessions", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
