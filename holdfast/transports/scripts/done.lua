-- QUEUE, NUMBER and that many receipts: whatever they stood for is settled.
groups(2, function(queue, from, to)
    pieces(from, to, function(first, last)
        drop(of(READY, queue), {unpack(ARGV, first, last)})
    end)
end)
