-- Removes a replica and all that is known of it, if the generation is still the current one.
-- KEYS: record, generation, load, changes, sets, then facts and the residency keys in sets
-- ARGV: generation, residency ttl ms, stream cap, stream entry
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
for i = 1, #KEYS do
  if i ~= 4 then
    redis.call('UNLINK', KEYS[i])
  end
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[3], '*', 'e', ARGV[4])
redis.call('PEXPIRE', KEYS[4], ARGV[2])
return 1
