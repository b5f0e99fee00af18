-- QUEUE, NUMBER and that many receipts: somebody still works on what they stand for.
groups(2, function(queue, from, to)
    local key = of(READY, queue)
    pieces(from, to, function(first, last)
        local words = {unpack(ARGV, first, last)}
        words[#words + 1] = 'JUSTID'
        ask('XCLAIM', key, GROUP, ME, 0, unpack(words))
    end)
end)
