-- Puts the epoch of a scope in the place of the one that was read, unless another came in between.
-- Returns what is there then. A key of another type counts as nothing, and is replaced.
-- KEYS: epoch, version
-- ARGV: what was read ('' for nothing), epoch, new version, ttl ms
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' then
  held = ''
end
if held ~= ARGV[1] then
  return held
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return ARGV[2]
