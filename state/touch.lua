-- Scores a replica in the index with the server's time, and forgets those long without a score.
-- Returns 1 when the index did not have the replica.
-- KEYS: index
-- ARGV: replica, horizon ms
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_new = redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
return is_new
