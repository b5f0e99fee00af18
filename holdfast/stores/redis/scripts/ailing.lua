-- For the doctor: leases that ended over a minute ago, and what odd things scripts have met.
local overdue = ours('ZCOUNT', LEASES, '-inf', int(now - 60000000))
local met = call('HMGET', P .. 'meta', 'orphans', 'foreign')
return { overdue, { number(met[1]), number(met[2]) } }
