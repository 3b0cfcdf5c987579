-- Numbers the news of a replica above all news before, and forgets what is long told.
-- KEYS: news
-- ARGV: replica, horizon ms
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local newest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
local number = math.max(now_us, (tonumber(newest) or 0) + 1)
redis.call('ZADD', KEYS[1], string.format('%.0f', number), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_us - ARGV[2] * 1000))
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
return 1
