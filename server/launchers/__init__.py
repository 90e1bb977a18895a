"""Starting the processes of runs, following them over restarts of the server, and ending what was started and nothing else."""
