-- Writes the change of one session in one step, its lifetime included.
-- KEYS[1]: the session, a hash. ARGV: the channel of changes, and the change: texts, each after its length in four bytes, of
--   life, who writes, whether it is whole ('1'), whether it is fenced ('1'), lifetime (ms), time of the last traffic, tag,
--   revision of the head before, head (empty: unchanged), number of processes that have ended and their names, number of
--   streams that are gone and their keys, number of streams and for each: key, revision before, state, oldest block, number
--   of blocks and for each: number, events. (One long text costs the client much less than many short ones.)
-- Returns 1, or 0 where the hash is not what the writer takes it for: nothing is written then.
local session, channel, packed = KEYS[1], ARGV[1], ARGV[2]
local at = 1

local function take()
    local text
    text, at = struct.unpack('>I4c0', packed, at)
    return text
end

local function take_number()
    return tonumber(take())
end

local function take_all()
    local found = {}
    for n = 1, take_number() do
        found[n] = take()
    end
    return found
end

local life, who, whole, fenced = take(), take(), take() == '1', take() == '1'
local lifetime, active, tag, head_base, head = take_number(), take_number(), take(), take_number(), take()
local left, gone, streams = take_all(), take_all(), {}
for n = 1, take_number() do
    streams[n] = {take(), take_number(), take(), take_number(), {}}
    for block = 1, take_number() do
        streams[n][5][block] = {take_number(), take()}
    end
end

local function number(value)
    return string.format('%d', value)
end

local kept = redis.call('HGET', session, 'life')
local replaces = kept and kept ~= life
if not whole and (not kept or replaces) or replaces and kept > life then
    return 0
end
if not replaces then
    if head ~= '' and (redis.call('HGET', session, 'head_rev') or '0') ~= number(head_base) then
        return 0
    end
    for _, stream in ipairs(streams) do
        if (redis.call('HGET', session, 'rev:' .. stream[1]) or '0') ~= number(stream[2]) then
            return 0
        end
    end
end

local was_fenced = not replaces and redis.call('HEXISTS', session, 'fenced') == 1
if replaces then
    redis.call('DEL', session)
end
redis.call('HSET', session, 'life', life, 'by:' .. who, '1')
if fenced or not was_fenced then
    redis.call('PEXPIRE', session, number(lifetime))
end
if active > tonumber(redis.call('HGET', session, 'active') or '0') then
    redis.call('HSET', session, 'active', string.format('%.6f', active))
end
if head ~= '' then
    redis.call('HSET', session, 'head', head, 'head_rev', number(head_base + 1))
end
for _, name in ipairs(left) do
    redis.call('HDEL', session, 'by:' .. name)
end

local function drop_blocks(key, last)
    while last >= 0 and redis.call('HDEL', session, 'events:' .. key .. ':' .. number(last)) == 1 do
        last = last - 1
    end
end

for _, stream in ipairs(streams) do
    local key, base, state, oldest, blocks = unpack(stream, 1, 5)
    redis.call('HSET', session, 'rev:' .. key, number(base + 1), 'state:' .. key, state)
    for _, block in ipairs(blocks) do
        redis.call('HSET', session, 'events:' .. key .. ':' .. number(block[1]), block[2])
        redis.call('HSET', session, 'last:' .. key, number(block[1]))
    end
    drop_blocks(key, oldest - 1)
end
for _, key in ipairs(gone) do
    drop_blocks(key, tonumber(redis.call('HGET', session, 'last:' .. key) or '-1'))
    redis.call('HDEL', session, 'rev:' .. key, 'state:' .. key, 'last:' .. key)
end
if fenced and not was_fenced or replaces then
    if fenced then
        redis.call('HSET', session, 'fenced', '1')
    end
    redis.call('PUBLISH', channel, who .. ':' .. tag)
end
return 1
