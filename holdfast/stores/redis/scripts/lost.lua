-- Whether a job that was acknowledged is there no more, although nobody removed it: the numbers of submission began again
-- before it. ARGV: 3 its number, 4 its id. Answers how many are lost that nobody has told of; `lost_to` is up to where that was.
local seq, known = number(ours('GET', P .. 'seq')), number(ARGV[3])
local told = number(ours('HGET', P .. 'meta', 'lost_to'))
local there = ours('HGET', index_of(known), ARGV[3])
local lost = 0
if seq < known then
    lost = math.max(0, known - math.max(seq, told))
elseif there and there ~= ARGV[4] and known > told then
    lost = 1
end
if lost > 0 then
    call('HSET', P .. 'meta', 'lost_to', ARGV[3])
    odd.lost = lost
end
finish()
return lost
