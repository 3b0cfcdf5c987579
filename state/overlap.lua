-- Returns how many leading ids of a chain are in the first set, and in any of the sets. Exact: every
-- id of the run is looked at, in steps that grow, and nothing behind the step of the first miss.
-- KEYS: residency sets of one replica, the one of GPU blocks first
-- ARGV: ids concatenated, bytes per id
local chain, bytes = ARGV[1], tonumber(ARGV[2])
local sets = {KEYS[1]}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    sets[#sets + 1] = KEYS[i]
  end
end
local count, known, step, gpu = #chain / bytes, 0, 16, nil
while known < count do
  step = math.min(step, count - known)
  local form, start, found = string.rep('c' .. bytes, step), known * bytes + 1, {}
  for s, set in ipairs(sets) do
    -- The last value that unpack returns is a position: one member more, of no interest.
    found[s] = redis.call('SMISMEMBER', set, struct.unpack(form, chain, start))
  end
  for i = 1, step do
    local is_held = found[1][i] == 1
    if not (is_held or gpu) then
      gpu = known + i - 1
    end
    for s = 2, #sets do
      is_held = is_held or found[s][i] == 1
    end
    if not is_held then
      return {gpu, known + i - 1}
    end
  end
  known, step = known + step, math.min(step * 4, 256)
end
return {gpu or count, count}
