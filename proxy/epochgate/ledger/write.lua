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

local kept, head_rev, was_fenced, was_active =
    unpack(redis.call('HMGET', session, 'life', 'head_rev', 'fenced', 'active'))
local replaces = kept and kept ~= life
if not whole and (not kept or replaces) or replaces and kept > life then
    return 0
end
if not replaces then
    if head ~= '' and (head_rev or '0') ~= number(head_base) then
        return 0
    end
    for _, stream in ipairs(streams) do
        if (redis.call('HGET', session, 'rev:' .. stream[1]) or '0') ~= number(stream[2]) then
            return 0
        end
    end
end

local fields = {'life', life, 'by:' .. who, '1'}
if replaces then
    redis.call('DEL', session)
    was_fenced, was_active = false, false
end
if active > tonumber(was_active or '0') then
    fields[#fields + 1] = 'active'
    fields[#fields + 1] = string.format('%.6f', active)
end
redis.call('HSET', session, unpack(fields))
if fenced or not was_fenced then
    redis.call('PEXPIRE', session, number(lifetime))
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
    local newer = {'rev:' .. key, number(base + 1), 'state:' .. key, take(state_length)}
    for _, block in ipairs(blocks) do
        if #newer >= 1000 then -- more than some thousands are too many for one call
            redis.call('HSET', session, unpack(newer))
            newer = {}
        end
        newer[#newer + 1] = 'events:' .. key .. ':' .. number(block[1])
        newer[#newer + 1] = take(block[2])
    end
    if #blocks > 0 then
        newer[#newer + 1] = 'last:' .. key
        newer[#newer + 1] = number(blocks[#blocks][1])
    end
    redis.call('HSET', session, unpack(newer))
    drop_blocks(key, oldest - 1)
end
for _, key in ipairs(gone) do
    local last = tonumber(redis.call('HGET', session, 'last:' .. key) or '-1')
    redis.call('HDEL', session, 'rev:' .. key, 'state:' .. key, 'last:' .. key, 'events:' .. key .. ':' .. number(last))
    drop_blocks(key, last - 1)
end
if fenced and not was_fenced or replaces then
    if fenced then
        redis.call('HSET', session, 'fenced', '1')
    end
    redis.call('PUBLISH', channel, who .. ':' .. tag)
end
return 1
