-- Makes the namespace ours where it is empty. ARGV: 3 the schema this program knows. Answers the schema that was there, 0
-- for none; -1 where a key of ours is somebody else's.
local meta = call('TYPE', P .. 'meta').ok
if meta ~= 'none' and meta ~= 'hash' then
    return -1
end
local schema = call('HGET', P .. 'meta', 'schema')
if not schema then
    call('HSET', P .. 'meta', 'schema', ARGV[3], 'created', NOW)
    return 0
end
return tonumber(schema) or -1
