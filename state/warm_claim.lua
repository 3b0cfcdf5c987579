-- Takes the claim on a piece of work, keeps it alive, and spends tokens of its budget, in one step.
-- Returns what came of it ('granted', 'taken', 'spent') and the tokens that are spent now. A key of
-- another type counts as nothing, and is replaced.
-- KEYS: owner, account
-- ARGV: who asks, ttl of the claim in ms (0: give it back), ttl of the account in ms, tokens to
-- spend, budget in tokens
local owner = redis.pcall('GET', KEYS[1])
local held = redis.pcall('GET', KEYS[2])
local spent = type(held) == 'string' and tonumber(held) or 0
if type(owner) == 'string' and owner ~= ARGV[1] then
  return {'taken', spent}
end
if ARGV[2] == '0' then
  redis.call('UNLINK', KEYS[1])
  return {'granted', spent}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local more = tonumber(ARGV[4])
if more > 0 and spent + more > tonumber(ARGV[5]) then
  redis.call('SET', KEYS[2], string.format('%.0f', spent), 'PX', ARGV[3])
  return {'spent', spent}
end
spent = spent + more
redis.call('SET', KEYS[2], string.format('%.0f', spent), 'PX', ARGV[3])
return {'granted', spent}
