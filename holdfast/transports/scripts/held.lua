-- QUEUE, MOST: every id that waits; nothing where there are more than so many.
if length(ARGV[2]) > tonumber(ARGV[3]) then return false end
return held(ARGV[2], ARGV[3])
