-- Reads on in a lent stream (docs/adr/0009). KEYS[1]: the stream. ARGV: number of the next entry, how many at most.
-- Returns the entries as XRANGE does, or 0 where there is no such stream (any more).
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
return redis.call('XRANGE', KEYS[1], ARGV[1] .. '-0', '+', 'COUNT', ARGV[2])
