-- Puts a document of settings in the place of what was read, unless another came in between.
-- Returns what is there then. A key of another type counts as nothing, and is replaced.
-- KEYS: document, history
-- ARGV: what was read ('' for nothing), document, its version, ttl ms, versions kept, then a version
-- and its document for each that belongs to the history
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' then
  held = ''
end
if held ~= ARGV[1] then
  return held
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[4])
local cut = redis.pcall('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[3] - ARGV[5])
if type(cut) == 'table' then
  redis.call('UNLINK', KEYS[2])
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], ARGV[3], '+inf')
for at = 6, #ARGV, 2 do
  redis.call('ZADD', KEYS[2], ARGV[at], ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return ARGV[2]
