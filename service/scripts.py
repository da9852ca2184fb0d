"""What changes a context's keys together, as scripts of the server, so that nothing is ever half done."""

from __future__ import annotations

from precis.wire.accounts import ACCOUNT

# KEYS: fingerprint, context, tokens, contexts, expiry, jobs, totals, usage, beginning
# ARGV: id, created_at, expire_at or '', most jobs, job, tokens, the tenant's bounds (contexts, bytes, active), bytes
CREATE = (
    ACCOUNT
    + """
local found = redis.call('GET', KEYS[1])
if found then return found end
local used = redis.call('HMGET', KEYS[8], 'contexts', 'bytes', 'active')
local function over(i, bound, more) return bound > 0 and tonumber(used[i] or 0) + more > bound end
if over(1, tonumber(ARGV[7]), 1) then return 'quota:contexts' end
if over(2, tonumber(ARGV[8]), tonumber(ARGV[10])) then return 'quota:bytes' end
if over(3, tonumber(ARGV[9]), 1) then return 'quota:active' end
if redis.call('XLEN', KEYS[6]) >= tonumber(ARGV[4]) then return 'full' end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], unpack(ARGV, 11))
redis.call('SET', KEYS[3], ARGV[6])
redis.call('ZADD', KEYS[4], ARGV[2], ARGV[1])
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[5], ARGV[3], ARGV[1]) end
redis.call('XADD', KEYS[6], '*', 'job', ARGV[5], 'attempt', 0)
redis.call('SADD', KEYS[9], ARGV[1])
account(1, KEYS[2], KEYS[7], KEYS[8])
return ARGV[1]
"""
)
# Takes everything of a context away but, for an expiry, the record, which says so for a day.
# KEYS: context, tokens, fingerprint, contexts, expiry, tombstones, totals, events, usage, retention, beginning,
# archived, unarchived
REMOVE = (
    ACCOUNT
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
account(-1, KEYS[1], KEYS[7], KEYS[9])
if redis.call('GET', KEYS[3]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
redis.call('UNLINK', KEYS[2], KEYS[10])
if redis.call('SREM', KEYS[12], ARGV[1]) == 1 then redis.call('SADD', KEYS[13], ARGV[1]) end
redis.call('SREM', KEYS[11], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
if ARGV[2] == '' then
  redis.call('UNLINK', KEYS[1], KEYS[8])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[6], ARGV[1])
else
  redis.call('HSET', KEYS[1], 'status', '"failed"', 'error', ARGV[3])
  redis.call('ZADD', KEYS[6], ARGV[2], ARGV[1])
end
return 1
"""
)
# KEYS: context, expiry
PATCH = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
if ARGV[2] == '' then redis.call('ZREM', KEYS[2], ARGV[1]) else redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1]) end
return 1
"""
# Queues a ready context once more, with a smaller budget or more tokens; from then on it is another upload's equal.
# KEYS: context, its fingerprint, its fingerprint to be, totals, jobs, events, usage, tokens, beginning
# ARGV: id, most jobs, job, its tokens to be or '' for no change, most bytes of the tenant, its bytes to be, fields
REQUEUE = (
    ACCOUNT
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'gone' end
if redis.call('HGET', KEYS[1], 'status') ~= '"ready"' or redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'changed' end
if redis.call('EXISTS', KEYS[3]) == 1 then return redis.call('GET', KEYS[3]) end
if redis.call('XLEN', KEYS[5]) >= tonumber(ARGV[2]) then return 'full' end
local used = tonumber(redis.call('HGET', KEYS[7], 'bytes') or 0)
local more = tonumber(ARGV[6]) - tonumber(redis.call('HGET', KEYS[1], 'stored_bytes') or 0)
if tonumber(ARGV[5]) > 0 and more > 0 and used + more > tonumber(ARGV[5]) then return 'quota:bytes' end
account(-1, KEYS[1], KEYS[4], KEYS[7])
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[3], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[8], ARGV[4])
  redis.call('SREM', KEYS[9], ARGV[1])
end
redis.call('HSET', KEYS[1], 'reserved_bytes', ARGV[6], unpack(ARGV, 7))
account(1, KEYS[1], KEYS[4], KEYS[7])
redis.call('UNLINK', KEYS[6])
redis.call('XADD', KEYS[5], '*', 'job', ARGV[3], 'attempt', 0)
return 'queued'
"""
)
