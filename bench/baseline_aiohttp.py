"""The plain relay that everybody would write first: an aiohttp application and a ClientSession. It checks nothing."""

from __future__ import annotations

import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

DROPPED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}
UPSTREAM = f"http://127.0.0.1:{sys.argv[2]}"


async def relay(request: web.Request) -> web.StreamResponse:
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in DROPPED]
    body = await request.read() if request.can_read_body else None
    url = UPSTREAM + request.raw_path
    async with request.app["session"].request(request.method, url, headers=headers, data=body) as answer:
        kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in DROPPED]
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
        response.content_length = answer.content_length
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


async def client(app: web.Application):
    options = {"timeout": ClientTimeout(total=None), "auto_decompress": False}
    async with ClientSession(connector=TCPConnector(limit=0), **options) as app["session"]:
        yield


app = web.Application()
app.router.add_route("*", "/{tail:.*}", relay)
app.cleanup_ctx.append(client)

if __name__ == "__main__":
    if sys.argv[3:] == ["uvloop"]:
        import uvloop

        uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
