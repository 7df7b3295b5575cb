-- Writes the change of one session in one step, its lifetime included.
-- KEYS[1]: the session, a hash. ARGV: the channel of changes; the change, in MessagePack; all texts of it that are not short,
--   one after the other, of which the change has the lengths (that costs the client least). The change: life, who writes, tag,
--   whether it is whole, whether it is fenced, lifetime (ms), time of the last traffic, revision of the head before, length of
--   the head (0: unchanged), names of the processes that have ended, keys of the streams that are gone, and of each stream:
--   key (as text: too long for a number), revision before, length of its state, oldest block, and number and length of its blocks.
-- Returns 1, or 0 where the hash is not what the writer takes it for: nothing is written then.
local session, channel, data = KEYS[1], ARGV[1], ARGV[3]
local life, who, tag, whole, fenced, lifetime, active, head_base, head_length, left, gone, streams =
    unpack(cmsgpack.unpack(ARGV[2]), 1, 12)
local at = 1

local function take(length)
    local text = string.sub(data, at, at + length - 1)
    at = at + length
    return text
end

local head = take(head_length)

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
    local key, base, state_length, oldest, blocks = unpack(stream, 1, 5)
    redis.call('HSET', session, 'rev:' .. key, number(base + 1), 'state:' .. key, take(state_length))
    for _, block in ipairs(blocks) do
        redis.call('HSET', session, 'events:' .. key .. ':' .. number(block[1]), take(block[2]))
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
