"""What many MCP gateways are inside: an ASGI application on uvicorn, and httpx towards the server."""

from __future__ import annotations

import contextlib
import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

DROPPED = {
    b"host",
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"content-length",
    b"te",
    b"trailer",
    b"upgrade",
}
limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{sys.argv[2]}", timeout=None, limits=limits)


async def relay(request: Request) -> StreamingResponse:
    headers = [(name, value) for name, value in request.headers.raw if name not in DROPPED]
    target = request.url.path + ("?" + request.url.query if request.url.query else "")
    asked = client.build_request(request.method, target, headers=headers, content=await request.body())
    answer = await client.send(asked, stream=True)
    response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
    response.raw_headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in DROPPED]
    return response


@contextlib.asynccontextmanager
async def lifespan(_: Starlette):
    async with client:
        yield


app = Starlette(routes=[Route("/{tail:path}", relay, methods=["GET", "POST", "DELETE"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
