-- Blocks in shards. Schema 1; docs/redis.md draws it, docs/adr/0013 has the reasons.
--
-- One key is given, the record of a shard; the others have its hash tag and are derived from it, because which bucket a block is
-- in is known only here.
--
--   {tag}:s       hash   record of a shard
--                          o        id of the store that it belongs to; with another one the shard's content is of no use
--                          i        incarnation: part of the names of buckets, so that those of a lost record are never met
--                          k, b, l  buckets; distinct blocks; buckets found missing
--                          c, p     sweep: the next bucket; the holders that were dead in every step of the pass so far
--                          f<node>  fence: "token write", the node's writer and its newest write
--                          n<h>     blocks that have holder h (4 bytes, little-endian)
--   {tag}:<i>:<n> hash   bucket n, in listpack encoding: tail of a key (7 bytes) -> holders (4 bytes each), or "w" when there are
--                        more than listpack encoding bears; and an empty field, so that an evicted bucket is told from an empty one
--   {tag}:<i>:w   hash   tail -> holders, of those with "w"
--
-- A cluster may be moving the slot to another master, key by key. A function then fails at the first key that is gone or new, at
-- any place; so what is written first is what does no harm alone, and what a failed write changed is counted all the same.
--
-- Linear hashing (Litwin 1980): of k buckets, 2^l <= k, a block is in h mod 2^l, or, where that one is split already, in
-- h mod 2^(l+1). A write that leaves more than FILL blocks a bucket splits as many as it takes; buckets never merge.

local FILL = 48    -- a bucket has twice that just before its split; hash-max-listpack-entries is 128 unless somebody changed it
local INLINE = 60  -- bytes of holders in a bucket; hash-max-listpack-value is 64
local TAIL = 7

-- Nil when the shard has no record of this store.
local function open_shard(key, id)
  local r = redis.call('HMGET', key, 'o', 'i', 'k', 'b')
  if r[1] ~= id then return nil end
  local k, size = tonumber(r[3]), 1
  while size * 2 <= k do size = size * 2 end
  return {key = key, base = key:sub(1, -2) .. r[2] .. ':', k = k, size = size, blocks = tonumber(r[4]), missing = 0}
end

local function hash(tails, i)
  local a, b, c, d = tails:byte(i, i + 3)
  return a + b * 256 + c * 65536 + d * 16777216
end

-- Name of the bucket of the block whose tail begins at i.
local function bucket_of(shard, tails, i)
  local h, size = hash(tails, i), shard.size
  local n = h % size
  if n < shard.k - size then n = h % (size * 2) end
  return shard.base .. n
end

-- Where the holder is among packed ones, or nil.
local function position(holders, holder)
  local at = holders:find(holder, 1, true)
  while at and at % 4 ~= 1 do at = holders:find(holder, at + 1, true) end
  return at
end

local function without(holders, at) return holders:sub(1, at - 1) .. holders:sub(at + 4) end

-- Holders of a block or nil, and whether they are among those of the wide.
local function get(shard, name, tail)
  local holders = redis.call('HGET', name, tail)
  if holders ~= 'w' then return holders or nil, false end
  holders = redis.call('HGET', shard.base .. 'w', tail)
  if not holders then shard.missing = shard.missing + 1 end
  return holders or '', true
end

-- A bucket was evicted, and is made again. It is taken to have been like the others, or evictions would add up to ever more
-- blocks that are not there, and buckets for them.
local function made_again(shard)
  shard.missing = shard.missing + 1
  shard.blocks = shard.blocks - math.floor(shard.blocks / shard.k)
end

-- A new block. Both fields are new only where the bucket was evicted.
local function insert(shard, name, tail, holder)
  if redis.call('HSET', name, '', '', tail, holder) == 2 then made_again(shard) end
  shard.blocks = shard.blocks + 1
end

-- Other holders of a block that is there; none takes it away.
local function put(shard, name, tail, holders, wide)
  if #holders > INLINE then
    redis.call('HSET', shard.base .. 'w', tail, holders)
    if not wide then redis.call('HSET', name, tail, 'w') end
    return
  end
  if holders == '' then redis.call('HDEL', name, tail) else redis.call('HSET', name, tail, holders) end
  if wide then redis.call('HDEL', shard.base .. 'w', tail) end
end

local function rewrite(name, fields)
  redis.call('DEL', name)
  for at = 1, #fields, 200 do redis.call('HSET', name, unpack(fields, at, math.min(at + 199, #fields))) end
end

