-- Takes a router that stops, and its leases, off the board.
-- KEYS: leases, routers
-- ARGV: router
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('ZREM', KEYS[2], ARGV[1])
