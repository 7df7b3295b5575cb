"""Questions about sessions: who gets one, what a lost one looks like, how long one lives, and what marks it."""

from __future__ import annotations

import asyncio
import re
import uuid

from epochgate.probe.client import OLDER_VERSIONS, Exchange, Session, response_to
from epochgate.probe.findings import Check, Finding, plain
from epochgate.probe.survey import Survey, ToolCall, describe, lookalike, meta_tokens, tokens

_CALL = 10.0  # seconds that the named tool may take
_SPEAKS_OF_SESSION = re.compile(rb"session|not initialized|uninitialized", re.IGNORECASE)


async def ask_protocol(survey: Survey) -> list[Finding]:
    """Which protocol versions are spoken; opens the second session too, and asks whether their ids differ."""
    spoken = {survey.main.version}
    for version in OLDER_VERSIONS:
        opened = await survey.client.initialize(version)
        if isinstance(opened, Session):
            spoken.add(opened.version)
            survey.other = survey.other or opened
            if opened is not survey.other and opened.id is not None:
                await survey.client.delete(opened)
    info = survey.main.result.get("serverInfo")
    if isinstance(info, dict):
        survey.facts.server = printable(f"{info.get('name', '')} {info.get('version', '')}".strip())
    return [Finding(Check.PROTOCOL, "sessions", ", ".join(sorted(spoken, reverse=True)))]


async def ask_session_id(survey: Survey) -> list[Finding]:
    """Whether session ids are issued, and whether each session has one of its own."""
    if survey.main.id is None:
        return [Finding(Check.SESSION, "stateless", "no Mcp-Session-Id on the answer to initialize")]
    second = await survey.client.initialize()
    if not isinstance(second, Session):
        return [Finding(Check.SESSION, "not found out", f"a second initialize was answered {describe(second)}")]
    survey.other = second
    if second.id == survey.main.id:
        return [Finding(Check.SESSION, "repeated", "two sessions, one id")]
    return [Finding(Check.SESSION, "unique", f"{len(survey.main.id)} characters, different in two sessions")]


async def ask_missing(survey: Survey) -> list[Finding]:
    """What a request without a session id is answered."""
    answer = await survey.client.ask(survey.client.request("ping"), session=None, version=survey.main.version)
    return [Finding(Check.MISSING, "accepted" if answer.status < 300 else "refused", describe(answer))]


async def ask_unknown(survey: Survey) -> list[Finding]:
    """What a session id that was never issued is answered."""
    unknown = lookalike(survey.main.id or str(uuid.uuid4()))
    return [await _lost(survey, Check.UNKNOWN, unknown, survey.main.version)]


async def ask_deleted(survey: Survey) -> list[Finding]:
    """What the id of a deleted session is answered."""
    session = await survey.client.initialize()
    if not isinstance(session, Session) or session.id is None:
        return [Finding(Check.DELETED, "not found out", "no further session was granted")]
    status = await survey.client.delete(session)
    if status >= 300:
        return [Finding(Check.DELETED, "not deletable", f"DELETE: HTTP {status}")]
    return [await _lost(survey, Check.DELETED, session.id, session.version)]


async def _lost(survey: Survey, check: Check, session_id: str, version: str) -> Finding:
    message = survey.client.request("ping")
    post = await survey.client.ask(message, session=session_id, version=version)
    seen = f"POST: {describe(post)}"
    async with survey.client.send("GET", session=session_id, version=version) as get:
        await get.read(0.2 if get.streaming else 1.0)
    return Finding(check, _shape(post, message["id"]), f"{seen}; GET: {describe(get)}")


def _shape(answer: Exchange, request_id: object) -> str:
    """How a lost session was told: the key of a meaning (N1)."""
    error = response_to(answer, request_id).get("error")
    if answer.status < 300:
        return "other" if error else "accepted"
    if answer.status in (401, 403):
        return "forbidden"
    if answer.status == 404:
        body = answer.json
        error = body.get("error") if isinstance(body, dict) else None
        return "other" if isinstance(error, dict) and error.get("code") == -32601 else "404"
    if answer.status == 400 and _SPEAKS_OF_SESSION.search(answer.body):
        return "400"
    return "other"


