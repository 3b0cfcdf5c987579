-- Publishes one router's leases, unless the value is empty, and returns those of all live routers.
-- KEYS: leases, routers
-- ARGV: router, value, ttl ms
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZADD', KEYS[2], now_ms, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[3] * 2)
  redis.call('PEXPIRE', KEYS[2], ARGV[3] * 2)
end
for _, router in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms - ARGV[3])) do
  redis.call('HDEL', KEYS[1], router)
  redis.call('ZREM', KEYS[2], router)
end
return redis.call('HGETALL', KEYS[1])
