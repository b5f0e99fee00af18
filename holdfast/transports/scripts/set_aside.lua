-- QUEUE, NUMBER and that many receipts: these messages hold no id.
groups(2, function(queue, from, to)
    for at = from, to do
        set_aside(queue, ARGV[at])
    end
end)
