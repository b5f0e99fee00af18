"""Mutation tests of guards: ``make mutants`` takes each guard out of the code, one at a time, and runs its tests.

guards.py         the mutant, and the files whose guards are taken out
python_guards.py  guards of Python modules, by their syntax tree
sql_guards.py     predicates and locks of SQL statements, by sqlglot's tokens
lua_guards.py     conditions and returns of Lua scripts, by tree-sitter
recorder.py       pytest plugin: which test reaches which place
server.py         pytest plugin: runs tests on a mutant in a fork of a process that has collected them all
runner.py         chooses mutants and tests, runs them in parallel, keeps the results
equivalent.toml   survivors that change no promise, each with its reason and its second reader
"""
