// The client of the TypeScript SDK 1.x. The same programs and documents as script.py: `session` or `fault`.
import { setTimeout as sleep } from 'node:timers/promises'
import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'
import {
  CallToolResultSchema,
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ToolListChangedNotificationSchema
} from '@modelcontextprotocol/sdk/types.js'

const [program, url, plan = '{}'] = process.argv.slice(2)
const PAUSE_MS = 230 // as in script.py
const now = () => Date.now() / 1000

async function open(seen) {
  const capabilities = { sampling: {}, elicitation: {} }
  const client = new Client({ name: 'interop', version: '1.0.0' }, { capabilities })
  client.onerror = () => {}
  client.setRequestHandler(CreateMessageRequestSchema, ({ params }) => {
    seen.requests.push(['sampling', params.messages, params.maxTokens])
    return { role: 'assistant', content: { type: 'text', text: 'completed' }, model: 'none' }
  })
  client.setRequestHandler(ElicitRequestSchema, ({ params }) => {
    seen.requests.push(['elicitation', params.message])
    return { action: 'accept', content: { word: 'yes' } }
  })
  client.setNotificationHandler(ToolListChangedNotificationSchema, () => seen.notify())
  const transport = new StreamableHTTPClientTransport(new URL(url), {
    fetch: async (target, init) => {
      const response = await fetch(target, init)
      if (init.method === 'POST') seen.postStatus = response.status
      return response
    }
  })
  await client.connect(transport)
  return { client, transport, seen }
}

function sight() {
  const seen = { requests: [], postStatus: null }
  seen.announced = new Promise(resolve => {
    seen.notify = () => resolve(true)
  })
  return seen
}

// The outcome of a request, and when it fell: { result } or { error } or { pending }.
async function outcome(seen, promise, patience = 20) {
  const settled = promise.then(
    result => ({ result }),
    error => ({ error: { code: error.code ?? null, message: error.message } })
  )
  const late = sleep(patience * 1000, { pending: true }, { ref: false })
  return { ...(await Promise.race([settled, late])), at: now(), status: seen.postStatus ?? null }
}

const call = (client, name, args = {}, options) => client.callTool({ name, arguments: args }, undefined, options)
const words = result => (result.isError ? { error: result.content[0].text } : result.content[0].text)

async function counted(client, args, options = {}) {
  const progress = []
  const onprogress = ({ progress: step, total, message }) => progress.push([step, total, message])
  const pending = call(client, 'count', args, { onprogress, timeout: 60000, ...options })
  return { progress, pending }
}

async function session() {
  const seen = sight()
  const { client, transport } = await open(seen)
  const doc = { version: transport.protocolVersion, server: client.getServerVersion() }
  doc.capabilities = client.getServerCapabilities()
  doc.session = transport.sessionId !== undefined
  doc.tools = (await client.listTools()).tools
  doc.echo = words(await call(client, 'echo', { text: 'grüße, 世界' }))
  await call(client, 'remember', { owner: 'ada' })
  const stream = await counted(client, { label: 'stream', steps: 5, pause_ms: 20 })
  doc.count = words(await stream.pending)
  doc.progress = stream.progress
  doc.ask = words(await call(client, 'ask'))
  doc.requests = seen.requests
  const abort = new AbortController()
  const cancelled = await counted(client, { label: 'cancel', steps: 50, pause_ms: 50 }, { signal: abort.signal })
  cancelled.pending.catch(() => {})
  while (cancelled.progress.length < 2) await sleep(10)
  abort.abort('enough')
  doc.cancel = (await outcome(seen, cancelled.pending)).error
  await sleep(300)
  doc.cancelled = words(await call(client, 'runs', { label: 'cancel' }))
  doc.ping = await client.ping()
  await call(client, 'announce')
  doc.announced = await Promise.race([seen.announced, sleep(3000, false, { ref: false })])
  const resume = await counted(client, { label: 'resume', steps: 12, pause_ms: PAUSE_MS })
  doc.resumed = words(await resume.pending)
  doc.resumedProgress = resume.progress
  doc.resumedRuns = words(await call(client, 'runs', { label: 'resume' }))
  const dead = transport.sessionId
  await transport.terminateSession()
  transport._sessionId = dead
  doc.terminated = (await outcome(seen, client.ping())).status
  await client.close()
  return doc
}

async function fault({ steps = 12, close_at: closeAt, linger = 0, foreign = false }) {
  const doc = {}
  let token
  const first = await open(sight())
  await call(first.client, 'remember', { owner: 'ada' })
  if (foreign) {
    // The cursor of another session: this one's call is asked for by a second session, which has read events of its own.
    const onresumptiontoken = value => (token ??= value)
    await (await counted(first.client, { label: 'foreign', steps: 3, pause_ms: 20 }, { onresumptiontoken })).pending
    const second = await open(sight())
    await call(second.client, 'echo', { text: 'mine' })
    doc.start = now()
    const request = { method: 'tools/call', params: { name: 'echo', arguments: { text: 'foreign' } } }
    const stolen = second.client.request(request, CallToolResultSchema, { resumptionToken: token, timeout: 60000 })
    doc.call = await outcome(second.seen, stolen.then(words), 10)
    doc.session = second.transport.sessionId
    return finish(doc, second, linger)
  }
  doc.session = first.transport.sessionId
  doc.start = now()
  const args = { label: 'fault', steps, pause_ms: PAUSE_MS, ...(closeAt && { close_at: closeAt }) }
  const { progress, pending } = await counted(first.client, args)
  doc.call = await outcome(first.seen, pending.then(words), 10)
  doc.progress = progress
  return finish(doc, first, linger)
}

// What the program does next: a POST on the old session, then a new session.
async function finish(doc, { client, seen }, linger) {
  seen.postStatus = null
  doc.next = await outcome(seen, call(client, 'echo', { text: 'next' }).then(words), 5)
  const fresh = await open(sight())
  doc.fresh = await outcome(fresh.seen, call(fresh.client, 'echo', { text: 'fresh' }).then(words), 5)
  const runs = await outcome(fresh.seen, call(fresh.client, 'runs', { label: 'fault' }).then(words), 5)
  doc.runs = runs.result ? JSON.parse(runs.result).runs : null
  await sleep(Math.max(0, (doc.start + linger - now()) * 1000))
  return doc
}

const doc = await (program === 'session' ? session() : fault(JSON.parse(plan)))
console.log(JSON.stringify(doc))
process.exit(0)
