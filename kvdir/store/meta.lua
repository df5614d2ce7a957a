-- What is known of the whole store: nodes, holders, namespaces. Schema 1; docs/redis.md draws it, docs/adr/0013 has the reasons.
--
-- The key given is the first; the others have its hash tag.
--
--   {tag}:m   hash   schema, id, seed, shards: as the store was made; token, version: the newest given out
--   {tag}:n   hash   node -> entry: {token, epoch, seq or -1, milliseconds when it was saved, record, holders, fenced epochs,
--                     number of the writer's newest create or swap}
--   {tag}:h   hash   holder (4 bytes) -> "1" if visible else "0", tier (1 byte), epoch (8), length of the namespace (1), it, node
--   {tag}:c   list   the newest changes of the roster: "version packed-holders"
--   {tag}:d   hash   namespace digest -> record
--
-- Tokens and versions are a counter in the high and a random number in the low 20 bits: after a fail-over that lost some, the
-- counter may repeat, but the number as a whole does not. Epochs and holders are bytes here: Lua's numbers have 53 bits.

local STEP = 1048576  -- 2^20
local CHANGES = 1024
local FENCED = 16

local function beside(key, name) return key:sub(1, -2) .. name end
local function count_of(number) return math.floor(tonumber(number or 0) / STEP) end
local function number_of(count, nonce) return string.format('%.0f', count * STEP + tonumber(nonce)) end

local function is_gone(key, id)
  if redis.call('HGET', key, 'id') ~= id then return redis.error_reply('KVLOST the store is gone') end
end

local function read_entry(key, node)
  local packed = redis.call('HGET', beside(key, 'n'), node)
  if not packed then return nil end
  local e = cmsgpack.unpack(packed)
  return {token = e[1], epoch = e[2], seq = e[3], saved_ms = e[4], record = e[5], holders = e[6], fenced = e[7], change = e[8]}
end

local function write_entry(key, node, e)
  redis.call('HSET', beside(key, 'n'), node,
    cmsgpack.pack({e.token, e.epoch, e.seq, e.saved_ms, e.record, e.holders, e.fenced, e.change}))
end

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function changed(key, holders, nonce)
  local version = number_of(count_of(redis.call('HGET', key, 'version')) + 1, nonce)
  redis.call('HSET', key, 'version', version)
  redis.call('RPUSH', beside(key, 'c'), version .. ' ' .. holders)
  redis.call('LTRIM', beside(key, 'c'), -CHANGES, -1)
end

-- The roster is evicted as a whole, so one holder shows whether ours were.
local function are_listed(key, holders)
  return holders == '' or redis.call('HEXISTS', beside(key, 'h'), holders:sub(1, 4)) == 1
end

-- The entry of a node whose writer has this token, or nil and the error. args: store id, node, token, number of this change of
-- the roster (of the newest one when this is none), the newest number confirmed to the writer.
local function own_entry(key, args)
  local gone = is_gone(key, args[1])
  if gone then return nil, gone end
  local e = read_entry(key, args[2])
  if e and tonumber(e.token) > tonumber(args[3]) then return nil, redis.error_reply('KVFENCED a newer writer has the node') end
  if not e or e.token ~= args[3] then return nil, redis.error_reply('KVLOST the store does not know the writer') end
  if e.change < tonumber(args[5]) or not are_listed(key, e.holders) then
    return nil, redis.error_reply('KVLOST acknowledged changes of the roster are gone')
  end
  if e.change > tonumber(args[4]) then return nil, redis.error_reply('KVLATE a later change was made') end
  e.change = tonumber(args[4])
  return e
end

local function owned(entry)
  local own = {}
  for i = 1, #entry.holders, 4 do own[entry.holders:sub(i, i + 3)] = true end
  return own
end

local function unlist(key, holders)
  for i = 1, #holders, 4 do redis.call('HDEL', beside(key, 'h'), holders:sub(i, i + 3)) end
end

-- args: schema, id, seed, shards. Makes the store if there is none. Returns what there is: {schema, id, seed, shards}.
local function make(keys, args)
  if redis.call('EXISTS', keys[1]) == 0 then
    redis.call('UNLINK', beside(keys[1], 'n'), beside(keys[1], 'h'), beside(keys[1], 'c'), beside(keys[1], 'd'))
    redis.call('HSET', keys[1], 'schema', args[1], 'id', args[2], 'seed', args[3], 'shards', args[4], 'token', 0, 'version', 0)
  end
  local r = redis.call('HMGET', keys[1], 'schema', 'id', 'seed', 'shards')
  for i = 1, 4 do r[i] = r[i] or '' end
  return r
end

-- args: store id, node, epoch, a token that is too low, nonce. Returns {token, seq or -1, record, (holder, its record) ...}.
local function take(keys, args)
  local key, node, epoch, low, nonce = keys[1], args[2], args[3], args[4], args[5]
  local gone = is_gone(key, args[1])
  if gone then return gone end
  local e = read_entry(key, node) or {epoch = epoch, seq = -1, saved_ms = now_ms(), record = '', holders = '', fenced = ''}
  if e.epoch ~= epoch then
    for i = 1, #e.fenced, 8 do
      if e.fenced:sub(i, i + 7) == epoch then return redis.error_reply('KVFENCED a newer epoch of the node is known') end
    end
    unlist(key, e.holders)
    if e.holders ~= '' then changed(key, e.holders, nonce) end
    e.fenced = (e.epoch .. e.fenced):sub(1, 8 * FENCED)
    e.epoch, e.seq, e.record, e.holders = epoch, -1, '', ''
  end
  if not are_listed(key, e.holders) then
    changed(key, e.holders, nonce)
    e.seq, e.holders = -1, ''
  end
  e.change = 0
  e.token = number_of(math.max(count_of(redis.call('HGET', key, 'token')), count_of(low)) + 1, nonce)
  redis.call('HSET', key, 'token', e.token)
  write_entry(key, node, e)
  local out = {e.token, e.seq, e.record}
  for i = 1, #e.holders, 4 do
    local holder = e.holders:sub(i, i + 3)
    out[#out + 1], out[#out + 2] = holder, redis.call('HGET', beside(key, 'h'), holder)
  end
  return out
end

-- args: those of own_entry, seq or -1 to keep it, "1" if there is a record, record.
local function save(keys, args)
  local e, refused = own_entry(keys[1], args)
  if refused then return refused end
  if args[6] ~= '-1' then e.seq = tonumber(args[6]) end
  if args[7] == '1' then e.record = args[8] end
  e.saved_ms = now_ms()
  write_entry(keys[1], args[2], e)
  return 1
end

-- args: store id, node, token, nonce. Returns whether the token was still that of the writer.
local function forget(keys, args)
  local gone = is_gone(keys[1], args[1])
  if gone then return gone end
  local e = read_entry(keys[1], args[2])
  if not e or e.token ~= args[3] then return 0 end
  unlist(keys[1], e.holders)
  if e.holders ~= '' then changed(keys[1], e.holders, args[4]) end
  redis.call('HDEL', beside(keys[1], 'n'), args[2])
  return 1
end

-- args: store id. Returns {now in ms, (node, token, epoch, seq, saved_ms, record) ...}.
local function nodes(keys, args)
  local gone = is_gone(keys[1], args[1])
  if gone then return gone end
  local out = {now_ms()}
  for _, node in ipairs(redis.call('HKEYS', beside(keys[1], 'n'))) do
    local e = read_entry(keys[1], node)
    for _, value in ipairs({node, e.token, e.epoch, e.seq, e.saved_ms, e.record}) do out[#out + 1] = value end
  end
  return out
end

-- args: those of own_entry, nonce, visible, then (holder, tier, namespace) ...
local function create(keys, args)
  local key, node, visible = keys[1], args[2], args[7]
  local e, refused = own_entry(key, args)
  if refused then return refused end
  local new, own = '', owned(e)
  for at = 8, #args, 3 do
    if not own[args[at]] and redis.call('HEXISTS', beside(key, 'h'), args[at]) == 1 then
      return redis.error_reply('KVTAKEN a holder number is in use')
    end
  end
  for at = 8, #args, 3 do
    local record = visible .. string.char(tonumber(args[at + 1])) .. e.epoch .. string.char(#args[at + 2]) .. args[at + 2] .. node
    redis.call('HSET', beside(key, 'h'), args[at], record)
    if not own[args[at]] then new = new .. args[at] end  -- again: the caller did not hear of the first time
  end
  e.holders = e.holders .. new
  write_entry(key, node, e)
  changed(key, new, args[6])
  return 1
end

-- args: those of own_entry, nonce, packed holders to show, packed holders to drop.
local function swap(keys, args)
  local key, show, drop = keys[1], args[7], args[8]
  local e, refused = own_entry(key, args)
  if refused then return refused end
  local own = owned(e)
  for i = 1, #show, 4 do
    if not own[show:sub(i, i + 3)] then return redis.error_reply('KVLOST a holder to show is not listed') end
  end
  for i = 1, #show, 4 do
    local holder = show:sub(i, i + 3)
    redis.call('HSET', beside(key, 'h'), holder, '1' .. redis.call('HGET', beside(key, 'h'), holder):sub(2))
  end
  for i = 1, #drop, 4 do
    local holder = drop:sub(i, i + 3)
    if own[holder] then
      own[holder] = nil
      redis.call('HDEL', beside(key, 'h'), holder)
    end
  end
  local left = {}
  for holder in pairs(own) do left[#left + 1] = holder end
  e.holders = table.concat(left)
  write_entry(key, args[2], e)
  changed(key, show .. drop, args[6])
  return 1
end

-- args: store id, version that the caller has (0: none). Returns {version, whole?, (holder, its record or "") ...}.
local function roster(keys, args)
  local key, since = keys[1], args[2]
  local gone = is_gone(key, args[1])
  if gone then return gone end
  local version = redis.call('HGET', key, 'version')
  local newer = count_of(version) - count_of(since)
  local changes = (since ~= '0' and newer >= 0) and redis.call('LRANGE', beside(key, 'c'), -newer - 1, -1) or {}
  if #changes == newer + 1 and changes[1]:match('^%d+') == since then
    local out = {version, 0}
    for at = 2, #changes do
      local holders = changes[at]:match('^%d+ (.*)$')
      for i = 1, #holders, 4 do
        local holder = holders:sub(i, i + 3)
        out[#out + 1], out[#out + 2] = holder, redis.call('HGET', beside(key, 'h'), holder) or ''
      end
    end
    return out
  end
  local out = redis.call('HGETALL', beside(key, 'h'))
  table.insert(out, 1, version)
  table.insert(out, 2, 1)
  return out
end

-- args: store id, digest, record.
local function put_namespace(keys, args)
  local gone = is_gone(keys[1], args[1])
  if gone then return gone end
  return redis.call('HSET', beside(keys[1], 'd'), args[2], args[3])
end

-- args: store id. Returns (digest, record) ...
local function namespaces(keys, args)
  local gone = is_gone(keys[1], args[1])
  if gone then return gone end
  return redis.call('HGETALL', beside(keys[1], 'd'))
end

-- So little that it is written also when memory is short.
redis.register_function{function_name = 'LIBRARY_make', callback = make, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_take', callback = take, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_save', callback = save, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_forget', callback = forget, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_create', callback = create, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_swap', callback = swap, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_put_namespace', callback = put_namespace, flags = {'allow-oom'}}
redis.register_function{function_name = 'LIBRARY_nodes', callback = nodes, flags = {'no-writes'}}
redis.register_function{function_name = 'LIBRARY_roster', callback = roster, flags = {'no-writes'}}
redis.register_function{function_name = 'LIBRARY_namespaces', callback = namespaces, flags = {'no-writes'}}
