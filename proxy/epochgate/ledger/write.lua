-- Writes the change of one session in one step, its lifetime included.
-- KEYS[1]: the session, a hash. ARGV: life, who writes, whether it is whole ('1'), whether it is fenced ('1'), lifetime (ms),
--   time of the last traffic, channel, tag, revision of the head before, head (empty: unchanged),
--   number of processes that have ended and their names, number of streams that are gone and their keys,
--   number of streams, and of each: key, revision before, state, oldest block, number of blocks, and of each: number, events.
-- Returns 1, or 0 where the hash is not what the writer takes it for: nothing is written then.
local session = KEYS[1]
local life, who, whole, fenced, lifetime, active, channel, tag, head_base, head = unpack(ARGV, 1, 10)
local at = 10

local function take()
    at = at + 1
    return ARGV[at]
end

local function take_all()
    local found = {}
    for n = 1, tonumber(take()) do
        found[n] = take()
    end
    return found
end

local left, gone = take_all(), take_all()
local streams = {}
for n = 1, tonumber(take()) do
    streams[n] = {key = take(), base = take(), state = take(), oldest = tonumber(take()), blocks = {}}
    for block = 1, tonumber(take()) do
        streams[n].blocks[block] = {take(), take()}
    end
end

local kept = redis.call('HGET', session, 'life')
local replaces = kept and kept ~= life
if whole ~= '1' and (not kept or replaces) or replaces and kept > life then
    return 0
end
if not replaces then
    if head ~= '' and (redis.call('HGET', session, 'head_rev') or '0') ~= head_base then
        return 0
    end
    for _, stream in ipairs(streams) do
        if (redis.call('HGET', session, 'rev:' .. stream.key) or '0') ~= stream.base then
            return 0
        end
    end
end

local was_fenced = not replaces and redis.call('HEXISTS', session, 'fenced') == 1
if replaces then
    redis.call('DEL', session)
end
redis.call('HSET', session, 'life', life, 'by:' .. who, '1')
if fenced == '1' or not was_fenced then
    redis.call('PEXPIRE', session, lifetime)
end
if tonumber(active) > tonumber(redis.call('HGET', session, 'active') or '0') then
    redis.call('HSET', session, 'active', active)
end
if head ~= '' then
    redis.call('HSET', session, 'head', head, 'head_rev', string.format('%d', tonumber(head_base) + 1))
end
for _, name in ipairs(left) do
    redis.call('HDEL', session, 'by:' .. name)
end

local function drop_blocks(key, number)
    while number >= 0 and redis.call('HDEL', session, 'events:' .. key .. ':' .. string.format('%d', number)) == 1 do
        number = number - 1
    end
end

for _, stream in ipairs(streams) do
    local key = stream.key
    redis.call('HSET', session, 'rev:' .. key, string.format('%d', tonumber(stream.base) + 1), 'state:' .. key, stream.state)
    for _, block in ipairs(stream.blocks) do
        redis.call('HSET', session, 'events:' .. key .. ':' .. block[1], block[2])
        redis.call('HSET', session, 'last:' .. key, block[1])
    end
    drop_blocks(key, stream.oldest - 1)
end
for _, key in ipairs(gone) do
    drop_blocks(key, tonumber(redis.call('HGET', session, 'last:' .. key) or '-1'))
    redis.call('HDEL', session, 'rev:' .. key, 'state:' .. key, 'last:' .. key)
end
if fenced == '1' and not was_fenced then
    redis.call('HSET', session, 'fenced', '1')
    redis.call('PUBLISH', channel, tag)
elseif replaces then
    redis.call('PUBLISH', channel, tag)
end
return 1
