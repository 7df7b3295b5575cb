-- Reads one session, without the streams that the reader has in the same revision, and notes that the reader has it at hand:
--   from now on others have to ask it what it has not written yet.
-- KEYS[1]: the session. ARGV: who reads, life, and pairs of a stream's key and its revision, as far as it knows them.
-- Returns nothing where there is no session, or else a flat list of the names and values of its fields. Of a stream that the
--   reader has, only the revision is among them.
local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then
    return {}
end
redis.pcall('HSETNX', KEYS[1], 'by:' .. ARGV[1], '1') -- a server that is full refuses it, and can be read all the same
local known = {}
if redis.call('HGET', KEYS[1], 'life') == ARGV[2] then
    for n = 3, #ARGV, 2 do
        known[ARGV[n]] = ARGV[n + 1]
    end
end
local revs = {}
for n = 1, #fields, 2 do
    local key = string.match(fields[n], '^rev:(%d+)$')
    if key then
        revs[key] = fields[n + 1]
    end
end
local found = {}
for n = 1, #fields, 2 do
    local key = string.match(fields[n], '^state:(%d+)$') or string.match(fields[n], '^events:(%d+):')
    if not key or known[key] == nil or known[key] ~= revs[key] then
        found[#found + 1] = fields[n]
        found[#found + 1] = fields[n + 1]
    end
end
return found