async def ask_answers(survey: Survey) -> list[Finding]:
    """Whether ordinary requests are answered by streams or by JSON; what comes is kept for later questions."""
    first = ("tools/list", *["ping"] * 6)
    kinds = [_kind(await survey.ask(survey.main, survey.client.request(method))) for method in first]
    if survey.other is not None:  # between two streams of the first session: a counter that both share shows
        kinds.append(_kind(await survey.ask(survey.other, survey.client.request("ping"))))
        kinds.append(_kind(await survey.ask(survey.main, survey.client.request("ping"))))
    seen = ", ".join(f"{kinds.count(kind)} by {kind}" for kind in sorted(set(kinds)))
    if survey.tool is not None:
        kind, told = await _call(survey, survey.tool)
        kinds.append(kind)
        seen += f"; the named tool by {told}"
    outcome = "failed" if "failed" in kinds else kinds[0] if len(set(kinds)) == 1 else "mixed"
    return [Finding(Check.ANSWERS, outcome, seen)]


def _kind(answer: Exchange) -> str:
    return "stream" if answer.streaming else "json" if answer.status == 200 else "failed"


async def _call(survey: Survey, tool: ToolCall) -> tuple[str, str]:
    """Call the named tool undisturbed; returns how it was answered, as a kind and in words."""
    message = tool_call(survey, tool)
    begin = asyncio.get_running_loop().time()
    answer = await survey.ask(survey.main, message, seconds=_CALL)
    survey.call_seconds = asyncio.get_running_loop().time() - begin
    if answer.streaming:
        survey.call = survey.streams[-1]
        survey.facts.polling = answer.ended and not survey.call.answered
    response = response_to(answer, message["id"])
    error, result = response.get("error"), response.get("result")
    if isinstance(error, dict) or (isinstance(result, dict) and result.get("isError")):
        return "failed", "an error: check its name and arguments"
    if answer.streaming and not (survey.call and survey.call.answered) and not answer.ended:
        return "stream", f"a stream that did not end in {_CALL:g} s"
    return _kind(answer), f"{_kind(answer)} in {survey.call_seconds:.1f} s"


def tool_call(survey: Survey, tool: ToolCall) -> dict[str, object]:
    """A call of the named tool that asks for progress notifications."""
    message = survey.client.request("tools/call")
    params = {"name": tool.name, "arguments": tool.arguments, "_meta": {"progressToken": message["id"]}}
    return message | {"params": params}


async def ask_epoch(survey: Survey) -> list[Finding]:
    """Whether something marks the session, where, and whether it stays the same within one."""
    traffic = [(session, session.opening) for session in (survey.main, survey.other) if session] + survey.traffic
    values: dict[tuple[str, str], dict[str | None, set[str]]] = {}
    for session, exchange in traffic:
        for kind, name, value in tokens(exchange):
            values.setdefault((kind, name), {}).setdefault(session.id, set()).add(value)
    if not values:
        return [Finding(Check.EPOCH, "none", "no member of _meta and no response header with `epoch` in its name")]
    findings = []
    for (kind, name), sessions in values.items():
        where = f"_meta member {printable(name)}" if kind == "meta" else f"response header {printable(name)}"
        if any(len(found) > 1 for found in sessions.values()):
            findings.append(Finding(Check.EPOCH, "unstable", where))
            continue
        (survey.facts.meta_keys if kind == "meta" else survey.facts.token_headers).append(name)
        findings.append(Finding(Check.EPOCH, "present" if _everywhere(survey, kind, name) else "partial", where))
    return findings


def _everywhere(survey: Survey, kind: str, name: str) -> bool:
    streams = [exchange for _, exchange in survey.traffic if exchange.streaming]
    if kind == "header":
        return all(name in exchange.headers for exchange in streams)
    return all(any(key == name for _, key, _ in meta_tokens(e.message)) for x in streams for e in x.messages)


async def ask_idle(survey: Survey) -> list[Finding]:
    """What becomes of a session that is left alone, and of a standalone stream that has nothing to say."""
    quiet, open_ = await survey.client.initialize(), await survey.client.initialize()
    if not isinstance(quiet, Session) or not isinstance(open_, Session):
        return [Finding(Check.IDLE, "not found out", "no further session was granted")]
    begin = asyncio.get_running_loop().time()
    async with survey.client.send("GET", session=open_.id, version=open_.version) as get:
        await get.read(survey.idle)
        ended_after = asyncio.get_running_loop().time() - begin if get.ended else None
    await asyncio.sleep(begin + survey.idle - asyncio.get_running_loop().time())
    pong = await survey.client.ping(quiet)
    if not get.streaming:
        stream = f"no standalone stream (HTTP {get.status})"
    elif ended_after is not None:
        stream = f"its standalone stream was closed by the server after {ended_after:.1f} s"
    else:
        stream = f"a standalone stream stayed open with {get.comments} comments"
    return [Finding(Check.IDLE, "alive" if pong.status == 200 else "lost", f"idle for {survey.idle:g} s: {stream}")]


def printable(text: str) -> str:
    """A server's own words, cut short and without control characters."""
    return plain(text[:80])
