"""Orders, and the jobs that confirm them."""
