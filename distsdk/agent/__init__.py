"""One process per node, which never imports torch and never unpickles: it starts workers and passes messages on.

__main__: the loop      node_run: one run's workers here      starters: fork or exec      forkserver: the forking side

driver --Open(socket)--> agent --Fork--> forkserver --fork--> worker
"""
