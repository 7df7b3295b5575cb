-- Reads one session, without the streams that the reader has in the same revision.
-- KEYS[1]: the session. ARGV: life, and pairs of a stream's key and its revision, as far as the reader knows them.
-- Returns nothing where there is no session, or else a flat list of the names and values of its fields. Of a stream that the
--   reader has, only the revision is among them.
local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then
    return {}
end
local known = {}
if redis.call('HGET', KEYS[1], 'life') == ARGV[1] then
    for n = 2, #ARGV, 2 do
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
