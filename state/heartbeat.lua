-- Keeps a replica alive, if the record is still this sidecar's and of this generation.
-- KEYS: record, load, facts
-- ARGV: generation, sidecar, record value, record ttl ms, load value ('' for none), load ttl ms,
--       facts value ('' for no news), facts ttl ms
local held = redis.call('HMGET', KEYS[1], 'generation', 'sidecar')
if not held[1] then
  return 'unknown'
end
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return 'fenced'
end
redis.call('HSET', KEYS[1], 'value', ARGV[3], 'load', ARGV[5] ~= '' and '1' or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if ARGV[5] ~= '' then
  redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[6])
end
if ARGV[7] ~= '' then
  redis.call('SET', KEYS[3], ARGV[7], 'PX', ARGV[8])
end
return 'held'
