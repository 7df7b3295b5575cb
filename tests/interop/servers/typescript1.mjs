// A server of the TypeScript SDK 1.x: one transport per session and the SDK example's InMemoryEventStore, one for all
// sessions. The same tools, control paths and flags as world.py.
import { randomUUID } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createServer } from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js'
import { Server } from '@modelcontextprotocol/sdk/server/index.js'
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js'
import { CallToolRequestSchema, ListToolsRequestSchema } from '@modelcontextprotocol/sdk/types.js'

const { values: options } = parseArgs({
  options: { stamp: { type: 'string', default: 'none' }, 'retry-ms': { type: 'string' } }
})
const TOOLS = JSON.parse(readFileSync(new URL('../tools.json', import.meta.url)))

const store = new InMemoryEventStore()
const transports = new Map() // session id -> transport
const owners = new Map() // session id -> owner: the state that an eviction loses
const epochs = new Map() // session id -> epoch
const jobs = new Map() // label -> { done, runs, cancelled }
const running = new Map() // session id -> { request, streamId }: the calls in flight, as a durable queue would keep them
const evicted = new Set()

const epochOf = id => epochs.get(id) ?? 1
const text = (value, meta) => ({ content: [{ type: 'text', text: value }], ...(meta && { _meta: meta }) })

function jobOf(label) {
  if (!jobs.has(label)) jobs.set(label, { done: 0, runs: 0, cancelled: 0 })
  return jobs.get(label)
}

async function count(id, args, extra) {
  const { label, steps, pause_ms: pause, close_at: closeAt } = args
  const job = jobOf(label)
  const epoch = epochOf(id)
  const meta = options.stamp === 'meta' ? { session_epoch: epoch } : undefined
  job.runs += 1
  while (job.done < steps) {
    if (pause > 0) await sleep(pause)
    if (extra.signal.aborted && epochOf(id) === epoch) {
      job.cancelled += 1
      throw new Error('cancelled')
    }
    if (epochOf(id) !== epoch) throw new Error('the session was evicted')
    job.done += 1
    await extra.sendNotification({
      method: 'notifications/progress',
      params: {
        progressToken: extra._meta?.progressToken,
        progress: job.done,
        total: steps,
        message: `${label}#${job.done} for ${owners.get(id) ?? 'nobody'}`,
        ...(meta && { _meta: meta })
      }
    })
    if (job.done === closeAt) extra.closeSSEStream?.()
  }
  job.done = 0
  return text(`${label}: ${steps} steps for ${owners.get(id) ?? 'nobody'}`, meta)
}

async function ask(server, extra) {
  const related = { relatedRequestId: extra.requestId }
  const message = { role: 'user', content: { type: 'text', text: 'complete me' } }
  const sample = await server.createMessage({ messages: [message], maxTokens: 7 }, related)
  const requestedSchema = { type: 'object', properties: { word: { type: 'string' } } }
  const answer = await server.elicitInput({ message: 'which word?', requestedSchema }, related)
  return text(`${sample.content.text}, ${answer.action}: ${JSON.stringify(answer.content)}`)
}

function build(transport) {
  const server = new Server({ name: 'interop', version: '1.0.0' }, { capabilities: { tools: {} } })
  server.setRequestHandler(ListToolsRequestSchema, () => ({ tools: TOOLS }))
  server.setRequestHandler(CallToolRequestSchema, async (request, extra) => {
    const { name, arguments: args = {} } = request.params
    const id = transport.sessionId
    switch (name) {
      case 'echo':
        return text(args.text)
      case 'remember':
        owners.set(id, args.owner)
        return text('remembered')
      case 'count': {
        const streamId = transport._webStandardTransport._requestToStreamMapping.get(extra.requestId)
        running.set(id, { streamId, message: { jsonrpc: '2.0', id: extra.requestId, ...request } })
        return count(id, args, extra)
      }
      case 'runs': {
        const { runs, cancelled } = jobOf(args.label)
        return text(JSON.stringify({ runs, cancelled }))
      }
      case 'ask':
        return ask(server, extra)
      case 'announce':
        await server.notification({ method: 'notifications/tools/list_changed' })
        return text('announced')
      default:
        throw new Error(`no such tool: ${name}`)
    }
  })
  return server.connect(transport)
}

async function open() {
  const sessionId = randomUUID()
  const transport = new StreamableHTTPServerTransport({
    sessionIdGenerator: () => sessionId,
    eventStore: store,
    retryInterval: options['retry-ms'] && Number(options['retry-ms']),
    onsessioninitialized: id => transports.set(id, transport),
    onsessionclosed: id => transports.delete(id)
  })
  await build(transport)
  return transport
}

// Lazy re-creation: a new transport and server under the old id; the call in flight is dispatched to it again.
async function recreate(sessionId) {
  const transport = await open()
  const inner = transport._webStandardTransport
  inner.sessionId = sessionId
  inner._initialized = true
  transports.set(sessionId, transport)
  const call = running.get(sessionId)
  if (call) {
    inner._requestToStreamMapping.set(call.message.id, call.streamId)
    transport.onmessage(call.message, {})
  }
  return transport
}

async function evict() {
  for (const [id, transport] of [...transports]) {
    transports.delete(id)
    owners.delete(id)
    evicted.add(id)
    epochs.set(id, epochOf(id) + 1)
    await transport.close()
  }
}

async function transportOf(id) {
  if (id === undefined) return open()
  if (evicted.delete(id)) return recreate(id)
  return transports.get(id)
}

function stamp(res) {
  const writeHead = res.writeHead
  res.writeHead = function (status, ...rest) {
    const headers = rest.at(-1) ?? {}
    const granted = headers['mcp-session-id'] ?? res.getHeader('mcp-session-id')
    if (granted) headers['mcp-session-epoch'] = String(epochOf(granted))
    return writeHead.call(this, status, headers)
  }
}

const http = createServer(async (req, res) => {
  if (req.url.startsWith('/control/')) {
    if (req.url === '/control/evict') await evict()
    if (req.url === '/control/forget') store.events.clear()
    res.writeHead(204).end()
    return
  }
  const transport = await transportOf(req.headers['mcp-session-id'])
  if (!transport) {
    res.writeHead(404, { 'content-type': 'application/json' })
    res.end(JSON.stringify({ jsonrpc: '2.0', error: { code: -32001, message: 'Session not found' }, id: null }))
    return
  }
  if (options.stamp === 'header') stamp(res)
  await transport.handleRequest(req, res)
})
http.listen(0, '127.0.0.1', () => console.log(http.address().port))
