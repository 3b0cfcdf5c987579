-- Returns the number of the newest news, and which replicas have news above a number: their names
-- in one string, which costs its reader nothing to parse.
-- KEYS: news
-- ARGV: number
local newest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2] or '0'
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf')
return {newest, table.concat(names, '\n')}
