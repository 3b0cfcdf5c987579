-- Takes a portion of a residency set away, and tells who follows the replica's stream what went.
-- Returns how many blocks that were; fewer than asked for when nothing is left.
-- KEYS: residency set, sets, changes
-- ARGV: blocks at most, suffix, stream entry up to the removed ids, and after them, stream cap,
--       stream ttl ms
local ids = redis.call('SPOP', KEYS[1], ARGV[1])
if #ids > 0 then
  local packed = table.concat(ids)
  local entry = ARGV[3] .. struct.pack('>BI4', 198, #packed) .. packed .. ARGV[4]
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'e', entry)
  redis.call('PEXPIRE', KEYS[3], ARGV[6])
end
if #ids < tonumber(ARGV[1]) then
  redis.call('SREM', KEYS[2], ARGV[2])
end
return #ids
