-- Makes a record the replica's entry. What an earlier generation left is unlinked; residency of the
-- same generation stays, so that a sidecar may come back to a cache that never went away.
-- KEYS: record, generation, load, changes, sets, then facts and the residency keys in sets
-- ARGV: generation, sidecar, record value, record ttl ms, residency ttl ms, stream cap,
--       stream entry
local record, generation, load, changes, sets = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
if redis.call('GET', generation) ~= ARGV[1] then
  for i = 6, #KEYS do
    redis.call('UNLINK', KEYS[i])
  end
  redis.call('UNLINK', sets, load)
end
redis.call('SET', generation, ARGV[1], 'PX', ARGV[5])
redis.call('DEL', record)
redis.call('HSET', record, 'generation', ARGV[1], 'sidecar', ARGV[2], 'value', ARGV[3])
redis.call('PEXPIRE', record, ARGV[4])
redis.call('XADD', changes, 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[7])
redis.call('PEXPIRE', changes, ARGV[5])
return 1
