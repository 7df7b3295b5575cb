-- Appends to a lent stream in one step, its lease included (docs/adr/0009).
-- KEYS[1]: the stream. ARGV: lease (ms), number of the last entry that was read, number of the first entry to append, channel
--   of the reader, what it is told there, the entries. Without an entry it only renews the lease.
-- An entry that is there already is passed over: it comes twice. What was read is dropped, up to the last of it, so that the
--   stream never lacks its newest entry.
-- Returns 1, or 0 where the stream lacks what comes before: nothing is appended then.
local key, lease, read, first, channel, notice = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
local last = newest and tonumber(string.match(newest[1], '^(%d+)-')) or 0
if first > last + 1 then
    return 0
end
for n = 6, #ARGV do
    local number = first + n - 6
    if number > last then
        redis.call('XADD', key, string.format('%d-0', number), 'e', ARGV[n])
    end
end
redis.call('XTRIM', key, 'MINID', read .. '-0')
redis.call('PEXPIRE', key, lease)
if #ARGV > 5 then
    redis.call('PUBLISH', channel, notice)
end
return 1
