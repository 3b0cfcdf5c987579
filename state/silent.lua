-- Returns how many names the index has, and those without a recent heartbeat in one string. One
-- from the future does not count as recent: the clock was set back.
-- KEYS: index
-- ARGV: ms that are recent
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[1])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now_ms + ARGV[1], '+inf')) do
  names[#names + 1] = name
end
return {redis.call('ZCARD', KEYS[1]), table.concat(names, '\n')}
