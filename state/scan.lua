-- Returns one step of a scan over a residency set as cursor and concatenated ids: a reply that costs
-- its reader nothing to parse. Members that are no block ids are left out.
-- KEYS: residency set
-- ARGV: cursor, count, bytes per id
local step = redis.call('SSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local ids = {}
for _, id in ipairs(step[2]) do
  if #id == tonumber(ARGV[3]) then
    ids[#ids + 1] = id
  end
end
return {step[1], table.concat(ids)}
