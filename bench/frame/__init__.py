"""How benches measure: programs, ways to run them, processes of their own, floors, tables, comparisons, pictures."""
