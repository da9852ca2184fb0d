"""How what a context takes is counted, in Lua, for every script that changes a context's status or removes it.

A script calls `account(-1, ...)` before its change and `account(1, ...)` after it, so that no path can count twice.
"""

from __future__ import annotations

ACCOUNT = """
local function add(key, field, amount)
  if amount ~= 0 then redis.call('HINCRBY', key, field, amount) end  -- Redis takes no '-0', and -1 * 0 is one
end
local function account(sign, context, totals, usage)
  local found = redis.call('HMGET', context, 'status', 'raw_bytes', 'stored_bytes', 'reserved_bytes', 'error')
  local status = found[1]
  if not status or (found[5] and string.find(found[5], 'context_expired', 1, true)) then return end
  local raw, stored, reserved = tonumber(found[2] or 0), tonumber(found[3] or 0), tonumber(found[4] or 0)
  add(usage, 'contexts', sign)
  if status == '"ready"' then
    for _, key in ipairs({totals, usage}) do
      add(key, 'raw_bytes', sign * raw)
      add(key, 'stored_bytes', sign * stored)
    end
    add(usage, 'bytes', sign * stored)
  elseif status ~= '"failed"' then
    add(usage, 'bytes', sign * reserved)
    add(usage, 'active', sign)
  end
end
"""
