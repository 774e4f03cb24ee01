"""Around the algorithms: grids of runs, tables and figures, films, copies of shared code."""
