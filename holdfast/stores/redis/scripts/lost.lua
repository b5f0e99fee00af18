-- Whether a job that was acknowledged is there no more, although nobody removed it: the numbers of submission end before it,
-- or its own was given again. ARGV: 3 its number, 4 its id. Answers how many are lost that nobody has told of, and 0 where the
-- caller is to forget this one. Numbers go on behind what was lost: so the next loss is seen, and one that takes this telling
-- with it is told anew.
even_if_full()
local seq, known = number(ours('GET', P .. 'seq')), number(ARGV[3])
local lost, stands = 0, 1
if seq < known then
    lost = known - seq
    call('SET', P .. 'seq', ARGV[3])
else
    local there = ours('HGET', index_of(known), ARGV[3])
    if there and there ~= ARGV[4] then
        lost, stands = 1, 0
    end
end
if lost > 0 then
    odd.lost = lost
end
finish()
return { lost, stands }
