"""Jobs in PostgreSQL: any number of workers and submitters on any number of hosts."""
