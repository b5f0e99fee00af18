-- QUEUE, NUMBER: the ids that are to be taken next.
return head(ARGV[2], tonumber(ARGV[3]))