local function split(shard)
  local from, to, size = shard.k - shard.size, shard.k, shard.size * 2
  local all = redis.call('HGETALL', shard.base .. from)
  local stay, move = {'', ''}, {'', ''}
  if #all == 0 then made_again(shard) end
  for at = 1, #all, 2 do
    local tail = all[at]
    if tail ~= '' then
      local target = hash(tail, 1) % size == from and stay or move
      target[#target + 1], target[#target + 2] = tail, all[at + 1]
    end
  end
  rewrite(shard.base .. to, move)
  rewrite(shard.base .. from, stay)
  shard.k = to + 1
  if shard.k == size then shard.size = size end
end

-- Writes back what changed. deltas: per holder; shard.blocks: distinct ones. Returns the error of a split that failed.
local function close_shard(shard, deltas)
  for holder, n in pairs(deltas) do
    if n ~= 0 and redis.call('HINCRBY', shard.key, 'n' .. holder, n) <= 0 then
      redis.call('HDEL', shard.key, 'n' .. holder)
    end
  end
  local fine, failed = true, nil
  while fine and shard.blocks > FILL * shard.k do fine, failed = pcall(split, shard) end
  redis.call('HSET', shard.key, 'k', shard.k, 'b', shard.blocks)
  if shard.missing > 0 then redis.call('HINCRBY', shard.key, 'l', shard.missing) end
  return not fine and redis.error_reply(failed) or nil
end

-- Frees what a store that is gone has left: nobody would ever meet it again.
local function discard(key, incarnation, k)
  local base = key:sub(1, -2) .. incarnation .. ':'
  for n = 0, k - 1 do redis.call('UNLINK', base .. n) end
  redis.call('UNLINK', base .. 'w', key)
end

-- args: store id, node, token. The node's writer is the one with this token from now on; a shard without a record gets one.
-- A token that is too low is answered with the one that stands there.
local function fence(keys, args)
  local key, id, node, token = keys[1], args[1], args[2], tonumber(args[3])
  local r = redis.call('HMGET', key, 'o', 'i', 'k', 'f' .. node)
  if r[1] ~= id then
    if r[1] then discard(key, r[2], tonumber(r[3])) end
    local now = redis.call('TIME')
    local incarnation = string.format('%x%05x', now[1], now[2])
    redis.call('HSET', key, 'o', id, 'i', incarnation, 'k', 1, 'b', 0, 'l', 0, 'c', 0)
    redis.call('HSET', key:sub(1, -2) .. incarnation .. ':0', '', '')
  elseif r[4] then
    local stands = r[4]:match('^%d+')
    if tonumber(stands) >= token then return stands end  -- the same: a copy that came late must not forget writes
  end
  redis.call('HSET', key, 'f' .. node, args[3] .. ' 0')
  return args[3]
end

-- Nil when the write may be done, and notes it; else the error.
local function admit(shard, node, token, write, acknowledged)
  local f = redis.call('HGET', shard.key, 'f' .. node)
  if not f then return redis.error_reply('KVLOST the shard does not know the writer') end
  local stands, last = f:match('^(%d+) (%d+)$')
  if tonumber(stands) > tonumber(token) then return redis.error_reply('KVFENCED a newer writer has the node') end
  if stands ~= token then return redis.error_reply('KVLOST the shard knows only an older writer') end
  if tonumber(last) > tonumber(write) then return redis.error_reply('KVLATE a later write was done') end
  if tonumber(last) < tonumber(acknowledged) then return redis.error_reply('KVLOST acknowledged writes are gone') end
  redis.call('HSET', shard.key, 'f' .. node, token .. ' ' .. write)
end

-- One change of one holder; counts what it changed as it goes.
local function apply(shard, add, holder, tails, deltas)
  for i = 1, #tails, TAIL do
    local name, tail = bucket_of(shard, tails, i), tails:sub(i, i + TAIL - 1)
    local holders, wide = get(shard, name, tail)
    local found = holders and position(holders, holder)
    if add and not found then
      if holders then put(shard, name, tail, holders .. holder, wide) else insert(shard, name, tail, holder) end
      deltas[holder] = deltas[holder] + 1
    elseif not add and found then
      holders = without(holders, found)
      put(shard, name, tail, holders, wide)
      deltas[holder] = deltas[holder] - 1
      if holders == '' then shard.blocks = shard.blocks - 1 end
    end
  end
end

-- args: store id, node, token, write, newest write acknowledged here, then (op, holder, tails) ...; op is "+" or "-".
-- Without a node there is no writer to check. Returns how many blocks each op changed.
local function write(keys, args)
  local shard = open_shard(keys[1], args[1])
  if not shard then return redis.error_reply('KVLOST the shard is gone') end
  if args[2] ~= '' then
    local refused = admit(shard, args[2], args[3], args[4], args[5])
    if refused then return refused end
  end
  local changed, deltas = {}, {}
  for at = 6, #args, 3 do
    local holder = args[at + 1]
    local before = deltas[holder] or 0
    deltas[holder] = before
    local fine, failed = pcall(apply, shard, args[at] == '+', holder, args[at + 2], deltas)
    if not fine then
      close_shard(shard, deltas)
      return redis.error_reply(failed)
    end
    changed[#changed + 1] = math.abs(deltas[holder] - before)
  end
  return close_shard(shard, deltas) or changed
end

-- args: store id, tails. Returns {buckets found missing, u16 per tail: 0 or a number from 1, the holders of number 1, 2, ...}.
-- A shard that is gone counts as one missing bucket with everything in it: no u16 at all.
local function lookup(keys, args)
  local shard = open_shard(keys[1], args[1])
  if not shard then return {1, ''} end
  local tails, numbers, ids, out = args[2], {}, {}, {0, ''}
  for i = 1, #tails, TAIL do
    local name, tail = bucket_of(shard, tails, i), tails:sub(i, i + TAIL - 1)
    local holders, id = get(shard, name, tail), '\0\0'
    if not holders then
      if redis.call('HEXISTS', name, '') == 0 then shard.missing = shard.missing + 1 end
    elseif holders ~= '' then
      id = numbers[holders]
      if not id then
        local number = #out - 1
        id = string.char(number % 256, math.floor(number / 256))
        numbers[holders], out[#out + 1] = id, holders
      end
    end
    ids[#ids + 1] = id
  end
  out[1], out[2] = shard.missing, table.concat(ids)
  return out
end

-- args: store id, packed holders. Returns {buckets found missing so far, count per holder ...}; a shard that is gone has none.
local function counts(keys, args)
  local r = redis.call('HMGET', keys[1], 'o', 'l')
  local here = r[1] == args[1]
  local out = {here and tonumber(r[2]) or 1}
  for i = 1, #args[2], 4 do
    out[#out + 1] = here and tonumber(redis.call('HGET', keys[1], 'n' .. args[2]:sub(i, i + 3)) or 0) or 0
  end
  return out
end

-- args: store id. Returns the packed holders that have blocks here, then the nodes that have a fence here.
local function present(keys, args)
  local holders, out = {}, {''}
  if redis.call('HGET', keys[1], 'o') ~= args[1] then return out end
  for _, field in ipairs(redis.call('HKEYS', keys[1])) do
    local kind = field:sub(1, 1)
    if kind == 'n' then holders[#holders + 1] = field:sub(2) end
    if kind == 'f' then out[#out + 1] = field:sub(2) end
  end
  out[1] = table.concat(holders)
  return out
end

-- Takes the dead from one bucket; returns how many (holder, block) pairs that freed.
local function clean(shard, n, dead, deltas)
  local name, freed = shard.base .. n, 0
  local all = redis.call('HGETALL', name)
  if #all == 0 then
    made_again(shard)
    redis.call('HSET', name, '', '')
  end
  for at = 1, #all, 2 do
    local tail, holders, wide = all[at], all[at + 1], all[at + 1] == 'w'
    if tail ~= '' then
      if wide then holders = redis.call('HGET', shard.base .. 'w', tail) or '' end
      local kept = {}
      for i = 1, #holders, 4 do
        local holder = holders:sub(i, i + 3)
        if dead[holder] then
          deltas[holder] = (deltas[holder] or 0) - 1
          freed = freed + 1
        else
          kept[#kept + 1] = holder
        end
      end
      if #kept * 4 ~= #holders or holders == '' then put(shard, name, tail, table.concat(kept), wide) end
      if #kept == 0 then shard.blocks = shard.blocks - 1 end
    end
  end
  return freed
end

-- args: store id, packed dead holders, most buckets, then nodes whose fence may go. Returns {pairs freed, the next bucket or 0}.
-- A pass goes once through all buckets: then nothing is left of the holders that were dead in all its steps, whoever made them,
-- so their counts go, also where evicted buckets left them too high. A bucket that is split meanwhile moves blocks only towards the end of the pass.
local function sweep(keys, args)
  local shard = open_shard(keys[1], args[1])
  if not shard then return redis.error_reply('KVLOST the shard is gone') end
  for at = 4, #args do redis.call('HDEL', shard.key, 'f' .. args[at]) end
  local dead, deltas = {}, {}
  for i = 1, #args[2], 4 do dead[args[2]:sub(i, i + 3)] = true end
  if not next(dead) then return {0, 0} end
  local cursor, freed, looked = tonumber(redis.call('HGET', shard.key, 'c')), 0, 0
  local known, always = cursor == 0 and args[2] or redis.call('HGET', shard.key, 'p'), {}
  for i = 1, #known, 4 do
    local holder = known:sub(i, i + 3)
    if dead[holder] then always[#always + 1] = holder end
  end
  while cursor < shard.k and looked < tonumber(args[3]) do
    local fine, result = pcall(clean, shard, cursor, dead, deltas)
    if not fine then
      close_shard(shard, deltas)
      return redis.error_reply(result)
    end
    freed, cursor, looked = freed + result, cursor + 1, looked + 1
  end
  close_shard(shard, deltas)
  if cursor == shard.k then
    for _, holder in ipairs(always) do redis.call('HDEL', shard.key, 'n' .. holder) end
    cursor = 0
  end
  redis.call('HSET', shard.key, 'c', cursor, 'p', table.concat(always))
  return {freed, cursor}
end

redis.register_function{function_name = 'LIBRARY_fence', callback = fence, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_write', callback = write}
redis.register_function{function_name = 'LIBRARY_erase', callback = write, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_lookup', callback = lookup, flags = {'no-writes'}}
redis.register_function{function_name = 'LIBRARY_counts', callback = counts, flags = {'no-writes'}}
redis.register_function{function_name = 'LIBRARY_present', callback = present, flags = {'no-writes'}}
redis.register_function{function_name = 'LIBRARY_sweep', callback = sweep, flags = {'allow-oom'}}
