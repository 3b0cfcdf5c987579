-- Puts a whole copy of a residency set in the set's place. A copy that is not whole (the server may
-- have evicted its beginning) is given up.
-- KEYS: residency set, its copy, sets
-- ARGV: blocks the copy must have, residency ttl ms, suffix, sets ttl ms
if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[1]) then
  redis.call('UNLINK', KEYS[2])
  return 0
end
redis.call('UNLINK', KEYS[1])
redis.call('RENAME', KEYS[2], KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[3], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
