-- POSTs a tools/call with an id that no other request of this run has, and checks what comes back.
-- Argument: the file with one session id per line.
local sessions, threads = {}, {}

function setup(thread) table.insert(threads, thread) end

function init(args)
  for line in io.lines(args[1]) do sessions[#sessions + 1] = line end
  next_id, sent, good, bad, again = 10000000, 0, 0, 0, 0
  seen = {}
end

function request()
  next_id = next_id + 1
  sent = sent + 1
  return wrk.format("POST", wrk.path, {
    ["Content-Type"] = "application/json",
    ["Accept"] = "application/json, text/event-stream",
    ["MCP-Protocol-Version"] = "2025-06-18",
    ["Mcp-Session-Id"] = sessions[sent % #sessions + 1],
  }, '{"jsonrpc":"2.0","id":' .. next_id .. ',"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}')
end

function response(status, headers, body)
  local id = tonumber(body:match('"id":%s*(%d+)'))
  if status ~= 200 or id == nil or id > next_id then
    bad = bad + 1
  elseif seen[id] then
    again = again + 1
  else
    seen[id] = true
    good = good + 1
  end
end

function done(summary, latency, requests)
  local total = { good = 0, bad = 0, again = 0, sent = 0 }
  for _, thread in ipairs(threads) do
    for name in pairs(total) do total[name] = total[name] + thread:get(name) end
  end
  local errors = summary.errors
  io.write(string.format(
    'JSON {"requests":%d,"us":%d,"good":%d,"bad":%d,"again":%d,"sent":%d,"errors":%d,"p50":%d,"p99":%d}\n',
    summary.requests, summary.duration, total.good, total.bad, total.again, total.sent,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
